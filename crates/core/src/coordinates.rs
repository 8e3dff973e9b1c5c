//! Positions and segment ids of every rank's rows, as runs: what a rank must know of the others' rows to plan a ring.

use std::sync::Arc;

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

/// Every rank's rows of both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coordinates {
    /// `q[rank]`.
    pub q: Vec<Arc<Shard>>,
    /// `kv[rank]`.
    pub kv: Vec<Arc<Shard>>,
}

impl Shard {
    /// The rows `set` (local indices) of this shard, spelled out into `into`.
    pub fn expand(&self, set: &RowSet, into: &mut Rows) {
        into.refill(|rows, positions, segments| {
            let mut numbers = Vec::new();
            set.ranges().iter().for_each(|range| self.rows.slice_into(range.clone(), &mut numbers));
            rows.extend(numbers.iter().map(|&row| row.cast_unsigned()));
            for (lists, out) in [(&self.positions, positions), (&self.segments, segments)] {
                for list in lists {
                    set.ranges().iter().for_each(|range| list.slice_into(range.clone(), out));
                }
            }
        });
    }
}

impl Coordinates {
    /// Coordinates that follow from the problem alone: no batch.
    pub fn plain(dims: &Dims, alignment: Alignment, layout: &Layout, ranks: usize) -> Self {
        let shards =
            |side| (0..ranks).map(|rank| Arc::new(Shard::local(dims, alignment, layout, side, rank, ranks, &Batch::default()))).collect();
        Self { q: shards(Side::Q), kv: shards(Side::Kv) }
    }
}

impl Shard {
    /// One rank's shard, from the rows that this rank was given of the batch.
    pub fn local(dims: &Dims, alignment: Alignment, layout: &Layout, side: Side, rank: usize, ranks: usize, batch: &Batch) -> Self {
        let (len, other, own_ids, other_ids, explicit, own_lens, other_lens) = match side {
            Side::Q => (
                dims.q_len,
                dims.kv_len,
                &batch.q_segment_ids,
                &batch.kv_segment_ids,
                &batch.q_positions,
                &batch.cum_seqlens_q,
                &batch.cum_seqlens_k,
            ),
            Side::Kv => (
                dims.kv_len,
                dims.q_len,
                &batch.kv_segment_ids,
                &batch.q_segment_ids,
                &batch.kv_positions,
                &batch.cum_seqlens_k,
                &batch.cum_seqlens_q,
            ),
        };
        let rows = layout.shard(side, len, rank, ranks);
        let lens = own_lens.as_ref().or(other_lens.as_ref());
        let other_lens = other_lens.as_ref().or(own_lens.as_ref());
        let shift = |own: i64, other: i64| if side == Side::Q && alignment == Alignment::BottomRight { other - own } else { 0 };
        // a row's packed sequence and where it starts: the last sequence that starts at or before it and has not ended
        let sequence = |row: i64| {
            let lens = lens?;
            let after = lens.partition_point(|&start| start <= row);
            (after < lens.len()).then(|| after - 1)
        };
        let positions = match explicit {
            Some(positions) => positions.rows().into_iter().map(|line| line.iter().copied().collect()).collect(),
            None if lens.is_some() => {
                let (lens, others) = (lens.map(Vec::as_slice).unwrap_or_default(), other_lens.map(Vec::as_slice).unwrap_or_default());
                let position = |row| sequence(row).map_or(row, |s| row - lens[s] + shift(lens[s + 1] - lens[s], others[s + 1] - others[s]));
                vec![rows.iter().map(position).collect()]
            }
            None => {
                let offset = shift(len as i64, other as i64);
                let mut shifted = Runs::new();
                rows.runs().iter().for_each(|run| shifted.push_run(Run { start: run.start + offset, ..*run }));
                vec![shifted]
            }
        };
        let ids = own_ids.as_ref().or(other_ids.as_ref());
        let packed = |row: i64| sequence(row).map_or(-1, |s| s as i64);
        let segments = match (ids, lens) {
            (None, None) => Vec::new(),
            (None, Some(_)) => vec![rows.iter().map(packed).collect()],
            (Some(ids), lens) => {
                let combined = |(row, &id): (i64, &i32)| match (lens.map(|_| packed(row)), id) {
                    (_, ..0) | (Some(..0), _) => -1,
                    (None, id) => i64::from(id),
                    (Some(sequence), id) => (sequence << 32) | i64::from(id),
                };
                ids.rows().into_iter().map(|line| rows.iter().zip(line).map(combined).collect()).collect()
            }
        };
        Self { rows, positions, segments }
    }
}
