//! Wire records: packing of the local rows, and sums of gradient records.
//!
//! Forward pass, by query tiles. Kernel: `forward.wgsl`. Epilogue: `finish.rs`.
//!
//! Backward pass: prologue and order of the kernels. Kernel: `row_statistics.wgsl`. Epilogue:
//! `finish.rs`. dQ and dbias are computed by query tiles (`backward_queries.wgsl`,
//! `backward_bias.wgsl`), dK and dV by key tiles (`backward_keys.wgsl`).

use annulus_core::{
    BackwardInputs, BackwardPass, Block, ForwardPass, Gradients, Inputs, Outputs, RangePairs,
    Reduction, Result, RowLayout, RowSet, Spec, Tick, View, ViewMut, index,
};

use crate::{
    copy::{Copy, CopySide, ElementStrides, LinearCopy, RowWindow, bind_whole, launch_linear},
    device::Gpu,
    finish::{write_gradients, write_outputs},
    kernels::{CopyMode, KernelVariant, params::RowParams},
    launch::{BoundResource, Commands},
    memory::{GpuBuffer, Queued, Tensor, WgpuSpace, check_inputs, check_tensors},
    operands::{Operands, RowsOf, TileKernel, dbias_operand, records, tensor},
    pass_context::{
        BackwardBuffers, BackwardContext, ForwardBuffers, ForwardContext, RankKernels, bias_axes,
    },
};

/// Records the copy of a tensor into field `field` of records.
fn launch_field(
    gpu: &Gpu,
    commands: &mut Commands<'_>,
    tensor: &Tensor,
    record: &RowLayout,
    field: usize,
    into: &GpuBuffer,
) -> Result<()> {
    let [_, rows, heads, dim] = tensor.shape;
    let bytes = tensor.dtype.bytes() as u64;
    let from = CopySide::dense(&tensor.buffer, [rows, heads, dim], bytes);
    let into = CopySide::records(&into.buffer, record, field, bytes);
    let mode = CopyMode::Raw { half: bytes == 2 };
    Copy::new(into, tensor.shape, mode).launch(from, gpu, commands)
}

/// Writes K and V as records of [`Spec::kv_row_layout`].
pub(crate) fn pack_kv(
    kernels: &mut RankKernels,
    inputs: &Inputs<View<'_, WgpuSpace>>,
    into: &GpuBuffer,
) -> Result<Queued> {
    let RankKernels { gpu, shard, arena, .. } = kernels;
    let record = shard.spec.kv_row_layout();
    let mut commands = Commands::new(gpu, arena);
    launch_field(gpu, &mut commands, inputs.k, &record, 0, into)?;
    launch_field(gpu, &mut commands, inputs.v, &record, 1, into)?;
    commands.submit()?;
    Ok(Queued)
}

/// Writes Q, dO and row statistics as records of [`Spec::query_row_layout`].
pub(crate) fn pack_queries(pass: &mut BackwardContext<'_>, into: &GpuBuffer) -> Result<Queued> {
    let BackwardContext { kernels, state, inputs } = pass;
    let RankKernels { gpu, shard, tile, arena, .. } = &mut **kernels;
    let (record, rows, dims) =
        (shard.spec.query_row_layout(), shard.queries.len(), shard.spec.dims);
    let bytes = tile.storage.bytes();
    let mut commands = Commands::new(gpu, arena);
    launch_field(gpu, &mut commands, inputs.forward.q, &record, 0, into)?;
    launch_field(gpu, &mut commands, inputs.dout, &record, 1, into)?;
    // in records of 2-byte elements an f32 may straddle two words: copied by halves
    let numbers = Spec::ROW_STATISTICS * index(4 / bytes);
    let from = CopySide::dense(&state.statistics.buffer, [rows, dims.q_heads, numbers], bytes);
    let into = CopySide::records(&into.buffer, &record, 2, bytes);
    let mode = CopyMode::Raw { half: bytes == 2 };
    let shape = [dims.batch, rows, dims.q_heads, numbers];
    Copy::new(into, shape, mode).launch(from, gpu, &mut commands)?;
    commands.submit()?;
    Ok(Queued)
}

/// Copies or adds ranges of records of [`Spec::gradient_row_layout`].
pub(crate) fn reduce_gradients(
    kernels: &mut RankKernels,
    into: &GpuBuffer,
    from: &GpuBuffer,
    pairs: &RangePairs,
    reduction: Reduction,
) -> Result<Queued> {
    let RankKernels { gpu, shard, arena, .. } = kernels;
    let words = shard.spec.gradient_row_layout().bytes() / 4;
    let mode = match reduction {
        Reduction::Copy => CopyMode::Raw { half: false },
        Reduction::Add => CopyMode::Added,
    };
    let mut commands = Commands::new(gpu, arena);
    for (to, source) in pairs.iter().filter(|(to, _)| !to.is_empty()) {
        let line = LinearCopy {
            from: source.start * words,
            into: to.start * words,
            count: (to.end - to.start) * words,
        };
        launch_linear(gpu, &mut commands, &from.buffer, &into.buffer, line, 4, mode)?;
    }
    commands.submit()?;
    Ok(Queued)
}

