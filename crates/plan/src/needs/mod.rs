//! Needs: the rows of every owner that each rank needs. Schedules are built from these sets alone.
//!
//! In some batch row and head,
//!
//! ```text
//! of queries   rank u needs key row j of owner o     ⇔   some query of u may attend to j
//! of keys      rank u needs query row i of owner o   ⇔   i may attend to some key of u
//! ```
//!
//! A query *may attend to* a key if their segment ids are equal and not negative, and if the key's
//! position is within [`Mask::bound`] of the query. The bound is exact if the mask lowers to
//! [`annulus_core::KeyIntervals`].
//!
//! [`NeedsIndex`] has them in a form that is linear in the runs of all shards, from which a rank
//! derives its own part of a schedule. [`Needs`] has a set of rows for every pair of ranks, for
//! figures of all ranks and for the checker of schedules.

mod index;
mod needs_index;
mod position_set;
mod strided_rows;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use index::{ConsecutiveKeys, KeyIndex};
pub use needs_index::NeedsIndex;
pub(crate) use needs_index::{BatchNeeds, UserUnion};
pub(crate) use position_set::ascending;
pub(crate) use strided_rows::{DistinctMasks, SegmentNumbers, StridedRows, count_below};

use crate::RingShards;
use annulus_core::{Mask, RowSet};

/// For every pair of ranks (user, owner): the owner's local rows that form a visible pair with some
/// row of the user. Ranks are ring indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Number of rows of each owner.
    pub held: Vec<u64>,
    /// `rows[user][owner]`. A rank's needs of its own rows are included, but cause no messages.
    pub rows: Vec<Vec<RowSet>>,
}

impl Needs {
    /// Returns needs of all rows by all ranks. They give the full ring.
    pub fn everything(held: Vec<u64>) -> Self {
        let rows = vec![held.iter().map(|&count| RowSet::all(count)).collect(); held.len()];
        Self { held, rows }
    }

    /// Computes the **key** rows that each rank's queries may attend to, over all batch rows and
    /// heads. The sets are exact for masks that lower to [`annulus_core::KeyIntervals`]; otherwise
    /// they contain all keys within [`Mask::bound`].
    ///
    /// On each side, either all shards have segment ids or none has.
    pub fn of_queries(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        NeedsIndex::of_queries(mask, heads, batch, shards, &mut || ()).to_needs()
    }

    /// Computes the **query** rows that may attend to some of each rank's keys, for a two-pass
    /// backward. The sets are exact for masks that lower to [`annulus_core::KeyIntervals`];
    /// otherwise they contain all queries with a key of the rank within [`Mask::bound`].
    ///
    /// On each side, either all shards have segment ids or none has.
    pub fn of_keys(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        NeedsIndex::of_keys(mask, heads, batch, shards, &mut || ()).to_needs()
    }

    /// Returns the rows of `owner` that `user` needs.
    pub(crate) fn of(&self, user: usize, owner: usize) -> &RowSet {
        const NO_ROWS: &RowSet = &RowSet::new();
        self.rows.get(user).and_then(|owners| owners.get(owner)).unwrap_or(NO_ROWS)
    }
}
