//! NVIDIA GPUs: which rank computes on which, and how blocks go from one to another.

use std::{
    collections::BTreeMap,
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

#[cfg(feature = "nccl")]
use annulus::cuda::device::nccl::NcclSymbols;
#[cfg(feature = "mpi")]
use annulus::devices::cuda_rank_over_mpi;
#[cfg(feature = "nccl")]
use annulus::devices::cuda_rank_over_nccl;
use annulus::{
    cuda::{Cuda, device::Device},
    devices::cuda_rank,
};
#[cfg(feature = "nccl")]
use annulus_core::Error;
use annulus_core::{Control, OnHost, Result};

use crate::{arguments::ring::TransportName, crew::Endpoint, engine::Wired, failure::Outcome};

/// The GPUs that this process sees.
#[derive(Debug)]
pub(crate) struct Gpus {
    /// As the command line has it.
    first: Option<usize>,
    count: usize,
    /// By number. Ranks on one GPU share its stream and its kernels.
    opened: Mutex<BTreeMap<usize, Cuda>>,
    link: Link,
    /// What became of it.
    words: OnceLock<&'static str>,
    /// How long ranks wait for each other when they meet.
    #[cfg(feature = "nccl")]
    patience: Duration,
}

/// How blocks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// By the transport of the ranks: through pinned memory, or, over an MPI that takes it, from device memory.
    Host,
    /// By NCCL.
    #[cfg(feature = "nccl")]
    Nccl,
}

/// Where a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seat {
    /// Among the ranks of its node.
    place: usize,
    /// Whether those are threads of this process.
    is_thread: bool,
}

impl Gpus {
    /// Looks for what the flags ask for, and opens the first GPU of this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming what this machine lacks: driver, GPU, compute capability, compiler, NCCL; [`Error::InvalidArgument`] if it has
    /// fewer GPUs.
    pub(crate) fn open(
        first: Option<usize>,
        transport: TransportName,
        patience: Duration,
    ) -> Outcome<Self> {
        #[cfg(not(feature = "nccl"))]
        let _: Duration = patience;
        let number = first.unwrap_or(0);
        let cuda = Cuda::open(number)?;
        let link = match transport {
            #[cfg(feature = "nccl")]
            TransportName::Nccl => NcclSymbols::system().map(|_| Link::Nccl)?,
            _ => Link::Host,
        };
        Ok(Self {
            first,
            count: Device::count()?,
            opened: Mutex::new(BTreeMap::from([(number, cuda)])),
            link,
            words: OnceLock::new(),
            #[cfg(feature = "nccl")]
            patience,
        })
    }

    /// The backend of a rank, and the transport of its blocks.
    ///
    /// # Ordering
    /// With NCCL, collective over the ranks.
    /// # Errors
    /// As [`Gpus::open`]; as `Nccl::open`; [`Error::Unsupported`] if NCCL has not a GPU for every rank of this process.
    pub(crate) fn rank(&self, endpoint: Endpoint) -> Result<Wired<OnHost<Cuda>>> {
        let number = number(self.link, self.first, seat(&endpoint), self.count);
        // who waits for this rank hears why it does not come
        let cuda = match number.and_then(|number| self.on(number)) {
            Ok(cuda) => cuda,
            Err(error) => {
                endpoint.of_host().abort(&error);
                return Err(error);
            }
        };
        let staged = "staged through the host";
        let (words, rank) = match (self.link, endpoint) {
            #[cfg(feature = "nccl")]
            (Link::Nccl, endpoint) => {
                ("over nccl", cuda_rank_over_nccl(cuda, endpoint.of_host(), self.patience)?)
            }
            #[cfg(feature = "mpi")]
            (Link::Host, Endpoint::Process(endpoint)) => {
                let (rank, takes_device_memory) = cuda_rank_over_mpi(cuda, *endpoint)?;
                let over_mpi = "over an mpi that takes device memory";
                (if takes_device_memory { over_mpi } else { staged }, rank)
            }
            (Link::Host, endpoint) => (staged, cuda_rank(cuda, endpoint.of_host())?),
        };
        // the same for all ranks of this process
        let _: &&str = self.words.get_or_init(|| words);
        Ok(rank)
    }

    /// How blocks travel, once a rank was made.
    pub(crate) fn link(&self) -> &'static str {
        self.words.get().copied().unwrap_or("not linked yet")
    }

    /// The GPU of this number.
    fn on(&self, number: usize) -> Result<Cuda> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cuda) = opened.get(&number) {
            return Ok(cuda.clone());
        }
        let cuda = Cuda::open(number)?;
        opened.insert(number, cuda.clone());
        Ok(cuda)
    }
}

fn seat(endpoint: &Endpoint) -> Seat {
    match endpoint {
        Endpoint::Thread(endpoint) => Seat { place: endpoint.rank(), is_thread: true },
        #[cfg(feature = "mpi")]
        Endpoint::Process(endpoint) => {
            let place = endpoint
                .nodes()
                .locations()
                .get(endpoint.rank())
                .map_or(0, |place| place.rank_on_node);
            Seat { place, is_thread: false }
        }
    }
}

/// The GPU of a rank, of `count` that its process sees. Where none is asked for, the ranks of a node take turns; NCCL wants one for every rank, and
/// counts those of processes itself, for each process may be shown another GPU as the first.
fn number(
    link: Link,
    first: Option<usize>,
    Seat { place, is_thread }: Seat,
    count: usize,
) -> Result<usize> {
    #[cfg(feature = "nccl")]
    if link == Link::Nccl && is_thread {
        let first = first.unwrap_or(0);
        let by = || {
            format!(
                "this machine, which has {count}, counted from 0 and used from {first}; --transport threads lets ranks share one"
            )
        };
        let what = || format!("transport nccl of rank {place} without a GPU of its own");
        return Some(first + place)
            .filter(|&number| number < count)
            .ok_or_else(|| Error::unsupported(what(), by()));
    }
    #[cfg(not(feature = "nccl"))]
    let _: (Link, bool) = (link, is_thread);
    Ok(first.unwrap_or(place % count.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(place: usize, is_thread: bool) -> Seat {
        Seat { place, is_thread }
    }

    #[test]
    fn ranks_take_turns_on_the_gpus_of_their_node() {
        let numbers = |first, is_thread| {
            (0..4)
                .map(|rank| number(Link::Host, first, seat(rank, is_thread), 2))
                .collect::<Result<Vec<_>>>()
        };
        assert_eq!(numbers(None, true).unwrap(), [0, 1, 0, 1]);
        assert_eq!(numbers(None, false).unwrap(), [0, 1, 0, 1]);
        assert_eq!(numbers(Some(1), true).unwrap(), [1; 4]);
    }

    #[cfg(feature = "nccl")]
    #[test]
    fn nccl_has_a_gpu_for_every_rank_or_says_so() {
        assert_eq!(number(Link::Nccl, None, seat(1, true), 2), Ok(1));
        assert_eq!(number(Link::Nccl, Some(1), seat(1, true), 3), Ok(2));
        // a process may see no GPU but its own
        assert_eq!(number(Link::Nccl, None, seat(5, false), 1), Ok(0));
        assert_eq!(number(Link::Nccl, Some(3), seat(5, false), 4), Ok(3));
        let error = number(Link::Nccl, None, seat(2, true), 2).unwrap_err().to_string();
        assert!(
            error.contains("rank 2 without a GPU of its own")
                && error.contains("--transport threads"),
            "{error}"
        );
    }
}
