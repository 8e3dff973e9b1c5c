//! Who sees whom, straight from the batch: the positions and ids of every row, spelled out one by one.

use crate::{
    Alignment, Batch, Spec,
    mask::{Key, Query},
};

/// What visibility asks about one row of one batch row.
#[derive(Debug, Clone, Copy)]
struct Place {
    position: i64,
    /// `None`: there are no segment ids at all
    segment: Option<i32>,
    /// `None`: nothing is packed; `Some(None)`: after the last packed sequence, so padding
    sequence: Option<Option<usize>>,
}

/// Who sees whom in one problem, row by row.
#[derive(Debug)]
pub struct Sight<'a> {
    spec: &'a Spec,
    batch: &'a Batch,
    /// `[batch][row]`, as the one below
    queries: Vec<Vec<Place>>,
    keys: Vec<Vec<Place>>,
}

impl<'a> Sight<'a> {
    pub(super) fn new(spec: &'a Spec, batch: &'a Batch) -> Self {
        // ids or packed lengths that are given for one side only serve for both
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
                    within + shift(spec.alignment, queries[s + 1] - queries[s], keys[s + 1] - keys[s])
                }
                _ => row as i64 + shift(spec.alignment, dims.q_len as i64, dims.kv_len as i64),
            };
            let position = batch.q_positions.as_ref().map_or(aligned, |positions| positions[[b, row]]);
            Place { position, segment: query_ids.map(|ids| ids[[b, row]]), sequence }
        };
        let key = |b: usize, row: usize| {
            let sequence = key_lens.map(|lens| sequence_of(lens, row as i64));
            let own = match (sequence, key_lens) {
                (Some(Some(s)), Some(lens)) => row as i64 - lens[s],
                _ => row as i64,
            };
            let position = batch.kv_positions.as_ref().map_or(own, |positions| positions[[b, row]]);
            Place { position, segment: key_ids.map(|ids| ids[[b, row]]), sequence }
        };
        Self {
            spec,
            batch,
            queries: (0..dims.batch).map(|b| (0..dims.q_len).map(|row| query(b, row)).collect()).collect(),
            keys: (0..dims.batch).map(|b| (0..dims.kv_len).map(|row| key(b, row)).collect()).collect(),
        }
    }

    /// The query as masks and bias functions see it; `None` if there is no such row.
    pub fn query(&self, batch: usize, head: usize, row: usize) -> Option<Query> {
        let place = self.queries.get(batch)?.get(row)?;
        (head < self.spec.dims.q_heads).then_some(Query { batch, head, row: row as u64, position: place.position })
    }

    /// The key as masks and bias functions see it; `None` if there is no such row.
    pub fn key(&self, batch: usize, row: usize) -> Option<Key> {
        let place = self.keys.get(batch)?.get(row)?;
        Some(Key { row: row as u64, position: place.position })
    }

    /// Whether query row `i` sees key row `j`: the mask, segment ids, packed sequences and the dense mask, and-ed. Rows that do not exist see
    /// nothing. (A bias of −∞ hides more.)
    pub fn visible(&self, batch: usize, head: usize, i: usize, j: usize) -> bool {
        let (Some(query), Some(key)) = (self.query(batch, head, i), self.key(batch, j)) else { return false };
        let (of_query, of_key) = (&self.queries[batch][i], &self.keys[batch][j]);
        let by_mask = self.spec.mask.visible(&query, &key);
        let by_segment = of_query.segment == of_key.segment && of_query.segment.is_none_or(|id| id >= 0);
        let by_sequence = of_query.sequence == of_key.sequence && of_query.sequence != Some(None);
        let by_dense = self.batch.attention_mask.as_ref().is_none_or(|mask| mask.visible(batch, head, i, j));
        by_mask && by_segment && by_sequence && by_dense
    }
}

/// What alignment adds to a query's number to make its position.
const fn shift(alignment: Alignment, q_len: i64, kv_len: i64) -> i64 {
    match alignment {
        Alignment::TopLeft => 0,
        Alignment::BottomRight => kv_len - q_len,
    }
}

/// The packed sequence that holds `row`; `None` after the last.
fn sequence_of(lens: &[i64], row: i64) -> Option<usize> {
    lens.windows(2).position(|pair| pair[0] <= row && row < pair[1])
}
