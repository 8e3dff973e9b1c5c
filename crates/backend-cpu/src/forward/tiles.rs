//! Forward pass over one block of keys.
//!
//! ```text
//! for each task (batch row, KV head, range of queries):                      parallel
//!     for each tile of 64 keys that is not empty:                            (leaf by leaf)
//!         pack K and V of the tile, unless few strips use it
//!         for each strip of queries and each query head of the KV head:
//!             S = K·Qᵀ, epilogue     (m, ℓ, P) ← online softmax of S     Oᵀ ← Oᵀ·e^{m − m'} + Vᵀ·P
//!             in the last block, after the strip's last tile:  write its rows of the outputs
//! ```
//! Queries lie in lanes: maximum, sum and rescaling are vector operations, and nothing reduces
//! across lanes. A packed tile of keys serves all query heads of its group (GQA) and all rows of
//! the task. Of f32 and f64, a tile is read in place if the task has few strips, as in a ring of
//! short shards, whose calls compute one or two tiles; queries of such a shard stay packed for all
//! calls of the pass.
//!
//! The outputs of a strip are written while its accumulator is in the first-level cache, and were
//! prefetched under its last products; in a pass of their own they would wait for memory. If the
//! last block is also the first, all tasks of a thread use one accumulator: those of the query
//! blocks would be read from memory, and written to it, although no later call needs them.
//!
//! In the reproducible order a task takes the block leaf by leaf: it closes the leaf before, that
//! is, merges it with the partial results that wait for it, or stores it, and then folds the tiles
//! of 64 row numbers of the leaf, ascending, into the partial result of the leaf. The result of a
//! row does not depend on the other rows of its strip or task: every operation on a lane depends on
//! that lane alone, and a tile that is empty for the strip changes no bit of a lane. On AMX, pairs of
//! rows are those of their row numbers. `VDPBF16PS` is not used in this order: it adds pairs of rows
//! of a block, so that a result would depend on the blocks.
//!
//! # Source
//! Dao et al. 2022, algorithm 1; Milakov and Gimelshein 2018 for the online softmax, and section
//! 3.1 for the merge of partial results.

use std::ops::Range;

use annulus_core::{Tick, Visibility};

use crate::{
    forward::{
        outputs::{NextStrip, OutputAxis, OutputRows, StripOutput},
        query_pass::{ForwardQueryPass, NextTile},
    },
    simd::{dispatch::Real, element::Float},
    threads::team::{Team, Ticker},
    tile::{
        gemm::{gemm_nn, gemm_tn},
        geometry::{Strip, TileCoord},
        input::{Acc, TileInput},
        operands::Previous,
        pack::PanelsInPlace,
        prefetch::{PrefetchRows, Prefetcher},
        scores::LaneMaxima,
        softmax::{MultiplyTile, OnlineSoftmax, OnlineSoftmaxStatistics},
        terms::RowPositions,
        tile_mask::TILE,
    },
    workspace::{
        leaves::{ArrivingKeys, BlockPart},
        query_block::{QueryBlock, QueryTask},
        scratch::{ThreadScratch, Tiles},
        state::PassState,
    },
};

/// Resets the softmax statistics of every row.
///
/// The accumulator keeps its old contents, which the first tile of a strip overwrites.
pub(crate) fn begin<A: Real>(team: &Team, state: &mut PassState<A>) {
    state.attended = false;
    state.arrivals.begin();
    state.query_tiles.begin();
    team.run(&mut state.scratch, state.blocks.iter_mut(), None, |_, block, _| {
        block.partial.reset();
        block.leaves.begin();
        block.kept_q.begin();
    });
}

