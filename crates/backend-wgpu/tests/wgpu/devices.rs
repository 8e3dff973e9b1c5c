//! Devices that several threads open and close: one at a time, whoever drops the last object.
//!
//! Devices that are lost, before a pass and during one.
//!
//! Devices, buffers and errors of a caller or of another library.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use annulus::{
    Attention, Dims, Division, Error, Layout, Plan, Runtime, Tensors,
    comm::{
        Deadline, Staged,
        threads::{self, Threads, each_rank},
    },
};
use annulus_conformance::{suite, wgpu::WgpuRing};
use annulus_core::{DType, HostViews, Inputs, Outputs, Result, mask::Predicate};
use annulus_wgpu::{
    Copier, Gpu, Level, Options, Stopwatch, Tensor, Wgpu, WgpuSpace,
    wgpu::{
        Backends, BufferDescriptor, BufferUsages, Device, DeviceDescriptor, Instance,
        InstanceDescriptor, InstanceFlags, Limits, Queue,
    },
};
use ndarray::Array4;

use crate::{DEADLINE, F32, forward, gpu, number, open, ring};

/// Opens a device and uses it. Returns true if it was then closed in turn, false if it was closed
/// otherwise, `Some(None)` if it is open, and `None` without an adapter.
fn used(by: impl FnOnce(Gpu)) -> Option<Option<bool>> {
    let gpu = open(&Options::default())?;
    let closed_in_turn = gpu.closed_in_turn();
    assert_eq!(closed_in_turn.get(), None);
    by(gpu);
    Some(closed_in_turn.get().copied())
}

#[test]
fn devices_close_in_turn_whatever_is_dropped_last() {
    let passes: [fn(Gpu); 5] = [
        drop,
        |gpu| suite::random_cases(&WgpuRing::new(gpu).only(F32), 0..2).unwrap(),
        |gpu| suite::random_cases(&WgpuRing::on_host(gpu).only(&[DType::F16]), 0..2).unwrap(),
        |gpu| {
            let numbers = Array4::<f32>::zeros((1, 4, 1, 4));
            let tensor = Tensor::upload(&gpu, numbers.view()).unwrap();
            drop(gpu);
            drop(tensor);
        },
        |gpu| {
            let watch = Stopwatch::start(&gpu).unwrap();
            let copier = Copier::new(gpu.clone());
            let other = gpu.at(gpu.level()).unwrap();
            drop((gpu, other));
            drop(copier);
            drop(watch);
        },
    ];
    for (number, by) in passes.into_iter().enumerate() {
        let Some(closed) = used(by) else { return };
        assert_eq!(closed, Some(true), "pass {number}");
    }
    // a handle of the caller's own keeps the device open, and closes it out of turn
    let mut kept = None;
    let mut closed_in_turn = None;
    let closed = used(|gpu| {
        closed_in_turn = Some(gpu.closed_in_turn());
        kept = Some(gpu.device().clone());
    });
    assert_eq!(closed, Some(None));
    drop(kept);
    assert_eq!(closed_in_turn.unwrap().get(), Some(&false));
}

