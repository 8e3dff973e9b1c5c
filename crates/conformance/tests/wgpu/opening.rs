//! Devices that several threads open and close: one at a time, whoever drops the last object.

use std::thread;

use annulus_conformance::{suite, wgpu::WgpuRing};
use annulus_core::DType;
use annulus_wgpu::{CloseState, Copier, Gpu, Options, Stopwatch, Tensor};
use ndarray::Array4;

use super::{F32, open};

/// Opens a device, uses it, and returns how it was closed.
fn used(by: impl FnOnce(Gpu)) -> Option<u8> {
    let gpu = open(&Options::default())?;
    let close_state = gpu.close_state();
    assert_eq!(close_state.get(), CloseState::OPEN);
    by(gpu);
    Some(close_state.get())
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
        assert_eq!(closed, CloseState::IN_TURN, "pass {number}");
    }
    // the caller's own handle of the device closes it
    let mut kept = None;
    let closed = used(|gpu| kept = Some(gpu.device().clone()));
    assert_eq!(closed, Some(CloseState::OPEN));
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
                        assert_eq!(closed, Some(CloseState::IN_TURN));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
