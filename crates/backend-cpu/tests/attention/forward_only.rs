//! Forward-only workspaces: split-KV decode, narrow masks, keys read in place.
//!
//! The last block of a forward pass: outputs that its tasks write.

use std::sync::Arc;

use annulus_core::{
    Backend, Block, DType, Dims, Dropout, Element, ForwardPass, HostBuffer, Passes, RowSet,
    SinkShape, Spec, Workspace, mask,
};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;
use annulus_test_cases::{Answer, Case, Draw};
use half::bf16;
use ndarray::{Array2, Array3, Array4, s};

use crate::{
    ranks::{LastCall, LocalKv, OnRanks, Rank, keep_going, outputs},
    support::{self, assert_close},
};

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// Compares out and lse with `want`.
fn assert_outputs(
    (out, lse): &(Array4<f64>, Array3<f64>),
    want: &Answer,
    tolerance: f64,
    what: &str,
) {
    assert_close(&Answer { out: out.clone(), ..want.clone() }, want, tolerance, what);
    assert_close(&Answer { lse: lse.clone(), ..want.clone() }, want, 2e-5, what);
}

/// A case of few queries with enough keys for several splits.
fn long(seed: u64, dtype: DType) -> Case {
    let q_len = [1, 3, 7, 12, 2][seed as usize % 5];
    let dims = Dims {
        q_len,
        kv_len: 1500,
        q_heads: 4,
        value_dim: [16, 9][seed as usize % 2],
        ..Dims::new(2, 0, 2, [20, 64][seed as usize / 2 % 2])
    };
    let mut spec = Spec::new(dims, dtype);
    spec.alignment = annulus_core::Alignment::BottomRight;
    spec.soft_cap = (seed % 4 == 1).then_some(3.0);
    spec.dropout = (seed % 4 == 2).then_some(Dropout { probability: 0.3, seed });
    spec.sinks = (seed % 3 == 1).then_some(SinkShape { per_head: true, count: 2 });
    spec.bias = match seed % 5 {
        0 => Some([2, 4, q_len, 1500]),
        1 => Some([1, 1, 1, 1500]),
        2 => Some([1, 4, q_len, 1500]),
        3 => None,
        _ => Some([2, 1, q_len, 1]),
    };
    spec.mask = match seed % 3 {
        0 => Arc::new(mask::Everything),
        1 => Arc::new(mask::Causal::default()),
        _ => mask::and(
            Arc::new(mask::Causal::default()),
            Arc::new(mask::Window::new(Some(700), None)),
        ),
    };
    support::case(spec, &mut Draw::new(seed))
}

#[test]
fn any_features_forward_only() {
    for seed in 0..60 {
        let case = support::any_features(seed, if seed % 2 == 0 { DType::F32 } else { DType::F64 });
        let want = support::oracle(&case);
        for isa in isas() {
            let cpu = Cpu::new(2).unwrap().with_isa(isa).unwrap();
            let ranks = 1 + seed as usize % 3;
            let got = case.run_forward(&cpu, &Layout::Striped, ranks, LocalKv::Inputs).unwrap();
            assert_outputs(&got, &want, 2e-5, &format!("seed {seed} {isa}"));
        }
    }
}

#[test]
fn few_queries_over_many_keys() {
    for (seed, dtype) in
        (0..12).zip([DType::F32, DType::Bf16, DType::F64, DType::F16].into_iter().cycle())
    {
        let case = long(seed, dtype);
        let want = support::oracle(&case);
        let tolerance =
            [(DType::F64, 1e-11), (DType::F32, 1e-5), (DType::F16, 2e-3), (DType::Bf16, 1e-2)];
        let tolerance = tolerance.into_iter().find(|(of, _)| *of == dtype).unwrap().1;
        for isa in isas() {
            let run = |threads, ranks, local_kv| {
                let cpu = Cpu::new(threads).unwrap().with_isa(isa).unwrap();
                case.run_forward(&cpu, &Layout::Contiguous, ranks, local_kv).unwrap()
            };
            let alone = run(1, 1, LocalKv::Inputs);
            assert_outputs(&alone, &want, tolerance, &format!("seed {seed} {isa}"));
            // in place or packed, on any number of threads
            assert!(
                run(1, 1, LocalKv::Records) == alone
                    && run(2, 1, LocalKv::Inputs) == alone
                    && run(5, 1, LocalKv::Records) == alone,
                "seed {seed} {isa}"
            );
            let two = run(2, 2, LocalKv::Records);
            assert_outputs(&two, &want, tolerance, &format!("seed {seed} {isa}, two ranks"));
        }
    }
}

