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
//! [`crate::KeyIntervals`].
//!
//! Every rank computes the needs of all ranks for every new batch, so the time must be almost
//! linear in the rows. It is multiplied by the number of ranks only if segment ids or positions are
//! in no order.

mod attended;
mod index;
#[cfg(test)]
pub(crate) mod samples;
mod strided_rows;
#[cfg(test)]
mod tests;

pub(crate) use index::KeyIndex;
pub(crate) use strided_rows::{DistinctMasks, SegmentNumbers, StridedRows, count_below};

use std::ops::Range;

use crate::{Mask, RingShards, RowSet, mask::Query};
use attended::AttendedPositions;

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
    /// heads. The sets are exact for masks that lower to [`crate::KeyIntervals`]; otherwise they
    /// contain all keys within [`Mask::bound`].
    ///
    /// On each side, either all shards have segment ids or none has.
    pub fn of_queries(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        Self::of_sampled_queries(mask, heads, batch, shards, 1)
    }

    /// As [`Needs::of_queries`], but evaluates the mask only for every `stride`-th and for the last
    /// query of every run of queries.
    pub(crate) fn of_sampled_queries(
        mask: &dyn Mask,
        heads: usize,
        batch: usize,
        shards: &RingShards,
        stride: usize,
    ) -> Self {
        let distinct = DistinctMasks::new(mask, heads, batch, shards);
        let mut needs = NeedsBuilder::new(shards.q.len());
        let mut attended = AttendedPositions::default();
        for batch in distinct.batches() {
            let mut segments = SegmentNumbers::new(shards);
            let keys: Vec<Vec<StridedRows>> =
                shards.kv.iter().map(|shard| segments.key_rows(shard, batch)).collect();
            for (user, shard) in shards.q.iter().enumerate() {
                let queries = segments.query_rows(shard, batch);
                attended.clear();
                for head in distinct.heads() {
                    for rows in &queries {
                        let sampled = (0..rows.count)
                            .step_by(stride)
                            .chain((stride > 1).then(|| rows.count - 1));
                        sampled.for_each(|index| {
                            let intervals = mask.bound(&rows.query(batch, head, index));
                            attended.add(rows.segment, &intervals);
                        });
                    }
                }
                attended.close(segments.len());
                for (owner, keys) in keys.iter().enumerate() {
                    keys.iter().for_each(|rows| {
                        attended.select(rows, |range| needs.add(user, owner, range))
                    });
                }
            }
        }
        needs.finish(shards.kv.iter().map(|shard| shard.rows.len()).collect())
    }

    /// Computes the **query** rows that may attend to some of each rank's keys, for a two-pass
    /// backward. The sets are exact for masks that lower to [`crate::KeyIntervals`]; otherwise they
    /// contain all queries with a key of the rank within [`Mask::bound`].
    ///
    /// On each side, either all shards have segment ids or none has.
    pub fn of_keys(mask: &dyn Mask, heads: usize, batch: usize, shards: &RingShards) -> Self {
        let distinct = DistinctMasks::new(mask, heads, batch, shards);
        let mut needs = NeedsBuilder::new(shards.q.len());
        for batch in distinct.batches() {
            let mut segments = SegmentNumbers::new(shards);
            let keys = KeyIndex::new(shards, batch, &mut segments);
            for (owner, shard) in shards.q.iter().enumerate() {
                for rows in segments.query_rows(shard, batch) {
                    for head in distinct.heads() {
                        for index in 0..rows.count {
                            let local = rows.first + index;
                            let intervals = mask.bound(&rows.query(batch, head, index));
                            keys.count_by_rank(rows.segment, &intervals, |user, keys| {
                                if keys > 0 {
                                    needs.add(user, owner, local..local + 1);
                                }
                            });
                        }
                    }
                }
            }
        }
        needs.finish(shards.q.iter().map(|shard| shard.rows.len()).collect())
    }

    /// Returns the rows of `owner` that `user` needs.
    pub(crate) fn of(&self, user: usize, owner: usize) -> &RowSet {
        const NO_ROWS: &RowSet = &RowSet::new();
        self.rows.get(user).and_then(|owners| owners.get(owner)).unwrap_or(NO_ROWS)
    }
}

impl StridedRows {
    /// Returns the query at `index` of these rows.
    pub(crate) const fn query(&self, batch: usize, head: usize, index: u64) -> Query {
        Query {
            batch,
            head,
            row: self.rows.at(index).cast_unsigned(),
            position: self.positions.at(index),
        }
    }
}

/// Ranges of needed local rows for every (user, owner), in the order in which they are added.
struct NeedsBuilder(Vec<Vec<Vec<Range<u64>>>>);

impl NeedsBuilder {
    fn new(ranks: usize) -> Self {
        Self(vec![vec![Vec::new(); ranks]; ranks])
    }

    /// Adds a range; one that overlaps or touches the end of the last is merged with it.
    fn add(&mut self, user: usize, owner: usize, range: Range<u64>) {
        let ranges = &mut self.0[user][owner];
        match ranges.last_mut() {
            Some(last) if last.start <= range.start && range.start <= last.end => {
                last.end = last.end.max(range.end)
            }
            _ => ranges.push(range),
        }
    }

    fn finish(self, held: Vec<u64>) -> Needs {
        Needs {
            held,
            rows: self
                .0
                .into_iter()
                .map(|owners| owners.into_iter().map(RowSet::from_iter).collect())
                .collect(),
        }
    }
}
