//! Shared part of the passes over queries: inputs, visibility and packing.

use std::ops::Range;

use annulus_core::{Block, Error, Host, HostView, Inputs, QueryTile, Result, Visibility};
use ndarray::{ArrayView4, Axis, Slice};

use crate::{
    tile::{
        bias::ListBias,
        geometry::{Geometry, Strip, TileCoord},
        input::{Acc, TileInput, TileSource, array},
        pack::PanelsInPlace,
        prefetch::prefetch_first_tile,
        scores::Scores,
        terms::RowPositions,
        tile_mask::{LaneAxis, TILE},
    },
    workspace::{
        query_tiles::QueryTileCache,
        scratch::{TaskQueries, ThreadScratch},
    },
};

/// Returns K and V of a block: from its records or, of local keys, from the caller's tensors.
pub(crate) fn keys_and_values<'a, 'i: 'a, 'b: 'a, E: TileInput>(
    shard: &annulus_core::RankShard,
    inputs: &Inputs<HostView<'i>>,
    block: &Block<'b, Host>,
) -> Result<(TileSource<'a, E>, TileSource<'a, E>)> {
    if let Some(first) = block.first_local {
        let rows = first..first.saturating_add(block.rows.len());
        if shard.keys.rows().get(rows.clone()) != Some(block.rows.rows()) {
            return Err(Error::internal(
                "the rows of a block differ from this rank's, whose keys are read in place",
            ));
        }
        let rows = Slice::from(rows);
        let local =
            |tensor: ArrayView4<'i, E>| TileSource::tensor(tensor.slice_axis_move(Axis(1), rows));
        return Ok((local(array("k", inputs.k)?), local(array("v", inputs.v)?)));
    }
    let record = shard.spec.kv_row_layout();
    let source =
        |field| TileSource::records(block.buffer.bytes(), block.rows.len(), &record, field);
    Ok((source(0)?, source(1)?))
}

/// Inputs that all tasks of a pass over queries read.
pub(crate) struct ForwardQueryPass<'a, E: TileInput> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) scores: Scores<'a, Acc<E>>,
    pub(crate) q: TileSource<'a, E>,
    pub(crate) k: TileSource<'a, E>,
    pub(crate) v: TileSource<'a, E>,
    /// Visibility of this rank's queries.
    pub(crate) query_tiles: &'a QueryTileCache,
    /// Strips of one head of a full task.
    pub(super) strips: usize,
    /// `[heads|1, sinks, 1, 1]`
    pub(super) sinks: Option<ArrayView4<'a, Acc<E>>>,
    /// True if this block is the first of the pass. Where outputs are written it is also the last.
    pub(crate) is_only_block: bool,
}

impl<'a, E: TileInput> ForwardQueryPass<'a, E> {
    /// Prepares a pass over `block` in tasks of `task_rows` queries, after
    /// [`PassState::update_query_tiles`](crate::workspace::state::State::update_query_tiles).
    pub(crate) fn new<'i: 'a, 'b: 'a>(
        geometry: &'a Geometry,
        task_rows: usize,
        shard: &'a annulus_core::RankShard,
        query_tiles: &'a QueryTileCache,
        inputs: &Inputs<HostView<'i>>,
        block: &Block<'b, Host>,
    ) -> Result<Self> {
        let spec = &*shard.spec;
        let queries = &*shard.queries;
        let keys = block.rows;
        let bias = inputs.bias.map(|bias| array::<Acc<E>>("bias", bias)).transpose()?;
        let sinks = inputs.sinks.map(|sinks| array("softmax_aux", sinks)).transpose()?;
        let (k, v) = keys_and_values(shard, inputs, block)?;
        prefetch_first_tile(spec.dims, keys.len(), [&k, &v]);
        let visibility = shard.visibility(queries, keys);
        let list_bias = ListBias::of(visibility.key_lists);
        Ok(Self {
            geometry,
            visibility,
            scores: Scores { spec, token: geometry.token, queries, keys, bias, list_bias },
            q: TileSource::tensor(array("q", inputs.q)?),
            k,
            v,
            query_tiles,
            strips: task_rows / geometry.strip_lanes(),
            sinks,
            is_only_block: false,
        })
    }

    /// Iterates over the query heads of a group: all at once if they have the same mask, else one
    /// by one.
    pub(crate) fn heads_with_one_mask(
        &self,
        kv_head: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<E> {
        self.geometry.heads_with_one_mask(kv_head, self.visibility.per_head())
    }

    /// Loads the bounds of the keys of a task's rows into `scratch.task_tile`, unless the scratch
    /// holds those of a task with the same rows and mask.
    pub(crate) fn update_task_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
    ) {
        let wanted = TaskQueries {
            generation: self.query_tiles.generation,
            batch: if self.visibility.per_batch() { batch } else { 0 },
            head: if self.visibility.per_head() { head } else { 0 },
            rows: rows.clone(),
        };
        if scratch.task_queries.as_ref() == Some(&wanted) {
            return;
        }
        let bounds = &self.query_tiles.bounds;
        bounds.cover(wanted.batch, wanted.head, rows.clone(), &mut scratch.task_tile);
        scratch.task_queries = Some(wanted);
        scratch.clear_key_caches();
    }

