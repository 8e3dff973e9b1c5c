//! CUDA's libraries: those of the machine, or in tests the emulated device.

use annulus::{
    Result,
    backend::cuda::{
        Cuda,
        device::{Stream, Symbols},
    },
};

#[cfg(not(feature = "emulator"))]
pub(crate) fn symbols() -> Result<Symbols> {
    Symbols::system()
}

#[cfg(not(feature = "emulator"))]
pub(crate) fn cuda_on(stream: Stream) -> Result<Cuda> {
    Cuda::on_stream(stream)
}

#[cfg(all(feature = "nccl", not(feature = "emulator")))]
pub(crate) fn nccl_symbols() -> Result<annulus::backend::cuda::device::nccl::NcclSymbols> {
    annulus::backend::cuda::device::nccl::NcclSymbols::system()
}

#[cfg(all(feature = "emulator", feature = "nccl"))]
pub(crate) use emulated::nccl_symbols;
#[cfg(feature = "emulator")]
pub(crate) use emulated::{cuda_on, symbols};
#[cfg(feature = "emulator")]
pub use emulated::{emulate_cuda, is_emulated};

#[cfg(feature = "emulator")]
mod emulated {
    use std::{path::PathBuf, sync::OnceLock};

    use annulus::backend::cuda::device::{Compiler, ImageCache};
    use annulus_cuda_emulator as emulator;

    use super::{Cuda, Result, Stream, Symbols};

    /// Folder of compiled kernels, once CUDA is emulated.
    static KERNELS: OnceLock<PathBuf> = OnceLock::new();

    /// Emulates CUDA and NCCL in this process, with compiled kernels in this folder.
    pub fn emulate_cuda(kernels: PathBuf) {
        KERNELS.get_or_init(|| kernels);
    }

    /// True after [`emulate_cuda`].
    pub fn is_emulated() -> bool {
        KERNELS.get().is_some()
    }

    pub(crate) fn symbols() -> Result<Symbols> {
        if is_emulated() { Ok(emulator::symbols()) } else { Symbols::system() }
    }

    pub(crate) fn cuda_on(stream: Stream) -> Result<Cuda> {
        let Some(kernels) = KERNELS.get() else { return Cuda::on_stream(stream) };
        let cache = Some(ImageCache::new(kernels.clone()));
        let compiler = Compiler::with_symbols(emulator::compiler_symbols(), cache)?;
        Ok(Cuda::on(stream, compiler))
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn nccl_symbols() -> Result<annulus::backend::cuda::device::nccl::NcclSymbols> {
        if is_emulated() {
            Ok(emulator::nccl_symbols())
        } else {
            annulus::backend::cuda::device::nccl::NcclSymbols::system()
        }
    }
}
