//! Sets of positions as intervals of segments, and the rows of a shard whose positions are in one.

use std::{collections::BTreeMap, ops::Range};

use super::{StridedRows, attended::ascending, count_below};

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
