//! The passes: each call is dispatched to the typed function of its folder.

use annulus_core::{
    BackwardInputs, BackwardMode, BackwardPass, Block, DType, Element, Error, ForwardPass,
    Gradients, Host, HostBuffer, HostView, HostViewMut, Inputs, KeyLists, LeafSums, Outputs,
    RangePairs, RankShard, Reduction, Result, RowSet, TangentInputs, TangentOutputs, TangentPass,
    Tick,
};
use half::{bf16, f16};

use crate::{
    backward::{self, calls},
    forward::{self, outputs::OutputRows, query_pass::ForwardQueryPass},
    gather, tangents,
    threads::team::Team,
    tile::input::{Acc, TileInput},
    workspace::{
        records,
        state::{BlockOrder, CpuWorkspace, PassState, TypedState, by_sums},
    },
};

/// Calls a function of the workspace's element type, or of `$dtype`, with its threads, its state
/// and the arguments.
macro_rules! by_dtype {
    ($workspace:expr => $($call:tt)+) => {{
        let dtype = $workspace.dtype;
        by_dtype!($workspace, dtype => $($call)+)
    }};
    ($workspace:expr, $dtype:expr => $($function:ident)::+($($argument:expr),*)) => {{
        let CpuWorkspace { team, state, .. } = &mut *$workspace;
        match ($dtype, state) {
            (DType::F64, TypedState::F64(state)) => {
                $($function)::+::<f64>(team, state, $($argument),*)
            }
            (DType::F32, TypedState::F32(state)) => {
                $($function)::+::<f32>(team, state, $($argument),*)
            }
            (DType::Bf16, TypedState::F32(state)) => {
                $($function)::+::<bf16>(team, state, $($argument),*)
            }
            (DType::F16, TypedState::F32(state)) => {
                $($function)::+::<f16>(team, state, $($argument),*)
            }
            _ => Err(Error::internal("a workspace with accumulators of another type")),
        }
    }};
}

/// Packs K and V of the local block, or notes that the pass reads them from the caller's tensors.
fn local_kv(
    workspace: &mut CpuWorkspace,
    inputs: &Inputs<HostView<'_>>,
    into: &mut HostBuffer,
    sent: &RowSet,
) -> Result<()> {
    if sent.is_empty() {
        return Ok(());
    }
    by_dtype!(workspace => records::pack(inputs, into, sent))
}

impl annulus_core::Workspace for CpuWorkspace {
    type Space = Host;
    type Forward<'p> = CpuForward<'p>;
    type Backward<'p> = CpuBackward<'p>;

    fn update(&mut self, shard: &RankShard) -> Result<()> {
        let threads = self.team.threads();
        by_sums!(&mut self.state, state => {
            if !state.update(shard) {
                **state = PassState::new(shard, state.geometry.token, threads, state.backward)?;
            }
        });
        Ok(())
    }

    fn check_lists(&self, _: &KeyLists, _: bool) -> Result<()> {
        Ok(())
    }

    fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        by_sums!(&self.state, state => {
            let has_bias = state.shard.key_lists.as_ref()?.bias().is_some() && state.backward;
            let mut sums: Vec<f64> = state.list_bias_gradient.iter().map(|s| s.to_f64()).collect();
            state.tile_list_bias.iter().for_each(|gradient| gradient.add_to(&mut sums));
            has_bias.then_some(sums)
        })
    }

    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }

    fn forward<'p>(
        &'p mut self,
        inputs: Inputs<HostView<'p>>,
        _: Tick<'_>,
    ) -> Result<CpuForward<'p>> {
        by_sums!(&mut self.state, state => forward::tiles::begin(&self.team, state));
        Ok(CpuForward { workspace: self, inputs, written: false })
    }

    fn backward<'p>(
        &'p mut self,
        inputs: BackwardInputs<HostView<'p>>,
        mode: BackwardMode,
        _: Tick<'_>,
    ) -> Result<CpuBackward<'p>> {
        if !by_sums!(&self.state, state => state.backward) {
            return Err(Error::internal("a backward pass in a workspace for forward only"));
        }
        by_dtype!(self => backward::begin::begin(&inputs, mode))?;
        Ok(CpuBackward { workspace: self, inputs, mode })
    }

    fn tangents<'p>(
        &'p mut self,
        inputs: TangentInputs<HostView<'p>>,
        list_bias: Option<&[f64]>,
        _: Tick<'_>,
    ) -> Result<Box<dyn TangentPass<Host> + 'p>> {
        let threads = self.team.threads();
        let is_double = inputs.dout.is_some();
        by_sums!(&mut self.state, state => {
            tangents::begin(state, threads, is_double, list_bias)
        })?;
        Ok(Box::new(CpuTangents { workspace: self, inputs }))
    }
}

