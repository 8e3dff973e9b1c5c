//! Sets of positions as intervals of segments: the union of the key intervals of one rank's
//! queries, and the rows of a shard whose positions are in a set.

use std::{collections::BTreeMap, ops::Range};

use annulus_core::Run;

use super::{StridedRows, count_below};

/// Disjoint intervals of positions, ascending within each segment.
pub(super) trait PositionIntervals {
    /// Returns the intervals of `segment` that overlap `span`, which is not empty.
    fn overlapping(
        &self,
        segment: usize,
        span: Range<i64>,
    ) -> impl Iterator<Item = Range<i64>> + Clone;
}

/// A list sorted by segment and start.
impl PositionIntervals for [(usize, Range<i64>)] {
    fn overlapping(
        &self,
        segment: usize,
        span: Range<i64>,
    ) -> impl Iterator<Item = Range<i64>> + Clone {
        let first =
            self.partition_point(|(other, range)| (*other, range.end) <= (segment, span.start));
        let near = self[first..].iter();
        near.map_while(move |(other, range)| {
            (*other == segment && range.start < span.end).then(|| range.clone())
        })
    }
}

/// A set that grows: adding k intervals to n takes O(k log n) amortised time.
#[derive(Debug, Default)]
pub(crate) struct PositionSet {
    /// End of the interval of each segment and start.
    ends: BTreeMap<(usize, i64), i64>,
}

impl PositionSet {
    pub(crate) fn clear(&mut self) {
        self.ends.clear();
    }

    /// Adds intervals, which are not empty.
    pub(crate) fn extend(&mut self, intervals: &[(usize, Range<i64>)]) {
        intervals.iter().for_each(|(segment, range)| self.insert(*segment, range));
    }

    fn insert(&mut self, segment: usize, range: &Range<i64>) {
        let Range { mut start, mut end } = *range;
        let before = self.ends.range(..=(segment, start)).next_back();
        if let Some((&(other, before), &reach)) = before
            && other == segment
            && reach >= start
        {
            if reach >= end {
                return;
            }
            start = before;
        }
        while let Some((&next, &reach)) = self.ends.range((segment, start)..=(segment, end)).next()
        {
            self.ends.remove(&next);
            end = end.max(reach);
        }
        self.ends.insert((segment, start), end);
    }
}

impl PositionIntervals for PositionSet {
    fn overlapping(
        &self,
        segment: usize,
        span: Range<i64>,
    ) -> impl Iterator<Item = Range<i64>> + Clone {
        let begin = (segment, span.start);
        let before = self.ends.range(..begin).next_back();
        let before = before.filter(|&(&(other, _), &reach)| other == segment && reach > span.start);
        let within = self.ends.range(begin..(segment, span.end));
        before.into_iter().chain(within).map(|(&(_, start), &end)| start..end)
    }
}

/// Calls `found` with ranges of the local rows of `rows` whose positions are in `set`.
pub(super) fn select_positions<S: PositionIntervals + ?Sized>(
    rows: &StridedRows,
    set: &S,
    mut found: impl FnMut(Range<u64>),
) {
    let run = ascending(&rows.positions);
    let mut select = |indices| found(rows.local(indices));
    let near = set.overlapping(rows.segment, run.start..run.at(rows.count - 1).saturating_add(1));
    if is_at_most(near.clone(), rows.count) {
        near.map(|range| count_below(&run, range.start)..count_below(&run, range.end))
            .filter(|indices| !indices.is_empty())
            .for_each(select);
    } else {
        // few rows far apart among many intervals: search for each row
        for index in 0..rows.count {
            let position = run.at(index);
            let span = position..position.saturating_add(1);
            if set.overlapping(rows.segment, span).next().is_some() {
                select(index..index + 1);
            }
        }
    }
}

/// Returns true if there are at most `count` elements, without counting more.
pub(super) fn is_at_most(elements: impl Iterator, count: u64) -> bool {
    elements.take(annulus_core::index(count).saturating_add(1)).count()
        <= annulus_core::index(count)
}

/// Builder of the positions that one rank's queries may attend to, or that its keys have. Intervals
/// are added in any order; [`AttendedPositions::close`] returns their union.
#[derive(Default)]
pub(super) struct AttendedPositions {
    /// `open[i]` is the union of the latest queries' i-th intervals. The i-th intervals of
    /// neighbours mostly overlap, so most queries only extend it.
    open: Vec<Range<i64>>,
    /// Segment of the open intervals.
    segment: usize,
    intervals: Vec<(usize, Range<i64>)>,
    /// Length of the union when it was last merged.
    merged: usize,
}

/// Intervals that are collected before they are merged for the first time.
const FIRST_MERGE: usize = 4096;

impl AttendedPositions {
    /// Adds the intervals of one query of segment `segment`.
    pub(super) fn add(&mut self, segment: usize, intervals: &[Range<i64>]) {
        if segment != self.segment {
            self.flush();
            self.segment = segment;
        }
        for (index, range) in intervals.iter().enumerate() {
            match self.open.get_mut(index) {
                Some(open) if range.start <= open.end && open.start <= range.end => {
                    *open = open.start.min(range.start)..open.end.max(range.end);
                }
                Some(open) => {
                    self.intervals.push((segment, std::mem::replace(open, range.clone())));
                }
                None => self.open.push(range.clone()),
            }
        }
        // twice the union, so that merging takes O(log) time per interval and memory is O(union)
        if self.intervals.len() >= FIRST_MERGE.max(2 * self.merged) {
            self.merge();
        }
    }

    /// Returns the union, sorted by segment and start, disjoint and non-touching within a segment.
    /// The builder is empty afterwards.
    pub(super) fn close(&mut self) -> Vec<(usize, Range<i64>)> {
        self.flush();
        self.merge();
        self.merged = 0;
        // a copy without spare capacity: there is one list per rank
        let union = self.intervals.clone();
        self.intervals.clear();
        union
    }

    /// Sorts the list and joins intervals that touch.
    fn merge(&mut self) {
        self.intervals.sort_unstable_by_key(|(segment, range)| (*segment, range.start));
        self.intervals.dedup_by(|next, kept| {
            let joined = next.0 == kept.0 && next.1.start <= kept.1.end;
            if joined {
                kept.1.end = kept.1.end.max(next.1.end);
            }
            joined
        });
        self.merged = self.intervals.len();
    }

    /// Moves the open intervals to the list.
    fn flush(&mut self) {
        self.intervals.extend(self.open.drain(..).map(|open| (self.segment, open)));
    }
}

/// Returns the run of the same numbers in ascending order.
#[inline]
pub(crate) const fn ascending(run: &Run) -> Run {
    if run.step < 0 {
        Run { start: run.at(run.count - 1), step: run.step.wrapping_neg(), count: run.count }
    } else {
        *run
    }
}
