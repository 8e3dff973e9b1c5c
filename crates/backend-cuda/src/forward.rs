//! Forward pass: `kernels/forward.cuh`, on tensor cores `kernels/forward_matrix.cuh`, on warpgroups
//! `kernels/forward_warpgroup.cuh`.

use annulus_core::{
    Block, ForwardPass, Inputs, Outputs, Readers, Result, Rows, Spec, Tick, Visibility,
};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event};

use crate::{
    arguments::{field, tensor},
    finish, forward_warpgroup,
    gqa_packing::GqaPacking,
    kernels::THREADS,
    pass_context::PassContext,
    records,
    state::ForwardState,
};

/// A forward pass in progress.
pub struct CudaForward<'p> {
    context: &'p mut PassContext,
    state: &'p ForwardState,
    inputs: Inputs<'p, CudaSpace>,
}

impl<'p> CudaForward<'p> {
    /// Initializes the accumulator and the softmax statistics: O = 0, ℓ = 0, ties = 0, m = −∞.
    pub(crate) fn begin(
        context: &'p mut PassContext,
        state: &'p ForwardState,
        inputs: Inputs<'p, CudaSpace>,
    ) -> Result<Self> {
        for zeroed in [&state.acc, &state.sum, &state.ties] {
            context.fill(zeroed, 0.0)?;
        }
        context.fill(&state.max, f64::NEG_INFINITY)?;
        Ok(Self { context, state, inputs })
    }
}

impl ForwardPass<CudaSpace> for CudaForward<'_> {
    fn local_kv(&mut self, into: &mut CudaBuffer, _: Readers) -> Result<Event> {
        records::pack_kv(self.context, &self.inputs, into)
    }

    /// Updates the accumulator and the softmax statistics in one launch.
    fn attend(&mut self, kv: &Block<'_, CudaSpace>, tick: Tick<'_>) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        let Self { context, state, inputs } = self;
        let warpgroup = context.kernels.warpgroup_for(context.spec(), context.queries());
        let on_warpgroups = warpgroup.is_some();
        let [rows, keys] =
            warpgroup.map_or(context.kernels.variant, |warpgroup| warpgroup.variant).tile();
        let packing =
            if on_warpgroups { GqaPacking::none(rows) } else { packing(context, kv.rows, rows) };
        let block_mask = context.mask_of_keys(kv.rows, [packing.queries(), keys])?;
        if block_mask.is_empty() {
            return Ok(());
        }
        context.wait_for(kv)?;
        let spec = context.spec();
        let record = spec.kv_row_layout();
        let bytes = spec.dtype.bytes();
        let mut arguments = context.common_arguments(inputs)?;
        block_mask.write_to(&mut arguments, false);
        arguments.q = tensor(&inputs.q);
        arguments.k = field(kv.buffer.address(), &record, 0, bytes);
        arguments.v = field(kv.buffer.address(), &record, 1, bytes);
        arguments.acc = state.acc.address();
        arguments.max = state.max.address();
        arguments.sum = state.sum.address();
        arguments.ties = state.ties.address();
        (arguments.packed_heads, arguments.packed_reciprocal) = packing.kernel_arguments();
        let grid = [
            u64::from(block_mask.tiles()[0]),
            (spec.dims.q_heads / packing.heads()) as u64,
            spec.dims.batch as u64,
        ];
        let kernels = &context.kernels;
        if let Some(warpgroup) = kernels.warpgroup.as_ref().filter(|_| on_warpgroups) {
            forward_warpgroup::launch(&context.stream, warpgroup, &arguments, spec, grid)?;
        } else {
            let matrix = kernels.matrix_for(spec);
            let kernel = matrix.map_or(&kernels.forward, |matrix| &matrix.forward);
            // SAFETY: the engine has validated every tensor's shape; memory is freed only after
            // queued work.
            unsafe { kernel.launch(&context.stream, grid, THREADS, &arguments)? };
        }
        context.record_use(&[kv.buffer]).map(|_| ())
    }

    /// Writes no outputs: `finish` is a kernel of its own.
    fn attend_last(
        &mut self,
        kv: &Block<'_, CudaSpace>,
        _: &mut Outputs<'_, CudaSpace>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.attend(kv, tick)
    }

    fn finish(self, outputs: &mut Outputs<'_, CudaSpace>) -> Result<()> {
        finish::finish(self.context, self.state, &self.inputs, outputs)
    }
}

/// Chooses the number of heads per tile. One, except for `mma.sync` kernels without a per-head
/// mask: a packed tile has one list of key tiles for all of its heads.
fn packing(context: &PassContext, keys: &Rows, rows: usize) -> GqaPacking {
    let PassContext { kernels, shard, .. } = context;
    let Spec { dims, mask, .. } = &*shard.spec;
    let visibility = Visibility {
        mask: mask.as_ref(),
        attention_mask: shard.attention_mask.as_deref(),
        queries: &shard.queries,
        keys,
    };
    if kernels.matrix_for(&shard.spec).is_some() && !visibility.per_head() {
        GqaPacking::of(shard.queries.len(), dims.q_heads / dims.kv_heads, rows)
    } else {
        GqaPacking::none(rows)
    }
}
