//! The wgpu backend over staged threads, at sizes for a device that is none: samples of random cases, of the matrix and of the sizes, every rule;
//! every level, bindings too small for a tensor, devices that are lost.
//!
//! Without a Vulkan, Metal or DX12 driver nothing can be examined: then these tests say NOT RUN, and with `ANNULUS_REQUIRE=wgpu` they fail.
#![cfg(feature = "wgpu")]

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Dims, Error, Layout, Ring, RingOptions, SinkShape, Spec,
    comm::{
        Deadline, Staged,
        threads::{self, Threads, each_rank},
    },
};
use annulus_conformance::{
    Case, Draw, Masks, Setting, Subject,
    suite::{self, Scale},
    wgpu::WgpuRing,
};
use annulus_core::{DType, Inputs, Outputs, Result};
use annulus_wgpu::{Copier, Gpu, Level, Options, Tensor, Wgpu, WgpuSpace};

/// A device, or nothing where there is none.
fn open(options: &Options) -> Option<Gpu> {
    if Gpu::list().is_empty() {
        let required = std::env::var("ANNULUS_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "wgpu"), "ANNULUS_REQUIRE has wgpu, and there is no adapter");
        eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
        return None;
    }
    Some(Gpu::open(options).expect("the adapter opens"))
}

/// The device that most tests share.
fn gpu() -> Option<Gpu> {
    static OPENED: OnceLock<Option<Gpu>> = OnceLock::new();
    OPENED.get_or_init(|| open(&Options::default())).clone()
}

const F32: &[DType] = &[DType::F32];

#[test]
fn random_cases_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::random_cases(&WgpuRing::new(gpu).only(F32), 0..40).unwrap();
}

#[test]
fn elements_of_two_bytes_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::Bf16, DType::F16] {
        suite::random_cases(&WgpuRing::new(gpu.clone()).only(&[dtype]), 100..112).unwrap();
    }
}

#[test]
fn a_sample_of_the_matrix_holds_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::matrix(&WgpuRing::new(gpu).only(F32), Scale::OneIn(11)).unwrap();
}

#[test]
fn a_sample_of_the_sizes_holds_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::sizes(&WgpuRing::new(gpu).only(F32), Scale::OneIn(3)).unwrap();
}

#[test]
fn the_numeric_rules_hold_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::numeric_rules(&WgpuRing::new(gpu).only(F32)).unwrap();
}

#[test]
fn bits_repeat_on_wgpu() {
    let Some(gpu) = gpu() else { return };
    suite::same_bits_over_repeats(&WgpuRing::new(gpu), 3).unwrap();
}

#[test]
fn the_cpu_and_wgpu_share_a_ring() {
    let Some(gpu) = gpu() else { return };
    let ring = WgpuRing::mixed(gpu).only(F32);
    suite::random_cases(&ring, 200..220).unwrap();
    suite::matrix(&ring, Scale::OneIn(37)).unwrap();
}

#[test]
fn every_level_holds() {
    let Some(all) = Gpu::list().into_iter().next() else { return };
    for level in all.levels {
        let Some(gpu) = open(&Options { level: Some(level), ..Options::default() }) else { return };
        assert_eq!(gpu.level(), level);
        suite::random_cases(&WgpuRing::new(gpu).only(F32), 0..6).unwrap();
    }
}

/// A case of two groups of heads, two batch rows and a bias of all axes, long enough to be cut.
fn long_case() -> Case {
    let dims = Dims { batch: 2, q_len: 150, kv_len: 150, q_heads: 4, kv_heads: 2, head_dim: 5, value_dim: 7 };
    let mut spec = Spec::new(dims, DType::F64);
    spec.sinks = Some(SinkShape { per_head: true, count: 1 });
    spec.bias = Some([2, 4, 150, 150]);
    Case::new("long", spec, Masks { causal: true, ..Masks::default() }, &mut Draw::new(5))
}

