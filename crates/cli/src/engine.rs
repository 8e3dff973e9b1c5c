//! What computes, once it has been found and opened, and how its blocks travel.

use std::time::Duration;

use annulus_core::{Backend, Error, Transport};
use annulus_cpu::Isa;

#[cfg(feature = "cuda")]
use crate::gpus::Gpus;
use crate::{
    arguments::ring::{BackendName, TransportName},
    failure::{Failure, Outcome},
};

/// A rank's backend, and the transport of its blocks.
pub(crate) type Wired<B> = (B, Box<dyn Transport<<B as Backend>::Space>>);

/// A backend that can make ranks.
#[derive(Debug)]
pub(crate) enum Engine {
    /// Host memory and SIMD.
    Cpu,
    /// A GPU; all ranks of this process share it.
    #[cfg(feature = "wgpu")]
    Wgpu(annulus_wgpu::Gpu),
    /// NVIDIA GPUs; the ranks of this process share them.
    #[cfg(feature = "cuda")]
    Cuda(Gpus),
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

    /// Its name and, where there is a choice, how blocks travel between ranks that have been made.
    pub(crate) fn description(&self) -> String {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(gpus) => format!("{}, blocks {}", self.name(), gpus.link()),
            _ => self.name().to_owned(),
        }
    }

    /// Finds what the flags name, before anything is read. Ranks that have to find each other wait no longer than `patience`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this build, or this machine, has; [`Failure::Usage`] if the environment names no instruction set or no level, or
    /// a device is chosen where there is nothing to choose.
    pub(crate) fn open(
        name: BackendName,
        device: Option<usize>,
        transport: TransportName,
        patience: Duration,
    ) -> Outcome<Self> {
        #[cfg(not(feature = "cuda"))]
        let _: Duration = patience;
        if transport == TransportName::Nccl {
            if !cfg!(feature = "nccl") {
                return Err(transport.missing());
            }
            if name != BackendName::Cuda {
                let by = format!(
                    "backend {}, whose blocks are in host memory; --backend cuda has it",
                    of_flag(name)
                );
                return Err(Error::unsupported("transport nccl", by).into());
            }
        }
        match (name, device) {
            (BackendName::Cpu, Some(device)) => Err(Failure::usage(
                "--device",
                device,
                "nothing: the backend cpu has no devices to choose from",
            )),
            (BackendName::Cpu, None) => Isa::chosen().map(|_| Self::Cpu).map_err(Failure::of_flags),
            #[cfg(feature = "wgpu")]
            (BackendName::Wgpu, device) => {
                let options = annulus_wgpu::Options {
                    number: device.unwrap_or(0),
                    ..annulus_wgpu::Options::default()
                };
                let opened = annulus_wgpu::Gpu::open(&options);
                Ok(Self::Wgpu(opened.map_err(|error| Failure::of_flags(of_device(device, error)))?))
            }
            #[cfg(not(feature = "wgpu"))]
            (BackendName::Wgpu, _) => {
                let with = "`cargo build --release -p annulus-cli --features wgpu` makes one that has wgpu";
                Err(Error::unsupported(
                    "backend wgpu",
                    format!("this build, which has: {}; {with}", backends()),
                )
                .into())
            }
            #[cfg(feature = "cuda")]
            (BackendName::Cuda, device) => match Gpus::open(device, transport, patience) {
                Err(Failure::Library(error)) => Err(of_device(device, error).into()),
                opened => opened.map(Self::Cuda),
            },
            #[cfg(not(feature = "cuda"))]
            (BackendName::Cuda, _) => {
                let with = "`cargo build --release -p annulus-cli --features cuda` makes one that has cuda";
                Err(Error::unsupported(
                    "backend cuda",
                    format!("this build, which has: {}; {with}", backends()),
                )
                .into())
            }
        }
    }
}

/// The error of opening a device, with the flag that names it.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn of_device(device: Option<usize>, error: Error) -> Error {
    match (device, error) {
        (Some(device), Error::Unsupported { what, by }) => {
            Error::Unsupported { what: format!("--device {device}: {what}"), by }
        }
        (Some(device), Error::InvalidArgument { argument, got, want }) => {
            Error::InvalidArgument { argument: format!("--device {device}: {argument}"), got, want }
        }
        (_, error) => error,
    }
}

/// A backend as the command line names it.
const fn of_flag(name: BackendName) -> &'static str {
    match name {
        BackendName::Cpu => "cpu",
        BackendName::Wgpu => "wgpu",
        BackendName::Cuda => "cuda",
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

/// Evaluates `$body` with `$make`, a function that makes of a rank's endpoint its backend (of `$threads` threads, where it has threads) and the
/// transport of its blocks.
macro_rules! with_backend {
    ($engine:expr, $threads:expr, $make:ident => $body:expr) => {
        match $engine {
            $crate::engine::Engine::Cpu => {
                let $make = |endpoint: $crate::crew::Endpoint| {
                    Ok::<_, annulus_core::Error>((annulus::Cpu::new($threads)?, endpoint.of_host()))
                };
                $body
            }
            #[cfg(feature = "wgpu")]
            $crate::engine::Engine::Wgpu(gpu) => {
                let $make = |endpoint: $crate::crew::Endpoint| {
                    let copier = annulus_wgpu::Copier::new(gpu.clone());
                    let backend = annulus_wgpu::Wgpu::on_host(gpu.clone());
                    let staged: $crate::engine::Wired<annulus_core::OnHost<annulus_wgpu::Wgpu>> =
                        (backend, Box::new(annulus_comm::Staged::new(endpoint.of_host(), copier)));
                    Ok::<_, annulus_core::Error>(staged)
                };
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::engine::Engine::Cuda(gpus) => {
                let $make = |endpoint: $crate::crew::Endpoint| gpus.rank(endpoint);
                $body
            }
        }
    };
}
pub(crate) use with_backend;
