//! Row numbers, positions and segment ids of all ranks, from which a rank computes the schedule.

use std::sync::Arc;

use crate::Layout;
use annulus_core::{Alignment, Batch, Dims, Result, Shard, Side, index, memory};

/// Shards of all ranks on both sides. The lists are indexed by ring index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingShards {
    /// Query rows, `q[ring_index]`.
    pub q: Vec<Arc<Shard>>,
    /// Key rows, `kv[ring_index]`.
    pub kv: Vec<Arc<Shard>>,
}

impl RingShards {
    /// Computes the shards of dims, alignment and layout, without a batch.
    pub fn plain(dims: &Dims, alignment: Alignment, layout: &Layout, ranks: usize) -> Self {
        let shards = |side| {
            (0..ranks)
                .map(|rank| {
                    Arc::new(layout.local_shard(
                        dims,
                        alignment,
                        side,
                        rank,
                        ranks,
                        &Batch::default(),
                    ))
                })
                .collect()
        };
        Self { q: shards(Side::Q), kv: shards(Side::Kv) }
    }

    /// Computes the shards of a whole batch, whose rows are those of all ranks. The dense mask is
    /// not part of a shard.
    ///
    /// Dims, layout and batch must have been validated.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] of [`Layout::validate_batch`];
    /// [`annulus_core::Error::OutOfMemory`].
    pub fn of_batch(
        dims: &Dims,
        alignment: Alignment,
        layout: &Layout,
        ranks: usize,
        batch: &Batch,
    ) -> Result<Self> {
        let mut shards = Self {
            q: memory::list("the shards of all ranks", ranks)?,
            kv: memory::list("the shards of all ranks", ranks)?,
        };
        let differs = batch.differs_between_ranks();
        // rows, ids and positions of both sides are the same
        let starts = [&batch.cum_seqlens_q, &batch.cum_seqlens_k];
        let are_equal = !differs
            && dims.q_len == dims.kv_len
            && (starts[0] == starts[1] || starts.iter().any(|starts| starts.is_none()))
            && layout.has_equal_sides();
        for rank in 0..ranks {
            layout.validate_batch(batch, dims, rank, ranks)?;
            let rows = |side, len| {
                let rows = layout.shard(side, len, rank, ranks);
                memory::collect(
                    "row numbers",
                    index(rows.len()),
                    rows.iter().map(i64::cast_unsigned),
                )
            };
            let selected = if differs {
                let q_rows = rows(Side::Q, dims.q_len)?;
                Some(batch.select_coordinates(&q_rows, &rows(Side::Kv, dims.kv_len)?)?)
            } else {
                None
            };
            let own = selected.as_ref().unwrap_or(batch);
            let local = |side| layout.local_shard(dims, alignment, side, rank, ranks, own);
            let q = Arc::new(local(Side::Q));
            shards.kv.push(if are_equal { Arc::clone(&q) } else { Arc::new(local(Side::Kv)) });
            shards.q.push(q);
        }
        Ok(shards)
    }
}
