//! The seam: strides, errors, stops.

use std::ops::ControlFlow;

use annulus_core::{
    Backend, BackwardMode, BackwardPass, Block, DType, Dims, Element, Error, ForwardPass, Host,
    HostBuffer, HostView, Inputs, Passes, RowSet, SinkShape, Spec, Workspace,
};
use annulus_cpu::{Cpu, CpuBackward, CpuForward, CpuWorkspace};
use annulus_plan::Layout;
use annulus_test_cases::Draw;
use ndarray::{Array4, s};

use crate::{
    self as support, assert_close,
    ranks::{LocalKv, OnRanks, Rank, keep_going, outputs},
};

fn forward(
    cpu: &Cpu,
    rank: &Rank,
    inputs: &Inputs<HostView<'_>>,
) -> annulus_core::Result<(Array4<f32>, Array4<f32>)> {
    forward_of(cpu, rank, inputs, LocalKv::Records)
}

fn forward_of(
    cpu: &Cpu,
    rank: &Rank,
    inputs: &Inputs<HostView<'_>>,
    local_kv: LocalKv,
) -> annulus_core::Result<(Array4<f32>, Array4<f32>)> {
    let mut workspace = cpu.workspace(&rank.shard, Passes::Forward)?;
    let mut buffer = kv_buffer(rank);
    let mut pass = workspace.forward(inputs.as_ref().map(HostView::reborrow), &mut keep_going)?;
    pass.local_kv(&mut buffer, &local_kv.sent(rank.shard.keys.len()))?;
    let rows = &rank.shard.keys;
    let block = Block { buffer: &buffer, ready: &(), rows, first_local: local_kv.first_local() };
    pass.attend(&block, &mut keep_going)?;
    finish(rank, pass)
}

/// A buffer for the rank's K and V.
fn kv_buffer(rank: &Rank) -> HostBuffer {
    rank.keys_buffer(rank.shard.spec.kv_row_layout()).unwrap()
}

/// The block of all of a rank's keys, in a buffer.
fn block<'a>(buffer: &'a HostBuffer, rank: &'a Rank) -> Block<'a, Host> {
    Block { buffer, ready: &(), rows: &rank.shard.keys, first_local: None }
}

/// Starts a one-pass backward.
fn backward<'p>(workspace: &'p mut CpuWorkspace, rank: &'p Rank) -> CpuBackward<'p> {
    workspace.backward(rank.backward_inputs(), BackwardMode::OnePass, &mut keep_going).unwrap()
}

/// Local keys of a pass that packs all of them.
fn all_keys(rank: &Rank) -> RowSet {
    LocalKv::Records.sent(rank.shard.keys.len())
}

/// Returns out and lse.
fn finish(rank: &Rank, pass: CpuForward<'_>) -> annulus_core::Result<(Array4<f32>, Array4<f32>)> {
    let mut out = rank.out.clone();
    let mut lse = rank.lse.clone();
    pass.finish(&mut outputs(&mut out, &mut lse), &mut keep_going)?;
    Ok((out, lse))
}

fn rank(dims: Dims) -> Rank {
    let case = support::case(Spec::new(dims, DType::F32), &mut Draw::new(11));
    Rank::new(&case).unwrap()
}

#[test]
fn strides_change_no_bit() {
    let rank = rank(Dims { q_heads: 4, ..Dims::new(2, 70, 2, 12) });
    let cpu = Cpu::new(1).unwrap();
    let want = forward(&cpu, &rank, &rank.inputs()).unwrap();
    // [b, heads, dim, len] in memory, every axis reversed
    let scattered = |array: &Array4<f32>| {
        let mut memory =
            array.clone().permuted_axes([0, 2, 3, 1]).as_standard_layout().into_owned();
        memory = memory.slice(s![..;-1, ..;-1, ..;-1, ..;-1]).as_standard_layout().into_owned();
        memory
    };
    let q = scattered(&rank.q);
    let k = scattered(&rank.k);
    let v = scattered(&rank.v);
    let view = |array| -> ndarray::ArrayView4<'_, f32> {
        let array: &Array4<f32> = array;
        array.slice(s![..;-1, ..;-1, ..;-1, ..;-1]).permuted_axes([0, 3, 1, 2])
    };
    assert_eq!(view(&q), rank.q);
    let inputs = Inputs::new(&q, &k, &v).map(|tensor| Element::view(view(tensor)));
    assert_eq!(forward(&cpu, &rank, &inputs).unwrap(), want);
    // with one rank the kernels read k and v in the tensors
    assert_eq!(forward_of(&cpu, &rank, &inputs, LocalKv::Inputs).unwrap(), want);
}

