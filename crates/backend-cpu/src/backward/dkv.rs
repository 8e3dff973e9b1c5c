//! dk and dv of one block of keys.
//!
//! ```text
//! for each task (batch row, KV head, range of keys):                         parallel
//!     for each tile of 64 queries that attend to some of them, and each query head of the KV head:
//!         for each strip of keys:
//!             S = Q·Kᵀ, epilogue     dP = dO·Vᵀ     dS and P     dVᵀ += dOᵀ·P     dKᵀ += Qᵀ·dS
//! ```
//! The mirror image of `backward_dq`: keys lie in lanes, queries are the rows. A task owns the
//! gradients of its keys, so that they are not reduced across threads. Terms are summed from late
//! queries to early ones.
//!
//! Calls of a ring of short shards compute one or two tiles. Such a call reads Q and dO (of f32 and
//! f64) in place, overwrites sums instead of zeroing them first, and prefetches keys and values of
//! the next KV head, which come from memory, under the last products of the one before.
//!
//! # Source
//! Dao et al. 2022, algorithm 4.

use std::{ops::Range, sync::Mutex};

use annulus_core::{Element, LeafMerges, QueryTile, RowLayout, Tick, Visibility};

use crate::{
    backward::{
        ds::{DsOperands, apply_soft_cap_slope, score_gradients},
        reduction::{DqSums, KeyTask},
    },
    simd::{dispatch::Real, element::Float},
    threads::{
        ordered_reduction::lock,
        team::{Team, Ticker},
    },
    tile::{
        bias::ListBiasSums,
        gemm::gemm_tn,
        geometry::{Geometry, Strip, TileCoord},
        input::{Acc, TileInput, TileSource},
        operands::Previous,
        pack::{LaneRows, MAX_USES_IN_PLACE, PanelView, PanelsInPlace},
        prefetch::{PrefetchRows, SHORT_BLOCK_KEYS},
        scores::Scores,
        terms::RowPositions,
        tile_mask::{LaneAxis, TILE},
    },
    workspace::{
        bias_gradient::BiasGradient,
        bias_gradient::TableGradient,
        leaves::{KeyLeaves, TaskLeaves, unify},
        query_block::{RowStatistics, TileStatistics, load_statistics},
        query_tiles::QueryTileCache,
        records::QueryRecord,
        scratch::ThreadScratch,
    },
};

/// Source of row statistics: this rank's, or received records.
pub(super) enum QueryStatisticsSource<'a, A> {
    Local(&'a RowStatistics<A>),
    Received { bytes: &'a [u8], record: &'a QueryRecord },
}

impl<A: Real> QueryStatisticsSource<'_, A> {
    /// Loads the statistics of rows `rows` of one batch row and head.
    fn load(&self, line: usize, rows: Range<usize>, into: &mut TileStatistics<A>) {
        match self {
            Self::Local(statistics) => {
                load_statistics(into, statistics.of(line, rows).iter().copied());
            }
            Self::Received { bytes, record } => {
                load_statistics(into, rows.map(|row| record.statistics(bytes, row, line)));
            }
        }
    }
}

/// Leaves of queries of one block.
#[derive(Clone, Copy)]
pub(super) struct ArrivingQueries<'a> {
    pub(super) merges: &'a LeafMerges,
    /// See [`KeyLeaves::steps`].
    pub(super) steps: &'a [(usize, Range<usize>)],
}

/// Inputs that all tasks of a pass over keys read.
pub(crate) struct DkvPass<'a, E: TileInput> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) k_rows: usize,
    pub(crate) visibility: Visibility<'a>,
    pub(super) query_tiles: &'a QueryTileCache,
    pub(super) scores: Scores<'a, Acc<E>>,
    pub(crate) k: TileSource<'a, E>,
    pub(super) v: TileSource<'a, E>,
    pub(super) q: TileSource<'a, E>,
    pub(super) dout: TileSource<'a, E>,
    pub(super) statistics: QueryStatisticsSource<'a, Acc<E>>,
    pub(super) gradient_row_layout: RowLayout,
    /// True if results are added to the records, false if they overwrite them.
    pub(super) add: bool,
    /// Present if dbias, summed over queries, is a field of the records.
    pub(super) bias_in_records: Option<&'a BiasGradient<Acc<E>>>,
    /// Gradient of a bias that is a table, to which passes with dq add.
    pub(super) table_gradient: Option<&'a TableGradient>,
    pub(super) list_gradient: Option<&'a ListBiasSums<Acc<E>>>,
}

