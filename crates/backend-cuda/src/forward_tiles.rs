//! Tiles of a forward pass, chosen when the workspace is made or gets another batch: the kernel,
//! GQA packing, and the ranges of keys of a tile (split-KV decoding, `state.rs`). Level `plain`
//! does not pack: the registers for a row's query and head would prevent a second block per
//! multiprocessor at some dims.

use annulus_core::{Dims, GqaPacking, RankShard, TileRun};

use crate::{
    kernels::{Kernels, THREADS, VariantKernels},
    variant::{DECODE_KERNEL, MATRIX_KERNELS, SPLIT_KERNEL},
};

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForwardTiles {
    pub(crate) on_warpgroups: bool,
    /// Names of the kernels for one range of keys and for several. `forward_decode` if all queries
    /// of the heads that may share a tile fit one of its tiles: its warps divide the keys of a tile
    /// instead of its rows.
    pub(crate) kernels: [&'static str; 2],
    pub(crate) packing: GqaPacking,
    /// Queries and keys per tile.
    pub(crate) tile: [usize; 2],
    /// Ranges of keys of a tile.
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
        let general = kernels.general.variant;
        let (kernels, [rows, keys]) = match (warpgroup, &kernels.matrix) {
            (Some(VariantKernels { variant, .. }), _) => {
                ([variant.forward_on_warpgroups(); 2], variant.tile())
            }
            (None, None) => (["forward"; 2], general.tile()),
            (None, Some(matrix)) if queries * group <= matrix.variant.decode_tile()[0] => {
                ([DECODE_KERNEL; 2], matrix.variant.decode_tile())
            }
            (None, Some(matrix)) => {
                let [forward, ..] = MATRIX_KERNELS;
                let split = if matrix.variant.has_split_kernel() { SPLIT_KERNEL } else { forward };
                ([forward, split], matrix.variant.queries_matrix_tile())
            }
        };
        let packing = if kernels == ["forward"; 2] {
            GqaPacking::none(rows)
        } else {
            GqaPacking::of(queries, group, rows)
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
            kernels,
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

/// Thread blocks that fill a GPU: two for each of the 132 multiprocessors of an H100, which run as
/// many at once on tensor cores, and one or two at level `plain`, so that the last wave is full.
const FILLING_BLOCKS: usize = 264;

/// Most ranges of a tile: a thread of the merge computes the factor of each.
const MAX_RANGES: usize = THREADS as usize;

/// Limits of the division of a list of key tiles into ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeLimits {
    /// Most ranges of a list.
    pub(crate) most: usize,
    /// Fewest tiles of a range, at least 1.
    pub(crate) min_tiles: usize,
}

/// Sizes from which the limits follow.
#[derive(Debug, Clone, Copy)]
struct ForwardGrid {
    /// Thread blocks without ranges.
    blocks: usize,
    /// Rows of a block that exist: queries × packed heads.
    rows: usize,
    /// Keys per tile.
    keys: usize,
    /// Keys of the longest KV block.
    most_keys: usize,
    /// Bytes of one row's partial result.
    partial_bytes: usize,
    /// Bytes of one key and value of a KV head.
    kv_bytes: usize,
    /// KV heads × batch rows.
    kv_planes: usize,
}

impl RangeLimits {
    /// No division.
    pub(crate) const NONE: Self = Self { most: 1, min_tiles: 1 };

    /// Chooses the limits:
    ///
    /// * a grid of at most [`FILLING_BLOCKS`] blocks, rounded down, because a few blocks in a
    ///   further wave take as long as a full one;
    /// * partial results, written and read, of at most a quarter of the bytes of the keys and
    ///   values of their range, which has two tiles or more;
    /// * memory for partial results of at most that of a KV block.
    fn of(grid: ForwardGrid) -> Self {
        let ForwardGrid { blocks, rows, keys, most_keys, partial_bytes, kv_bytes, kv_planes } =
            grid;
        let min_tiles = (8 * rows * partial_bytes).div_ceil((keys * kv_bytes).max(1)).max(2);
        let filling = FILLING_BLOCKS / blocks.max(1);
        let by_tiles = most_keys.div_ceil(keys.max(1)) / min_tiles;
        let by_memory =
            most_keys.saturating_mul(kv_bytes * kv_planes) / (blocks * rows * partial_bytes).max(1);
        let most = filling.min(by_tiles).min(by_memory).clamp(1, MAX_RANGES);
        Self { most, min_tiles }
    }
}

/// Returns the number of ranges of each list of key tiles; 1 if the limits allow no more.
pub(crate) fn ranges(lists: &[&[TileRun]], limits: RangeLimits) -> usize {
    let tiles_of = |list: &&[TileRun]| list.iter().map(|run| run.count as usize).sum();
    let longest: usize = lists.iter().map(tiles_of).max().unwrap_or(0);
    limits.most.min(longest / limits.min_tiles).max(1)
}

/// Numbers of one row of a partial result: accumulator, maximum, sum and ties.
pub(crate) const fn partial_sums(value_dim: usize) -> usize {
    value_dim + 3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::variant::Variant;

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

    /// A token of 32 heads and 8 KV heads, 128 dims of bf16, 32 k keys.
    const TOKEN: ForwardGrid = ForwardGrid {
        blocks: 8,
        rows: 4,
        keys: 64,
        most_keys: 32768,
        partial_bytes: 4 * (128 + 3),
        kv_bytes: 2 * 256,
        kv_planes: 8,
    };

    fn limits(change: impl FnOnce(&mut ForwardGrid)) -> (usize, usize) {
        let mut grid = TOKEN;
        change(&mut grid);
        let RangeLimits { most, min_tiles } = RangeLimits::of(grid);
        (most, min_tiles)
    }

    #[test]
    fn keys_are_divided_only_among_few_blocks() {
        // two full waves of one block per multiprocessor
        assert_eq!(limits(|_| ()), (33, 2));
        assert_eq!(limits(|grid| (grid.blocks, grid.kv_planes) = (1, 1)), (MAX_RANGES, 2));
        // half of a GPU is filled: a merge would cost more than it saves
        let blocks = |blocks| limits(|grid| (grid.blocks, grid.kv_planes) = (blocks, blocks)).0;
        assert_eq!([132, 133, 5000].map(blocks), [2, 1, 1]);
    }

    #[test]
    fn partial_results_are_few_bytes_beside_keys_and_values() {
        // 64 rows: 8 · 64 · 524 bytes of partial results are those of 8.2 tiles
        assert_eq!(limits(|grid| grid.rows = 64), (33, 9));
        // short blocks have no ranges of two tiles
        assert_eq!(limits(|grid| grid.most_keys = 7 * 64).0, 3);
        assert_eq!(limits(|grid| grid.most_keys = 64).0, 1);
        // as many queries as keys: partial results would take more memory than keys and values
        let square =
            |grid: &mut ForwardGrid| (grid.blocks, grid.rows, grid.most_keys) = (32, 64, 2048);
        assert_eq!(
            limits(|grid| {
                square(grid);
                grid.kv_planes = 1
            })
            .0,
            1
        );
        assert_eq!(limits(|grid| *grid = ForwardGrid { blocks: 0, rows: 0, ..*grid }).1, 2);
    }

    const LIMITS: RangeLimits = RangeLimits { most: 100, min_tiles: 2 };

    #[test]
    fn few_tiles_are_not_divided() {
        let full = |count| [TileRun { first: 0, count, bitmask: TileRun::FULL }];
        assert_eq!(ranges(&[&full(7), &full(1)], LIMITS), 3);
        assert_eq!(ranges(&[&full(3)], LIMITS), 1);
        assert_eq!(ranges(&[&full(99)], RangeLimits::NONE), 1);
        assert_eq!(ranges(&[], LIMITS), 1);
    }

    /// A row of the table of benches/record/cuda-model.md: one query of bf16 on an H100, whose 132
    /// multiprocessors run two blocks each.
    fn predicted([batch, q_heads, kv_heads, dim, keys]: [usize; 5]) -> String {
        let group = q_heads / kv_heads;
        let grid = ForwardGrid {
            blocks: batch * kv_heads,
            rows: group,
            keys: 64,
            most_keys: keys,
            partial_bytes: 4 * partial_sums(dim),
            kv_bytes: 2 * 2 * dim,
            kv_planes: batch * kv_heads,
        };
        let tiles = keys.div_ceil(64);
        let RangeLimits { most, min_tiles } = RangeLimits::of(grid);
        let ranges = most.min(tiles / min_tiles).max(1);
        let slots = 264;
        // tiles that a slot computes, at most and on average
        let longest = (grid.blocks * ranges).div_ceil(slots) * tiles.div_ceil(ranges);
        let balance = (grid.blocks * tiles) as f64 / (slots * longest) as f64;
        let kv = (grid.kv_planes * keys * grid.kv_bytes) as f64;
        let partial = match ranges {
            1 => 0,
            _ => 2 * grid.blocks * grid.rows * ranges * grid.partial_bytes,
        };
        let share = kv / (kv + partial as f64);
        format!(
            "| {batch} | {q_heads} / {kv_heads} | {dim} | {keys} | {} | {} | {:.1} % | {:.0} % | {:.0} % |",
            grid.blocks,
            grid.blocks * ranges,
            100.0 * partial as f64 / kv,
            100.0 * balance,
            100.0 * balance * share
        )
    }

    #[test]
    fn the_prediction_for_decoding_in_the_record_follows_from_the_limits() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/record/cuda-model.md");
        let page = std::fs::read_to_string(page).unwrap();
        for shape in [
            [2, 64, 8, 128, 131_072],
            [1, 64, 8, 128, 131_072],
            [1, 32, 8, 128, 32_768],
            [1, 32, 8, 128, 4_096],
            [1, 16, 1, 128, 131_072],
            [1, 32, 8, 64, 32_768],
            [32, 32, 8, 128, 4_096],
        ] {
            let line = predicted(shape);
            assert!(page.contains(&line), "benches/record/cuda-model.md lacks {line}");
        }
        // all stages but the one that is consumed; a block's share of the 3.35 TB/s of an H100
        let in_flight = |dim: usize| Variant::DECODE_STAGE_BYTES - Variant::decode_chunk_bytes(dim);
        let covered = |dim: usize| in_flight(dim) as f64 / (3.35e6 / FILLING_BLOCKS as f64);
        assert_eq!(in_flight(128), in_flight(256));
        let text = format!(
            "has {} KB in flight, at 64 dims {} KB, which at its share of 3.35 TB/s (H100 data \
             sheet) covers {:.2} µs and {:.2} µs",
            in_flight(128) / 1024,
            in_flight(64) / 1024,
            covered(128),
            covered(64)
        );
        let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&text), "benches/record/cuda-model.md lacks {text}");
    }
}
