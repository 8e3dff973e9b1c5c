//! Index of all ranks' keys by segment and position, which counts the keys in intervals: those of
//! each rank, or of all.

use std::ops::Range;

use super::{SegmentNumbers, StridedRows, ascending, count_below};
use crate::{RingShards, Run, Runs};

/// The keys of one batch row.
pub(crate) struct KeyIndex {
    /// `entries[first[s]..first[s + 1]]` belong to segment s: one for each rank with keys of the
    /// segment, in rank order; or one for all ranks.
    first: Vec<usize>,
    entries: Vec<Entry>,
    runs: Vec<SortedRun>,
}

/// Keys of one segment and one rank, or of one segment.
struct Entry {
    /// The rank; 0 in an index of all ranks together.
    rank: usize,
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

/// Keys of one segment and one rank, before they are sorted.
struct KeyRun {
    segment: usize,
    rank: usize,
    /// Positions, ascending.
    positions: Run,
}

struct SortedRun {
    run: Run,
    /// Keys of the entry in earlier runs.
    before: u64,
}

impl SortedRun {
    /// Returns the positions if they are consecutive.
    fn consecutive(&self) -> Option<Range<i64>> {
        (self.run.step == 1 || self.run.count == 1).then(|| self.positions())
    }

    /// Returns the positions from the first to the last.
    fn positions(&self) -> Range<i64> {
        self.run.start..self.run.at(self.run.count - 1) + 1
    }
}

impl KeyIndex {
    /// Sorts the keys of batch row `batch` by rank, and adds their segment ids to `segments`.
    pub(crate) fn by_rank(
        shards: &RingShards,
        batch: usize,
        segments: &mut SegmentNumbers,
    ) -> Self {
        Self::new(shards, batch, segments, |rank| rank)
    }

    /// Sorts the keys of batch row `batch` of all ranks together, and adds their segment ids to
    /// `segments`.
    pub(crate) fn of_all_ranks(
        shards: &RingShards,
        batch: usize,
        segments: &mut SegmentNumbers,
    ) -> Self {
        Self::new(shards, batch, segments, |_| 0)
    }

    fn new(
        shards: &RingShards,
        batch: usize,
        segments: &mut SegmentNumbers,
        group: impl Fn(usize) -> usize,
    ) -> Self {
        let mut keys: Vec<KeyRun> = Vec::new();
        for (rank, shard) in shards.kv.iter().enumerate() {
            keys.extend(segments.key_rows(shard, batch).iter().map(|rows| KeyRun {
                segment: rows.segment,
                rank: group(rank),
                positions: ascending(&rows.positions),
            }));
        }
        Self::sort(keys, segments.len())
    }

    /// Sorts the keys `owners[rank]` of all ranks together.
    pub(crate) fn of_owners(owners: &[Vec<StridedRows>], segments: usize) -> Self {
        let key_run = |rows: &StridedRows| KeyRun {
            segment: rows.segment,
            rank: 0,
            positions: ascending(&rows.positions),
        };
        Self::sort(owners.iter().flatten().map(key_run).collect(), segments)
    }

    fn sort(mut keys: Vec<KeyRun>, segments: usize) -> Self {
        keys.sort_unstable_by_key(|keys| (keys.segment, keys.rank, keys.positions.start));
        let mut index =
            Self { first: vec![0; segments + 1], entries: Vec::new(), runs: Vec::new() };
        for of_entry in keys.chunk_by(|a, b| (a.segment, a.rank) == (b.segment, b.rank)) {
            index.first[of_entry[0].segment + 1] += 1;
            index.push_entry(of_entry);
        }
        // prefix sums turn the numbers of entries into first indices
        (1..index.first.len()).for_each(|segment| index.first[segment] += index.first[segment - 1]);
        index
    }

    /// Appends the entry of `keys`, which belong to one segment and one rank.
    fn push_entry(&mut self, keys: &[KeyRun]) {
        let begin = self.runs.len();
        let runs: Vec<Run> = keys.iter().map(|keys| keys.positions).collect();
        let mut count = 0;
        for run in merged(&runs) {
            self.runs.push(SortedRun { run, before: count });
            count += run.count;
        }
        let runs = begin..self.runs.len();
        let is_consecutive = self.runs[runs.clone()].iter().all(|run| run.consecutive().is_some());
        self.entries.push(Entry { rank: keys[0].rank, runs, is_consecutive });
    }

    /// Returns the number of keys of `segment` whose positions are in `intervals`.
    pub(crate) fn count(&self, segment: usize, intervals: &[Range<i64>]) -> u64 {
        let mut all = 0;
        self.count_by_rank(segment, intervals, |_, count| all += count);
        all
    }

    /// Returns the keys of `segment` if they are in runs of consecutive positions, of an index of
    /// all ranks together.
    pub(crate) fn consecutive(&self, segment: usize) -> Option<ConsecutiveKeys<'_>> {
        match &self.entries[self.first[segment]..self.first[segment + 1]] {
            [] => Some(ConsecutiveKeys(&[])),
            [entry] if entry.is_consecutive => {
                Some(ConsecutiveKeys(&self.runs[entry.runs.clone()]))
            }
            _ => None,
        }
    }

    /// Returns the ranks with keys of `segment`, each with the positions of one of its runs, if
    /// those of every run are consecutive.
    pub(crate) fn consecutive_by_rank(&self, segment: usize) -> Option<Vec<(usize, Range<i64>)>> {
        let entries = &self.entries[self.first[segment]..self.first[segment + 1]];
        let runs = entries.iter().flat_map(|entry| {
            let runs = &self.runs[entry.runs.clone()];
            runs.iter().map(|sorted| Some((entry.rank, sorted.consecutive()?)))
        });
        runs.collect()
    }

    /// Calls `found(rank, count)` for every rank with keys of `segment`, with the number of these
    /// keys whose positions are in `intervals`.
    pub(crate) fn count_by_rank(
        &self,
        segment: usize,
        intervals: &[Range<i64>],
        mut found: impl FnMut(usize, u64),
    ) {
        for entry in &self.entries[self.first[segment]..self.first[segment + 1]] {
            let within = |range: &Range<i64>| {
                self.count_below(entry, range.end) - self.count_below(entry, range.start)
            };
            found(entry.rank, intervals.iter().map(within).sum());
        }
    }

    /// Returns the number of keys of `entry` with positions less than `bound`.
    fn count_below(&self, entry: &Entry, bound: i64) -> u64 {
        let runs = &self.runs[entry.runs.clone()];
        match runs.partition_point(|sorted| sorted.run.start < bound) {
            0 => 0,
            after => runs[after - 1].before + count_below(&runs[after - 1].run, bound),
        }
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
    let mut positions: Vec<i64> =
        runs.iter().flat_map(|run| (0..run.count).map(|index| run.at(index))).collect();
    positions.sort_unstable();
    positions.into_iter().collect::<Runs>().runs().to_vec()
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
