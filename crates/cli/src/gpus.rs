//! GPUs of NVIDIA and AMD: assigns one to each rank, and chooses the transport of blocks between them.

use std::{sync::OnceLock, time::Duration};

#[cfg(feature = "mpi")]
use annulus::backend::cuda_rank_over_mpi;
use annulus::backend::{
    BackendName, CudaDevices,
    cuda::{Cuda, device::Api},
    cuda_rank,
};
#[cfg(feature = "nccl")]
use annulus::{
    backend::{cuda::device::nccl::NcclSymbols, cuda_rank_over_nccl},
    comm::nccl::STARTUP_DEADLINE,
};
#[cfg(feature = "nccl")]
use annulus_core::Error;
use annulus_core::{Control, OnHost, Result};

use crate::{
    arguments::ring::TransportName,
    failure::Outcome,
    job::{RankBackend, RankEndpoint},
};

/// GPUs that are visible to this process.
#[derive(Debug)]
pub(crate) struct Gpus {
    devices: CudaDevices,
    /// True if blocks are sent by NCCL or RCCL; else by the transport of the ranks: staged through
    /// pinned host memory, or with a GPU-aware MPI from device memory.
    #[cfg(feature = "nccl")]
    over_nccl: bool,
    /// Number given by `--device`.
    #[cfg(feature = "nccl")]
    first: Option<usize>,
    /// Deadline of silence. NCCL's start has a longer one.
    #[cfg(feature = "nccl")]
    deadline: Duration,
    /// Description of the transport in use, set when the first rank is created.
    link_in_use: OnceLock<&'static str>,
}

impl Gpus {
    /// Opens GPU number `first`, by default 0, and loads NCCL if `transport` is NCCL.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] naming what is missing: driver, GPU, compute
    /// capability, compiler or NCCL; [`annulus_core::Error::InvalidArgument`] if there are too few
    /// GPUs.
    pub(crate) fn open(
        api: Api,
        first: Option<usize>,
        transport: TransportName,
        deadline: Duration,
    ) -> Outcome<Self> {
        let devices = CudaDevices::find(api, first)?;
        // what is missing on this machine is an error before any file is read
        devices.get(first.unwrap_or(0))?;
        #[cfg(feature = "nccl")]
        if transport == TransportName::Nccl {
            NcclSymbols::system(api)?;
        }
        #[cfg(not(feature = "nccl"))]
        let _: (TransportName, Duration) = (transport, deadline);
        Ok(Self {
            devices,
            #[cfg(feature = "nccl")]
            over_nccl: transport == TransportName::Nccl,
            #[cfg(feature = "nccl")]
            first,
            #[cfg(feature = "nccl")]
            deadline,
            link_in_use: OnceLock::new(),
        })
    }

    /// Name of the backend.
    pub(crate) const fn name(&self) -> &'static str {
        match self.devices.api() {
            Api::Cuda => BackendName::Cuda.name(),
            Api::Hip => BackendName::Hip.name(),
        }
    }

    /// Creates the backend of a rank and the transport of its blocks.
    ///
    /// # Ordering
    /// With NCCL, collective over the ranks.
    pub(crate) fn rank(&self, endpoint: RankEndpoint) -> Result<RankBackend<OnHost<Cuda>>> {
        // the abort sends the reason to the ranks that wait for this one
        let cuda = match self.of_rank(&endpoint) {
            Ok(cuda) => cuda,
            Err(error) => {
                endpoint.of_host().abort(&error);
                return Err(error);
            }
        };
        let staged = "staged through the host";
        let (description, rank) = match endpoint {
            #[cfg(feature = "nccl")]
            endpoint if self.over_nccl => {
                let deadline = self.deadline.max(STARTUP_DEADLINE);
                let description = match self.devices.api() {
                    Api::Cuda => "over nccl",
                    Api::Hip => "over rccl",
                };
                (description, cuda_rank_over_nccl(cuda, endpoint.of_host(), deadline)?)
            }
            #[cfg(feature = "mpi")]
            RankEndpoint::Process(endpoint) => {
                let (rank, takes_device_memory) = cuda_rank_over_mpi(cuda, *endpoint)?;
                let over_mpi = "over gpu-aware mpi";
                (if takes_device_memory { over_mpi } else { staged }, rank)
            }
            endpoint => (staged, cuda_rank(cuda, endpoint.of_host())?),
        };
        // equal for all ranks of this process
        let _: &&str = self.link_in_use.get_or_init(|| description);
        Ok(rank)
    }

    /// Returns the GPU of a rank: number `--device`, or round robin over the ranks of the node.
    /// Threads over NCCL have one each, from `--device` on. For processes NCCL itself checks that
    /// their GPUs differ: a launcher may make another GPU visible to each process, all of them
    /// number 0.
    pub(crate) fn of_rank(&self, endpoint: &RankEndpoint) -> Result<Cuda> {
        match endpoint {
            #[cfg(feature = "nccl")]
            RankEndpoint::Thread(endpoint) if self.over_nccl => {
                let first = self.first.unwrap_or(0);
                self.devices.get(gpu_of_thread(endpoint.rank(), first, self.devices.count())?)
            }
            RankEndpoint::Thread(endpoint) => self.devices.of_rank(&**endpoint),
            #[cfg(feature = "mpi")]
            RankEndpoint::Process(endpoint) => self.devices.of_rank(&**endpoint),
        }
    }

    /// Describes the transport of blocks. It is known once a rank has been created.
    pub(crate) fn link(&self) -> &'static str {
        self.link_in_use.get().copied().unwrap_or("not linked yet")
    }
}

/// Returns the number of the GPU that a rank of this process has for itself, of `count` visible
/// ones.
///
/// # Errors
/// [`Error::Unsupported`] if there are too few.
#[cfg(feature = "nccl")]
fn gpu_of_thread(rank: usize, first: usize, count: usize) -> Result<usize> {
    if first + rank < count {
        return Ok(first + rank);
    }
    let what = format!("transport nccl of rank {rank} without a GPU of its own");
    let by = format!(
        "this machine, which has {count}, counted from 0 and used from {first}; with --transport \
         threads ranks share GPUs"
    );
    Err(Error::unsupported(what, by))
}

#[cfg(all(test, feature = "nccl"))]
mod tests {
    use super::*;

    #[test]
    fn nccl_needs_one_gpu_for_each_rank() {
        assert_eq!(gpu_of_thread(1, 0, 2), Ok(1));
        assert_eq!(gpu_of_thread(1, 1, 3), Ok(2));
        let error = gpu_of_thread(2, 0, 2).unwrap_err().to_string();
        assert!(
            error.contains("rank 2 without a GPU of its own")
                && error.contains("--transport threads"),
            "{error}"
        );
    }
}