#[test]
fn a_token_reads_a_cache_of_either_order_of_heads_and_rows_with_the_same_bits() {
    let rank = rank(Dims { q_len: 1, kv_len: 700, q_heads: 8, ..Dims::new(2, 0, 2, 36) });
    let cpu = Cpu::new(1).unwrap();
    let heads_first = |array: &Array4<f32>| {
        array.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned()
    };
    let (k, v) = (heads_first(&rank.k), heads_first(&rank.v));
    let inputs = Inputs {
        k: Element::view(k.view().permuted_axes([0, 2, 1, 3])),
        v: Element::view(v.view().permuted_axes([0, 2, 1, 3])),
        ..rank.inputs()
    };
    let want = forward_of(&cpu, &rank, &rank.inputs(), LocalKv::Inputs).unwrap();
    assert_eq!(forward_of(&cpu, &rank, &inputs, LocalKv::Inputs).unwrap(), want);
}

#[test]
fn only_keys_that_other_ranks_read_are_packed() {
    let rank = rank(Dims { q_heads: 4, ..Dims::new(2, 200, 2, 12) });
    let cpu = Cpu::new(2).unwrap();
    let mut workspace = cpu.workspace(&rank.shard, Passes::Forward).unwrap();
    let mut pack = |sent: &RowSet| {
        let mut buffer = kv_buffer(&rank);
        buffer.bytes_mut().unwrap().fill(0x55);
        let mut pass = workspace.forward(rank.inputs(), &mut keep_going).unwrap();
        pass.local_kv(&mut buffer, sent).unwrap();
        buffer.bytes().to_vec()
    };
    let all = pack(&all_keys(&rank));
    let record = all.len() / 200;
    // within a tile, over the edges of tiles, and none
    for ranges in [[3..5, 60..131, 199..200], [0..0, 64..128, 0..0], [0..0, 0..0, 0..0]] {
        let sent: RowSet = ranges.into_iter().collect();
        let some = pack(&sent);
        for (row, (got, want)) in some.chunks(record).zip(all.chunks(record)).enumerate() {
            let want = if sent.contains(row as u64) { want } else { &vec![0x55; record][..] };
            assert!(got == want, "row {row} of {sent:?}");
        }
    }
}

#[test]
fn other_rows_as_local_keys_are_a_typed_error() {
    let rank = rank(Dims::new(1, 70, 1, 4));
    let cpu = Cpu::new(1).unwrap();
    let mut workspace = cpu.workspace(&rank.shard, Passes::Forward).unwrap();
    let buffer = kv_buffer(&rank);
    let mut pass = workspace.forward(rank.inputs(), &mut keep_going).unwrap();
    for first in [1, 70, usize::MAX] {
        let rows = &rank.shard.keys;
        let block = Block { buffer: &buffer, ready: &(), rows, first_local: Some(first) };
        assert_eq!(pass.attend(&block, &mut keep_going).unwrap_err().code(), 46);
    }
}

#[test]
fn a_break_ends_the_call_early() {
    let rank = rank(Dims::new(1, 600, 4, 32));
    for threads in [1, 3] {
        let cpu = Cpu::new(threads).unwrap();
        let mut workspace = cpu.workspace(&rank.shard, Passes::Both).unwrap();
        let mut buffer = kv_buffer(&rank);
        let mut pass = workspace.forward(rank.inputs(), &mut keep_going).unwrap();
        pass.local_kv(&mut buffer, &all_keys(&rank)).unwrap();
        let block = block(&buffer, &rank);
        let mut ticks = 0;
        let mut stop = || {
            ticks += 1;
            ControlFlow::Break(())
        };
        pass.attend(&block, &mut stop).unwrap();
        // no thread continues after a stop; the same workspace then serves a full pass
        assert!(ticks <= threads, "{ticks}");
        let mut pass = workspace.forward(rank.inputs(), &mut keep_going).unwrap();
        pass.attend(&block, &mut keep_going).unwrap();
        let want = forward(&cpu, &rank, &rank.inputs()).unwrap();
        assert_eq!(finish(&rank, pass).unwrap(), want);
    }
}