/// A JVP or a double backward.
struct CpuTangents<'p> {
    workspace: &'p mut CpuWorkspace,
    inputs: TangentInputs<HostView<'p>>,
}

impl TangentPass<Host> for CpuTangents<'_> {
    fn local_kv(&mut self, into: &mut HostBuffer) -> Result<()> {
        by_dtype!(self.workspace => records::pack_tangents(&self.inputs, into))
    }

    fn attend(&mut self, kv: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        by_dtype!(self.workspace => tangents::jvp::attend(&self.inputs, kv, tick))
    }

    fn write_tangents(
        &mut self,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(self.workspace => tangents::finish::write_tangents(&self.inputs, outputs, tick))
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, Host>,
        dkv: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(self.workspace => tangents::gradients::attend_kv(&self.inputs, kv, dkv, tick))
    }

    fn reduce(
        &mut self,
        into: &mut HostBuffer,
        from: &HostBuffer,
        (): &(),
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<()> {
        let CpuWorkspace { team, state, .. } = &mut *self.workspace;
        by_sums!(state, state => {
            records::reduce_gradients(team, state, into, from, pairs, reduction)
        })
    }

    fn finish(
        &mut self,
        dkv: &HostBuffer,
        gradients: &mut Gradients<HostViewMut<'_>>,
        _: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(self.workspace => tangents::finish::write_gradients(&self.inputs, dkv, gradients))
    }
}

/// A forward pass.
pub struct CpuForward<'p> {
    workspace: &'p mut CpuWorkspace,
    inputs: Inputs<HostView<'p>>,
    /// True if the outputs are written.
    written: bool,
}

impl CpuForward<'_> {
    /// Returns an error after the last block, whose tasks need not keep the accumulators.
    fn check_not_written(&self) -> Result<()> {
        if self.written {
            return Err(Error::internal("a block of keys after the last one"));
        }
        Ok(())
    }
}

impl ForwardPass<Host> for CpuForward<'_> {
    /// Copies the keys and values `sent` only: the pass reads those of this rank from its inputs.
    fn local_kv(&mut self, into: &mut HostBuffer, sent: &RowSet) -> Result<()> {
        local_kv(self.workspace, &self.inputs, into, sent)
    }

    fn attend(&mut self, kv: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        self.check_not_written()?;
        by_dtype!(self.workspace => attend(&self.inputs, kv, None, tick)).map(drop)
    }

    fn attend_last(
        &mut self,
        kv: &Block<'_, Host>,
        outputs: &mut Outputs<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.check_not_written()?;
        let written = by_dtype!(self.workspace => attend(&self.inputs, kv, Some(outputs), tick));
        written.map(|written| self.written = written)
    }

    fn finish(self, outputs: &mut Outputs<HostViewMut<'_>>, tick: Tick<'_>) -> Result<()> {
        if self.written {
            return Ok(());
        }
        let results = self.workspace.results_dtype();
        by_dtype!(self.workspace, results => forward::outputs::finish(&self.inputs, outputs, tick))
    }
}

