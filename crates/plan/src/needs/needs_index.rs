//! Needs of all ranks as positions: memory and time are linear in the runs of all shards, without
//! a set of rows for each pair of ranks.
//!
//! ```text
//! of queries   positions of user u = union of the bounds of its queries
//!              rows of owner o     = keys of o whose positions are in it
//! of keys      positions of user u = positions of its keys
//!              rows of owner o     = queries of o whose bounds overlap it
//! ```
//! The rows that any of several users needs follow from the union of their positions, which one
//! more user extends in little time ([`UserUnion`]). A schedule consists of such rows.

use std::ops::Range;

use super::{
    DistinctMasks, KeyIndex, Needs, SegmentNumbers, StridedRows,
    position_set::{
        AttendedPositions, PositionIntervals, PositionSet, ascending, is_at_most, select_positions,
    },
};
use crate::RingShards;
use annulus_core::{Mask, RowSet, Shard, mask::Band};

/// Number of evaluations of a mask after which `tick` is called: a tick costs as much as one
/// evaluation, and a mask of the caller may take milliseconds.
const EVALUATIONS_PER_TICK: u64 = 64;

/// Needs of all ranks, from which the rows of one owner and one or several users are computed on
/// request. Ranks are ring indices.
pub struct NeedsIndex<'a> {
    mask: &'a dyn Mask,
    /// Heads and batch rows for which the mask is evaluated.
    distinct: DistinctMasks,
    /// True if users have queries and owners keys; false in the opposite case.
    of_queries: bool,
    /// Number of rows of each owner.
    held: Vec<u64>,
    /// Parts by batch row; one part if rows and positions are the same in all batch rows.
    parts: Vec<BatchNeeds>,
    /// Rows that are needed together; see [`NeedsIndex::in_tiles`].
    tile: u64,
}

/// Needs in one batch row, or in all.
pub(crate) struct BatchNeeds {
    batch: usize,
    /// Number of segments.
    pub(crate) segments: usize,
    /// Positions of each user: sorted by segment and start, disjoint.
    pub(crate) users: Vec<Vec<(usize, Range<i64>)>>,
    /// Rows of each owner.
    pub(crate) owners: Vec<Vec<StridedRows>>,
}

impl BatchNeeds {
    /// Returns an index of the rows of all owners.
    pub(crate) fn keys(&self) -> KeyIndex {
        KeyIndex::of_owners(&self.owners, self.segments)
    }

    /// Returns the number of rows of `owner` whose positions are in `intervals`, which are sorted
    /// and disjoint.
    pub(crate) fn owned_within(&self, owner: usize, intervals: &[(usize, Range<i64>)]) -> u64 {
        let mut count = 0;
        let mut add = |rows| {
            select_positions(rows, intervals, |found| count += found.end - found.start);
        };
        let rows = self.owners[owner].iter();
        if rows.len() > intervals.len().max(self.segments / 4) {
            // most rows are of other segments than the intervals
            let mut are_needed = vec![false; self.segments];
            intervals.iter().for_each(|(segment, _)| are_needed[*segment] = true);
            rows.filter(|rows| are_needed[rows.segment]).for_each(add);
        } else {
            rows.for_each(&mut add);
        }
        count
    }

    /// Returns the positions that `user` needs and `other` does not.
    pub(crate) fn needed_by_one(&self, user: usize, other: usize) -> Vec<(usize, Range<i64>)> {
        let mut rest = Vec::new();
        for (segment, range) in &self.users[user] {
            let mut start = range.start;
            for covered in self.users[other][..].overlapping(*segment, range.clone()) {
                if start < covered.start {
                    rest.push((*segment, start..covered.start));
                }
                start = start.max(covered.end);
            }
            if start < range.end {
                rest.push((*segment, start..range.end));
            }
        }
        rest
    }
}

/// Union of the positions of several users, in each part of the needs.
pub(crate) struct UserUnion(Vec<PositionSet>);

impl UserUnion {
    pub(crate) fn clear(&mut self) {
        self.0.iter_mut().for_each(PositionSet::clear);
    }
}

impl<'a> NeedsIndex<'a> {
    /// Computes the **key** rows that each rank's queries may attend to, as [`Needs::of_queries`].
    /// Calls `tick` after each rank, and within a rank after every few queries.
    pub fn of_queries(
        mask: &'a dyn Mask,
        heads: usize,
        batch: usize,
        shards: &RingShards,
        tick: &mut dyn FnMut(),
    ) -> Self {
        Self::of_sampled_queries(mask, heads, batch, shards, 1, tick)
    }

