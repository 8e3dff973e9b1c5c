//! Forward pass: `kernels/forward.cuh`, on tensor cores `kernels/forward_matrix.cuh`, on warpgroups
//! `kernels/forward_warpgroup.cuh`.
//!
//! Forward on warpgroups: `kernels/forward_warpgroup.cuh`, with tensor maps of K and V for TMA. On
//! matrix cores of AMD GPUs: `kernels/forward_matrix.cuh` with `kernels/matrix_amd.cuh`.

use annulus_core::{
    Block, Dims, ForwardPass, Inputs, Outputs, Result, RowSet, Spec, Tick, View, ViewMut,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event, TensorMap};

use crate::{
    arguments::{
        AttentionArguments, EMPTY_STATE, RowArguments, RowOutputs, TensorArgument, WRITE_OUTPUTS,
        WarpgroupAttention, by_head, is_tma_readable, tensor, tensor_mut, tma_boxes,
    },
    block_mask::to_u32,
    forward_tiles::packing_arguments,
    kernels::VariantKernels,
    pass_context::PassContext,
    records,
    state::ForwardState,
};

/// A forward pass in progress.
pub struct CudaForward<'p> {
    context: &'p mut PassContext,
    state: &'p ForwardState,
    inputs: Inputs<View<'p, CudaSpace>>,
    /// True if K and V are read from the inputs, because no other rank reads them.
    in_place: bool,
    /// True if no block has been attended to: the state has no contents.
    is_empty: bool,
    /// True if the outputs are written.
    written: bool,
}

impl<'p> CudaForward<'p> {
    /// Begins with O = 0, ℓ = 0, ties = 0, m = −∞, which is not written to memory: the first kernel
    /// starts from it.
    pub(crate) const fn begin(
        context: &'p mut PassContext,
        state: &'p ForwardState,
        inputs: Inputs<View<'p, CudaSpace>>,
    ) -> Self {
        Self { context, state, inputs, in_place: false, is_empty: true, written: false }
    }

    /// Updates the accumulator and the softmax statistics in one launch, or with split-KV decoding
    /// in two. With `outputs` writes them instead.
    fn attend_block(
        &mut self,
        kv: &Block<'_, CudaSpace>,
        outputs: Option<&Outputs<ViewMut<'_, CudaSpace>>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.written = false;
        if tick().is_break() {
            return Ok(());
        }
        let tiles = self.context.forward_tiles;
        let block_mask = self.context.mask_of_keys(kv.rows, tiles.tile, tiles.ranges)?;
        if block_mask.is_empty() {
            return Ok(());
        }
        self.context.wait_for(kv)?;
        let Self { context, state, inputs, in_place, .. } = self;
        let [k, v] = records::kv_operands(context, inputs, kv, *in_place);
        let spec = context.spec();
        let mut arguments =
            AttentionArguments { q: tensor(&inputs.q), k, v, ..context.common_arguments(inputs)? };
        if self.is_empty {
            arguments.flags |= EMPTY_STATE;
        }
        if let Some(outputs) = outputs {
            arguments.flags |= WRITE_OUTPUTS;
            arguments.out = tensor_mut(&outputs.out);
            arguments.of_rows = RowOutputs::new(outputs);
        }
        let ranges = block_mask.write_ranges_to(&mut arguments);
        (arguments.packed_heads, arguments.packed_reciprocal) = packing_arguments(tiles.packing);
        let Dims { batch, q_heads, .. } = spec.dims;
        let grid = [
            u64::from(block_mask.tiles()[0]) * ranges as u64,
            (q_heads / tiles.packing.heads()) as u64,
            batch as u64,
        ];
        if ranges > 1 {
            // the merge writes the outputs
            let mut of_range = arguments;
            of_range.flags &= !WRITE_OUTPUTS;
            of_range.set_state(state.partial_addresses(context, ranges));
            launch(context, &of_range, grid, block_mask.order())?;
            state.merge(context, ranges, &arguments)?;
        } else {
            arguments.set_state(state.addresses());
            launch(context, &arguments, grid, block_mask.order())?;
        }
        self.is_empty = false;
        self.written = outputs.is_some();
        self.context.record_use(&[kv.buffer]).map(|_| ())
    }
}

