//! Backends chosen at run time, by name and device number, as commands and other languages choose
//! them. A Rust program that knows its backend passes it to [`crate::Plan::with_backend`] instead.

use std::{fmt, str::FromStr};

use annulus_core::{Error, Host, Result, Transport};
/// CPU cores, by SIMD.
pub use annulus_cpu::Cpu;
#[cfg(feature = "cuda")]
pub use annulus_cuda as cuda;
#[cfg(feature = "cuda")]
use annulus_cuda::device::Api;
#[cfg(feature = "wgpu")]
pub use annulus_wgpu as wgpu;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use crate::devices::*;

/// A kind of device that computes tiles.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendName {
    /// CPU cores, by SIMD. Every build has it.
    #[default]
    Cpu,
    /// A GPU through Vulkan, Metal or DX12 (feature `wgpu`).
    Wgpu,
    /// An NVIDIA GPU (feature `cuda`).
    Cuda,
    /// An AMD GPU through HIP (feature `cuda`): the kernels of CUDA's level `plain`.
    Hip,
}

impl BackendName {
    /// All names, in the order of the constants of the C interface.
    pub const ALL: [Self; 4] = [Self::Cpu, Self::Wgpu, Self::Cuda, Self::Hip];

    /// Returns the name in lower case: `cpu`, `wgpu`, `cuda`, `hip`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
        }
    }

    /// Returns the feature of the build that adds the backend: CUDA's adds both of its interfaces.
    pub const fn feature(self) -> &'static str {
        match self {
            Self::Hip => "cuda",
            other => other.name(),
        }
    }

    /// Returns true if this build has the backend.
    pub const fn is_built(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Cuda | Self::Hip => cfg!(feature = "cuda"),
        }
    }

    /// Returns the error for a backend that this build does not have.
    fn missing(self) -> Error {
        let built: Vec<_> =
            Self::ALL.into_iter().filter(|name| name.is_built()).map(Self::name).collect();
        Error::unsupported(
            format!("backend {self}"),
            format!(
                "this build, which has: {}; the feature {} adds it",
                built.join(", "),
                self.feature()
            ),
        )
    }
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendName {
    type Err = Error;

    /// Reads a name in lower case.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `backend`.
    fn from_str(text: &str) -> Result<Self> {
        let named = Self::ALL.into_iter().find(|name| name.name() == text);
        named.ok_or_else(|| Error::invalid("backend", text, "cpu, wgpu, cuda or hip"))
    }
}

/// A backend chosen at run time, opened ([`crate::Runtime::backend`]). Tensors are in host memory.
///
/// A clone shares the GPU with its compiled kernels, and so do all plans and caches on it.
///
/// # Examples
/// ```
/// use annulus::{
///     Attention, Dims, Division, LocalRing, Runtime, Tensors,
///     backend::{AnyBackend, BackendName},
/// };
/// use ndarray::Array4;
///
/// let name: BackendName = "cpu".parse()?; // of a flag or a configuration file
/// let backend = AnyBackend::open(name, None, 1)?;
/// let setup = (Attention::new().causal(true), Division::new(), Runtime::new().backend(backend));
/// let mut ring = LocalRing::new(setup, Dims::new(1, 64, 2, 16), 2)?;
/// let x = Array4::<f32>::ones((1, 64, 2, 16));
/// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
/// assert_eq!(forward.out.dim(), x.dim());
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AnyBackend(pub(crate) Opened);

#[derive(Debug, Clone)]
pub(crate) enum Opened {
    /// Threads of each rank.
    Cpu(usize),
    #[cfg(feature = "wgpu")]
    Wgpu(std::sync::Arc<WgpuDevices>),
    #[cfg(feature = "cuda")]
    Cuda(std::sync::Arc<CudaDevices>),
}

impl AnyBackend {
    /// Opens a backend. `device` is the number of a GPU, as `annulus doctor` lists them; by default
    /// the ranks of a node use its GPUs round robin, with wgpu only the first and those of the same
    /// kind, each opened when a rank needs it. `threads` are the CPU threads of each rank, 0 for
    /// one; with a GPU it must be 0.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this build or this machine lacks: feature, driver, GPU,
    /// compiler of kernels. [`Error::InvalidArgument`] for a device that is not there, and for a
    /// number that the backend does not use.
    pub fn open(name: BackendName, device: Option<usize>, threads: usize) -> Result<Self> {
        match (name, device, threads) {
            (BackendName::Cpu, Some(device), _) => {
                Err(Error::invalid("device", device, "none: the CPU has no devices to choose from"))
            }
            (BackendName::Cpu, None, threads) => Ok(Self(Opened::Cpu(threads.max(1)))),
            (name, ..) if !name.is_built() => Err(name.missing()),
            (name, _, 1..) => {
                let want = format!("0: the backend {name} computes on a GPU");
                Err(Error::invalid("threads", threads, want))
            }
            #[cfg(feature = "wgpu")]
            (BackendName::Wgpu, device, 0) => {
                Ok(Self(Opened::Wgpu(std::sync::Arc::new(WgpuDevices::find(device)?))))
            }
            #[cfg(feature = "cuda")]
            (BackendName::Cuda, device, 0) => {
                Ok(Self(Opened::Cuda(std::sync::Arc::new(CudaDevices::find(Api::Cuda, device)?))))
            }
            #[cfg(feature = "cuda")]
            (BackendName::Hip, device, 0) => {
                Ok(Self(Opened::Cuda(std::sync::Arc::new(CudaDevices::find(Api::Hip, device)?))))
            }
            #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
            (name, ..) => Err(name.missing()),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> BackendName {
        match &self.0 {
            Opened::Cpu(_) => BackendName::Cpu,
            #[cfg(feature = "wgpu")]
            Opened::Wgpu(_) => BackendName::Wgpu,
            #[cfg(feature = "cuda")]
            Opened::Cuda(devices) => match devices.api() {
                Api::Cuda => BackendName::Cuda,
                Api::Hip => BackendName::Hip,
            },
        }
    }
}

/// Ends the wait of the other ranks if this one has no backend.
pub(crate) fn or_abort<B>(backend: Result<B>, transport: &mut impl Transport<Host>) -> Result<B> {
    backend.inspect_err(|error| transport.abort(error))
}
