//! Devices that are lost, before a pass and during one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use annulus::{
    Attention, Dims, Error, Ring,
    comm::threads::{self, each_rank},
};
use annulus_core::{BackwardInputs, DType, Gradients, Inputs, Outputs, Result, mask::Predicate};
use annulus_wgpu::{Gpu, Options, Tensor, Wgpu};

use super::{DEADLINE, gpu, open, ring};

/// Time at which rank 1's device is destroyed: before a pass, or during one, when the mask is
/// evaluated for keys of another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doom {
    BeforeThePass,
    DuringForward,
    DuringBackward,
}

/// Destroys rank 1's device; checks every rank's errors of the pass that fails and of the next.
fn lose(doom: Doom) {
    let dims = Dims::new(1, 96, 2, 8);
    let Some(healthy) = gpu() else { return };
    let Some(doomed) = open(&Options::default()) else { return };
    let armed = Arc::new(AtomicBool::new(false));
    let attention = || {
        let gpu = doomed.clone();
        let armed = Arc::clone(&armed);
        // every pair is visible; rank 1 owns rows 32 … 63
        let visible = move |i: i64, j: i64| {
            if (32..64).contains(&i)
                && !(32..64).contains(&j)
                && armed.swap(false, Ordering::SeqCst)
            {
                gpu.device().destroy();
            }
            true
        };
        Attention::new().mask(Arc::new(Predicate::of_positions("all", visible)))
    };
    let fates = each_rank(threads::ring(3), |rank, transport| {
        let gpu = if rank == 1 { &doomed } else { &healthy };
        let mut ring = ring(gpu, transport, &attention(), dims)?;
        let inputs = tensors(gpu, &ring, dims)?;
        let mut outputs = outputs(gpu, &ring, dims)?;
        let mut gradients = tensors(gpu, &ring, dims)?;
        let [q, k, v] = &inputs;
        let inputs = Inputs { q, k, v, bias: None, sinks: None };
        let [out, lse] = &mut outputs;
        ring.forward(
            &inputs,
            &mut Outputs { out, lse, max: None, sum: None, ties: None, out_residual: None },
        )?;
        let start = Instant::now();
        if rank == 1 {
            match doom {
                Doom::BeforeThePass => gpu.device().destroy(),
                Doom::DuringForward | Doom::DuringBackward => armed.store(true, Ordering::SeqCst),
            }
        }
        // the tensors exist already, so the error is the ring's
        let mut pass = || match doom {
            Doom::DuringBackward => {
                let inputs = BackwardInputs {
                    forward: inputs,
                    out: &outputs[0],
                    max: &outputs[1],
                    sum: None,
                    ties: None,
                    dout: q,
                    dlse: None,
                    out_residual: None,
                };
                let [dq, dk, dv] = &mut gradients;
                ring.backward(&inputs, &mut Gradients { dq, dk, dv, dbias: None, dsinks: None })
                    .err()
            }
            _ => {
                let [out, lse] = &mut outputs;
                ring.forward(
                    &inputs,
                    &mut Outputs { out, lse, max: None, sum: None, ties: None, out_residual: None },
                )
                .err()
            }
        };
        let errors = (pass(), pass());
        Ok((errors, start.elapsed()))
    })
    .expect("every rank returns");
    assert!(!armed.load(Ordering::SeqCst), "{doom:?}: the mask was not evaluated");
    for (rank, ((first, second), after)) in fates.iter().enumerate() {
        assert!(*after < DEADLINE, "rank {rank} took {after:?}");
        assert!(first.as_ref().is_some_and(Error::is_fatal), "rank {rank}: {first:?}");
        assert!(matches!(second, Some(Error::Poisoned { .. })), "rank {rank}: {second:?}");
    }
    assert!(
        matches!(&fates[1].0.0, Some(Error::Device { what }) if what.contains("lost")),
        "{:?}",
        fates[1].0
    );
}

#[test]
fn a_device_that_is_destroyed_ends_every_plan_before_the_deadline() {
    lose(Doom::BeforeThePass);
}

#[test]
fn a_device_that_is_destroyed_during_forward_ends_every_plan_before_the_deadline() {
    lose(Doom::DuringForward);
}

#[test]
fn a_device_that_is_destroyed_during_backward_ends_every_plan_before_the_deadline() {
    lose(Doom::DuringBackward);
}

fn tensors(gpu: &Gpu, ring: &Ring<Wgpu>, dims: Dims) -> Result<[Tensor; 3]> {
    let rows = annulus_core::index(ring.q_rows().len());
    let tensor = |heads, dim| Tensor::zeros(gpu, [dims.batch, rows, heads, dim], DType::F32);
    Ok([
        tensor(dims.q_heads, dims.head_dim)?,
        tensor(dims.kv_heads, dims.head_dim)?,
        tensor(dims.kv_heads, dims.value_dim)?,
    ])
}

fn outputs(gpu: &Gpu, ring: &Ring<Wgpu>, dims: Dims) -> Result<[Tensor; 2]> {
    let rows = annulus_core::index(ring.q_rows().len());
    let out = Tensor::zeros(gpu, [dims.batch, rows, dims.q_heads, dims.value_dim], DType::F32)?;
    Ok([out, Tensor::zeros(gpu, [dims.batch, dims.q_heads, rows, 1], DType::F32)?])
}
