//! The batch of a group: segment ids, positions and rows of a dense mask of all its members.
//!
//! A message has, of each array that is given, the own rows, of keys only for members of the own
//! column; of a dense mask with heads, those of the receiver's heads.

use annulus_core::{Batch, DenseMask, Result, RowSegment, Side, index, memory};
use annulus_plan::{HeadAxis, HeadGrid};
use ndarray::Array2;

use super::exchange::{HeadExchange, side_index};

/// Bytes of a word of a dense mask.
const WORD_BYTES: usize = 8;

/// The batch of a group while its rows arrive.
pub(super) struct GroupBatch {
    batch: Batch,
    /// Messages of the members, if there is a dense mask.
    masks: Vec<Vec<u8>>,
    /// Shape of this rank's part of the dense mask.
    mask_shape: Option<[usize; 4]>,
}

/// A number of a batch: a segment id or a position.
trait Number: Copy + Default + bytemuck::Pod {}

impl Number for i32 {}
impl Number for i64 {}

impl GroupBatch {
    /// Allocates the batch of the group for this rank's `own` part.
    pub(super) fn new(own: &Batch, exchange: &HeadExchange) -> Result<Self> {
        let rows = |side| index(exchange.group_rows(side));
        let ids = |own: &Option<Array2<i32>>, side| zeros("segment ids", own, rows(side));
        let positions = |own: &Option<Array2<i64>>, side| zeros("positions", own, rows(side));
        let mask_shape = own.attention_mask.as_ref().map(DenseMask::shape);
        let batch = Batch {
            q_segment_ids: ids(q_ids(own, &exchange.grid), Side::Q)?,
            kv_segment_ids: ids(kv_ids(own, &exchange.grid), Side::Kv)?,
            q_positions: positions(&own.q_positions, Side::Q)?,
            kv_positions: positions(&own.kv_positions, Side::Kv)?,
            attention_mask: mask_shape.map(|_| DenseMask::default()),
            key_lists: None,
            cum_seqlens_q: own.cum_seqlens_q.clone(),
            cum_seqlens_k: own.cum_seqlens_k.clone(),
        };
        let masks = vec![Vec::new(); exchange.rows.len()];
        Ok(Self { batch, masks, mask_shape })
    }

    /// Returns the bytes sent to and received from a member.
    pub(super) fn bytes(own: &Batch, exchange: &HeadExchange, member: usize) -> [u64; 2] {
        let of_keys = exchange.shares(Side::Kv, member);
        [exchange.member, member].map(|from| Self::message_bytes(own, exchange, from, of_keys))
    }

    /// Returns the bytes of a member's rows, with or without those of its keys.
    fn message_bytes(own: &Batch, exchange: &HeadExchange, member: usize, of_keys: bool) -> u64 {
        let rows = |side| match side {
            Side::Kv if !of_keys => 0,
            _ => exchange.rows[member][side_index(side)],
        };
        let numbers =
            |batch_rows: usize, size: usize, side| rows(side) * (batch_rows * size) as u64;
        let ids = |own: &Option<Array2<i32>>, side| {
            own.as_ref().map_or(0, |ids| numbers(ids.nrows(), size_of::<i32>(), side))
        };
        let positions = |own: &Option<Array2<i64>>, side| {
            own.as_ref().map_or(0, |of| numbers(of.nrows(), size_of::<i64>(), side))
        };
        let mask = own.attention_mask.as_ref().map_or(0, |mask| {
            let [batch, heads, _, keys] = mask.shape();
            let heads = mask_heads(&exchange.grid, heads, 0).len();
            numbers(batch * heads * keys.div_ceil(64), WORD_BYTES, Side::Q)
        });
        ids(q_ids(own, &exchange.grid), Side::Q)
            + ids(kv_ids(own, &exchange.grid), Side::Kv)
            + positions(&own.q_positions, Side::Q)
            + positions(&own.kv_positions, Side::Kv)
            + mask
    }

    /// Writes the `own` part of member `from`, this rank, for member `to`.
    pub(super) fn pack(own: &Batch, grid: &HeadGrid, [from, to]: [usize; 2], into: &mut [u8]) {
        let mut into = into;
        put(q_ids(own, grid), &mut into);
        put(&own.q_positions, &mut into);
        if grid.shares(Side::Kv, from, to) {
            put(kv_ids(own, grid), &mut into);
            put(&own.kv_positions, &mut into);
        }
        let Some(mask) = &own.attention_mask else { return };
        let [batch, heads, queries, _] = mask.shape();
        for b in 0..batch {
            for h in mask_heads(grid, heads, to) {
                for q in 0..queries {
                    put_bytes(bytemuck::cast_slice(mask.line(b, h, q)), &mut into);
                }
            }
        }
    }

