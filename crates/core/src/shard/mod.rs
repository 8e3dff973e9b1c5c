//! One rank's rows of one side: row numbers, positions and segment ids, as arithmetic runs.
//!
//! A shard is computed from the numbers of its rows and their part of the batch. For row i:
//!
//! ```text
//! position     explicit positions    as given
//!              cum_seqlens           i − start of its sequence + shift
//!              otherwise             i + shift
//! shift        kv length − q length (of the sequence or of the whole) for queries with
//!              bottom-right alignment, else 0
//! segment id   number of its sequence, or the id as given, or both in one number; −1 for padding
//! ```

mod encoding;

use ndarray::Array2;

use crate::{Alignment, Batch, Dims, Result, RowSet, Rows, Run, Runs, Side, index};

/// One rank's rows of one side, in compact form. Every list has one number per row, in local order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shard {
    /// Row numbers in the unsharded sequence.
    pub rows: Runs,
    /// Positions: one list for all batch rows, or one per batch row.
    pub positions: Vec<Runs>,
    /// Segment ids: no list, one for all batch rows, or one per batch row. Negative ids are
    /// padding.
    pub segments: Vec<Runs>,
}

impl Shard {
    /// Computes the shard of these row numbers from their part of the batch.
    ///
    /// Dims and batch must have been validated, the batch also by [`Batch::validate_rows`].
    pub fn of_rows(
        dims: &Dims,
        alignment: Alignment,
        side: Side,
        rows: Runs,
        batch: &Batch,
    ) -> Self {
        let Batch { q_segment_ids, kv_segment_ids, .. } = batch;
        let (ids, explicit) = match side {
            Side::Q => (q_segment_ids.as_ref().or(kv_segment_ids.as_ref()), &batch.q_positions),
            Side::Kv => (kv_segment_ids.as_ref().or(q_segment_ids.as_ref()), &batch.kv_positions),
        };
        let bottom_right = side == Side::Q && alignment == Alignment::BottomRight;
        if rows.is_empty() {
            // without rows, the lists of all batch rows are equal: one empty list of each kind
            let packed = batch.cum_seqlens_q.is_some() || batch.cum_seqlens_k.is_some();
            let segments = (ids.is_some() || packed).then(Runs::new).into_iter().collect();
            return Self { rows, positions: vec![Runs::new()], segments };
        }
        let packed = PackedSequences::of(batch, side, bottom_right);
        let packed = packed.map(|packed| packed.divide(&rows));
        let (of_sequences, sequences) =
            packed.map(|PackedRows { positions, sequences }| (positions, sequences)).unzip();
        let shift = if bottom_right { dims.kv_len as i64 - dims.q_len as i64 } else { 0 };
        let positions = positions(&rows, explicit.as_ref(), of_sequences, shift);
        let segments = segments(ids, sequences);
        Self { rows, positions: shared_if_equal(positions), segments: shared_if_equal(segments) }
    }

    /// True if positions or segment ids differ between batch rows.
    pub const fn differs_between_batch_rows(&self) -> bool {
        self.positions.len() > 1 || self.segments.len() > 1
    }

    /// Writes the numbers, positions and segment ids of the local rows `set` to `into`, one by one.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn expand(&self, set: &RowSet, into: &mut Rows) -> Result<()> {
        let lists = [1, self.positions.len(), self.segments.len()];
        into.reserve(lists.map(|lists| set.count().saturating_mul(lists as u64)))?;
        into.refill(|rows, positions, segments| {
            append(&self.rows, set, rows, i64::cast_unsigned);
            self.positions
                .iter()
                .for_each(|list| append(list, set, positions, |position| position));
            self.segments.iter().for_each(|list| append(list, set, segments, |segment| segment));
        })
    }
}

