//! Emulated driver functions. Every handle is the address of an object that its own function frees.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    process, ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use annulus_device_cuda::cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUstream,
};

use super::{
    context::{
        CURRENT, Context, DEVICES, EmulatedStream, context_of, drain, lock, push, with_context,
    },
    modules::{function_attribute, launch, module_function, module_load, module_unload},
    work::{Mark, Step, Work},
};
use crate::memory::tensor_map;
use annulus_device_cuda::{Api, Status, Symbols};

/// Object behind an event's handle; without a mark until it is recorded.
#[derive(Default)]
struct EmulatedEvent {
    mark: Mutex<Option<Arc<Mark>>>,
}

/// Returns the emulated driver, with devices of compute capability 8.0.
pub fn symbols() -> Symbols {
    Symbols {
        api: Api::Cuda,
        architecture_name: None,
        init,
        device_count,
        device_get,
        device_name,
        device_attribute: device_attribute::<8>,
        context_retain,
        context_release,
        context_set,
        context_current,
        memory_info,
        allocate,
        free,
        allocate_host,
        free_host,
        copy_to_device,
        copy_to_host,
        copy_on_device,
        stream_create,
        stream_destroy,
        stream_wait,
        event_create,
        event_destroy,
        event_record,
        event_query,
        module_load,
        module_unload,
        module_function,
        launch,
        function_attribute,
        tensor_map: Some(tensor_map),
        event_elapsed: Some(event_elapsed),
    }
}

/// Returns the emulated driver with devices of compute capability 9.0.
pub fn hopper_symbols() -> Symbols {
    Symbols { device_attribute: device_attribute::<9>, ..symbols() }
}

/// Returns the emulated driver as HIP's, with devices of a target: `hip_symbols::<0x942>()` are like
/// one die of an MI300X.
pub fn hip_symbols<const TARGET: u32>() -> Symbols {
    Symbols {
        api: Api::Hip,
        architecture_name: Some(architecture_name::<TARGET>),
        tensor_map: None,
        ..symbols()
    }
}

/// As [`hip_symbols`], with devices that share the memory of the host, like an MI300A in a process
/// with `HSA_XNACK=1`.
pub fn apu_symbols<const TARGET: u32>() -> Symbols {
    Symbols { device_attribute: apu_attribute, ..hip_symbols::<TARGET>() }
}

unsafe extern "C" fn apu_attribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> Status {
    if !matches!(
        attribute,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED
            | CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
    ) {
        // SAFETY: as the caller guarantees.
        return unsafe { device_attribute::<8>(value, attribute, device) };
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { *value = 1 };
    Status::SUCCESS
}

unsafe extern "C" fn architecture_name<const TARGET: u32>(
    to: *mut c_char,
    len: c_int,
    _: CUdevice,
) -> Status {
    let name = CString::new(format!("gfx{TARGET:x}:sramecc+:xnack-")).unwrap_or_default();
    // SAFETY: as the caller guarantees.
    unsafe { write_text(&name, to, len) }
}

/// Refuses calls in a forked child of the process that called first, as the driver does.
fn check_process() -> Status {
    static HOME: AtomicU32 = AtomicU32::new(0);
    let own = process::id();
    match HOME.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
        Err(home) if home != own => Status::NOT_INITIALIZED,
        _ => Status::SUCCESS,
    }
}

unsafe extern "C" fn init(_: c_uint) -> Status {
    check_process()
}

unsafe extern "C" fn device_count(count: *mut c_int) -> Status {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *count = DEVICES as c_int };
    Status::SUCCESS
}

unsafe extern "C" fn device_get(device: *mut CUdevice, ordinal: c_int) -> Status {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *device = ordinal };
    Status::SUCCESS
}

unsafe extern "C" fn device_name(name: *mut c_char, len: c_int, _: CUdevice) -> Status {
    // SAFETY: as the caller guarantees.
    unsafe { write_text(c"emulated GPU", name, len) }
}

/// Writes a text to room for `len` characters.
unsafe fn write_text(text: &CStr, to: *mut c_char, len: c_int) -> Status {
    let bytes = text.to_bytes_with_nul();
    if bytes.len() > len.unsigned_abs() as usize {
        return Status::INVALID_VALUE;
    }
    // SAFETY: the caller passes room for `len` characters.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), to, bytes.len()) };
    Status::SUCCESS
}

