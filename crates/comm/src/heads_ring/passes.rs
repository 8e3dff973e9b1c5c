//! Forward and backward: exchange, ring over groups, exchange.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, Error, Gradients, HostTensors, HostView, HostViewMut, Inputs, Outputs,
    Result, RowSegment,
};
use annulus_plan::{HeadAxis, HeadField};

use super::{
    HeadsRing,
    exchange::{HeadExchange, Messages, count_bytes, side_index},
    shard_tensors::ColumnGradients,
};
use crate::{
    delegate::HostMessages,
    ring::{PassKind, in_flight::InFlight, step_events::Observer},
};

/// Messages of a pass between two members: one before the ring, one after it, and one of the
/// rounding residual of out, if the callers have asked for it.
const TAGS: u64 = 3;

/// Returns the tags of the messages of the results, and of the residual, relative to the first of
/// the pass. Tags grow in the order of the messages: the residual is sent after the results of a
/// forward pass, and before those of a backward pass.
pub(super) const fn later_tags(kind: PassKind) -> [u64; 2] {
    match kind {
        PassKind::Forward => [1, 2],
        PassKind::Backward => [2, 1],
    }
}

/// Tensors of one exchange.
#[derive(Clone, Copy)]
enum ExchangedTensors {
    /// Those of [`ExchangeFields`](annulus_plan::ExchangeFields).
    All,
    /// The rounding residual of out: after the ring of a forward pass, before that of a backward
    /// pass.
    Residual,
}

/// One pass.
#[derive(Clone, Copy)]
struct GridPass {
    kind: PassKind,
    first_tag: u64,
    start: Instant,
}

