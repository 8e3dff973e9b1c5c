//! Packed sequences (`cum_seqlens`): which sequence a row is in, and its position there.

use crate::{Batch, Run, Runs, Side};

/// Sequences that are looked at one by one before a binary search.
const NEAR: usize = 4;

/// The sequences of one side.
pub(super) struct Packing<'a> {
    /// where each sequence starts, and where the last one ends
    starts: &'a [i64],
    /// of the other side: bottom-right alignment goes by the lengths of both
    others: &'a [i64],
    bottom_right: bool,
}

/// Neighbouring rows of one shard in one sequence.
pub(super) struct Part {
    /// `None`: after the last sequence.
    pub(super) sequence: Option<i64>,
    /// Their positions; for padding, which nobody sees, the row numbers.
    pub(super) positions: Run,
}

impl<'a> Packing<'a> {
    /// How `side` is packed, if it is. One list given serves for both sides.
    pub(super) fn of(batch: &'a Batch, side: Side, bottom_right: bool) -> Option<Self> {
        let (own, others) = match side {
            Side::Q => (&batch.cum_seqlens_q, &batch.cum_seqlens_k),
            Side::Kv => (&batch.cum_seqlens_k, &batch.cum_seqlens_q),
        };
        let starts = own.as_ref().or(others.as_ref())?;
        Some(Self { starts, others: others.as_ref().unwrap_or(starts), bottom_right })
    }

    /// Cuts rows where sequences end.
    pub(super) fn cut(&self, rows: &Runs) -> Vec<Part> {
        let mut parts = Vec::new();
        for run in rows.runs() {
            let (mut done, mut after) = (0, 0);
            while done < run.count {
                let row = run.at(done);
                // the last sequence that starts at or before this row: where rows ascend it is not before the last one found, and mostly near
                let found = if run.step < 0 { 0 } else { after };
                let near = self.starts[found..].iter().take(NEAR).take_while(|&&start| start <= row).count();
                let far = if near < NEAR { 0 } else { self.starts[found + near..].partition_point(|&start| start <= row) };
                after = found + near + far;
                let sequence = (after < self.starts.len()).then(|| after - 1);
                let left = run.count - done;
                let count = match (sequence, run.step) {
                    (Some(s), 1..) => left.min(((self.starts[s + 1] - row - 1) / run.step).unsigned_abs() + 1),
                    (None, 0..) => left,
                    _ => 1,
                };
                let first = sequence.map_or(row, |s| row - self.starts[s] + self.shift(s));
                parts.push(Part { sequence: sequence.map(|s| s as i64), positions: Run { start: first, step: run.step, count } });
                done += count;
            }
        }
        parts
    }

    /// How far alignment moves the queries of sequence `s`.
    fn shift(&self, s: usize) -> i64 {
        let length = |starts: &[i64]| starts.get(s + 1).zip(starts.get(s)).map_or(0, |(end, start)| end - start);
        if self.bottom_right { length(self.others) - length(self.starts) } else { 0 }
    }
}
