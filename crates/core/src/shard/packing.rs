//! Packed sequences (`cum_seqlens`): the sequence of each row, and its position in that sequence.

use super::append_run;
use crate::{Batch, Run, Runs, Side, index};

/// Number of sequences that are compared one by one before a binary search: consecutive rows mostly
/// lie in the same sequence or in one shortly after it.
const LINEAR_SEARCH: usize = 4;

/// The packed sequences of one side.
pub(super) struct PackedSequences<'a> {
    /// First row of each sequence, and the end of the last.
    starts: &'a [i64],
    /// The same of the other side: bottom-right alignment depends on the lengths of both.
    other_starts: &'a [i64],
    bottom_right: bool,
}

/// Rows of one shard, divided at the ends of sequences.
pub(super) struct PackedRows {
    /// Positions of the rows. For padding, which no query attends to, the row numbers.
    pub(super) positions: Runs,
    /// Index of the sequence of each row; −1 after the last.
    pub(super) sequences: Runs,
}

impl<'a> PackedSequences<'a> {
    /// Returns the sequences of `side`; `None` without packing. A list given for one side only is
    /// used for both.
    pub(super) fn of(batch: &'a Batch, side: Side, bottom_right: bool) -> Option<Self> {
        let (own, other) = match side {
            Side::Q => (&batch.cum_seqlens_q, &batch.cum_seqlens_k),
            Side::Kv => (&batch.cum_seqlens_k, &batch.cum_seqlens_q),
        };
        let starts = own.as_ref().or(other.as_ref())?;
        Some(Self { starts, other_starts: other.as_ref().unwrap_or(starts), bottom_right })
    }

    /// Divides rows at the ends of sequences.
    pub(super) fn divide(&self, rows: &Runs) -> PackedRows {
        // as if all sequences were of the same length
        let mean = self.starts.last().map_or(0, |end| end.unsigned_abs())
            / self.starts.len().max(1) as u64;
        let parts = rows.len() / mean.max(1) + 2 * rows.runs().len() as u64;
        let parts = index(parts).min(self.starts.len());
        let mut packed = PackedRows {
            positions: Runs::with_capacity(parts),
            sequences: Runs::with_capacity(parts),
        };
        for run in rows.runs() {
            match run.step {
                1 => self.divide_consecutive(run, &mut packed),
                _ => self.divide_run(run, &mut packed),
            }
        }
        packed
    }

    /// Divides consecutive rows.
    fn divide_consecutive(&self, run: &Run, packed: &mut PackedRows) {
        let end = run.at(run.count);
        let mut row = run.start;
        // the last sequence that starts at or before the row has the index before this
        let mut after = self.starts.partition_point(|&start| start <= row);
        while row < end {
            while self.starts.get(after).is_some_and(|&start| start <= row) {
                after += 1;
            }
            let Some(&next) = self.starts.get(after) else {
                packed.push(None, Run { start: row, step: 1, count: (end - row).unsigned_abs() });
                break;
            };
            let sequence = after - 1;
            let next = next.min(end);
            let start = row - self.starts[sequence] + self.shift(sequence);
            let count = (next - row).unsigned_abs();
            packed.push(Some(sequence), Run { start, step: 1, count });
            row = next;
        }
    }

    /// Divides rows of any step.
    fn divide_run(&self, run: &Run, packed: &mut PackedRows) {
        let mut done = 0;
        // index of the sequence after that of the latest row
        let mut after = 0;
        while done < run.count {
            let row = run.at(done);
            // the last sequence that starts at or before this row; if rows ascend, it is not
            // before that of the latest row
            let begin = if run.step < 0 { 0 } else { after };
            after = begin;
            while after - begin < LINEAR_SEARCH
                && self.starts.get(after).is_some_and(|&start| start <= row)
            {
                after += 1;
            }
            if after - begin == LINEAR_SEARCH {
                after += self.starts[after..].partition_point(|&start| start <= row);
            }
            let sequence = (after < self.starts.len()).then(|| after - 1);
            let left = run.count - done;
            let count = match (sequence, run.step) {
                (Some(s), 1..) => {
                    left.min(((self.starts[s + 1] - row - 1) / run.step).unsigned_abs() + 1)
                }
                (None, 0..) => left,
                _ => 1,
            };
            let start = sequence.map_or(row, |s| row - self.starts[s] + self.shift(s));
            packed.push(sequence, Run { start, step: run.step, count });
            done += count;
        }
    }

    /// Returns the number that alignment adds to the positions of sequence `s`.
    fn shift(&self, s: usize) -> i64 {
        let length = |starts: &[i64]| {
            starts.get(s + 1).zip(starts.get(s)).map_or(0, |(end, start)| end - start)
        };
        if self.bottom_right { length(self.other_starts) - length(self.starts) } else { 0 }
    }
}

impl PackedRows {
    /// Appends rows of one sequence, or padding.
    fn push(&mut self, sequence: Option<usize>, positions: Run) {
        let number = sequence.map_or(-1, |sequence| sequence as i64);
        append_run(&mut self.sequences, Run { start: number, step: 0, count: positions.count });
        append_run(&mut self.positions, positions);
    }
}