#[test]
fn tensors_larger_than_a_binding_are_worked_in_parts() {
    let Some(whole) = gpu() else { return };
    // the bias alone has 720 000 bytes
    let Some(small) = open(&Options { most_binding_bytes: Some(80 << 10), ..Options::default() }) else { return };
    let case = long_case().in_dtype(DType::F32);
    for setting in [Setting::ALONE, Setting::new(2, Layout::Zigzag)] {
        let [want, got] = [whole.clone(), small.clone()].map(|gpu| WgpuRing::new(gpu).run(&case, &setting, 1).unwrap().remove(0));
        let judge = annulus_conformance::Judge::new(&case).unwrap();
        judge.check(&want).unwrap();
        judge.check(&got).unwrap();
    }
}

/// A driver may take seconds to compile a kernel, and a rank is silent meanwhile.
const DEADLINE: Duration = Duration::from_secs(30);

/// One rank's ring over a device of its own or a shared one.
fn ring(gpu: &Gpu, transport: Threads, attention: &Attention, dims: Dims) -> Result<Ring<Wgpu>> {
    let staged = Staged::<_, WgpuSpace>::new(transport, Copier::new(gpu.clone()));
    let transport = Box::new(Deadline::new(staged, DEADLINE)?);
    Ring::new(Wgpu::new(gpu.clone()), transport, attention.spec(dims), RingOptions { backward: true, ..RingOptions::default() })
}

fn forward(gpu: &Gpu, ring: &mut Ring<Wgpu>, dims: Dims) -> Result<()> {
    let rows = annulus_core::index(ring.q_rows().len());
    let tensor = |heads, dim| Tensor::zeros(gpu, [dims.batch, rows, heads, dim], DType::F32);
    let (q, k, v) = (tensor(dims.q_heads, dims.head_dim)?, tensor(dims.kv_heads, dims.head_dim)?, tensor(dims.kv_heads, dims.value_dim)?);
    let mut out = tensor(dims.q_heads, dims.value_dim)?;
    let mut lse = Tensor::zeros(gpu, [dims.batch, dims.q_heads, rows, 1], DType::F32)?;
    let inputs = Inputs { q: &q, k: &k, v: &v, bias: None, sinks: None };
    ring.forward(&inputs, &mut Outputs { out: &mut out, lse: &mut lse, max: None, sum: None, ties: None })?;
    let lse = lse.download::<f32>()?;
    assert!(lse.iter().all(|lse| (lse - (dims.kv_len as f32).ln()).abs() < 1e-5));
    Ok(())
}

#[test]
fn a_device_that_is_destroyed_ends_every_plan_before_the_deadline() {
    let dims = Dims::new(1, 96, 2, 8);
    let Some(healthy) = gpu() else { return };
    let Some(doomed) = open(&Options::default()) else { return };
    let fates = each_rank(threads::ring(3), |rank, transport| {
        let gpu = if rank == 1 { &doomed } else { &healthy };
        let attention = Attention::new();
        let mut ring = ring(gpu, transport, &attention, dims)?;
        forward(gpu, &mut ring, dims)?;
        let (inputs, mut outputs) = (tensors(gpu, &ring, dims)?, outputs(gpu, &ring, dims)?);
        let start = Instant::now();
        if rank == 1 {
            gpu.device().destroy();
        }
        // the tensors are there already, so that it is the ring that meets the loss
        let mut pass = || {
            let [q, k, v] = &inputs;
            let [out, lse] = &mut outputs;
            let inputs = Inputs { q, k, v, bias: None, sinks: None };
            ring.forward(&inputs, &mut Outputs { out, lse, max: None, sum: None, ties: None })
        };
        let errors = (pass().err(), pass().err());
        Ok((errors, start.elapsed()))
    })
    .expect("every rank comes to its end");
    for (rank, ((first, second), after)) in fates.iter().enumerate() {
        assert!(*after < DEADLINE, "rank {rank} took {after:?}");
        assert!(first.as_ref().is_some_and(Error::is_fatal), "rank {rank}: {first:?}");
        assert!(matches!(second, Some(Error::Poisoned { .. })), "rank {rank}: {second:?}");
    }
    assert!(matches!(&fates[1].0.0, Some(Error::Device { what }) if what.contains("lost")), "{:?}", fates[1].0);
}