/// Computes positions: one list per batch row if they are explicit, otherwise one for all.
fn positions(
    rows: &Runs,
    explicit: Option<&Array2<i64>>,
    of_sequences: Option<Runs>,
    shift: i64,
) -> Vec<Runs> {
    match (explicit, of_sequences) {
        (Some(positions), _) => positions
            .rows()
            .into_iter()
            .map(|batch_row| batch_row.iter().copied().collect())
            .collect(),
        (None, Some(positions)) => vec![positions],
        (None, None) => {
            let mut shifted = Runs::with_capacity(rows.runs().len());
            for run in rows.runs() {
                append_run(&mut shifted, Run { start: run.start + shift, ..*run });
            }
            vec![shifted]
        }
    }
}

/// Computes segment ids: one list per batch row if there are ids, one for all batch rows if there
/// are only packed sequences, otherwise none. Ids of padding become −1.
fn segments(ids: Option<&Array2<i32>>, sequences: Option<Runs>) -> Vec<Runs> {
    match (ids, sequences) {
        (None, None) => Vec::new(),
        (None, Some(sequences)) => vec![sequences],
        (Some(ids), None) => ids
            .rows()
            .into_iter()
            .map(|batch_row| batch_row.iter().map(|&id| i64::from(id).max(-1)).collect())
            .collect(),
        (Some(ids), Some(sequences)) => {
            // sequence in the high half, id in the low half
            let both = |(sequence, &id): (i64, &i32)| {
                if sequence >= 0 && id >= 0 { sequence << 32 | i64::from(id) } else { -1 }
            };
            ids.rows()
                .into_iter()
                .map(|batch_row| sequences.iter().zip(batch_row).map(both).collect())
                .collect()
        }
    }
}

/// Appends the numbers of `list` at the indices `set` to `into`, in one pass over both.
fn append<T>(list: &Runs, set: &RowSet, into: &mut Vec<T>, convert: impl Fn(i64) -> T) {
    let mut runs = list.runs().iter();
    let mut run = runs.next();
    // index of the run's first number
    let mut first = 0;
    for range in set.ranges() {
        let mut next = range.start;
        while let Some(current) = run.filter(|_| next < range.end) {
            let end = range.end.min(first + current.count);
            if next < end {
                into.extend((next - first..end - first).map(|index| convert(current.at(index))));
                next = end;
            }
            if first + current.count <= next {
                first += current.count;
                run = runs.next();
            }
        }
    }
}

/// Appends a run. A run of one number is merged with its neighbours if possible.
fn append_run(runs: &mut Runs, run: Run) {
    if run.count == 1 { runs.push(run.start) } else { runs.push_run(run) }
}

/// Keeps one list if those of all batch rows are equal: tiles are then classified once for all.
fn shared_if_equal(mut lists: Vec<Runs>) -> Vec<Runs> {
    if lists.iter().skip(1).all(|list| *list == lists[0]) {
        lists.truncate(1);
    }
    lists
}

/// Number of sequences that are compared one by one before a binary search: consecutive rows mostly
/// lie in the same sequence or in one shortly after it.
const LINEAR_SEARCH: usize = 4;

/// The packed sequences of one side.
struct PackedSequences<'a> {
    /// First row of each sequence, and the end of the last.
    starts: &'a [i64],
    /// The same of the other side: bottom-right alignment depends on the lengths of both.
    other_starts: &'a [i64],
    bottom_right: bool,
}

/// Rows of one shard, divided at the ends of sequences.
struct PackedRows {
    /// Positions of the rows. For padding, which no query attends to, the row numbers.
    positions: Runs,
    /// Index of the sequence of each row; −1 after the last.
    sequences: Runs,
}

impl<'a> PackedSequences<'a> {
    /// Returns the sequences of `side`; `None` without packing. A list given for one side only is
    /// used for both.
    fn of(batch: &'a Batch, side: Side, bottom_right: bool) -> Option<Self> {
        let (own, other) = match side {
            Side::Q => (&batch.cum_seqlens_q, &batch.cum_seqlens_k),
            Side::Kv => (&batch.cum_seqlens_k, &batch.cum_seqlens_q),
        };
        let starts = own.as_ref().or(other.as_ref())?;
        Some(Self { starts, other_starts: other.as_ref().unwrap_or(starts), bottom_right })
    }

    /// Divides rows at the ends of sequences.
    fn divide(&self, rows: &Runs) -> PackedRows {
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
