//! The seam itself: strides, errors, stopping.

use std::ops::ControlFlow;

use annulus_core::{Backend, BackwardMode, Block, DType, Dims, Element, Error, Gradients, Host, HostBuffer, Inputs, Layout, Outputs, Spec};
use annulus_cpu::Cpu;
use ndarray::{Array4, s};

use crate::support::{Case, Random, Rank, go_on};

fn forward(cpu: &Cpu, rank: &Rank<f32>, inputs: &Inputs<'_, Host>) -> annulus_core::Result<(Array4<f32>, Array4<f32>)> {
    let mut workspace = cpu.workspace(&rank.local, false)?;
    let mut buffer = HostBuffer::zeroed(rank.block.bytes().len() as u64)?;
    cpu.pack(&mut workspace, inputs, &mut buffer)?;
    cpu.begin(&mut workspace, inputs)?;
    let block = Block { buffer: &buffer, ready: &(), rows: &rank.local.keys };
    cpu.attend(&mut workspace, inputs, &block, &mut go_on)?;
    let (mut out, mut lse) = (rank.out.clone(), rank.lse.clone());
    let outputs =
        &mut Outputs { out: Element::view_mut(out.view_mut()), lse: Element::view_mut(lse.view_mut()), max: None, sum: None, ties: None };
    cpu.finish(&mut workspace, inputs, outputs)?;
    Ok((out, lse))
}

fn rank(dims: Dims) -> Rank<f32> {
    let case = Case::new(Spec::new(dims, DType::F32), &mut Random(11));
    Rank::new(&case, &Layout::Contiguous, 0, 1).unwrap()
}

#[test]
fn strides_change_no_bit() {
    let rank = rank(Dims { q_heads: 4, ..Dims::new(2, 70, 2, 12) });
    let cpu = Cpu::new(1).unwrap();
    let want = forward(&cpu, &rank, &rank.inputs()).unwrap();
    // [b, heads, dim, len] in memory, every axis backwards
    let scattered = |array: &Array4<f32>| {
        let mut memory = array.clone().permuted_axes([0, 2, 3, 1]).as_standard_layout().into_owned();
        memory = memory.slice(s![..;-1, ..;-1, ..;-1, ..;-1]).as_standard_layout().into_owned();
        memory
    };
    let (q, k, v) = (scattered(&rank.q), scattered(&rank.k), scattered(&rank.v));
    let view = |array| -> ndarray::ArrayView4<'_, f32> {
        let array: &Array4<f32> = array;
        array.slice(s![..;-1, ..;-1, ..;-1, ..;-1]).permuted_axes([0, 3, 1, 2])
    };
    assert_eq!(view(&q), rank.q);
    let inputs = Inputs { q: Element::view(view(&q)), k: Element::view(view(&k)), v: Element::view(view(&v)), bias: None, sinks: None };
    assert_eq!(forward(&cpu, &rank, &inputs).unwrap(), want);
}

#[test]
fn a_break_ends_the_call_early() {
    let rank = rank(Dims::new(1, 600, 4, 32));
    for threads in [1, 3] {
        let cpu = Cpu::new(threads).unwrap();
        let mut workspace = cpu.workspace(&rank.local, true).unwrap();
        let mut buffer = HostBuffer::zeroed(rank.block.bytes().len() as u64).unwrap();
        cpu.pack(&mut workspace, &rank.inputs(), &mut buffer).unwrap();
        cpu.begin(&mut workspace, &rank.inputs()).unwrap();
        let block = Block { buffer: &buffer, ready: &(), rows: &rank.local.keys };
        let mut ticks = 0;
        let mut stop = || {
            ticks += 1;
            ControlFlow::Break(())
        };
        cpu.attend(&mut workspace, &rank.inputs(), &block, &mut stop).unwrap();
        // work goes on after no break; the same workspace then serves a whole pass
        assert!(ticks <= threads, "{ticks}");
        cpu.begin(&mut workspace, &rank.inputs()).unwrap();
        cpu.attend(&mut workspace, &rank.inputs(), &block, &mut go_on).unwrap();
        let (mut out, mut lse) = (rank.out.clone(), rank.lse.clone());
        let outputs = &mut Outputs {
            out: Element::view_mut(out.view_mut()),
            lse: Element::view_mut(lse.view_mut()),
            max: None,
            sum: None,
            ties: None,
        };
        cpu.finish(&mut workspace, &rank.inputs(), outputs).unwrap();
        assert_eq!((out, lse), forward(&cpu, &rank, &rank.inputs()).unwrap());
    }
}

