//! Rings of fewer ranks than the job has.

use std::time::Duration;

use annulus_core::{Error, Result};

use super::{
    Mpi, NodeMap, Settings,
    ffi::{Communicator, Foreign},
};

/// The first ranks of the job, as a communicator of their own over which rings are made, one after another or several at once.
///
/// It lives until `MPI_Finalize`: freeing it would be one more collective call that a lost rank never joins.
pub struct FirstRanks {
    communicator: Communicator,
    /// Found out once, for all rings.
    nodes: NodeMap,
}

impl FirstRanks {
    /// The first `count` ranks of the job; `None` on the others.
    ///
    /// # Ordering
    /// Collective over **all** ranks of the job.
    /// # Errors
    /// [`Error::InvalidArgument`] if the job has not so many ranks or MPI is not alive, [`Error::Unsupported`] on a thread that may not call MPI,
    /// [`Error::Comm`] if MPI fails or not all ranks come within `patience`.
    pub fn of_world(count: usize, patience: Duration) -> Result<Option<Self>> {
        // a duplicate can be waited for; once it is made all ranks are here, and splitting it takes but a moment
        let world = Communicator::duplicate(Foreign::world(), patience)?;
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
            Mpi::over(communicator.as_foreign(), Settings { patience, ..Settings::default() })?;
        let nodes = ring.nodes().clone();
        Ok(Some(Self { communicator, nodes }))
    }

    /// How many they are.
    pub const fn ranks(&self) -> usize {
        self.communicator.ranks()
    }

    /// This rank's endpoint of a new ring of them.
    ///
    /// # Ordering
    /// Collective over these ranks.
    /// # Errors
    /// As [`Mpi::world`].
    pub fn ring(&self, settings: Settings) -> Result<Mpi> {
        let mut ring = Mpi::over_unmapped(self.communicator.as_foreign(), settings)?;
        ring.nodes = self.nodes.clone();
        Ok(ring)
    }
}

impl std::fmt::Debug for FirstRanks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FirstRanks").field("ranks", &self.ranks()).finish_non_exhaustive()
    }
}
