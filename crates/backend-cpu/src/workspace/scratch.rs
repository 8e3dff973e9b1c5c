//! Scratch memory of one thread: O(tile), allocated with the workspace and reused by every task.

use std::ops::Range;

use annulus_core::{QueryTile, Result, Spec, TileBits};

use crate::{
    gather::block::GatherScratch,
    simd::dispatch::Real,
    tile::{
        aligned::{Aligned, list_bytes},
        ds_tile::DsTile,
        geometry::Geometry,
        pack::Panel,
        prefetch::Prefetcher,
        terms::ROW_PAIRS,
        tile_mask::{TILE, TileMask, TileMaskCache},
    },
    workspace::{bias_gradient::BiasGradient, decode::DecodeScratch, query_block::TileStatistics},
};

/// Tiles of one thread: [`TILE`] rows, one strip wide.
#[derive(Debug)]
pub(crate) struct Tiles<A> {
    /// Scores S, then probabilities P or score gradients dS.
    pub(crate) s: Aligned<A>,
    /// Gradients dP, then the probabilities that multiply dO in dV.
    pub(crate) dp: Aligned<A>,
    /// ∂s/∂x under a soft cap.
    pub(crate) soft_cap_slope: Aligned<A>,
    /// Biases, then dropout factors.
    pub(crate) extra: Aligned<A>,
    /// P or dS as [`crate::tile::terms::SplitWeights`] writes them, then factors of lanes.
    pub(crate) terms: Aligned<A>,
}

/// Queries of a task, in one version of their visibility.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskQueries {
    /// See [`crate::workspace::query_tiles::QueryTileCache::generation`].
    pub(crate) generation: u64,
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
}

/// Scratch memory of one thread.
#[derive(Debug)]
pub(crate) struct ThreadScratch<A> {
    /// Vectors of length head_dim, one per row: keys, or queries where keys lie in lanes.
    pub(crate) rows_head: Panel<A>,
    /// Vectors of length value_dim, one per row: values, or dO.
    pub(crate) rows_value: Panel<A>,
    /// Keys of a key block, one per row of whole vectors, for dQ += dS·K.
    pub(crate) rows_key: Panel<A>,
    /// dS of a tile of 64 queries × 64 keys.
    pub(crate) ds_tile: DsTile<A>,
    /// Packed strips of vectors of length head_dim, one vector per lane.
    pub(crate) lanes_head: Aligned<A>,
    /// Packed strips of vectors of length value_dim.
    pub(crate) lanes_value: Aligned<A>,
    /// Accumulated dKᵀ in strips, where keys lie in lanes.
    pub(crate) sums_head: Aligned<A>,
    /// Accumulated dVᵀ in strips.
    pub(crate) sums_value: Aligned<A>,
    /// dbias summed over all queries, for the keys of a task. Empty unless the bias is broadcast
    /// along queries.
    pub(crate) sums_bias: Aligned<A>,
    pub(crate) tiles: Tiles<A>,
    /// Maximum score of each lane of a tile.
    pub(crate) tile_max: Aligned<A>,
    /// e^{m − m'} of each lane, by which the accumulator is rescaled.
    pub(crate) rescale: Aligned<A>,
    pub(crate) statistics: TileStatistics<A>,
    /// Scratch of split-KV decode.
    pub(crate) decode: DecodeScratch<A>,
    pub(crate) prefetcher: Prefetcher,
    /// Scratch of passes that gather rows.
    pub(crate) gather: GatherScratch<A>,
    /// Queries that `task_tile`, `last_keys` and `mask_cache` describe.
    pub(crate) task_queries: Option<TaskQueries>,
    /// True for strips that are packed already.
    pub(crate) filled: Vec<bool>,
    /// True for strips of keys of which `sums_head` and `sums_value` hold sums, or zeros. Those of
    /// the other strips are unspecified, and overwritten by their first products.
    pub(crate) summed: Vec<bool>,
    /// True for strips of queries whose outputs are written.
    pub(crate) written: Vec<bool>,
    /// Bounds of the keys of all queries of the task.
    pub(crate) task_tile: QueryTile,
    /// First key of the block's last tile that is not certainly empty, of each 64 queries of the
    /// task, where it is known.
    pub(crate) last_keys: Vec<Option<usize>>,
    pub(crate) bits: TileBits,
    /// Mask of a tile of 64 queries × 64 keys. `tile_mask` is the part of one strip.
    pub(crate) whole_mask: TileMask,
    pub(crate) tile_mask: TileMask,
    /// Tile masks of the task's rows, reused by all heads with the same mask.
    pub(crate) mask_cache: TileMaskCache,
    /// Accumulator of the current task in passes of one block of keys, under a narrow mask; see
    /// `forward/tiles.rs`.
    pub(crate) near_sums: Aligned<A>,
    /// Copy of `tile_mask` for one head, from which a bias of −∞ removes pairs.
    pub(crate) head_mask: TileMask,
    /// Positions of the rows of `rows_head` and `rows_value`; see
    /// [`crate::tile::terms::RowPositions`].
    pub(crate) positions: Option<[u8; TILE]>,
}

