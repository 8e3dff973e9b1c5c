//! Launches of the tile kernels, chunk by chunk (`chunks.rs`), each with its block-sparse mask, and
//! of each chunk part by part (`parts.rs`).

use std::ops::ControlFlow;

use annulus_core::{BiasOrder, DType, DropoutMask, Result, Spec, Tick, Visibility};

use crate::{
    block_mask::{BlockMask, Owner, WorkChunk},
    chunks::{ProblemSize, element_span, first_element},
    copy::Layout,
    device::Gpu,
    kernels::{TILE, TileVariant, params::TileParams},
    launch::{Arena, BoundResource, Commands, ElementRange},
    operands::{Bases, Operand, Operands, TileKernel},
    parts::{Workgroups, flops_per_tile_pair},
    row_buffers::RowBuffers,
};

/// One pass of a tile kernel over all visible pairs.
pub(crate) struct TilePass<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) spec: &'a Spec,
    pub(crate) tile: TileVariant,
    pub(crate) kind: TileKernel,
    pub(crate) visibility: Visibility<'a>,
    pub(crate) operands: Operands<'a>,
    /// Accumulator of queries, instead of the operand.
    pub(crate) acc: Option<&'a RowBuffers>,
}

impl TilePass<'_> {
    /// Queues the kernel for all visible tiles, in parts of bounded work, of which few are in the
    /// queue at once. Returns `Break` if the tick did.
    pub(crate) fn run(
        &self,
        arena: &mut Arena,
        block_mask: &mut BlockMask,
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
        let writes_anyway = matches!(self.kind, TileKernel::Keys { add: false, .. });
        if chunks.is_empty() && writes_anyway && keys > 0 {
            self.write_zeros(arena)?;
        }
        for chunk in chunks {
            if tick().is_break() {
                return Ok(ControlFlow::Break(()));
            }
            block_mask.rebuild(self.spec, &self.visibility, &chunk, self.kind.owner())?;
            // a later chunk adds to what an earlier one wrote
            if block_mask.is_empty && !(writes_anyway && self.begins_key_heads(&chunk)) {
                continue;
            }
            let add = match self.kind {
                TileKernel::Keys { add, .. } => add || !self.begins_key_heads(&chunk),
                _ => false,
            };
            if self.launch(arena, block_mask, &chunk, add, &mut *tick)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
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
        block_mask: &BlockMask,
        chunk: &WorkChunk,
        add: bool,
        tick: Tick<'_>,
    ) -> Result<ControlFlow<()>> {
        let workgroups = self.workgroups(chunk);
        let aligned = self.operands_at(0).are_aligned(self.gpu.alignment());
        let variant = self.kind.variant(TileVariant { aligned, ..self.tile });
        let mut bound = None;
        let mut first = 0;
        while first < workgroups.count() {
            if tick().is_break() || self.gpu.wait_for_room(&mut *tick)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            let mut commands = Commands::new(self.gpu, arena);
            // all parts read the lists that the first one uploads
            let (bindings, bases) = match &bound {
                Some(bound) => bound,
                None => bound.insert(self.bind(&mut commands, block_mask, chunk)?),
            };
            let budget = self.gpu.submissions().part_budget(variant);
            let (end, work) = workgroups.part(block_mask, first, budget);
            let shape = GridShape { workgroups, first: first as u32, end: end as u32, add };
            commands.launch(variant, (end - first) as u64, bindings.clone(), |grid_width| {
                self.params(block_mask, chunk, bases, &shape, grid_width)
            })?;
            if let Some(receipt) = commands.submit()? {
                self.gpu.submissions().add_part(receipt, variant, work);
            }
            first = end;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Returns the bindings of a chunk, and the offsets of its operands in them.
    fn bind(
        &self,
        commands: &mut Commands<'_>,
        block_mask: &BlockMask,
        chunk: &WorkChunk,
    ) -> Result<(Vec<BoundResource>, Bases)> {
        let mut bases = Bases::default();
        let mut bindings = vec![commands.lists(&block_mask.words)?];
        for (operands, offsets) in self.operands_at(chunk.queries.0).groups(self.kind) {
            let Some((first, buffer)) =
                operands.first().and_then(|first| first.buffer.map(|buffer| (first, buffer)))
            else {
                bindings.push(BoundResource::Unused);
                continue;
            };
            let (start, end) = element_span(&operands, chunk, self.spec);
            let (bound, base) =
                ElementRange { first: start, count: end - start, bytes: first.bytes }
                    .bind(self.gpu, buffer)?;
            bindings.push(bound);
            for (operand, offset) in operands.iter().zip(offsets) {
                *offset(&mut bases) = base + (first_element(operand, chunk) - start) as u32;
            }
        }
        Ok((bindings, bases))
    }

    /// Returns the workgroups of a chunk.
    fn workgroups(&self, chunk: &WorkChunk) -> Workgroups {
        let owned = match self.kind.owner() {
            Owner::Queries => chunk.queries.1,
            Owner::Keys => chunk.keys.1,
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
            tiles: owned.div_ceil(TILE),
            heads: heads / heads_each,
            batches: batches / batches_each,
            heads_each,
            batches_each,
            flops: flops_per_tile_pair(self.kind, self.spec),
        }
    }

    fn params(
        &self,
        block_mask: &BlockMask,
        chunk: &WorkChunk,
        bases: &Bases,
        shape: &GridShape,
        grid_width: u32,
    ) -> TileParams {
        let spec = self.spec;
        let dims = &self.spec.dims;
        let layout = |operand: &Option<Operand<'_>>| {
            operand.map_or_else(Layout::default, |operand| operand.layout)
        };
        let operands = self.operands_at(chunk.queries.0);
        let [q, k, v, dout, statistics, acc, dv, bias, dbias] = [
            &operands.q,
            &operands.k,
            &operands.v,
            &operands.dout,
            &operands.statistics,
            &operands.acc,
            &operands.dv,
            &operands.bias,
            &operands.dbias,
        ]
        .map(layout);
        let dropout = spec.dropout.map(DropoutMask::new);
        TileParams {
            batch_first: chunk.batches.0 as u32,
            batches: chunk.batches.1 as u32,
            head_first: chunk.heads.0 as u32,
            heads: chunk.heads.1 as u32,
            kv_head_first: (chunk.heads.0 / dims.group()) as u32,
            kv_heads: chunk.heads.1.div_ceil(dims.group()) as u32,
            group_heads: dims.group() as u32,
            q_heads: dims.q_heads as u32,
            queries: chunk.queries.1 as u32,
            keys: chunk.keys.1 as u32,
            head_dim: dims.head_dim as u32,
            value_dim: dims.value_dim as u32,
            tiles: shape.workgroups.tiles as u32,
            first_group: shape.first,
            end_group: shape.end,
            grid_width,
            lists: 0,
            runs: block_mask.runs,
            bits: block_mask.bits,
            query_rows: block_mask.query_rows,
            key_rows: block_mask.key_rows,
            function_at: block_mask.function_at,
            plane_batch: block_mask.plane_batch,
            plane_head: block_mask.plane_head,
            q_base: bases.q,
            q_row: q.row as u32,
            q_batch: q.batch as u32,
            q_head: q.head as u32,
            k_base: bases.k,
            k_row: k.row as u32,
            k_batch: k.batch as u32,
            k_head: k.head as u32,
            v_base: bases.v,
            v_row: v.row as u32,
            v_batch: v.batch as u32,
            v_head: v.head as u32,
            dout_base: bases.dout,
            dout_row: dout.row as u32,
            dout_batch: dout.batch as u32,
            dout_head: dout.head as u32,
            statistics_base: bases.statistics,
            statistics_row: statistics.row as u32,
            statistics_batch: statistics.batch as u32,
            statistics_head: statistics.head as u32,
            acc_base: bases.acc,
            acc_row: acc.row as u32,
            acc_batch: acc.batch as u32,
            acc_head: acc.head as u32,
            dv_base: bases.dv,
            dv_batch: dv.batch as u32,
            dv_head: dv.head as u32,
            bias_base: bases.bias,
            bias_row: bias.row as u32,
            bias_batch: bias.batch as u32,
            bias_head: bias.head as u32,
            bias_keys: spec.bias.map_or(1, |shape| shape[3]) as u32,
            bias_heads: shape.workgroups.heads as u32,
            dbias_base: bases.dbias,
            dbias_row: dbias.row as u32,
            dbias_batch: dbias.batch as u32,
            dbias_head: dbias.head as u32,
            has_bias: u32::from(spec.bias.is_some()),
            bias_first: u32::from(spec.bias_order == BiasOrder::BeforeSoftCap),
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

/// Workgroups of one launch, and its mode.
struct GridShape {
    workgroups: Workgroups,
    first: u32,
    end: u32,
    add: bool,
}
