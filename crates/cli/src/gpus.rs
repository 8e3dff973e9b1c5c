//! NVIDIA GPUs: assigns one to each rank, and chooses the transport of blocks between them.

use std::{sync::OnceLock, time::Duration};

#[cfg(feature = "nccl")]
use annulus::backend::cuda::device::nccl::NcclSymbols;
#[cfg(feature = "mpi")]
use annulus::backend::cuda_rank_over_mpi;
#[cfg(feature = "nccl")]
use annulus::backend::cuda_rank_over_nccl;
use annulus::backend::{CudaDevices, cuda::Cuda, cuda_rank};
#[cfg(feature = "nccl")]
use annulus::comm::nccl::STARTUP_DEADLINE;
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
    /// Number given by `--device`.
    first: Option<usize>,
    devices: CudaDevices,
    /// Transport that the flags request.
    link: Link,
    /// Description of the transport in use, set when the first rank is created.
    link_in_use: OnceLock<&'static str>,
    /// Deadline of silence. NCCL's start has a longer one.
    #[cfg(feature = "nccl")]
    deadline: Duration,
}

/// Transport of blocks between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// The transport of the ranks: staged through pinned host memory, or with a GPU-aware MPI from
    /// device memory.
    Host,
    /// NCCL.
    #[cfg(feature = "nccl")]
    Nccl,
}

/// A rank among the ranks of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodeRank {
    /// Index among the ranks of its node.
    index: usize,
    /// True if the ranks are threads of this process.
    is_thread: bool,
}

impl Gpus {
    /// Opens GPU number `first`, by default 0, and loads NCCL if `transport` is NCCL.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] naming what is missing: driver, GPU, compute
    /// capability, compiler or NCCL; [`annulus_core::Error::InvalidArgument`] if there are too few
    /// GPUs.
    pub(crate) fn open(
        first: Option<usize>,
        transport: TransportName,
        deadline: Duration,
    ) -> Outcome<Self> {
        #[cfg(not(feature = "nccl"))]
        let _: Duration = deadline;
        let devices = CudaDevices::find(first)?;
        // what is missing on this machine is an error before any file is read
        devices.get(first.unwrap_or(0))?;
        let link = match transport {
            #[cfg(feature = "nccl")]
            TransportName::Nccl => NcclSymbols::system().map(|_| Link::Nccl)?,
            _ => Link::Host,
        };
        Ok(Self {
            first,
            devices,
            link,
            link_in_use: OnceLock::new(),
            #[cfg(feature = "nccl")]
            deadline,
        })
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
        let (description, rank) = match (self.link, endpoint) {
            #[cfg(feature = "nccl")]
            (Link::Nccl, endpoint) => {
                let deadline = self.deadline.max(STARTUP_DEADLINE);
                ("over nccl", cuda_rank_over_nccl(cuda, endpoint.of_host(), deadline)?)
            }
            #[cfg(feature = "mpi")]
            (Link::Host, RankEndpoint::Process(endpoint)) => {
                let (rank, takes_device_memory) = cuda_rank_over_mpi(cuda, *endpoint)?;
                let over_mpi = "over gpu-aware mpi";
                (if takes_device_memory { over_mpi } else { staged }, rank)
            }
            (Link::Host, endpoint) => (staged, cuda_rank(cuda, endpoint.of_host())?),
        };
        // equal for all ranks of this process
        let _: &&str = self.link_in_use.get_or_init(|| description);
        Ok(rank)
    }

    /// Returns the GPU of a rank.
    pub(crate) fn of_rank(&self, endpoint: &RankEndpoint) -> Result<Cuda> {
        let number = number(self.link, self.first, node_rank(endpoint), self.devices.count())?;
        self.devices.get(number)
    }

    /// Describes the transport of blocks. It is known once a rank has been created.
    pub(crate) fn link(&self) -> &'static str {
        self.link_in_use.get().copied().unwrap_or("not linked yet")
    }
}

fn node_rank(endpoint: &RankEndpoint) -> NodeRank {
    match endpoint {
        RankEndpoint::Thread(endpoint) => NodeRank { index: endpoint.rank(), is_thread: true },
        #[cfg(feature = "mpi")]
        RankEndpoint::Process(endpoint) => {
            let nodes = endpoint.nodes();
            let location = nodes.locations().get(endpoint.rank());
            let index = location.map_or(0, |location| location.rank_on_node);
            NodeRank { index, is_thread: false }
        }
    }
}

/// Returns the number of a rank's GPU, out of the `count` visible ones.
///
/// | ranks | with `--device` | without |
/// |---|---|---|
/// | threads over NCCL | `first + index` | `index`: NCCL needs one GPU for each rank |
/// | all others | `first` | `index mod count`: round robin over the ranks of the node |
///
/// For processes NCCL itself checks that their GPUs differ: a launcher may make another GPU visible
/// to each process, all of them number 0.
///
/// # Errors
/// [`annulus_core::Error::Unsupported`] if threads over NCCL are more than GPUs.
fn number(link: Link, first: Option<usize>, rank: NodeRank, count: usize) -> Result<usize> {
    let NodeRank { index, is_thread } = rank;
    #[cfg(feature = "nccl")]
    if link == Link::Nccl && is_thread {
        let first = first.unwrap_or(0);
        let by = || {
            format!(
                "this machine, which has {count}, counted from 0 and used from {first}; with \
                 --transport threads ranks share GPUs"
            )
        };
        let what = || format!("transport nccl of rank {index} without a GPU of its own");
        return Some(first + index)
            .filter(|&number| number < count)
            .ok_or_else(|| Error::unsupported(what(), by()));
    }
    #[cfg(not(feature = "nccl"))]
    let _: (Link, bool) = (link, is_thread);
    Ok(first.unwrap_or(index % count.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn of_node(index: usize, is_thread: bool) -> NodeRank {
        NodeRank { index, is_thread }
    }

    #[test]
    fn ranks_use_the_gpus_of_their_node_round_robin() {
        let numbers = |first, is_thread| {
            (0..4)
                .map(|rank| number(Link::Host, first, of_node(rank, is_thread), 2))
                .collect::<Result<Vec<_>>>()
        };
        assert_eq!(numbers(None, true).unwrap(), [0, 1, 0, 1]);
        assert_eq!(numbers(None, false).unwrap(), [0, 1, 0, 1]);
        assert_eq!(numbers(Some(1), true).unwrap(), [1; 4]);
    }

    #[cfg(feature = "nccl")]
    #[test]
    fn nccl_needs_one_gpu_for_each_rank() {
        assert_eq!(number(Link::Nccl, None, of_node(1, true), 2), Ok(1));
        assert_eq!(number(Link::Nccl, Some(1), of_node(1, true), 3), Ok(2));
        // one GPU is visible to each process
        assert_eq!(number(Link::Nccl, None, of_node(5, false), 1), Ok(0));
        assert_eq!(number(Link::Nccl, Some(3), of_node(5, false), 4), Ok(3));
        let error = number(Link::Nccl, None, of_node(2, true), 2).unwrap_err().to_string();
        assert!(
            error.contains("rank 2 without a GPU of its own")
                && error.contains("--transport threads"),
            "{error}"
        );
    }
}