#[test]
fn few_queries_propagate_only_visible_nans() {
    for (dtype, biased) in [(DType::F32, false), (DType::F32, true), (DType::F64, false)] {
        let mut clean = long(3, dtype);
        if biased {
            // hides a key from query head 2 alone
            let mut bias = Array4::zeros((1, 4, 1, 1500));
            bias[[0, 2, 0, 900]] = f64::NEG_INFINITY;
            clean.spec.bias = Some([1, 4, 1, 1500]);
            clean.bias = Some(bias);
        }
        let ids =
            |len: usize| Array2::from_shape_fn((2, len), |(_, i)| if i % 7 == 3 { -1 } else { 0 });
        let q_len = clean.spec.dims.q_len;
        clean.batch.q_segment_ids = Some(Array2::zeros((2, q_len)));
        clean.batch.kv_segment_ids = Some(ids(1500));
        let mut poisoned = clean.clone();
        for j in (3..1500).step_by(7) {
            poisoned.k.slice_mut(s![.., j, .., ..]).fill(f64::NAN);
            poisoned.v.slice_mut(s![.., j, .., ..]).fill(f64::INFINITY);
        }
        let mut with_nan = clean.clone();
        with_nan.v[[1, 900, 1, 2]] = f64::NAN;
        for isa in isas() {
            let run = |case: &Case| {
                case.run_forward(
                    &Cpu::new(2).unwrap().with_isa(isa).unwrap(),
                    &Layout::Contiguous,
                    1,
                    LocalKv::Inputs,
                )
                .unwrap()
            };
            let want = run(&clean);
            assert!(run(&poisoned) == want);
            let (out, lse) = run(&with_nan);
            assert!(lse == want.1);
            for ((index, got), want) in out.indexed_iter().zip(&want.0) {
                // query heads 2 and 3 read KV head 1
                let (b, _, head, element) = index;
                let visible = b == 1 && (head == 3 || head == 2 && !biased) && element == 2;
                assert!(if visible { got.is_nan() } else { got == want }, "{index:?} {biased}");
            }
        }
    }
}

#[test]
fn narrow_masks_use_row_major_tasks_and_give_the_same_bits() {
    let len = 1300;
    let dims = Dims { q_heads: 4, ..Dims::new(2, len, 2, 20) };
    for documents in [false, true] {
        let mut spec = Spec::new(dims, DType::F32);
        let window = mask::Window::new(Some(100), Some(3));
        spec.mask = if documents { Arc::new(mask::Causal::default()) } else { Arc::new(window) };
        let mut case = support::case(spec, &mut Draw::new(7));
        if documents {
            let ids = Array2::from_shape_fn((2, len), |(_, i)| (i / 300) as i32);
            case.batch.q_segment_ids = Some(ids.clone());
            case.batch.kv_segment_ids = Some(ids);
        }
        for isa in isas() {
            let cpu = |threads| Cpu::new(threads).unwrap().with_isa(isa).unwrap();
            // a workspace with a backward pass arranges its tasks head by head
            let want = case.run(&|| Ok(cpu(2)), &Layout::Contiguous, 1).unwrap();
            for threads in [1, 3] {
                let (out, lse) = case
                    .run_forward(
                        &cpu(threads),
                        &Layout::Contiguous,
                        1,
                        if threads == 1 { LocalKv::Inputs } else { LocalKv::Records },
                    )
                    .unwrap();
                assert!(
                    out == want.out && lse == want.lse,
                    "{isa}, {threads} threads, documents {documents}"
                );
            }
        }
    }
}

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
    let random = &mut Draw::new(5);
    check::<f32>(&support::case(spec(DType::F32), random), "window");
    check::<f64>(&support::case(spec(DType::F64), random), "f64");
    check::<bf16>(&support::case(spec(DType::Bf16), random), "bf16");
    let sinks = Some(SinkShape { per_head: true, count: 2 });
    check::<f32>(&support::case(Spec { sinks, ..spec(DType::F32) }, random), "sinks");
    let unnormalised = Spec { normalize: false, sinks, ..spec(DType::F32) };
    check::<f32>(&support::case(unnormalised, random), "unnormalised");
    check::<f32>(&with_documents(support::case(spec(DType::F32), random)), "documents");
    let causal = Spec { mask: Arc::new(mask::Causal::default()), ..spec(DType::F32) };
    check::<f32>(&support::case(causal, random), "a wide mask");
}

#[test]
fn narrow_tasks_write_outputs_before_the_epilogue() {
    let spec = Spec { mask: window(), ..Spec::new(dims(), DType::F32) };
    let case = support::case(spec, &mut Draw::new(6));
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
    let outputs = &mut outputs(out.view_mut(), &mut lse);
    let rows = &rank.shard.keys;
    let block = Block { buffer: &buffer, ready: &(), rows, first_local: Some(0) };
    pass.attend_last(&block, outputs, &mut keep_going).unwrap();
    // the accumulators are gone
    assert!(pass.attend(&block, &mut keep_going).is_err());
    assert!(pass.attend_last(&block, outputs, &mut keep_going).is_err());
    assert!(out == want.0 && lse == want.1);
    assert!(memory.slice(s![.., ..;2, .., ..]).iter().all(|&gap| gap == 7.0));
}
