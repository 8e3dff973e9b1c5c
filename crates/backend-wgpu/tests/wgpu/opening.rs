//! Devices that several threads open and close: one at a time, whoever drops the last object.

use std::thread;

use annulus_conformance::{suite, wgpu::WgpuRing};
use annulus_core::DType;
use annulus_wgpu::{Copier, Gpu, Options, Stopwatch, Tensor};
use ndarray::Array4;

use super::{F32, open};

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
