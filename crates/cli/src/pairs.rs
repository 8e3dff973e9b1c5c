//! How many (query, key) pairs an attention computes: the visible ones, exactly. What GFLOP/s are counted from.

use std::{collections::HashMap, ops::Range};

use annulus_core::{DenseMask, Mask, Rows, Spec, mask::Key, mask::Query};

/// The keys of every batch row, by segment and position, so that a query's interval is two binary searches.
#[derive(Debug)]
pub(crate) struct KeyIndex {
    /// one shared by all batch rows, or one a batch row
    batches: Vec<Keys>,
}

/// The keys of one batch row: (position, row), sorted, for each segment. Without segment ids all are of segment 0.
#[derive(Debug)]
struct Keys {
    segments: HashMap<i64, Vec<(i64, u64)>>,
}

impl KeyIndex {
    /// Sorts all keys of a problem of `batch` batch rows.
    pub(crate) fn new(keys: &Rows, batch: usize) -> Self {
        let batches = if keys.per_batch() { batch } else { 1 };
        Self { batches: (0..batches).map(|batch| Keys::new(keys, batch)).collect() }
    }

    fn batch(&self, batch: usize) -> &Keys {
        &self.batches[batch.min(self.batches.len() - 1)]
    }

    /// Visible pairs of these queries, summed over batch rows and heads. A bias of −∞ hides more, which is not counted.
    pub(crate) fn visible_pairs(&self, spec: &Spec, queries: &Rows, dense: Option<&DenseMask>) -> f64 {
        let shape = dense.map_or([1; 4], DenseMask::shape);
        let batches = if queries.per_batch() || self.batches.len() > 1 || spec.mask.per_batch() { spec.dims.batch } else { shape[0] };
        let heads = if spec.mask.per_head() { spec.dims.q_heads } else { shape[1] };
        // what does not differ is counted once
        let repeats = (spec.dims.batch / batches * (spec.dims.q_heads / heads)) as f64;
        let of_row = |batch: usize, head: usize, q: usize| {
            let query = Query { batch, head, row: queries.rows()[q], position: queries.positions(batch)[q] };
            let segment = queries.segments(batch).map_or(0, |segments| segments[q]);
            let keys = self.batch(batch).segments.get(&segment).map_or(&[][..], Vec::as_slice);
            let seen_by_batch = |row: u64| dense.is_none_or(|mask| mask.visible(batch, head, q, annulus_core::index(row)));
            count(spec.mask.as_ref(), &query, keys, dense.is_some(), seen_by_batch)
        };
        let all = (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head)));
        let sum: u64 = all.map(|(batch, head)| (0..queries.len()).map(|q| of_row(batch, head, q)).sum::<u64>()).sum();
        sum as f64 * repeats
    }
}

impl Keys {
    fn new(keys: &Rows, batch: usize) -> Self {
        let mut segments: HashMap<i64, Vec<(i64, u64)>> = HashMap::new();
        let of = keys.segments(batch);
        for (place, (&position, &row)) in keys.positions(batch).iter().zip(keys.rows()).enumerate() {
            let segment = of.map_or(0, |of| of[place]);
            // padding is seen by nobody
            if segment >= 0 {
                segments.entry(segment).or_default().push((position, row));
            }
        }
        segments.values_mut().for_each(|keys| keys.sort_unstable());
        Self { segments }
    }
}

fn count(mask: &dyn Mask, query: &Query, keys: &[(i64, u64)], ask: bool, seen: impl Fn(u64) -> bool) -> u64 {
    let spans = mask.spans(query);
    let exact = spans.is_some();
    let spans = spans.unwrap_or_else(|| mask.bound(query));
    let within = |range: &Range<i64>| {
        let first = keys.partition_point(|&(position, _)| position < range.start);
        let end = keys.partition_point(|&(position, _)| position < range.end);
        &keys[first..end.max(first)]
    };
    let of_range = |range: &Range<i64>| match within(range) {
        keys if exact && !ask => keys.len(),
        keys => {
            let visible = |&&(position, row): &&(i64, u64)| (exact || mask.visible(query, &Key { row, position })) && seen(row);
            keys.iter().filter(visible).count()
        }
    };
    spans.ranges().iter().map(of_range).sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::{
        Batch, DType, Dims, Layout, Shard, Side, Visibility,
        mask::{Causal, Window, and},
    };
    use ndarray::Array2;
    use std::sync::Arc;

    /// Against the definition, pair by pair.
    #[test]
    fn counts_are_those_of_the_definition() {
        let dims = Dims { batch: 2, q_len: 9, kv_len: 9, q_heads: 3, kv_heads: 3, head_dim: 1, value_dim: 1 };
        let window = Window { left: Some(3), right: None, first_visible: 2, offset: 0 };
        let mask = and(Arc::new(Causal { offset: 0 }), Arc::new(window));
        let spec = Spec { mask, ..Spec::new(dims, DType::F32) };
        let ids = Array2::from_shape_fn((2, 9), |(b, i)| [0, 0, 1, 1, -1, 1, 0, 2, 2][(i + b) % 9]);
        let dense = DenseMask::from_fn([1, 3, 9, 9], |[_, h, q, k]| (q * 5 + k * 3 + h) % 4 != 0);
        for batch in [Batch::default(), Batch { q_segment_ids: Some(ids), ..Batch::default() }] {
            for dense in [None, Some(&dense)] {
                let rows = |side| {
                    let shard = Shard::local(&dims, spec.alignment, &Layout::Contiguous, side, 0, 1, &batch);
                    let mut rows = Rows::default();
                    shard.expand(&std::iter::once(0..9).collect(), &mut rows);
                    rows
                };
                let (queries, keys) = (rows(Side::Q), rows(Side::Kv));
                let visibility = Visibility { mask: spec.mask.as_ref(), attention_mask: dense, queries: &queries, keys: &keys };
                let mut want = 0;
                for b in 0..2 {
                    for h in 0..3 {
                        for q in 0..9 {
                            want += (0..9).filter(|&k| visibility.pair(b, h, q, k)).count();
                        }
                    }
                }
                assert!(want > 0);
                let got = KeyIndex::new(&keys, 2).visible_pairs(&spec, &queries, dense);
                assert_eq!(got, want as f64);
            }
        }
    }
}
