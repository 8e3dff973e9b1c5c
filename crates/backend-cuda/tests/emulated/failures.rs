//! What goes wrong beside kernels: each is one line that names it, and nothing panics.

use std::{
    ffi::{c_int, c_uint},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use annulus_conformance::{Case, Setting, Subject};
use annulus_core::{Backend, DType, Dims, Error, PositionBias, Spec};
use annulus_cuda::{
    Cuda, Variant,
    device::{
        Architecture, Compiler, CompilerSymbols, CudaBuffer, CudaTensor, Device, ImageKind, Program, Stream, Symbols,
        cudarc::{
            driver::sys::{CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUresult},
            nvrtc::sys::nvrtcResult,
        },
        emulator,
    },
};

use crate::support::{compiler, emulated, emulated_on, next_device, plain};

/// A device behind the emulated driver with some functions exchanged.
fn device(change: impl FnOnce(&mut Symbols)) -> Result<Device, Error> {
    Device::with_symbols(driver(change), next_device())
}

/// The emulated driver with some functions exchanged.
fn driver(change: impl FnOnce(&mut Symbols)) -> Symbols {
    let mut symbols = emulator::symbols();
    change(&mut symbols);
    symbols
}

// What a driver may say, as its functions.

unsafe extern "C" fn no_device(_: c_uint) -> CUresult {
    CUresult::CUDA_ERROR_NO_DEVICE
}

unsafe extern "C" fn mismatch(_: c_uint) -> CUresult {
    CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
}

unsafe extern "C" fn none(count: *mut c_int) -> CUresult {
    // SAFETY: a valid pointer, as the driver's function is given.
    unsafe { *count = 0 };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn old(value: *mut c_int, attribute: CUdevice_attribute, _: CUdevice) -> CUresult {
    let major = attribute == CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    // SAFETY: a valid pointer, as the driver's function is given.
    unsafe { *value = if major { 7 } else { 5 } };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn full(_: *mut CUdeviceptr, _: usize) -> CUresult {
    CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

unsafe extern "C" fn never_ready(_: CUevent) -> CUresult {
    CUresult::CUDA_ERROR_NOT_READY
}

static QUERIES: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn worse_and_worse(_: CUevent) -> CUresult {
    match QUERIES.fetch_add(1, Ordering::Relaxed) {
        0 => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        _ => CUresult::CUDA_ERROR_ASSERT,
    }
}

// What a compiler may say.

unsafe extern "C" fn broken(_: *mut c_int, _: *mut c_int) -> nvrtcResult {
    nvrtcResult::NVRTC_ERROR_INTERNAL_ERROR
}

unsafe extern "C" fn newer_only(list: *mut c_int) -> nvrtcResult {
    // SAFETY: room for one, as NVRTC's function is given by who was told of one.
    unsafe { *list = 100 };
    nvrtcResult::NVRTC_SUCCESS
}

/// What opening a backend says where driver and compiler are these.
fn refusal(driver: Result<Symbols, Error>, compiler: Result<CompilerSymbols, Error>) -> String {
    let Err(error) = Cuda::with_symbols(driver, || compiler, next_device()) else { return "nothing".into() };
    assert!(matches!(error, Error::Unsupported { .. }) && !error.is_fatal(), "{error}");
    error.to_string()
}

#[test]
fn a_machine_that_lacks_something_is_told_in_one_line_of_its_own() {
    let good = || Ok(emulator::compiler_symbols());
    let missing = |what: &str| Error::unsupported("CUDA", format!("this machine: {what}"));
    let said = [
        refusal(Err(missing("no driver (libcuda.so.1 was not found)")), good()),
        refusal(Ok(driver(|symbols| symbols.init = no_device)), good()),
        refusal(Ok(driver(|symbols| symbols.init = mismatch)), good()),
        refusal(Ok(driver(|symbols| symbols.device_attribute = old)), good()),
        refusal(Ok(emulator::symbols()), Err(missing("no run-time compiler (libnvrtc.so was not found)"))),
        refusal(Ok(emulator::symbols()), Ok(CompilerSymbols { architectures: newer_only, ..emulator::compiler_symbols() })),
    ];
    assert_eq!(
        said,
        [
            "CUDA is not supported by this machine: no driver (libcuda.so.1 was not found)",
            "CUDA is not supported by this machine: no GPU",
            "CUDA is not supported by this machine: the driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)",
            "CUDA is not supported by this machine: emulated GPU has compute capability 7.5, 8.0 or newer is needed",
            "CUDA is not supported by this machine: no run-time compiler (libnvrtc.so was not found)",
            "compute capability 8.0 is not supported by NVRTC 0.0",
        ]
    );
    assert_eq!(refusal(Ok(driver(|symbols| symbols.device_count = none)), good()), said[1]);
    let error = Device::with_symbols(emulator::symbols(), emulator::DEVICES).unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument { argument, .. } if argument == "device"), "{error}");
}

#[test]
fn the_real_libraries_are_there_or_missing_in_one_line() {
    for (error, word) in [(Symbols::system().err(), "no driver"), (CompilerSymbols::system().err(), "no run-time compiler")] {
        let Some(error) = error else { continue };
        assert!(error.to_string().contains(word) && !error.is_fatal(), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
    }
}

#[test]
fn memory_that_cannot_be_had_is_told_with_what_is_free_and_kills_nothing() {
    let device = device(|symbols| symbols.allocate = full).unwrap();
    assert_eq!(CudaBuffer::new(&device, 12).unwrap_err(), Error::OutOfMemory { asked: 12, free: Some(1 << 30) });
    assert_eq!(device.failure(), None);
}

#[test]
fn the_first_failure_is_the_answer_from_then_on() {
    let device = device(|symbols| symbols.event_query = worse_and_worse).unwrap();
    let stream = Stream::new(&device).unwrap();
    let first = stream.synchronize(Duration::from_secs(1)).unwrap_err();
    assert_eq!(first.to_string(), "device failed: cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS");
    assert!(first.is_fatal());
    assert_eq!(stream.record().unwrap_err(), first);
    assert_eq!(CudaBuffer::new(&device, 1).unwrap_err(), first);
    assert_eq!(QUERIES.load(Ordering::Relaxed), 1);
}

#[test]
fn work_that_never_ends_is_given_up_at_the_deadline() {
    let device = device(|symbols| symbols.event_query = never_ready).unwrap();
    let stream = Stream::new(&device).unwrap();
    let error = stream.synchronize(Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains("did not end within"), "{error}");
}

#[test]
fn a_compiler_that_fails_says_what_it_read() {
    let program = Program { name: "broken.cu", source: "this is no program", headers: &[] };
    let error = compiler().unwrap().compile(&program, &[], ImageKind::Cubin, "sm_80").unwrap_err();
    assert!(error.to_string().contains("broken.cu"), "{error}");
    let mut symbols = emulator::compiler_symbols();
    symbols.version = broken;
    let error = Compiler::with_symbols(symbols, None).unwrap_err();
    assert_eq!(error.to_string(), "device failed: nvrtcVersion: NVRTC_ERROR_INTERNAL_ERROR");
}

#[test]
fn a_gpu_newer_than_the_compiler_gets_ptx_and_an_unknown_one_an_error() {
    // the emulated compiler knows 8.0 only
    let compiler = compiler().unwrap();
    let target = |major, minor| compiler.target(Architecture { major, minor });
    assert_eq!(target(8, 0).unwrap(), (ImageKind::Cubin, "sm_80".into()));
    assert_eq!(target(9, 0).unwrap(), (ImageKind::Ptx, "compute_80".into()));
    let error = target(7, 5).unwrap_err();
    assert_eq!(error.to_string(), "compute capability 7.5 is not supported by NVRTC 0.0");
}

#[test]
fn what_the_backend_cannot_do_is_refused_at_plan_time() {
    let cuda = emulated(&[]).unwrap();
    assert_eq!(cuda.to_string(), "emulated GPU, compute capability 8.0, NVRTC 0.0");
    let spec = Spec::new(Dims::new(1, 8, 2, 64), DType::F32);
    cuda.supports(&spec).unwrap();
    let wide = Spec { dims: Dims { value_dim: Variant::MOST_DIM + 1, ..spec.dims }, ..spec.clone() };
    assert!(matches!(cuda.supports(&wide), Err(Error::Unsupported { what, .. }) if what.contains("257")));
    let function = std::sync::Arc::new(PositionBias::new("some", |_, _, _| 0.0));
    let biased = Spec { bias_function: Some(function), ..spec };
    assert!(matches!(cuda.supports(&biased), Err(Error::Unsupported { what, .. }) if what.contains("some")));
}

#[test]
fn a_write_past_the_end_is_seen_by_the_emulated_device() {
    let cuda = emulated(&[]).unwrap();
    let buffer = CudaBuffer::new(cuda.stream().device(), 8).unwrap();
    // SAFETY: none: this is the mistake that is to be seen. The byte after the buffer belongs to its guard.
    unsafe { std::ptr::write((buffer.address() + 8) as *mut u8, 1) };
    drop(buffer);
    assert!(cuda.stream().synchronize(Duration::from_secs(1)).is_err());
}

#[test]
fn a_plan_that_is_gone_leaves_no_memory_behind() {
    let ordinal = next_device();
    let cuda = emulated_on(ordinal, &[]).unwrap();
    let tensor = CudaTensor::upload(cuda.stream(), &[0; 32], DType::F32, [2, 2, 2, 1]).unwrap();
    assert_eq!(emulator::allocations(ordinal), 1);
    assert_eq!(tensor.download().unwrap(), [0; 32]);
    drop((tensor, cuda));
    assert_eq!(emulator::allocations(ordinal), 0);
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    let case = Case::random(3).in_dtype(DType::F32);
    let run = |seed| {
        emulator::set_seed(seed);
        plain().run(&case, &Setting::ALONE, 1).unwrap().remove(0)
    };
    let want = run(1);
    for seed in 2..5 {
        run(seed).same_bits(&want).unwrap();
    }
}
