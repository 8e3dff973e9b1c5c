//! Forward and backward: exchange, ring over groups, exchange.

use std::{
    ops::Range,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, Error, Gradients, HeadAxis, HeadField, HostTensors, HostView,
    HostViewMut, Inputs, Outputs, Result, RowSegment, Spec,
};

use super::{
    HeadsRing,
    exchange::{Exchange, Messages, count_bytes, side_index},
    shard_tensors::ShardTensor,
};
use crate::ring::{PassKind, in_flight::InFlight, step_events::Observer};

/// Messages of a pass between two members: one before the ring and one after it.
const TAGS: u64 = 2;

/// Axis of the heads of a bias tensor.
const BIAS_HEADS: usize = 1;
/// Axis of the heads of sinks.
const SINK_HEADS: usize = 0;

/// One pass.
#[derive(Clone, Copy)]
struct Pass {
    kind: PassKind,
    first_tag: u64,
    start: Instant,
}

/// The caller's tensor of a result, and what is done with the parts of members.
struct Target<'a> {
    view: HostViewMut<'a>,
    /// True to add the parts, of which several members have one.
    adds: bool,
}

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Runs the forward pass. Returns the exposed communication.
    pub(super) fn forward_pass(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        outputs: &mut Outputs<'_, B::Space>,
        start: Instant,
    ) -> Result<Duration> {
        let pass = self.new_pass(PassKind::Forward, start);
        let given = forward_views(&self.spec, inputs);
        let mut waited = self.receive_inputs(pass, &given)?;
        waited += self.ring_forward(inputs, start)?;
        let Outputs { out, lse, max, sum, ties } = outputs;
        let statistics = [max, sum, ties].into_iter().flatten();
        let statistics = std::iter::once(lse).chain(statistics);
        let mut targets = vec![Target::new(out.reborrow())];
        targets.extend(statistics.map(|of| Target::new(of.reborrow().swap_rows_and_heads())));
        waited += self.send_outputs(pass, &mut targets)?;
        Ok(waited)
    }

    /// Runs the backward pass. Returns the exposed communication.
    pub(super) fn backward_pass(
        &mut self,
        inputs: &BackwardInputs<'_, B::Space>,
        gradients: &mut Gradients<'_, B::Space>,
        start: Instant,
    ) -> Result<Duration> {
        let pass = self.new_pass(PassKind::Backward, start);
        let rows = HostView::swap_rows_and_heads;
        let mut given = forward_views(&self.spec, &inputs.forward);
        // zeros are sent in place of no dlse, so that sizes do not depend on arguments
        given.extend([Some(inputs.out), Some(rows(inputs.lse))]);
        given.extend([Some(inputs.dout), inputs.dlse.map(rows)]);
        let statistics = [inputs.max, inputs.ties].into_iter().flatten();
        given.extend(statistics.map(|of| Some(rows(of))));
        let mut waited = self.receive_inputs(pass, &given)?;
        waited += self.ring_backward(&inputs.forward, gradients, start)?;
        let of_backward = self.tensors.backward.as_mut().ok_or_else(no_gradients)?;
        let mut sums = of_backward.sums.take();
        let Gradients { dq, dk, dv, dbias, .. } = gradients;
        let mut targets = vec![Target::new(dq.reborrow())];
        match &mut sums {
            Some([dk, dv]) => {
                targets.extend([Target::sum(dk.view_mut()?), Target::sum(dv.view_mut()?)]);
            }
            None => targets.extend([dk.reborrow(), dv.reborrow()].map(Target::new)),
        }
        if let (Some(dbias), Some(field)) = (dbias, self.backward.outputs.get(3)) {
            let view = dbias.reborrow().swap_rows_and_heads();
            let is_shared = field.heads == HeadAxis::Shared;
            targets.push(if is_shared { Target::sum(view) } else { Target::new(view) });
        }
        waited += self.send_outputs(pass, &mut targets)?;
        drop(targets);
        if let Some([sum_dk, sum_dv]) = &sums {
            dk.round_from(&sum_dk.view()?);
            dv.round_from(&sum_dv.view()?);
        }
        self.tensors.backward.as_mut().ok_or_else(no_gradients)?.sums = sums;
        Ok(waited)
    }

    /// Runs the forward pass of the ring of this rank's heads.
    fn ring_forward(&mut self, inputs: &Inputs<'_, B::Space>, start: Instant) -> Result<Duration> {
        let q_heads = self.grid.q_heads(self.exchange.member);
        let callers = inputs.reborrow();
        let tensors = &mut self.tensors;
        let of_heads = Inputs::<B::Space> {
            q: tensors.q.view()?,
            k: tensors.k.view()?,
            v: tensors.v.view()?,
            bias: match &tensors.bias {
                Some(bias) => Some(bias.heads_first()?),
                None => callers.bias.map(|bias| own_heads(bias, BIAS_HEADS, &q_heads)),
            },
            sinks: callers.sinks.map(|sinks| own_heads(sinks, SINK_HEADS, &q_heads)),
        };
        let [max, sum, ties] = match tensors.unnormalized.as_mut() {
            Some(of) => [&mut of.max, &mut of.sum, &mut of.ties].map(Some),
            None => [None, None, None],
        };
        let rows = |tensor: Option<_>| tensor.map(ShardTensor::heads_first_mut).transpose();
        let mut results = Outputs::<B::Space> {
            out: tensors.out.view_mut()?,
            lse: tensors.lse.heads_first_mut()?,
            max: rows(max)?,
            sum: rows(sum)?,
            ties: rows(ties)?,
        };
        self.ring_began.store(nanoseconds(start), Ordering::Relaxed);
        let report = self.ring.forward(&of_heads, &mut results)?;
        Ok(Duration::from_secs_f64(report.waiting_seconds))
    }

    /// Runs the backward pass of the ring of this rank's heads.
    fn ring_backward(
        &mut self,
        forward: &Inputs<'_, B::Space>,
        gradients: &mut Gradients<'_, B::Space>,
        start: Instant,
    ) -> Result<Duration> {
        let q_heads = self.grid.q_heads(self.exchange.member);
        let tensors = &mut self.tensors;
        let of_backward = tensors.backward.as_mut().ok_or_else(no_gradients)?;
        let statistics = tensors.unnormalized.as_ref();
        let callers = forward.reborrow();
        let of_heads = BackwardInputs::<B::Space> {
            forward: Inputs {
                q: tensors.q.view()?,
                k: tensors.k.view()?,
                v: tensors.v.view()?,
                bias: match &tensors.bias {
                    Some(bias) => Some(bias.heads_first()?),
                    None => callers.bias.map(|bias| own_heads(bias, BIAS_HEADS, &q_heads)),
                },
                sinks: callers.sinks.map(|sinks| own_heads(sinks, SINK_HEADS, &q_heads)),
            },
            out: tensors.out.view()?,
            lse: tensors.lse.heads_first()?,
            max: statistics.map(|of| of.max.heads_first()).transpose()?,
            ties: statistics.map(|of| of.ties.heads_first()).transpose()?,
            dout: of_backward.dout.view()?,
            dlse: Some(of_backward.dlse.heads_first()?),
        };
        let Gradients { dbias, dsinks, .. } = gradients;
        let of_all_heads = if of_backward.dbias.is_some() { None } else { dbias.as_mut() };
        let mut results = Gradients::<B::Space> {
            dq: of_backward.dq.view_mut()?,
            dk: of_backward.dk.view_mut()?,
            dv: of_backward.dv.view_mut()?,
            dbias: match (&mut of_backward.dbias, of_all_heads) {
                (Some(dbias), _) => Some(dbias.heads_first_mut()?),
                (None, Some(dbias)) => {
                    // the terms of other heads, if the caller sums over ranks
                    dbias.fill_zero();
                    Some(own_heads_mut(dbias.reborrow(), BIAS_HEADS, &q_heads))
                }
                (None, None) => None,
            },
            dsinks: dsinks.as_mut().map(|dsinks| {
                dsinks.fill_zero();
                own_heads_mut(dsinks.reborrow(), SINK_HEADS, &q_heads)
            }),
        };
        self.ring_began.store(nanoseconds(start), Ordering::Relaxed);
        let report = self.ring.backward(&of_heads, &mut results)?;
        Ok(Duration::from_secs_f64(report.waiting_seconds))
    }

    /// Exchanges the caller's tensors, `given` as `[batch, rows, heads, elements]`, for those of
    /// the own heads. `None` is a tensor of zeros.
    fn receive_inputs(&mut self, pass: Pass, given: &[Option<HostView<'_>>]) -> Result<Duration> {
        let (fields, mut tensors) = match pass.kind {
            PassKind::Forward => (&self.forward.inputs, self.tensors.forward_inputs()),
            PassKind::Backward => (&self.backward.inputs, self.tensors.backward_inputs()),
        };
        if given.len() != fields.len() || tensors.len() != fields.len() {
            return Err(Error::internal("other tensors than those that are exchanged"));
        }
        let observer = Observer::of_messages(self.hook.as_ref(), self.rank, pass.kind, pass.start);
        let mut in_flight = InFlight::new(&mut self.transport, pass.first_tag, observer);
        let bytes = self.exchange.input_bytes(fields);
        let Exchange { grid, member, ranks, rows, segments, buffers } = &mut self.exchange;
        let messages = Messages { ranks, member: *member, bytes, tag: 0, step: 0 };
        let own = rows[*member];
        let pack = |to: usize, mut into: &mut [u8]| {
            for (field, view) in fields.iter().zip(given) {
                let packed = match view {
                    Some(view) => {
                        view.pack(&all(view.shape()), field.heads.range(grid, to), into)?
                    }
                    None => {
                        let bytes = field.bytes(grid, own[side_index(field.side)]);
                        fill_zero(into, count_bytes(bytes))?
                    }
                };
                into = into.get_mut(packed..).unwrap_or_default();
            }
            Ok(())
        };
        let unpack = |from: usize, mut bytes: &[u8]| {
            for (field, tensor) in fields.iter().zip(&mut tensors) {
                let rows = &segments[from][side_index(field.side)];
                let heads = 0..field.heads.count(grid);
                let unpacked = tensor.view_mut()?.unpack(rows, heads, bytes)?;
                bytes = bytes.get(unpacked..).unwrap_or_default();
            }
            Ok(())
        };
        messages.exchange(buffers, &mut in_flight, pack, unpack)?;
        Ok(in_flight.waited())
    }

    /// Exchanges the results of the own heads for the caller's rows of all heads.
    fn send_outputs(&mut self, pass: Pass, targets: &mut [Target<'_>]) -> Result<Duration> {
        let (fields, results) = match pass.kind {
            PassKind::Forward => (&self.forward.outputs, self.tensors.forward_outputs()),
            PassKind::Backward => {
                let of_backward = self.tensors.backward.as_ref().ok_or_else(no_gradients)?;
                (&self.backward.outputs, of_backward.outputs())
            }
        };
        if results.len() != fields.len() || targets.len() != fields.len() {
            return Err(Error::internal("other results than those that are exchanged"));
        }
        let observer = Observer::of_messages(self.hook.as_ref(), self.rank, pass.kind, pass.start);
        let mut in_flight = InFlight::new(&mut self.transport, pass.first_tag, observer);
        let bytes = self.exchange.output_bytes(fields);
        let Exchange { grid, member, ranks, segments, buffers, .. } = &mut self.exchange;
        // the step after the last one of the ring
        let messages = Messages { ranks, member: *member, bytes, tag: 1, step: grid.groups() };
        let pack = |to: usize, mut into: &mut [u8]| {
            for (field, tensor) in fields.iter().zip(&results) {
                let rows = &segments[to][side_index(field.side)];
                let heads = 0..field.heads.count(grid);
                let packed = tensor.view()?.pack(rows, heads, into)?;
                into = into.get_mut(packed..).unwrap_or_default();
            }
            Ok(())
        };
        let unpack = |from: usize, mut bytes: &[u8]| {
            for (field, target) in fields.iter().zip(targets.iter_mut()) {
                let unpacked = target.put(field, field.heads.range(grid, from), bytes)?;
                bytes = bytes.get(unpacked..).unwrap_or_default();
            }
            Ok(())
        };
        messages.exchange(buffers, &mut in_flight, pack, unpack)?;
        Ok(in_flight.waited())
    }

    /// Starts a pass, whose messages have new tags.
    const fn new_pass(&mut self, kind: PassKind, start: Instant) -> Pass {
        let first_tag = self.next_tag;
        self.next_tag += TAGS;
        Pass { kind, first_tag, start }
    }
}

impl<'a> Target<'a> {
    /// A tensor of which each part has one owner.
    const fn new(view: HostViewMut<'a>) -> Self {
        Self { view, adds: false }
    }

    /// A tensor of zeros to which the parts of members are added, in the order of their arrival:
    /// that of the own member, then those of the members before it, descending.
    fn sum(mut view: HostViewMut<'a>) -> Self {
        view.fill_zero();
        Self { view, adds: true }
    }

    fn put(&mut self, field: &HeadField, heads: Range<usize>, bytes: &[u8]) -> Result<usize> {
        if self.adds {
            return self.view.add(field.dtype, heads, bytes);
        }
        self.view.unpack(&all(self.view.shape()), heads, bytes)
    }
}

/// Returns the caller's tensors of a forward pass that are exchanged, as
/// `[batch, rows, heads, elements]`.
fn forward_views<'a, S: HostTensors>(
    spec: &Spec,
    inputs: &Inputs<'a, S>,
) -> Vec<Option<HostView<'a>>> {
    let has_rows = spec.bias.is_some_and(|shape| shape[2] != 1);
    let bias = inputs.bias.filter(|_| has_rows).map(HostView::swap_rows_and_heads);
    [inputs.q, inputs.k, inputs.v].into_iter().chain(bias).map(Some).collect()
}

/// Returns the own heads of a tensor; all of it if heads share it.
fn own_heads<'a>(view: HostView<'a>, axis: usize, heads: &Range<usize>) -> HostView<'a> {
    if view.shape()[axis] == 1 { view } else { view.slice(axis, heads.clone()) }
}

/// As [`own_heads`], for writing.
fn own_heads_mut<'a>(view: HostViewMut<'a>, axis: usize, heads: &Range<usize>) -> HostViewMut<'a> {
    if view.shape()[axis] == 1 { view } else { view.slice(axis, heads.clone()) }
}

/// Returns all rows of a tensor `[batch, rows, heads, elements]`.
const fn all(shape: [usize; 4]) -> [RowSegment; 1] {
    [RowSegment { first: 0, count: shape[1] }]
}

/// Writes `count` zeros.
fn fill_zero(into: &mut [u8], count: u64) -> Result<usize> {
    let count = annulus_core::index(count);
    let zeros = into.get_mut(..count).ok_or_else(|| Error::internal("a message too short"))?;
    zeros.fill(0);
    Ok(count)
}

fn no_gradients() -> Error {
    Error::internal("a backward pass of a plan that is forward only")
}

fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
