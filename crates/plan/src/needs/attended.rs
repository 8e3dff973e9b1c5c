//! Union of the key intervals of one rank's queries: disjoint ascending intervals for every
//! segment.

use std::ops::Range;

use annulus_core::Run;

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
