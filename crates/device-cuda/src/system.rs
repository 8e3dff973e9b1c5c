//! The tables of this machine's libraries, CUDA's or HIP's.

use annulus_core::Result;

use crate::{
    Api, CompilerSymbols, Symbols, hip,
    symbols::{missing, open},
};

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
        unsafe { Self::of(library) }
    }
}

impl CompilerSymbols {
    /// Loads this machine's compiler of an interface.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if there is none, or it lacks a function.
    pub fn system(api: Api) -> Result<Self> {
        if api == Api::Hip {
            return hip::compiler_symbols();
        }
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let library = open(&names)
            .ok_or_else(|| missing("CUDA", "no run-time compiler (libnvrtc.so was not found)"))?;
        // SAFETY: the library of this name is NVRTC.
        unsafe { Self::of(library) }
    }
}
