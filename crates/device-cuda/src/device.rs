//! One GPU: context, properties, and first failure.

use std::{
    ffi::{CStr, c_int},
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use annulus_core::{Error, HomeProcess, Process, Result};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute};

use crate::{
    Api, Status, Symbols,
    context::{ContextState, Driver, Retired, lock},
    hip,
    symbols::{DriverAdapter, driver_error, missing, open},
};

/// Compute capability, such as 8.0 or 9.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    /// Number before the dot.
    pub major: i32,
    /// Number after the dot.
    pub minor: i32,
}

impl Architecture {
    /// Oldest architecture that the kernels support: cp.async and bf16 `mma.sync` need 8.0.
    pub const OLDEST: Self = Self { major: 8, minor: 0 };
    /// Architecture with warpgroups (`wgmma`) and TMA.
    pub const HOPPER: Self = Self { major: 9, minor: 0 };

    /// Number in compiler targets: 80, 86, 90, …
    pub const fn number(self) -> i32 {
        self.major * 10 + self.minor
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What kernels are compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Gpu {
    /// An NVIDIA GPU of this compute capability.
    Nvidia(Architecture),
    /// An AMD GPU: its target's name with the features that are on or off, such as
    /// `gfx90a:sramecc+:xnack-`.
    Amd(String),
}

impl Gpu {
    /// Returns the compute capability of an NVIDIA GPU.
    pub const fn architecture(&self) -> Option<Architecture> {
        match self {
            Self::Nvidia(architecture) => Some(*architecture),
            Self::Amd(_) => None,
        }
    }
}

impl From<Architecture> for Gpu {
    fn from(architecture: Architecture) -> Self {
        Self::Nvidia(architecture)
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nvidia(architecture) => write!(f, "compute capability {architecture}"),
            Self::Amd(target) => write!(f, "{target}"),
        }
    }
}

/// Default of [`Device::set_hang_bound`].
///
/// No deadline of a ring ends the wait of a rank for its own kernels, because the rank sends
/// heartbeats meanwhile. A stream does not show the progress of a kernel, and a kernel computes the
/// tiles of a whole block. A backward pass over 2²⁰ queries and keys in 32 heads of 128 dims has
/// 4.5 · 10¹⁶ FLOPs, which take two minutes at 375 TFLOP/s and an hour at 13 TFLOP/s.
const HANG: Duration = Duration::from_secs(3600);

/// Context of one GPU. A clone refers to the same context.
///
/// The first failure is kept and returned by every later call, because the errors that CUDA reports
/// after a failure rarely name the cause.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<Parts>);

pub(crate) struct Parts {
    driver: Driver,
    properties: Properties,
    /// True if the device's primary context was retained; false for a borrowed context.
    is_retained: bool,
    failure: Mutex<Option<Error>>,
    hang_bound: Mutex<Duration>,
    pub(crate) state: Arc<ContextState>,
}

// SAFETY: a context is a handle that any thread may make current; every call does so first.
unsafe impl Send for Parts {}
// SAFETY: as above; the driver's functions may be called from several threads at once.
unsafe impl Sync for Parts {}

impl Device {
    /// Opens GPU `ordinal` of this machine with its primary context.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no driver, no such GPU, or it is too old.
    pub fn open(api: Api, ordinal: usize) -> Result<Self> {
        Self::with_symbols(Symbols::system(api)?, ordinal)
    }

    /// Counts the GPUs visible to this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no driver, or no GPU.
    pub fn count(api: Api) -> Result<usize> {
        start(&Symbols::system(api)?)
    }

    /// Checks that there is GPU `ordinal` and that it is new enough, without a context.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn check(api: Api, ordinal: usize) -> Result<()> {
        describe(&Symbols::system(api)?, ordinal).map(drop)
    }

