//! The passes of the ring of a member: the tensors of its group and heads, and the caller's where
//! they are not exchanged.
//!
//! Gradients of which every rank has all heads are dsinks, and dbias without a query axis. Each is
//! a sum over all ranks, to which a rank adds zeros for the heads that it does not have
//! (`ring/reduce.rs`: few numbers are gathered whole, of more each rank sums a slice). With one key
//! column the ring has summed over the groups, so only the first group contributes. With several,
//! all ranks have terms.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, Gradients, HostTensors, HostView, HostViewMut, Inputs, MessageBalance,
    Order, Outputs, Result, Spec, TangentInputs, TangentOutputs,
};

use super::{
    HeadsRing,
    shard_tensors::{PassTensor, ShardTensors, no_tensor, views, views_mut},
};
use crate::ring::{
    RingOptions,
    reduce::{AllReduce, bias_is_shared, shared_bias_numbers, sink_numbers},
    slices::{SliceExchange, Slices, Slicing},
};

/// Axis of the heads of a bias tensor.
const BIAS_HEADS: usize = 1;
/// Axis of the heads of sinks.
const SINK_HEADS: usize = 0;

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Runs the forward pass of the ring of this rank's heads and key column.
    pub(super) fn ring_forward(
        &mut self,
        inputs: &Inputs<HostView<'_>>,
        wants_residual: bool,
        start: Instant,
    ) -> Result<Duration> {
        let q_heads = self.grid.q_heads(self.exchange.member);
        let has_sinks = self.ring.spec().sinks.is_some();
        let own = views(&self.tensors.inputs)?;
        let own = |name| own.get(&name).copied();
        let of_member =
            of_member(own, inputs.as_ref().map(HostView::reborrow), has_sinks, &q_heads)?;
        let mut views = views_mut(&mut self.tensors.results)?;
        let mut take = |name| views.remove(&name);
        let mut results = Outputs {
            out: take(PassTensor::Out).ok_or_else(no_tensor)?,
            lse: take(PassTensor::Lse).ok_or_else(no_tensor)?,
            max: take(PassTensor::Max),
            sum: take(PassTensor::Sum),
            ties: take(PassTensor::Ties),
            out_residual: take(PassTensor::OutResidual).filter(|_| wants_residual),
            statistics: take(PassTensor::Statistics),
            // of the whole plan: computed after the exchange
            head_statistics: None,
        };
        self.ring_began.store(nanoseconds(start), Ordering::Relaxed);
        self.ring.forward_loop(&of_member, &mut results)
    }

    /// Runs the backward pass of the ring of this rank's heads and key column.
    pub(super) fn ring_backward(
        &mut self,
        forward: &Inputs<HostView<'_>>,
        has_residual: bool,
        gradients: &mut Gradients<HostViewMut<'_>>,
        start: Instant,
    ) -> Result<Duration> {
        let q_heads = self.grid.q_heads(self.exchange.member);
        let has_sinks = self.ring.spec().sinks.is_some();
        let own = views(&self.tensors.inputs)?;
        let results = views(&self.tensors.results)?;
        let given = |name| own.get(&name).or(results.get(&name)).copied();
        let callers = forward.as_ref().map(HostView::reborrow);
        let of_member = BackwardInputs {
            forward: of_member(given, callers, has_sinks, &q_heads)?,
            out: given(PassTensor::Out).ok_or_else(no_tensor)?,
            max: given(PassTensor::Max).ok_or_else(no_tensor)?,
            sum: given(PassTensor::Sum),
            ties: given(PassTensor::Ties),
            dout: given(PassTensor::Dout).ok_or_else(no_tensor)?,
            dlse: given(PassTensor::Dlse),
            out_residual: given(PassTensor::OutResidual).filter(|_| has_residual),
        };
        let own = views_mut(&mut self.tensors.gradients)?;
        let mut results = gradients_of_member(own, gradients, has_sinks, &q_heads)?;
        self.ring_began.store(nanoseconds(start), Ordering::Relaxed);
        self.ring.compute_gradients(&of_member, &mut results)
    }

    /// Runs a JVP or, with `gradients`, a double backward of the ring of this rank's heads.
    pub(super) fn ring_tangents(
        &mut self,
        inputs: &TangentInputs<HostView<'_>>,
        gradients: Option<&mut Gradients<HostViewMut<'_>>>,
        start: Instant,
    ) -> Result<Duration> {
        let q_heads = self.grid.q_heads(self.exchange.member);
        let ShardTensors { inputs: given, results, gradients: sums, .. } = &mut self.tensors;
        let given = views(given)?;
        let own = |name| given.get(&name).copied();
        let callers = inputs.as_ref().map(HostView::reborrow);
        let is_double = gradients.is_some();
        let of_member = TangentInputs {
            primal: of_member(own, callers.primal, true, &q_heads)?,
            tangent: of_member(|name| own(name.tangent()), callers.tangent, true, &q_heads)?,
            dout: own(PassTensor::Dout).filter(|_| is_double),
            dlse: own(PassTensor::Dlse).filter(|_| is_double),
        };
        let mut results = views_mut(results)?;
        let mut take = |name| results.remove(&name);
        let mut outputs = TangentOutputs {
            out_tangent: take(PassTensor::OutTangent).ok_or_else(no_tensor)?,
            lse_tangent: take(PassTensor::LseTangent).ok_or_else(no_tensor)?,
            out: take(PassTensor::Out).filter(|_| !is_double),
            lse: take(PassTensor::Lse).filter(|_| !is_double),
        };
        self.ring_began.store(nanoseconds(start), Ordering::Relaxed);
        let Some(gradients) = gradients else {
            return self.ring.tangent_loop(&of_member, None, &mut outputs, None);
        };
        let own = views_mut(sums)?;
        let mut gradients = gradients_of_member(own, gradients, true, &q_heads)?;
        let of_loop = Some(&mut gradients);
        let waited = self.ring.tangent_loop(&of_member, None, &mut outputs, of_loop)?;
        Ok(waited + self.ring.reduce_gradients(&mut gradients)?)
    }
}