/// Finishes forward and backward passes of many sinks. Returns the ticks of each.
fn ticks_of_finish(threads: usize, flow: ControlFlow<()>) -> [usize; 2] {
    let mut spec = Spec::new(Dims::new(1, 300, 8, 8), DType::F32);
    spec.sinks = Some(SinkShape { per_head: false, count: 8192 });
    let rank = Rank::new(&support::case(spec, &mut Draw::new(12))).unwrap();
    let cpu = Cpu::new(threads).unwrap();
    let mut workspace = cpu.workspace(&rank.shard, Passes::Both).unwrap();
    let mut ticks = [0; 2];
    let mut out = rank.out.clone();
    let mut lse = rank.lse.clone();
    let outputs = &mut outputs(&mut out, &mut lse);
    let tick = &mut || {
        ticks[0] += 1;
        flow
    };
    workspace.forward(rank.inputs(), &mut keep_going).unwrap().finish(outputs, tick).unwrap();
    let dkv = rank.keys_buffer(rank.shard.spec.gradient_row_layout()).unwrap();
    let tick = &mut || {
        ticks[1] += 1;
        flow
    };
    rank.finish_backward(backward(&mut workspace, &rank), &dkv, tick).unwrap();
    ticks
}

#[test]
fn passes_of_many_sinks_tick_while_they_finish() {
    for threads in [1, 3] {
        // 20 million pairs of rows, heads and sinks: 40 strips of about 1 ms in 5 ranges of rows
        let ticks = ticks_of_finish(threads, ControlFlow::Continue(()));
        assert!(ticks.iter().all(|&ticks| ticks >= 12), "{threads} threads: {ticks:?}");
        // a stop: at most one tick for each of the four parts of a backward pass
        let ticks = ticks_of_finish(threads, ControlFlow::Break(()));
        assert!(ticks[0] <= 1 && ticks[1] <= 4, "{threads} threads: {ticks:?}");
    }
}

/// Finishes a backward pass with a bias of this shape. Returns its ticks.
fn ticks_of_bias(shape: [usize; 4], flow: ControlFlow<()>) -> usize {
    let mut spec = Spec::new(Dims::new(1, 300, 8, 8), DType::F32);
    spec.bias = Some(shape);
    let rank = Rank::new(&support::case(spec, &mut Draw::new(13))).unwrap();
    let mut workspace = Cpu::new(1).unwrap().workspace(&rank.shard, Passes::Both).unwrap();
    let dkv = rank.keys_buffer(rank.shard.spec.gradient_row_layout()).unwrap();
    let mut ticks = 0;
    let tick = &mut || {
        ticks += 1;
        flow
    };
    let gradients = rank.finish_backward(backward(&mut workspace, &rank), &dkv, tick).unwrap();
    let is_zero = gradients.dbias.iter().flatten().all(|&sum| sum == 0.0);
    assert_eq!(is_zero, flow.is_continue(), "no pair was attended to");
    ticks
}

#[test]
fn a_pass_ticks_while_it_writes_the_gradient_of_a_bias() {
    // 5 tiles of 300 queries in each of 8 heads
    let shape = [1, 8, 300, 300];
    let ticks = ticks_of_bias(shape, ControlFlow::Continue(()));
    assert!(ticks >= 40, "{ticks}");
    // a stop: at most one tick for each of the four parts of a backward pass
    let ticks = ticks_of_bias(shape, ControlFlow::Break(()));
    assert!(ticks <= 4, "{ticks}");
}

