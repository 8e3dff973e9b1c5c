//! dq and dbias from one block of keys.
//!
//! ```text
//! for each task (batch row, KV head, range of queries):                      parallel
//!     for each tile of 64 keys that is not empty:
//!         for each strip of queries and each query head of the KV head:
//!             S = K·Qᵀ, epilogue     dP = V·dOᵀ     dS from S and dP
//!             dbias += dS     dQᵀ += Kᵀ·dS
//! ```
//! dS never leaves the tile except in these sums. dq is scaled when it is written.
//!
//! # Source
//! Dao et al. 2022, algorithm 4, with the loops exchanged.

use std::ops::Range;

use annulus_core::{BackwardInputs, Block, Host, HostView, Result, Tick};

use crate::{
    backward::ds::{DsOperands, apply_soft_cap_slope, score_gradients},
    forward::query_pass::ForwardQueryPass,
    simd::element::Float,
    threads::team::{Team, Ticker},
    tile::{
        bias::ListBiasSums,
        gemm::gemm_tn,
        geometry::TileCoord,
        input::{Acc, TileInput, TileSource, array},
        operands::Previous,
        prefetch::PrefetchRows,
        terms::RowPositions,
        tile_mask::TILE,
    },
    workspace::{
        bias_gradient::BiasPartial,
        bias_gradient::TableGradient,
        leaves::{ArrivingKeys, BlockPart},
        query_block::{QueryBlock, QueryTask, RowStatistics, load_statistics},
        scratch::ThreadScratch,
        state::PassState,
    },
};

/// Adds the contribution of one block of keys to dq and dbias.
pub(crate) fn backward_dq<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &BackwardInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    tick: Tick<'_>,
) -> Result<()> {
    let task_rows = state.arrange_backward();
    state.update_query_tiles(team, block.rows)?;
    let PassState { shard, geometry, blocks, scratch, statistics, bias_gradient, .. } = state;
    let PassState { arrivals, query_tiles, table_gradient, tile_list_bias, .. } = state;
    let pass = ForwardQueryPass::<E>::new(
        geometry,
        task_rows,
        shard,
        query_tiles,
        &inputs.forward,
        block,
    )?;
    let dout = TileSource::tensor(array("dout", inputs.dout)?);
    let bias_in_blocks = bias_gradient.as_ref().is_some_and(|gradient| gradient.in_blocks());
    let table_gradient = table_gradient.as_ref();
    let list_gradient = tile_list_bias.as_ref();
    let pass = DqPass { pass, dout, statistics, bias_in_blocks, table_gradient, list_gradient };
    let leaves = arrivals.arrive(shard, block.rows)?;
    // one thread works all tasks of an owner, because they add to the same part of dbias
    let mut partials = bias_gradient.as_mut().and_then(|gradient| gradient.partials());
    let same_task = QueryTask::same_task(task_rows);
    let owned = partials.is_some();
    let same_owner = |a: &QueryBlock<_>, b: &QueryBlock<_>| {
        if owned { a.owner == b.owner } else { same_task(a, b) }
    };
    let tasks = blocks
        .chunk_by_mut(same_owner)
        .map(|blocks| (blocks, partials.as_mut().and_then(Iterator::next)));
    team.run(scratch, tasks, Some(tick), |scratch, (blocks, mut bias_partial), ticker| {
        for mut task in blocks.chunk_by_mut(&same_task).filter_map(QueryTask::new) {
            pass.accumulate(scratch, &mut task, leaves, bias_partial.as_deref_mut(), ticker);
        }
    });
    Ok(())
}

struct DqPass<'a, E: TileInput> {
    pass: ForwardQueryPass<'a, E>,
    dout: TileSource<'a, E>,
    statistics: &'a RowStatistics<Acc<E>>,
    /// [`crate::workspace::bias_gradient::BiasGradient::in_blocks`].
    bias_in_blocks: bool,
    table_gradient: Option<&'a TableGradient>,
    list_gradient: Option<&'a ListBiasSums<Acc<E>>>,
}

