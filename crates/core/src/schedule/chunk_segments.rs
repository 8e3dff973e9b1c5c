//! Segments of which each chunk of rows has some.

use std::ops::Range;

use crate::{Runs, needs::IdNumbers};

/// Chunks of a segment up to which the ranks near each of them are updated at every exchange.
const LONG: usize = 16;

/// Segments of which rows are in several chunks.
pub(super) struct ChunkSegments {
    /// Segments of all chunks, ascending in each: those of chunk c are `first[c]..first[c + 1]`.
    entries: Vec<usize>,
    first: Vec<usize>,
    pub(super) segments: Vec<Segment>,
}

/// Rows of one segment.
pub(super) struct Segment {
    /// Number of all of them.
    pub(super) rows: u64,
    /// Chunks between which they are.
    pub(super) chunks: Range<usize>,
    /// Number of chunks that have some.
    pub(super) uses: usize,
}

impl ChunkSegments {
    /// Finds the segments of the chunks that begin at `edges`. Rows of negative ids are padding,
    /// which is in no segment. `None` if there are no two segments, or none is in several chunks.
    pub(super) fn new(ids: &Runs, edges: &[u64]) -> Option<Self> {
        let mut numbers = IdNumbers::of_lists(std::iter::once(ids));
        let mut number = |id: i64| (id >= 0).then(|| numbers.number(id));
        let mut all = Self {
            entries: Vec::with_capacity(ids.runs().len() + edges.len()),
            first: Vec::with_capacity(edges.len().max(1)),
            segments: Vec::with_capacity(ids.runs().len()),
        };
        all.first.push(0);
        let mut row = 0;
        for run in ids.runs() {
            // a run of several numbers repeats one; other runs are rows of several segments
            let same = if run.step == 0 { Some(number(run.start)) } else { None };
            let begin = row;
            let end = row + run.count;
            while row < end && all.first.len() < edges.len() {
                let edge = edges[all.first.len()];
                let next = end.min(edge);
                match same {
                    Some(number) => all.add(number, next - row),
                    None => (row - begin..next - begin)
                        .for_each(|index| all.add(number(run.at(index)), 1)),
                }
                row = next;
                if row == edge {
                    all.end_chunk();
                }
            }
        }
        // rows beyond the ids, of which there are none
        all.first.resize(edges.len().max(1), all.entries.len());
        all.keep_divided()
    }

    /// Adds rows of the segment with a number, the next one if it is new, to the chunk at the end;
    /// nothing if they are padding, which has no number.
    fn add(&mut self, number: Option<usize>, rows: u64) {
        let Some(number) = number.filter(|_| rows > 0) else { return };
        let chunk = self.first.len() - 1;
        match self.segments.get_mut(number) {
            Some(segment) => {
                segment.rows += rows;
                segment.chunks.end = chunk + 1;
            }
            None => self.segments.push(Segment { rows, chunks: chunk..chunk + 1, uses: 0 }),
        }
        self.entries.push(number);
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

    /// Removes the segments that are within one chunk, and numbers the others anew. `None` if there
    /// are no two segments, or none is left.
    fn keep_divided(mut self) -> Option<Self> {
        let is_divided = |segment: &Segment| segment.chunks.len() > 1;
        if self.segments.len() < 2 || !self.segments.iter().any(is_divided) {
            return None;
        }
        // numbers of the segments that are kept
        let numbers: Vec<usize> = self
            .segments
            .iter()
            .scan(0, |next, of| Some(std::mem::replace(next, *next + usize::from(is_divided(of)))))
            .collect();
        let mut kept = 0;
        let mut begin = 0;
        for chunk in 1..self.first.len() {
            let end = self.first[chunk];
            for index in begin..end {
                let entry = self.entries[index];
                if is_divided(&self.segments[entry]) {
                    self.segments[entry].uses += 1;
                    self.entries[kept] = numbers[entry];
                    kept += 1;
                }
            }
            begin = end;
            self.first[chunk] = kept;
        }
        self.entries.truncate(kept);
        self.segments.retain(is_divided);
        Some(self)
    }

    /// Returns the segments of a chunk.
    pub(super) fn of(&self, chunk: usize) -> &[usize] {
        &self.entries[self.first[chunk]..self.first[chunk + 1]]
    }

    /// Returns true if a segment has so many chunks that their ranks are not listed by chunk.
    pub(super) fn is_long(&self, segment: usize) -> bool {
        self.segments[segment].chunks.len() > LONG
    }

    /// Returns true if two chunks have rows of one segment.
    pub(super) fn share_one(&self, x: usize, y: usize) -> bool {
        self.of(x).iter().any(|segment| self.of(y).contains(segment))
    }
}