    /// As [`Device::open`], with these functions.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn with_symbols(symbols: Symbols, ordinal: usize) -> Result<Self> {
        let properties = describe(&symbols, ordinal)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the table's functions have the driver's signatures and semantics; the pointer is
        // to a local of the right type.
        check(symbols.api, "cuDevicePrimaryCtxRetain", unsafe {
            (symbols.context_retain)(&raw mut context, properties.device)
        })?;
        Ok(Self::of(symbols, context, properties, true))
    }

    /// Borrows a caller's context: calls make it current; it is never released.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if its GPU is too old.
    ///
    /// # Safety
    /// * `context` is a context of GPU `ordinal`, created by the same driver;
    /// * it outlives the device and everything created from it.
    pub unsafe fn borrowed(symbols: Symbols, ordinal: usize, context: CUcontext) -> Result<Self> {
        let properties = describe(&symbols, ordinal)?;
        Ok(Self::of(symbols, context, properties, false))
    }

    fn of(symbols: Symbols, context: CUcontext, properties: Properties, is_retained: bool) -> Self {
        Self(Arc::new(Parts {
            driver: Driver { symbols, context, process: Process::current() },
            properties,
            is_retained,
            failure: Mutex::new(None),
            hang_bound: Mutex::new(HANG),
            state: ContextState::of(context),
        }))
    }

    /// Context that calls make current.
    pub fn context(&self) -> CUcontext {
        self.0.driver.context
    }

    pub(crate) fn symbols(&self) -> &Symbols {
        &self.0.driver.symbols
    }

    /// Name of the GPU.
    pub fn name(&self) -> &str {
        &self.0.properties.name
    }

    /// What kernels for the GPU are compiled for.
    pub fn gpu(&self) -> &Gpu {
        &self.0.properties.gpu
    }

    /// Interface of the driver.
    pub fn api(&self) -> Api {
        self.symbols().api
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.0.properties.multiprocessors
    }

    /// Bytes of the L2 cache.
    pub fn l2_bytes(&self) -> u64 {
        self.0.properties.l2_bytes
    }

    /// True if kernels access any memory of the host at its address and at full speed: on an AMD GPU
    /// that shares its memory with the processor (MI300A), in a process with `HSA_XNACK=1`. Not of
    /// NVIDIA's GPUs, where this has not been tried.
    pub fn shares_host_memory(&self) -> bool {
        self.0.properties.shares_host_memory
    }

    /// Returns the free device memory in bytes.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn free_bytes(&self) -> Result<u64> {
        let mut free = 0;
        let mut total = 0;
        // SAFETY: both point to locals.
        self.call("cuMemGetInfo", |symbols| unsafe {
            (symbols.memory_info)(&raw mut free, &raw mut total)
        })?;
        Ok(free as u64)
    }

    /// Returns the first failure, if any.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.0.failure).clone()
    }

    /// Sets the longest wait for queued work, after which the device counts as hung. Default: an
    /// hour. A pass whose kernels take longer needs more.
    pub fn set_hang_bound(&self, bound: Duration) {
        *lock(&self.0.hang_bound) = bound;
    }

    /// Returns the longest wait for queued work.
    pub fn hang_bound(&self) -> Duration {
        *lock(&self.0.hang_bound)
    }

    /// Records a failure: work did not end within `bound` and may never end.
    pub(crate) fn fail_as_hung(&self, bound: Duration) -> Error {
        let seconds = bound.as_secs_f64();
        self.suspect_hang();
        let what = format!("work on {} did not end within {seconds:.1} s", self.name());
        self.fail(Error::Device { what })
    }

    /// Records that work of the context may never end, such as that of a communicator that could
    /// not be aborted. Then nothing waits for it, and what it may use is leaked.
    pub fn suspect_hang(&self) {
        self.0.state.suspect_hang();
    }

    /// True if the driver has `cuTensorMapEncodeTiled`, which TMA needs: CUDA 12 and newer.
    pub fn has_tensor_maps(&self) -> bool {
        self.symbols().tensor_map.is_some()
    }

    /// Makes the context current on this thread, for libraries that use the current context.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn make_current(&self) -> Result<()> {
        self.call("cuCtxSetCurrent", |_| Status::SUCCESS)
    }

    /// Runs `work`, whose calls make the device's context the current one of this thread, and then
    /// makes current again the context that was: it decides on which GPU the program's own calls of
    /// the CUDA runtime work.
    ///
    /// # Errors
    /// [`Error::Device`] if a context cannot be read or set; [`Error::InvalidArgument`] in a forked
    /// child, without calling `work`; the errors of `work`.
    pub fn with_context_restored<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check_process()?;
        let symbols = self.symbols();
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: the pointer is to a local of the right type.
        check(symbols.api, "cuCtxGetCurrent", unsafe {
            (symbols.context_current)(&raw mut before)
        })?;
        let done = work();
        // SAFETY: no context, or one that the caller had made current and that it keeps.
        check(symbols.api, "cuCtxSetCurrent", unsafe { (symbols.context_set)(before) })?;
        done
    }

    /// Calls the driver with the context current. The first failure is kept and returned from then
    /// on.
    pub(crate) fn call(&self, name: &str, call: impl FnOnce(&Symbols) -> Status) -> Result<()> {
        if self.query(name, call)? {
            return Ok(());
        }
        Err(self.fail(Error::Device { what: format!("{name} is not ready") }))
    }

    /// As [`Device::call`] for queries: returns false for `CUDA_ERROR_NOT_READY`.
    pub(crate) fn query(&self, name: &str, call: impl FnOnce(&Symbols) -> Status) -> Result<bool> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        match self.call_unchecked(call) {
            Status::SUCCESS => Ok(true),
            Status::NOT_READY => Ok(false),
            error => Err(self.fail_in(name, error)),
        }
    }

    /// Checks that this is not a forked child of the process that opened the device.
    fn check_process(&self) -> Result<()> {
        self.0.driver.process.check("device")
    }

    /// Calls the driver with the context current, even after a failure; records nothing.
    pub(crate) fn call_unchecked(&self, call: impl FnOnce(&Symbols) -> Status) -> Status {
        self.0.driver.call_unchecked(call)
    }

    /// Records the failure of a driver function, as [`Device::fail`]; in a forked child, whose
    /// calls the driver refuses, returns that as the error.
    pub(crate) fn fail_in(&self, name: &str, error: Status) -> Error {
        self.check_process()
            .err()
            .unwrap_or_else(|| self.fail(driver_error(self.api(), name, error)))
    }

    /// Records a failure, unless there is an earlier one; returns the first.
    pub(crate) fn fail(&self, error: Error) -> Error {
        lock(&self.0.failure).get_or_insert(error).clone()
    }
}

