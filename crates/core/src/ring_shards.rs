//! Positions and segment ids of every rank's rows: what a rank must know of the others' rows to plan a ring.

use std::sync::Arc;

use crate::{Alignment, Batch, Dims, Layout, Shard, Side};

/// Every rank's rows of both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingShards {
    /// `q[rank]`.
    pub q: Vec<Arc<Shard>>,
    /// `kv[rank]`.
    pub kv: Vec<Arc<Shard>>,
}

impl RingShards {
    /// RingShards that follow from the problem alone: no batch.
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
