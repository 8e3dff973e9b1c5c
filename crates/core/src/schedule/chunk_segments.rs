//! Segments of which each chunk of rows has some.

use std::ops::Range;

use crate::{Runs, needs::IdNumbers};

/// Chunks of a segment up to which the ranks near each of them are updated at every exchange.
const LONG: usize = 16;

/// Segments of chunks.
pub(super) struct ChunkSegments {
    /// Segments of all chunks, ascending in each: those of chunk c are `first[c]..first[c + 1]`.
    pub(super) entries: Vec<usize>,
    first: Vec<usize>,
    /// Rows of each segment.
    pub(super) totals: Vec<u64>,
    /// Chunks between which each segment has rows.
    pub(super) chunks: Vec<Range<usize>>,
}

impl ChunkSegments {
    /// Numbers the ids of the chunks that begin at `edges`. Rows of negative ids are padding, which
    /// is in no segment.
    pub(super) fn new(ids: &Runs, edges: &[u64]) -> Self {
        let mut numbers = IdNumbers::of_lists(std::iter::once(ids));
        let mut all = Self {
            entries: Vec::with_capacity(ids.runs().len() + edges.len()),
            first: Vec::with_capacity(edges.len()),
            totals: Vec::with_capacity(ids.runs().len()),
            chunks: Vec::with_capacity(ids.runs().len()),
        };
        all.first.push(0);
        let mut row = 0;
        for run in ids.runs() {
            let end = row + run.count;
            let mut index = 0;
            while row < end && all.first.len() < edges.len() {
                let edge = edges[all.first.len()];
                let next = end.min(edge);
                // a run of several numbers repeats one; other runs are rows of several segments
                if run.step == 0 {
                    all.add(&mut numbers, run.start, next - row);
                } else {
                    (index..index + (next - row))
                        .for_each(|index| all.add(&mut numbers, run.at(index), 1));
                }
                index += next - row;
                row = next;
                if row == edge {
                    all.end_chunk();
                }
            }
        }
        // rows beyond the ids, of which there are none
        all.first.resize(edges.len().max(1), all.entries.len());
        all
    }

    /// Adds rows of a segment to the chunk at the end.
    fn add(&mut self, numbers: &mut IdNumbers, id: i64, rows: u64) {
        if id < 0 || rows == 0 {
            return;
        }
        let segment = numbers.number(id);
        let chunk = self.first.len() - 1;
        if segment == self.totals.len() {
            self.totals.push(0);
            self.chunks.push(chunk..chunk);
        }
        self.totals[segment] += rows;
        self.chunks[segment].end = chunk + 1;
        self.entries.push(segment);
    }

    /// Sorts the segments of the chunk at the end, each once, and begins the next.
    fn end_chunk(&mut self) {
        let begin = self.first.last().copied().unwrap_or(0);
        if !self.entries[begin..].is_sorted_by(|a, b| a < b) {
            self.entries[begin..].sort_unstable();
            let mut kept = begin;
            for index in begin..self.entries.len() {
                if kept == begin || self.entries[kept - 1] != self.entries[index] {
                    self.entries[kept] = self.entries[index];
                    kept += 1;
                }
            }
            self.entries.truncate(kept);
        }
        self.first.push(self.entries.len());
    }

    /// Returns the indices of the entries of a chunk.
    pub(super) fn range(&self, chunk: usize) -> Range<usize> {
        self.first[chunk]..self.first[chunk + 1]
    }

    pub(super) fn of(&self, chunk: usize) -> &[usize] {
        &self.entries[self.range(chunk)]
    }

    /// Returns true if a segment has so many chunks that their ranks are not listed by chunk.
    pub(super) fn is_long(&self, segment: usize) -> bool {
        self.chunks[segment].len() > LONG
    }

    /// Returns true if two chunks have rows of one segment.
    pub(super) fn share_one(&self, x: usize, y: usize) -> bool {
        self.of(x).iter().any(|segment| self.of(y).contains(segment))
    }

    /// Removes the other segments.
    pub(super) fn retain(&mut self, is_kept: impl Fn(usize) -> bool) {
        let mut kept = 0;
        for chunk in 1..self.first.len() {
            let range = self.first[chunk - 1]..self.first[chunk];
            self.first[chunk - 1] = kept;
            for index in range {
                if is_kept(self.entries[index]) {
                    self.entries[kept] = self.entries[index];
                    kept += 1;
                }
            }
        }
        if let Some(last) = self.first.last_mut() {
            *last = kept;
        }
        self.entries.truncate(kept);
    }
}
