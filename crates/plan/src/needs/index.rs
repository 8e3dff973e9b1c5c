//! Index of all ranks' keys by segment and position, which counts the keys in intervals.

use std::ops::Range;

use super::{SegmentNumbers, StridedRows, ascending, count_below};
use crate::RingShards;
use annulus_core::{Run, Runs};

/// The keys of one batch row.
pub(crate) struct KeyIndex {
    /// By segment.
    entries: Vec<Entry>,
    runs: Vec<SortedRun>,
}

/// Keys of one segment.
#[derive(Clone)]
struct Entry {
    /// Indices of [`KeyIndex::runs`], ascending by position.
    runs: Range<usize>,
    /// True if the positions of each run are consecutive.
    is_consecutive: bool,
}

/// Keys of one segment in runs of consecutive positions, ascending.
pub(crate) struct ConsecutiveKeys<'a>(&'a [SortedRun]);

impl ConsecutiveKeys<'_> {
    /// Returns the first run of which `holds` is false. It must be false of all later ones too.
    pub(crate) fn partition_point(&self, holds: impl Fn(&Range<i64>) -> bool) -> usize {
        self.0.partition_point(|sorted| holds(&sorted.positions()))
    }

    /// Returns the positions of run `index`; `None` if there is no such run.
    #[inline]
    pub(crate) fn positions(&self, index: usize) -> Option<Range<i64>> {
        self.0.get(index).map(SortedRun::positions)
    }

    /// Returns the number of keys below a position, of those in `runs` and before them. Runs before
    /// must be below it, and those after not.
    pub(crate) fn count_below(&self, runs: Range<usize>, position: i64) -> u64 {
        let near = &self.0[runs.clone()];
        let after = runs.start + near.partition_point(|sorted| sorted.run.start < position);
        let last = after.checked_sub(1).and_then(|last| self.0.get(last));
        last.map_or(0, |sorted| {
            // consecutive positions
            let within = position.saturating_sub(sorted.run.start).unsigned_abs();
            sorted.before + within.min(sorted.run.count)
        })
    }

    /// Returns the number of keys of some runs.
    pub(crate) fn count(&self, runs: Range<usize>) -> u64 {
        let of = |run: &SortedRun| run.before + run.run.count;
        match (self.0.get(runs.start), runs.end.checked_sub(1).and_then(|last| self.0.get(last))) {
            (Some(first), Some(last)) if !runs.is_empty() => of(last) - first.before,
            _ => 0,
        }
    }
}

struct SortedRun {
    run: Run,
    /// Keys of the entry in earlier runs.
    before: u64,
}

impl SortedRun {
    /// Returns true if the positions are consecutive.
    const fn is_consecutive(&self) -> bool {
        self.run.step == 1 || self.run.count == 1
    }

    /// Returns the positions from the first to the last.
    fn positions(&self) -> Range<i64> {
        self.run.start..self.run.at(self.run.count - 1) + 1
    }
}

impl KeyIndex {
    /// Sorts the keys of batch row `batch` of all ranks, and adds their segment ids to `segments`.
    pub(crate) fn of_batch(
        shards: &RingShards,
        batch: usize,
        segments: &mut SegmentNumbers,
    ) -> Self {
        let owners: Vec<Vec<StridedRows>> =
            shards.kv.iter().map(|shard| segments.key_rows(shard, batch)).collect();
        Self::of_owners(&owners, segments.len())
    }

    /// Sorts the keys `owners[rank]` of all ranks.
    pub(crate) fn of_owners(owners: &[Vec<StridedRows>], segments: usize) -> Self {
        let key_run = |rows: &StridedRows| (rows.segment, ascending(&rows.positions));
        let mut keys = Vec::with_capacity(owners.iter().map(Vec::len).sum());
        owners.iter().for_each(|rows| keys.extend(rows.iter().map(key_run)));
        keys.sort_unstable_by_key(|(segment, positions)| (*segment, positions.start));
        let mut index = Self {
            entries: vec![Entry { runs: 0..0, is_consecutive: true }; segments],
            runs: Vec::with_capacity(segments),
        };
        for of_segment in keys.chunk_by(|a, b| a.0 == b.0) {
            index.entries[of_segment[0].0] = index.push_runs(of_segment);
        }
        index
    }

    /// Appends the runs of `keys`, which belong to one segment.
    fn push_runs(&mut self, keys: &[(usize, Run)]) -> Entry {
        let begin = self.runs.len();
        match keys {
            // the common case: the keys of a segment are one run
            [(_, positions)] if positions.step == 1 => {
                self.runs.push(SortedRun { run: *positions, before: 0 });
            }
            _ => {
                let runs: Vec<Run> = keys.iter().map(|(_, positions)| *positions).collect();
                let mut count = 0;
                for run in merged(&runs) {
                    self.runs.push(SortedRun { run, before: count });
                    count += run.count;
                }
            }
        }
        let runs = begin..self.runs.len();
        let is_consecutive = self.runs[runs.clone()].iter().all(SortedRun::is_consecutive);
        Entry { runs, is_consecutive }
    }

