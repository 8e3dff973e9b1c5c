//! Union of the key intervals of one rank's queries: disjoint ascending intervals for every
//! segment.

use std::ops::Range;

use annulus_core::{KeyIntervals, Run};

/// Builder of the positions that one rank's queries may attend to, or that its keys have. Intervals
/// are added in any order; [`AttendedPositions::close`] returns their union.
#[derive(Default)]
pub(super) struct AttendedPositions {
    /// `open[i]` is the union of the latest queries' i-th intervals. The i-th intervals of
    /// neighbours mostly overlap, so most queries only extend it.
    open: [Range<i64>; KeyIntervals::MAX],
    /// Segment of the open intervals.
    segment: usize,
    intervals: Vec<(usize, Range<i64>)>,
}

impl AttendedPositions {
    /// Adds the intervals of one query of segment `segment`.
    pub(super) fn add(&mut self, segment: usize, intervals: &[Range<i64>]) {
        if segment != self.segment {
            self.flush();
            self.segment = segment;
        }
        for (open, range) in self.open.iter_mut().zip(intervals) {
            if range.start <= open.end && open.start <= range.end && !open.is_empty() {
                *open = open.start.min(range.start)..open.end.max(range.end);
            } else {
                let complete = std::mem::replace(open, range.clone());
                if !complete.is_empty() {
                    self.intervals.push((segment, complete));
                }
            }
        }
    }

    /// Returns the union, sorted by segment and start, disjoint and non-touching within a segment.
    /// The builder is empty afterwards.
    pub(super) fn close(&mut self) -> Vec<(usize, Range<i64>)> {
        self.flush();
        self.intervals.sort_unstable_by_key(|(segment, range)| (*segment, range.start));
        self.intervals.dedup_by(|next, kept| {
            let joined = next.0 == kept.0 && next.1.start <= kept.1.end;
            if joined {
                kept.1.end = kept.1.end.max(next.1.end);
            }
            joined
        });
        // a copy without spare capacity: there is one list per rank
        let union = self.intervals.clone();
        self.intervals.clear();
        union
    }

    /// Moves the open intervals to the list.
    fn flush(&mut self) {
        for open in std::mem::take(&mut self.open) {
            if !open.is_empty() {
                self.intervals.push((self.segment, open));
            }
        }
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
