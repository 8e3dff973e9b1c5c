//! JVP and double backward: the loops of the forward and of the one-pass backward, with the tangents
//! of keys and values beside them in every block.
//!
//! ```text
//! JVP                                   double backward
//! kv = pack(k, k̇, v, v̇)                 as JVP, along the cotangents of dq, dk, dv: the tangent
//! for each ring step:                   of out is ∂L/∂dout, that of lse is ∂L/∂dlse; then
//!   post: kv →, next kv ←              kv = pack(k, k̇, v, v̇)
//!   (m, l, acc, acċ, μ) += attend(kv)   for each ring step:
//!   wait for next kv                      as the backward pass in one pass (`one_pass.rs`), with
//! out, lse and their tangents             the tangents of dq, dk and dv in place of these
//! ```
//! The second circulation needs the tangents of lse and of ⟨dout, out⟩ of each query, which are sums
//! over all keys, hence the first.

use std::time::{Duration, Instant};

use annulus_core::{
    Backend, BackwardPass, Block, Error, Gradients, RangePairs, Reduction, Result, RowSet, Space,
    TangentInputs, TangentOutputs, TangentPass, Tick, View, ViewMut, Workspace,
};

use super::{
    Report, Ring,
    blocks::{Blocks, circulate},
    check,
    in_flight::InFlight,
    overlap,
    plan::{Agreed, GroupPace},
    program,
    ring_loop::OnePassCirculation,
    step_events::CirculationKind,
};

impl<B: Backend> Ring<B> {
    /// Computes out, lse and their tangents along the tangents of the inputs: a Jacobian-vector
    /// product, by forward-mode differentiation.
    ///
    /// `list_bias` is the tangent of the bias of this rank's key lists; `None` is 0.
    ///
    /// # Shapes
    /// [`TangentInputs`] without dout and dlse, and [`TangentOutputs`], with this rank's rows;
    /// `list_bias` `[listed pairs]`, as [`Ring::list_bias_gradient`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::forward`]; [`Error::InvalidArgument`] also if the plan was not made with
    /// [`super::RingOptions::second_derivatives`].
    pub fn jvp(
        &mut self,
        inputs: &TangentInputs<View<'_, B::Space>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        let checked = self.check_tangents(inputs, list_bias, outputs, None);
        self.call_named("jvp", self.tangent_bytes(false), checked, |ring| {
            ring.tangent_loop(inputs, list_bias, outputs, None)
        })
    }

