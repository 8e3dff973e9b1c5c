//! A caller's context and stream: all work uses them, and they are neither released nor destroyed.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use annulus_conformance::{Case, Draw, Judge, Masks, Setting, Subject};
use annulus_core::{DType, Dims, Layout, Spec};
use annulus_cuda::{
    Cuda,
    device::{
        Device, Stream, Symbols,
        cudarc::driver::sys::{CUcontext, CUdevice, CUfunction, CUresult, CUstream},
    },
};
use annulus_cuda_emulator as emulator;

use crate::{
    common::staged,
    support::{compiler, next_device},
};

static RETAINED: AtomicUsize = AtomicUsize::new(0);
static RELEASED: AtomicUsize = AtomicUsize::new(0);
static DESTROYED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Streams of the kernel launches.
static USED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn note(list: &Mutex<Vec<usize>>, stream: CUstream) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(stream as usize);
}

unsafe extern "C" fn retain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    RETAINED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().context_retain)(context, device) }
}

unsafe extern "C" fn release(device: CUdevice) -> CUresult {
    RELEASED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().context_release)(device) }
}

unsafe extern "C" fn destroy(stream: CUstream) -> CUresult {
    note(&DESTROYED, stream);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().stream_destroy)(stream) }
}

unsafe extern "C" fn launch(
    function: CUfunction,
    x: c_uint,
    y: c_uint,
    z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    note(&USED, stream);
    // SAFETY: the arguments are those of the driver's function.
    unsafe {
        (emulator::symbols().launch)(
            function,
            x,
            y,
            z,
            threads_x,
            threads_y,
            threads_z,
            shared_bytes,
            stream,
            parameters,
            extra,
        )
    }
}

#[test]
fn a_borrowed_context_and_stream_are_used_and_never_released() {
    let symbols = Symbols {
        context_retain: retain,
        context_release: release,
        stream_destroy: destroy,
        launch,
        ..emulator::symbols()
    };
    let lent = Mutex::new(Vec::new());
    let subject = staged("emulated cuda in lent streams", Duration::ZERO, || {
        let ordinal = next_device();
        let own = emulator::symbols();
        let mut context = std::ptr::null_mut();
        let mut stream = std::ptr::null_mut();
        // SAFETY: pointers to locals. Context and stream outlive the run.
        let stream = unsafe {
            assert_eq!(
                (own.context_retain)(&raw mut context, ordinal as c_int),
                CUresult::CUDA_SUCCESS
            );
            assert_eq!((own.context_set)(context), CUresult::CUDA_SUCCESS);
            assert_eq!((own.stream_create)(&raw mut stream, 1), CUresult::CUDA_SUCCESS);
            lent.lock().unwrap().push(stream as usize);
            Stream::borrowed(&Device::borrowed(symbols, ordinal, context)?, stream)
        };
        Ok(Cuda::on(stream, compiler()?))
    });
    let dims = Dims {
        batch: 1,
        q_len: 70,
        kv_len: 70,
        q_heads: 2,
        kv_heads: 1,
        head_dim: 16,
        value_dim: 16,
    };
    let masks = Masks { causal: true, ..Masks::default() };
    let case = Case::new("lent", Spec::new(dims, DType::F64), masks, &mut Draw::new(7))
        .in_dtype(DType::F16);
    let answers = subject.run(&case, &Setting::new(2, Layout::Contiguous), 1).unwrap();
    let judge = Judge::new(&case).unwrap();
    answers.iter().for_each(|answer| judge.check(answer).unwrap());

    let (lent, used, destroyed) =
        (lent.lock().unwrap(), USED.lock().unwrap(), DESTROYED.lock().unwrap());
    assert!(
        !used.is_empty() && used.iter().all(|stream| lent.contains(stream)),
        "{used:?} {lent:?}"
    );
    assert!(lent.iter().all(|stream| !destroyed.contains(stream)), "{destroyed:?} {lent:?}");
    assert_eq!((RETAINED.load(Ordering::Relaxed), RELEASED.load(Ordering::Relaxed)), (0, 0));
    for &stream in &*lent {
        // SAFETY: the stream was not destroyed.
        let code = unsafe { (emulator::symbols().stream_destroy)(stream as CUstream) };
        assert_eq!(code, CUresult::CUDA_SUCCESS);
    }
}
