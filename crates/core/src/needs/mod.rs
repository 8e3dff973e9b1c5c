//! Which rows of which owner each rank needs: the only thing that a schedule is made from.
//!
//! ```text
//! of queries   user u needs key row j of owner o    ⇔  some query of u, in some batch row and head, may see j
//! of keys      user u needs query row i of owner o  ⇔  i, in some batch row and head, may see some key of u
//! ```
//!
//! "May see" is: equal segment ids, none negative, and the key's position within the [`Mask::bound`] of the query: its spans where it has some. Work is near linear
//! in the rows, times the ranks only where ids or positions are in no order: every rank plans for all ranks, with every batch.

mod index;
mod pieces;
#[cfg(test)]
pub(crate) mod samples;
mod seen;
#[cfg(test)]
mod tests;

pub(crate) use index::KeyIndex;
pub(crate) use pieces::{Classes, Piece, Views, below};

use std::ops::Range;

use crate::{Coordinates, Mask, RowSet, mask::Query};
use seen::Seen;

/// For every (user, owner): the owner's local rows of which the user's rows see, or are seen by, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Rows that each owner holds.
    pub held: Vec<u64>,
    /// `rows[user][owner]`; a rank's needs of its own rows are here too, but cost nothing.
    pub rows: Vec<Vec<RowSet>>,
}

impl Needs {
    /// Every rank needs everything: the untrimmed ring.
    pub fn everything(held: Vec<u64>) -> Self {
        let rows = vec![held.iter().map(|&count| RowSet::all(count)).collect(); held.len()];
        Self { held, rows }
    }

    /// Which **key** rows each rank's queries see, over all batch rows and heads. Exact for masks that lower to spans; as tight as [`Mask::bound`]
    /// otherwise.
    ///
    /// Either all ranks' shards of a side have segment ids or none.
    pub fn of_queries(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates) -> Self {
        Self::of_sampled_queries(mask, heads, batch, coordinates, 1)
    }

    /// As [`Needs::of_queries`], asking only every `stride`-th query, and the last, of every run of queries.
    pub(crate) fn of_sampled_queries(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates, stride: usize) -> Self {
        let (ranks, views) = (coordinates.q.len(), Views::new(mask, heads, batch, coordinates));
        let mut found = Found::new(ranks);
        let mut seen = Seen::default();
        for batch in views.batches() {
            let mut classes = Classes::new(coordinates);
            let keys: Vec<Vec<Piece>> = coordinates.kv.iter().map(|shard| classes.key_pieces(shard, batch)).collect();
            for (user, shard) in coordinates.q.iter().enumerate() {
                let queries = classes.query_pieces(shard, batch);
                seen.clear();
                for head in views.heads() {
                    for piece in &queries {
                        let sampled = (0..piece.count).step_by(stride).chain((stride > 1).then(|| piece.count - 1));
                        sampled.for_each(|index| seen.add(piece.class, &mask.bound(&piece.query(batch, head, index))));
                    }
                }
                seen.close(classes.len());
                for (owner, pieces) in keys.iter().enumerate() {
                    pieces.iter().for_each(|piece| seen.select(piece, |range| found.add(user, owner, range)));
                }
            }
        }
        found.into_needs(coordinates.kv.iter().map(|shard| shard.rows.len()).collect())
    }

    /// Which **query** rows see some of each rank's keys (two-pass backward). Exact for masks that lower to spans; as tight as [`Mask::bound`]
    /// otherwise.
    ///
    /// Either all ranks' shards of a side have segment ids or none.
    pub fn of_keys(mask: &dyn Mask, heads: usize, batch: usize, coordinates: &Coordinates) -> Self {
        let (ranks, views) = (coordinates.q.len(), Views::new(mask, heads, batch, coordinates));
        let mut found = Found::new(ranks);
        for batch in views.batches() {
            let mut classes = Classes::new(coordinates);
            let index = KeyIndex::new(coordinates, batch, &mut classes);
            for (owner, shard) in coordinates.q.iter().enumerate() {
                for piece in classes.query_pieces(shard, batch) {
                    for head in views.heads() {
                        for row in 0..piece.count {
                            let local = piece.first + row;
                            index.count_by_rank(piece.class, &mask.bound(&piece.query(batch, head, row)), |user, keys| {
                                if keys > 0 {
                                    found.add(user, owner, local..local + 1);
                                }
                            });
                        }
                    }
                }
            }
        }
        found.into_needs(coordinates.q.iter().map(|shard| shard.rows.len()).collect())
    }

    /// What `user` needs of `owner`.
    pub(crate) fn of(&self, user: usize, owner: usize) -> &RowSet {
        const NOTHING: &RowSet = &RowSet::new();
        self.rows.get(user).and_then(|owners| owners.get(owner)).unwrap_or(NOTHING)
    }
}

impl Piece {
    pub(crate) const fn query(&self, batch: usize, head: usize, index: u64) -> Query {
        Query { batch, head, row: self.rows.at(index).cast_unsigned(), position: self.positions.at(index) }
    }
}

/// Ranges of local rows for every (user, owner), as they are found.
struct Found(Vec<Vec<Vec<Range<u64>>>>);

impl Found {
    fn new(ranks: usize) -> Self {
        Self(vec![vec![Vec::new(); ranks]; ranks])
    }

    fn add(&mut self, user: usize, owner: usize, range: Range<u64>) {
        let ranges = &mut self.0[user][owner];
        match ranges.last_mut() {
            Some(last) if last.start <= range.start && range.start <= last.end => last.end = last.end.max(range.end),
            _ => ranges.push(range),
        }
    }

    fn into_needs(self, held: Vec<u64>) -> Needs {
        Needs { held, rows: self.0.into_iter().map(|owners| owners.into_iter().map(RowSet::from_iter).collect()).collect() }
    }
}
