//! Counts the visible (query, key) pairs of an attention, from which FLOPs are computed.

use std::sync::Arc;

use annulus_core::{
    Batch, DenseMask, ListedKeys, ListedPairs, Result, RowSet, Rows, Shard, Side, Spec, Visibility,
};
use annulus_plan::{Layout, RingShards, Work};

/// Counts the visible pairs of the whole problem under its mask and the ids of the batch, all heads
/// and batch rows. `batch` has all rows.
pub(crate) fn visible(spec: &Spec, batch: &Batch) -> f64 {
    let shard = |side| vec![Arc::new(whole(spec, side, batch))];
    let coordinates = RingShards { q: shard(Side::Q), kv: shard(Side::Kv) };
    Work::of(spec.mask.as_ref(), spec.dims.q_heads, spec.dims.batch, &coordinates).total() as f64
}

/// Counts the visible pairs of `queries` under a dense mask too, all heads and batch rows. Takes
/// O(queries · keys) for each batch row and head that differs.
pub(crate) fn visible_under(dense: &DenseMask, spec: &Spec, queries: &Rows, keys: &Rows) -> f64 {
    let visibility = Visibility {
        mask: spec.mask.as_ref(),
        attention_mask: Some(dense),
        key_lists: None,
        queries,
        keys,
    };
    if queries.is_empty() || keys.is_empty() {
        // empty `Rows` have no definite number of batch rows
        return 0.0;
    }
    // equal batch rows and heads are counted once and multiplied
    let batches = if queries.per_batch() || keys.per_batch() || spec.mask.per_batch() {
        spec.dims.batch
    } else {
        dense.shape()[0]
    };
    let heads = if visibility.per_head() { spec.dims.q_heads } else { 1 };
    let of_row = |batch, head, q| {
        (0..keys.len()).filter(|&k| visibility.pair(batch, head, q, k)).count() as f64
    };
    let of_head = |batch, head| (0..queries.len()).map(|q| of_row(batch, head, q)).sum::<f64>();
    let counted: f64 = (0..batches)
        .flat_map(|batch| (0..heads).map(move |head| (batch, head)))
        .map(|(batch, head)| of_head(batch, head))
        .sum();
    counted * (spec.dims.batch / batches * (spec.dims.q_heads / heads)) as f64
}

/// Counts the visible pairs of `queries` with key lists, all heads and batch rows.
pub(crate) fn visible_in_lists(
    batch: &Batch,
    spec: &Spec,
    queries: &Rows,
    keys: &Rows,
) -> Result<f64> {
    let q_heads = spec.dims.q_heads;
    let key_lists = batch.key_lists.as_deref().map(|lists| ListedKeys::new(lists, q_heads));
    let attention_mask = batch.attention_mask.as_ref();
    let visibility =
        Visibility { mask: spec.mask.as_ref(), attention_mask, key_lists, queries, keys };
    let mut pairs = ListedPairs::default();
    pairs.refill(&visibility, spec.dims.batch)?;
    Ok(pairs.count_all(spec.dims.batch) as f64)
}

/// Shard that holds all rows of one side.
pub(crate) fn whole(spec: &Spec, side: Side, batch: &Batch) -> Shard {
    Layout::Contiguous.local_shard(&spec.dims, spec.alignment, side, 0, 1, batch)
}

/// Expands a shard to the position and ids of each row.
pub(crate) fn rows(shard: &Shard) -> Result<Rows> {
    let mut rows = Rows::default();
    shard.expand(&RowSet::all(shard.rows.len()), &mut rows)?;
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::{
        DType, Dims,
        mask::{Causal, Window, and},
    };
    use ndarray::Array2;

    /// Compares with the definition, pair by pair.
    #[test]
    fn counts_equal_those_of_the_definition() {
        let dims = Dims {
            batch: 2,
            q_len: 9,
            kv_len: 9,
            q_heads: 3,
            kv_heads: 3,
            head_dim: 1,
            value_dim: 1,
        };
        let window = Window { left: Some(3), right: None, first_visible: 2, offset: 0 };
        let spec = Spec {
            mask: and(Arc::new(Causal { offset: 0 }), Arc::new(window)),
            ..Spec::new(dims, DType::F32)
        };
        let ids = Array2::from_shape_fn((2, 9), |(b, i)| [0, 0, 1, 1, -1, 1, 0, 2, 2][(i + b) % 9]);
        let dense = DenseMask::from_fn([1, 3, 9, 9], |[_, h, q, k]| (q * 5 + k * 3 + h) % 4 != 0);
        for batch in [Batch::default(), Batch { q_segment_ids: Some(ids), ..Batch::default() }] {
            let queries = rows(&whole(&spec, Side::Q, &batch)).unwrap();
            let keys = rows(&whole(&spec, Side::Kv, &batch)).unwrap();
            let count = |attention_mask: Option<&DenseMask>| {
                let visibility = Visibility {
                    mask: spec.mask.as_ref(),
                    attention_mask,
                    key_lists: None,
                    queries: &queries,
                    keys: &keys,
                };
                let all = (0..2).flat_map(|b| {
                    (0..3).flat_map(move |h| (0..81).map(move |pair| (b, h, pair / 9, pair % 9)))
                });
                all.filter(|&(b, h, q, k)| visibility.pair(b, h, q, k)).count() as f64
            };
            assert!(count(Some(&dense)) > 0.0 && count(Some(&dense)) < count(None));
            assert_eq!(visible(&spec, &batch), count(None));
            assert_eq!(visible_under(&dense, &spec, &queries, &keys), count(Some(&dense)));
        }
    }
}
