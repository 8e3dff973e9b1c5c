//! Forked children: devices, tensors, plans and communicators of NCCL of the parent are refused
//! there, and their drop changes nothing in the parent.

use std::{
    ffi::{c_int, c_uint},
    panic::{AssertUnwindSafe, catch_unwind},
};

use annulus::{Attention, LocalRing, Tensors};
use annulus_core::{DType, Dims, Error, Result};
use annulus_cuda::device::{CudaTensor, Device, Stream};
use annulus_cuda_emulator as emulator;
use ndarray::Array4;
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::{nccl::plans, support::emulated};

unsafe extern "C" {
    safe fn fork() -> c_int;
    safe fn alarm(seconds: c_uint) -> c_uint;
    safe fn _exit(status: c_int) -> !;
}

/// Runs `work` in a forked child, which has to end before a deadline and without a panic.
fn in_child(work: impl FnOnce()) {
    let child = fork();
    if child == 0 {
        alarm(15);
        _exit(c_int::from(catch_unwind(AssertUnwindSafe(work)).is_err()));
    }
    let ended = waitpid(Pid::from_raw(child), WaitOptions::empty());
    let status = ended.ok().flatten().map(|(_, status)| status);
    let code = status.and_then(|status| status.exit_status());
    assert_eq!(code, Some(0), "{status:?}");
}

fn is_refused<T>(result: Result<T>) {
    let Err(error) = result else { panic!("a value of the parent") };
    let told = error.to_string();
    let of_parent = match error {
        Error::InvalidArgument { .. } => told.contains("from which this process was forked"),
        Error::Unsupported { .. } => told.starts_with("CUDA is not supported by a forked process"),
        _ => false,
    };
    assert!(of_parent, "{told}");
}

fn nccl_ring() -> Result<LocalRing> {
    plans(&Attention::new().causal(true).into(), Dims::new(1, 70, 2, 16), 2)
}

#[test]
fn a_child_refuses_gpus_of_its_parent_and_frees_nothing() {
    let x = Array4::from_shape_fn((1, 70, 2, 16), |(_, row, head, c)| {
        ((row * 7 + head * 5 + c * 3) % 13) as f32 * 0.1 - 0.5
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut ring = Some(nccl_ring().unwrap());
    let want = ring.as_mut().unwrap().forward(&tensors).unwrap().out;
    let cuda = emulated().unwrap();
    let bytes: Vec<u8> = (0..=255).collect();
    let upload = || CudaTensor::upload(cuda.stream(), &bytes, DType::F32, [1, 4, 4, 4]);
    let mut tensor = Some(upload().unwrap());
    let mut stream = Some(Stream::new(cuda.stream().device()).unwrap());
    in_child(|| {
        let mut ring = ring.take().unwrap();
        is_refused(ring.forward(&tensors));
        is_refused(upload());
        is_refused(Stream::new(cuda.stream().device()));
        is_refused(cuda.stream().device().free_bytes());
        is_refused(cuda.stream().device().with_context_restored(|| Ok(())));
        is_refused(Device::with_symbols(emulator::symbols(), 0));
        is_refused(nccl_ring());
        drop((ring, tensor.take(), stream.take(), cuda.clone()));
    });
    assert_eq!(ring.as_mut().unwrap().forward(&tensors).unwrap().out, want);
    drop((tensor, stream));
}
