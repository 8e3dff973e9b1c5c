//! Tiles of a forward pass, chosen when the workspace is made or gets another batch: the kernel,
//! GQA packing, and the ranges of keys of a tile.
//!
//! GQA packing: several query heads of one KV head share the rows of a forward tile.
//!
//! ```text
//! row of the tile       0        1        2        3        4        5      …
//! 3 packed heads        q₀ h₀    q₀ h₁    q₀ h₂    q₁ h₀    q₁ h₁    q₁ h₂  …
//! ```
//! With few queries (decoding) a tile of one head is mostly empty, and every head of the group
//! reads the same keys and values again. Packed tiles are full and read them once. The order of a
//! row's sums does not change, so the output of the same kernel is bitwise the same. (Few rows have
//! another one: [`crate::forward_tiles::ForwardTiles::has_few_rows`].) Level `plain` does not pack:
//! the registers for a row's query and head would prevent a second block per multiprocessor at some
//! dims.
//!
//! Source: the same layout as `pack_gqa` of FlashAttention-3.

use annulus_core::{Dims, RankShard};

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

/// Assignment of a tile's rows to heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GqaPacking {
    rows: usize,
    heads: usize,
}

impl GqaPacking {
    /// No packing: one head per tile of `rows` rows.
    pub(crate) const fn none(rows: usize) -> Self {
        Self { rows, heads: 1 }
    }

    /// Chooses the packing for `queries` queries and a group of `group` heads per KV head.
    ///
    /// Takes the divisor of the group that needs the fewest tiles, the least such number. Packed
    /// tiles have fewer queries each, hence longer lists of key tiles and more partial tiles. So
    /// packing must save a quarter of the tiles; with many queries it never does.
    pub(crate) fn of(queries: usize, group: usize, rows: usize) -> Self {
        let tiles = |heads: usize| queries.div_ceil(rows / heads) * (group / heads);
        let shares = (1..=group.min(rows)).filter(|&heads| group.is_multiple_of(heads));
        let heads = shares
            .min_by_key(|&heads| tiles(heads))
            .filter(|&heads| 4 * tiles(heads) <= 3 * tiles(1))
            .unwrap_or(1);
        Self { rows, heads }
    }

    /// Query heads per tile.
    pub(crate) const fn heads(self) -> usize {
        self.heads
    }

    /// Queries per tile.
    pub(crate) const fn queries(self) -> usize {
        self.rows / self.heads
    }

    /// Kernel arguments: heads per tile, and ⌈2¹⁶ / heads⌉, by which kernels divide with one
    /// multiply. Exact for up to 2¹⁵ rows.
    pub(crate) const fn kernel_arguments(self) -> (u32, u32) {
        let heads = self.heads as u32;
        (heads, (1u32 << 16).div_ceil(heads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(queries: usize, group: usize) -> usize {
        GqaPacking::of(queries, group, 64).heads()
    }

    #[test]
    fn few_queries_are_packed_with_as_many_heads_as_fit() {
        assert_eq!([1, 8, 16].map(|queries| heads(queries, 4)), [4; 3]);
        // two heads of 32 queries fill a tile: four heads would not save one
        assert_eq!(heads(33, 4), 4);
        // any divisor is possible; of a group larger than a tile, the largest divisor that fits
        assert_eq!([3, 5, 6, 7, 14].map(|group| heads(1, group)), [3, 5, 6, 7, 14]);
        assert_eq!(heads(1, 128), 64);
        assert_eq!(heads(1, 71), 1);
    }

    #[test]
    fn packing_that_saves_little_is_not_used() {
        assert_eq!([1, 20, 5000].map(|queries| heads(queries, 1)), [1; 3]);
        // 7 tiles instead of 8
        assert_eq!(heads(100, 4), 1);
        assert!((200..3000).all(|queries| heads(queries, 8) == 1));
    }

    #[test]
    fn kernels_divide_rows_by_heads_exactly() {
        for rows in [64, 128, 192] {
            for heads in 1..=rows {
                let packing = GqaPacking { rows, heads };
                let (heads, reciprocal) = packing.kernel_arguments();
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