    /// As [`NeedsIndex::of_queries`], but evaluates a mask without a [`Band`], or with one that has
    /// many intervals, only for every `stride`-th and for the last query of every run of queries.
    pub(crate) fn of_sampled_queries(
        mask: &'a dyn Mask,
        heads: usize,
        batch: usize,
        shards: &RingShards,
        stride: usize,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let distinct = DistinctMasks::new(mask, heads, batch, shards);
        let keys_differ = shards.kv.iter().any(|kv| kv.differs_between_batch_rows());
        let mut builder = QueryBounds::new(mask, stride);
        let mut parts = Vec::new();
        for batches in distinct.parts(keys_differ) {
            let mut segments = SegmentNumbers::new(shards);
            let owners =
                shards.kv.iter().map(|shard| segments.key_rows(shard, batches.start)).collect();
            let users = shards.q.iter().map(|shard| {
                let user = builder.of_rank(shard, &segments, &distinct, batches.clone(), tick);
                tick();
                user
            });
            let users = users.collect();
            let segments = segments.len();
            parts.push(BatchNeeds { batch: batches.start, segments, users, owners });
        }
        let held = shards.kv.iter().map(|shard| shard.rows.len()).collect();
        Self { mask, distinct, of_queries: true, held, parts, tile: 1 }
    }

    /// Computes the **query** rows that may attend to some of each rank's keys, as
    /// [`Needs::of_keys`]. Calls `tick` after each rank.
    pub fn of_keys(
        mask: &'a dyn Mask,
        heads: usize,
        batch: usize,
        shards: &RingShards,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let distinct = DistinctMasks::new(mask, heads, batch, shards);
        let mut positions = AttendedPositions::default();
        let mut parts = Vec::new();
        for batch in distinct.batches() {
            let mut segments = SegmentNumbers::new(shards);
            let mut users = Vec::with_capacity(shards.kv.len());
            for shard in &shards.kv {
                segments.key_rows(shard, batch).iter().for_each(|rows| {
                    cover_positions(rows, |range| positions.add(rows.segment, &[range]));
                });
                users.push(positions.close());
                tick();
            }
            let owners = shards.q.iter().map(|shard| segments.query_rows(shard, batch)).collect();
            parts.push(BatchNeeds { batch, segments: segments.len(), users, owners });
        }
        let held = shards.q.iter().map(|shard| shard.rows.len()).collect();
        Self { mask, distinct, of_queries: false, held, parts, tile: 1 }
    }

    /// Extends the needs of queries to whole tiles of `rows` local rows.
    #[must_use]
    pub fn in_tiles(self, rows: u64) -> Self {
        Self { tile: rows.max(1), ..self }
    }

    /// Extends rows of `owner` to whole tiles.
    fn whole_tiles(&self, rows: RowSet, owner: usize) -> RowSet {
        if self.tile == 1 {
            return rows;
        }
        let held = self.held.get(owner).copied().unwrap_or_default();
        let whole = |range: &Range<u64>| {
            range.start / self.tile * self.tile..range.end.next_multiple_of(self.tile).min(held)
        };
        rows.ranges().iter().map(whole).collect()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.held.len()
    }

    /// Returns the number of rows of each owner.
    pub fn held(&self) -> &[u64] {
        &self.held
    }

    /// Returns the rows of `owner` that `user` needs; none if there is no such rank.
    pub fn rows(&self, user: usize, owner: usize) -> RowSet {
        let rows = |part: &BatchNeeds, found: &mut dyn FnMut(Range<u64>)| {
            if let (Some(users), Some(owners)) = (part.users.get(user), part.owners.get(owner)) {
                self.select(part, owners, &users[..], found);
            }
        };
        let rows = collect_rows(|found| self.parts.iter().for_each(|part| rows(part, found)));
        self.whole_tiles(rows, owner)
    }

    /// Returns the needs as sets of rows: O(ranks²) of them.
    pub fn to_needs(&self) -> Needs {
        let owners = |user| (0..self.ranks()).map(|owner| self.rows(user, owner)).collect();
        Needs { held: self.held.clone(), rows: (0..self.ranks()).map(owners).collect() }
    }

    /// Returns the only part of needs of queries, if they have one part. Then a position is that of
    /// the same rows in all batch rows.
    pub(crate) fn only_part(&self) -> Option<&BatchNeeds> {
        self.parts.first().filter(|_| self.of_queries && self.parts.len() == 1)
    }

    /// Returns the union of no users.
    pub(crate) fn no_users(&self) -> UserUnion {
        UserUnion(self.parts.iter().map(|_| PositionSet::default()).collect())
    }

    /// Adds `user` to a union.
    pub(crate) fn add_user(&self, union: &mut UserUnion, user: usize) {
        for (set, part) in union.0.iter_mut().zip(&self.parts) {
            set.extend(&part.users[user]);
        }
    }

    /// Returns the rows of `owner` that any user of `union` needs.
    pub(crate) fn rows_of_union(&self, union: &UserUnion, owner: usize) -> RowSet {
        let rows = collect_rows(|found| {
            for (set, part) in union.0.iter().zip(&self.parts) {
                self.select(part, &part.owners[owner], set, found);
            }
        });
        self.whole_tiles(rows, owner)
    }