    /// Reads the part of a member, whose rows are `segments` of the group's.
    pub(super) fn unpack(
        &mut self,
        from: usize,
        segments: &[Vec<RowSegment>; 2],
        bytes: &[u8],
    ) -> Result<()> {
        let [q, kv] = segments;
        let mut bytes = bytes;
        get(&mut self.batch.q_segment_ids, q, &mut bytes);
        get(&mut self.batch.q_positions, q, &mut bytes);
        get(&mut self.batch.kv_segment_ids, kv, &mut bytes);
        get(&mut self.batch.kv_positions, kv, &mut bytes);
        if self.mask_shape.is_some() {
            self.masks[from] =
                memory::collect("attention_mask", bytes.len(), bytes.iter().copied())?;
        }
        Ok(())
    }

    /// Returns the batch of the group, of whose members all parts have been read.
    pub(super) fn finish(mut self, exchange: &HeadExchange) -> Result<Batch> {
        let (Some(mask), Some([batch, heads, _, keys])) =
            (&mut self.batch.attention_mask, self.mask_shape)
        else {
            return Ok(self.batch);
        };
        let heads = mask_heads(&exchange.grid, heads, exchange.member).len();
        let queries = index(exchange.group_rows(Side::Q));
        let mut owners = memory::filled("attention_mask", queries, (0, 0))?;
        for member in 0..exchange.rows.len() {
            let segments = exchange.rows_of(member, Side::Q).iter();
            let rows = segments.flat_map(|segment| segment.first..segment.first + segment.count);
            rows.enumerate().for_each(|(local, row)| owners[row] = (member, local));
        }
        let line_bytes = keys.div_ceil(64) * WORD_BYTES;
        let masks = &self.masks;
        mask.refill([batch, heads, queries, keys], |b, h, q| {
            let (member, local) = owners[q];
            let rows = index(exchange.rows[member][side_index(Side::Q)]);
            let first = ((b * heads + h) * rows + local) * line_bytes;
            masks[member].get(first..first + line_bytes).unwrap_or_default()
        })?;
        Ok(self.batch)
    }
}

/// Returns the segment ids of queries. Those of keys serve both, if only they are given, because
/// the rows are the same on each rank; in a grid with key columns the rows of a ring differ.
fn q_ids<'a>(own: &'a Batch, grid: &HeadGrid) -> &'a Option<Array2<i32>> {
    let is_alone = own.q_segment_ids.is_none() && grid.columns() > 1;
    if is_alone { &own.kv_segment_ids } else { &own.q_segment_ids }
}

/// As [`q_ids`], of keys.
fn kv_ids<'a>(own: &'a Batch, grid: &HeadGrid) -> &'a Option<Array2<i32>> {
    let is_alone = own.kv_segment_ids.is_none() && grid.columns() > 1;
    if is_alone { &own.q_segment_ids } else { &own.kv_segment_ids }
}

/// Returns the heads of a member in a dense mask of `heads` heads.
fn mask_heads(grid: &HeadGrid, heads: usize, member: usize) -> std::ops::Range<usize> {
    if heads == 1 { 0..1 } else { HeadAxis::Query.range(grid, member) }
}

/// Allocates the rows of the group of an array that is given.
fn zeros<T: Number + bytemuck::Zeroable>(
    what: &str,
    own: &Option<Array2<T>>,
    rows: usize,
) -> Result<Option<Array2<T>>> {
    own.as_ref().map(|own| memory::zeros(what, (own.nrows(), rows))).transpose()
}

/// Appends the elements of an array.
fn put<T: Number>(array: &Option<Array2<T>>, into: &mut &mut [u8]) {
    array.iter().flatten().for_each(|number| put_bytes(bytemuck::bytes_of(number), into));
}

fn put_bytes(bytes: &[u8], into: &mut &mut [u8]) {
    // the message has the bytes of all arrays
    let (now, later) = std::mem::take(into).split_at_mut(bytes.len());
    now.copy_from_slice(bytes);
    *into = later;
}

/// Reads the rows `segments` of an array.
fn get<T: Number>(array: &mut Option<Array2<T>>, segments: &[RowSegment], from: &mut &[u8]) {
    let Some(array) = array else { return };
    for mut row in array.rows_mut() {
        for segment in segments {
            for index in segment.first..segment.first + segment.count {
                let (now, later) = from.split_at(size_of::<T>());
                row[index] = bytemuck::pod_read_unaligned(now);
                *from = later;
            }
        }
    }
}