#[test]
fn a_break_ends_a_backward_pass_whose_threads_wait_for_each_other() {
    let rank = rank(Dims::new(1, 900, 1, 32));
    let backward = |cpu: &Cpu, breaks: usize| {
        let mut workspace = cpu.workspace(&rank.local, true).unwrap();
        let (inputs, saved) = (rank.inputs(), rank.saved());
        let zeroed = |like: &HostBuffer| HostBuffer::zeroed(like.bytes().len() as u64).unwrap();
        let (mut buffer, mut fresh) = (zeroed(&rank.block), zeroed(&rank.home));
        cpu.pack(&mut workspace, &inputs, &mut buffer).unwrap();
        let block = Block { buffer: &buffer, ready: &(), rows: &rank.local.keys };
        for _ in 0..breaks {
            cpu.begin_backward(&mut workspace, &inputs, &saved).unwrap();
            cpu.attend_backward(&mut workspace, &inputs, &saved, &block, &mut fresh, &mut || ControlFlow::Break(())).unwrap();
        }
        cpu.begin_backward(&mut workspace, &inputs, &saved).unwrap();
        cpu.attend_backward(&mut workspace, &inputs, &saved, &block, &mut fresh, &mut go_on).unwrap();
        let (mut dq, mut dk, mut dv) = (rank.q.clone(), rank.k.clone(), rank.v.clone());
        let (of_q, of_k, of_v) = (Element::view_mut(dq.view_mut()), Element::view_mut(dk.view_mut()), Element::view_mut(dv.view_mut()));
        let mut gradients = Gradients::<Host> { dq: of_q, dk: of_k, dv: of_v, dbias: None, dsinks: None };
        cpu.finish_backward(&mut workspace, &inputs, &fresh, &mut gradients).unwrap();
        (dq, dk, dv)
    };
    let undisturbed = backward(&Cpu::new(1).unwrap(), 0);
    assert!(backward(&Cpu::new(3).unwrap(), 4) == undisturbed);
}

#[test]
fn a_new_batch_is_taken_in() {
    let (short, long) = (rank(Dims::new(1, 30, 1, 4)), rank(Dims::new(1, 90, 1, 4)));
    let cpu = Cpu::new(1).unwrap();
    let mut workspace = cpu.workspace(&short.local, false).unwrap();
    for rank in [&long, &short, &short] {
        cpu.update(&mut workspace, &rank.local).unwrap();
        cpu.begin(&mut workspace, &rank.inputs()).unwrap();
        let mut buffer = HostBuffer::zeroed(rank.block.bytes().len() as u64).unwrap();
        cpu.pack(&mut workspace, &rank.inputs(), &mut buffer).unwrap();
        let block = Block { buffer: &buffer, ready: &(), rows: &rank.local.keys };
        cpu.attend(&mut workspace, &rank.inputs(), &block, &mut go_on).unwrap();
        let (mut out, mut lse) = (rank.out.clone(), rank.lse.clone());
        let outputs = &mut Outputs {
            out: Element::view_mut(out.view_mut()),
            lse: Element::view_mut(lse.view_mut()),
            max: None,
            sum: None,
            ties: None,
        };
        cpu.finish(&mut workspace, &rank.inputs(), outputs).unwrap();
        assert_eq!((out, lse), forward(&cpu, rank, &rank.inputs()).unwrap());
    }
}

#[test]
fn what_does_not_fit_is_a_typed_error() {
    let rank = rank(Dims::new(1, 10, 1, 4));
    let cpu = Cpu::new(1).unwrap();
    let mut workspace = cpu.workspace(&rank.local, false).unwrap();
    let doubles = Array4::<f64>::zeros((1, 10, 1, 4));
    let wrong = Inputs { k: Element::view(doubles.view()), ..rank.inputs() };
    let mut buffer = HostBuffer::zeroed(rank.block.bytes().len() as u64).unwrap();
    assert_eq!(cpu.pack(&mut workspace, &wrong, &mut buffer), Err(Error::invalid("k", "f64", "f32")));
    let mut short = HostBuffer::zeroed(8).unwrap();
    assert_eq!(cpu.pack(&mut workspace, &rank.inputs(), &mut short).unwrap_err().code(), 40);
    let in_flight = buffer.clone();
    assert_eq!(cpu.pack(&mut workspace, &rank.inputs(), &mut buffer).unwrap_err().code(), 40);
    drop(in_flight);
    cpu.pack(&mut workspace, &rank.inputs(), &mut buffer).unwrap();
    assert_eq!(Cpu::new(0).unwrap_err(), Error::invalid("threads", 0, "at least 1"));
}

#[test]
fn travelling_queries_have_no_lines_of_a_full_bias() {
    let mut spec = Spec::new(Dims::new(1, 12, 1, 4), DType::F32);
    spec.backward = BackwardMode::TwoPass;
    spec.bias = Some([1, 1, 12, 12]);
    let case = Case::new(spec.clone(), &mut Random(2));
    let cpu = Cpu::new(1).unwrap();
    assert_eq!(case.run(&cpu, &Layout::Contiguous, 2).unwrap_err().code(), 2);
    // on one rank the queries are at home
    case.run(&cpu, &Layout::Contiguous, 1).unwrap().assert_close(&case.oracle(), 2e-5, "two passes on one rank");
    spec.bias = Some([1, 1, 1, 12]);
    let case = Case::new(spec.clone(), &mut Random(2));
    case.run(&cpu, &Layout::Contiguous, 2).unwrap().assert_close(&case.oracle(), 2e-5, "a bias of keys");
    spec.bias = None;
    let mut case = Case::new(spec, &mut Random(2));
    case.batch.attention_mask = Some(annulus_core::DenseMask::from_fn([1, 1, 12, 12], |[_, _, i, j]| i != j));
    assert_eq!(case.run(&cpu, &Layout::Contiguous, 2).unwrap_err().code(), 2);
}