/// Writes an attribute of a device of compute capability `MAJOR`.0.
unsafe extern "C" fn device_attribute<const MAJOR: c_int>(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    _: CUdevice,
) -> Status {
    let number = match attribute {
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => MAJOR,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
        // few, so that a block of a persistent grid computes several tiles
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 2,
        // small, so that the tile scheduler has several sections of heads
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 64 * 1024,
        _ => return Status::INVALID_VALUE,
    };
    // SAFETY: the caller passes a valid pointer.
    unsafe { *value = number };
    Status::SUCCESS
}

unsafe extern "C" fn context_retain(context: *mut CUcontext, device: CUdevice) -> Status {
    let Some(found) = usize::try_from(device).ok().and_then(context_of) else {
        return Status::INVALID_DEVICE;
    };
    // SAFETY: the caller passes a valid pointer.
    unsafe { *context = ptr::from_ref(found).cast_mut().cast() };
    Status::SUCCESS
}

unsafe extern "C" fn context_release(_: CUdevice) -> Status {
    Status::SUCCESS
}

unsafe extern "C" fn context_set(context: CUcontext) -> Status {
    // SAFETY: null, or from `context_retain` and never freed.
    CURRENT.set(unsafe { context.cast::<Context>().as_ref() });
    check_process()
}

unsafe extern "C" fn context_current(context: *mut CUcontext) -> Status {
    let current = CURRENT.get().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the caller passes a valid pointer.
    unsafe { *context = current.cast_mut().cast() };
    Status::SUCCESS
}

unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> Status {
    // SAFETY: the caller passes valid pointers.
    unsafe { (*free, *total) = (1 << 30, 1 << 30) };
    Status::SUCCESS
}

unsafe extern "C" fn allocate(address: *mut CUdeviceptr, bytes: usize) -> Status {
    with_context(|context| {
        if bytes == 0 {
            return Status::INVALID_VALUE;
        }
        match lock(&context.memory).allocate(bytes) {
            // SAFETY: the caller passes a valid pointer.
            Some(new) => unsafe { *address = new },
            None => return Status::OUT_OF_MEMORY,
        }
        Status::SUCCESS
    })
}

unsafe extern "C" fn free(address: CUdeviceptr) -> Status {
    let Some(context) = CURRENT.get() else { return Status::INVALID_CONTEXT };
    // queued work completes first, as with the driver; memory of a failed device is freed, too
    if context.queues().iter().any(|queue| queue.drain() == Step::Failed) {
        context.fail();
    }
    if lock(&context.memory).free(address) {
        return Status::SUCCESS;
    }
    // a guard was overwritten: a write past the end
    context.fail();
    Status::ILLEGAL_ADDRESS
}

unsafe extern "C" fn allocate_host(start: *mut *mut c_void, bytes: usize) -> Status {
    with_context(|context| {
        // pinned memory is registered as device memory
        match lock(&context.memory).allocate(bytes) {
            // SAFETY: the caller passes a valid pointer.
            Some(address) => unsafe { *start = address as *mut c_void },
            None => return Status::OUT_OF_MEMORY,
        }
        Status::SUCCESS
    })
}

unsafe extern "C" fn free_host(start: *mut c_void) -> Status {
    // SAFETY: as the caller guarantees of both.
    unsafe { free(start as u64) }
}

