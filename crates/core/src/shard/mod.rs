//! One rank's rows of one side, as runs: row numbers, positions and segment ids, from the layout and what the rank was given of the batch.
//!
//! ```text
//! explicit positions   i' as given
//! cum_seqlens          i' = i − start of its sequence   (+ kv length − q length of its sequence, queries aligned bottom-right)
//! neither              i' = i                           (+ kv_len − q_len, queries aligned bottom-right)
//! segment id           the sequence's number, the id given, or both as one number; −1 = padding
//! ```

mod encoding;
mod packing;
#[cfg(test)]
mod tests;

use packing::Packing;

use crate::{Alignment, Batch, Dims, Layout, RowSet, Rows, Run, Runs, Side};

/// One rank's rows of one side, compactly: every list has one number a row, in local order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shard {
    /// Row numbers in the unsharded sequence.
    pub rows: Runs,
    /// Positions: one list shared by all batch rows, or one a batch row.
    pub positions: Vec<Runs>,
    /// Segment ids: none, one list shared by all batch rows, or one a batch row. Negative = padding.
    pub segments: Vec<Runs>,
}

impl Shard {
    /// One rank's shard, from the rows that this rank was given of the batch. Dims, layout and batch must have been validated, the last also
    /// by [`Batch::validate_layout`].
    pub fn local(dims: &Dims, alignment: Alignment, layout: &Layout, side: Side, rank: usize, ranks: usize, batch: &Batch) -> Self {
        let (len, ids, explicit) = match side {
            Side::Q => (dims.q_len, batch.q_segment_ids.as_ref().or(batch.kv_segment_ids.as_ref()), &batch.q_positions),
            Side::Kv => (dims.kv_len, batch.kv_segment_ids.as_ref().or(batch.q_segment_ids.as_ref()), &batch.kv_positions),
        };
        let rows = layout.shard(side, len, rank, ranks);
        let bottom_right = side == Side::Q && alignment == Alignment::BottomRight;
        // which packed sequence each row is in, in long stretches
        let packed = Packing::of(batch, side, bottom_right).map(|packing| packing.cut(&rows));
        let positions = match (explicit, &packed) {
            (Some(positions), _) => positions.rows().into_iter().map(|line| compact(line.iter().copied())).collect(),
            (None, Some(parts)) => vec![joined(parts.iter().map(|part| part.positions))],
            (None, None) => {
                let shift = if bottom_right { dims.kv_len as i64 - dims.q_len as i64 } else { 0 };
                vec![joined(rows.runs().iter().map(|run| Run { start: run.start + shift, ..*run }))]
            }
        };
        let segments = match (ids, &packed) {
            (None, None) => Vec::new(),
            (None, Some(parts)) => {
                vec![joined(parts.iter().map(|part| Run { start: part.sequence.unwrap_or(-1), step: 0, count: part.positions.count }))]
            }
            (Some(ids), None) => ids.rows().into_iter().map(|line| compact(line.iter().map(|&id| i64::from(id).max(-1)))).collect(),
            (Some(ids), Some(parts)) => {
                let sequences = || parts.iter().flat_map(|part| (0..part.positions.count).map(|_| part.sequence));
                let both = |(sequence, &id): (Option<i64>, &i32)| match sequence {
                    Some(sequence) if id >= 0 => sequence << 32 | i64::from(id),
                    _ => -1,
                };
                ids.rows().into_iter().map(|line| compact(sequences().zip(line).map(both))).collect()
            }
        };
        Self { rows, positions: shared_if_alike(positions), segments: shared_if_alike(segments) }
    }

    /// The rows `set` (local indices) of this shard, spelled out into `into`.
    pub fn expand(&self, set: &RowSet, into: &mut Rows) {
        into.refill(|rows, positions, segments| {
            spell(&self.rows, set, rows, i64::cast_unsigned);
            self.positions.iter().for_each(|list| spell(list, set, positions, |position| position));
            self.segments.iter().for_each(|list| spell(list, set, segments, |segment| segment));
        });
    }
}

/// Appends the numbers of `list` at the indices `set` to `into`: one walk over both.
fn spell<T>(list: &Runs, set: &RowSet, into: &mut Vec<T>, convert: impl Fn(i64) -> T) {
    let mut runs = list.runs().iter();
    let (mut run, mut first) = (runs.next(), 0);
    for range in set.ranges() {
        let mut next = range.start;
        while let Some(here) = run.filter(|_| next < range.end) {
            let end = range.end.min(first + here.count);
            if next < end {
                into.extend((next - first..end - first).map(|index| convert(here.at(index))));
                next = end;
            }
            if first + here.count <= next {
                first += here.count;
                run = runs.next();
            }
        }
    }
}

/// Numbers as runs, found greedily; long runs are followed without touching memory.
fn compact(numbers: impl Iterator<Item = i64>) -> Runs {
    let mut runs = Runs::new();
    let mut run = Run { start: 0, step: 0, count: 0 };
    let mut last = 0i64;
    for number in numbers {
        match (run.count, number.checked_sub(last)) {
            (1, Some(step)) => run = Run { step, count: 2, ..run },
            (2.., Some(step)) if step == run.step => run.count += 1,
            _ => {
                runs.push_run(run);
                run = Run { start: number, step: 1, count: 1 };
            }
        }
        last = number;
    }
    runs.push_run(run);
    runs
}

/// Runs one after another, those of a single number joined to their neighbours where they fit.
fn joined(parts: impl Iterator<Item = Run>) -> Runs {
    let mut runs = Runs::new();
    for part in parts {
        if part.count == 1 { runs.push(part.start) } else { runs.push_run(part) }
    }
    runs
}

/// One list for all batch rows where they do not differ: then tiles need not be classified for each.
fn shared_if_alike(mut lists: Vec<Runs>) -> Vec<Runs> {
    if lists.iter().skip(1).all(|list| *list == lists[0]) {
        lists.truncate(1);
    }
    lists
}
