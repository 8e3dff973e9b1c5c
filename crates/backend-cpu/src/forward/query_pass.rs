//! Shared part of the passes over queries: inputs, visibility and packing.

use std::ops::Range;

use annulus_core::{Block, Error, Host, Inputs, Result, Visibility};

use crate::{
    tile::{
        coord::TileCoord,
        geometry::{Geometry, Strip},
        input::{Acc, Input, Source, array},
        scores::Scores,
        tile_mask::{LaneAxis, TILE},
    },
    workspace::{scratch::Scratch, state::Summed},
};

/// Returns K and V of a block: from its records or, if `in_place`, from the caller's tensors.
pub(crate) fn keys_and_values<'a, 'i: 'a, 'b: 'a, E: Input>(
    shard: &annulus_core::RankShard,
    inputs: &Inputs<'i, Host>,
    block: &Block<'b, Host>,
    in_place: bool,
) -> Result<(Source<'a, E>, Source<'a, E>)> {
    if in_place {
        if block.rows.rows() != shard.keys.rows() {
            return Err(Error::internal(
                "the rows of a block differ from this rank's, whose keys are read in place",
            ));
        }
        return Ok((Source::tensor(array("k", inputs.k)?), Source::tensor(array("v", inputs.v)?)));
    }
    let record = shard.spec.kv_row_layout();
    let source = |field| Source::records(block.buffer.bytes(), block.rows.len(), &record, field);
    Ok((source(0)?, source(1)?))
}

/// Inputs that all tasks of a pass over queries read.
pub(crate) struct QueryPass<'a, E: Input> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) scores: Scores<'a, Acc<E>>,
    pub(crate) q: Source<'a, E>,
    pub(crate) k: Source<'a, E>,
    pub(crate) v: Source<'a, E>,
    /// Strips of one head of a full task.
    strips: usize,
}

impl<'a, E: Input<Accumulator: Summed>> QueryPass<'a, E> {
    pub(crate) fn new<'i: 'a, 'b: 'a>(
        geometry: &'a Geometry,
        task_rows: usize,
        shard: &'a annulus_core::RankShard,
        inputs: &Inputs<'i, Host>,
        block: &Block<'b, Host>,
        in_place: bool,
    ) -> Result<Self> {
        let spec = &*shard.spec;
        let attention_mask = shard.attention_mask.as_deref();
        let queries = &*shard.queries;
        let keys = block.rows;
        let bias = inputs.bias.map(|bias| array::<Acc<E>>("bias", bias)).transpose()?;
        let (k, v) = keys_and_values(shard, inputs, block, in_place)?;
        Ok(Self {
            geometry,
            visibility: Visibility { mask: &*spec.mask, attention_mask, queries, keys },
            scores: Scores { spec, token: geometry.token, queries, keys, bias },
            q: Source::tensor(array("q", inputs.q)?),
            k,
            v,
            strips: task_rows / geometry.strip_lanes(),
        })
    }

    /// Iterates over the query heads of a group: all at once if they have the same mask, else one
    /// by one.
    pub(crate) fn heads_with_one_mask(
        &self,
        kv_head: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<E> {
        let heads = self.geometry.heads(kv_head);
        let step = if self.visibility.per_head() { 1 } else { heads.len() };
        heads.clone().step_by(step).map(move |first| first..first + step)
    }

    /// Computes the visibility of a task's rows, of all and of each strip, unless the scratch holds
    /// it from a task with the same rows and mask.
    pub(crate) fn update_query_tiles(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
    ) {
        let of_batch = if self.visibility.per_batch() { batch } else { 0 };
        let of_head = if self.visibility.per_head() { head } else { 0 };
        let wanted = (of_batch, of_head, rows.clone());
        if scratch.query_tiles_of.as_ref() == Some(&wanted) {
            return;
        }
        self.visibility.query_tile(of_batch, of_head, rows.clone(), &mut scratch.task_tile);
        for (strip, tile) in self.geometry.strips(rows.len()).zip(&mut scratch.strip_tiles) {
            self.visibility.query_tile(
                of_batch,
                of_head,
                rows.start + strip.rows.start..rows.start + strip.rows.end,
                tile,
            );
        }
        scratch.query_tiles_of = Some(wanted);
        scratch.mask_cache.clear();
    }

    /// Invalidates the visibility in every scratch: masks and positions may have changed since the
    /// last pass.
    pub(crate) fn invalidate_query_tiles(scratch: &mut [Scratch<Acc<E>>]) {
        scratch.iter_mut().for_each(|scratch| scratch.query_tiles_of = None);
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
            queries: rows.start + strip.rows.start..rows.start + strip.rows.end,
            keys: keys.clone(),
            lane_axis: LaneAxis::Queries,
            strip: head % self.geometry.dims.group() * self.strips + index,
            vectors: strip.vectors,
            width: strip.width,
        }
    }

    /// Packs a tile of keys and values.
    pub(crate) fn fill_keys(
        &self,
        scratch: &mut Scratch<Acc<E>>,
        batch: usize,
        kv_head: usize,
        keys: &Range<usize>,
    ) {
        let token = self.geometry.token;
        scratch.rows_head.fill(token, &self.k, batch, kv_head, keys.clone());
        scratch.rows_value.fill(token, &self.v, batch, kv_head, keys.clone());
        // a guess: usually the adjacent tile is next
        scratch.prefetcher.rows = keys.end..(keys.end + TILE).min(self.visibility.keys.len());
    }
}