    /// Returns the keys of `segment` if they are in runs of consecutive positions.
    #[inline]
    pub(crate) fn consecutive(&self, segment: usize) -> Option<ConsecutiveKeys<'_>> {
        let Entry { runs, is_consecutive } = &self.entries[segment];
        is_consecutive.then(|| ConsecutiveKeys(&self.runs[runs.clone()]))
    }

    /// Returns the number of keys of `segment` whose positions are in `intervals`.
    pub(crate) fn count(&self, segment: usize, intervals: &[Range<i64>]) -> u64 {
        let runs = &self.runs[self.entries[segment].runs.clone()];
        let below = |bound: i64| match runs.partition_point(|sorted| sorted.run.start < bound) {
            0 => 0,
            after => runs[after - 1].before + count_below(&runs[after - 1].run, bound),
        };
        intervals.iter().map(|range| below(range.end) - below(range.start)).sum()
    }
}

/// Returns runs with the positions of ascending runs, which are sorted by their starts; ascending,
/// with consecutive positions in one run.
fn merged(runs: &[Run]) -> Vec<Run> {
    if let Some(run) = interleaved(runs) {
        return vec![run];
    }
    if runs.is_sorted_by(|a, b| a.at(a.count - 1) <= b.start) {
        let mut merged: Vec<Run> = Vec::new();
        for run in runs {
            match merged.last_mut() {
                Some(last)
                    if last.step == 1 && run.step == 1 && last.at(last.count) == run.start =>
                {
                    last.count += run.count;
                }
                _ => merged.push(*run),
            }
        }
        return merged;
    }
    // interleaved otherwise than by the striped layout: sort the positions themselves
    if let Some(marked) = marked(runs) {
        return marked.runs().to_vec();
    }
    let mut positions: Vec<i64> =
        runs.iter().flat_map(|run| (0..run.count).map(|index| run.at(index))).collect();
    positions.sort_unstable();
    positions.into_iter().collect::<Runs>().runs().to_vec()
}

/// Returns the positions of ascending runs in order, by a bit for each position between the first
/// and the last. `None` if there are too many for their number, or if a position occurs twice.
fn marked(runs: &[Run]) -> Option<Runs> {
    /// Positions of a bitmask for each one that is in it, at most: a word is scanned in the time of
    /// a step of sorting.
    const SPAN: u64 = 64;
    let count: u64 = runs.iter().map(|run| run.count).sum();
    let first = runs.iter().map(|run| run.start).min()?;
    let last = runs.iter().map(|run| run.at(run.count - 1)).max()?;
    // first <= last, so the wrapped difference is exact as an unsigned number
    let span = last.wrapping_sub(first).cast_unsigned();
    if span / SPAN > count {
        return None;
    }
    let mut words = vec![0u64; annulus_core::index(span / 64) + 1];
    for run in runs {
        for index in 0..run.count {
            let bit = run.at(index).wrapping_sub(first).cast_unsigned();
            let word = &mut words[annulus_core::index(bit / 64)];
            if *word >> (bit % 64) & 1 == 1 {
                return None;
            }
            *word |= 1 << (bit % 64);
        }
    }
    let mut sorted = Runs::new();
    for (index, mut word) in (0i64..).zip(words) {
        while word != 0 {
            // not beyond `last`
            sorted.push(first.wrapping_add(64 * index + i64::from(word.trailing_zeros())));
            word &= word - 1;
        }
    }
    Some(sorted)
}

/// Returns the consecutive positions that the runs of a striped layout have together: n runs of
/// step n, of which run i starts at the i-th position and has every n-th of the positions.
fn interleaved(runs: &[Run]) -> Option<Run> {
    let start = runs.first()?.start;
    let count: u64 = runs.iter().map(|run| run.count).sum();
    let stripes = runs.len() as u64;
    let is_stripe = |(index, run): (u64, &Run)| {
        let step = run.step.cast_unsigned();
        run.start == start.wrapping_add(index.cast_signed())
            && (step == stripes || run.count == 1)
            && run.count == (count - index).div_ceil(stripes)
    };
    let all = count >= stripes && (0..).zip(runs).all(is_stripe);
    all.then_some(Run { start, step: 1, count })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the positions of `runs` as runs if a bitmask of them is of use.
    fn sorted(runs: &[Run]) -> Option<Runs> {
        let mut positions: Vec<i64> =
            runs.iter().flat_map(|run| (0..run.count).map(|i| run.at(i))).collect();
        positions.sort_unstable();
        let span = positions.last()?.checked_sub(*positions.first()?)?;
        let is_dense = span / 64 <= positions.len() as i64;
        let is_set = positions.windows(2).all(|two| two[0] < two[1]);
        (is_dense && is_set).then(|| positions.into_iter().collect())
    }

    proptest! {
        #[test]
        fn marked_positions_are_the_sorted_ones(
            runs in prop::collection::vec((-200i64..200, 0i64..7, 1u64..9), 1..5),
            far in prop_oneof![Just(0), Just(900), Just(i64::MAX - 300)],
        ) {
            let run = |(n, &(start, step, count)): (usize, &(i64, i64, u64))| {
                Run { start: if n == 0 { start + far } else { start }, step, count }
            };
            let runs: Vec<Run> = runs.iter().enumerate().map(run).collect();
            prop_assert_eq!(marked(&runs), sorted(&runs));
        }
    }

    #[test]
    fn marked_positions_may_be_the_least_and_the_largest() {
        let run = |start, step| Run { start, step, count: 3 };
        let least = [run(i64::MIN + 1, 2), run(i64::MIN, 2)];
        assert_eq!(marked(&least), Some(Runs::counting(i64::MIN, 6)));
        let largest = [run(i64::MAX - 4, 2), run(i64::MAX - 5, 2)];
        assert_eq!(marked(&largest), Some(Runs::counting(i64::MAX - 5, 6)));
        assert_eq!(marked(&[least[0], largest[0]]), None);
    }
}
