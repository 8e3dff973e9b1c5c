//! Rings of the first ranks of a job.

use std::sync::Arc;

use annulus_core::{Error, Result};

use super::{
    Mpi, NodeMap, Settings, Timeout,
    communicator::{Communicator, ParentCommunicator},
};

/// A communicator of the first ranks of the job, for any number of rings, also at the same time.
///
/// It lives until `MPI_Finalize`: freeing it is collective, and would wait for a lost rank.
pub struct FirstRanks {
    communicator: Communicator,
    /// Gathered once, for all rings.
    nodes: Arc<NodeMap>,
}

impl FirstRanks {
    /// Creates a communicator of the first `count` ranks of the job; `None` on the others.
    ///
    /// # Ordering
    /// Collective over **all** ranks of the job.
    /// # Errors
    /// [`Error::InvalidArgument`] if the job has fewer ranks or MPI is not alive,
    /// [`Error::Unsupported`] on a thread that may not call MPI, [`Error::Comm`] if MPI fails or
    /// not all ranks come within `timeout`.
    pub fn of_world(count: usize, timeout: Timeout) -> Result<Option<Self>> {
        // the wait for a duplicate warns and may end, that for a split does not: once the duplicate
        // exists all ranks have come, so the split follows at once
        let world = Communicator::duplicate(ParentCommunicator::world(), c"annulus job", &timeout)?;
        if !(1..=world.ranks()).contains(&count) {
            return Err(Error::invalid(
                "ranks",
                count,
                format!("1 to {}, the ranks of this job", world.ranks()),
            ));
        }
        let first = world.first_ranks(count)?;
        world.free();
        let Some(communicator) = first else { return Ok(None) };
        let ring =
            Mpi::over(communicator.as_parent(), Settings { timeout, ..Settings::default() })?;
        let nodes = Arc::clone(&ring.nodes);
        Ok(Some(Self { communicator, nodes }))
    }

    /// Number of these ranks.
    pub const fn ranks(&self) -> usize {
        self.communicator.ranks()
    }

    /// Creates this rank's endpoint of a new ring of these ranks.
    ///
    /// # Ordering
    /// Collective over these ranks.
    /// # Errors
    /// As [`Mpi::world`].
    pub fn ring(&self, settings: Settings) -> Result<Mpi> {
        let mut endpoint = Mpi::unmapped(self.communicator.as_parent(), settings)?;
        endpoint.nodes = Arc::clone(&self.nodes);
        Mpi::of(endpoint)
    }
}

impl std::fmt::Debug for FirstRanks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FirstRanks").field("ranks", &self.ranks()).finish_non_exhaustive()
    }
}
