//! One GPU: its context, what it is, and the first thing that went wrong on it.

use std::{
    ffi::{CStr, c_int},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use annulus_core::{Error, Result};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUresult};

use crate::{Symbols, library::absent};

/// Compute capability: 8.0, 8.6, 9.0, …
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    /// Before the point.
    pub major: i32,
    /// After it.
    pub minor: i32,
}

impl Architecture {
    /// The oldest that the kernels are made for.
    pub const OLDEST: Self = Self { major: 8, minor: 0 };
    /// The one whose warpgroups multiply.
    pub const HOPPER: Self = Self { major: 9, minor: 0 };

    /// Its number among those that compilers know: 80, 86, 90, …
    pub const fn number(self) -> i32 {
        self.major * 10 + self.minor
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One GPU's context. A clone is the same.
///
/// The first failure of the device is kept, and is what every later call returns: what CUDA says after it has failed says little.
#[derive(Clone)]
pub struct Device(Arc<Parts>);

struct Parts {
    symbols: Symbols,
    context: CUcontext,
    /// Whose primary context it is, if it was retained here.
    retained: Option<CUdevice>,
    name: String,
    architecture: Architecture,
    failure: Mutex<Option<Error>>,
}

// SAFETY: a context is a handle that any thread may make current; every call does so first.
unsafe impl Send for Parts {}
// SAFETY: as above; the driver's functions may be called from several threads at once.
unsafe impl Sync for Parts {}

impl Device {
    /// GPU number `ordinal` of this machine, by its primary context.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no driver, no such GPU, or it is too old.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::with_symbols(Symbols::system()?, ordinal)
    }

    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no driver, or no GPU.
    pub fn count() -> Result<usize> {
        start(&Symbols::system()?)
    }

    /// As [`Device::open`], through these functions.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn with_symbols(symbols: Symbols, ordinal: usize) -> Result<Self> {
        let (device, name, architecture) = describe(&symbols, ordinal)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the table's functions have the signatures and meanings of the driver's; the pointer is to a local of the right type.
        check("cuDevicePrimaryCtxRetain", unsafe { (symbols.context_retain)(&raw mut context, device) })?;
        Ok(Self(Arc::new(Parts { symbols, context, retained: Some(device), name, architecture, failure: Mutex::new(None) })))
    }

    /// A caller's context, borrowed: it is made current by calls and never released.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if its GPU is too old.
    ///
    /// # Safety
    /// * `context` is a context of GPU number `ordinal`, made through the same driver;
    /// * it outlives the device and everything made of it.
    pub unsafe fn borrowed(symbols: Symbols, ordinal: usize, context: CUcontext) -> Result<Self> {
        let (_, name, architecture) = describe(&symbols, ordinal)?;
        Ok(Self(Arc::new(Parts { symbols, context, retained: None, name, architecture, failure: Mutex::new(None) })))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What it can run.
    pub fn architecture(&self) -> Architecture {
        self.0.architecture
    }

    /// Bytes of its memory that are free.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both point to locals.
        self.call("cuMemGetInfo", |symbols| unsafe { (symbols.memory_info)(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// The first failure, if there was one.
    pub fn failure(&self) -> Option<Error> {
        self.lock_failure().clone()
    }

    /// Makes its context the one of this thread, for libraries that ask for it.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn make_current(&self) -> Result<()> {
        self.call("cuCtxSetCurrent", |_| CUresult::CUDA_SUCCESS)
    }

    /// Calls the driver with the context current. What fails is kept, and is the answer from then on.
    pub(crate) fn call(&self, name: &str, call: impl FnOnce(&Symbols) -> CUresult) -> Result<()> {
        if self.ask(name, call)? {
            return Ok(());
        }
        Err(self.fail(Error::Device { what: format!("{name} is not ready") }))
    }

    /// As [`Device::call`], for questions: whether the answer is yes.
    pub(crate) fn ask(&self, name: &str, call: impl FnOnce(&Symbols) -> CUresult) -> Result<bool> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        match self.plain(call) {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(self.fail(fault(name, error))),
        }
    }

    /// Calls the driver with the context current, whatever has happened before; nothing is kept.
    pub(crate) fn plain(&self, call: impl FnOnce(&Symbols) -> CUresult) -> CUresult {
        // SAFETY: the context is alive as long as this device.
        match unsafe { (self.0.symbols.context_set)(self.0.context) } {
            CUresult::CUDA_SUCCESS => call(&self.0.symbols),
            error => error,
        }
    }

    /// Keeps a failure, unless there was one before: that one is the answer.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.lock_failure().get_or_insert(error).clone()
    }

    fn lock_failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Device {
    /// Whether they are the same context.
    fn eq(&self, other: &Self) -> bool {
        self.0.context == other.0.context
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {})", self.0.name, self.0.architecture)
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // SAFETY: it was retained once, by this; nothing made of it is left, for that would own this.
            unsafe { (self.symbols.context_release)(device) };
        }
    }
}

/// GPU number `ordinal`: its handle, its name and what it can run.
fn describe(symbols: &Symbols, ordinal: usize) -> Result<(CUdevice, String, Architecture)> {
    let count = start(symbols)?;
    let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let number = number.ok_or_else(|| Error::invalid("device", ordinal, format!("a GPU's number, below {count}")))?;
    // SAFETY: the table's functions have the signatures and meanings of the driver's; every pointer is to a local of the right type.
    unsafe {
        let mut device: CUdevice = 0;
        check("cuDeviceGet", (symbols.device_get)(&raw mut device, number))?;
        let mut name = [0; 256];
        check("cuDeviceGetName", (symbols.device_name)(name.as_mut_ptr(), 255, device))?;
        let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
        let attribute = |which| -> Result<i32> {
            let mut value: c_int = 0;
            check("cuDeviceGetAttribute", (symbols.device_attribute)(&raw mut value, which, device))?;
            Ok(value)
        };
        let architecture = Architecture {
            major: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };
        if architecture < Architecture::OLDEST {
            let oldest = Architecture::OLDEST;
            return Err(absent("CUDA", format!("{name} has compute capability {architecture}, {oldest} or newer is needed")));
        }
        Ok((device, name, architecture))
    }
}

/// Starts the driver, and counts its GPUs, of which there is at least one.
fn start(symbols: &Symbols) -> Result<usize> {
    // SAFETY: the table's functions have the signatures and meanings of the driver's.
    match unsafe { (symbols.init)(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return Err(absent("CUDA", "no GPU")),
        error => return Err(absent("CUDA", format!("the driver does not start ({error:?})"))),
    }
    let mut count: c_int = 0;
    // SAFETY: as above; the pointer is to a local of the right type.
    check("cuDeviceGetCount", unsafe { (symbols.device_count)(&raw mut count) })?;
    usize::try_from(count).ok().filter(|&count| count > 0).ok_or_else(|| absent("CUDA", "no GPU"))
}

/// What a call said, as an error.
pub(crate) fn fault(name: &str, error: CUresult) -> Error {
    Error::Device { what: format!("{name}: {error:?}") }
}

fn check(name: &str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(fault(name, result)) }
}