impl<E: TileInput> DkvPass<'_, E> {
    /// Runs all tasks of the pass.
    pub(super) fn run(
        &self,
        team: &Team,
        scratch: &mut [ThreadScratch<Acc<E>>],
        sums: &mut [Acc<E>],
        tick: Tick<'_>,
    ) {
        // tasks write disjoint elements of the same records, under a lock held once per task
        let sums = Mutex::new(sums);
        team.run(scratch, self.tasks(false), Some(tick), |scratch, task, ticker| {
            Self::begin(scratch);
            self.accumulate(scratch, &task, &(0..self.visibility.queries.len()), None, ticker);
            self.complete(scratch, &task);
            self.write(scratch, &task, self.scale(), &mut lock(&sums));
        });
    }

    /// Iterates over the tasks. Early keys come first: they are the long tasks under a causal mask.
    /// With `by_plane` in the order of [`KeyLeaves::tasks`]: plane by plane.
    fn tasks(&self, by_plane: bool) -> impl Iterator<Item = KeyTask> + Send + use<E> {
        let (kv_heads, k_rows) = (self.geometry.dims.kv_heads, self.k_rows);
        let planes = self.geometry.dims.batch * kv_heads;
        let len = self.visibility.keys.len();
        let tasks = len.div_ceil(k_rows);
        (0..planes * tasks).map(move |index| {
            let (plane, task) = match by_plane {
                true => (index / tasks, index % tasks),
                false => (index % planes, index / planes),
            };
            let keys = task * k_rows..len.min((task + 1) * k_rows);
            KeyTask { batch: plane / kv_heads, kv_head: plane % kv_heads, keys }
        })
    }

    /// As [`DkvPass::run`] in the reproducible order: computes the leaves of the block, each from
    /// sums of 0, and merges them. After the last leaf of the pass the roots are in the records.
    pub(super) fn run_leaves(
        &self,
        team: &Team,
        scratch: &mut [ThreadScratch<Acc<E>>],
        (merges, leaves): (&LeafMerges, &mut KeyLeaves<Acc<E>>),
        records: &mut [Acc<E>],
        tick: Tick<'_>,
    ) {
        let records = Mutex::new(records);
        let KeyLeaves { tasks, steps, .. } = leaves;
        let arriving = ArrivingQueries { merges, steps };
        let tasks = self.tasks(true).zip(tasks);
        team.run(scratch, tasks, Some(tick), |scratch, (task, leaves), ticker| {
            self.accumulate_leaves(scratch, &task, (arriving, leaves), None, &records, ticker);
        });
    }

    /// Computes the leaves of queries of one task, each from sums of 0, merges them, and writes the
    /// roots after the last leaf of the pass. With `dq`, adds to dq. Returns false on a stop.
    pub(super) fn accumulate_leaves(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &KeyTask,
        (arriving, leaves): (ArrivingQueries<'_>, &mut TaskLeaves<Acc<E>>),
        mut dq: Option<&mut dyn DqSums<Acc<E>>>,
        records: &Mutex<&mut [Acc<E>]>,
        ticker: &mut Ticker<'_>,
    ) -> bool {
        let ArrivingQueries { merges, steps } = arriving;
        scratch.filled.fill(false);
        Self::clear(scratch);
        let mut is_clear = true;
        for (step, queries) in steps {
            if !std::mem::replace(&mut is_clear, true) {
                Self::clear(scratch);
            }
            let dq = dq.as_mut().map(|dq| &mut **dq as _);
            let filled = self.accumulate(scratch, task, queries, dq, ticker);
            if ticker.should_stop() {
                return false;
            }
            let ThreadScratch { sums_head, sums_value, sums_bias, .. } = scratch;
            let sums = [&mut sums_head[..], &mut sums_value[..], &mut sums_bias[..]];
            is_clear = !filled && merges.merges(*step).is_empty();
            if leaves.close_leaf(merges, *step, filled, sums) {
                // before zeros get their sign: a rank without queries writes 0
                sums_head.iter_mut().for_each(|sum| *sum = self.scale() * *sum);
                [sums_head, sums_value, sums_bias].into_iter().for_each(|sums| unify(sums));
                self.write(scratch, task, Acc::<E>::ONE, &mut lock(records));
            }
        }
        true
    }

    /// Starts a task: the first products of each strip of keys overwrite its sums.
    pub(super) fn begin(scratch: &mut ThreadScratch<Acc<E>>) {
        scratch.filled.fill(false);
        scratch.summed.fill(false);
        scratch.sums_bias.fill(Acc::<E>::ZERO);
    }

    /// Zeroes the sums of strips of keys to which no query attends.
    pub(super) fn complete(&self, scratch: &mut ThreadScratch<Acc<E>>, task: &KeyTask) {
        let ThreadScratch { summed, sums_head, sums_value, .. } = scratch;
        for (strip, _) in self.geometry.strips(task.keys.len()).zip(summed).filter(|of| !*of.1) {
            let of_strip = |rows| strip.rows.start * rows..(strip.rows.start + strip.width) * rows;
            sums_head[of_strip(self.geometry.head_rows())].fill(Acc::<E>::ZERO);
            sums_value[of_strip(self.geometry.value_rows())].fill(Acc::<E>::ZERO);
        }
    }

    /// Zeroes the sums of all keys of the longest task, which are merged as a whole.
    fn clear(scratch: &mut ThreadScratch<Acc<E>>) {
        scratch.summed.fill(true);
        scratch.sums_head.fill(Acc::<E>::ZERO);
        scratch.sums_value.fill(Acc::<E>::ZERO);
        scratch.sums_bias.fill(Acc::<E>::ZERO);
    }

    /// Accumulates dk and dv of a task's keys over the queries `rows`, whole tiles, in strips and,
    /// with `dq`, adds to dq and dbias. Returns true if some query attends to a key.
    pub(crate) fn accumulate(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &KeyTask,
        rows: &Range<usize>,
        mut dq: Option<&mut dyn DqSums<Acc<E>>>,
        ticker: &mut Ticker<'_>,
    ) -> bool {
        let mut filled = false;
        let tiles = self.visibility.queries.len().div_ceil(TILE);
        let per_head = self.visibility.per_head();
        let groups = self.geometry.heads_with_one_mask(task.kv_head, per_head);
        let rounds = if per_head { self.geometry.dims.group() } else { 1 };
        let bias = dq.as_ref().and_then(|dq| dq.bias());
        let is_shared_by_heads = bias.is_some_and(BiasGradient::is_shared_by_heads);
        for (round, heads) in groups.enumerate() {
            let mut query_tiles = self
                .query_tiles
                .bounds
                .query_tiles(task.batch, heads.start, self.visibility.keys, task.keys.clone())
                .rev()
                .filter(|queries| rows.contains(&queries.start))
                .peekable();
            while let Some(queries) = query_tiles.next() {
                let of_round = |round: usize| (round + 1) * tiles - 1 - queries.start / TILE;
                // where heads share dbias, a tile's terms of all rounds precede those of later
                // tasks
                let last_round = if is_shared_by_heads { rounds - 1 } else { round };
                let steps = of_round(round)..=of_round(last_round);
                if ticker.should_stop()
                    || dq.as_mut().is_some_and(|dq| !dq.wait_for_steps(steps, ticker))
                {
                    return filled;
                }
                let lines = 2 * TILE + self.geometry.head_rows() + self.geometry.value_rows();
                scratch.prefetcher.spread(self.geometry.strips(task.keys.len()).len(), lines);
                let is_last = query_tiles.peek().is_none();
                for head in heads.clone() {
                    let next = if head + 1 < heads.end {
                        NextRows::Queries { head: head + 1, rows: queries.clone() }
                    } else if is_last && self.prefetches_next_keys(task, &heads) {
                        NextRows::Keys { kv_head: task.kv_head + 1, rows: task.keys.clone() }
                    } else {
                        // a guess: usually the adjacent tile is next
                        let rows = queries.start.saturating_sub(TILE)..queries.start;
                        NextRows::Queries { head: heads.start, rows }
                    };
                    let (NextRows::Queries { head: of, rows }
                    | NextRows::Keys { kv_head: of, rows }) = next.clone();
                    scratch.prefetcher.schedule_rows(of, rows);
                    let dq = dq.as_mut().map(|dq| &mut **dq as _);
                    filled |= self.accumulate_queries(scratch, task, (head, &next), &queries, dq);
                }
            }
        }
        filled
    }

    /// True if keys and values of the next KV head are prefetched under the last products of a task
    /// with the query heads `heads`: those of a short block, which has no other task before the
    /// next head's.
    fn prefetches_next_keys(&self, task: &KeyTask, heads: &Range<usize>) -> bool {
        let dims = &self.geometry.dims;
        self.visibility.keys.len() <= SHORT_BLOCK_KEYS
            && task.keys.len() == self.visibility.keys.len()
            && heads.end == self.geometry.heads(task.kv_head).end
            && task.kv_head + 1 < dims.kv_heads
    }

    /// Processes one tile of queries of one head for all strips of keys. `next` is prefetched
    /// meanwhile. Returns true unless every strip is empty.
    fn accumulate_queries(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &KeyTask,
        (head, next): (usize, &NextRows),
        queries: &Range<usize>,
        mut dq: Option<&mut dyn DqSums<Acc<E>>>,
    ) -> bool {
        let token = self.geometry.token;
        let tile = self.query_tiles.tile(task.batch, head, queries.start);
        let mut filled = false;
        let mut in_place = None;
        // first key of the 64-key tile whose dS is being assembled
        let mut open_tile = None;
        // false if the tile of 64 keys is empty
        let mut non_empty = false;
        for (index, strip) in self.geometry.strips(task.keys.len()).enumerate() {
            let tile_start = strip.rows.start / TILE * TILE;
            if let (Some(dq), Some(before)) =
                (&mut dq, open_tile.take_if(|before| *before != tile_start))
            {
                scratch.ds_tile.complete(token);
                dq.accumulate_dq(scratch, head, task, before, queries);
            }
            let ThreadScratch { tile_mask, whole_mask, bits, .. } = scratch;
            if strip.rows.start == tile_start {
                let keys = task.keys.start + tile_start
                    ..task.keys.end.min(task.keys.start + tile_start + TILE);
                non_empty = whole_mask.classify(LaneAxis::Keys, &self.visibility, tile, keys, bits);
            }
            if !non_empty || !whole_mask.strip(&strip.rows, Acc::<E>::WIDTH, tile_mask) {
                continue;
            }
            let keys = strip.rows_from(task.keys.start);
            if !std::mem::replace(&mut filled, true) {
                in_place = self.queries_in_place(task, head, queries, tile);
                if in_place.is_none() {
                    scratch.rows_head.fill(token, &self.q, task.batch, head, queries.clone());
                    scratch.rows_value.fill(token, &self.dout, task.batch, head, queries.clone());
                }
                let line = task.batch * self.geometry.dims.q_heads + head;
                self.statistics.load(line, queries.clone(), &mut scratch.statistics);
            }
            let Strip { vectors, width, .. } = strip;
            let batch = task.batch;
            let queries = queries.clone();
            let coord = TileCoord {
                batch,
                head,
                queries,
                keys,
                lane_axis: LaneAxis::Keys,
                strip: index,
                vectors,
                width,
            };
            if dq.is_some() && open_tile.replace(tile_start).is_none() {
                scratch.ds_tile.clear();
            }
            let first_key = strip.rows.start;
            let dq = dq.as_deref();
            let at = (&coord, next);
            self.accumulate_tile(scratch, task, at, dq, first_key, &mut in_place);
        }
        if let (Some(dq), Some(before)) = (dq, open_tile) {
            scratch.ds_tile.complete(token);
            dq.accumulate_dq(scratch, head, task, before, queries);
        }
        filled
    }

    /// Returns the keys of a task, if dS·K reads them in place instead of packed.
    pub(super) fn keys_in_place(&self, task: &KeyTask) -> Option<PanelView<'_, Acc<E>>> {
        let Geometry { dims, token, .. } = *self.geometry;
        let uses = self.visibility.queries.len().div_ceil(TILE) * dims.group();
        if uses > MAX_USES_IN_PLACE
            || dims.head_dim != self.geometry.padded_head_dim()
            || self.geometry.bf16_pairs
        {
            return None;
        }
        let plane = self.k.plane(task.batch, task.kv_head);
        PanelView::in_place(plane, &task.keys).map(|keys| keys.probed(token, dims.head_dim))
    }

    /// Returns a tile of queries of one head, if it is read in place instead of packed. `tile` is
    /// its visibility.
    fn queries_in_place(
        &self,
        task: &KeyTask,
        head: usize,
        queries: &Range<usize>,
        tile: &QueryTile,
    ) -> Option<PanelsInPlace<'_, Acc<E>>> {
        if self.geometry.bf16_pairs {
            return None;
        }
        let dims = self.geometry.dims;
        let planes = [&self.q, &self.dout].map(|source| source.plane(task.batch, head));
        let dims = [dims.head_dim, dims.value_dim];
        PanelsInPlace::new(planes, queries, dims, self.uses(task, tile))
    }

    /// Returns the number of strips of a task's keys to which queries may attend.
    fn uses(&self, task: &KeyTask, tile: &QueryTile) -> usize {
        let mut may_attend = false;
        let strips = self.geometry.strips(task.keys.len()).filter(|strip| {
            if strip.rows.start.is_multiple_of(TILE) {
                let first = task.keys.start + strip.rows.start;
                may_attend =
                    self.visibility.may_attend(tile, &(first..task.keys.end.min(first + TILE)));
            }
            may_attend
        });
        strips.count()
    }

    /// Processes one tile. `first_key` is its first key, as an index into the task.
    fn accumulate_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        task: &KeyTask,
        (coord, next): (&TileCoord, &NextRows),
        dq: Option<&dyn DqSums<Acc<E>>>,
        first_key: usize,
        in_place: &mut Option<PanelsInPlace<'_, Acc<E>>>,
    ) {
        let geometry = self.geometry;
        let head_dim = geometry.packed_rows(geometry.dims.head_dim);
        let value_dim = geometry.packed_rows(geometry.dims.value_dim);
        let ThreadScratch {
            rows_head,
            rows_value,
            lanes_head,
            lanes_value,
            sums_head,
            sums_value,
            tiles,
            statistics,
            ..
        } = scratch;
        let ThreadScratch { tile_mask, filled, summed, ds_tile, sums_bias, prefetcher, .. } =
            scratch;
        let k_strip = &mut lanes_head[geometry.strip_range(coord, head_dim)];
        let v_strip = &mut lanes_value[geometry.strip_range(coord, value_dim)];
        if !std::mem::replace(&mut filled[coord.strip], true) {
            let [k, v] = [&self.k, &self.v].map(|of| of.plane(coord.batch, task.kv_head));
            geometry.pack_strip(k, coord.keys.clone(), coord.width, k_strip);
            geometry.pack_strip(v, coord.keys.clone(), coord.width, v_strip);
            // values only: keys were read when the panel of the key block was packed. Under a
            // causal mask strips ascend within the first tile; under a window a tile has one strip
            // more, before those of the last
            let next = if coord.keys.end < task.keys.end && !filled[coord.strip + 1] {
                coord.keys.end..task.keys.end.min(coord.keys.end + coord.width)
            } else {
                task.keys.start.max(coord.keys.start.saturating_sub(coord.width))..coord.keys.start
            };
            prefetcher.schedule_lanes(task.kv_head, next);
        }
        let [rows_head, rows_value] = match in_place {
            Some(tile) => [0, 1].map(|i| tile.reduction_panel(i, geometry.token, tile_mask)),
            None => [rows_head.view(), rows_value.view()].map(PanelView::of_queries),
        };
        let operands = DsOperands { s: (rows_head, k_strip), dp: (rows_value, v_strip) };
        let next_rows = match *next {
            NextRows::Queries { head, .. } => {
                [&self.q, &self.dout].map(|source| source.plane(task.batch, head))
            }
            NextRows::Keys { kv_head, .. } => {
                [&self.k, &self.v].map(|source| source.plane(task.batch, kv_head))
            }
        };
        let v = PrefetchRows::of(self.v.plane(task.batch, task.kv_head));
        let mut cursor =
            prefetcher.cursor(next_rows.map(PrefetchRows::of), v, PrefetchRows::default());
        score_gradients(&self.scores, coord, tile_mask, operands, statistics, tiles, &mut cursor);
        let span = coord.span(tile_mask.rows());
        let table_gradient = self.table_gradient.filter(|_| dq.is_some());
        let list_gradient = self.list_gradient.filter(|_| dq.is_some());
        let bias = dq.map_or(self.bias_in_records, |dq| dq.bias());
        apply_soft_cap_slope(&self.scores, coord, &span, tiles, |ds| {
            if let Some(gradient) = table_gradient {
                gradient.add(&self.scores, coord, tile_mask.rows(), ds);
            }
            if let (Some(gradient), Some(bias)) = (list_gradient, &self.scores.list_bias) {
                gradient.add(bias, coord, tile_mask, self.scores.keys, ds);
            }
            let Some(bias) = bias else { return };
            let key_rows = &self.visibility.keys.rows()[coord.keys.clone()];
            let lanes = (&mut sums_bias[..], first_key);
            bias.add(coord, task.kv_head, tile_mask.rows(), ds, key_rows, lanes);
        });
        if dq.is_some() {
            ds_tile.insert_strip(geometry.token, coord, tile_mask, first_key % TILE, &tiles.s);
        }
        let previous = if std::mem::replace(&mut summed[coord.strip], true) {
            Previous::Add
        } else {
            Previous::Overwrite
        };
        let rows = tile_mask.rows();
        let probs = geometry.weights(
            coord.vectors,
            rows,
            RowPositions::default(),
            false,
            &mut tiles.dp,
            &mut tiles.terms,
        );
        let dv_strip = &mut sums_value[geometry.strip_range(coord, geometry.value_rows())];
        gemm_tn(
            (geometry.token, coord.vectors),
            tile_mask,
            rows_value,
            probs,
            dv_strip,
            previous,
            &mut cursor,
        );
        let ds = geometry.weights(
            coord.vectors,
            rows,
            RowPositions::default(),
            true,
            &mut tiles.s,
            &mut tiles.terms,
        );
        let dk_strip = &mut sums_head[geometry.strip_range(coord, geometry.head_rows())];
        gemm_tn(
            (geometry.token, coord.vectors),
            tile_mask,
            rows_head,
            ds,
            dk_strip,
            previous,
            &mut cursor,
        );
    }

    /// Returns the factor of dk.
    pub(crate) fn scale(&self) -> Acc<E> {
        Acc::<E>::from_f64(self.scores.spec.scale)
    }

    /// Writes a task's dk, multiplied by `scale`, dv, and dbias if it is a field, into the gradient
    /// records.
    pub(crate) fn write(
        &self,
        scratch: &ThreadScratch<Acc<E>>,
        task: &KeyTask,
        scale: Acc<E>,
        records: &mut [Acc<E>],
    ) {
        let spec = self.scores.spec;
        let record = &self.gradient_row_layout;
        let size = size_of::<Acc<E>>() as u64;
        let at = |bytes: u64| annulus_core::index(bytes / size);
        let len = at(record.bytes());
        if self.bias_in_records.is_some() {
            let first = at(record.offset(2, task.batch, task.kv_head));
            let heads = record.fields()[2].dim;
            for (index, sums) in
                scratch.sums_bias.chunks_exact(scratch.sums_bias.len() / heads).enumerate()
            {
                for (key, &sum) in task.keys.clone().zip(sums) {
                    records[key * len + first + index] = sum;
                }
            }
        }
        let fields = [
            (0, spec.dims.head_dim, self.geometry.head_rows(), &scratch.sums_head, scale),
            (
                1,
                spec.dims.value_dim,
                self.geometry.value_rows(),
                &scratch.sums_value,
                Acc::<E>::ONE,
            ),
        ];
        for (field, dim, rows, sums, scale) in fields {
            let first = at(record.offset(field, task.batch, task.kv_head));
            for strip in self.geometry.strips(task.keys.len()) {
                let sums = &sums[strip.rows.start * rows..][..strip.width * rows];
                let into = LaneRows {
                    rows: &mut records[(task.keys.start + strip.rows.start) * len + first..],
                    stride: len,
                    count: strip.rows.len(),
                    dim,
                    scale,
                    add: self.add,
                };
                into.write(self.geometry.token, sums, strip.width);
            }
        }
    }
}

/// Rows that are prefetched under the products of a tile.
#[derive(Debug, Clone)]
enum NextRows {
    /// Q and dO of a query head.
    Queries { head: usize, rows: Range<usize> },
    /// K and V of a KV head.
    Keys { kv_head: usize, rows: Range<usize> },
}
