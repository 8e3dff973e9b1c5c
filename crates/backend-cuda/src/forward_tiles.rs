//! Tiles of a forward pass, chosen when the workspace is made or gets another batch: the kernel,
//! GQA packing, and the ranges of keys of a tile.

use annulus_core::{Dims, RankShard};

use crate::{
    gqa_packing::GqaPacking,
    kernels::Kernels,
    key_ranges::{ForwardGrid, RangeLimits, partial_sums},
    variant::Variant,
};

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForwardTiles {
    pub(crate) on_warpgroups: bool,
    /// True if all queries of the heads that may share a tile fit one of `forward_decode`, whose
    /// warps divide the keys of a tile instead of its rows.
    pub(crate) has_few_rows: bool,
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
        // query heads that may share a tile
        let group = if shares_key_tiles(shard) { q_heads / kv_heads } else { 1 };
        let warpgroup = kernels.warpgroup_for(queries, group);
        let on_matrices = kernels.matrix_for(spec).is_some();
        let has_few_rows =
            warpgroup.is_none() && on_matrices && queries * group <= Variant::DECODE_ROWS;
        let [rows, keys] = match warpgroup {
            Some(warpgroup) => warpgroup.variant.tile(),
            None if has_few_rows => kernels.variant.decode_tile(),
            None if on_matrices => kernels.variant.queries_matrix_tile(),
            None => kernels.variant.tile(),
        };
        let packing = if warpgroup.is_some() || on_matrices {
            GqaPacking::of(queries, group, rows)
        } else {
            GqaPacking::none(rows)
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
            has_few_rows,
            packing,
            tile: [packing.queries(), keys],
            ranges: RangeLimits::of(grid),
        }
    }
}

/// True if the query heads of a KV head have the same list of key tiles: without a per-head mask.
fn shares_key_tiles(shard: &RankShard) -> bool {
    !shard.visibility(&shard.queries, &shard.keys).per_head()
}
