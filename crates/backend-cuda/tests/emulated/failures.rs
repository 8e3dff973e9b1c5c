//! Failures outside the kernels: each gives a one-line error that names it, without a panic.

use std::{
    ffi::{c_int, c_void},
    ops::ControlFlow,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use annulus_conformance::Case;
use annulus_core::{
    Backend, DType, DeviceSpace, Dims, Error, HostView, HostViewMut, PositionBias, Spec,
};
use annulus_cuda::{
    Cuda, Level, Variant,
    device::{
        Architecture, Compiler, CompilerStatus, CudaBuffer, CudaSpace, CudaTensor, Device,
        ImageKind, KernelProgram, Module, PinnedBuffer, Status, Stream, Symbols, TensorMap,
        cudarc::driver::sys::{CUdevice, CUdeviceptr, CUevent, CUmodule},
    },
};
use annulus_cuda_emulator as emulator;

use ndarray::Array4;

use crate::support::{compiler, emulated, emulated_on, next_device, orders_change_no_bit, plain};

/// A tick that never stops a copy.
fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A device on the emulated driver with some functions replaced.
fn device(change: impl FnOnce(&mut Symbols)) -> Result<Device, Error> {
    Device::with_symbols(driver(change), next_device())
}

/// The emulated driver with some functions replaced.
fn driver(change: impl FnOnce(&mut Symbols)) -> Symbols {
    let mut symbols = emulator::symbols();
    change(&mut symbols);
    symbols
}

// Driver functions that fail in one way each.

unsafe extern "C" fn full(_: *mut CUdeviceptr, _: usize) -> Status {
    Status::OUT_OF_MEMORY
}

unsafe extern "C" fn never_ready(_: CUevent) -> Status {
    Status::NOT_READY
}

static QUERIES: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn worse_and_worse(_: CUevent) -> Status {
    match QUERIES.fetch_add(1, Ordering::Relaxed) {
        0 => Status::ILLEGAL_ADDRESS,
        _ => Status::ASSERT,
    }
}

// Compiler functions that fail in one way each.

unsafe extern "C" fn broken(_: *mut c_int, _: *mut c_int) -> CompilerStatus {
    CompilerStatus::INTERNAL_ERROR
}

#[test]
fn out_of_memory_reports_free_bytes_and_is_not_fatal() {
    let device = device(|symbols| symbols.allocate = full).unwrap();
    let error = CudaBuffer::new(&device, 12).unwrap_err();
    assert_eq!(
        error,
        Error::OutOfMemory { what: "a device buffer".into(), asked: 12, free: Some(1 << 30) }
    );
    assert_eq!(device.failure(), None);
}

#[test]
fn an_allocation_that_no_free_can_help_does_not_wait_for_work() {
    let device = device(|symbols| {
        symbols.allocate = full;
        symbols.event_query = never_ready;
    })
    .unwrap();
    let stream = Stream::new(&device).unwrap();
    let began = Instant::now();
    assert!(matches!(CudaBuffer::new(&device, 12), Err(Error::OutOfMemory { .. })));
    // a third of the wait for dropped memory
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    device.suspect_hang();
    drop(stream);
}

#[test]
fn the_first_failure_is_returned_by_every_later_call() {
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
fn work_that_never_ends_fails_at_the_deadline() {
    let device = device(|symbols| symbols.event_query = never_ready).unwrap();
    let stream = Stream::new(&device).unwrap();
    let error = stream.synchronize(Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains("did not end within"), "{error}");
}

/// Ticks of the downloads from a device with [`ready_after_ticks`], and those after which its work
/// ends.
static TICKS: AtomicUsize = AtomicUsize::new(0);
const WORK_TICKS: usize = 20;

/// As the emulated driver, after [`WORK_TICKS`].
unsafe extern "C" fn ready_after_ticks(event: CUevent) -> Status {
    if TICKS.load(Ordering::Relaxed) < WORK_TICKS {
        return Status::NOT_READY;
    }
    // SAFETY: as required of the caller.
    unsafe { (emulator::symbols().event_query)(event) }
}

#[test]
fn a_download_ticks_while_it_waits_for_work() {
    let device = device(|symbols| symbols.event_query = ready_after_ticks).unwrap();
    // a wait without ticks fails
    device.set_hang_bound(Duration::from_secs(60));
    let stream = Stream::new(&device).unwrap();
    let mut tensor = CudaSpace::tensor(&stream, DType::F32, [1, 1, 2, 2]).unwrap();
    let numbers = Array4::from_shape_fn((1, 1, 2, 2), |(_, _, h, d)| (2 * h + d) as f32);
    CudaSpace::upload(&stream, HostView::F32(numbers.view()), &mut tensor, &mut go_on).unwrap();
    let download = |last: usize| {
        let mut copy = Array4::<f32>::zeros((1, 1, 2, 2));
        let into = &mut HostViewMut::F32(copy.view_mut());
        let tick = &mut || {
            let ticks = TICKS.fetch_add(1, Ordering::Relaxed) + 1;
            if ticks < last { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        CudaSpace::download(&stream, &tensor, into, tick).unwrap();
        copy
    };
    let began = Instant::now();
    // a break ends the wait before the work ends, and nothing is copied
    assert!(download(5) == Array4::<f32>::zeros((1, 1, 2, 2)));
    assert_eq!(TICKS.load(Ordering::Relaxed), 5);
    assert!(download(usize::MAX) == numbers);
    // one each millisecond at most, and one after the piece that is copied
    let ticks = TICKS.load(Ordering::Relaxed);
    let most = began.elapsed().as_millis() as usize + 1;
    assert!((WORK_TICKS + 1..=most).contains(&ticks), "{ticks} ticks of at most {most}");
}

static FREED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn counted_free(_: CUdeviceptr) -> Status {
    FREED.fetch_add(1, Ordering::Relaxed);
    Status::SUCCESS
}

unsafe extern "C" fn counted_free_host(_: *mut c_void) -> Status {
    FREED.fetch_add(1, Ordering::Relaxed);
    Status::SUCCESS
}

unsafe extern "C" fn counted_unload(_: CUmodule) -> Status {
    FREED.fetch_add(1, Ordering::Relaxed);
    Status::SUCCESS
}

unsafe extern "C" fn counted_release(_: CUdevice) -> Status {
    FREED.fetch_add(1, Ordering::Relaxed);
    Status::SUCCESS
}

/// The driver waits for a kernel before it frees memory, unloads a module or releases the context:
/// for ever, if the kernel hangs.
#[test]
fn what_hanging_work_may_use_is_leaked() {
    let device = device(|symbols| {
        symbols.event_query = never_ready;
        symbols.free = counted_free;
        symbols.free_host = counted_free_host;
        symbols.module_unload = counted_unload;
        symbols.context_release = counted_release;
    })
    .unwrap();
    let stream = Stream::new(&device).unwrap();
    let buffer = CudaBuffer::new(&device, 8).unwrap();
    let pinned = PinnedBuffer::zeroed(&device, 8).unwrap();
    let (source, headers) = ("#include \"primitives.cuh\"\n", [("primitives.cuh", "")]);
    let program = KernelProgram { name: "empty.cu", source, headers: &headers };
    let image = compiler().unwrap().compile(&program, &[], ImageKind::Cubin, "sm_80").unwrap();
    let module = Module::load(&device, &image).unwrap();
    let began = Instant::now();
    stream.synchronize(Duration::from_millis(20)).unwrap_err();
    drop((buffer, pinned, module, stream, device));
    assert_eq!(FREED.load(Ordering::Relaxed), 0);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn without_a_function_for_tensor_maps_only_warpgroups_are_refused() {
    let mut symbols = emulator::hopper_symbols();
    symbols.tensor_map = None;
    let nvrtc = || Ok(emulator::hopper_compiler_symbols());
    let cuda = Cuda::with_symbols(Ok(symbols), nvrtc, None, next_device()).unwrap();
    assert_eq!(cuda.level(), Level::Matrix);
    let map = TensorMap::new(cuda.stream().device(), 4096, [24, 100, 2, 1], [96, 48, 9600], 128);
    assert!(matches!(map, Err(Error::Unsupported { .. })), "{map:?}");
    let error = cuda.at_level(Level::Warpgroup).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuda level warpgroup is not supported by a driver without cuTensorMapEncodeTiled"
    );
}

#[test]
fn a_compiler_error_names_the_file() {
    let program = KernelProgram { name: "broken.cu", source: "this is no program", headers: &[] };
    let error = compiler().unwrap().compile(&program, &[], ImageKind::Cubin, "sm_80").unwrap_err();
    assert!(error.to_string().contains("broken.cu"), "{error}");
    let mut symbols = emulator::compiler_symbols();
    symbols.version = broken;
    let error = Compiler::with_symbols(symbols, None).unwrap_err();
    assert_eq!(error.to_string(), "device failed: nvrtcVersion: NVRTC_ERROR_INTERNAL_ERROR");
}

#[test]
fn ptx_is_compiled_for_newer_gpus_and_unknown_ones_are_refused() {
    // the emulated compiler supports 8.0 only
    let compiler = compiler().unwrap();
    let target = |major, minor| compiler.target(&Architecture { major, minor }.into());
    assert_eq!(target(8, 0).unwrap(), (ImageKind::Cubin, "sm_80".into()));
    assert_eq!(target(9, 0).unwrap(), (ImageKind::Ptx, "compute_80".into()));
    let error = target(7, 5).unwrap_err();
    assert_eq!(error.to_string(), "compute capability 7.5 is not supported by NVRTC 0.0");
}

#[test]
fn unsupported_specs_are_refused_at_plan_time() {
    let cuda = emulated().unwrap();
    assert_eq!(cuda.to_string(), "emulated GPU, compute capability 8.0, NVRTC 0.0, level matrix");
    let spec = Spec::new(Dims::new(1, 8, 2, 64), DType::F32);
    let capabilities = cuda.capabilities(&spec).unwrap();
    assert_eq!((capabilities.kv_tile, capabilities.reproducible), (64, false));
    let wide = Spec { dims: Dims { value_dim: Variant::MAX_DIM + 1, ..spec.dims }, ..spec.clone() };
    let refused = |spec: &Spec, text: &str| {
        let result = cuda.capabilities(spec);
        matches!(result, Err(Error::Unsupported { what, .. }) if what.contains(text))
    };
    assert!(refused(&wide, "257"));
    let function = std::sync::Arc::new(PositionBias::new("some", |_, _, _| 0.0));
    let biased = Spec { bias_function: Some(function), ..spec };
    assert!(refused(&biased, "some"));
}

#[test]
fn a_write_past_the_end_is_detected_by_the_emulator() {
    let cuda = emulated().unwrap();
    let buffer = CudaBuffer::new(cuda.stream().device(), 8).unwrap();
    // SAFETY: violated on purpose: the byte after the buffer belongs to its guard.
    unsafe { std::ptr::write((buffer.address() + 8) as *mut u8, 1) };
    drop(buffer);
    assert!(cuda.stream().synchronize(Duration::from_secs(1)).is_err());
}

#[test]
fn host_tensors_of_any_strides_are_copied_and_other_shapes_refused() {
    let (device, other) = (device(|_| ()).unwrap(), device(|_| ()).unwrap());
    let [stream, elsewhere] = [&device, &other].map(|device| Stream::new(device).unwrap());
    let mut tensor = CudaSpace::tensor(&stream, DType::F32, [2, 3, 4, 5]).unwrap();
    let numbers = Array4::from_shape_fn((5, 4, 3, 2), |(x, h, i, b)| {
        (x + 10 * h + 50 * i) as f32 + 200.0 * b as f32
    });
    let transposed = numbers.view().reversed_axes();
    CudaSpace::upload(&stream, HostView::F32(transposed), &mut tensor, &mut go_on).unwrap();
    let mut dense = Array4::zeros((2, 3, 4, 5));
    let into = &mut HostViewMut::F32(dense.view_mut());
    CudaSpace::download(&stream, &tensor, into, &mut go_on).unwrap();
    let mut strided = Array4::zeros((5, 4, 3, 2));
    let into = &mut HostViewMut::F32(strided.view_mut().reversed_axes());
    CudaSpace::download(&stream, &tensor, into, &mut go_on).unwrap();
    assert!(dense == transposed && strided == numbers);

    let doubles = Array4::<f64>::zeros((2, 3, 4, 5));
    for (stream, view, wrong) in [
        (&stream, HostView::F32(numbers.view()), "host tensor"),
        (&stream, HostView::F64(doubles.view()), "host tensor"),
        (&elsewhere, HostView::F32(transposed), "stream"),
    ] {
        let error = CudaSpace::upload(stream, view, &mut tensor, &mut go_on).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument { argument, .. } if argument == wrong),
            "{error}"
        );
    }
}

#[test]
fn a_dropped_plan_frees_its_memory() {
    let ordinal = next_device();
    let cuda = emulated_on(ordinal).unwrap();
    let tensor = CudaTensor::upload(cuda.stream(), &[0; 32], DType::F32, [2, 2, 2, 1]).unwrap();
    assert_eq!(emulator::allocations(ordinal), 1);
    assert_eq!(tensor.download().unwrap(), [0; 32]);
    drop((tensor, cuda));
    assert_eq!(emulator::allocations(ordinal), 0);
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    orders_change_no_bit(plain, &Case::random(3).in_dtype(DType::F32), 1..5);
}