    /// Iterates over the KV tiles of the block or, with `leaf`, of one leaf that are not certainly
    /// empty for the queries `whole`.
    pub(crate) fn kv_tiles<'s>(
        &'s self,
        whole: &'s QueryTile,
        leaf: Option<&'s [Range<usize>]>,
    ) -> impl Iterator<Item = Range<usize>> + 's {
        let of_block = leaf.is_none().then(|| self.visibility.key_tiles(whole, TILE));
        let of_leaf = leaf.unwrap_or_default().iter();
        let of_leaf = of_leaf.filter(|keys| self.visibility.may_attend(whole, keys)).cloned();
        of_block.into_iter().flatten().chain(of_leaf)
    }

    /// Returns the visibility of the tile of queries that contains row `row` of the task.
    fn query_tile(&self, task: &TaskQueries, row: usize) -> &'a QueryTile {
        self.query_tiles.tile(task.batch, task.head, task.rows.start + row)
    }

    /// Classifies the tile of `keys` × the 64 queries that contain row `row` of the task, and
    /// writes its mask to `scratch.whole_mask`. Returns false if it is empty.
    ///
    /// Strips narrower than 64 lanes share the tile: its bits are computed once.
    pub(crate) fn classify(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        row: usize,
        keys: &Range<usize>,
    ) -> bool {
        let ThreadScratch { task_queries: Some(task), whole_mask, bits, .. } = scratch else {
            return false;
        };
        let tile = self.query_tile(task, row);
        whole_mask.classify(LaneAxis::Queries, &self.visibility, tile, keys.clone(), bits)
    }

    /// Returns the first key of the block's last tile that is not certainly empty for the 64
    /// queries that contain row `row` of the task.
    pub(crate) fn last_keys(&self, scratch: &mut ThreadScratch<Acc<E>>, row: usize) -> usize {
        let ThreadScratch { task_queries: Some(task), last_keys, .. } = scratch else { return 0 };
        *last_keys[row / TILE].get_or_insert_with(|| {
            let last = self.visibility.key_tiles(self.query_tile(task, row), TILE).last();
            last.map_or(0, |keys| keys.start)
        })
    }

    /// Returns the coordinates of the tile of a task's strip number `index` and `keys`.
    pub(crate) fn coord(
        &self,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
        index: usize,
        strip: &Strip,
        keys: &Range<usize>,
    ) -> TileCoord {
        TileCoord {
            batch,
            head,
            queries: strip.rows_from(rows.start),
            keys: keys.clone(),
            lane_axis: LaneAxis::Queries,
            strip: head % self.geometry.dims.group() * self.strips + index,
            vectors: strip.vectors,
            width: strip.width,
        }
    }

    /// Packs a tile of keys and values, and schedules the prefetch of the tile `next`.
    pub(crate) fn fill_keys(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        batch: usize,
        kv_head: usize,
        keys: &Range<usize>,
        next: NextTile,
    ) {
        let token = self.geometry.token;
        scratch.positions = self.positions(keys);
        let at = RowPositions(scratch.positions.as_ref());
        scratch.rows_head.fill_at(token, &self.k, batch, kv_head, keys.clone(), at);
        scratch.rows_value.fill_at(token, &self.v, batch, kv_head, keys.clone(), at);
        scratch.prefetcher.schedule_rows(next.kv_head, next.keys);
    }

    /// Returns the positions of a tile's keys on tiles of the reproducible order: a block may lack
    /// masked keys of a leaf, on which no bit depends.
    fn positions(&self, keys: &Range<usize>) -> Option<[u8; TILE]> {
        self.scores.spec.leaf_rows.and(self.geometry.tile_terms)?;
        let mut positions = [0; TILE];
        for (position, &row) in positions.iter_mut().zip(&self.visibility.keys.rows()[keys.clone()])
        {
            *position = (row % TILE as u64) as u8;
        }
        Some(positions)
    }

    /// Returns a tile of keys and values of which `uses` products each are computed, if it is read
    /// in place instead of packed.
    pub(crate) fn keys_in_place(
        &self,
        batch: usize,
        kv_head: usize,
        keys: &Range<usize>,
        uses: usize,
    ) -> Option<PanelsInPlace<'a, Acc<E>>> {
        if self.geometry.bf16_pairs {
            return None;
        }
        let dims = self.geometry.dims;
        let planes = [&self.k, &self.v].map(|source| source.plane(batch, kv_head));
        PanelsInPlace::new(planes, keys, [dims.head_dim, dims.value_dim], uses)
    }

    /// Returns the tile of the same head that is adjacent to `keys`: usually the next one.
    pub(crate) fn adjacent_tile(&self, kv_head: usize, keys: &Range<usize>) -> NextTile {
        NextTile { kv_head, keys: keys.end..(keys.end + TILE).min(self.visibility.keys.len()) }
    }
}

/// Tile of keys and values that is packed after the current one.
pub(crate) struct NextTile {
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
}
