//! Times of single kernels: driver functions that record events around every launch.

use std::{
    collections::BTreeMap,
    ffi::{c_char, c_uint, c_void},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use annulus_cuda::device::{
    Symbols,
    cudarc::driver::sys::{CUevent, CUfunction, CUmodule, CUresult, CUstream},
};

static DRIVER: OnceLock<Symbols> = OnceLock::new();
/// Names of kernels by handle.
static NAMES: Mutex<BTreeMap<usize, String>> = Mutex::new(BTreeMap::new());
/// Kernel and both events of every launch.
static LAUNCHES: Mutex<Vec<(usize, [usize; 2])>> = Mutex::new(Vec::new());
static RUNS: AtomicBool = AtomicBool::new(false);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the driver with launches that can be timed.
pub(crate) fn watched(driver: Symbols) -> Symbols {
    let driver = *DRIVER.get_or_init(|| driver);
    Symbols { module_function, launch, ..driver }
}

/// Calls `work`, which waits for its kernels, and returns the milliseconds of each kernel.
pub(crate) fn times<R>(work: impl FnOnce() -> R) -> (R, BTreeMap<String, f64>) {
    lock(&LAUNCHES).clear();
    RUNS.store(true, Ordering::Relaxed);
    let result = work();
    RUNS.store(false, Ordering::Relaxed);
    let mut times = BTreeMap::new();
    let names = lock(&NAMES).clone();
    for (kernel, [before, after]) in std::mem::take(&mut *lock(&LAUNCHES)) {
        let mut ms = f32::NAN;
        let elapsed = DRIVER.get().and_then(|driver| driver.event_elapsed);
        let (before, after) = (before as CUevent, after as CUevent);
        if let (Some(driver), Some(elapsed)) = (DRIVER.get(), elapsed) {
            // SAFETY: both events were recorded and have passed; they are destroyed once.
            unsafe {
                elapsed(&raw mut ms, before, after);
                (driver.event_destroy)(before);
                (driver.event_destroy)(after);
            }
        }
        let name = names.get(&kernel).cloned().unwrap_or_default();
        *times.entry(name).or_default() += f64::from(ms);
    }
    (result, times)
}

unsafe extern "C" fn module_function(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    let Some(driver) = DRIVER.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
    // SAFETY: the arguments are those of the driver's function; the name ends in 0.
    unsafe {
        let found = (driver.module_function)(function, module, name);
        if found == CUresult::CUDA_SUCCESS {
            let name = std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned();
            lock(&NAMES).insert(*function as usize, name);
        }
        found
    }
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
    let Some(driver) = DRIVER.get() else { return CUresult::CUDA_ERROR_NOT_INITIALIZED };
    let runs = RUNS.load(Ordering::Relaxed);
    let mark = || {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: a local of the right type, and a valid stream. Flags 0: with a time.
        unsafe {
            (driver.event_create)(&raw mut event, 0);
            (driver.event_record)(event, stream);
        }
        event as usize
    };
    let before = runs.then(mark);
    // SAFETY: the arguments are those of the driver's function.
    let launched = unsafe {
        (driver.launch)(
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
    };
    if let Some(before) = before {
        lock(&LAUNCHES).push((function as usize, [before, mark()]));
    }
    launched
}