impl<E: TileInput> ForwardQueryPass<'_, E> {
    /// Attends to the block tile by tile, with all queries, in tasks of `task_rows` of them. Leaf
    /// by leaf if there are `leaves`. With `outputs`, writes those of all rows, unless it is
    /// stopped; tasks are then one query block each, in the order
    /// [`crate::workspace::state::BlockOrder::Rows`].
    pub(crate) fn attend_tiles(
        &self,
        (team, scratch): (&Team, &mut [ThreadScratch<Acc<E>>]),
        blocks: &mut [QueryBlock<Acc<E>>],
        task_rows: usize,
        leaves: Option<ArrivingKeys<'_>>,
        outputs: Option<OutputRows<'_, E>>,
        tick: Tick<'_>,
    ) {
        let tasks = blocks.chunk_by_mut(QueryTask::same_task(task_rows)).filter_map(QueryTask::new);
        let Some(outputs) = outputs else {
            team.run(scratch, tasks, Some(tick), |scratch, mut task, ticker| {
                self.attend_task(scratch, &mut task, leaves, None, ticker);
            });
            return;
        };
        // one part per task, in the same order
        let group = self.geometry.dims.group();
        let parts = outputs
            .parts(OutputAxis::Batch, 1)
            .flat_map(move |outputs| outputs.parts(OutputAxis::Rows, task_rows))
            .flat_map(move |outputs| outputs.parts(OutputAxis::Heads, group));
        let is_only_block = self.is_only_block;
        team.run(scratch, tasks.zip(parts), Some(tick), |scratch, (mut task, mut part), ticker| {
            // no later call reads the accumulator: it need not leave the second-level cache
            let mut near_sums = std::mem::take(&mut scratch.near_sums);
            if is_only_block {
                task.swap_sums(&mut near_sums);
            }
            self.attend_task(scratch, &mut task, None, Some(&mut part), ticker);
            if is_only_block {
                task.swap_sums(&mut near_sums);
            }
            scratch.near_sums = near_sums;
        });
    }

    /// Attends to all tiles of the block for one task, whose `outputs` are written.
    fn attend_task(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        leaves: Option<ArrivingKeys<'_>>,
        mut outputs: Option<&mut OutputRows<'_, E>>,
        ticker: &mut Ticker<'_>,
    ) {
        scratch.filled.fill(false);
        scratch.written.fill(false);
        scratch.mask_cache.rewind();
        for part in BlockPart::of(leaves) {
            if let Some((merges, step)) = part.closes {
                for block in &mut *task.blocks {
                    block.close_forward_leaf(self.geometry, merges, step);
                }
            }
            for heads in self.heads_with_one_mask(task.kv_head) {
                self.update_task_tile(scratch, task.batch, heads.start, &task.rows);
                let whole = std::mem::take(&mut scratch.task_tile);
                let mut tiles = self.kv_tiles(&whole, part.tiles).peekable();
                let first = tiles.peek().cloned().unwrap_or_default();
                while let Some(keys) = tiles.next() {
                    if ticker.should_stop() {
                        break;
                    }
                    if part.tiles.is_some() {
                        task.blocks.iter_mut().for_each(QueryBlock::fill_leaf);
                    }
                    let next = match tiles.peek() {
                        Some(keys) => NextTile { kv_head: task.kv_head, keys: keys.clone() },
                        None if part.tiles.is_some() => self.adjacent_tile(task.kv_head, &keys),
                        None => self.first_tile_of_next_head(task.kv_head, &heads, &first),
                    };
                    let outputs = outputs.as_deref_mut();
                    self.attend_kv_tile(scratch, task, &heads, (&keys, next), outputs);
                }
                drop(tiles);
                scratch.task_tile = whole;
            }
        }
        // strips whose last tile is empty, or of which no tile is in this block
        let Some(outputs) = outputs.filter(|_| !ticker.should_stop()) else { return };
        for (index, strip) in self.geometry.strips(task.rows.len()).enumerate() {
            for group_head in 0..self.geometry.dims.group() {
                if !scratch.written[group_head * self.strips + index] {
                    self.write_strip(outputs, task, group_head, &strip, true);
                }
            }
        }
    }

    /// Writes the outputs of one strip of a task. `cold`: its rows have not been prefetched.
    fn write_strip(
        &self,
        outputs: &mut OutputRows<'_, E>,
        task: &mut QueryTask<'_, Acc<E>>,
        group_head: usize,
        strip: &Strip,
        cold: bool,
    ) {
        let (block, first) = task.block(strip.rows.start);
        let block = &*block;
        let rows = first..first + strip.rows.len();
        let of_block = &Strip { rows, ..*strip };
        let next = cold.then_some(NextStrip { sums: &[], head: None });
        outputs.write_strip(&StripOutput {
            geometry: self.geometry,
            normalize: self.scores.spec.normalize,
            sinks: self.sinks,
            block,
            group_head,
            strip: of_block,
            batch: 0,
            head: group_head,
            first_row: strip.rows.start,
            next,
        });
    }

    /// Returns the tile that usually follows the last tile of `heads`: the first one, of the next
    /// query heads or of the next KV head, whose task is the next one of the same rows.
    fn first_tile_of_next_head(
        &self,
        kv_head: usize,
        heads: &Range<usize>,
        first: &Range<usize>,
    ) -> NextTile {
        let last_of_group = heads.end == self.geometry.heads(kv_head).end;
        let next = kv_head + usize::from(last_of_group);
        if next < self.geometry.dims.kv_heads {
            NextTile { kv_head: next, keys: first.clone() }
        } else {
            NextTile { kv_head, keys: 0..0 }
        }
    }

    /// Attends to one tile of keys with all strips and the given heads of a task. With `outputs`,
    /// writes those of strips whose last tile it is.
    fn attend_kv_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &mut QueryTask<'_, Acc<E>>,
        heads: &Range<usize>,
        (keys, next): (&Range<usize>, NextTile),
        mut outputs: Option<&mut OutputRows<'_, E>>,
    ) {
        let mut next = Some(next);
        let mut in_place = None;
        let mut tiles = 0;
        let mut non_empty = false;
        for (index, strip) in self.geometry.strips(task.rows.len()).enumerate() {
            if !self.load_mask(scratch, &task.rows, &strip, keys, &mut non_empty) {
                continue;
            }
            if let Some(next) = next.take() {
                let uses = self.uses(task, heads, keys);
                in_place = self.keys_in_place(task.batch, task.kv_head, keys, uses);
                match in_place {
                    Some(_) => scratch.prefetcher.schedule_rows(next.kv_head, next.keys),
                    None => self.fill_keys(scratch, task.batch, task.kv_head, keys, next),
                }
            }
            tiles += heads.len();
            for head in heads.clone() {
                let coord = self.coord(task.batch, head, &task.rows, index, &strip, keys);
                let rows = task.rows.clone();
                let (block, first) = task.block(strip.rows.start);
                let ThreadScratch { lanes_head, filled, prefetcher, .. } = scratch;
                let range = self.geometry.strip_range(&coord, self.packed_q_rows());
                let scratch_strip = (&mut lanes_head[range], &mut filled[coord.strip]);
                let group_head = head % self.geometry.dims.group();
                let lane = block.lane(group_head, first);
                let of_strip = lane..lane + coord.width;
                let kept = block.kept_q.strip_mut(&of_strip, self.packed_q_rows());
                let (lanes, filled) = kept.unwrap_or(scratch_strip);
                if !std::mem::replace(filled, true) {
                    let q = self.q.plane(coord.batch, head);
                    self.geometry.pack_strip(q, coord.queries.clone(), coord.width, lanes);
                    self.schedule_queries(prefetcher, &rows, heads, &coord);
                }
                let last_of = outputs
                    .as_deref_mut()
                    .filter(|_| self.last_keys(scratch, strip.rows.start) == keys.start);
                let out = match &last_of {
                    Some(outputs) => {
                        scratch.prefetcher.schedule_outputs(strip.rows.clone());
                        PrefetchRows::of_view(outputs.out_rows(0, group_head))
                    }
                    None => PrefetchRows::default(),
                };
                let (block, first) = task.block(strip.rows.start);
                self.attend_tile(scratch, block, first, (&coord, out), &mut in_place);
                if let Some(outputs) = last_of {
                    scratch.prefetcher.schedule_outputs(0..0);
                    scratch.written[coord.strip] = true;
                    self.write_strip(outputs, task, group_head, &strip, false);
                }
            }
        }
        // a guess: the next tile of keys is packed after as many tiles as this one had
        scratch.prefetcher.spread(tiles, TILE + self.geometry.value_rows());
    }

    /// Returns the most strips of a task's queries that may attend to `keys`, of all `heads`.
    fn uses(
        &self,
        task: &QueryTask<'_, Acc<E>>,
        heads: &Range<usize>,
        keys: &Range<usize>,
    ) -> usize {
        let Visibility { keys: key_rows, .. } = self.visibility;
        let bounds = &self.query_tiles.bounds;
        let tiles = bounds.count_query_tiles(task.batch, heads.start, &task.rows, key_rows, keys);
        // the last tile of a task may have fewer strips than a whole one
        let strips = self.geometry.strips(task.rows.len()).len();
        strips.min(tiles * (TILE / self.geometry.strip_lanes())) * heads.len()
    }

    /// Loads the mask of a strip of the queries `rows` and `keys` from the cache, or computes it.
    /// Returns false if it is empty. Strips of one tile of 64 queries pass on in `non_empty` that
    /// the tile is not.
    fn load_mask(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        rows: &Range<usize>,
        strip: &Strip,
        keys: &Range<usize>,
        non_empty: &mut bool,
    ) -> bool {
        let first = strip.rows.start;
        let lanes = strip.rows_from(rows.start);
        let width = Acc::<E>::WIDTH;
        if self.geometry.strip_lanes() == TILE {
            // the strip is the tile: its own mask is cached
            if let Some(non_empty) = scratch.mask_cache.load_next(&mut scratch.tile_mask) {
                return non_empty;
            }
            let non_empty = self.classify(scratch, first, keys)
                && scratch.whole_mask.strip(&lanes, width, &mut scratch.tile_mask);
            scratch.mask_cache.store(non_empty, &scratch.tile_mask);
            return non_empty;
        }
        if first.is_multiple_of(TILE) {
            *non_empty = match scratch.mask_cache.load_next(&mut scratch.whole_mask) {
                Some(non_empty) => non_empty,
                None => {
                    let non_empty = self.classify(scratch, first, keys);
                    scratch.mask_cache.store(non_empty, &scratch.whole_mask);
                    non_empty
                }
            };
        }
        *non_empty && scratch.whole_mask.strip(&lanes, width, &mut scratch.tile_mask)
    }

    /// Schedules the prefetch of the queries that are usually packed next: the next head's, then
    /// the next strip's.
    fn schedule_queries(
        &self,
        prefetcher: &mut Prefetcher,
        rows: &Range<usize>,
        heads: &Range<usize>,
        coord: &TileCoord,
    ) {
        let next = coord.queries.end..rows.end.min(coord.queries.end + self.geometry.strip_lanes());
        if coord.head + 1 < heads.end {
            prefetcher.schedule_lanes(coord.head + 1, coord.queries.clone());
        } else if !next.is_empty() {
            prefetcher.schedule_lanes(heads.start, next);
        } else if heads.end < self.geometry.dims.q_heads {
            // of the next task
            let first = rows.start..rows.end.min(rows.start + self.geometry.strip_lanes());
            prefetcher.schedule_lanes(heads.end, first);
        }
    }

    /// Returns the rows of a packed strip of queries.
    const fn packed_q_rows(&self) -> usize {
        self.geometry.packed_rows(self.geometry.dims.head_dim)
    }

    /// Attends to one tile of one head. `first` is the strip's first row in the block, `out` are
    /// rows that are prefetched if they are scheduled. Keys and values are packed in the scratch
    /// unless they are `in_place`.
    fn attend_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        block: &mut QueryBlock<Acc<E>>,
        first: usize,
        (coord, out): (&TileCoord, PrefetchRows),
        in_place: &mut Option<PanelsInPlace<'_, Acc<E>>>,
    ) {
        let token = self.geometry.token;
        let vectors = coord.vectors;
        let ThreadScratch {
            rows_head,
            rows_value,
            lanes_head,
            tiles,
            tile_max,
            rescale,
            tile_mask,
            head_mask,
            prefetcher,
            positions,
            ..
        } = scratch;
        // a bias of −∞ removes pairs of one head
        let tile_mask = if self.scores.has_bias() {
            head_mask.clone_from(tile_mask);
            head_mask
        } else {
            tile_mask
        };
        let range = self.geometry.strip_range(coord, self.packed_q_rows());
        let first = block.lane(coord.head % self.geometry.dims.group(), first);
        let lanes = first..first + coord.width;
        let kept = block.kept_q.strip(&lanes, self.packed_q_rows());
        let queries = kept.unwrap_or(&lanes_head[range]);
        let tile_max = &mut tile_max[..coord.width];
        let tile_max_wanted = (!self.scores.needs_epilogue()).then_some(&mut *tile_max);
        let [k, v] = [&self.k, &self.v]
            .map(|source| PrefetchRows::of(source.plane(block.batch, prefetcher.rows_head)));
        let q = PrefetchRows::of(self.q.plane(block.batch, prefetcher.head));
        let mut cursor = prefetcher.cursor([k, v], q, out);
        let products = gemm_nn(
            (token, vectors),
            tile_mask,
            in_place.as_ref().map_or_else(|| rows_head.view(), |tile| tile.panel(0)),
            queries,
            &mut tiles.s,
            tile_max_wanted,
            &mut cursor,
        );
        let mut max_known = products.max_known;
        if !products.masked {
            let of_lanes = block.partial.max_product.get_mut(lanes.clone());
            let maxima =
                LaneMaxima { products: of_lanes.unwrap_or_default(), scores: &mut *tile_max };
            let Tiles { s, extra, .. } = tiles;
            max_known |= self.scores.finish_with_maxima(coord, tile_mask, s, None, extra, maxima);
        }

        let span = coord.span(tile_mask.rows());
        let ties = (!self.scores.spec.normalize).then(|| &mut block.partial.ties[lanes.clone()]);
        let rescale = &mut rescale[..coord.width];
        let probs = &mut tiles.s[span.clone()];
        let max = &mut block.partial.max[lanes.clone()];
        let sum = &mut block.partial.sum[lanes.clone()];
        let value_rows = self.geometry.value_rows();
        let sums = &mut block.partial.sums[lanes.start * value_rows..lanes.end * value_rows];
        // no visible key yet; bitwise, so that the comparisons are vectors
        let is_first = max.iter().fold(true, |first, &max| first & (max == -Acc::<E>::INFINITY));
        let scale = self.scores.deferred_scale();
        let tile_max = max_known.then_some(&*tile_max);
        let row_ranges = products.row_ranges.filter(|_| products.masked);
        let softmax =
            OnlineSoftmax { tile: probs, scale, tile_max, max, sum, ties, row_ranges, rescale };
        let max_changed = match block.partial.score_sum.get_mut(lanes.clone()) {
            Some(score_sum) => {
                Acc::<E>::run_kernel(token, vectors, OnlineSoftmaxStatistics { softmax, score_sum })
            }
            None => Acc::<E>::run_kernel(token, vectors, softmax),
        };
        if self.scores.fill_keep(coord, tile_mask.rows(), &mut tiles.extra) {
            Acc::<E>::run_kernel(
                token,
                vectors,
                MultiplyTile { tile: probs, by: &tiles.extra[span.clone()] },
            );
        }
        let rows = tile_mask.rows();
        let probs = self.geometry.weights(
            vectors,
            rows,
            RowPositions(positions.as_ref()),
            false,
            &mut tiles.s,
            &mut tiles.terms,
        );
        let previous = match (is_first, max_changed) {
            (true, _) => Previous::Overwrite,
            (false, true) => Previous::Rescale(rescale),
            // all factors are 1
            (false, false) => Previous::Add,
        };
        let v = match in_place {
            Some(tile) => tile.reduction_panel(1, token, tile_mask),
            None => rows_value.view(),
        };
        gemm_tn((token, vectors), tile_mask, v, probs, sums, previous, &mut cursor);
    }
}
