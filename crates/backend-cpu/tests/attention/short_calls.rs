//! Short calls: rows that are read in place, and packed queries that a pass keeps.

use std::sync::Arc;

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, DType, Dims, Element, ForwardPass,
    HostBuffer, HostView, Inputs, Passes, Spec, Workspace, mask,
};
use annulus_cpu::Cpu;
use annulus_test_cases::Draw;
use ndarray::{Array4, ArrayView4, Axis, s};

use crate::{
    self as support,
    ranks::{LocalKv, Rank, RankGradients, keep_going, outputs},
};

/// Whole register tiles in both directions, so that rows can be read in place; two query heads and
/// two tiles of queries per KV head.
fn dims() -> Dims {
    Dims { q_heads: 4, value_dim: 24, ..Dims::new(1, 128, 2, 16) }
}

fn rank() -> Rank {
    let spec = Spec { mask: Arc::new(mask::Causal::default()), ..Spec::new(dims(), DType::F32) };
    Rank::new(&support::case(spec, &mut Draw::new(31))).unwrap()
}

/// Bits of out, lse, dq, dk and dv of a pass over the rank's own keys, forward and backward.
type Bits = [Vec<u32>; 5];

fn bits(array: &Array4<f32>) -> Vec<u32> {
    // the sign and payload of NaN are unspecified
    array.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Runs both passes `passes` times in one workspace, with q of the passes before the last scaled.
/// With `reversed`, the vectors of q, k, v and dO lie backwards in memory, so that they are packed.
fn run(cpu: &Cpu, rank: &Rank, passes: usize, reversed: bool) -> annulus_core::Result<Bits> {
    let mut workspace = cpu.workspace(&rank.shard, Passes::Both)?;
    let layout = &rank.shard.spec;
    let mut kv = rank.keys_buffer(layout.kv_row_layout())?;
    let mut dkv = rank.keys_buffer(layout.gradient_row_layout())?;
    let stored = |array: &Array4<f32>| match reversed {
        true => array.slice(s![.., .., .., ..;-1]).as_standard_layout().into_owned(),
        false => array.clone(),
    };
    let [k, v, dout] = [&rank.k, &rank.v, &rank.dout].map(stored);
    let mut last = Bits::default();
    for pass in 0..passes {
        let factor = 1.0 + (passes - 1 - pass) as f32;
        let q = stored(&(&rank.q * factor));
        let view = |array| -> ArrayView4<'_, f32> {
            let array: &Array4<f32> = array;
            if reversed { array.slice(s![.., .., .., ..;-1]) } else { array.view() }
        };
        let inputs = Inputs::new(&q, &k, &v).map(|tensor| Element::view(view(tensor)));
        // rows of a tensor, as a rank alone reads its keys
        let local_kv = if reversed { LocalKv::Inputs } else { LocalKv::Records };
        let [mut out, mut lse] = [rank.out.clone(), rank.lse.clone()];
        forward(&mut workspace, rank, (&inputs, local_kv), &mut kv, [&mut out, &mut lse])?;
        let inputs = BackwardInputs {
            forward: inputs,
            out: Element::view(out.view()),
            max: Element::view(lse.view()),
            sum: None,
            ties: None,
            dout: Element::view(view(&dout)),
            dlse: None,
            out_residual: None,
        };
        let mut backward = workspace.backward(inputs, BackwardMode::OnePass, &mut keep_going)?;
        backward.local_kv(&mut kv, &local_kv.sent(rank.shard.keys.len()))?;
        let first_local = local_kv.first_local();
        let block = Block { buffer: &kv, ready: &(), rows: &rank.shard.keys, first_local };
        backward.attend_kv(&block, Some(&mut dkv), &mut keep_going)?;
        let RankGradients { dq, dk, dv, .. } =
            rank.finish_backward(backward, &dkv, &mut keep_going)?;
        last = [&out, &lse, &dq, &dk, &dv].map(bits);
    }
    Ok(last)
}

/// A forward pass in two calls of the same block, of which the first keeps packed queries.
fn forward(
    workspace: &mut annulus_cpu::CpuWorkspace,
    rank: &Rank,
    (inputs, local_kv): (&annulus_core::Inputs<HostView<'_>>, LocalKv),
    kv: &mut HostBuffer,
    [out, lse]: [&mut Array4<f32>; 2],
) -> annulus_core::Result<()> {
    let mut pass = workspace.forward(inputs.as_ref().map(HostView::reborrow), &mut keep_going)?;
    pass.local_kv(kv, &local_kv.sent(rank.shard.keys.len()))?;
    let first_local = local_kv.first_local();
    let block = Block { buffer: kv, ready: &(), rows: &rank.shard.keys, first_local };
    let mut outputs = outputs(out, lse);
    pass.attend(&block, &mut keep_going)?;
    pass.attend_last(&block, &mut outputs, &mut keep_going)?;
    pass.finish(&mut outputs, &mut keep_going)
}

#[test]
fn rows_in_place_have_the_bits_of_packed_ones() {
    for threads in [1, 2] {
        let cpu = Cpu::new(threads).unwrap();
        assert!(run(&cpu, &rank(), 1, false).unwrap() == run(&cpu, &rank(), 1, true).unwrap());
    }
}

#[test]
fn masked_rows_in_place_that_are_not_finite_have_no_effect() {
    let cpu = Cpu::new(1).unwrap();
    // (tensor, row): late keys and values are masked for early queries, early queries for late keys
    for (tensor, row) in [(0, 3), (1, 127), (2, 127), (1, 70), (2, 70), (3, 5)] {
        let mut rank = rank();
        let [q, k, v, dout] = [&mut rank.q, &mut rank.k, &mut rank.v, &mut rank.dout];
        [q, k, v, dout][tensor].index_axis_mut(Axis(1), row).fill(f32::INFINITY);
        let in_place = run(&cpu, &rank, 1, false).unwrap();
        assert!(in_place == run(&cpu, &rank, 1, true).unwrap(), "tensor {tensor} row {row}");
        // a query before the key, and a key behind the query, are finite
        let [out, _, dq, dk, dv] = &in_place;
        let of_row = |bits: &[u32], row: usize| -> bool {
            let len = bits.len() / 128;
            bits[row * len..(row + 1) * len].iter().all(|&bits| f32::from_bits(bits).is_finite())
        };
        match tensor {
            1 | 2 => assert!(of_row(out, row - 1) && of_row(dq, row - 1), "{tensor} {row}"),
            _ => assert!(of_row(dk, row + 1) && of_row(dv, row + 1), "{tensor} {row}"),
        }
    }
}

#[test]
fn a_pass_does_not_use_the_queries_of_the_pass_before() {
    let rank = rank();
    for threads in [1, 2] {
        let cpu = Cpu::new(threads).unwrap();
        assert!(run(&cpu, &rank, 3, false).unwrap() == run(&cpu, &rank, 1, false).unwrap());
    }
}