impl PartialEq for Device {
    /// Compares contexts.
    fn eq(&self, other: &Self) -> bool {
        self.0.driver.context == other.0.driver.context
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.name(), self.gpu())
    }
}

impl Parts {
    /// Frees `what` now if the context is idle, else later.
    pub(crate) fn retire(&self, what: Retired) {
        self.state.retire(&self.driver, what);
    }

    /// As [`ContextState::drain`].
    pub(crate) fn drain(&self) -> bool {
        if !self.driver.process.is_current() {
            return false;
        }
        let failed = lock(&self.failure).is_some();
        self.state.drain(&self.driver, failed)
    }

    /// As [`ContextState::make_room`].
    pub(crate) fn make_room(&self) -> bool {
        let failed = lock(&self.failure).is_some();
        self.state.make_room(&self.driver, failed)
    }
}

impl Drop for Parts {
    /// Keeps the context if work on it does not end: the driver would wait for that work.
    fn drop(&mut self) {
        if self.is_retained && self.drain() {
            // SAFETY: retained once by `with_symbols`; everything created from it holds a reference
            // to this.
            unsafe { (self.driver.symbols.context_release)(self.properties.device) };
        }
    }
}

/// Properties of a GPU.
struct Properties {
    device: CUdevice,
    name: String,
    gpu: Gpu,
    multiprocessors: usize,
    l2_bytes: u64,
    shares_host_memory: bool,
}

