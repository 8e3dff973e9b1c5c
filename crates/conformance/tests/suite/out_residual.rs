//! The rounding residual of out in 16 bits: on rings of the CPU and of the mock device, in the
//! reproducible order, on every form of the exchange between ranks, and what is refused.

use std::time::Duration;

use annulus::{Attention, Division, LocalRing, Plan, Setup, Tensors, comm::threads};
use annulus_conformance::{
    Altered, Facade, Setting,
    subjects::{cpu, mock, mock_staged},
    suite,
};
use annulus_core::{Backend, Capabilities, DType, Dims, Element, Error, Host, LEAF_ROWS, Result};
use annulus_cpu::Cpu;
use annulus_plan::{Layout, Strategy};
use half::{bf16, f16};
use ndarray::{Array4, s};

fn rings() -> [Setting; 4] {
    let two = Setting::new(2, Layout::Contiguous);
    [Setting::ALONE, two, Setting::new(3, Layout::Striped), Setting::new(3, Layout::Zigzag)]
}

#[test]
fn dq_has_no_error_of_the_rounding_of_out_on_rings() {
    for setting in rings() {
        suite::out_residual(&cpu(), None, &setting).unwrap();
        suite::out_residual(&mock(), None, &setting).unwrap();
        suite::out_residual(&Facade, None, &setting).unwrap();
    }
    suite::out_residual(&mock_staged(Duration::ZERO), None, &Setting::new(2, Layout::Contiguous))
        .unwrap();
}

#[test]
fn dq_has_no_error_of_the_rounding_of_out_in_the_reproducible_order() {
    for setting in rings() {
        suite::out_residual(&cpu(), Some(64), &setting).unwrap();
        suite::out_residual(&Facade, Some(LEAF_ROWS), &setting).unwrap();
    }
}

#[test]
fn dq_has_no_error_of_the_rounding_of_out_on_grids() {
    for (ranks, strategy) in [
        (2, Strategy::HeadsRing { heads: 2 }),
        (4, Strategy::HeadsRing { heads: 2 }),
        (4, Strategy::AllToAll),
        (2, Strategy::AllGather),
        (3, Strategy::PassQ),
        (2, Strategy::Grid { heads: 1, queries: 1, keys: 2 }),
        (3, Strategy::Grid { heads: 1, queries: 1, keys: 3 }),
        (4, Strategy::Grid { heads: 1, queries: 2, keys: 2 }),
        (8, Strategy::Grid { heads: 2, queries: 2, keys: 2 }),
    ] {
        for layout in [None, Some(Layout::Striped)] {
            let setting = Setting { ranks, layout, strategy, ..Setting::ALONE };
            suite::out_residual(&Facade, None, &setting).unwrap();
        }
    }
}

/// The CPU backend without the residual.
fn without() -> impl Backend<Space = Host> {
    let without = |capabilities| Capabilities { out_residual: false, ..capabilities };
    Altered::new(without, |shard| Ok(shard.clone())).unwrap()
}

/// Runs both passes of a plan on one rank, with a residual if `given`, whatever the plan has.
/// Returns the results of the forward and of the backward pass.
fn both_passes<T: Element>(
    backend: impl Backend<Space = Host>,
    given: bool,
) -> Result<[Result<()>; 2]> {
    let attention = Attention::new().dtype(T::DTYPE);
    let transport = threads::ring(1).remove(0);
    let mut plan = Plan::with_backend(&attention, Dims::new(1, 8, 2, 4), backend, transport)?;
    let x = Array4::from_elem((1, 8, 2, 4), T::from_f64(0.5));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut forward = plan.forward(&tensors)?;
    assert_eq!(forward.out_residual.is_some(), plan.has_out_residual());
    forward.out_residual = given.then(|| x.clone());
    let of_forward = plan.forward_into(&tensors, forward.view_mut()).map(drop);
    let of_backward = plan.backward(&tensors, &forward, x.view(), None).map(drop);
    // a plan that refused a call still works
    forward.out_residual = None;
    plan.backward(&tensors, &forward, x.view(), None)?;
    Ok([of_forward, of_backward])
}