/// Attends to one block: updates softmax statistics and accumulators of all queries. In the
/// reproducible order leaf by leaf; otherwise by split-KV decode where the workspace has memory for
/// it, else by tiles.
///
/// With `outputs`, those of the pass whose last block it is, returns true if it has written them,
/// unless it was stopped.
fn attend<E: TileInput<Accumulator: TileInput<Accumulator = Acc<E>>>>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &Inputs<HostView<'_>>,
    block: &Block<'_, Host>,
    mut outputs: Option<&mut Outputs<HostViewMut<'_>>>,
    tick: Tick<'_>,
) -> Result<bool> {
    let (task_rows, task_order) = state.arrange_forward();
    let of_lists = outputs.as_deref_mut();
    if let Some(written) =
        gather::forward::attend::<E>(team, state, inputs, block, of_lists, &mut *tick)?
    {
        return Ok(written);
    }
    if outputs.is_none() && state.decode.is_none() {
        // more blocks may follow
        state.keep_queries()?;
    }
    state.update_query_tiles(team, block.rows)?;
    let PassState { shard, geometry, blocks, scratch, decode, arrivals, .. } = state;
    let PassState { query_tiles, attended, .. } = state;
    let mut pass =
        ForwardQueryPass::<E>::new(geometry, task_rows, shard, query_tiles, inputs, block)?;
    pass.is_only_block = !std::mem::replace(attended, true);
    let leaves = arrivals.arrive(shard, block.rows)?;
    if let Some(decode) = decode
        && decode.attend(&pass, team, scratch, blocks, &mut *tick)
    {
        return Ok(false);
    }
    // if tasks were long, rows of one head would be written apart from those of the next head,
    // with which they share pages and cache lines; partial results are not in the inputs' type
    let has_outputs = task_order == BlockOrder::Rows && !shard.spec.partial && leaves.is_none();
    let outputs = outputs.filter(|_| has_outputs).map(OutputRows::of).transpose()?;
    let has_outputs = outputs.is_some();
    pass.attend_tiles((team, scratch), blocks, task_rows, leaves, outputs, tick);
    Ok(has_outputs)
}

/// A backward pass.
pub struct CpuBackward<'p> {
    workspace: &'p mut CpuWorkspace,
    inputs: BackwardInputs<HostView<'p>>,
    mode: BackwardMode,
}

impl BackwardPass<Host> for CpuBackward<'_> {
    /// As [`CpuForward`].
    fn local_kv(&mut self, into: &mut HostBuffer, sent: &RowSet) -> Result<()> {
        local_kv(self.workspace, &self.inputs.forward, into, sent)
    }

    fn local_queries(&mut self, into: &mut HostBuffer) -> Result<()> {
        by_dtype!(self.workspace => records::pack_queries(&self.inputs, into))
    }

    /// One pass: computes the scores once for dQ, dK and dV. Two passes: computes them for each,
    /// as dK and dV of other ranks' queries are computed apart from dQ too.
    fn attend_kv(
        &mut self,
        kv: &Block<'_, Host>,
        dkv: Option<&mut HostBuffer>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let inputs = &self.inputs;
        match (self.mode, dkv) {
            (BackwardMode::OnePass, Some(dkv)) => {
                by_dtype!(self.workspace => calls::backward_fused(inputs, kv, dkv, tick))
            }
            (BackwardMode::OnePass, None) => {
                Err(Error::internal("dQ without dK and dV in a one-pass backward"))
            }
            (BackwardMode::TwoPass, dkv) => {
                by_dtype!(self.workspace => calls::backward_separate(inputs, kv, dkv, tick))
            }
        }
    }

    fn attend_queries(
        &mut self,
        queries: &Block<'_, Host>,
        dkv: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        let inputs = &self.inputs.forward;
        by_dtype!(self.workspace => calls::backward_dkv_from_queries(inputs, queries, dkv, tick))
    }

    fn reduce(
        &mut self,
        into: &mut HostBuffer,
        from: &HostBuffer,
        (): &(),
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<()> {
        let CpuWorkspace { team, state, .. } = &mut *self.workspace;
        by_sums!(state, state => {
            records::reduce_gradients(team, state, into, from, pairs, reduction)
        })
    }

    fn leaf_sums(&mut self, dkv: &HostBuffer, sums: &mut LeafSums, tick: Tick<'_>) -> Result<()> {
        let inputs = &self.inputs.forward;
        by_dtype!(self.workspace => backward::leaf_sums::leaf_sums(inputs, dkv, sums, tick))
    }

    fn finish(
        self,
        dkv: &HostBuffer,
        gradients: &mut Gradients<HostViewMut<'_>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        let inputs = &self.inputs.forward;
        by_dtype!(self.workspace => backward::finish::finish(inputs, dkv, gradients, tick))
    }
}
