//! Row numbers, positions and segment ids of all ranks, from which a rank computes the schedule.

use std::sync::Arc;

use crate::{Alignment, Batch, Dims, Layout, Shard, Side};

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
                    Arc::new(Shard::local(
                        dims,
                        alignment,
                        layout,
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
}