#[test]
fn a_backend_without_the_residual_refuses_it_by_name() {
    let cpu = || Cpu::new(1).unwrap();
    for result in both_passes::<bf16>(without(), true).unwrap() {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("out_residual"), "{error}");
    }
    let without = both_passes::<bf16>(without(), false).unwrap();
    let with = both_passes::<bf16>(cpu(), true).unwrap();
    for result in without.into_iter().chain(with) {
        result.unwrap();
    }
}

#[test]
fn wide_types_have_no_residual() {
    for result in both_passes::<f32>(Cpu::new(1).unwrap(), true).unwrap() {
        let error = result.unwrap_err();
        let named = matches!(&error, Error::InvalidArgument { argument, .. }
            if argument == "out_residual");
        assert!(named, "{error}");
    }
    for result in both_passes::<f64>(Cpu::new(1).unwrap(), false).unwrap() {
        result.unwrap();
    }
}

#[test]
fn ranks_that_differ_in_the_residual_are_refused_where_it_is_a_message() {
    let dims = Dims::new(1, 8, 2, 4);
    let attention = Setup::from((
        Attention::new().dtype(DType::F16),
        Division::new().strategy(Strategy::HeadsRing { heads: 2 }),
    ));
    let x = Array4::from_elem((1, 8, 2, 4), f16::from_f64(0.5));
    let errors = threads::each_rank(threads::ring(2), |rank, transport| {
        let mut plan = Plan::new(&attention, dims, transport)?;
        let rows = x.slice(s![.., ..4, .., ..]);
        let tensors = Tensors::new(rows, rows, rows);
        let mut forward = plan.forward(&tensors)?;
        forward.out_residual.take_if(|_| rank == 1);
        let refused = plan.forward_into(&tensors, forward.view_mut()).unwrap_err();
        plan.forward(&tensors)?;
        Ok(refused)
    });
    for error in errors.unwrap() {
        let named = matches!(&error, Error::RankMismatch { field, .. } if field == "out_residual");
        assert!(named, "{error}");
    }
}

/// Rows in memory before each other, elements apart: out and its residual are the same.
#[test]
fn a_residual_of_any_strides_is_out_before_rounding() {
    let dims = Dims::new(1, 21, 2, 6);
    let draw = |seed: usize| {
        Array4::from_shape_fn((1, 21, 2, 6), |(_, i, h, d)| {
            f16::from_f64(((seed + 7 * i + 3 * h + 5 * d) % 13) as f64 / 8.0 + 3.0)
        })
    };
    let (q, k, v) = (draw(1), draw(2), draw(3));
    let wide = |x: &Array4<f16>| x.mapv(f64::from);
    let attention = Attention::new();
    let mut ring = LocalRing::new(attention.clone().dtype(DType::F16), dims, 1).unwrap();
    let forward = ring.forward(&Tensors::new(q.view(), k.view(), v.view())).unwrap();
    let mut exact = LocalRing::new(attention.clone().dtype(DType::F64), dims, 1).unwrap();
    let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
    let want = exact.forward(&Tensors::new(q64.view(), k64.view(), v64.view())).unwrap().out;
    let mut strided = Array4::from_elem((6, 2, 21, 1), f16::NAN);
    let mut again = forward.clone();
    let mut outputs = again.view_mut();
    outputs.out_residual = Some(strided.view_mut().reversed_axes());
    ring.forward_into(&Tensors::new(q.view(), k.view(), v.view()), outputs).unwrap();
    let residual = forward.out_residual.as_ref().unwrap();
    assert_eq!(&strided.reversed_axes(), residual);
    let sum = wide(&forward.out) + wide(residual);
    let error = |of: &Array4<f64>| (of - &want).iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let errors = [error(&sum), error(&wide(&forward.out))];
    assert!(errors[0] < 1e-5 && errors[1] > 1e-4, "{errors:?}");
}
