//! Backward pass: prologue and order of the kernels. Kernel: `row_statistics.wgsl`. Epilogue:
//! `finish.rs`. dQ and dbias are computed by query tiles (`backward_queries.wgsl`,
//! `backward_bias.wgsl`), dK and dV by key tiles (`backward_keys.wgsl`).

use std::ops::ControlFlow;

use annulus_core::{
    BackwardInputs, BackwardPass, Block, Gradients, RangePairs, Reduction, Result, RowSet, Tick,
    View, ViewMut, Visibility,
};

use crate::{
    copy::{ElementStrides, RowWindow, bind_whole},
    finish::write_gradients,
    kernels::{KernelVariant, params::RowParams},
    launch::{BoundResource, Commands, ElementRange},
    memory::{GpuBuffer, Queued, Tensor, WgpuSpace, check_inputs, check_tensors},
    operands::{Operands, RowsOf, TileKernel, bias, dbias_operand, floats, records, tensor},
    pass_context::{BackwardBuffers, BackwardContext, RankKernels, bias_axes},
    records::{pack_kv, pack_queries, reduce_gradients},
    tiles::TilePass,
};

/// A backward pass in progress.
pub struct WgpuBackward<'p>(BackwardContext<'p>);

impl BackwardPass<WgpuSpace> for WgpuBackward<'_> {
    /// Packs for either kind of readers, as the forward pass.
    fn local_kv(&mut self, into: &mut GpuBuffer, _: &RowSet) -> Result<Queued> {
        pack_kv(self.0.kernels, &self.0.inputs.forward, into)
    }

    fn local_queries(&mut self, into: &mut GpuBuffer) -> Result<Queued> {
        pack_queries(&mut self.0, into)
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, WgpuSpace>,
        dkv: Option<&mut GpuBuffer>,
        tick: Tick<'_>,
    ) -> Result<Queued> {
        let flow = backward_dq(&mut self.0, kv, &mut *tick)?;
        if let Some(dkv) = dkv.filter(|_| flow.is_continue()) {
            backward_dkv(&mut self.0, kv, dkv, tick)?;
        }
        Ok(Queued)
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, WgpuSpace>,
        dkv: &mut GpuBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        backward_dkv_from_queries(&mut self.0, queries, dkv, tick)
    }

    fn reduce(
        &mut self,
        into: &mut GpuBuffer,
        from: &GpuBuffer,
        _: &Queued,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<Queued> {
        reduce_gradients(self.0.kernels, into, from, pairs, reduction)
    }

    fn finish(
        self,
        dkv: &GpuBuffer,
        gradients: &mut Gradients<ViewMut<'_, WgpuSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        write_gradients(self.0, dkv, gradients, tick)
    }
}

impl<'p> WgpuBackward<'p> {
    /// Computes the row statistics; sets dQ and dbias to 0.
    pub(crate) fn start(
        kernels: &'p mut RankKernels,
        state: &'p BackwardBuffers,
        inputs: BackwardInputs<View<'p, WgpuSpace>>,
    ) -> Result<Self> {
        let RankKernels { gpu, shard, tile, arena, .. } = &mut *kernels;
        check_inputs(gpu, &inputs.forward)?;
        check_tensors(
            gpu,
            [
                ("out", Some(inputs.out)),
                ("max", Some(inputs.max)),
                ("sum", inputs.sum),
                ("ties", inputs.ties),
                ("dout", Some(inputs.dout)),
                ("dlse", inputs.dlse),
            ],
        )?;
        let BackwardBuffers { dq, statistics, bias } = state;
        let dims = shard.spec.dims;
        let rows = shard.queries.len();
        let storage = tile.storage;
        let bytes = storage.bytes();
        let mut commands = Commands::new(gpu, arena);
        dq.clear(&mut commands);
        bias.iter().for_each(|bias| commands.clear(&bias.buffer));
        let layout = ElementStrides::dense(rows, dims.q_heads, dims.value_dim);
        let element_range = |window: &RowWindow| {
            layout.element_range(window, dims.q_heads as u64, dims.value_dim as u64, bytes)
        };
        let fits = |window: &RowWindow| {
            ElementRange::bound_bytes(element_range(window).count, bytes, gpu.alignment())
                <= gpu.max_binding_bytes()
        };
        let whole = |view: Option<&Tensor>| bind_whole(view.map(|view| &view.buffer));
        for window in RowWindow::cut(dims.batch as u64, rows as u64, fits) {
            let (out, out_base) = element_range(&window).bind(gpu, &inputs.out.buffer)?;
            let (dout, dout_base) = element_range(&window).bind(gpu, &inputs.dout.buffer)?;
            let bindings = vec![
                out,
                dout,
                BoundResource::whole(&inputs.max.buffer),
                whole(inputs.sum),
                whole(inputs.dlse),
                whole(inputs.ties),
                BoundResource::whole(&statistics.buffer),
            ];
            let count = window.batches.1 * window.rows.1 * dims.q_heads as u64;
            commands.launch(
                KernelVariant::RowStatistics(storage),
                count.div_ceil(64),
                bindings,
                |grid_width| RowParams {
                    count: count as u32,
                    grid_width,
                    rows: window.rows.1 as u32,
                    all_rows: rows as u32,
                    row_first: window.rows.0 as u32,
                    batch_first: window.batches.0 as u32,
                    heads: dims.q_heads as u32,
                    value_dim: dims.value_dim as u32,
                    out_base,
                    out_row: layout.row as u32,
                    out_batch: layout.batch as u32,
                    dout_base,
                    normalize: u32::from(shard.spec.normalize),
                    partial: u32::from(shard.spec.partial),
                    has_sum: u32::from(inputs.sum.is_some()),
                    has_dlse: u32::from(inputs.dlse.is_some()),
                    ..RowParams::default()
                },
            )?;
        }
        commands.submit()?;
        Ok(Self(BackwardContext { kernels, state, inputs }))
    }
}

