//! Tiles of a forward pass, chosen when the workspace is made or gets another batch: the kernel,
//! GQA packing, and the ranges of keys of a tile.

use annulus_core::{Dims, RankShard, Spec, Visibility};

use crate::{
    gqa_packing::GqaPacking,
    kernels::Kernels,
    key_ranges::{ForwardGrid, RangeLimits, partial_sums},
};

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForwardTiles {
    pub(crate) on_warpgroups: bool,
    pub(crate) packing: GqaPacking,
    /// Queries and keys per tile.
    pub(crate) tile: [usize; 2],
    /// Ranges of keys of a tile: see [`crate::key_ranges`].
    pub(crate) ranges: RangeLimits,
}

impl ForwardTiles {
    pub(crate) fn of(kernels: &Kernels, shard: &RankShard) -> Self {
        let spec = &*shard.spec;
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let queries = shard.queries.len();
        let warpgroup = kernels.warpgroup_for(spec, queries);
        let [rows, keys] = match (warpgroup, kernels.matrix_for(spec)) {
            (Some(warpgroup), _) => warpgroup.variant.tile(),
            (None, Some(_)) => kernels.variant.forward_matrix_tile(),
            (None, None) => kernels.variant.tile(),
        };
        let packing = match warpgroup {
            Some(_) => GqaPacking::none(rows),
            None => packing(kernels, shard, rows),
        };
        let grid = ForwardGrid {
            blocks: queries.div_ceil(packing.queries()) * (q_heads / packing.heads()) * batch,
            rows: queries.min(packing.queries()) * packing.heads(),
            keys,
            most_keys: usize::try_from(shard.most_block_rows).unwrap_or(usize::MAX),
            partial_bytes: partial_sums(value_dim) * spec.dtype.accumulator().bytes(),
            kv_bytes: (head_dim + value_dim) * spec.dtype.bytes(),
            kv_planes: kv_heads * batch,
        };
        Self {
            on_warpgroups: warpgroup.is_some(),
            packing,
            tile: [packing.queries(), keys],
            ranges: RangeLimits::of(grid),
        }
    }
}

/// Chooses the number of heads per tile. One, except for `mma.sync` kernels without a per-head
/// mask: a packed tile has one list of key tiles for all of its heads.
fn packing(kernels: &Kernels, shard: &RankShard, rows: usize) -> GqaPacking {
    let Spec { dims, mask, .. } = &*shard.spec;
    let visibility = Visibility {
        mask: mask.as_ref(),
        attention_mask: shard.attention_mask.as_deref(),
        queries: &shard.queries,
        keys: &shard.keys,
    };
    if kernels.matrix_for(&shard.spec).is_some() && !visibility.per_head() {
        GqaPacking::of(shard.queries.len(), dims.q_heads / dims.kv_heads, rows)
    } else {
        GqaPacking::none(rows)
    }
}