#[test]
fn threads_open_and_close_devices_at_the_same_time() {
    if open(&Options::default()).is_none() {
        return;
    }
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..4 {
                        let closed = used(|gpu| {
                            Tensor::zeros(&gpu, [1, 4, 1, 4], DType::F32).unwrap();
                        });
                        assert_eq!(closed, Some(Some(true)));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Time at which rank 1's device is destroyed: before a pass, or during one, when the mask is
/// evaluated for keys of another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doom {
    BeforeThePass,
    DuringForward,
    DuringBackward,
}

/// Plan of a rank for tensors in host memory.
fn plan(gpu: &Gpu, transport: Threads, mask: Predicate) -> Result<Plan> {
    let division = Division::new().layout(Layout::Contiguous);
    let setup =
        (Attention::new().mask(Arc::new(mask)), division, Runtime::new().deadline(DEADLINE));
    let staged = Staged::<_, HostViews<WgpuSpace>>::new(transport, Copier::new(gpu.clone()));
    Plan::with_backend(setup, Dims::new(1, 96, 2, 8), Wgpu::on_host(gpu.clone()), staged)
}

/// Destroys rank 1's device; checks every rank's errors of the pass that fails and of the next.
#[test]
fn a_device_that_is_destroyed_ends_every_plan_before_the_deadline() {
    for doom in [Doom::BeforeThePass, Doom::DuringForward, Doom::DuringBackward] {
        let Some(healthy) = gpu() else { return };
        let Some(doomed) = open(&Options::default()) else { return };
        let armed = Arc::new(AtomicBool::new(false));
        let all_visible = || {
            let (gpu, armed) = (doomed.clone(), Arc::clone(&armed));
            // rank 1 owns rows 32 … 63
            let visible = move |i: i64, j: i64| {
                let is_remote = (32..64).contains(&i) && !(32..64).contains(&j);
                if is_remote && armed.swap(false, Ordering::SeqCst) {
                    gpu.device().destroy();
                }
                true
            };
            Predicate::of_positions("all", visible)
        };
        let x = Array4::<f32>::zeros((1, 32, 2, 8));
        let tensors = Tensors::new(x.view(), x.view(), x.view());
        let fates = each_rank(threads::ring(3), |rank, transport| {
            let gpu = if rank == 1 { &doomed } else { &healthy };
            let mut plan = plan(gpu, transport, all_visible())?;
            let forward = plan.forward(&tensors)?;
            let start = Instant::now();
            if rank == 1 {
                match doom {
                    Doom::BeforeThePass => doomed.device().destroy(),
                    Doom::DuringForward | Doom::DuringBackward => {
                        armed.store(true, Ordering::SeqCst)
                    }
                }
            }
            let mut pass = || match doom {
                Doom::DuringBackward => plan.backward(&tensors, &forward, x.view(), None).err(),
                _ => plan.forward(&tensors).err(),
            };
            Ok(([pass(), pass()], start.elapsed()))
        })
        .expect("every rank returns");
        assert!(!armed.load(Ordering::SeqCst), "{doom:?}: the mask was not evaluated");
        for (rank, ([first, second], after)) in fates.iter().enumerate() {
            assert!(*after < DEADLINE, "{doom:?}: rank {rank} took {after:?}");
            assert!(first.as_ref().is_some_and(Error::is_fatal), "rank {rank}: {first:?}");
            assert!(matches!(second, Some(Error::Poisoned { .. })), "rank {rank}: {second:?}");
        }
        let [first, _] = &fates[1].0;
        let is_lost = |what: &str| what.contains("lost");
        assert!(matches!(first, Some(Error::Device { what }) if is_lost(what)), "{first:?}");
    }
}

/// Opens a device as an unrelated program does: with these limits and without features.
fn foreign(limits: Limits) -> Option<(Device, Queue)> {
    gpu()?;
    // older validation layers reject shaders with their source
    let flags = InstanceFlags::empty();
    let instance = Instance::new(InstanceDescriptor {
        flags,
        ..InstanceDescriptor::new_without_display_handle()
    });
    let adapter = pollster::block_on(
        instance.enumerate_adapters(Backends::VULKAN | Backends::METAL | Backends::DX12),
    )
    .into_iter()
    .nth(number());
    let descriptor = DeviceDescriptor { required_limits: limits, ..DeviceDescriptor::default() };
    Some(
        pollster::block_on(adapter.expect("the adapter").request_device(&descriptor))
            .expect("a device"),
    )
}

fn alone() -> Threads {
    let [transport] = <[Threads; 1]>::try_from(threads::ring(1)).expect("one rank");
    transport
}

const DIMS: Dims = Dims::new(1, 40, 2, 8);

#[test]
fn a_callers_device_is_adopted() {
    let Some((device, queue)) = foreign(Limits::default()) else { return };
    let gpu = Gpu::adopt(device, queue, None).expect("a device with default limits");
    // it was opened without subgroups
    assert_eq!(gpu.level(), Level::Plain);
    suite::random_cases(&WgpuRing::new(gpu).only(F32), 400..408).unwrap();
}

#[test]
fn a_device_with_small_limits_or_without_features_is_refused() {
    let Some((device, queue)) = foreign(Limits::downlevel_defaults()) else { return };
    let adopted = Gpu::adopt(device, queue, None);
    assert!(
        matches!(&adopted, Err(Error::Unsupported { what, .. }) if what.contains("it takes")),
        "{adopted:?}"
    );
    let Some((device, queue)) = foreign(Limits::default()) else { return };
    let adopted = Gpu::adopt(device, queue, Some(Level::Matrix));
    assert!(
        matches!(&adopted, Err(Error::Unsupported { what, .. }) if what.contains("matrix")),
        "{adopted:?}"
    );
}

#[test]
fn a_callers_buffer_is_adopted_if_its_size_and_usages_suffice() {
    let Some(gpu) = gpu() else { return };
    let buffer = |size, usage| {
        gpu.device().create_buffer(&BufferDescriptor {
            label: None,
            size,
            usage,
            mapped_at_creation: false,
        })
    };
    let all = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
    let adopt = |buffer, dtype| Tensor::adopt(&gpu, buffer, [1, 3, 2, 5], dtype);
    let zeros = adopt(buffer(120, all), DType::F32).unwrap().download::<f32>().unwrap();
    assert!(zeros.shape() == [1, 3, 2, 5] && zeros.iter().all(|&x| x == 0.0));
    let small = adopt(buffer(116, all), DType::F32);
    assert!(matches!(small, Err(Error::InvalidArgument { got, .. }) if got.contains("116")));
    assert!(matches!(
        adopt(buffer(120, BufferUsages::STORAGE), DType::F32),
        Err(Error::InvalidArgument { .. })
    ));
    assert!(matches!(adopt(buffer(240, all), DType::F64), Err(Error::Unsupported { .. })));
    let other = adopt(buffer(60, all), DType::Bf16).unwrap().download::<f32>();
    assert!(matches!(other, Err(Error::InvalidArgument { argument, .. }) if argument == "dtype"));
}

#[test]
fn a_tensor_of_another_device_is_an_error_that_ends_the_plan() {
    let (Some(gpu), Some(other)) = (gpu(), open(&Options::default())) else { return };
    let mut ring = ring(&gpu, alone(), &Attention::new(), DIMS).expect("a plan");
    let tensor = |gpu: &Gpu| Tensor::zeros(gpu, [1, 40, 2, 8], DType::F32).unwrap();
    let q = tensor(&other);
    let k = tensor(&gpu);
    let v = tensor(&gpu);
    let mut out = tensor(&gpu);
    let mut lse = Tensor::zeros(&gpu, [1, 2, 40, 1], DType::F32).unwrap();
    let mut pass = |ring: &mut annulus::comm::ring::Ring<_>| {
        ring.forward(&Inputs::new(&q, &k, &v), &mut Outputs::new(&mut out, &mut lse)).err()
    };
    let error = pass(&mut ring);
    assert!(
        matches!(&error, Some(Error::InvalidArgument { argument, .. }) if argument == "query"),
        "{error:?}"
    );
    assert!(matches!(pass(&mut ring), Some(Error::Poisoned { .. })));
    // the devices still work
    for gpu in [gpu, other] {
        let mut ring = super::ring(&gpu, alone(), &Attention::new(), DIMS).expect("a plan");
        forward(&gpu, &mut ring, DIMS).expect("a pass");
    }
}

#[test]
fn a_copier_of_another_device_is_an_error_on_every_rank() {
    let (Some(gpu), Some(other)) = (gpu(), open(&Options::default())) else { return };
    let errors = each_rank(threads::ring(2), |rank, transport| {
        let copier = Copier::new(if rank == 0 { gpu.clone() } else { other.clone() });
        let transport =
            Box::new(Deadline::new(Staged::<_, WgpuSpace>::new(transport, copier), DEADLINE)?);
        let mut ring = annulus::comm::ring::Ring::new(
            Wgpu::new(gpu.clone()),
            transport,
            Attention::new().spec(DIMS),
            annulus::comm::ring::RingOptions::default(),
        )?;
        Ok(forward(&gpu, &mut ring, DIMS).err())
    })
    .expect("every rank answers");
    assert!(
        matches!(&errors[1], Some(Error::InvalidArgument { argument, .. }) if argument == "block"),
        "{errors:?}"
    );
    assert!(errors[0].as_ref().is_some_and(Error::is_fatal), "{errors:?}");
}

#[test]
fn an_allocation_that_fails_is_an_error_with_its_size() {
    let Some(gpu) = gpu() else { return };
    let error = Tensor::zeros(&gpu, [1, 1 << 30, 1 << 7, 1 << 8], DType::F32).err();
    assert!(
        matches!(error, Some(Error::OutOfMemory { asked, free: Some(_), .. }) if asked == 1 << 47),
        "{error:?}"
    );
}

#[test]
fn an_error_outside_of_error_scopes_does_not_panic_and_fails_later_calls() {
    let Some(gpu) = open(&Options::default()) else { return };
    let size = gpu.device().limits().max_buffer_size + 4;
    // another user of the device allocates too much, outside of error scopes
    drop(gpu.device().create_buffer(&BufferDescriptor {
        label: None,
        size,
        usage: BufferUsages::STORAGE,
        mapped_at_creation: false,
    }));
    let error = Tensor::zeros(&gpu, [1, 1, 1, 1], DType::F32).err();
    assert!(
        matches!(&error, Some(Error::Device { what }) if what.contains("no call")),
        "{error:?}"
    );
    assert!(gpu.synchronize().is_err());
}
