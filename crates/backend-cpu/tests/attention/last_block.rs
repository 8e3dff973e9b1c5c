//! The last block of a forward pass: outputs that its tasks write.

use std::sync::Arc;

use annulus_core::{
    Backend, Block, CpuWorkspace, DType, Dims, Element, ForwardPass, HostBuffer, Layout, Outputs,
    Passes, RowSet, SinkShape, Spec, mask,
};
use annulus_cpu::Cpu;
use half::bf16;
use ndarray::{Array2, Array4, s};

use crate::{
    ranks::{LastCall, Rank, keep_going},
    support::{Case, Random},
};

/// Not whole tiles, and enough rows for narrow tasks on two ranks: the 512 queries in the middle of
/// a rank attend to at most 704 keys, which must be at most half of the rank's keys.
const LEN: usize = 2900;

fn dims() -> Dims {
    Dims { q_heads: 4, value_dim: 9, ..Dims::new(2, LEN, 2, 12) }
}

fn window() -> mask::SharedMask {
    Arc::new(mask::Window::new(Some(100), Some(3)))
}

/// Documents of 150 rows, with padding between them.
fn with_documents(mut case: Case) -> Case {
    let ids = Array2::from_shape_fn((2, LEN), |(batch, row)| {
        if row % 150 < 10 { -1 } else { (batch + row / 150) as i32 }
    });
    case.batch.q_segment_ids = Some(ids.clone());
    case.batch.kv_segment_ids = Some(ids);
    case
}

fn check<E: Element<Accumulator: PartialEq> + PartialEq>(case: &Case, name: &str) {
    for (threads, ranks) in [(1, 1), (3, 1), (1, 2)] {
        let cpu = Cpu::new(threads).unwrap();
        let run = |call| case.forward_outputs::<E>(&cpu, &Layout::Contiguous, ranks, call).unwrap();
        assert!(
            run(LastCall::AttendLast) == run(LastCall::Attend),
            "{name}, {threads} threads, {ranks} ranks"
        );
    }
}

#[test]
fn outputs_that_tasks_write_have_the_bits_of_the_epilogue() {
    let spec = |dtype| Spec { mask: window(), ..Spec::new(dims(), dtype) };
    let random = &mut Random(5);
    check::<f32>(&Case::new(spec(DType::F32), random), "window");
    check::<f64>(&Case::new(spec(DType::F64), random), "f64");
    check::<bf16>(&Case::new(spec(DType::Bf16), random), "bf16");
    let sinks = Some(SinkShape { per_head: true, count: 2 });
    check::<f32>(&Case::new(Spec { sinks, ..spec(DType::F32) }, random), "sinks");
    let unnormalised = Spec { normalize: false, sinks, ..spec(DType::F32) };
    check::<f32>(&Case::new(unnormalised, random), "unnormalised");
    check::<f32>(&with_documents(Case::new(spec(DType::F32), random)), "documents");
    let causal = Spec { mask: Arc::new(mask::Causal::default()), ..spec(DType::F32) };
    check::<f32>(&Case::new(causal, random), "a wide mask");
}

#[test]
fn narrow_tasks_write_outputs_before_the_epilogue() {
    let spec = Spec { mask: window(), ..Spec::new(dims(), DType::F32) };
    let case = Case::new(spec, &mut Random(6));
    let want = &case
        .forward_outputs::<f32>(&Cpu::new(1).unwrap(), &Layout::Contiguous, 1, LastCall::Attend)
        .unwrap()[0];
    let rank = Rank::<f32>::new(&case, &Layout::Contiguous, 0, 1).unwrap();
    let mut workspace = Cpu::new(1).unwrap().workspace(&rank.shard, Passes::Forward).unwrap();
    let mut pass = workspace.forward(rank.inputs(), &mut keep_going).unwrap();
    let mut buffer = HostBuffer::zeroed(0).unwrap();
    pass.local_kv(&mut buffer, &RowSet::new()).unwrap();
    // rows of out with gaps, in reversed order, and not of contiguous elements
    let mut memory = Array4::from_elem((2, 2 * LEN, 4, 18), 7f32);
    let mut out = memory.slice_mut(s![.., ..;-2, .., ..;2]);
    let mut lse = rank.lse.clone();
    let outputs = &mut Outputs {
        out: Element::view_mut(out.view_mut()),
        lse: Element::view_mut(lse.view_mut()),
        max: None,
        sum: None,
        ties: None,
        out_residual: None,
    };
    let rows = &rank.shard.keys;
    let block = Block { buffer: &buffer, ready: &(), rows, first_local: Some(0) };
    pass.attend_last(&block, outputs, &mut keep_going).unwrap();
    // the accumulators are gone
    assert!(pass.attend(&block, &mut keep_going).is_err());
    assert!(pass.attend_last(&block, outputs, &mut keep_going).is_err());
    assert!(out == want.0 && lse == want.1);
    assert!(memory.slice(s![.., ..;2, .., ..]).iter().all(|&gap| gap == 7.0));
}