/// Returns the gradients of a member: those that are exchanged, `own`, and the caller's.
fn gradients_of_member<'a>(
    mut own: BTreeMap<PassTensor, HostViewMut<'a>>,
    callers: &'a mut Gradients<HostViewMut<'_>>,
    has_sinks: bool,
    q_heads: &Range<usize>,
) -> Result<Gradients<HostViewMut<'a>>> {
    let mut take = |name| own.remove(&name);
    let Gradients { dk, dv, dbias, dsinks, .. } = callers;
    Ok(Gradients {
        dq: take(PassTensor::Dq).ok_or_else(no_tensor)?,
        dk: take(PassTensor::Dk).unwrap_or_else(|| dk.reborrow()),
        dv: take(PassTensor::Dv).unwrap_or_else(|| dv.reborrow()),
        dbias: take(PassTensor::Dbias).or_else(|| {
            let dbias = dbias.as_mut()?;
            // the terms of other heads, if the caller sums over ranks
            dbias.fill_zero();
            Some(own_heads_mut(dbias.reborrow(), BIAS_HEADS, q_heads))
        }),
        dsinks: dsinks.as_mut().and_then(|dsinks| {
            dsinks.fill_zero();
            has_sinks.then(|| own_heads_mut(dsinks.reborrow(), SINK_HEADS, q_heads))
        }),
    })
}

/// Returns the inputs of a member: those that are exchanged, `own`, and the caller's; sinks only if
/// they are scores of its key column.
fn of_member<'a>(
    own: impl Fn(PassTensor) -> Option<HostView<'a>>,
    callers: Inputs<HostView<'a>>,
    has_sinks: bool,
    q_heads: &Range<usize>,
) -> Result<Inputs<HostView<'a>>> {
    let sinks = callers.sinks.filter(|_| has_sinks);
    Ok(Inputs {
        q: own(PassTensor::Q).ok_or_else(no_tensor)?,
        k: own(PassTensor::K).unwrap_or(callers.k),
        v: own(PassTensor::V).unwrap_or(callers.v),
        bias: own(PassTensor::Bias)
            .or_else(|| callers.bias.map(|bias| own_heads(bias, BIAS_HEADS, q_heads))),
        sinks: sinks.map(|sinks| own_heads(sinks, SINK_HEADS, q_heads)),
    })
}