/// Returns the properties of GPU `ordinal`.
fn describe(symbols: &Symbols, ordinal: usize) -> Result<Properties> {
    let count = start(symbols)?;
    let check = |name, result| check(symbols.api, name, result);
    let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let number = number.ok_or_else(|| {
        Error::invalid("device", ordinal, format!("a GPU's number, below {count}"))
    })?;
    // SAFETY: the table's functions have the driver's signatures and semantics; every pointer is to
    // a local of the right type.
    unsafe {
        let mut device: CUdevice = 0;
        check("cuDeviceGet", (symbols.device_get)(&raw mut device, number))?;
        let mut name = [0; 256];
        check("cuDeviceGetName", (symbols.device_name)(name.as_mut_ptr(), 255, device))?;
        let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
        let attribute = |which| -> Result<i32> {
            let mut value: c_int = 0;
            check(
                "cuDeviceGetAttribute",
                (symbols.device_attribute)(&raw mut value, which, device),
            )?;
            Ok(value)
        };
        let gpu = match symbols.architecture_name {
            Some(read) => {
                let mut target = [0; 256];
                check("cuGetDeviceProperties", read(target.as_mut_ptr(), 256, device))?;
                Gpu::Amd(CStr::from_ptr(target.as_ptr()).to_string_lossy().into_owned())
            }
            None => Gpu::Nvidia(Architecture {
                major: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            }),
        };
        if gpu.architecture().is_some_and(|architecture| architecture < Architecture::OLDEST) {
            let oldest = Architecture::OLDEST;
            return Err(missing("CUDA", format!("{name} has {gpu}, {oldest} or newer is needed")));
        }
        let count = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let multiprocessors = usize::try_from(count).unwrap_or(0).max(1);
        let bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?;
        let l2_bytes = u64::try_from(bytes).unwrap_or(0);
        // a driver that does not know an attribute has no such memory
        let shares_host_memory = symbols.api == Api::Hip
            && [
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
            ]
            .into_iter()
            .all(|which| attribute(which) == Ok(1));
        Ok(Properties { device, name, gpu, multiprocessors, l2_bytes, shares_host_memory })
    }
}

/// Process that initialised the driver, which does not work in its forked children.
static HOME: HomeProcess = HomeProcess::unused();

/// Initializes the driver and counts its GPUs; an error if there is none, and in a forked child of
/// a process that has initialised it.
fn start(symbols: &Symbols) -> Result<usize> {
    let api = symbols.api;
    let what = api.name();
    HOME.check(what)?;
    // SAFETY: the table's functions have the driver's signatures and semantics.
    match unsafe { (symbols.init)(0) } {
        Status::SUCCESS => HOME.note(),
        Status::NO_DEVICE => return Err(missing(what, "no GPU")),
        // HIP's answer of a machine without a GPU
        Status::INVALID_DEVICE if api == Api::Hip => return Err(missing(what, "no GPU")),
        error => return Err(missing(what, format!("the driver does not start ({error:?})"))),
    }
    let mut count: c_int = 0;
    // SAFETY: as above; the pointer is to a local of the right type.
    check(api, "cuDeviceGetCount", unsafe { (symbols.device_count)(&raw mut count) })?;
    usize::try_from(count).ok().filter(|&count| count > 0).ok_or_else(|| missing(what, "no GPU"))
}

fn check(api: Api, name: &str, result: Status) -> Result<()> {
    if result == Status::SUCCESS { Ok(()) } else { Err(driver_error(api, name, result)) }
}

impl Symbols {
    /// Loads this machine's driver of an interface.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if there is none, or it lacks a function.
    pub fn system(api: Api) -> Result<Self> {
        if api == Api::Hip {
            return hip::symbols();
        }
        let library = open(&["libcuda.so.1", "libcuda.so"])
            .ok_or_else(|| missing("CUDA", "no driver (libcuda.so.1 was not found)"))?;
        // SAFETY: the library of this name is the driver.
        unsafe {
            let own = DriverAdapter::of(library, "CUDA", api)?;
            Self::of(library, "CUDA", api, own)
        }
    }
}
