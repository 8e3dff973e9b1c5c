//! Every rank's keys, sorted by position within a class: how many of them lie in an interval?

use std::ops::Range;

use super::{Classes, below, seen::ascending};
use crate::{Coordinates, Run, Runs, Spans};

/// The keys of one batch row.
pub(crate) struct KeyIndex {
    /// `entries[first[c]..first[c + 1]]` are of class c: one for each rank that has keys of it, in rank order
    first: Vec<usize>,
    entries: Vec<Entry>,
    runs: Vec<SortedRun>,
}

struct Entry {
    rank: usize,
    runs: Range<usize>,
}

struct SortedRun {
    run: Run,
    /// keys of the entry in earlier runs
    before: u64,
}

impl KeyIndex {
    /// Sorts the keys of batch row `batch`, whose ids `classes` learns.
    pub(crate) fn new(coordinates: &Coordinates, batch: usize, classes: &mut Classes) -> Self {
        let mut keys: Vec<(usize, usize, Run)> = Vec::new();
        for (rank, shard) in coordinates.kv.iter().enumerate() {
            keys.extend(classes.key_pieces(shard, batch).iter().map(|piece| (piece.class, rank, ascending(&piece.positions))));
        }
        keys.sort_unstable_by_key(|(class, rank, run)| (*class, *rank, run.start));
        let mut index = Self { first: vec![0; classes.len() + 1], entries: Vec::new(), runs: Vec::new() };
        for of_entry in keys.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (class, rank, _) = of_entry[0];
            index.first[class + 1] += 1;
            index.push_entry(rank, of_entry);
        }
        (1..index.first.len()).for_each(|class| index.first[class] += index.first[class - 1]);
        index
    }

    fn push_entry(&mut self, rank: usize, keys: &[(usize, usize, Run)]) {
        let (begin, mut count) = (self.runs.len(), 0);
        let mut push = |run: Run| {
            self.runs.push(SortedRun { run, before: count });
            count += run.count;
        };
        if keys.is_sorted_by(|(.., a), (.., b)| a.at(a.count - 1) <= b.start) {
            keys.iter().for_each(|&(.., run)| push(run));
        } else {
            // interleaved runs: sort the numbers themselves
            let mut numbers: Vec<i64> = keys.iter().flat_map(|(.., run)| (0..run.count).map(|index| run.at(index))).collect();
            numbers.sort_unstable();
            numbers.into_iter().collect::<Runs>().runs().iter().for_each(|&run| push(run));
        }
        self.entries.push(Entry { rank, runs: begin..self.runs.len() });
    }

    /// Tells for every rank that has keys of `class` how many of them lie in `spans`.
    pub(crate) fn count_by_rank(&self, class: usize, spans: &Spans, mut tell: impl FnMut(usize, u64)) {
        for entry in &self.entries[self.first[class]..self.first[class + 1]] {
            let within = |range: &Range<i64>| self.below(entry, range.end) - self.below(entry, range.start);
            tell(entry.rank, spans.ranges().iter().map(within).sum());
        }
    }

    fn below(&self, entry: &Entry, bound: i64) -> u64 {
        let runs = &self.runs[entry.runs.clone()];
        match runs.partition_point(|sorted| sorted.run.start < bound) {
            0 => 0,
            after => runs[after - 1].before + below(&runs[after - 1].run, bound),
        }
    }
}
