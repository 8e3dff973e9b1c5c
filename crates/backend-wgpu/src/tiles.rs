//! Launches of the tile kernels, chunk by chunk (`chunks.rs`), each with its block-sparse mask, and
//! of each chunk part by part (`queue.rs`).

use std::ops::ControlFlow;

use annulus_core::{
    BiasOrder, DType, DropoutMask, GqaPacking, Result, Rows, Spec, Tick, Visibility,
};

use crate::{
    QueryTileSize,
    block_mask::{ChunkMask, ListForm, ListOwner, WorkChunk, max_words_per_tile},
    choice::{LaunchShape, TileChoice},
    chunks::{
        ProblemSize, Workgroups, element_span, first_element, flops_per_tile_pair, most_list_words,
    },
    copy::ElementStrides,
    device::Gpu,
    kernels::{
        TILE, TallTile, TileVariant,
        params::{Strided, TileParams},
    },
    launch::{Arena, BoundResource, Commands, ElementRange},
    operands::{Operand, Operands, TileKernel},
    pass_context::{RankKernels, RowBuffers},
    split_kv::{MergeTarget, RangeResults, RangeShape},
};

/// One pass of a tile kernel over all visible pairs.
struct TilePass<'a> {
    gpu: &'a Gpu,
    spec: &'a Spec,
    tile: TileVariant,
    kind: TileKernel,
    visibility: Visibility<'a>,
    operands: Operands<'a>,
    /// Accumulator of queries, instead of the operand.
    acc: Option<&'a RowBuffers>,
}

impl RankKernels {
    /// Queues a kernel for all visible pairs of the local rows and those of a block: of queries if
    /// the kernel reads queries from records, else of keys. Returns `Break` if the tick did.
    pub(crate) fn run(
        &mut self,
        kind: TileKernel,
        block_rows: &Rows,
        operands: Operands<'_>,
        acc: Option<&RowBuffers>,
        tick: Tick<'_>,
    ) -> Result<ControlFlow<()>> {
        let Self { gpu, shard, tile, arena, block_mask } = self;
        let spec = &*shard.spec;
        let visibility = match kind {
            TileKernel::Keys { from_records: true } => Visibility {
                mask: spec.mask.as_ref(),
                attention_mask: None,
                key_lists: None,
                queries: block_rows,
                keys: &shard.keys,
            },
            _ => shard.visibility(&shard.queries, block_rows),
        };
        let pass = TilePass { gpu, spec, tile: *tile, kind, visibility, operands, acc };
        pass.run(arena, block_mask, tick)
    }
}

