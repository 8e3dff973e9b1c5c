//! The passes of the ring of a member: the tensors of its group and heads, and the caller's where
//! they are not exchanged.
//!
//! Gradients of which every rank has all heads are dsinks, and dbias without a query axis. Each is
//! a sum over all ranks, to which a rank adds zeros for the heads that it does not have
//! (`ring/reduce.rs`: few numbers are gathered whole, of more each rank sums a slice). With one key
//! column the ring has summed over the groups, so only the first group contributes. With several,
//! all ranks have terms.

use std::{
    ops::Range,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, Gradients, HostTensors, HostView, HostViewMut, Inputs, MessageBalance,
    Order, Outputs, Result, Spec,
};

use super::{
    HeadsRing,
    passes::no_gradients,
    shard_tensors::{InputTensors, ShardTensor},
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
        let tensors = &mut self.tensors;
        let of_member = tensors.inputs.of_member(
            inputs.as_ref().map(HostView::reborrow),
            has_sinks,
            &q_heads,
        )?;
        let residual = tensors.out_residual.as_mut().filter(|_| wants_residual);
        let mut results = Outputs {
            out: tensors.out.view_mut()?,
            lse: tensors.lse.heads_first_mut()?,
            max: Some(tensors.max.heads_first_mut()?),
            sum: Some(tensors.sum.heads_first_mut()?),
            ties: tensors.ties.as_mut().map(ShardTensor::heads_first_mut).transpose()?,
            out_residual: residual.map(ShardTensor::view_mut).transpose()?,
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
        let tensors = &mut self.tensors;
        let of_backward = tensors.backward.as_mut().ok_or_else(no_gradients)?;
        let has_sinks = self.ring.spec().sinks.is_some();
        let residual = tensors.out_residual.as_ref().filter(|_| has_residual);
        let of_member = BackwardInputs {
            forward: tensors.inputs.of_member(
                forward.as_ref().map(HostView::reborrow),
                has_sinks,
                &q_heads,
            )?,
            out: tensors.out.view()?,
            max: tensors.max.heads_first()?,
            sum: Some(tensors.sum.heads_first()?),
            ties: tensors.ties.as_ref().map(ShardTensor::heads_first).transpose()?,
            dout: of_backward.dout.view()?,
            dlse: Some(of_backward.dlse.heads_first()?),
            out_residual: residual.map(ShardTensor::view).transpose()?,
        };
        let Gradients { dk, dv, dbias, dsinks, .. } = gradients;
        let [dk, dv] = match &mut of_backward.dkv {
            Some([dk, dv]) => [dk.view_mut()?, dv.view_mut()?],
            None => [dk.reborrow(), dv.reborrow()],
        };
        let of_all_heads = if of_backward.dbias.is_some() { None } else { dbias.as_mut() };
        let mut results = Gradients {
            dq: of_backward.dq.view_mut()?,
            dk,
            dv,
            dbias: match (&mut of_backward.dbias, of_all_heads) {
                (Some(dbias), _) => Some(dbias.heads_first_mut()?),
                (None, Some(dbias)) => {
                    // the terms of other heads, if the caller sums over ranks
                    dbias.fill_zero();
                    Some(own_heads_mut(dbias.reborrow(), BIAS_HEADS, &q_heads))
                }
                (None, None) => None,
            },
            dsinks: dsinks.as_mut().and_then(|dsinks| {
                dsinks.fill_zero();
                has_sinks.then(|| own_heads_mut(dsinks.reborrow(), SINK_HEADS, &q_heads))
            }),
        };
        self.ring_began.store(nanoseconds(start), Ordering::Relaxed);
        self.ring.compute_gradients(&of_member, &mut results)
    }
}

impl InputTensors {
    /// Returns the inputs of a member: sinks only if they are scores of its key column.
    fn of_member<'a>(
        &'a self,
        callers: Inputs<HostView<'a>>,
        has_sinks: bool,
        q_heads: &Range<usize>,
    ) -> Result<Inputs<HostView<'a>>> {
        let [k, v] = match &self.kv {
            Some([k, v]) => [k.view()?, v.view()?],
            None => [callers.k, callers.v],
        };
        let sinks = callers.sinks.filter(|_| has_sinks);
        Ok(Inputs {
            q: self.q.view()?,
            k,
            v,
            bias: match &self.bias {
                Some(bias) => Some(bias.heads_first()?),
                None => callers.bias.map(|bias| own_heads(bias, BIAS_HEADS, q_heads)),
            },
            sinks: sinks.map(|sinks| own_heads(sinks, SINK_HEADS, q_heads)),
        })
    }
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