/// Launches the forward kernel of the pass. On warpgroups blocks fetch their tiles in an `order`
/// ([`crate::block_mask::BlockMask::order`]); else `grid` is that of all tiles.
fn launch(
    context: &PassContext,
    arguments: &AttentionArguments,
    grid: [u64; 3],
    order: u64,
) -> Result<()> {
    let PassContext { kernels, forward_tiles, .. } = context;
    if let Some(warpgroup) = kernels.warpgroup.as_ref().filter(|_| forward_tiles.on_warpgroups) {
        return launch_on_warpgroups(context, warpgroup, arguments, order);
    }
    let kernel = forward_tiles.kernels[usize::from(arguments.block_mask.splits > 1)];
    // SAFETY: the engine has validated the shape of every tensor.
    unsafe { kernels.of_passes().launch(&context.stream, kernel, grid, arguments) }
}

impl ForwardPass<CudaSpace> for CudaForward<'_> {
    /// Copies nothing if no other rank reads a record, and the kernels can read K and V from the
    /// caller's tensors.
    fn local_kv(&mut self, into: &mut CudaBuffer, sent: &RowSet) -> Result<Event> {
        let by_tma = self.context.forward_tiles.on_warpgroups;
        self.in_place = records::can_read_in_place(self.context, &self.inputs, sent, by_tma)?;
        if self.in_place {
            return self.context.stream.record();
        }
        records::pack_kv(self.context, &self.inputs, into)
    }

    fn attend(&mut self, kv: &Block<'_, CudaSpace>, tick: Tick<'_>) -> Result<()> {
        self.attend_block(kv, None, tick)
    }

    /// Writes the outputs, unless they are unnormalized or partial or there are sinks.
    fn attend_last(
        &mut self,
        kv: &Block<'_, CudaSpace>,
        outputs: &mut Outputs<ViewMut<'_, CudaSpace>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let spec = self.context.spec();
        let is_plain = spec.normalize && !spec.partial && spec.sinks.is_none();
        self.attend_block(kv, is_plain.then_some(&*outputs), tick)
    }

    fn finish(self, outputs: &mut Outputs<ViewMut<'_, CudaSpace>>, tick: Tick<'_>) -> Result<()> {
        let Self { context, state, inputs, is_empty, written, .. } = self;
        if written || tick().is_break() {
            return Ok(());
        }
        if is_empty {
            for zeroed in [&state.acc, &state.sum, &state.ties] {
                context.fill(zeroed, 0.0)?;
            }
            context.fill(&state.max, f64::NEG_INFINITY)?;
        }
        finish(context, state, &inputs, outputs)
    }
}

/// Rows of a box of outputs: those of a consumer, `Q_ROWS` of `kernels/warpgroup.cuh`.
const OUTPUT_ROWS: u32 = 64;