/// The caller's tensor of a result, and what is done with the parts of members.
struct ResultTarget<'a> {
    view: HostViewMut<'a>,
    /// True to add the parts, of which several members have one.
    adds: bool,
}

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Runs the forward pass. Returns the exposed communication.
    pub(super) fn forward_pass(
        &mut self,
        inputs: &Inputs<HostView<'_>>,
        outputs: &mut Outputs<HostViewMut<'_>>,
        start: Instant,
    ) -> Result<Duration> {
        let pass = self.new_pass(PassKind::Forward, start);
        let given = self.forward_views(inputs);
        let mut waited = self.receive_inputs(pass, ExchangedTensors::All, &given)?;
        let wants_residual = outputs.out_residual.is_some();
        waited += self.ring_forward(inputs, wants_residual, start)?;
        if let Some(mut columns) = self.tensors.columns.take() {
            columns.merge.clear();
            let dtype = self.spec.dtype.accumulator();
            let grid = self.grid;
            let merge =
                |from, bytes: &[u8]| columns.merge.add_message(dtype, grid.q_heads(from), bytes);
            waited += self.send_outputs(pass, ExchangedTensors::All, merge)?;
            columns.merge.finish(outputs);
            self.tensors.columns = Some(columns);
            return Ok(waited);
        }
        let Outputs { out, lse, max, sum, ties, out_residual } = outputs;
        let mut targets = vec![Some(ResultTarget::new(out.reborrow()))];
        targets.push(Some(ResultTarget::of_rows(lse)));
        // members send the maximum and the sum also where the caller wants neither
        targets.extend([max, sum].map(|of| of.as_mut().map(ResultTarget::of_rows)));
        targets.extend(ties.as_mut().map(|ties| Some(ResultTarget::of_rows(ties))));
        waited += self.send_to(pass, ExchangedTensors::All, &mut targets)?;
        if let Some(residual) = out_residual {
            let target = Some(ResultTarget::new(residual.reborrow()));
            waited += self.send_to(pass, ExchangedTensors::Residual, &mut [target])?;
        }
        Ok(waited)
    }

    /// Runs the backward pass. Returns the exposed communication.
    pub(super) fn backward_pass(
        &mut self,
        inputs: &BackwardInputs<HostView<'_>>,
        gradients: &mut Gradients<HostViewMut<'_>>,
        start: Instant,
    ) -> Result<Duration> {
        let pass = self.new_pass(PassKind::Backward, start);
        let mut columns = self.tensors.columns.as_mut().and_then(|columns| columns.backward.take());
        if let Some(columns) = &mut columns {
            columns.compute(inputs)?;
        }
        let exchanged = inputs.as_ref().map(HostView::reborrow);
        let given = self.backward_views(&exchanged, columns.as_ref())?;
        let mut waited = self.receive_inputs(pass, ExchangedTensors::All, &given)?;
        // with key columns it is in −delta
        let residual = inputs.out_residual.filter(|_| columns.is_none());
        if residual.is_some() {
            waited += self.receive_inputs(pass, ExchangedTensors::Residual, &[residual])?;
        }
        waited += self.ring_backward(&inputs.forward, residual.is_some(), gradients, start)?;
        let of_backward = self.tensors.backward.as_mut().ok_or_else(no_gradients)?;
        let mut sums = of_backward.sums.take();
        let divides_heads = of_backward.dkv.is_some();
        let dbias_field = self.backward.outputs.last().copied();
        let Gradients { dq, dk, dv, dbias, .. } = gradients;
        let mut targets = vec![Some(match &mut columns {
            Some(columns) => ResultTarget::sum(columns.dq.view_mut()?),
            None => ResultTarget::new(dq.reborrow()),
        })];
        match &mut sums {
            Some([dk, dv]) => {
                let sums = [ResultTarget::sum(dk.view_mut()?), ResultTarget::sum(dv.view_mut()?)];
                targets.extend(sums.map(Some));
            }
            None if divides_heads => {
                targets.extend([dk.reborrow(), dv.reborrow()].map(ResultTarget::new).map(Some));
            }
            None => {}
        }
        let has_rows = self.spec.bias.is_some_and(|shape| shape[2] != 1);
        if let (Some(dbias), Some(field), true) = (dbias, dbias_field, has_rows) {
            let view = dbias.reborrow().swap_rows_and_heads();
            let adds = field.heads == HeadAxis::Shared || self.grid.columns() > 1;
            targets.push(Some(if adds {
                ResultTarget::sum(view)
            } else {
                ResultTarget::new(view)
            }));
        }
        waited += self.send_to(pass, ExchangedTensors::All, &mut targets)?;
        drop(targets);
        if let Some([sum_dk, sum_dv]) = &sums {
            dk.round_from(&sum_dk.view()?);
            dv.round_from(&sum_dv.view()?);
        }
        self.tensors.backward.as_mut().ok_or_else(no_gradients)?.sums = sums;
        if let (Some(of_columns), Some(all)) = (columns, self.tensors.columns.as_mut()) {
            dq.round_from(&of_columns.dq.view()?);
            all.backward = Some(of_columns);
        }
        Ok(waited)
    }

    /// Returns the caller's tensors of a forward pass that are exchanged, as
    /// `[batch, rows, heads, elements]`.
    fn forward_views<'a>(&self, inputs: &Inputs<HostView<'a>>) -> Vec<Option<HostView<'a>>> {
        let has_rows = self.spec.bias.is_some_and(|shape| shape[2] != 1);
        let bias = inputs.bias.filter(|_| has_rows).map(HostView::swap_rows_and_heads);
        let kv = self.tensors.inputs.kv.as_ref().map(|_| [inputs.k, inputs.v]);
        std::iter::once(inputs.q).chain(kv.into_iter().flatten()).chain(bias).map(Some).collect()
    }

    /// As [`HeadsRing::forward_views`], of a backward pass. `None` is a tensor of zeros, which is
    /// sent in place of no dlse, so that sizes do not depend on arguments.
    fn backward_views<'a>(
        &self,
        inputs: &BackwardInputs<HostView<'a>>,
        columns: Option<&'a ColumnGradients>,
    ) -> Result<Vec<Option<HostView<'a>>>> {
        let rows = HostView::swap_rows_and_heads;
        let mut given = self.forward_views(&inputs.forward);
        let dlse = match columns {
            Some(columns) => Some(columns.minus_delta.view()?),
            None => {
                given.push(Some(inputs.out));
                inputs.dlse.map(rows)
            }
        };
        let max = rows(inputs.max);
        let sum = match inputs.sum {
            Some(sum) => rows(sum),
            None => HostView::ones(max.dtype(), max.shape())?,
        };
        given.extend([Some(max), Some(sum), Some(inputs.dout), dlse]);
        // the share of a maximum in place of their number
        let share = columns.and_then(|columns| columns.minus_share.as_ref());
        given.extend(match share {
            Some(share) => Some(Some(share.view()?)),
            None => inputs.ties.map(|ties| Some(rows(ties))),
        });
        Ok(given)
    }

    /// Exchanges the caller's tensors, `given` as `[batch, rows, heads, elements]`, for those of
    /// the own heads. `None` is a tensor of zeros.
    fn receive_inputs(
        &mut self,
        pass: GridPass,
        exchanged: ExchangedTensors,
        given: &[Option<HostView<'_>>],
    ) -> Result<Duration> {
        let residual = self.residual;
        let [_, residual_tag] = later_tags(pass.kind);
        let (fields, mut tensors, tag) = match (exchanged, pass.kind) {
            (ExchangedTensors::All, PassKind::Forward) => {
                (&self.forward.inputs[..], self.tensors.forward_inputs(), 0)
            }
            (ExchangedTensors::All, PassKind::Backward) => {
                (&self.backward.inputs[..], self.tensors.backward_inputs(), 0)
            }
            (ExchangedTensors::Residual, _) => {
                (residual.as_slice(), self.tensors.out_residual.iter_mut().collect(), residual_tag)
            }
        };
        if given.len() != fields.len() || tensors.len() != fields.len() {
            return Err(Error::internal("other tensors than those that are exchanged"));
        }
        let observer = Observer::of_messages(self.hook.as_ref(), self.rank, pass.kind, pass.start);
        let mut transport = HostMessages::new(&mut self.transport);
        let mut in_flight = InFlight::new(&mut transport, pass.first_tag, self.lengths, observer);
        let bytes = self.exchange.input_bytes(fields);
        let HeadExchange { grid, member, ranks, rows, segments, buffers } = &mut self.exchange;
        let messages = Messages { ranks, member: *member, bytes, tag, step: 0 };
        let own = rows[*member];
        let pack = |to: usize, mut into: &mut [u8]| {
            for (field, view) in fields.iter().zip(given) {
                if !grid.shares(field.side, *member, to) {
                    continue;
                }
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

    /// Exchanges the results of the own heads for the caller's rows of all heads. A result without
    /// a target is not read.
    fn send_to(
        &mut self,
        pass: GridPass,
        exchanged: ExchangedTensors,
        targets: &mut [Option<ResultTarget<'_>>],
    ) -> Result<Duration> {
        let fields = match (exchanged, pass.kind) {
            (ExchangedTensors::All, PassKind::Forward) => self.forward.outputs.clone(),
            (ExchangedTensors::All, PassKind::Backward) => self.backward.outputs.clone(),
            (ExchangedTensors::Residual, _) => self.residual.into_iter().collect(),
        };
        if targets.len() != fields.len() {
            return Err(Error::internal("other targets than the results that are exchanged"));
        }
        let grid = self.grid;
        let own = self.exchange.member;
        let rows = self.exchange.rows[own];
        self.send_outputs(pass, exchanged, |from, mut bytes| {
            for (field, target) in fields.iter().zip(targets.iter_mut()) {
                if grid.shares(field.side, own, from) {
                    let heads = field.heads.range(&grid, from);
                    let unpacked = match target {
                        Some(target) => target.put(field, heads, bytes)?,
                        None => {
                            let part = heads.len() * field.batch * field.dim * field.dtype.bytes();
                            part * annulus_core::index(rows[side_index(field.side)])
                        }
                    };
                    bytes = bytes.get(unpacked..).unwrap_or_default();
                }
            }
            Ok(())
        })
    }

    /// Exchanges the results of the own heads for those of the own rows, which `unpack(member,
    /// bytes)` reads.
    fn send_outputs(
        &mut self,
        pass: GridPass,
        exchanged: ExchangedTensors,
        unpack: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<Duration> {
        let [results_tag, residual_tag] = later_tags(pass.kind);
        let (fields, results, tag) = match (exchanged, pass.kind) {
            (ExchangedTensors::All, PassKind::Forward) => {
                let has_columns = self.grid.columns() > 1;
                (&self.forward.outputs[..], self.tensors.forward_outputs(has_columns), results_tag)
            }
            (ExchangedTensors::All, PassKind::Backward) => {
                let of_backward = self.tensors.backward.as_ref().ok_or_else(no_gradients)?;
                (&self.backward.outputs[..], of_backward.outputs(), results_tag)
            }
            (ExchangedTensors::Residual, _) => {
                let results = self.tensors.out_residual.iter().collect();
                (self.residual.as_slice(), results, residual_tag)
            }
        };
        if results.len() != fields.len() {
            return Err(Error::internal("other results than those that are exchanged"));
        }
        let observer = Observer::of_messages(self.hook.as_ref(), self.rank, pass.kind, pass.start);
        let mut transport = HostMessages::new(&mut self.transport);
        let mut in_flight = InFlight::new(&mut transport, pass.first_tag, self.lengths, observer);
        let bytes = self.exchange.output_bytes(fields);
        let HeadExchange { grid, member, ranks, segments, buffers, .. } = &mut self.exchange;
        // the step after the last one of the ring
        let messages = Messages { ranks, member: *member, bytes, tag, step: grid.groups() };
        let pack = |to: usize, mut into: &mut [u8]| {
            for (field, tensor) in fields.iter().zip(&results) {
                let rows = &segments[to][side_index(field.side)];
                let heads = 0..field.heads.count(grid);
                let packed = tensor.view()?.pack(rows, heads, into)?;
                into = into.get_mut(packed..).unwrap_or_default();
            }
            Ok(())
        };
        messages.exchange(buffers, &mut in_flight, pack, unpack)?;
        Ok(in_flight.waited())
    }

    /// Starts a pass, whose messages have new tags.
    const fn new_pass(&mut self, kind: PassKind, start: Instant) -> GridPass {
        GridPass { kind, first_tag: self.calls.take_tags(TAGS), start }
    }
}

impl<'a> ResultTarget<'a> {
    /// A tensor of which each part has one owner.
    const fn new(view: HostViewMut<'a>) -> Self {
        Self { view, adds: false }
    }

    /// As [`ResultTarget::new`], of a statistic `[batch, heads, rows, 1]`.
    fn of_rows(view: &'a mut HostViewMut<'_>) -> Self {
        Self::new(view.reborrow().swap_rows_and_heads())
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

pub(super) fn no_gradients() -> Error {
    Error::internal("a backward pass of a plan that is forward only")
}
