//! Index of all ranks' keys by segment and position, which counts the keys in intervals.

use std::ops::Range;

use super::{SegmentNumbers, attended::ascending, count_below};
use crate::{KeyIntervals, RingShards, Run, Runs};

/// The keys of one batch row.
pub(crate) struct KeyIndex {
    /// `entries[first[s]..first[s + 1]]` belong to segment s: one for each rank with keys of the
    /// segment, in rank order.
    first: Vec<usize>,
    entries: Vec<Entry>,
    runs: Vec<SortedRun>,
}

/// Keys of one segment and one rank.
struct Entry {
    rank: usize,
    /// Indices of [`KeyIndex::runs`], ascending by position.
    runs: Range<usize>,
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

impl KeyIndex {
    /// Sorts the keys of batch row `batch`, and adds their segment ids to `segments`.
    pub(crate) fn new(shards: &RingShards, batch: usize, segments: &mut SegmentNumbers) -> Self {
        let mut keys: Vec<KeyRun> = Vec::new();
        for (rank, shard) in shards.kv.iter().enumerate() {
            keys.extend(segments.key_rows(shard, batch).iter().map(|rows| KeyRun {
                segment: rows.segment,
                rank,
                positions: ascending(&rows.positions),
            }));
        }
        keys.sort_unstable_by_key(|keys| (keys.segment, keys.rank, keys.positions.start));
        let mut index =
            Self { first: vec![0; segments.len() + 1], entries: Vec::new(), runs: Vec::new() };
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
        let mut count = 0;
        let mut push = |run: Run| {
            self.runs.push(SortedRun { run, before: count });
            count += run.count;
        };
        let runs = keys.iter().map(|keys| keys.positions);
        if runs.clone().is_sorted_by(|a, b| a.at(a.count - 1) <= b.start) {
            runs.for_each(&mut push);
        } else {
            // interleaved runs: sort the positions themselves
            let mut positions: Vec<i64> =
                runs.flat_map(|run| (0..run.count).map(move |index| run.at(index))).collect();
            positions.sort_unstable();
            positions.into_iter().collect::<Runs>().runs().iter().for_each(|&run| push(run));
        }
        self.entries.push(Entry { rank: keys[0].rank, runs: begin..self.runs.len() });
    }

    /// Calls `found(rank, count)` for every rank with keys of `segment`, with the number of these
    /// keys whose positions are in `intervals`.
    pub(crate) fn count_by_rank(
        &self,
        segment: usize,
        intervals: &KeyIntervals,
        mut found: impl FnMut(usize, u64),
    ) {
        for entry in &self.entries[self.first[segment]..self.first[segment + 1]] {
            let within = |range: &Range<i64>| {
                self.count_below(entry, range.end) - self.count_below(entry, range.start)
            };
            found(entry.rank, intervals.ranges().iter().map(within).sum());
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
