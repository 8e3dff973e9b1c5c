//! Runs of keys of all owners, by their positions.

use std::ops::Range;

use crate::{
    Run,
    needs::{BatchNeeds, ascending, count_below},
};

/// Runs of keys of all owners, sorted by segment and start.
pub(super) struct OwnerRuns {
    pub(super) runs: Vec<OwnerRun>,
    /// True if the runs are sorted by segment and end too, as in every layout but custom ones.
    sorted_by_end: bool,
    /// True if every run begins after the end of the one before it.
    pub(super) disjoint: bool,
}

pub(super) struct OwnerRun {
    pub(super) segment: usize,
    /// In ascending order.
    pub(super) positions: Run,
    pub(super) owner: usize,
}

impl OwnerRun {
    const fn end(&self) -> (usize, i64) {
        (self.segment, self.positions.at(self.positions.count - 1))
    }
}

impl OwnerRuns {
    pub(super) fn new(part: &BatchNeeds) -> Self {
        Self::of_owners(part, 0..part.owners.len())
    }

    /// As [`OwnerRuns::new`], of some owners.
    pub(super) fn of_owners(part: &BatchNeeds, owners: impl Iterator<Item = usize>) -> Self {
        let mut runs = Vec::new();
        for (owner, rows) in owners.map(|owner| (owner, &part.owners[owner])) {
            runs.extend(rows.iter().map(|rows| OwnerRun {
                segment: rows.segment,
                positions: ascending(&rows.positions),
                owner,
            }));
        }
        runs.sort_unstable_by_key(|run| (run.segment, run.positions.start, run.owner));
        let disjoint =
            runs.windows(2).all(|two| two[0].end() < (two[1].segment, two[1].positions.start));
        Self { sorted_by_end: runs.is_sorted_by_key(OwnerRun::end), disjoint, runs }
    }

    /// Returns the indices of runs among which are all that have rows in an interval.
    pub(super) fn overlapping(&self, (segment, range): &(usize, Range<i64>)) -> Range<usize> {
        let first = if self.sorted_by_end {
            self.runs.partition_point(|run| run.end() < (*segment, range.start))
        } else {
            self.runs.partition_point(|run| run.segment < *segment)
        };
        let end = (*segment, range.end);
        let end = self.runs.partition_point(|run| (run.segment, run.positions.start) < end);
        first..end.max(first)
    }

    /// Returns the rows of the runs before each one, and at last of all.
    pub(super) fn rows_before(&self) -> Vec<u64> {
        let mut rows_before = Vec::with_capacity(self.runs.len() + 1);
        let mut rows = 0;
        for run in &self.runs {
            rows_before.push(rows);
            rows += run.positions.count;
        }
        rows_before.push(rows);
        rows_before
    }

    /// Returns the end of the runs from each one on whose owners ascend, or descend, by `distance`.
    pub(super) fn stretch_ends(&self, distance: usize) -> Vec<usize> {
        let runs = &self.runs;
        let slope = |index: usize| {
            let next = runs.get(index + 1)?.owner as i64;
            let slope = next - runs[index].owner as i64;
            Some(slope).filter(|slope| slope.unsigned_abs() == distance as u64)
        };
        let mut ends: Vec<usize> = (1..=runs.len()).collect();
        for index in (0..runs.len()).rev().filter(|&index| slope(index).is_some()) {
            let continues = slope(index + 1) == slope(index);
            ends[index] = if continues { ends[index + 1] } else { index + 2 };
        }
        ends
    }

    /// Returns the number of rows of a run of the same segment whose positions are in an interval.
    pub(super) fn rows_within(&self, index: usize, (_, range): &(usize, Range<i64>)) -> u64 {
        let positions = &self.runs[index].positions;
        count_below(positions, range.end) - count_below(positions, range.start)
    }

    /// Calls `found` with the index of a run and the number of its rows whose positions are in
    /// `intervals`. A run may be found several times.
    pub(super) fn for_each_within(
        &self,
        intervals: &[(usize, Range<i64>)],
        mut found: impl FnMut(usize, u64),
    ) {
        for interval in intervals {
            for index in self.overlapping(interval) {
                let rows = self.rows_within(index, interval);
                if rows > 0 {
                    found(index, rows);
                }
            }
        }
    }
}
