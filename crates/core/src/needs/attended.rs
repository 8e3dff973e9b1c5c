//! Union of the key intervals of one rank's queries: disjoint ascending intervals for every
//! segment.

use std::ops::Range;

use super::{StridedRows, count_below};
use crate::{KeyIntervals, Run};

/// Key positions that one rank's queries may attend to. [`AttendedPositions::add`] adds the queries
/// one by one; after [`AttendedPositions::close`], [`AttendedPositions::select`] returns the keys.
#[derive(Default)]
pub(super) struct AttendedPositions {
    /// `open[i]` is the union of the latest queries' i-th intervals. The i-th intervals of
    /// neighbours mostly overlap, so most queries only extend it.
    open: [Range<i64>; KeyIntervals::MAX],
    /// Segment of the open intervals.
    segment: usize,
    /// After `close`: sorted by segment and start, disjoint and non-touching within a segment.
    intervals: Vec<(usize, Range<i64>)>,
    /// After `close`: the intervals of segment s are `first[s]..first[s + 1]`.
    first: Vec<usize>,
}

impl AttendedPositions {
    pub(super) fn clear(&mut self) {
        self.open = Default::default();
        self.intervals.clear();
    }

    /// Adds the intervals of one query of segment `segment`.
    pub(super) fn add(&mut self, segment: usize, intervals: &KeyIntervals) {
        if segment != self.segment {
            self.flush();
            self.segment = segment;
        }
        for (index, range) in intervals.ranges().iter().enumerate() {
            let open = &mut self.open[index];
            if range.start <= open.end && open.start <= range.end && !open.is_empty() {
                *open = open.start.min(range.start)..open.end.max(range.end);
            } else {
                let complete = std::mem::replace(open, range.clone());
                self.push(complete);
            }
        }
    }

    /// Sorts and merges the intervals of all `segments` segments.
    pub(super) fn close(&mut self, segments: usize) {
        self.flush();
        self.intervals.sort_unstable_by_key(|(segment, range)| (*segment, range.start));
        self.intervals.dedup_by(|next, kept| {
            let joined = next.0 == kept.0 && next.1.start <= kept.1.end;
            if joined {
                kept.1.end = kept.1.end.max(next.1.end);
            }
            joined
        });
        self.first.clear();
        self.first.resize(segments + 1, 0);
        self.intervals.iter().for_each(|(segment, _)| self.first[segment + 1] += 1);
        (0..segments).for_each(|segment| self.first[segment + 1] += self.first[segment]);
    }

    /// Calls `found` with ranges of the local rows of `keys` whose positions are in the union.
    pub(super) fn select(&self, keys: &StridedRows, mut found: impl FnMut(Range<u64>)) {
        let run = ascending(&keys.positions);
        let count = keys.count;
        let first = run.start;
        let last = run.at(count - 1);
        let intervals = &self.intervals[self.first[keys.segment]..self.first[keys.segment + 1]];
        // the intervals between the first and the last position of the keys
        let near = &intervals[intervals.partition_point(|(_, range)| range.end <= first)..];
        let near = &near[..near.partition_point(|(_, range)| range.start <= last)];
        let mut select = |range: Range<u64>| {
            if keys.positions.step < 0 {
                found(keys.first + count - range.end..keys.first + count - range.start);
            } else {
                found(keys.first + range.start..keys.first + range.end);
            }
        };
        if near.len() as u64 <= count {
            for (_, range) in near {
                let indices = count_below(&run, range.start)..count_below(&run, range.end);
                if !indices.is_empty() {
                    select(indices);
                }
            }
        } else {
            // few keys far apart among many intervals: search for each key
            for index in 0..count {
                let position = run.at(index);
                let after = near.partition_point(|(_, range)| range.end <= position);
                if near.get(after).is_some_and(|(_, range)| range.start <= position) {
                    select(index..index + 1);
                }
            }
        }
    }

    /// Moves the open intervals to the list.
    fn flush(&mut self) {
        for open in std::mem::take(&mut self.open) {
            self.push(open);
        }
    }

    fn push(&mut self, range: Range<i64>) {
        if !range.is_empty() {
            self.intervals.push((self.segment, range));
        }
    }
}

/// Returns the run of the same numbers in ascending order.
pub(super) const fn ascending(run: &Run) -> Run {
    if run.step < 0 {
        Run { start: run.at(run.count - 1), step: run.step.wrapping_neg(), count: run.count }
    } else {
        *run
    }
}
