//! Backward pass: prologue and end (`begin_backward` and `sink_gradient` of `kernels/rows.cuh`,
//! copies of the results), and the operands of each block.
//!
//! dK and dV: `kernels/backward.cuh`, on tensor cores `kernels/backward_keys_matrix.cuh`,
//! on warpgroups `kernels/backward_keys_warpgroup.cuh`.
//!
//! dQ from one block of keys: `kernels/backward.cuh`, on tensor cores
//! `kernels/backward_queries_matrix.cuh`, on warpgroups `kernels/backward_queries_warpgroup.cuh`.
//!
//! dbias from one block of keys: `kernels/bias_gradient.cuh`.

use std::sync::Arc;

use annulus_core::{
    BackwardInputs, BackwardPass, Block, Dims, Gradients, RangePairs, Reduction, Result, RowSet,
    Tick, View, ViewMut,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event};

use crate::{
    arguments::{
        self, ADD, AttentionArguments, RowArguments, TensorArgument, by_head, dense, field, tensor,
        tensor_mut,
    },
    backward_warpgroup::OnWarpgroups,
    block_mask::BlockMask,
    forward::{by_line, sinks_of},
    forward_tiles::RangeLimits,
    kernels::{MAX_BLOCKS, VariantKernels},
    pass_context::{PassContext, local_bias},
    records,
    state::BackwardState,
};

/// A backward pass in progress.
pub struct CudaBackward<'p> {
    context: &'p mut PassContext,
    state: &'p mut BackwardState,
    inputs: BackwardInputs<View<'p, CudaSpace>>,
    /// True if K and V are read from the inputs, because no other rank reads them.
    in_place: bool,
}

impl<'p> CudaBackward<'p> {
    /// Computes the row statistics; sets dQ and dbias to 0.
    pub(crate) fn begin(
        context: &'p mut PassContext,
        state: &'p mut BackwardState,
        inputs: BackwardInputs<View<'p, CudaSpace>>,
    ) -> Result<Self> {
        let rows = |view: &Option<View<'_, CudaSpace>>| {
            view.as_ref().map(|view| by_head(tensor(view))).unwrap_or_default()
        };
        let arguments = RowArguments {
            out: tensor(&inputs.out),
            dout: tensor(&inputs.dout),
            max: by_head(tensor(&inputs.max)),
            sum: rows(&inputs.sum),
            ties: rows(&inputs.ties),
            dlse: rows(&inputs.dlse),
            statistics: row_statistics(context, state),
            ..context.row_arguments()?
        };
        // about as many rows a block as its threads load at once, 64 of 128 dims in 16 bits
        let grid = [arguments.rows().div_ceil(64).min(MAX_BLOCKS), 1, 1];
        // SAFETY: the engine has validated the shape of every tensor.
        unsafe { context.launch("begin_backward", grid, &arguments)? };
        context.fill(&state.dq, 0.0)?;
        context.fill(&state.dbias, 0.0)?;
        Ok(Self { context, state, inputs, in_place: false })
    }

    /// Arguments of a block of keys, but for the lists of its block mask.
    fn kv_arguments(&self, kv: &Block<'_, CudaSpace>) -> Result<AttentionArguments> {
        let Self { context, state, inputs, in_place } = self;
        let [k, v] = records::kv_operands(context, &inputs.forward, kv, *in_place);
        Ok(AttentionArguments {
            q: tensor(&inputs.forward.q),
            dout: tensor(&inputs.dout),
            k,
            v,
            statistics: row_statistics(context, state),
            dq: state.dq.address(),
            dbias: state.dbias.address(),
            ..context.common_arguments(&inputs.forward)?
        })
    }

    /// Arguments of a block of queries, but for the lists of its block mask.
    fn query_arguments(&self, queries: &Block<'_, CudaSpace>) -> Result<AttentionArguments> {
        let Self { context, inputs, .. } = self;
        let record = context.spec().query_row_layout();
        let bytes = context.spec().dtype.bytes();
        let at = queries.buffer.address();
        Ok(AttentionArguments {
            q: field(at, &record, 0, bytes),
            dout: field(at, &record, 1, bytes),
            // in 2-byte units, because a record's statistics are only 2-byte aligned
            statistics: field(at, &record, 2, 2),
            k: tensor(&inputs.forward.k),
            v: tensor(&inputs.forward.v),
            ..context.common_arguments(&inputs.forward)?
        })
    }

    /// Prepares kernels on warpgroups, if given, for the queries of `arguments`.
    fn on_warpgroups(
        &mut self,
        kernels: Option<Arc<VariantKernels>>,
        arguments: &AttentionArguments,
    ) -> Result<Option<OnWarpgroups>> {
        let statistics = &mut self.state.statistics_tiles;
        let on = |kernels| OnWarpgroups::new(self.context, kernels, arguments, statistics);
        kernels.map(on).transpose()
    }
}

