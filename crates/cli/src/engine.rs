//! What computes, once it has been found and opened.

use annulus_cpu::Isa;

use crate::{
    arguments::ring::BackendName,
    failure::{Failure, Outcome},
};

/// A backend that can make ranks.
#[derive(Debug, Clone)]
pub(crate) enum Engine {
    /// Host memory and SIMD.
    Cpu,
    /// A GPU; all ranks of this process share it.
    #[cfg(feature = "wgpu")]
    Wgpu(annulus_wgpu::Gpu),
    /// An NVIDIA GPU; all ranks of this process share it and its stream.
    #[cfg(feature = "cuda")]
    Cuda(annulus::cuda::Cuda),
}

impl Engine {
    /// Its name on the command line.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            #[cfg(feature = "wgpu")]
            Self::Wgpu(_) => "wgpu",
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => "cuda",
        }
    }

    /// Finds what the flags name, before anything is read.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] naming what this build, or this machine, has; [`Failure::Usage`] if the environment names no instruction set or no level, or
    /// a device is chosen where there is nothing to choose.
    pub(crate) fn open(name: BackendName, device: Option<usize>) -> Outcome<Self> {
        match (name, device) {
            (BackendName::Cpu, Some(device)) => {
                Err(Failure::usage("--device", device, "nothing: the backend cpu has no devices to choose from"))
            }
            (BackendName::Cpu, None) => Isa::chosen().map(|_| Self::Cpu).map_err(Failure::of_flags),
            #[cfg(feature = "wgpu")]
            (BackendName::Wgpu, device) => {
                let options = annulus_wgpu::Options { number: device.unwrap_or(0), ..annulus_wgpu::Options::default() };
                Ok(Self::Wgpu(annulus_wgpu::Gpu::open(&options).map_err(Failure::of_flags)?))
            }
            #[cfg(not(feature = "wgpu"))]
            (BackendName::Wgpu, _) => {
                let with = "`cargo build --release -p annulus-cli --features wgpu` makes one that has wgpu";
                Err(annulus_core::Error::unsupported("backend wgpu", format!("this build, which has: {}; {with}", backends())).into())
            }
            #[cfg(feature = "cuda")]
            (BackendName::Cuda, device) => Ok(Self::Cuda(annulus::cuda::Cuda::open(device.unwrap_or(0)).map_err(Failure::from)?)),
            #[cfg(not(feature = "cuda"))]
            (BackendName::Cuda, _) => {
                let with = "`cargo build --release -p annulus-cli --features cuda` makes one that has cuda";
                Err(annulus_core::Error::unsupported("backend cuda", format!("this build, which has: {}; {with}", backends())).into())
            }
        }
    }
}

/// The backends of this build.
pub(crate) const fn backends() -> &'static str {
    match (cfg!(feature = "wgpu"), cfg!(feature = "cuda")) {
        (false, false) => "cpu",
        (true, false) => "cpu, wgpu",
        (false, true) => "cpu, cuda",
        (true, true) => "cpu, wgpu, cuda",
    }
}

/// Evaluates `$body` with `$make`, a function that makes a rank's backend (of `$threads` threads, where it has threads).
macro_rules! with_backend {
    ($engine:expr, $threads:expr, $make:ident => $body:expr) => {
        match $engine {
            $crate::engine::Engine::Cpu => {
                let $make = || annulus::Cpu::new($threads);
                $body
            }
            #[cfg(feature = "wgpu")]
            $crate::engine::Engine::Wgpu(gpu) => {
                let $make = || Ok::<_, annulus_core::Error>(annulus_wgpu::Hosted::new(gpu.clone()));
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::engine::Engine::Cuda(cuda) => {
                let $make = || Ok::<_, annulus_core::Error>(annulus::cuda::Hosted::new(cuda.clone()));
                $body
            }
        }
    };
}
pub(crate) use with_backend;
