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
        let mut runs = Vec::new();
        for (owner, rows) in part.owners.iter().enumerate() {
            runs.extend(rows.iter().map(|rows| OwnerRun {
                segment: rows.segment,
                positions: ascending(&rows.positions),
                owner,
            }));
        }
        runs.sort_unstable_by_key(|run| (run.segment, run.positions.start, run.owner));
        Self { sorted_by_end: runs.is_sorted_by_key(OwnerRun::end), runs }
    }

    /// Calls `found` with the index of a run and the number of its rows whose positions are in
    /// `intervals`. A run may be found several times.
    pub(super) fn for_each_within(
        &self,
        intervals: &[(usize, Range<i64>)],
        mut found: impl FnMut(usize, u64),
    ) {
        for (segment, range) in intervals {
            let first = if self.sorted_by_end {
                self.runs.partition_point(|run| run.end() < (*segment, range.start))
            } else {
                self.runs.partition_point(|run| run.segment < *segment)
            };
            for (index, run) in self.runs.iter().enumerate().skip(first) {
                if run.segment != *segment || run.positions.start >= range.end {
                    break;
                }
                let rows = count_below(&run.positions, range.end)
                    - count_below(&run.positions, range.start);
                if rows > 0 {
                    found(index, rows);
                }
            }
        }
    }
}