impl<E: TileInput> DqPass<'_, E> {
    /// Adds the contributions of all tiles of the block to one task: leaf by leaf if there are
    /// `leaves`, see `forward/tiles.rs`.
    fn accumulate(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        leaves: Option<ArrivingKeys<'_>>,
        mut bias_partial: Option<&mut BiasPartial<Acc<E>>>,
        ticker: &mut Ticker<'_>,
    ) {
        scratch.filled.fill(false);
        for part in BlockPart::of(leaves) {
            if let Some((merges, step)) = part.closes {
                task.blocks.iter_mut().for_each(|block| block.close_dq_leaf(merges, step));
            }
            for heads in self.pass.heads_with_one_mask(task.kv_head) {
                self.pass.update_task_tile(scratch, task.batch, heads.start, &task.rows);
                let whole = std::mem::take(&mut scratch.task_tile);
                for keys in self.pass.kv_tiles(&whole, part.tiles) {
                    if ticker.should_stop() {
                        break;
                    }
                    if part.tiles.is_some() {
                        task.blocks.iter_mut().for_each(QueryBlock::fill_dq_leaf);
                    }
                    let bias_partial = bias_partial.as_deref_mut();
                    self.accumulate_kv_tile(scratch, task, bias_partial, &heads, &keys);
                }
                scratch.task_tile = whole;
            }
        }
    }

    /// Adds the contribution of one tile of keys to all strips and the given heads of a task.
    fn accumulate_kv_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        mut bias_partial: Option<&mut BiasPartial<Acc<E>>>,
        heads: &Range<usize>,
        keys: &Range<usize>,
    ) {
        let mut filled = false;
        let mut non_empty = false;
        for (index, strip) in self.pass.geometry.strips(task.rows.len()).enumerate() {
            if strip.rows.start.is_multiple_of(TILE) {
                non_empty = self.pass.classify(scratch, strip.rows.start, keys);
            }
            let ThreadScratch { tile_mask, whole_mask, .. } = scratch;
            let lanes = strip.rows_from(task.rows.start);
            if !non_empty || !whole_mask.strip(&lanes, Acc::<E>::WIDTH, tile_mask) {
                continue;
            }
            if !std::mem::replace(&mut filled, true) {
                let next = self.pass.adjacent_tile(task.kv_head, keys);
                self.pass.fill_keys(scratch, task.batch, task.kv_head, keys, next);
            }
            for head in heads.clone() {
                let coord = self.pass.coord(task.batch, head, &task.rows, index, &strip, keys);
                self.fill_queries(scratch, &coord);
                let (block, first) = task.block(strip.rows.start);
                self.accumulate_tile(scratch, block, bias_partial.as_deref_mut(), first, &coord);
            }
        }
    }

    /// Packs q and dout of a strip of one head, once per task, and loads the statistics of its
    /// rows.
    fn fill_queries(&self, scratch: &mut ThreadScratch<Acc<E>>, coord: &TileCoord) {
        let geometry = self.pass.geometry;
        if !std::mem::replace(&mut scratch.filled[coord.strip], true) {
            let q_strip = &mut scratch.lanes_head
                [geometry.strip_range(coord, geometry.packed_rows(geometry.dims.head_dim))];
            let q = self.pass.q.plane(coord.batch, coord.head);
            geometry.pack_strip(q, coord.queries.clone(), coord.width, q_strip);
            let dout_strip = &mut scratch.lanes_value
                [geometry.strip_range(coord, geometry.packed_rows(geometry.dims.value_dim))];
            let dout = self.dout.plane(coord.batch, coord.head);
            geometry.pack_strip(dout, coord.queries.clone(), coord.width, dout_strip);
        }
        let line = coord.batch * geometry.dims.q_heads + coord.head;
        let rows = self.statistics.of(line, coord.queries.clone());
        load_statistics(&mut scratch.statistics, rows.iter().copied());
        // lanes without a query: probabilities of 0
        let unused = coord.queries.len()..coord.width;
        let [max, inverse_sum, ..] = &mut scratch.statistics;
        max[unused.clone()].fill(Acc::<E>::INFINITY);
        inverse_sum[unused].fill(Acc::<E>::ZERO);
    }

    /// Adds the contribution of one tile of one head. `first` is the strip's first row in the
    /// block.
    fn accumulate_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        bias_partial: Option<&mut BiasPartial<Acc<E>>>,
        first: usize,
        coord: &TileCoord,
    ) {
        let geometry = self.pass.geometry;
        let scores = &self.pass.scores;
        let ThreadScratch {
            rows_head,
            rows_value,
            lanes_head,
            lanes_value,
            tiles,
            statistics,
            tile_mask,
            head_mask,
            prefetcher,
            positions,
            ..
        } = scratch;
        // a bias of −∞ removes pairs of one head
        let tile_mask = if scores.has_bias() {
            head_mask.clone_from(tile_mask);
            head_mask
        } else {
            tile_mask
        };
        let q_strip =
            &lanes_head[geometry.strip_range(coord, geometry.packed_rows(geometry.dims.head_dim))];
        let dout_strip = &lanes_value
            [geometry.strip_range(coord, geometry.packed_rows(geometry.dims.value_dim))];
        let [k, v] = [&self.pass.k, &self.pass.v]
            .map(|source| PrefetchRows::of(source.plane(block.batch, block.kv_head)));
        let mut cursor =
            prefetcher.cursor([k, v], PrefetchRows::default(), PrefetchRows::default());
        let operands =
            DsOperands { s: (rows_head.view(), q_strip), dp: (rows_value.view(), dout_strip) };
        score_gradients(scores, coord, tile_mask, operands, statistics, tiles, &mut cursor);

        let span = coord.span(tile_mask.rows());
        let mut bias_partial = bias_partial;
        apply_soft_cap_slope(scores, coord, &span, tiles, |ds| {
            if let Some(bias_partial) = &mut bias_partial {
                bias_partial.add(coord, tile_mask.rows(), ds, scores.keys.rows());
            }
            if let Some(gradient) = self.table_gradient {
                gradient.add(scores, coord, tile_mask.rows(), ds);
            }
            if let (Some(gradient), Some(bias)) = (self.list_gradient, &scores.list_bias) {
                gradient.add(bias, coord, tile_mask, scores.keys, ds);
            }
            if self.bias_in_blocks {
                block.add_over_keys(coord, first, geometry.dims.group(), &ds[span.clone()]);
            }
        });
        let rows = tile_mask.rows();
        let ds = geometry.weights(
            coord.vectors,
            rows,
            RowPositions(positions.as_ref()),
            true,
            &mut tiles.s,
            &mut tiles.terms,
        );
        let head_rows = geometry.head_rows();
        let lane = block.lane(coord.head % geometry.dims.group(), first);
        let sums = &mut block.partial.sums[lane * head_rows..(lane + coord.width) * head_rows];
        gemm_tn(
            (geometry.token, coord.vectors),
            tile_mask,
            rows_head.view(),
            ds,
            sums,
            Previous::Add,
            &mut cursor,
        );
    }
}