impl TilePass<'_> {
    /// Queues the kernel for all visible tiles, in parts of bounded work, of which few are in the
    /// queue at once. Returns `Break` if the tick did.
    fn run(
        &self,
        arena: &mut Arena,
        block_mask: &mut ChunkMask,
        tick: Tick<'_>,
    ) -> Result<ControlFlow<()>> {
        let function = self.spec.bias_function.is_some();
        let size = ProblemSize {
            queries: self.visibility.queries.len(),
            keys: self.visibility.keys.len(),
            per_batch: self.visibility.per_batch() || function,
            per_head: self.visibility.per_head() || function,
            queries_each: self.acc.map_or(usize::MAX, RowBuffers::rows_each),
        };
        let keys = size.keys;
        let operands = self.operands_at(0);
        let chunks = operands.cut(self.gpu.chunk_limits(), self.spec, self.kind, size)?;
        // dK and dV of keys that no query attends to are written, too
        let writes_anyway = matches!(self.kind, TileKernel::Keys { from_records: false });
        if chunks.is_empty() && writes_anyway && keys > 0 {
            self.write_zeros(arena)?;
        }
        for chunk in chunks {
            if tick().is_break() {
                return Ok(ControlFlow::Break(()));
            }
            let (packing, mut form) = self.list_form(&chunk, size);
            block_mask.rebuild(self.spec, &self.visibility, &chunk, self.kind.owner(), form)?;
            if form.is_tall() && self.wastes_halves(block_mask) {
                form = ListForm::DEFAULT;
                block_mask.rebuild(self.spec, &self.visibility, &chunk, self.kind.owner(), form)?;
            }
            // a later chunk adds to what an earlier one wrote
            if block_mask.is_empty && !(writes_anyway && self.begins_key_heads(&chunk)) {
                continue;
            }
            let add = match self.kind {
                TileKernel::Keys { from_records } => from_records || !self.begins_key_heads(&chunk),
                _ => false,
            };
            let work = ChunkWork { block_mask, chunk: &chunk, packing, form };
            if self.launch(arena, &work, add, &mut *tick)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Chooses the packing of heads and the form of the lists of a chunk: with few queries, forward
    /// packs heads and divides the keys.
    fn list_form(&self, chunk: &WorkChunk, size: ProblemSize) -> (GqaPacking, ListForm) {
        let default = (GqaPacking::none(TILE), ListForm::DEFAULT);
        if self.kind != TileKernel::Forward {
            return default;
        }
        let (first_head, heads) = chunk.heads;
        let group = self.spec.dims.group();
        let has_whole_groups = first_head.is_multiple_of(group) && heads.is_multiple_of(group);
        // the heads of a tile share its list
        let packing = if has_whole_groups && !size.per_head {
            GqaPacking::of(chunk.queries.1, group, TILE)
        } else {
            GqaPacking::none(TILE)
        };
        let tiles = chunk.queries.1.div_ceil(packing.queries());
        let workgroups = tiles * (heads / packing.heads()) * chunk.batches.1;
        let shape = RangeShape::of(&self.spec.dims, chunk.queries.1);
        let most_ranges = shape.most_ranges(self.gpu.chunk_limits().binding_bytes, workgroups);
        let planes = if size.per_batch { chunk.batches.1 } else { 1 }
            * if size.per_head { heads } else { 1 };
        // a range begins with a list and cuts a run
        let fits = |tiles: usize, form: ListForm| {
            let pairs = planes * tiles * chunk.keys.1.div_ceil(TILE);
            let words = pairs * max_words_per_tile(self.spec, form.queries.max(TILE))
                + 4 * workgroups * form.most_ranges
                + 2 * (chunk.queries.1 + chunk.keys.1);
            words as u64 <= most_list_words(self.gpu.chunk_limits())
        };
        let tall_tiles = chunk.queries.1.div_ceil(TallTile::ROWS);
        if packing == GqaPacking::none(TILE)
            && self.can_be_tall(chunk, tall_tiles)
            && fits(tall_tiles, ListForm::TALL)
        {
            return (GqaPacking::none(TILE), ListForm::TALL);
        }
        let form = ListForm { queries: packing.queries(), most_ranges };
        if fits(tiles, form) { (packing, form) } else { default }
    }

    /// True if tiles of forward are to have 64 queries, of which a chunk has this many.
    fn can_be_tall(&self, chunk: &WorkChunk, tiles: usize) -> bool {
        let dims = &self.spec.dims;
        let shape = LaunchShape {
            dim: dims.head_dim.max(dims.value_dim),
            workgroups: tiles * chunk.heads.1 * chunk.batches.1,
        };
        let wanted = match self.gpu.tile_choice() {
            TileChoice::Forced(tile) => tile == QueryTileSize::Of64,
            TileChoice::Default(tile) => tile == QueryTileSize::Of64 && QueryTileSize::suits(shape),
        };
        // a workgroup has twice the work of one of 32 queries
        let work = 2 * self.flops_per_tile_pair() * chunk.keys.1.div_ceil(TILE) as u64;
        let is_bounded = self.gpu.chunk_limits().part_work.is_none_or(|most| work <= most);
        let limits = self.gpu.device().limits();
        wanted
            && is_bounded
            && TallTile::INVOCATIONS <= limits.max_compute_invocations_per_workgroup as usize
            && self.tile.can_be_tall(limits.max_compute_workgroup_storage_size as usize)
    }

    /// True if so many tiles of keys are visible to one half of a tall tile only that tiles of 32
    /// queries compute at least 1/16 less. A forced tile is kept.
    fn wastes_halves(&self, block_mask: &ChunkMask) -> bool {
        matches!(self.gpu.tile_choice(), TileChoice::Default(_))
            && 8 * block_mask.idle_halves() >= block_mask.listed()
    }

    fn flops_per_tile_pair(&self) -> u64 {
        flops_per_tile_pair(self.kind, self.spec, self.gpu.register_tile())
    }

    /// Returns the operands of a chunk whose queries begin at row `query`.
    fn operands_at(&self, query: usize) -> Operands<'_> {
        let acc = self.acc.map_or(self.operands.acc, |acc| acc.operand(query));
        Operands { acc, ..self.operands.clone() }
    }

    /// True if the chunk is the first to write its KV heads.
    const fn begins_key_heads(&self, chunk: &WorkChunk) -> bool {
        chunk.queries.0 == 0 && chunk.heads.0.is_multiple_of(self.spec.dims.group())
    }

    /// Writes zero gradients, for an empty set of queries.
    fn write_zeros(&self, arena: &mut Arena) -> Result<()> {
        let mut commands = Commands::new(self.gpu, arena);
        self.operands
            .acc
            .and_then(|acc| acc.buffer)
            .into_iter()
            .for_each(|buffer| commands.clear(buffer));
        commands.submit().map(drop)
    }

    /// Queues a chunk, part by part. Returns `Break` if the tick did.
    fn launch(
        &self,
        arena: &mut Arena,
        work: &ChunkWork<'_>,
        add: bool,
        tick: Tick<'_>,
    ) -> Result<ControlFlow<()>> {
        let &ChunkWork { block_mask, chunk, packing, form } = work;
        let partial = (block_mask.ranges > 1)
            .then(|| {
                let shape = RangeShape::of(&self.spec.dims, chunk.queries.1);
                RangeResults::new(self.gpu, arena, shape, block_mask.ranges)
            })
            .transpose()?;
        let workgroups = self.workgroups(work);
        let aligned = self.operands_at(0).are_aligned(self.gpu.chunk_limits().alignment);
        let decodes = packing != GqaPacking::none(TILE) || partial.is_some();
        let variant =
            self.kind.variant(TileVariant { aligned, decodes, tall: form.is_tall(), ..self.tile });
        let mut bound = None;
        let mut first = 0;
        while first < workgroups.count() {
            if tick().is_break() || self.gpu.wait_for_room(&mut *tick)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            let mut commands = Commands::new(self.gpu, arena);
            // all parts read the lists that the first one uploads
            let bindings = match &bound {
                Some(bound) => bound,
                None => {
                    partial.iter().for_each(|partial| partial.clear(&mut commands));
                    bound.insert(self.bind(&mut commands, work, partial.as_ref())?)
                }
            };
            let budget = self.gpu.submissions().part_budget(variant);
            let (end, flops) = workgroups.part(block_mask, first, budget);
            let shape = GridShape {
                workgroups,
                first: first as u32,
                end: end as u32,
                add,
                partial: partial.as_ref(),
            };
            let resources = bindings.resources.clone();
            commands.launch(variant, (end - first) as u64, resources, |grid_width| {
                self.params(work, &bindings.operands, &shape, grid_width)
            })?;
            first = end;
            if let Some((partial, bound)) = partial.as_ref().zip(bound.as_ref())
                && first == workgroups.count()
            {
                partial.merge(&mut commands, chunk, &bound.state)?;
            }
            if let Some(receipt) = commands.submit()? {
                self.gpu.submissions().add_part(receipt, variant, flops);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Binds the operands of a chunk. With partial results these take the place of statistics and
    /// accumulators, the last two operands of forward, which become the target of the merge.
    fn bind(
        &self,
        commands: &mut Commands<'_>,
        work: &ChunkWork<'_>,
        partial: Option<&RangeResults>,
    ) -> Result<Bound<'_>> {
        let ChunkWork { block_mask, chunk, .. } = work;
        let mut resources = vec![commands.lists(&block_mask.words)?];
        let mut operands = self.operands_at(chunk.queries.0);
        for group in operands.groups(self.kind) {
            let first = group.first().and_then(|first| Some((first.buffer?, first.bytes)));
            let Some((buffer, bytes)) = first else {
                resources.push(BoundResource::Unused);
                continue;
            };
            let (start, end) = element_span(&group, chunk, self.spec);
            let range = ElementRange { first: start, count: end - start, bytes };
            let (bound, base) = range.bind(self.gpu, buffer)?;
            resources.push(bound);
            for operand in group {
                operand.layout.base = u64::from(base) + first_element(operand, chunk) - start;
            }
        }
        let mut state = Vec::new();
        if let Some(partial) = partial {
            let at = resources.len() - 2;
            let real = resources.splice(at.., partial.resources());
            let own = [&mut operands.acc, &mut operands.statistics];
            for ((bound, own), layout) in real.zip(own).zip(partial.layouts(chunk)) {
                state.push(MergeTarget { bound, at: strided(own) });
                own.iter_mut().for_each(|operand| operand.layout = layout);
            }
        }
        Ok(Bound { resources, operands, state })
    }

    /// Returns the workgroups of a chunk.
    fn workgroups(&self, work: &ChunkWork<'_>) -> Workgroups {
        let &ChunkWork { block_mask, chunk, packing, form } = work;
        let tiles = match self.kind.owner() {
            ListOwner::Queries => chunk.queries.1.div_ceil(form.queries),
            ListOwner::Keys => chunk.keys.1.div_ceil(TILE),
        };
        let (batches, heads) = (chunk.batches.1, chunk.heads.1);
        let shared = |axis: usize| self.spec.bias.is_some_and(|shape| shape[axis] == 1);
        let (heads_each, batches_each) = match self.kind {
            TileKernel::Forward | TileKernel::Queries => (1, 1),
            TileKernel::Keys { .. } => (heads.min(self.spec.dims.group()), 1),
            TileKernel::Bias(_) => {
                (if shared(1) { heads } else { 1 }, if shared(0) { batches } else { 1 })
            }
        };
        Workgroups {
            tiles: tiles * block_mask.ranges,
            is_reversed: block_mask.is_ascending,
            heads: heads / packing.heads() / heads_each,
            batches: batches / batches_each,
            heads_each,
            batches_each,
            flops: self.flops_per_tile_pair() * if form.is_tall() { 2 } else { 1 },
        }
    }

    fn params(
        &self,
        work: &ChunkWork<'_>,
        operands: &Operands<'_>,
        shape: &GridShape<'_>,
        grid_width: u32,
    ) -> TileParams {
        let &ChunkWork { block_mask, chunk, packing, .. } = work;
        let spec = self.spec;
        let dims = &self.spec.dims;
        let dv = strided(&operands.dv);
        let [acc_range, statistics_range] = shape.partial.map_or([0; 2], RangeResults::strides);
        let dropout = spec.dropout.map(DropoutMask::new);
        let (dropout_head_first, dropout_q_heads) = spec.whole_head(chunk.heads.0);
        TileParams {
            batch_first: chunk.batches.0 as u32,
            batches: chunk.batches.1 as u32,
            head_first: chunk.heads.0 as u32,
            heads: (chunk.heads.1 / packing.heads()) as u32,
            kv_head_first: (chunk.heads.0 / dims.group()) as u32,
            kv_heads: chunk.heads.1.div_ceil(dims.group()) as u32,
            group_heads: dims.group() as u32,
            dropout_head_first: dropout_head_first as u32,
            dropout_q_heads: dropout_q_heads as u32,
            queries: chunk.queries.1 as u32,
            keys: chunk.keys.1 as u32,
            head_dim: dims.head_dim as u32,
            value_dim: dims.value_dim as u32,
            tiles: shape.workgroups.tiles as u32,
            first_group: shape.first,
            end_group: shape.end,
            grid_width,
            is_reversed: u32::from(shape.workgroups.is_reversed),
            packed_heads: packing.heads() as u32,
            packed_queries: packing.queries() as u32,
            ranges: block_mask.ranges as u32,
            lists: 0,
            runs: block_mask.runs,
            bits: block_mask.bits,
            query_rows: block_mask.query_rows,
            key_rows: block_mask.key_rows,
            function_at: block_mask.function_at,
            plane_batch: block_mask.plane_batch,
            plane_head: block_mask.plane_head,
            q: strided(&operands.q),
            k: strided(&operands.k),
            v: strided(&operands.v),
            dout: strided(&operands.dout),
            statistics: strided(&operands.statistics),
            statistics_range,
            acc: strided(&operands.acc),
            acc_range,
            dv_base: dv.base,
            dv_batch: dv.batch,
            dv_head: dv.head,
            bias: strided(&operands.bias),
            bias_keys: spec.bias.map_or(1, |shape| shape[3]) as u32,
            bias_heads: shape.workgroups.heads as u32,
            dbias: strided(&operands.dbias),
            has_bias: u32::from(spec.bias.is_some()),
            // without a soft cap both orders are the same
            bias_first: u32::from(
                spec.bias_order == BiasOrder::BeforeSoftCap || spec.soft_cap.is_none(),
            ),
            normalize: u32::from(spec.normalize),
            logits_dtype: match spec.logits_dtype {
                DType::F64 | DType::F32 => 0,
                DType::Bf16 => 1,
                DType::F16 => 2,
            },
            threshold: dropout.map_or(0, |mask| mask.threshold()),
            key_low: dropout.map_or(0, |mask| mask.key()[0]),
            key_high: dropout.map_or(0, |mask| mask.key()[1]),
            add: u32::from(shape.add),
            keep_scale: dropout.map_or(1.0, |mask| mask.keep_scale() as f32),
            scale: spec.scale as f32,
            cap: spec.soft_cap.map_or(0.0, |cap| cap as f32),
        }
    }
}

/// A chunk, its lists, and the heads of its query tiles.
struct ChunkWork<'a> {
    block_mask: &'a ChunkMask,
    chunk: &'a WorkChunk,
    packing: GqaPacking,
    form: ListForm,
}

/// Resources of a chunk's kernel, and its operands, whose layouts begin in them.
struct Bound<'a> {
    resources: Vec<BoundResource>,
    operands: Operands<'a>,
    /// Accumulators and statistics that partial results are merged into, if there are any.
    state: Vec<MergeTarget>,
}

/// Workgroups of one launch, and its mode.
struct GridShape<'a> {
    workgroups: Workgroups,
    first: u32,
    end: u32,
    add: bool,
    partial: Option<&'a RangeResults>,
}

/// Layout of a bound operand.
fn strided(operand: &Option<Operand<'_>>) -> Strided {
    let layout = operand.map_or_else(ElementStrides::default, |operand| operand.layout);
    layout.at(layout.base as u32)
}