impl BackwardPass<CudaSpace> for CudaBackward<'_> {
    /// Copies nothing if no other rank reads a record, and the kernels can read K and V from the
    /// caller's tensors.
    fn local_kv(&mut self, into: &mut CudaBuffer, sent: &RowSet) -> Result<Event> {
        let Self { context, inputs, .. } = self;
        let by_tma = context.kernels.backward_warpgroup_for(context.queries()).is_some();
        self.in_place = records::can_read_in_place(context, &inputs.forward, sent, by_tma)?;
        if self.in_place {
            return self.context.stream.record();
        }
        records::pack_kv(self.context, &self.inputs.forward, into)
    }

    fn local_queries(&mut self, into: &mut CudaBuffer) -> Result<Event> {
        let statistics = row_statistics(self.context, self.state);
        records::pack_queries(self.context, &self.inputs, statistics, into)
    }

    /// Launches a kernel for dQ, one for dbias if there is a bias, and one for dK and dV.
    fn attend_kv(
        &mut self,
        kv: &Block<'_, CudaSpace>,
        dkv: Option<&mut CudaBuffer>,
        tick: Tick<'_>,
    ) -> Result<Event> {
        if tick().is_break() {
            return self.context.stream.record();
        }
        let Self { context, .. } = self;
        let tile = context.kernels.general.variant.tile();
        let warpgroups = context.kernels.backward_warpgroup_for(context.queries());
        // masks are uploaded before the stream waits for the block
        let own_tile = match &warpgroups {
            Some(kernels) => kernels.variant.tile(),
            None => match &context.kernels.matrix {
                Some(kernels) => kernels.variant.queries_matrix_tile(),
                None => tile,
            },
        };
        let block_mask = context.mask_of_keys(kv.rows, own_tile, RangeLimits::NONE)?;
        let mut arguments = self.kv_arguments(kv)?;
        block_mask.write_to(&mut arguments, false);
        let keys_on_warpgroups =
            warpgroups.is_some() && OnWarpgroups::can_stream_queries(&arguments);
        let has_bias = self.context.spec().bias.is_some();
        let general_mask = if !keys_on_warpgroups || has_bias {
            self.context.mask_of_keys(kv.rows, tile, RangeLimits::NONE)?
        } else {
            Arc::clone(&block_mask)
        };
        self.context.wait_for(kv)?;
        let warpgroups = self.on_warpgroups(warpgroups, &arguments)?;
        let Self { context, .. } = self;
        if !block_mask.is_empty() {
            launch_dq(context, &mut arguments, &block_mask, warpgroups.as_ref())?;
            launch_dbias(context, &mut arguments, &general_mask)?;
        }
        let Some(dkv) = dkv.filter(|_| tick().is_continue()) else {
            return context.record_use(&[kv.buffer]);
        };
        dkv.wait_on(&context.stream)?;
        // without local queries the kernel still writes zeros
        let on = warpgroups.as_ref().filter(|_| keys_on_warpgroups);
        let block_mask = if on.is_some() { &block_mask } else { &general_mask };
        launch_dkv(context, &mut arguments, block_mask, dkv, on)?;
        context.record_use(&[kv.buffer, dkv])
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, CudaSpace>,
        dkv: &mut CudaBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let kernels = &self.context.kernels;
        let warpgroups = kernels.backward_warpgroup_for(queries.rows.len());
        let tile = warpgroups.as_ref().unwrap_or(&kernels.general).variant.tile();
        let block_mask = self.context.mask_of_queries(queries.rows, tile)?;
        if block_mask.is_empty() {
            return Ok(());
        }
        self.context.wait_for(queries)?;
        let mut arguments = self.query_arguments(queries)?;
        arguments.flags |= ADD;
        block_mask.write_to(&mut arguments, true);
        let on = self.on_warpgroups(warpgroups, &arguments)?;
        launch_dkv(self.context, &mut arguments, &block_mask, dkv, on.as_ref())?;
        self.context.record_use(&[queries.buffer, dkv]).map(|_| ())
    }

    fn reduce(
        &mut self,
        into: &mut CudaBuffer,
        from: &CudaBuffer,
        ready: &Event,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<Event> {
        let ranges = &mut self.state.ranges;
        records::reduce(self.context, ranges, into, from, ready, pairs, reduction)
    }

    /// Rounds and writes the gradients; a partial dQ is not rounded.
    fn finish(
        self,
        dkv: &CudaBuffer,
        gradients: &mut Gradients<ViewMut<'_, CudaSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let Self { context, state, inputs, .. } = self;
        let spec = context.spec();
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let queries = context.queries();
        let keys = context.shard.keys.len();
        let round = |from: TensorArgument, to: TensorArgument, shape: [usize; 4]| {
            records::copy(context, "round_sums", from, to, shape)
        };
        let dq = dense(state.dq.address(), queries, q_heads, head_dim);
        let dq_kernel = if spec.partial { "copy_sums" } else { "round_sums" };
        let shape = [batch, queries, q_heads, head_dim];
        records::copy(context, dq_kernel, dq, tensor_mut(&gradients.dq), shape)?;
        let record = spec.gradient_row_layout();
        let bytes = context.sums().bytes();
        let [dk, dv] = [0, 1].map(|index| field(dkv.address(), &record, index, bytes));
        round(dk, tensor_mut(&gradients.dk), [batch, keys, kv_heads, head_dim])?;
        round(dv, tensor_mut(&gradients.dv), [batch, keys, kv_heads, value_dim])?;
        if let (Some(view), Some(shape)) = (&gradients.dbias, local_bias(&context.shard)) {
            let [_, heads, rows, keys] = shape;
            let from = dense(state.dbias.address(), heads, rows, keys);
            records::copy(context, "copy_sums", from, tensor_mut(view), shape)?;
        }
        if let Some(view) = &gradients.dsinks {
            let arguments = RowArguments {
                sinks: sinks_of(&inputs.forward),
                dsinks: by_line(tensor_mut(view)),
                statistics: row_statistics(context, state),
                ..context.row_arguments()?
            };
            let grid = [u64::from(arguments.sinks_count), u64::from(arguments.sinks_lines), 1];
            // SAFETY: the engine has validated the shape of every tensor.
            unsafe { context.launch("sink_gradient", grid, &arguments)? };
        }
        context.record_use(&[dkv]).map(|_| ())
    }
}