    /// Calls `found` with ranges of the local rows of an owner that users with positions `set`
    /// need.
    fn select<S: PositionIntervals + ?Sized>(
        &self,
        part: &BatchNeeds,
        owner: &[StridedRows],
        set: &S,
        found: &mut dyn FnMut(Range<u64>),
    ) {
        for rows in owner {
            if self.of_queries {
                select_positions(rows, set, &mut *found);
            } else {
                for head in self.distinct.heads() {
                    self.select_queries(rows, part.batch, head, set, found);
                }
            }
        }
    }

    /// Calls `found` with ranges of local queries whose bounds overlap `set`.
    fn select_queries<S: PositionIntervals + ?Sized>(
        &self,
        rows: &StridedRows,
        batch: usize,
        head: usize,
        set: &S,
        found: &mut dyn FnMut(Range<u64>),
    ) {
        let band = self.mask.band(batch, head).filter(Band::is_never_empty);
        if let Some(band) = band {
            let run = ascending(&rows.positions);
            let all = band.at(run.start).start..band.at(run.at(rows.count - 1)).end;
            let near = set.overlapping(rows.segment, all);
            if is_at_most(near.clone(), rows.count) {
                // both ends of the band ascend with the index
                for keys in near {
                    let begin = first_index(rows.count, |i| band.at(run.at(i)).end > keys.start);
                    let end = first_index(rows.count, |i| band.at(run.at(i)).start >= keys.end);
                    if begin < end {
                        found(rows.local(begin..end));
                    }
                }
                return;
            }
        }
        for index in 0..rows.count {
            let bound = self.mask.bound(&rows.query(batch, head, index));
            let mut ranges = bound.ranges().iter().cloned();
            if ranges.any(|range| set.overlapping(rows.segment, range).next().is_some()) {
                found(rows.first + index..rows.first + index + 1);
            }
        }
    }
}

/// Collects the positions that queries may attend to.
struct QueryBounds<'a> {
    mask: &'a dyn Mask,
    stride: usize,
    attended: AttendedPositions,
    /// Evaluations of the mask since the last tick.
    evaluated: u64,
}

impl<'a> QueryBounds<'a> {
    fn new(mask: &'a dyn Mask, stride: usize) -> Self {
        Self { mask, stride, attended: Default::default(), evaluated: 0 }
    }

    /// Returns the positions that queries of one rank may attend to in some batch rows.
    fn of_rank(
        &mut self,
        shard: &Shard,
        segments: &SegmentNumbers,
        distinct: &DistinctMasks,
        batches: Range<usize>,
        tick: &mut dyn FnMut(),
    ) -> Vec<(usize, Range<i64>)> {
        for batch in batches {
            let queries = segments.query_rows(shard, batch);
            for head in distinct.heads() {
                queries.iter().for_each(|rows| self.add(rows, batch, head, tick));
            }
        }
        self.attended.close()
    }

    /// Adds the bounds of all queries at once if there is a band, unless samples are fewer.
    fn add(&mut self, rows: &StridedRows, batch: usize, head: usize, tick: &mut dyn FnMut()) {
        let run = ascending(&rows.positions);
        if let Some(band) = self.mask.band(batch, head)
            && (self.stride == 1
                || band.most_intervals(&run) <= rows.count.div_ceil(self.stride as u64))
        {
            return band.cover(&run, |range| self.attended.add(rows.segment, &[range]));
        }
        let last = (self.stride > 1).then(|| rows.count - 1);
        for index in (0..rows.count).step_by(self.stride).chain(last) {
            let intervals = self.mask.bound(&rows.query(batch, head, index));
            self.attended.add(rows.segment, intervals.ranges());
            self.evaluated += 1;
            if self.evaluated == EVALUATIONS_PER_TICK {
                self.evaluated = 0;
                tick();
            }
        }
    }
}

/// Calls `found` with intervals of exactly the positions of `rows`.
fn cover_positions(rows: &StridedRows, mut found: impl FnMut(Range<i64>)) {
    let run = ascending(&rows.positions);
    if run.step <= 1 {
        return found(run.start..run.at(run.count - 1).saturating_add(1));
    }
    (0..run.count).map(|index| run.at(index)).for_each(|position| found(position..position + 1));
}

/// Returns the first index of 0..count for which `holds` is true; all later ones must be true too.
fn first_index(count: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let mut low = 0;
    let mut high = count;
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Collects the ranges that `visit` finds, of which many follow each other.
fn collect_rows(visit: impl FnOnce(&mut dyn FnMut(Range<u64>))) -> RowSet {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    visit(&mut |range| match ranges.last_mut() {
        Some(last) if last.start <= range.start && range.start <= last.end => {
            last.end = last.end.max(range.end);
        }
        _ => ranges.push(range),
    });
    ranges.into_iter().collect()
}
