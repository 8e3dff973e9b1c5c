//! Tiles of a forward pass, chosen when the workspace is made or gets another batch: the kernel,
//! GQA packing, and the ranges of keys of a tile. Level `plain` does not pack: the registers for a
//! row's query and head would prevent a second block per multiprocessor at some dims.

use annulus_core::{Dims, GqaPacking, RankShard};

use crate::{
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

/// Arguments of kernels for a packing: heads per tile, and ⌈2¹⁶ / heads⌉, by which they divide with
/// one multiply. Exact for up to 2¹⁵ rows.
pub(crate) const fn packing_arguments(packing: GqaPacking) -> (u32, u32) {
    let heads = packing.heads() as u32;
    (heads, (1u32 << 16).div_ceil(heads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_divide_rows_by_heads_exactly() {
        for rows in [64, 128, 192] {
            for group in 1..=rows {
                let packing = GqaPacking::of(1, group, rows);
                let (heads, reciprocal) = packing_arguments(packing);
                assert_eq!(heads as usize, group);
                for row in 0..=rows as u32 {
                    assert_eq!((row * reciprocal) >> 16, row / heads, "{row} by {heads}");
                }
                assert_eq!(packing.queries() as u32, (rows as u32 * reciprocal) >> 16);
            }
        }
    }

    /// A row of the table of benches/record/cuda-model.md: `queries` queries of a group of eight
    /// heads at level `warpgroup`.
    fn row_of_the_page(queries: usize) -> String {
        let tiles = |heads: usize| queries.div_ceil(128 / heads) * (8 / heads);
        let fewest = [1, 2, 4, 8].map(tiles).into_iter().min().unwrap();
        let chosen = tiles(GqaPacking::of(queries, 8, 128).heads());
        let share = 100.0 * chosen as f64 / tiles(1) as f64;
        let share = format!("{}", (10.0 * share).round() / 10.0);
        let is_packed = if chosen == tiles(1) { " (not packed)" } else { "" };
        format!("| {queries} | {} | {fewest} | {share} %{is_packed} |", tiles(1))
    }

    #[test]
    fn the_tiles_in_the_record_are_those_of_the_packing() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/record/cuda-model.md");
        let page = std::fs::read_to_string(page).unwrap();
        for queries in [16, 64, 120, 200, 260] {
            let line = row_of_the_page(queries);
            assert!(page.contains(&line), "benches/record/cuda-model.md lacks {line}");
        }
    }
}