/// Describes the statistics of this rank's rows.
fn row_statistics(context: &PassContext, state: &BackwardState) -> TensorArgument {
    let at = state.statistics.address();
    arguments::row_statistics(at, context.queries(), &context.spec().dims, context.sums())
}

/// Computes dK and dV of the block's keys from its queries, and writes them to gradient records, or
/// adds them with [`crate::arguments::ADD`]. The tiles of the block mask are those of the warpgroup
/// kernels, if given, else of the general ones.
fn launch_dkv(
    context: &PassContext,
    arguments: &mut AttentionArguments,
    block_mask: &BlockMask,
    records: &CudaBuffer,
    warpgroups: Option<&OnWarpgroups>,
) -> Result<()> {
    let spec = context.spec();
    block_mask.write_to(arguments, true);
    let record = spec.gradient_row_layout();
    let bytes = context.sums().bytes();
    [arguments.dk, arguments.dv] =
        [0, 1].map(|index| field(records.address(), &record, index, bytes));
    let Dims { batch, kv_heads, .. } = spec.dims;
    let mut grid = [u64::from(block_mask.tiles()[1]), kv_heads as u64, batch as u64];
    if let Some(warpgroups) = warpgroups {
        return warpgroups.launch(context, arguments, grid, true);
    }
    let kernels = context.kernels.of_passes();
    let kernel = if context.kernels.matrix.is_some() {
        grid[0] *= (kernels.variant.tile()[1] / kernels.variant.keys_matrix_rows()) as u64;
        "backward_keys_matrix"
    } else {
        "backward_keys"
    };
    // SAFETY: the engine has validated the shape of every tensor.
    unsafe { kernels.launch(&context.stream, kernel, grid, arguments) }
}

/// Adds the block's contribution to dQ of this rank's queries. The tiles of the block mask are
/// those of the warpgroup kernels, if given, else of the general ones.
fn launch_dq(
    context: &PassContext,
    arguments: &mut AttentionArguments,
    block_mask: &BlockMask,
    warpgroups: Option<&OnWarpgroups>,
) -> Result<()> {
    block_mask.write_to(arguments, false);
    let Dims { batch, q_heads, .. } = context.spec().dims;
    let grid = [u64::from(block_mask.tiles()[0]), q_heads as u64, batch as u64];
    if let Some(warpgroups) = warpgroups {
        return warpgroups.launch(context, arguments, grid, false);
    }
    let on_matrices = context.kernels.matrix.is_some();
    let kernel = if on_matrices { "backward_queries_matrix" } else { "backward_queries" };
    // SAFETY: the engine has validated the shape of every tensor.
    unsafe { context.kernels.of_passes().launch(&context.stream, kernel, grid, arguments) }
}

/// Adds the block's contribution to dbias, if there is a bias.
fn launch_dbias(
    context: &PassContext,
    arguments: &mut AttentionArguments,
    block_mask: &BlockMask,
) -> Result<()> {
    let Some([batches, heads, rows, keys]) = local_bias(&context.shard) else { return Ok(()) };
    block_mask.write_to(arguments, false);
    let [query_tiles, key_tiles] = block_mask.tiles();
    let tiles = |shared: bool, tiles: u32| if shared { 1 } else { u64::from(tiles) };
    // as in the kernel: an axis of one row is one tile, broadcast or not
    let grid =
        [tiles(rows == 1, query_tiles), tiles(keys == 1, key_tiles), (batches * heads) as u64];
    // SAFETY: the engine has validated the shape of every tensor.
    unsafe { context.launch("bias_gradient", grid, arguments) }
}
