//! The smallest complete backend: attention pair by pair, in host memory.
//!
//! It is an example of the seam (`annulus_core::Backend`), and supports every feature but the
//! reproducible order. The four traits are here, the arithmetic is `kernel.rs`. Work is complete
//! when a call returns, so events are `()`.
//!
//! ```text
//! Backend        what it supports, blocks, workspaces
//! Workspace      the state of a plan: starts passes
//! ForwardPass    local_kv, attend…, finish
//! BackwardPass   local_kv, attend_kv…, local_queries, attend_queries…, reduce…, finish
//! ```

use std::ops::Range;

use annulus_core::{
    Backend, BackwardInputs, BackwardMode, BackwardPass, Block, Capabilities, Error, ForwardPass,
    Gradients, Host, HostBuffer, HostView, HostViewMut, Inputs, Outputs, Passes, RangePairs,
    RankShard, Reduction, Result, RowSet, Spec, Tick, Workspace,
};
use ndarray::Array4;

use super::kernel::State;

/// A backend in host memory that computes pair by pair in f64.
#[derive(Debug, Clone, Copy)]
pub struct Pairwise;

/// The state of a plan of [`Pairwise`].
pub struct PairwiseWorkspace(State);

/// A pass of [`Pairwise`].
pub struct PairwisePass<'p>(&'p mut State);

impl Backend for Pairwise {
    type Space = Host;
    type Workspace = PairwiseWorkspace;

    fn capabilities(&self, spec: &Spec) -> Result<Capabilities> {
        spec.check_complete("pairwise")?;
        Ok(Capabilities {
            name: "pairwise",
            numerics_id: "pairwise".into(),
            probs_dtype: None,
            // any: the kernel has no tiles
            kv_tile: 8,
            reproducible: false,
            out_residual: true,
            second_derivatives: false,
            bias_table: false,
            statistics: false,
        })
    }

    fn allocate(&self, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::zeroed(bytes)
    }

    fn write_block(
        &self,
        into: &mut HostBuffer,
        bytes: Range<u64>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        into.write(bytes, fill)
    }

    fn workspace(&self, shard: &RankShard, _: Passes) -> Result<PairwiseWorkspace> {
        Ok(PairwiseWorkspace(State::new(shard.clone())))
    }
}

impl Workspace for PairwiseWorkspace {
    type Space = Host;
    type Forward<'p> = PairwisePass<'p>;
    type Backward<'p> = PairwisePass<'p>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        self.0 = State::new(shard.clone());
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<HostView<'p>>,
        _: Tick<'_>,
    ) -> Result<PairwisePass<'p>> {
        self.0.begin(inputs.try_map(widened)?);
        Ok(PairwisePass(&mut self.0))
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<HostView<'p>>,
        _: BackwardMode,
        _: Tick<'_>,
    ) -> Result<PairwisePass<'p>> {
        self.0.begin_backward(inputs.try_map(widened)?);
        Ok(PairwisePass(&mut self.0))
    }
}

impl ForwardPass<Host> for PairwisePass<'_> {
    fn local_kv(&mut self, into: &mut HostBuffer, _: &RowSet) -> Result<()> {
        write(into, &self.0.packed_kv())
    }

    fn attend(&mut self, kv: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        self.0.attend(kv.rows, kv.buffer.bytes())
    }

    fn finish(self, outputs: &mut Outputs<HostViewMut<'_>>, tick: Tick<'_>) -> Result<()> {
        if tick().is_continue() {
            outputs.as_mut().zip(self.0.finish()).into_tensors().for_each(round);
        }
        Ok(())
    }
}

impl BackwardPass<Host> for PairwisePass<'_> {
    fn local_kv(&mut self, into: &mut HostBuffer, _: &RowSet) -> Result<()> {
        write(into, &self.0.packed_kv())
    }

    fn local_queries(&mut self, into: &mut HostBuffer) -> Result<()> {
        write(into, &self.0.packed_queries())
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, Host>,
        dkv: Option<&mut HostBuffer>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        self.0.attend_kv(kv.rows, kv.buffer.bytes())?;
        let Some(dkv) = dkv else { return Ok(()) };
        write(dkv, &self.0.packed_dkv(kv.rows, kv.buffer.bytes())?)
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, Host>,
        dkv: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_break() {
            return Ok(());
        }
        self.0.attend_queries(queries.rows, queries.buffer.bytes(), bytes_mut(dkv)?)
    }

    fn reduce(
        &mut self,
        into: &mut HostBuffer,
        from: &HostBuffer,
        (): &(),
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<()> {
        self.0.reduce(bytes_mut(into)?, from.bytes(), pairs, reduction)
    }

    fn finish(
        self,
        dkv: &HostBuffer,
        gradients: &mut Gradients<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        if tick().is_continue() {
            let computed = self.0.gradients(dkv.bytes())?;
            gradients.as_mut().zip(computed).into_tensors().for_each(round);
        }
        Ok(())
    }
}

/// Widens a caller's tensor to f64.
pub(crate) fn widened(view: HostView<'_>) -> Result<Array4<f64>> {
    Array4::from_shape_vec(view.shape(), view.widened()?)
        .map_err(|error| Error::internal(error.to_string()))
}

/// Rounds numbers and writes them to a caller's tensor.
fn round((into, numbers): (&mut HostViewMut<'_>, Array4<f64>)) {
    into.write_each(numbers.iter().copied());
}

/// Writes the first bytes of a block.
fn write(into: &mut HostBuffer, packed: &[u8]) -> Result<()> {
    let into = bytes_mut(into)?.get_mut(..packed.len());
    into.ok_or_else(|| Error::internal("a block that is too short"))?.copy_from_slice(packed);
    Ok(())
}

fn bytes_mut(buffer: &mut HostBuffer) -> Result<&mut [u8]> {
    buffer.bytes_mut().ok_or_else(|| Error::internal("a block to write has another owner"))
}
