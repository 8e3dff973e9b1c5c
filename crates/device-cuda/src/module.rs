//! Kernels on a device.

use std::{
    ffi::{CString, c_int, c_void},
    fmt,
    sync::Arc,
};

use annulus_core::{Error, Result};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule, CUresult};

use crate::{Device, Image, ImageKind, Stream, device::fault};

/// Compiled kernels, loaded. A clone is the same.
#[derive(Clone)]
pub struct Module(Arc<ModuleParts>);

struct ModuleParts {
    device: Device,
    handle: CUmodule,
}

// SAFETY: a module is a handle that any thread may use.
unsafe impl Send for ModuleParts {}
// SAFETY: as above.
unsafe impl Sync for ModuleParts {}

/// One kernel of a module, which it keeps loaded.
#[derive(Clone)]
pub struct Kernel {
    module: Module,
    handle: CUfunction,
    name: &'static str,
    /// Bytes of shared memory that a launch asks for, besides the kernel's own arrays.
    shared_bytes: u32,
}

// SAFETY: a function is a handle that any thread may use while its module is loaded.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Module {
    /// Loads an image.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses it.
    pub fn load(device: &Device, image: &Image) -> Result<Self> {
        if let Some(failure) = device.failure() {
            return Err(failure);
        }
        // PTX is text that ends at a 0; an ELF image says itself how long it is
        let mut bytes = image.bytes.clone();
        if image.kind == ImageKind::Ptx {
            bytes.push(0);
        }
        let mut handle: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is whole (the cache checks what it reads), and the driver copies what it keeps.
        match device.plain(|symbols| unsafe { (symbols.module_load)(&raw mut handle, bytes.as_ptr().cast()) }) {
            CUresult::CUDA_SUCCESS => Ok(Self(Arc::new(ModuleParts { device: device.clone(), handle }))),
            error => Err(fault("cuModuleLoadData", error)),
        }
    }

    /// One of its kernels.
    ///
    /// # Errors
    /// [`Error::Device`] if it has none of this name.
    pub fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let mut handle: CUfunction = std::ptr::null_mut();
        let text = CString::new(name).map_err(|_| Error::invalid("kernel", name, "a name without a 0"))?;
        // SAFETY: `handle` is a local of the right type; the module is loaded and the name ends at a 0.
        match self.0.device.plain(|symbols| unsafe { (symbols.module_function)(&raw mut handle, self.0.handle, text.as_ptr()) }) {
            CUresult::CUDA_SUCCESS => Ok(Kernel { module: self.clone(), handle, name, shared_bytes: 0 }),
            error => Err(fault(&format!("cuModuleGetFunction({name})"), error)),
        }
    }
}

impl Kernel {
    /// Has every launch ask for so many bytes of shared memory.
    ///
    /// # Errors
    /// [`Error::Device`] if the GPU has not so many for a block.
    pub fn with_shared(self, bytes: u32) -> Result<Self> {
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes).map_err(|_| Error::invalid("shared bytes", bytes, "fewer than 2³¹"))?;
        // SAFETY: the function is alive as long as its module.
        match self.module.0.device.plain(|symbols| unsafe { (symbols.function_attribute)(self.handle, most, value) }) {
            CUresult::CUDA_SUCCESS => Ok(Self { shared_bytes: bytes, ..self }),
            error => Err(fault(&format!("cuFuncSetAttribute({})", self.name), error)),
        }
    }

    /// Queues the kernel with one structure as its only argument. A grid without blocks is no work.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Unsupported`] if the grid is larger than a GPU's.
    ///
    /// # Safety
    /// * `T` is laid out as the kernel's parameter, and the addresses in it are good for what the kernel does with them, until it is done;
    /// * the stream belongs to the module's device.
    pub unsafe fn launch<T>(&self, stream: &Stream, grid: [u64; 3], threads: u32, arguments: &T) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // 2³¹ − 1 blocks along x, 65 535 along y and z
        let along = |axis: usize, most: u64| {
            u32::try_from(grid[axis])
                .ok()
                .filter(|&blocks| u64::from(blocks) <= most)
                .ok_or_else(|| Error::unsupported(format!("a grid of {grid:?} blocks"), format!("CUDA (kernel {})", self.name)))
        };
        let [x, y, z] = [along(0, (1 << 31) - 1)?, along(1, 65535)?, along(2, 65535)?];
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        self.module.0.device.call(self.name, |symbols| {
            // SAFETY: one parameter, which the driver copies before it returns; the rest as promised.
            unsafe {
                let (more, none) = (self.shared_bytes, std::ptr::null_mut());
                (symbols.launch)(self.handle, x, y, z, threads, 1, 1, more, stream.handle(), parameters.as_mut_ptr(), none)
            }
        })
    }
}

impl Drop for ModuleParts {
    fn drop(&mut self) {
        // SAFETY: loaded by this, once; its kernels own this. The driver lets queued work end first.
        self.device.plain(|symbols| unsafe { (symbols.module_unload)(self.handle) });
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
