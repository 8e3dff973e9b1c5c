//! Loaded kernels.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_int, c_void},
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use annulus_core::{Error, Fingerprint, Result};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule, CUresult};

use crate::{Device, Image, ImageKind, Stream, context::Retired, symbols::driver_error};

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
    handle: CUfunction,
    name: &'static str,
    /// Dynamic shared memory per launch, in bytes.
    shared_bytes: u32,
}

/// One kernel, without keeping its module loaded.
#[derive(Debug, Clone)]
pub(crate) struct WeakKernel {
    module: Weak<ModuleParts>,
    handle: CUfunction,
    name: &'static str,
    shared_bytes: u32,
}

// SAFETY: a handle that is used only while the module is loaded.
unsafe impl Send for WeakKernel {}
// SAFETY: as above.
unsafe impl Sync for WeakKernel {}

impl WeakKernel {
    /// Returns the kernel if its module is loaded.
    pub(crate) fn upgrade(&self) -> Option<Kernel> {
        let Self { module, handle, name, shared_bytes } = self;
        let module = Module(module.upgrade()?);
        Some(Kernel { module, handle: *handle, name, shared_bytes: *shared_bytes })
    }
}

// SAFETY: a function is a handle that any thread may use while its module is loaded.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

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
        let mut modules = loaded.0.lock().unwrap_or_else(PoisonError::into_inner);
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
            CUresult::CUDA_SUCCESS => {
                Ok(Self(Arc::new(ModuleParts { device: device.clone(), handle })))
            }
            error => Err(driver_error("cuModuleLoadData", error)),
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
            CUresult::CUDA_SUCCESS => {
                Ok(Kernel { module: self.clone(), handle, name, shared_bytes: 0 })
            }
            error => Err(driver_error(&format!("cuModuleGetFunction({name})"), error)),
        }
    }
}

impl Kernel {
    pub(crate) fn downgrade(&self) -> WeakKernel {
        let Self { module, handle, name, shared_bytes } = self;
        let module = Arc::downgrade(&module.0);
        WeakKernel { module, handle: *handle, name, shared_bytes: *shared_bytes }
    }

    /// Sets the dynamic shared memory of every launch.
    ///
    /// # Errors
    /// [`Error::Device`] if a block of this GPU cannot have as much.
    pub fn with_shared(self, bytes: u32) -> Result<Self> {
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes)
            .map_err(|_| Error::invalid("shared bytes", bytes, "fewer than 2³¹"))?;
        // SAFETY: the function is alive as long as its module.
        match self.module.0.device.call_unchecked(|symbols| unsafe {
            (symbols.function_attribute)(self.handle, most, value)
        }) {
            CUresult::CUDA_SUCCESS => Ok(Self { shared_bytes: bytes, ..self }),
            error => Err(driver_error(&format!("cuFuncSetAttribute({})", self.name), error)),
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
        // CUDA's limits: 2³¹ − 1 blocks along x, 65,535 along y and z
        let along = |axis: usize, most: u64| {
            u32::try_from(grid[axis]).ok().filter(|&blocks| u64::from(blocks) <= most).ok_or_else(
                || {
                    Error::unsupported(
                        format!("a grid of {grid:?} blocks"),
                        format!("CUDA (kernel {})", self.name),
                    )
                },
            )
        };
        let [x, y, z] = [along(0, (1 << 31) - 1)?, along(1, 65535)?, along(2, 65535)?];
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        stream.device().call(self.name, |symbols| {
            // SAFETY: one parameter, which the driver copies before it returns; the rest as
            // required of the caller.
            unsafe {
                let more = self.shared_bytes;
                let none = std::ptr::null_mut();
                (symbols.launch)(
                    self.handle,
                    x,
                    y,
                    z,
                    threads,
                    1,
                    1,
                    more,
                    stream.handle(),
                    parameters.as_mut_ptr(),
                    none,
                )
            }
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
        write!(f, "Kernel({})", self.name)
    }
}