/// Attends to one block of keys, stored as records or [readable](is_tma_readable) in the caller's
/// tensors. Strides of records are multiples of 16 bytes: see [`crate::Variant::on_warpgroups`].
/// `order` is the address of [`crate::block_mask::BlockMask::order`].
fn launch_on_warpgroups(
    context: &PassContext,
    kernels: &VariantKernels,
    attention: &AttentionArguments,
    order: u64,
) -> Result<()> {
    let device = context.stream.device();
    let spec = context.spec();
    let [_, rows] = kernels.variant.tile();
    let rows = to_u32(rows)?;
    let AttentionArguments { queries, keys, q_heads, kv_heads, batches, .. } = *attention;
    let AttentionArguments { head_dim, value_dim, packed_heads, .. } = *attention;
    let kv_shape = [keys, kv_heads, batches];
    let out_shape = [queries, q_heads, batches];
    let stores_by_tma = attention.flags & WRITE_OUTPUTS != 0
        && packed_heads == 1
        && is_tma_readable(&attention.out, out_shape);
    let out_map = if stores_by_tma {
        tma_boxes(device, &attention.out, value_dim, out_shape, OUTPUT_ROWS)?
    } else {
        TensorMap::UNUSED
    };
    let groups = u64::from(q_heads / packed_heads) * u64::from(batches);
    let tiles = u64::from(attention.block_mask.lists) * groups;
    let arguments = WarpgroupAttention {
        k_map: tma_boxes(device, &attention.k, head_dim, kv_shape, rows)?,
        v_map: tma_boxes(device, &attention.v, value_dim, kv_shape, rows)?,
        out_map,
        attention: *attention,
        order,
        counter: context.tile_counter()?,
        tiles: to_u32(tiles as usize)?,
        section: section(attention, spec, device.l2_bytes() / 2, groups),
        stores_by_tma: stores_by_tma.into(),
        reserved: 0,
    };
    let name = kernels.variant.forward_on_warpgroups();
    let grid = [tiles.min(context.kernels.most_blocks as u64), 1, 1];
    // SAFETY: the engine has validated the shape of every tensor.
    unsafe { kernels.launch(&context.stream, name, grid, &arguments) }
}

/// Groups of packed heads in a section of the tile scheduler, of `groups` in all: those of as many
/// KV heads as have their keys and values in `most_bytes` together.
fn section(attention: &AttentionArguments, spec: &Spec, most_bytes: u64, groups: u64) -> u32 {
    let AttentionArguments { keys, head_dim, value_dim, q_heads, kv_heads, packed_heads, .. } =
        *attention;
    let dims = u64::from(head_dim) + u64::from(value_dim);
    let bytes = (u64::from(keys) * dims * spec.dtype.bytes() as u64).max(1);
    let of_kv_head = u64::from(q_heads / kv_heads / packed_heads);
    // at most the number of tiles, which is a u32
    ((most_bytes / bytes).max(1) * of_kv_head).min(groups) as u32
}

/// Rows per thread block of `finish_forward`: one per warp.
const FINISHED_ROWS: u64 = 8;

/// Describes the caller's sinks `[line, sink, 1, 1]` with lines as heads and sinks as rows.
pub(crate) fn sinks_of(inputs: &Inputs<View<'_, CudaSpace>>) -> TensorArgument {
    inputs.sinks.as_ref().map(|sinks| by_line(tensor(sinks))).unwrap_or_default()
}

/// Permutes the strides of `[line, sink, 1, 1]`: lines as heads, sinks as rows.
pub(crate) fn by_line(tensor: TensorArgument) -> TensorArgument {
    let [line, sink, ..] = tensor.strides;
    TensorArgument { strides: [0, sink, line, 0], ..tensor }
}

/// Adds the sinks, normalizes, rounds, and writes out and statistics: `finish_forward` of
/// `kernels/rows.cuh`.
fn finish(
    context: &PassContext,
    state: &ForwardState,
    inputs: &Inputs<View<'_, CudaSpace>>,
    outputs: &Outputs<ViewMut<'_, CudaSpace>>,
) -> Result<()> {
    let RowOutputs { lse, max, sum } = RowOutputs::new(outputs);
    let ties = outputs.ties.as_ref().map(|ties| by_head(tensor_mut(ties)));
    let arguments = RowArguments {
        out: tensor_mut(&outputs.out),
        lse,
        max,
        sum,
        ties: ties.unwrap_or_default(),
        sinks: sinks_of(inputs),
        acc: state.acc.address(),
        row_max: state.max.address(),
        row_sum: state.sum.address(),
        row_ties: state.ties.address(),
        ..context.row_arguments()?
    };
    let grid = [arguments.rows().div_ceil(FINISHED_ROWS), 1, 1];
    // SAFETY: the engine has validated the shape of every tensor.
    unsafe { context.launch("finish_forward", grid, &arguments) }
}