/// A forward pass in progress.
pub struct WgpuForward<'p>(ForwardContext<'p>);

impl<'p> WgpuForward<'p> {
    /// Sets the softmax statistics to those of no key. The kernels then ignore the accumulator, so
    /// it is not cleared.
    pub(crate) fn start(
        kernels: &'p mut RankKernels,
        state: &'p ForwardBuffers,
        inputs: Inputs<View<'p, WgpuSpace>>,
    ) -> Result<Self> {
        check_inputs(&kernels.gpu, &inputs)?;
        let mut commands = Commands::new(&kernels.gpu, &mut kernels.arena);
        commands.clear(&state.softmax_statistics.buffer);
        commands.submit()?;
        Ok(Self(ForwardContext { kernels, state, inputs }))
    }
}

impl ForwardPass<WgpuSpace> for WgpuForward<'_> {
    /// Packs for either kind of readers: the kernels read keys and values from one binding, so not
    /// from two tensors.
    fn local_kv(&mut self, into: &mut GpuBuffer, _: &RowSet) -> Result<Queued> {
        pack_kv(self.0.kernels, &self.0.inputs, into)
    }

    fn attend(&mut self, kv: &Block<'_, WgpuSpace>, tick: Tick<'_>) -> Result<()> {
        let ForwardContext { kernels, state, inputs } = &mut self.0;
        let operands = kernels.operands(inputs, kv, &state.softmax_statistics);
        kernels.run(TileKernel::Forward, kv.rows, operands, Some(&state.acc), tick).map(drop)
    }

    /// Writes no outputs: `finish` is a kernel of its own.
    fn attend_last(
        &mut self,
        kv: &Block<'_, WgpuSpace>,
        _: &mut Outputs<ViewMut<'_, WgpuSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.attend(kv, tick)
    }

    fn finish(self, outputs: &mut Outputs<ViewMut<'_, WgpuSpace>>, tick: Tick<'_>) -> Result<()> {
        write_outputs(self.0, outputs, tick)
    }
}

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
        let BackwardContext { kernels, state, inputs } = &mut self.0;
        let BackwardBuffers { dq, statistics, bias } = state;
        let operands = Operands {
            dout: Some(tensor(inputs.dout, RowsOf::Queries)),
            ..kernels.operands(&inputs.forward, kv, statistics)
        };
        let of_dq = operands.clone();
        let mut flow = kernels.run(TileKernel::Queries, kv.rows, of_dq, Some(dq), &mut *tick)?;
        let bias = kernels.shard.spec.bias.zip(bias.as_ref());
        if let Some((shape, sums)) = bias.filter(|_| flow.is_continue()) {
            let rows = kernels.shard.queries.len();
            let dbias = Some(dbias_operand(Some(&sums.buffer), shape, rows));
            let of_dbias = Operands { dbias, ..operands.clone() };
            let kind = TileKernel::Bias(bias_axes(shape));
            flow = kernels.run(kind, kv.rows, of_dbias, None, &mut *tick)?;
        }
        if let Some(dkv) = dkv.filter(|_| flow.is_continue()) {
            let operands = with_gradients(operands, kernels, dkv);
            let kind = TileKernel::Keys { from_records: false };
            kernels.run(kind, kv.rows, operands, None, tick).map(drop)?;
        }
        Ok(Queued)
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, WgpuSpace>,
        dkv: &mut GpuBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        let BackwardContext { kernels, inputs, .. } = &mut self.0;
        let (record, bytes) = (kernels.shard.spec.query_row_layout(), kernels.tile.storage.bytes());
        let buffer = Some(&queries.buffer.buffer);
        let of_queries = |field| Some(records(buffer, &record, field, bytes, RowsOf::Queries));
        let operands = Operands {
            q: of_queries(0),
            k: Some(tensor(inputs.forward.k, RowsOf::Keys)),
            v: Some(tensor(inputs.forward.v, RowsOf::Keys)),
            dout: of_queries(1),
            statistics: of_queries(2),
            // the ring refuses a bias with a query axis here: it would need another rank's rows
            bias: kernels.bias(&inputs.forward, queries.rows.len()),
            ..Operands::default()
        };
        let operands = with_gradients(operands, kernels, dkv);
        let kind = TileKernel::Keys { from_records: true };
        kernels.run(kind, queries.rows, operands, None, tick).map(drop)
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
        let fits = |window: &RowWindow| element_range(window).fits(gpu);
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

/// Adds the records of dK and dV to the operands.
fn with_gradients<'a>(
    operands: Operands<'a>,
    kernels: &RankKernels,
    dkv: &'a GpuBuffer,
) -> Operands<'a> {
    let record = kernels.shard.spec.gradient_row_layout();
    let into = |field| Some(records(Some(&dkv.buffer), &record, field, 4, RowsOf::Keys));
    Operands { acc: into(0), dv: into(1), ..operands }
}
