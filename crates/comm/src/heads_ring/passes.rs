//! Forward and backward: exchange, ring over groups, exchange.

use std::{
    collections::BTreeMap,
    ops::Range,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, BackwardInputs, Error, Gradients, HostTensors, HostView, HostViewMut, Inputs, Outputs,
    Result, RowSegment, TangentInputs, TangentOutputs,
};
use annulus_plan::{HeadAxis, HeadField};

use super::{
    HeadsRing,
    exchange::{HeadExchange, Messages, count_bytes, side_index},
    shard_tensors::{ColumnGradients, PassFields, PassTensor, no_tensor},
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
struct FieldList {
    names: Vec<PassTensor>,
    fields: Vec<HeadField>,
    /// Tag of the messages, relative to the first of the pass.
    tag: u64,
}

impl FieldList {
    fn pairs(&self) -> impl Iterator<Item = (PassTensor, &HeadField)> {
        self.names.iter().copied().zip(&self.fields)
    }
}

/// Targets of results by name.
type Targets<'a> = BTreeMap<PassTensor, ResultTarget<'a>>;

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
        let list = self.inputs_of(pass.kind);
        let mut waited = self.receive_inputs(pass, &list, |name| Ok(input(inputs, name)))?;
        let wants_residual = outputs.out_residual.is_some();
        waited += self.ring_forward(inputs, wants_residual, start)?;
        let list = self.outputs_of(pass.kind);
        if let Some(mut columns) = self.tensors.columns.take() {
            columns.merge.clear();
            let dtype = self.spec.dtype.accumulator();
            let grid = self.grid;
            let merge =
                |from, bytes: &[u8]| columns.merge.add_message(dtype, grid.q_heads(from), bytes);
            waited += self.send_outputs(pass, &list, merge)?;
            columns.merge.finish(outputs);
            self.tensors.columns = Some(columns);
            return Ok(waited);
        }
        // members send the maximum and the sum also where the caller wants neither
        let Outputs { out, lse, max, sum, ties, out_residual, statistics, head_statistics: _ } =
            outputs.as_mut();
        let mut targets = Targets::new();
        for (name, view) in [
            (PassTensor::Out, Some(out)),
            (PassTensor::Lse, Some(lse)),
            (PassTensor::Max, max),
            (PassTensor::Sum, sum),
            (PassTensor::Ties, ties),
            (PassTensor::OutResidual, out_residual),
            (PassTensor::Statistics, statistics),
        ] {
            let target = view.map(|view| ResultTarget::new(name.turn_mut(view.reborrow())));
            targets.extend(target.map(|target| (name, target)));
        }
        waited += self.send_to(pass, &list, &mut targets)?;
        if wants_residual {
            waited += self.send_to(pass, &self.residual_of(pass.kind), &mut targets)?;
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
        let callers = inputs.as_ref().map(HostView::reborrow);
        let given = |name| backward_input(&callers, columns.as_ref(), name);
        let mut waited = self.receive_inputs(pass, &self.inputs_of(pass.kind), given)?;
        // with key columns it is in −delta
        let has_residual = inputs.out_residual.is_some() && columns.is_none();
        if has_residual {
            waited += self.receive_inputs(pass, &self.residual_of(pass.kind), given)?;
        }
        waited += self.ring_backward(&inputs.forward, has_residual, gradients, start)?;
        let list = self.outputs_of(pass.kind);
        let sum_dq = columns.as_mut().map(|columns| columns.dq.view_mut()).transpose()?;
        waited += self.send_gradients(pass, &list, &mut Targets::new(), gradients, sum_dq)?;
        if let (Some(of_columns), Some(all)) = (columns, self.tensors.columns.as_mut()) {
            gradients.dq.round_from(&of_columns.dq.view()?);
            all.backward = Some(of_columns);
        }
        Ok(waited)
    }

    /// Exchanges `others` and the gradients of the own heads for those of the own rows; dq in
    /// `sum_dq`, of several key columns.
    fn send_gradients(
        &mut self,
        pass: GridPass,
        list: &FieldList,
        others: &mut Targets<'_>,
        gradients: &mut Gradients<HostViewMut<'_>>,
        mut sum_dq: Option<HostViewMut<'_>>,
    ) -> Result<Duration> {
        let mut sums = self.tensors.sums.take();
        let Gradients { dq, dk, dv, dbias, .. } = gradients;
        let of_call = others.iter_mut().map(|(&name, target)| (name, target.reborrow()));
        let mut targets: Targets<'_> = of_call.collect();
        let dq_target = match &mut sum_dq {
            Some(sum) => ResultTarget::sum(sum.reborrow()),
            None => ResultTarget::new(dq.reborrow()),
        };
        targets.insert(PassTensor::Dq, dq_target);
        let [dk_target, dv_target] = match &mut sums {
            Some([dk, dv]) => {
                [ResultTarget::sum(dk.view_mut()?), ResultTarget::sum(dv.view_mut()?)]
            }
            None => [dk.reborrow(), dv.reborrow()].map(ResultTarget::new),
        };
        targets.extend([(PassTensor::Dk, dk_target), (PassTensor::Dv, dv_target)]);
        let of_bias = list.pairs().find(|(name, _)| *name == PassTensor::Dbias);
        if let (Some(dbias), Some((name, field))) = (dbias, of_bias) {
            let view = name.turn_mut(dbias.reborrow());
            let adds = field.heads == HeadAxis::Shared || self.grid.columns() > 1;
            let target = if adds { ResultTarget::sum(view) } else { ResultTarget::new(view) };
            targets.insert(name, target);
        }
        let waited = self.send_to(pass, list, &mut targets)?;
        drop(targets);
        if let Some([sum_dk, sum_dv]) = &sums {
            dk.round_from(&sum_dk.view()?);
            dv.round_from(&sum_dv.view()?);
        }
        self.tensors.sums = sums;
        Ok(waited)
    }

    /// Runs a JVP or, with `gradients`, a double backward. Returns the exposed communication.
    pub(super) fn tangent_pass(
        &mut self,
        inputs: &TangentInputs<HostView<'_>>,
        outputs: &mut TangentOutputs<HostViewMut<'_>>,
        mut gradients: Option<&mut Gradients<HostViewMut<'_>>>,
        start: Instant,
    ) -> Result<Duration> {
        let is_double = gradients.is_some();
        let kind = if is_double { PassKind::Backward } else { PassKind::Forward };
        let pass = self.new_pass(kind, start);
        let of = self.tangents.get(usize::from(is_double));
        let PassFields { fields, inputs: given, outputs: made } = of.ok_or_else(no_tensor)?;
        let sent = FieldList { names: given.clone(), fields: fields.inputs.clone(), tag: 0 };
        let list = FieldList { names: made.clone(), fields: fields.outputs.clone(), tag: 1 };
        let callers = inputs.as_ref().map(HostView::reborrow);
        let mut waited = self.receive_inputs(pass, &sent, |name| {
            use PassTensor::{BiasTangent, Dlse, Dout, KTangent, QTangent, VTangent};
            Ok(match name {
                QTangent => Some(callers.tangent.q),
                KTangent => Some(callers.tangent.k),
                VTangent => Some(callers.tangent.v),
                BiasTangent => callers.tangent.bias,
                Dout => callers.dout,
                Dlse => callers.dlse,
                _ => input(&callers.primal, name),
            })
        })?;
        waited += self.ring_tangents(inputs, gradients.as_deref_mut(), start)?;
        let TangentOutputs { out_tangent, lse_tangent, out, lse } = outputs.as_mut();
        let mut targets = Targets::new();
        for (name, view) in [
            (PassTensor::OutTangent, Some(out_tangent)),
            (PassTensor::LseTangent, Some(lse_tangent)),
            (PassTensor::Out, out),
            (PassTensor::Lse, lse),
        ] {
            let target = view.map(|view| ResultTarget::new(name.turn_mut(view.reborrow())));
            targets.extend(target.map(|target| (name, target)));
        }
        let Some(gradients) = gradients else {
            return Ok(waited + self.send_to(pass, &list, &mut targets)?);
        };
        waited += self.send_gradients(pass, &list, &mut targets, gradients, None)?;
        Ok(waited + self.sum_gradients(gradients)?)
    }

    /// Returns the tensors that are exchanged before the ring of a pass.
    fn inputs_of(&self, kind: PassKind) -> FieldList {
        let PassFields { fields, inputs, .. } = self.fields_of(kind);
        FieldList { names: inputs.clone(), fields: fields.inputs.clone(), tag: 0 }
    }

    /// Returns the tensors that are exchanged after the ring of a pass.
    fn outputs_of(&self, kind: PassKind) -> FieldList {
        let PassFields { fields, outputs, .. } = self.fields_of(kind);
        let [tag, _] = later_tags(kind);
        FieldList { names: outputs.clone(), fields: fields.outputs.clone(), tag }
    }

    /// Returns the rounding residual of out, which is exchanged after the ring of a forward pass
    /// and before that of a backward pass.
    fn residual_of(&self, kind: PassKind) -> FieldList {
        let [_, tag] = later_tags(kind);
        let fields = self.residual.into_iter().collect();
        FieldList { names: vec![PassTensor::OutResidual], fields, tag }
    }

    /// Exchanges the caller's tensors, `given` as a pass takes them, for those of the own heads.
    /// `None` is a tensor of zeros.
    fn receive_inputs<'a>(
        &mut self,
        pass: GridPass,
        list: &FieldList,
        given: impl Fn(PassTensor) -> Result<Option<HostView<'a>>>,
    ) -> Result<Duration> {
        let observer = Observer::of_messages(self.hook.as_ref(), self.rank, pass.kind, pass.start);
        let mut transport = HostMessages::new(&mut self.transport);
        let mut in_flight = InFlight::new(&mut transport, pass.first_tag, self.lengths, observer);
        let bytes = self.exchange.input_bytes(&list.fields);
        let HeadExchange { grid, member, ranks, rows, segments, buffers } = &mut self.exchange;
        let messages = Messages { ranks, member: *member, bytes, tag: list.tag, step: 0 };
        let own = rows[*member];
        let tensors = &mut self.tensors;
        let pack = |to: usize, mut into: &mut [u8]| {
            for (name, field) in list.pairs() {
                if !grid.shares(field.side, *member, to) {
                    continue;
                }
                let packed = match given(name)?.map(|view| name.turn(view)) {
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
            for (name, field) in list.pairs() {
                let rows = &segments[from][side_index(field.side)];
                let heads = 0..field.heads.count(grid);
                let unpacked = tensors.view_mut(name)?.unpack(rows, heads, bytes)?;
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
        list: &FieldList,
        targets: &mut Targets<'_>,
    ) -> Result<Duration> {
        let grid = self.grid;
        let own = self.exchange.member;
        let rows = self.exchange.rows[own];
        self.send_outputs(pass, list, |from, mut bytes| {
            for (name, field) in list.pairs() {
                if grid.shares(field.side, own, from) {
                    let heads = field.heads.range(&grid, from);
                    let unpacked = match targets.get_mut(&name) {
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
        list: &FieldList,
        unpack: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<Duration> {
        let observer = Observer::of_messages(self.hook.as_ref(), self.rank, pass.kind, pass.start);
        let mut transport = HostMessages::new(&mut self.transport);
        let mut in_flight = InFlight::new(&mut transport, pass.first_tag, self.lengths, observer);
        let bytes = self.exchange.output_bytes(&list.fields);
        let HeadExchange { grid, member, ranks, segments, buffers, .. } = &mut self.exchange;
        // the step after the last one of the ring
        let step = grid.groups();
        let messages = Messages { ranks, member: *member, bytes, tag: list.tag, step };
        let tensors = &mut self.tensors;
        let pack = |to: usize, mut into: &mut [u8]| {
            for (name, field) in list.pairs() {
                let rows = &segments[to][side_index(field.side)];
                let heads = 0..field.heads.count(grid);
                let packed = tensors.view(name)?.pack(rows, heads, into)?;
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
    fn reborrow(&mut self) -> ResultTarget<'_> {
        ResultTarget { view: self.view.reborrow(), adds: self.adds }
    }

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

/// Returns the caller's tensor of a forward pass.
fn input<'a>(inputs: &Inputs<HostView<'a>>, name: PassTensor) -> Option<HostView<'a>> {
    match name {
        PassTensor::Q => Some(inputs.q),
        PassTensor::K => Some(inputs.k),
        PassTensor::V => Some(inputs.v),
        PassTensor::Bias => inputs.bias,
        _ => None,
    }
}

/// Returns the caller's tensor of a backward pass, or that which is sent in its place with several
/// key columns; `None` in place of no dlse, so that sizes do not depend on arguments.
fn backward_input<'a>(
    inputs: &BackwardInputs<HostView<'a>>,
    columns: Option<&'a ColumnGradients>,
    name: PassTensor,
) -> Result<Option<HostView<'a>>> {
    let share = columns.and_then(|columns| columns.minus_share.as_ref());
    Ok(match (name, columns, share) {
        (PassTensor::Out, ..) => Some(inputs.out),
        (PassTensor::OutResidual, ..) => inputs.out_residual,
        (PassTensor::Dout, ..) => Some(inputs.dout),
        (PassTensor::Max, ..) => Some(inputs.max),
        (PassTensor::Sum, ..) => Some(match inputs.sum {
            Some(sum) => sum,
            None => HostView::ones(inputs.max.dtype(), inputs.max.shape())?,
        }),
        (PassTensor::Dlse, Some(columns), _) => Some(name.turn(columns.minus_delta.view()?)),
        (PassTensor::Dlse, None, _) => inputs.dlse,
        (PassTensor::Ties, _, Some(share)) => Some(name.turn(share.view()?)),
        (PassTensor::Ties, _, None) => inputs.ties,
        _ => input(&inputs.forward, name),
    })
}