#[test]
fn a_break_ends_a_backward_pass_whose_threads_wait_for_each_other() {
    let rank = rank(Dims::new(1, 900, 1, 32));
    let backward = |cpu: &Cpu, breaks: usize| {
        let mut workspace = cpu.workspace(&rank.shard, Passes::Both).unwrap();
        let mut buffer = kv_buffer(&rank);
        let mut dkv = rank.keys_buffer(rank.shard.spec.gradient_row_layout()).unwrap();
        for stopped in (0..=breaks).map(|attempt| attempt < breaks) {
            let mut pass = self::backward(&mut workspace, &rank);
            pass.local_kv(&mut buffer, &all_keys(&rank)).unwrap();
            let block = block(&buffer, &rank);
            let mut tick = || match stopped {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            };
            pass.attend_kv(&block, Some(&mut dkv), &mut tick).unwrap();
            if stopped {
                continue;
            }
            return rank.finish_backward(pass, &dkv, &mut keep_going).unwrap();
        }
        unreachable!("the last attempt is not stopped")
    };
    let undisturbed = backward(&Cpu::new(1).unwrap(), 0);
    assert!(backward(&Cpu::new(3).unwrap(), 4) == undisturbed);
}

#[test]
fn a_pass_that_a_workspace_was_not_made_for_is_a_typed_error() {
    let rank = rank(Dims::new(1, 30, 1, 4));
    let cpu = Cpu::new(1).unwrap();
    let mut workspace = cpu.workspace(&rank.shard, Passes::Forward).unwrap();
    let refused =
        workspace.backward(rank.backward_inputs(), BackwardMode::OnePass, &mut keep_going);
    assert_eq!(refused.err().map(|error| error.code()), Some(46));
    let mut workspace = cpu.workspace(&rank.shard, Passes::Both).unwrap();
    let mut pass = backward(&mut workspace, &rank);
    let buffer = kv_buffer(&rank);
    let block = block(&buffer, &rank);
    assert_eq!(pass.attend_kv(&block, None, &mut keep_going).unwrap_err().code(), 46);
}

#[test]
fn mismatched_tensors_and_buffers_are_typed_errors() {
    let rank = rank(Dims::new(1, 10, 1, 4));
    let cpu = Cpu::new(1).unwrap();
    let mut workspace = cpu.workspace(&rank.shard, Passes::Forward).unwrap();
    let doubles = Array4::<f64>::zeros((1, 10, 1, 4));
    let wrong = Inputs { k: Element::view(doubles.view()), ..rank.inputs() };
    let mut buffer = kv_buffer(&rank);
    let mut pass = workspace.forward(wrong, &mut keep_going).unwrap();
    assert_eq!(
        pass.local_kv(&mut buffer, &all_keys(&rank)),
        Err(Error::invalid("k", "f64", "f32"))
    );
    let mut pass = workspace.forward(rank.inputs(), &mut keep_going).unwrap();
    let mut short = HostBuffer::zeroed(8).unwrap();
    assert_eq!(pass.local_kv(&mut short, &all_keys(&rank)).unwrap_err().code(), 46);
    let in_flight = buffer.clone();
    assert_eq!(pass.local_kv(&mut buffer, &all_keys(&rank)).unwrap_err().code(), 46);
    drop(in_flight);
    pass.local_kv(&mut buffer, &all_keys(&rank)).unwrap();
    assert_eq!(Cpu::new(0).unwrap_err(), Error::invalid("threads", 0, "at least 1"));
}

#[test]
fn received_queries_lack_rows_of_a_full_bias() {
    let mut spec = Spec::new(Dims::new(1, 12, 1, 4), DType::F32);
    spec.backward = BackwardMode::TwoPass;
    spec.bias = Some([1, 1, 12, 12]);
    let case = support::case(spec.clone(), &mut Draw::new(2));
    let cpu = || Cpu::new(1);
    assert_eq!(case.run(&cpu, &Layout::Contiguous, 2).unwrap_err().code(), 2);
    // on one rank all queries are local
    let got = case.run(&cpu, &Layout::Contiguous, 1).unwrap();
    assert_close(&got, &support::oracle(&case), 2e-5, "two passes on one rank");
    spec.bias = Some([1, 1, 1, 12]);
    let case = support::case(spec.clone(), &mut Draw::new(2));
    let got = case.run(&cpu, &Layout::Contiguous, 2).unwrap();
    assert_close(&got, &support::oracle(&case), 2e-5, "a bias of keys");
    spec.bias = None;
    let mut case = support::case(spec, &mut Draw::new(2));
    case.batch.attention_mask =
        Some(annulus_core::DenseMask::from_fn([1, 1, 12, 12], |[_, _, i, j]| i != j));
    assert_eq!(case.run(&cpu, &Layout::Contiguous, 2).unwrap_err().code(), 2);
}