impl<A: Real> ThreadScratch<A> {
    /// Allocates scratch for tasks of `q_rows` queries and `k_rows` keys, with `backward` also for
    /// gradients, and for a decode pass of `decode_queries` queries (0: none).
    pub(crate) fn new(
        spec: &Spec,
        geometry: &Geometry,
        q_rows: usize,
        k_rows: usize,
        backward: bool,
        decode_queries: usize,
    ) -> Result<Self> {
        let head = geometry.dims.head_dim;
        let value = geometry.dims.value_dim;
        let strip = geometry.strip_lanes();
        let q_lanes = q_rows * geometry.dims.group();
        let k_lanes = if backward { k_rows.max(geometry.key_block()) } else { 0 };
        let lanes = q_lanes.max(k_lanes);
        let gradient = |elements: usize| if backward { elements } else { 0 };
        let tile = |wanted: bool| Aligned::zeroed(if wanted { TILE * strip } else { 0 });
        let statistic = || Aligned::zeroed(gradient(TILE.max(strip)));
        Ok(Self {
            rows_head: Panel::new(head, geometry.panel_format(backward))?,
            rows_value: Panel::new(value, geometry.panel_format(true))?,
            rows_key: Panel::with_stride(
                gradient(geometry.key_block()),
                head,
                geometry.padded_head_dim(),
                geometry.dq_panel_format(),
            )?,
            ds_tile: DsTile::new(geometry, backward)?,
            lanes_head: Aligned::zeroed(lanes * geometry.packed_rows(head))?,
            lanes_value: Aligned::zeroed(gradient(lanes * geometry.packed_rows(value)))?,
            sums_head: Aligned::zeroed(k_lanes * geometry.head_rows())?,
            sums_value: Aligned::zeroed(k_lanes * geometry.value_rows())?,
            sums_bias: Aligned::zeroed(gradient(BiasGradient::<A>::lanes(
                spec,
                // in the reproducible order, the tasks are those of dk and dv
                if spec.leaf_rows.is_some() { k_lanes } else { geometry.key_block() },
            )))?,
            tiles: Tiles {
                s: tile(true)?,
                dp: tile(backward)?,
                soft_cap_slope: tile(backward)?,
                extra: tile(true)?,
                terms: Aligned::zeroed(
                    geometry.tile_terms.map_or(0, |of| (of.weights * ROW_PAIRS + 1) * strip),
                )?,
            },
            tile_max: Aligned::zeroed(strip)?,
            rescale: Aligned::zeroed(strip)?,
            statistics: [statistic()?, statistic()?, statistic()?, statistic()?],
            decode: DecodeScratch::new(geometry, decode_queries)?,
            prefetcher: Prefetcher::default(),
            gather: GatherScratch::default(),
            task_queries: None,
            filled: vec![false; (lanes / strip).max(geometry.key_block() / A::WIDTH)],
            summed: vec![false; k_lanes.div_ceil(strip).max(geometry.key_block() / A::WIDTH)],
            written: vec![false; q_lanes.div_ceil(strip)],
            task_tile: QueryTile::default(),
            last_keys: vec![None; q_rows.div_ceil(TILE)],
            bits: TileBits::default(),
            whole_mask: TileMask::default(),
            tile_mask: TileMask::default(),
            mask_cache: TileMaskCache::new(),
            near_sums: Aligned::default(),
            head_mask: TileMask::default(),
            positions: None,
        })
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let Tiles { s, dp, soft_cap_slope, extra, terms } = &self.tiles;
        let lanes = [&self.lanes_head, &self.lanes_value, &self.tile_max, &self.rescale];
        let sums = [&self.sums_head, &self.sums_value, &self.sums_bias, &self.near_sums];
        let arrays = [s, dp, soft_cap_slope, extra, terms].into_iter().chain(&self.statistics);
        let panels = [&self.rows_head, &self.rows_value, &self.rows_key];
        arrays.chain(lanes).chain(sums).map(Aligned::bytes).sum::<usize>()
            + panels.map(Panel::bytes).iter().sum::<usize>()
            + self.decode.bytes()
            + self.gather.bytes()
            + self.ds_tile.bytes()
            + list_bytes(&self.filled)
            + list_bytes(&self.summed)
            + list_bytes(&self.written)
            + list_bytes(&self.last_keys)
            + self.task_tile.bytes()
            + self.mask_cache.bytes()
    }

    /// Clears what was computed for the task's queries and the keys of one block.
    pub(crate) fn clear_key_caches(&mut self) {
        self.last_keys.fill(None);
        self.mask_cache.clear();
    }
}