fn tensors(gpu: &Gpu, ring: &Ring<Wgpu>, dims: Dims) -> Result<[Tensor; 3]> {
    let rows = annulus_core::index(ring.q_rows().len());
    let tensor = |heads, dim| Tensor::zeros(gpu, [dims.batch, rows, heads, dim], DType::F32);
    Ok([tensor(dims.q_heads, dims.head_dim)?, tensor(dims.kv_heads, dims.head_dim)?, tensor(dims.kv_heads, dims.value_dim)?])
}

fn outputs(gpu: &Gpu, ring: &Ring<Wgpu>, dims: Dims) -> Result<[Tensor; 2]> {
    let rows = annulus_core::index(ring.q_rows().len());
    let out = Tensor::zeros(gpu, [dims.batch, rows, dims.q_heads, dims.value_dim], DType::F32)?;
    Ok([out, Tensor::zeros(gpu, [dims.batch, dims.q_heads, rows, 1], DType::F32)?])
}

#[test]
fn limits_that_are_too_small_are_an_error_at_plan_time_on_every_rank() {
    let Some(plenty) = gpu() else { return };
    // one tile of these keys takes 32 rows of 32 KiB in one binding
    let dims = Dims { batch: 1, q_len: 64, kv_len: 64, q_heads: 32, kv_heads: 32, head_dim: 128, value_dim: 128 };
    let Some(small) = open(&Options { most_binding_bytes: Some(64 << 10), ..Options::default() }) else { return };
    let Some(little) = open(&Options { most_buffer_bytes: Some(256 << 10), ..Options::default() }) else { return };
    for poor in [small, little] {
        let errors = each_rank(threads::ring(2), |rank, transport| {
            let gpu = if rank == 1 { &poor } else { &plenty };
            Ok(ring(gpu, transport, &Attention::new(), dims).err())
        })
        .expect("every rank answers");
        assert!(matches!(&errors[1], Some(Error::Unsupported { .. } | Error::OutOfMemory { .. })), "{:?}", errors[1]);
        assert!(errors[0].is_some(), "{errors:?}");
    }
}

#[test]
fn what_it_cannot_do_is_an_error_at_plan_time() {
    let Some(gpu) = gpu() else { return };
    let plan = |attention: Attention, dims| {
        let [transport] = <[Threads; 1]>::try_from(threads::ring(1)).expect("one rank");
        ring(&gpu, transport, &attention, dims).err()
    };
    let dims = Dims::new(1, 8, 2, 8);
    assert!(matches!(plan(Attention::new().dtype(DType::F64), dims), Some(Error::Unsupported { what, .. }) if what.contains("f64")));
    assert!(
        matches!(plan(Attention::new(), Dims { head_dim: 257, ..dims }), Some(Error::Unsupported { what, .. }) if what.contains("257"))
    );
    assert!(
        matches!(plan(Attention::new(), Dims { value_dim: 300, ..dims }), Some(Error::Unsupported { what, .. }) if what.contains("300"))
    );
    assert_eq!(plan(Attention::new(), Dims { head_dim: 256, value_dim: 255, ..dims }), None);
    let elsewhere = Gpu::open(&Options { number: 1000, ..Options::default() });
    assert!(matches!(elsewhere, Err(Error::Unsupported { what, .. }) if what.contains("1000")));
}

#[test]
fn a_device_of_somebody_else_serves_too() {
    let Some(first) = gpu() else { return };
    let gpu = Gpu::adopt(first.device().clone(), first.queue().clone(), Some(Level::Plain)).expect("it is a good device");
    let dims = Dims::new(1, 40, 2, 8);
    let [transport] = <[Threads; 1]>::try_from(threads::ring(1)).expect("one rank");
    let mut ring = ring(&gpu, transport, &Attention::new(), dims).expect("a plan");
    forward(&gpu, &mut ring, dims).expect("a pass");
}