    /// Computes the gradients of the gradients. The cotangents of (dq, dk, dv, dbias, dsinks) take
    /// the place of the tangents of (q, k, v, bias, sinks). `gradients` receives the gradients of
    /// (q, k, v, bias, sinks). The gradients of dout and dlse take the place of the tangents of out
    /// and lse.
    ///
    /// [`Ring::list_bias_gradient`] then has that of the bias of key lists, whose cotangent
    /// `list_bias` is.
    ///
    /// The gradients of sinks, and of a bias that is broadcast over queries, are summed over ranks
    /// as in [`Ring::backward`]; so their cotangents are equal on all ranks, as those tensors are.
    ///
    /// # Shapes
    /// [`TangentInputs`] with dout, [`TangentOutputs`] and [`Gradients`], with this rank's rows;
    /// `list_bias` as of [`Ring::jvp`].
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::jvp`] and [`Ring::backward`].
    pub fn double_backward(
        &mut self,
        inputs: &TangentInputs<View<'_, B::Space>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<ViewMut<'_, B::Space>>,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Report> {
        let checked = self.check_tangents(inputs, list_bias, outputs, Some(gradients));
        let bytes = self.tangent_bytes(true) + self.reduce_bytes();
        self.call_named("double_backward", bytes, checked, |ring| {
            let waited = ring.tangent_loop(inputs, list_bias, outputs, Some(&mut *gradients))?;
            Ok(waited + ring.reduce_gradients(gradients)?)
        })
    }

    fn check_tangents(
        &self,
        inputs: &TangentInputs<View<'_, B::Space>>,
        list_bias: Option<&[f64]>,
        outputs: &TangentOutputs<ViewMut<'_, B::Space>>,
        gradients: Option<&Gradients<ViewMut<'_, B::Space>>>,
    ) -> Result<()> {
        let Agreed { second_derivatives, backward, .. } = self.agreed;
        check::plan_of_tangents([second_derivatives, backward], gradients.is_some())?;
        self.check_list_bias_direction(list_bias)?;
        let gradients = gradients.map(|of| of.as_ref().map(B::Space::describe_mut));
        check::Shapes::of(&self.shard).tangents(
            &inputs.as_ref().map(B::Space::describe),
            &outputs.as_ref().map(B::Space::describe_mut),
            gradients.as_ref(),
        )
    }

    pub(crate) fn check_list_bias_direction(&self, direction: Option<&[f64]>) -> Result<()> {
        let Some(direction) = direction else { return Ok(()) };
        let lists = self.shard.key_lists.as_ref();
        let pairs = lists.and_then(|lists| lists.bias()).map_or(0, <[f64]>::len);
        if direction.len() == pairs {
            return Ok(());
        }
        let got = format!("{} numbers", direction.len());
        let want = format!("{pairs}, one for each listed pair that has a bias");
        Err(Error::invalid("direction of key_list_bias", got, want))
    }

    /// Returns the payload bytes that this rank sends in a JVP or, if `is_double`, in a double
    /// backward, without those of its sums over ranks.
    pub(crate) fn tangent_bytes(&self, is_double: bool) -> u64 {
        let Some(program) = &self.plan.tangents else { return 0 };
        let blocks = program::kv_bytes_sent(&program.steps);
        if is_double { 2 * blocks + program.gradient_bytes_sent() } else { blocks }
    }

    /// Runs a JVP or, with `gradients`, a double backward, within a call of all ranks. Returns the
    /// exposed communication.
    pub(crate) fn tangent_loop(
        &mut self,
        inputs: &TangentInputs<View<'_, B::Space>>,
        list_bias: Option<&[f64]>,
        outputs: &mut TangentOutputs<ViewMut<'_, B::Space>>,
        gradients: Option<&mut Gradients<ViewMut<'_, B::Space>>>,
    ) -> Result<Duration> {
        let first_tag = self.take_tags();
        let Self { agreed, workspace, transport, plan, buffers, watch, ring_index, ranks, .. } =
            self;
        let none = || Error::internal("the plan has no second derivatives");
        let program = plan.tangents.as_ref().ok_or_else(none)?;
        let start = Instant::now();
        let kind = CirculationKind::Tangents;
        let observer = plan.observer(watch, kind, start, agreed, *ring_index);
        let mut in_flight = InFlight::new(transport.as_mut(), first_tag, plan.lengths, observer);
        let inputs = inputs.as_ref().map(B::Space::reborrow);
        let mut pass = workspace.tangents(inputs, list_bias, &mut || in_flight.tick())?;
        in_flight.check()?;
        let pace = GroupPace::new(agreed, plan);
        let stock = &mut buffers.tangent_blocks;
        let pack = |kv: &mut _| pass.local_kv(kv);
        let blocks = Blocks::new(&program.steps, |step| &step.kv_in_parts, pace, stock, pack)?;
        let shards = &plan.shards.kv;
        circulate(shards, blocks, &mut in_flight, &mut buffers.rows, |_, kv, tick| {
            pass.attend(kv, tick)
        })?;
        pass.write_tangents(outputs, &mut || in_flight.tick())?;
        in_flight.check()?;
        let waited = in_flight.waited();
        let Some(gradients) = gradients else { return Ok(waited) };

        let second_tag = first_tag + overlap::tags(*ranks);
        let kind = CirculationKind::TangentGradients;
        let observer = plan.observer(watch, kind, start, agreed, *ring_index);
        let in_flight = InFlight::new(transport.as_mut(), second_tag, plan.lengths, observer);
        let no_gradients = || Error::internal("the plan has no gradient buffer");
        let mut local_dkv = buffers.local_dkv.take().ok_or_else(no_gradients)?;
        let circulation = OnePassCirculation {
            program,
            shards,
            ring_index: *ring_index,
            pace: pace.with_gradients(),
            blocks: stock,
            gradients: &mut buffers.gradients,
            rows: &mut buffers.rows,
        };
        let gradient_pass = TangentGradients(&mut *pass);
        let (gradient_pass, mut in_flight, dkv) =
            circulation.run(gradient_pass, in_flight, &mut local_dkv)?;
        gradient_pass.finish(dkv, gradients, &mut || in_flight.tick())?;
        in_flight.check()?;
        let waited = waited + in_flight.waited();
        buffers.local_dkv = Some(local_dkv);
        Ok(waited)
    }
}

/// The second circulation of a double backward, as the one-pass backward that the loop runs.
struct TangentGradients<'p, S: Space>(&'p mut (dyn TangentPass<S> + 'p));

impl<S: Space> BackwardPass<S> for TangentGradients<'_, S> {
    fn local_kv(&mut self, into: &mut S::Buffer, _: &RowSet) -> Result<S::Event> {
        self.0.local_kv(into)
    }

    fn local_queries(&mut self, _: &mut S::Buffer) -> Result<S::Event> {
        Err(no_queries())
    }

    fn attend_kv(
        &mut self,
        kv: &Block<'_, S>,
        dkv: Option<&mut S::Buffer>,
        tick: Tick<'_>,
    ) -> Result<S::Event> {
        let dkv =
            dkv.ok_or_else(|| Error::internal("a block without a buffer of its gradients"))?;
        self.0.attend_kv(kv, dkv, tick)
    }

    fn attend_queries(&mut self, _: &Block<'_, S>, _: &mut S::Buffer, _: Tick<'_>) -> Result<()> {
        Err(no_queries())
    }

    fn reduce(
        &mut self,
        into: &mut S::Buffer,
        from: &S::Buffer,
        ready: &S::Event,
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<S::Event> {
        self.0.reduce(into, from, ready, pairs, reduction)
    }

    fn finish(
        self,
        dkv: &S::Buffer,
        gradients: &mut Gradients<ViewMut<'_, S>>,
        tick: Tick<'_>,
    ) -> Result<()> {
        self.0.finish(dkv, gradients, tick)
    }
}

fn no_queries() -> Error {
    Error::internal("queries do not circulate in a double backward")
}
