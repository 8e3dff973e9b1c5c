//! Visibility of every pair, from positions and ids of single rows of the [`Batch`].

use crate::{
    Alignment, Batch, ListedKeys, Spec,
    mask::{Key, Query},
};

/// Properties of one row on which visibility depends.
#[derive(Debug, Clone, Copy)]
struct RowProperties {
    position: i64,
    /// `None` without segment ids.
    segment: Option<i32>,
    /// Index of the packed sequence; `None` without packing, `Some(None)` for padding after the
    /// last sequence.
    sequence: Option<Option<usize>>,
}

/// Visible pairs of one problem, computed pair by pair.
#[derive(Debug)]
pub struct PairVisibility<'a> {
    spec: &'a Spec,
    batch: &'a Batch,
    /// `[batch][row]`.
    queries: Vec<Vec<RowProperties>>,
    /// `[batch][row]`.
    keys: Vec<Vec<RowProperties>>,
}

impl<'a> PairVisibility<'a> {
    pub(super) fn new(spec: &'a Spec, batch: &'a Batch) -> Self {
        // ids or packed lengths given for one side only are used for both
        let query_ids = batch.q_segment_ids.as_ref().or(batch.kv_segment_ids.as_ref());
        let key_ids = batch.kv_segment_ids.as_ref().or(batch.q_segment_ids.as_ref());
        let query_lens = batch.cum_seqlens_q.as_ref().or(batch.cum_seqlens_k.as_ref());
        let key_lens = batch.cum_seqlens_k.as_ref().or(batch.cum_seqlens_q.as_ref());
        let dims = &spec.dims;

        let query = |b: usize, row: usize| {
            let sequence = query_lens.map(|lens| sequence_of(lens, row as i64));
            let aligned = match (sequence, query_lens, key_lens) {
                (Some(Some(s)), Some(queries), Some(keys)) => {
                    let within = row as i64 - queries[s];
                    within
                        + shift(spec.alignment, queries[s + 1] - queries[s], keys[s + 1] - keys[s])
                }
                _ => row as i64 + shift(spec.alignment, dims.q_len as i64, dims.kv_len as i64),
            };
            let position =
                batch.q_positions.as_ref().map_or(aligned, |positions| positions[[b, row]]);
            RowProperties { position, segment: query_ids.map(|ids| ids[[b, row]]), sequence }
        };
        let key = |b: usize, row: usize| {
            let sequence = key_lens.map(|lens| sequence_of(lens, row as i64));
            let own = match (sequence, key_lens) {
                (Some(Some(s)), Some(lens)) => row as i64 - lens[s],
                _ => row as i64,
            };
            let position = batch.kv_positions.as_ref().map_or(own, |positions| positions[[b, row]]);
            RowProperties { position, segment: key_ids.map(|ids| ids[[b, row]]), sequence }
        };
        Self {
            spec,
            batch,
            queries: (0..dims.batch)
                .map(|b| (0..dims.q_len).map(|row| query(b, row)).collect())
                .collect(),
            keys: (0..dims.batch)
                .map(|b| (0..dims.kv_len).map(|row| key(b, row)).collect())
                .collect(),
        }
    }

    /// Returns the query as passed to masks and bias functions; `None` if there is no such row.
    pub fn query(&self, batch: usize, head: usize, row: usize) -> Option<Query> {
        let properties = self.queries.get(batch)?.get(row)?;
        (head < self.spec.dims.q_heads).then_some(Query {
            batch,
            head,
            row: row as u64,
            position: properties.position,
        })
    }

    /// Returns the key as passed to masks and bias functions; `None` if there is no such row.
    pub fn key(&self, batch: usize, row: usize) -> Option<Key> {
        let properties = self.keys.get(batch)?.get(row)?;
        Some(Key { row: row as u64, position: properties.position })
    }

    /// Returns true if query row `i` attends to key row `j` by the mask, the segment ids, the
    /// packed sequences, the dense mask and the key lists together. Returns false for rows that do not exist. A
    /// bias of −∞, which also masks a pair, is not considered.
    pub fn visible(&self, batch: usize, head: usize, i: usize, j: usize) -> bool {
        let (Some(query), Some(key)) = (self.query(batch, head, i), self.key(batch, j)) else {
            return false;
        };
        let of_query = &self.queries[batch][i];
        let of_key = &self.keys[batch][j];
        let by_mask = self.spec.mask.visible(&query, &key);
        let by_segment =
            of_query.segment == of_key.segment && of_query.segment.is_none_or(|id| id >= 0);
        let by_sequence = of_query.sequence == of_key.sequence && of_query.sequence != Some(None);
        let by_dense =
            self.batch.attention_mask.as_ref().is_none_or(|mask| mask.visible(batch, head, i, j));
        let by_list = self.batch.key_lists.as_deref().is_none_or(|lists| {
            let listed = ListedKeys::new(lists, self.spec.dims.q_heads);
            listed.keys(batch, head, i).iter().any(|&key| key as usize == j)
        });
        by_mask && by_segment && by_sequence && by_dense && by_list
    }
}

/// Returns the difference between a query's position and its row number in the sequence.
const fn shift(alignment: Alignment, q_len: i64, kv_len: i64) -> i64 {
    match alignment {
        Alignment::TopLeft => 0,
        Alignment::BottomRight => kv_len - q_len,
    }
}

/// Returns the packed sequence that contains `row`; `None` after the last.
fn sequence_of(lens: &[i64], row: i64) -> Option<usize> {
    lens.windows(2).position(|pair| pair[0] <= row && row < pair[1])
}