/// Returns the own heads of a tensor; all of it if heads share it.
fn own_heads<'a>(view: HostView<'a>, axis: usize, heads: &Range<usize>) -> HostView<'a> {
    if view.shape()[axis] == 1 { view } else { view.slice(axis, heads.clone()) }
}

/// As [`own_heads`], for writing.
fn own_heads_mut<'a>(view: HostViewMut<'a>, axis: usize, heads: &Range<usize>) -> HostViewMut<'a> {
    if view.shape()[axis] == 1 { view } else { view.slice(axis, heads.clone()) }
}

fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Writes dsinks, and a dbias without a query axis, of all heads, unless the caller sums them.
    /// The ring has written the terms of the own heads, and zeros. Returns the exposed
    /// communication of slices.
    ///
    /// # Ordering
    /// Collective.
    pub(super) fn sum_gradients(
        &mut self,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        if self.options.local_gradients {
            return Ok(waited);
        }
        if let Some(dsinks) = &mut gradients.dsinks {
            waited += self.sum(dsinks)?;
        }
        match &mut gradients.dbias {
            Some(dbias) if bias_is_shared(&self.spec) => waited += self.sum(dbias)?,
            _ => {}
        }
        Ok(waited)
    }

    /// Sums a gradient over all ranks.
    fn sum(&mut self, view: &mut HostViewMut<'_>) -> Result<Duration> {
        if self.grid.columns() == 1 && self.grid.group(self.ring_index) > 0 {
            view.fill_zero();
        }
        let slicing = Slicing::new(self.ranks);
        // tags of the rings, whose sums over groups are between some of the same ranks
        let next_tag = self.ring.next_tag_mut();
        let mut waited = Duration::ZERO;
        view.map_widened(slicing.numbers_at_once(), |numbers| {
            let sum = AllReduce {
                slicing,
                transport: &mut self.transport,
                entries: &mut self.calls.entries,
                next_tag: &mut *next_tag,
                order: &self.layout.order,
                rank: self.rank,
                // the step after the last one of the ring
                step: self.grid.groups(),
                lengths: self.lengths,
                hook: self.hook.as_ref(),
            };
            waited += sum.run(numbers)?;
            Ok(())
        })?;
        Ok(waited)
    }

    /// Returns the bytes of slices that this rank sends in a backward pass.
    pub(super) fn sum_bytes(&self) -> u64 {
        slices_of_pass(&self.spec, &self.options, self.ranks)
            .map(|slices| slices.bytes_sent(self.ring_index))
            .sum()
    }
}

/// Adds the slices that `rank` exchanges in a backward pass to its balance.
pub(super) fn add_sums_to(
    balance: &mut MessageBalance,
    spec: &Spec,
    options: &RingOptions,
    order: &Order,
    rank: usize,
) {
    let ranks = order.ranks().len();
    // passes 0 and 1 are those of the exchange
    for (pass, slices) in (2..).zip(slices_of_pass(spec, options, ranks)) {
        SliceExchange::new(&slices, order, rank, 0).all_transfers().add_to(balance, pass);
    }
}

/// Returns the slices of the sums of a backward pass.
fn slices_of_pass(
    spec: &Spec,
    options: &RingOptions,
    ranks: usize,
) -> impl Iterator<Item = Slices> {
    let is_needed = options.backward && !options.local_gradients;
    let sums = [sink_numbers(spec), shared_bias_numbers(spec)];
    let sums = sums.into_iter().filter(move |_| is_needed);
    sums.flat_map(move |numbers| Slicing::new(ranks).of_sum(numbers))
}
