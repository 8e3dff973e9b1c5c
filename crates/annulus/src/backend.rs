//! Backends chosen at run time, by name and device number, as commands and other languages choose
//! them. A Rust program that knows its backend passes it to [`Plan::new`] instead.

use std::{fmt, str::FromStr};

use annulus_comm::threads::Threads;
use annulus_core::{Dims, Error, Host, Result, Transport};
use annulus_cpu::Cpu;

#[cfg(feature = "wgpu")]
use crate::devices::WgpuDevices;
#[cfg(feature = "cuda")]
use crate::devices::{CudaDevices, cuda_rank};
use crate::{Attention, Cache, CacheShape, LocalCache, LocalRing, Plan};

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
}

impl BackendName {
    /// All names, in the order of the constants of the C interface.
    pub const ALL: [Self; 3] = [Self::Cpu, Self::Wgpu, Self::Cuda];

    /// Returns the name in lower case: `cpu`, `wgpu`, `cuda`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
        }
    }

    /// Returns true if this build has the backend.
    pub const fn is_built(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// Returns the error for a backend that this build does not have.
    fn missing(self) -> Error {
        let built: Vec<_> =
            Self::ALL.into_iter().filter(|name| name.is_built()).map(Self::name).collect();
        Error::unsupported(
            format!("backend {self}"),
            format!("this build, which has: {}; the feature {self} adds it", built.join(", ")),
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
        named.ok_or_else(|| Error::invalid("backend", text, "cpu, wgpu or cuda"))
    }
}

/// A backend chosen at run time, opened. It makes plans and KV caches on that backend, of tensors
/// in host memory.
///
/// A clone shares the GPU with its compiled kernels, and so do all plans made of it.
///
/// # Examples
/// ```
/// use annulus::{AnyBackend, Attention, BackendName, Dims, Tensors};
/// use ndarray::Array4;
///
/// let name: BackendName = "cpu".parse()?; // of a flag or a configuration file
/// let backend = AnyBackend::open(name, None, 1)?;
/// let mut ring =
///     backend.local_ring(&Attention::new().causal(true), Dims::new(1, 64, 2, 16), 2)?;
/// let x = Array4::<f32>::ones((1, 64, 2, 16));
/// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
/// assert_eq!(forward.out.dim(), x.dim());
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AnyBackend(Opened);

#[derive(Debug, Clone)]
enum Opened {
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
                Ok(Self(Opened::Cuda(std::sync::Arc::new(CudaDevices::find(device)?))))
            }
            #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
            (name, ..) => Err(name.missing()),
        }
    }

    /// Returns the name.
    pub const fn name(&self) -> BackendName {
        match &self.0 {
            Opened::Cpu(_) => BackendName::Cpu,
            #[cfg(feature = "wgpu")]
            Opened::Wgpu(_) => BackendName::Wgpu,
            #[cfg(feature = "cuda")]
            Opened::Cuda(_) => BackendName::Cuda,
        }
    }

    /// Plans one rank over a transport of host memory, as [`Plan::new`]. A GPU's blocks are staged
    /// through host memory.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Plan::new`], and those of the device: then [`Error::Aborted`] on the other ranks.
    pub fn plan<T: Transport<Host> + 'static>(
        &self,
        attention: &Attention,
        dims: Dims,
        mut transport: T,
    ) -> Result<Plan> {
        match &self.0 {
            Opened::Cpu(threads) => {
                let cpu = or_abort(Cpu::new(*threads), &mut transport)?;
                Plan::new(attention, dims, cpu, transport)
            }
            #[cfg(feature = "wgpu")]
            Opened::Wgpu(devices) => {
                let (backend, transport) = devices.rank(transport)?;
                Plan::new(attention, dims, backend, transport)
            }
            #[cfg(feature = "cuda")]
            Opened::Cuda(devices) => {
                let cuda = or_abort(devices.of_rank(&transport), &mut transport)?;
                let (backend, transport) = cuda_rank(cuda, transport)?;
                Plan::new(attention, dims, backend, transport)
            }
        }
    }

    /// Plans one rank over MPI, as [`AnyBackend::plan`]. On NVIDIA GPUs, MPI sends blocks from
    /// device memory if the library takes it.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`AnyBackend::plan`].
    #[cfg(feature = "mpi")]
    pub fn plan_over_mpi(
        &self,
        attention: &Attention,
        dims: Dims,
        transport: annulus_comm::mpi::Mpi,
    ) -> Result<Plan> {
        match &self.0 {
            #[cfg(feature = "cuda")]
            Opened::Cuda(devices) => {
                let mut transport = transport;
                let cuda = or_abort(devices.of_rank(&transport), &mut transport)?;
                let ((backend, transport), _) =
                    crate::devices::cuda_rank_over_mpi(cuda, transport)?;
                Plan::new(attention, dims, backend, transport)
            }
            _ => self.plan(attention, dims, transport),
        }
    }

    /// Plans an in-process ring of `ranks` ranks over whole tensors. Ranks share a GPU if its number
    /// is given, or if they are more than the GPUs.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`Attention::local_ring`], and those of the device.
    pub fn local_ring(&self, attention: &Attention, dims: Dims, ranks: usize) -> Result<LocalRing> {
        self.local_ring_over(attention, dims, ranks, |endpoint| endpoint)
    }

    /// As [`AnyBackend::local_ring`]; `wrap` returns the transport of a rank, built on its endpoint
    /// of a ring of threads.
    ///
    /// # Ordering
    /// As [`AnyBackend::local_ring`].
    ///
    /// # Errors
    /// As [`AnyBackend::local_ring`].
    pub fn local_ring_over<T: Transport<Host> + 'static>(
        &self,
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        wrap: impl Fn(Threads) -> T + Sync,
    ) -> Result<LocalRing> {
        LocalRing::of_plans(attention, dims, ranks, |attention, endpoint| {
            self.plan(attention, dims, wrap(endpoint))
        })
    }

    /// Creates one rank of an empty KV cache, as [`Cache::new`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Cache::new`], and those of the device: then [`Error::Aborted`] on the other ranks.
    pub fn cache<T: Transport<Host> + 'static>(
        &self,
        attention: &Attention,
        shape: CacheShape,
        mut transport: T,
    ) -> Result<Cache> {
        match &self.0 {
            Opened::Cpu(threads) => {
                let cpu = or_abort(Cpu::new(*threads), &mut transport)?;
                Cache::new(attention, shape, cpu, transport)
            }
            #[cfg(feature = "wgpu")]
            Opened::Wgpu(devices) => {
                let gpu = or_abort(devices.of_rank(&transport), &mut transport)?;
                Cache::new(attention, shape, annulus_wgpu::Wgpu::on_host(gpu), transport)
            }
            #[cfg(feature = "cuda")]
            Opened::Cuda(devices) => {
                let cuda = or_abort(devices.of_rank(&transport), &mut transport)?;
                Cache::new(attention, shape, cuda.on_host(), transport)
            }
        }
    }

    /// Creates an empty KV cache of `ranks` ranks in this process. Ranks share a GPU as in
    /// [`AnyBackend::local_ring`].
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`Attention::local_cache`], and those of the device.
    pub fn local_cache(
        &self,
        attention: &Attention,
        shape: CacheShape,
        ranks: usize,
    ) -> Result<LocalCache> {
        self.local_cache_over(attention, shape, ranks, |endpoint| endpoint)
    }

    /// As [`AnyBackend::local_cache`]; `wrap` returns the transport of a rank, built on its
    /// endpoint of a ring of threads.
    ///
    /// # Ordering
    /// As [`AnyBackend::local_cache`].
    ///
    /// # Errors
    /// As [`AnyBackend::local_cache`].
    pub fn local_cache_over<T: Transport<Host> + 'static>(
        &self,
        attention: &Attention,
        shape: CacheShape,
        ranks: usize,
        wrap: impl Fn(Threads) -> T + Sync,
    ) -> Result<LocalCache> {
        LocalCache::of_caches(attention, ranks, |attention, endpoint| {
            self.cache(attention, shape, wrap(endpoint))
        })
    }
}

/// Ends the wait of the other ranks if this one has no backend.
fn or_abort<B>(backend: Result<B>, transport: &mut impl Transport<Host>) -> Result<B> {
    backend.inspect_err(|error| transport.abort(error))
}
