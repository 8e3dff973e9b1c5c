//! Loaded kernels.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_int, c_void},
    fmt,
    sync::{Arc, Mutex, Weak},
};

use annulus_core::{Error, Fingerprint, Result};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};

use crate::{
    Api, Device, Image, ImageKind, Status, Stream,
    context::{Retired, lock},
    symbols::driver_error,
};

/// A loaded image. A clone refers to the same module.
#[derive(Clone)]
pub struct Module(Arc<ModuleParts>);

struct ModuleParts {
    device: Device,
    handle: CUmodule,
}

/// Modules of one context, by the digest of their image.
#[derive(Default)]
struct LoadedModules(Mutex<BTreeMap<[u64; 2], Weak<ModuleParts>>>);

// SAFETY: a module is a handle that any thread may use.
unsafe impl Send for ModuleParts {}
// SAFETY: as above.
unsafe impl Sync for ModuleParts {}

/// One kernel; keeps its module loaded.
#[derive(Clone)]
pub struct Kernel {
    module: Module,
    function: Function,
}

/// One kernel, without keeping its module loaded.
#[derive(Debug, Clone)]
pub(crate) struct WeakKernel {
    module: Weak<ModuleParts>,
    function: Function,
}

#[derive(Debug, Clone, Copy)]
struct Function {
    handle: CUfunction,
    name: &'static str,
    /// Dynamic shared memory per launch, in bytes.
    shared_bytes: u32,
}

// SAFETY: a handle that any thread may use while its module is loaded, and that is used only then.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl WeakKernel {
    /// Returns the kernel if its module is loaded.
    pub(crate) fn upgrade(&self) -> Option<Kernel> {
        Some(Kernel { module: Module(self.module.upgrade()?), function: self.function })
    }
}

impl Module {
    /// Loads an image on a device. Devices of one context share the module.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver rejects it.
    pub fn load(device: &Device, image: &Image) -> Result<Self> {
        if let Some(failure) = device.failure() {
            return Err(failure);
        }
        let digest = |seed| Fingerprint::new().number(seed).bytes(&image.bytes).finish();
        let key = [digest(0), digest(1)];
        let loaded = device.0.state.shared::<LoadedModules>();
        let mut modules = lock(&loaded.0);
        if let Some(parts) = modules.get(&key).and_then(Weak::upgrade) {
            return Ok(Self(parts));
        }
        let module = Self::load_again(device, image)?;
        modules.retain(|_, module| module.strong_count() > 0);
        modules.insert(key, Arc::downgrade(&module.0));
        Ok(module)
    }

    fn load_again(device: &Device, image: &Image) -> Result<Self> {
        // the driver reads PTX up to a 0; an ELF image contains its length
        let mut bytes = image.bytes.clone();
        if image.kind == ImageKind::Ptx {
            bytes.push(0);
        }
        let mut handle: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is complete (the cache verifies a digest), and the driver copies it.
        match device.call_unchecked(|symbols| unsafe {
            (symbols.module_load)(&raw mut handle, bytes.as_ptr().cast())
        }) {
            Status::SUCCESS => Ok(Self(Arc::new(ModuleParts { device: device.clone(), handle }))),
            error => Err(driver_error(device.api(), "cuModuleLoadData", error)),
        }
    }

    /// Looks up a kernel.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no kernel of this name.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let mut handle: CUfunction = std::ptr::null_mut();
        let text = CString::new(name)
            .map_err(|_| Error::invalid("kernel", name, "a name without a NUL"))?;
        // SAFETY: `handle` is a local of the right type; the module is loaded; the name ends in 0.
        match self.0.device.call_unchecked(|symbols| unsafe {
            (symbols.module_function)(&raw mut handle, self.0.handle, text.as_ptr())
        }) {
            Status::SUCCESS => {
                let function = Function { handle, name, shared_bytes: 0 };
                Ok(Kernel { module: self.clone(), function })
            }
            error => {
                let call = format!("cuModuleGetFunction({name})");
                Err(driver_error(self.0.device.api(), &call, error))
            }
        }
    }
}

impl Kernel {
    pub(crate) fn downgrade(&self) -> WeakKernel {
        WeakKernel { module: Arc::downgrade(&self.module.0), function: self.function }
    }

    /// Sets the dynamic shared memory of every launch.
    ///
    /// # Errors
    /// [`Error::Device`] if a block of this GPU cannot have as much.
    pub fn with_shared(mut self, bytes: u32) -> Result<Self> {
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes)
            .map_err(|_| Error::invalid("shared bytes", bytes, "fewer than 2³¹"))?;
        // SAFETY: the function is alive as long as its module.
        match self.module.0.device.call_unchecked(|symbols| unsafe {
            (symbols.function_attribute)(self.function.handle, most, value)
        }) {
            Status::SUCCESS => {
                self.function.shared_bytes = bytes;
                Ok(self)
            }
            error => {
                let call = format!("cuFuncSetAttribute({})", self.function.name);
                Err(driver_error(self.module.0.device.api(), &call, error))
            }
        }
    }

    /// Queues the kernel with one structure as its argument. An empty grid queues nothing.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Unsupported`] if the grid exceeds CUDA's limits.
    ///
    /// # Safety
    /// * `T` has the layout of the kernel's parameter, and its addresses are valid for the kernel's
    ///   accesses until it ends;
    /// * the stream belongs to the module's device.
    pub unsafe fn launch<T>(
        &self,
        stream: &Stream,
        grid: [u64; 3],
        threads: u32,
        arguments: &T,
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // CUDA's limits: 2³¹ − 1 blocks along x, 65,535 along y and z; HIP's: fewer than 2³² threads
        // along x
        let Function { handle, name, shared_bytes } = self.function;
        let [x, y, z] = grid.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
        let api = stream.device().api();
        let too_long = api == Api::Hip && u64::from(x) * u64::from(threads) >= 1 << 32;
        if x >= 1 << 31 || y.max(z) > 65535 || too_long {
            let what = format!("a grid of {grid:?} blocks");
            return Err(Error::unsupported(what, format!("{} (kernel {name})", api.name())));
        }
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: one parameter, which the driver copies before it returns; the rest as required of
        // the caller.
        stream.device().call(name, |symbols| unsafe {
            #[rustfmt::skip]
            let launched = (symbols.launch)(
                handle, x, y, z, threads, 1, 1, shared_bytes, stream.handle(), parameters, none,
            );
            launched
        })
    }
}

impl Drop for ModuleParts {
    /// Unloads the module once none of its kernels may run.
    fn drop(&mut self) {
        // loaded by `load_again`, unloaded once
        self.device.0.retire(Retired::Module(self.handle));
    }
}

impl fmt::Debug for ModuleParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModuleParts({:p})", self.handle)
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:p})", self.0.handle)
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({})", self.function.name)
    }
}
