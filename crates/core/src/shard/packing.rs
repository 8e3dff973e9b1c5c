//! Packed sequences (`cum_seqlens`): the sequence of each row, and its position in that sequence.

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

/// Consecutive rows of one shard in one sequence.
pub(super) struct SequenceRun {
    /// Index of the sequence; `None` after the last.
    pub(super) sequence: Option<i64>,
    /// Positions of the rows. For padding, which no query attends to, the row numbers.
    pub(super) positions: Run,
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
    pub(super) fn divide(&self, rows: &Runs) -> Vec<SequenceRun> {
        // as if all sequences were of the same length
        let mean = self.starts.last().map_or(0, |end| end.unsigned_abs())
            / self.starts.len().max(1) as u64;
        let parts = rows.len() / mean.max(1) + 2 * rows.runs().len() as u64;
        let mut parts = Vec::with_capacity(index(parts).min(self.starts.len()));
        for run in rows.runs() {
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
                    // a division takes longer than all the rest
                    (Some(s), 1) => left.min((self.starts[s + 1] - row).unsigned_abs()),
                    (Some(s), 2..) => {
                        left.min(((self.starts[s + 1] - row - 1) / run.step).unsigned_abs() + 1)
                    }
                    (None, 0..) => left,
                    _ => 1,
                };
                let first = sequence.map_or(row, |s| row - self.starts[s] + self.shift(s));
                parts.push(SequenceRun {
                    sequence: sequence.map(|s| s as i64),
                    positions: Run { start: first, step: run.step, count },
                });
                done += count;
            }
        }
        parts
    }

    /// Returns the number that alignment adds to the positions of sequence `s`.
    fn shift(&self, s: usize) -> i64 {
        let length = |starts: &[i64]| {
            starts.get(s + 1).zip(starts.get(s)).map_or(0, |(end, start)| end - start)
        };
        if self.bottom_right { length(self.other_starts) - length(self.starts) } else { 0 }
    }
}