/// Computes the local queries' part of dK and dV of a KV block, and writes it to `dkv`.
fn backward_dkv(
    pass: &mut BackwardContext<'_>,
    kv: &Block<'_, WgpuSpace>,
    dkv: &GpuBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, block_mask } = &mut **kernels;
    let BackwardBuffers { statistics, .. } = state;
    let spec = &shard.spec;
    let rows = shard.queries.len();
    let (record, gradient, bytes) =
        (spec.kv_row_layout(), spec.gradient_row_layout(), tile.storage.bytes());
    let of_block =
        |field| Some(records(Some(&kv.buffer.buffer), &record, field, bytes, RowsOf::Keys));
    let into = |field| Some(records(Some(&dkv.buffer), &gradient, field, 4, RowsOf::Keys));
    let operands = Operands {
        q: Some(tensor(inputs.forward.q, RowsOf::Queries)),
        k: of_block(0),
        v: of_block(1),
        dout: Some(tensor(inputs.dout, RowsOf::Queries)),
        statistics: Some(floats(&statistics.buffer, rows, spec.dims.q_heads, 4)),
        acc: into(0),
        dv: into(1),
        bias: spec
            .bias
            .zip(inputs.forward.bias)
            .map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
        dbias: None,
    };
    let visibility = shard.visibility(&shard.queries, kv.rows);
    TilePass {
        gpu,
        spec,
        tile: *tile,
        kind: TileKernel::Keys { from_records: false, add: false },
        visibility,
        operands,
        acc: None,
    }
    .run(arena, block_mask, tick)
    .map(drop)
}

/// Adds a query block's part of dK and dV of the local keys to `dkv`.
fn backward_dkv_from_queries(
    pass: &mut BackwardContext<'_>,
    queries: &Block<'_, WgpuSpace>,
    dkv: &GpuBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    let BackwardContext { kernels, inputs, .. } = pass;
    let RankKernels { gpu, shard, tile, arena, block_mask } = &mut **kernels;
    let spec = &shard.spec;
    let (record, gradient, bytes) =
        (spec.query_row_layout(), spec.gradient_row_layout(), tile.storage.bytes());
    let of_queries =
        |field| Some(records(Some(&queries.buffer.buffer), &record, field, bytes, RowsOf::Queries));
    let into = |field| Some(records(Some(&dkv.buffer), &gradient, field, 4, RowsOf::Keys));
    let operands = Operands {
        q: of_queries(0),
        k: Some(tensor(inputs.forward.k, RowsOf::Keys)),
        v: Some(tensor(inputs.forward.v, RowsOf::Keys)),
        dout: of_queries(1),
        statistics: of_queries(2),
        acc: into(0),
        dv: into(1),
        // the ring refuses a bias with a query axis here: it would need another rank's rows
        bias: spec
            .bias
            .zip(inputs.forward.bias)
            .map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, queries.rows.len())),
        dbias: None,
    };
    let visibility = Visibility {
        mask: spec.mask.as_ref(),
        attention_mask: None,
        queries: queries.rows,
        keys: &shard.keys,
    };
    TilePass {
        gpu,
        spec,
        tile: *tile,
        kind: TileKernel::Keys { from_records: true, add: true },
        visibility,
        operands,
        acc: None,
    }
    .run(arena, block_mask, tick)
    .map(drop)
}

/// Adds one KV block's contribution to dQ and dbias. Returns `Break` if the tick did.
fn backward_dq(
    pass: &mut BackwardContext<'_>,
    kv: &Block<'_, WgpuSpace>,
    tick: Tick<'_>,
) -> Result<ControlFlow<()>> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, block_mask } = &mut **kernels;
    let BackwardBuffers { dq, statistics, bias: dbias } = state;
    let spec = &shard.spec;
    let rows = shard.queries.len();
    let record = shard.spec.kv_row_layout();
    let bytes = tile.storage.bytes();
    let heads = spec.dims.q_heads;
    let of_block =
        |field| Some(records(Some(&kv.buffer.buffer), &record, field, bytes, RowsOf::Keys));
    let operands = Operands {
        q: Some(tensor(inputs.forward.q, RowsOf::Queries)),
        k: of_block(0),
        v: of_block(1),
        dout: Some(tensor(inputs.dout, RowsOf::Queries)),
        statistics: Some(floats(&statistics.buffer, rows, heads, 4)),
        acc: None,
        bias: spec
            .bias
            .zip(inputs.forward.bias)
            .map(|(shape, tensor)| bias(Some(&tensor.buffer), shape, rows)),
        dbias: spec
            .bias
            .zip(dbias.as_ref())
            .map(|(shape, acc)| dbias_operand(Some(&acc.buffer), shape, rows)),
        dv: None,
    };
    let visibility = shard.visibility(&shard.queries, kv.rows);
    let pass = TilePass {
        gpu,
        spec,
        tile: *tile,
        kind: TileKernel::Queries,
        visibility,
        operands,
        acc: Some(dq),
    };
    let flow = pass.run(arena, block_mask, &mut *tick)?;
    match spec.bias.filter(|_| flow.is_continue()) {
        Some(shape) => TilePass { kind: TileKernel::Bias(bias_axes(shape)), acc: None, ..pass }
            .run(arena, block_mask, tick),
        None => Ok(flow),
    }
}