unsafe extern "C" fn copy_to_device(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> Status {
    with_context(|context| {
        if !lock(&context.memory).holds(to, bytes) {
            return Status::INVALID_VALUE;
        }
        context.bytes_to_device.fetch_add(bytes as u64, Ordering::Relaxed);
        // a pinned source is read when the copy runs, a pageable one at once
        let pinned = lock(&context.memory).holds(from as u64, bytes);
        let now = if pinned {
            Vec::new()
        } else {
            // SAFETY: the caller passes as many bytes.
            unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec()
        };
        let from = from as u64;
        push(context, stream, move || {
            let source = if pinned { from as *const u8 } else { now.as_ptr() };
            // SAFETY: `to` was checked and is freed only after queued work; the caller keeps a
            // pinned source until the copy is done.
            unsafe { ptr::copy_nonoverlapping(source, to as *mut u8, bytes) };
            true
        })
    })
}

unsafe extern "C" fn copy_to_host(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> Status {
    with_context(|context| {
        if !lock(&context.memory).holds(from, bytes) {
            return Status::INVALID_VALUE;
        }
        context.bytes_to_host.fetch_add(bytes as u64, Ordering::Relaxed);
        let pinned = lock(&context.memory).holds(to as u64, bytes);
        let to = to as u64;
        let queued = push(context, stream, move || {
            // SAFETY: `from` was checked and is freed only after queued work; the caller keeps `to`
            // until the copy is done.
            unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            true
        });
        // a copy to pageable memory is complete when the call returns
        if queued == Status::SUCCESS && !pinned { drain(context, stream) } else { queued }
    })
}

unsafe extern "C" fn copy_on_device(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> Status {
    with_context(|context| {
        if !lock(&context.memory).holds(from, bytes) || !lock(&context.memory).holds(to, bytes) {
            return Status::INVALID_VALUE;
        }
        context.device_copies.fetch_add(1, Ordering::Relaxed);
        push(context, stream, move || {
            // SAFETY: both were checked and are freed only after queued work.
            unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
            true
        })
    })
}

unsafe extern "C" fn stream_create(stream: *mut CUstream, _: c_uint) -> Status {
    with_context(|context| {
        // SAFETY: the caller passes a valid pointer.
        unsafe { *stream = Box::into_raw(Box::new(EmulatedStream::new(context))).cast() };
        Status::SUCCESS
    })
}

unsafe extern "C" fn stream_destroy(stream: CUstream) -> Status {
    // SAFETY: created by `stream_create`, destroyed once.
    let stream = unsafe { Box::from_raw(stream.cast::<EmulatedStream>()) };
    if stream.queue.drain() == Step::Failed {
        stream.context.fail();
    }
    Status::SUCCESS
}

unsafe extern "C" fn stream_wait(stream: CUstream, event: CUevent, _: c_uint) -> Status {
    with_context(|context| {
        // SAFETY: both are valid handles.
        let (stream, event) =
            unsafe { (EmulatedStream::of(context, stream), &*event.cast::<EmulatedEvent>()) };
        if let Some(mark) = &*lock(&event.mark) {
            stream.queue.push(Work::Wait(Arc::clone(mark)));
        }
        Status::SUCCESS
    })
}

unsafe extern "C" fn event_create(event: *mut CUevent, _: c_uint) -> Status {
    with_context(|_| {
        // SAFETY: the caller passes a valid pointer.
        unsafe { *event = Box::into_raw(Box::<EmulatedEvent>::default()).cast() };
        Status::SUCCESS
    })
}

unsafe extern "C" fn event_destroy(event: CUevent) -> Status {
    // SAFETY: created by `event_create`, destroyed once.
    drop(unsafe { Box::from_raw(event.cast::<EmulatedEvent>()) });
    Status::SUCCESS
}

unsafe extern "C" fn event_record(event: CUevent, stream: CUstream) -> Status {
    with_context(|context| {
        // SAFETY: both are valid handles.
        let (stream, event) =
            unsafe { (EmulatedStream::of(context, stream), &*event.cast::<EmulatedEvent>()) };
        let mark = Mark::of(&stream.queue);
        stream.queue.push(Work::Record(Arc::clone(&mark)));
        *lock(&event.mark) = Some(mark);
        Status::SUCCESS
    })
}

/// Time between two events on the host.
unsafe extern "C" fn event_elapsed(ms: *mut f32, from: CUevent, to: CUevent) -> Status {
    with_context(|_| {
        let time = |event: CUevent| {
            // SAFETY: a valid handle.
            let event = unsafe { &*event.cast::<EmulatedEvent>() };
            lock(&event.mark).as_ref().and_then(|mark| mark.time())
        };
        let (Some(from), Some(to)) = (time(from), time(to)) else {
            return Status::NOT_READY;
        };
        // SAFETY: the caller passes a valid pointer.
        unsafe { *ms = to.duration_since(from).as_secs_f32() * 1e3 };
        Status::SUCCESS
    })
}

/// Runs one item of queued work per query, so that polling an event makes progress.
unsafe extern "C" fn event_query(event: CUevent) -> Status {
    with_context(|context| {
        // SAFETY: a valid handle.
        let event = unsafe { &*event.cast::<EmulatedEvent>() };
        let mark = lock(&event.mark).clone();
        let Some(mark) = mark else { return Status::SUCCESS };
        if mark.step() == Step::Failed {
            context.fail();
            return Status::LAUNCH_FAILED;
        }
        if mark.passed() { Status::SUCCESS } else { Status::NOT_READY }
    })
}
