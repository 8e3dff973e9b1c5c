//! Forward pass, by query tiles. Kernel: `forward.wgsl`. Epilogue: `finish.rs`.

use annulus_core::{Block, ForwardPass, Inputs, Outputs, Result, RowSet, Tick, View, ViewMut};

use crate::{
    finish::write_outputs,
    launch::Commands,
    memory::{GpuBuffer, Queued, WgpuSpace, check_inputs},
    operands::TileKernel,
    pass_context::{ForwardBuffers, ForwardContext, RankKernels},
    records::pack_kv,
};

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
