//! Tensors of the heads of one member: all query rows of its group and all key rows of its group
//! and column, allocated with the plan.

//!
//! With several key columns the partial results of the own queries are merged, each when it
//! arrives: the own column first, then those before it, descending. The order depends on the grid
//! alone.
//!
//! ```text
//! forward    (out, max, sum) of each column, and ties if the output is not normalised: an online
//!            softmax over columns, in f64 (`merged_softmax.rs`)
//! backward   dq = Σ over columns of the partial dq, in the accumulator's type
//! ```

use std::collections::{BTreeMap, btree_map::Entry};

use annulus_core::{
    BackwardInputs, DType, Dims, Error, Host, HostBuffer, HostView, HostViewMut, Result, Side,
    Space, Spec, index,
};
use annulus_plan::{ExchangeFields, HeadField, HeadGrid};

use super::exchange::{HeadExchange, count_bytes};
use crate::merged_softmax::PartialMerge;

/// A dense tensor `[batch, rows, heads, elements]`.
pub(super) struct ShardTensor {
    buffer: HostBuffer,
    dtype: DType,
    shape: [usize; 4],
}

impl ShardTensor {
    pub(super) fn new(shape: [usize; 4], dtype: DType) -> Result<Self> {
        let lengths = shape.into_iter().chain([dtype.bytes()]);
        let bytes = lengths.fold(1, |bytes: u128, len| bytes * len as u128);
        let buffer = HostBuffer::zeroed(count_bytes(bytes))?;
        Ok(Self { buffer, dtype, shape })
    }

    pub(super) fn view(&self) -> Result<HostView<'_>> {
        HostView::of_bytes(self.buffer.bytes(), self.dtype, self.shape)
    }

    pub(super) fn view_mut(&mut self) -> Result<HostViewMut<'_>> {
        let bytes = self.buffer.bytes_mut().unwrap_or_default();
        HostViewMut::of_bytes(bytes, self.dtype, self.shape)
    }

    pub(super) fn bytes(&self) -> u64 {
        Host::size(&self.buffer)
    }
}

/// A tensor of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PassTensor {
    Q,
    K,
    V,
    /// A bias with a query axis.
    Bias,
    QTangent,
    KTangent,
    VTangent,
    BiasTangent,
    Out,
    Lse,
    OutTangent,
    LseTangent,
    Max,
    Sum,
    /// Of an output that is not normalised; in a backward pass of several key columns the shares of
    /// the maxima.
    Ties,
    OutResidual,
    /// Of a spec with statistics.
    Statistics,
    Dout,
    /// dlse; −delta with several key columns.
    Dlse,
    Dq,
    Dk,
    Dv,
    Dbias,
}

impl PassTensor {
    /// Returns true for a tensor that a pass takes as `[batch, heads, rows, elements]`: a statistic
    /// or a bias. All others, and all tensors in messages, are `[batch, rows, heads, elements]`.
    const fn is_heads_first(self) -> bool {
        use PassTensor::{
            Bias, BiasTangent, Dbias, Dlse, Lse, LseTangent, Max, Statistics, Sum, Ties,
        };
        matches!(
            self,
            Bias | BiasTangent | Dbias | Dlse | Lse | LseTangent | Max | Statistics | Sum | Ties
        )
    }

    /// Returns the gradient of an input.
    const fn gradient(self) -> Self {
        match self {
            Self::K => Self::Dk,
            Self::V => Self::Dv,
            Self::Bias => Self::Dbias,
            _ => Self::Dq,
        }
    }

    /// Returns the tangent of an input.
    pub(super) const fn tangent(self) -> Self {
        match self {
            Self::K => Self::KTangent,
            Self::V => Self::VTangent,
            Self::Bias => Self::BiasTangent,
            _ => Self::QTangent,
        }
    }

    /// Converts a tensor between the forms of a pass and of messages.
    pub(super) fn turn(self, view: HostView<'_>) -> HostView<'_> {
        if self.is_heads_first() { view.swap_rows_and_heads() } else { view }
    }

    /// As [`PassTensor::turn`], for writing.
    pub(super) fn turn_mut(self, view: HostViewMut<'_>) -> HostViewMut<'_> {
        if self.is_heads_first() { view.swap_rows_and_heads() } else { view }
    }
}

/// Tensors that are exchanged before and after a pass: their fields and, in the same order, their
/// names.
pub(super) struct PassFields {
    pub(super) fields: ExchangeFields,
    pub(super) inputs: Vec<PassTensor>,
    pub(super) outputs: Vec<PassTensor>,
}

impl PassFields {
    /// Returns the tensors of a forward pass.
    pub(super) fn forward(spec: &Spec, grid: &HeadGrid) -> Self {
        use PassTensor::{Lse, Max, Out, Statistics, Sum, Ties};
        // lse is computed from the merged statistics of columns
        let lse = (grid.columns() == 1).then_some(Lse);
        let ties = (!spec.normalize).then_some(Ties);
        let statistics = spec.statistics.then_some(Statistics);
        let outputs = std::iter::once(Out).chain(lse).chain([Max, Sum]);
        let outputs = outputs.chain(ties).chain(statistics).collect();
        let fields = ExchangeFields::of_forward(spec, grid);
        Self { fields, inputs: Self::input_names(spec, grid), outputs }
    }

    /// Returns the tensors of a backward pass.
    pub(super) fn backward(spec: &Spec, grid: &HeadGrid) -> Self {
        use PassTensor::{Dlse, Dout, Max, Out, Sum, Ties};
        let mut inputs = Self::input_names(spec, grid);
        let outputs = inputs.iter().map(|name| name.gradient()).collect();
        // −delta is sent in place of out
        inputs.extend((grid.columns() == 1).then_some(Out));
        inputs.extend([Max, Sum, Dout, Dlse]);
        inputs.extend((!spec.normalize).then_some(Ties));
        Self { fields: ExchangeFields::of_backward(spec, grid), inputs, outputs }
    }

    /// Returns the tensors of a JVP or, if `is_double`, of a double backward.
    pub(super) fn tangents(spec: &Spec, grid: &HeadGrid, is_double: bool) -> Self {
        use PassTensor::{Dlse, Dout, Lse, LseTangent, Out, OutTangent};
        let own = Self::input_names(spec, grid);
        let direction = own.iter().map(|name| name.tangent());
        let mut inputs: Vec<PassTensor> = own.iter().copied().chain(direction).collect();
        let mut outputs = vec![OutTangent, LseTangent];
        if is_double {
            inputs.extend([Dout, Dlse]);
            outputs.extend(own.iter().map(|name| name.gradient()));
        } else {
            outputs.extend([Out, Lse]);
        }
        Self { fields: ExchangeFields::of_tangents(spec, grid, is_double), inputs, outputs }
    }

    fn input_names(spec: &Spec, grid: &HeadGrid) -> Vec<PassTensor> {
        use PassTensor::{Bias, K, Q, V};
        let kv = (grid.head_parts() > 1).then_some([K, V]);
        let bias = spec.bias.filter(|shape| shape[2] != 1).map(|_| Bias);
        std::iter::once(Q).chain(kv.into_iter().flatten()).chain(bias).collect()
    }

    /// Returns all tensors.
    fn all(&self) -> impl Iterator<Item = (PassTensor, &HeadField)> {
        let names = self.inputs.iter().chain(&self.outputs).copied();
        names.zip(self.fields.inputs.iter().chain(&self.fields.outputs))
    }
}

/// Tensors by name.
pub(super) type TensorSet = BTreeMap<PassTensor, ShardTensor>;

/// Returns tensors as a pass takes them.
pub(super) fn views(set: &TensorSet) -> Result<BTreeMap<PassTensor, HostView<'_>>> {
    set.iter().map(|(&name, tensor)| Ok((name, name.turn(tensor.view()?)))).collect()
}

/// As [`views`], for writing.
pub(super) fn views_mut(set: &mut TensorSet) -> Result<BTreeMap<PassTensor, HostViewMut<'_>>> {
    set.iter_mut().map(|(&name, tensor)| Ok((name, name.turn_mut(tensor.view_mut()?)))).collect()
}

/// Returns the error of a tensor that the plan lacks.
pub(super) fn no_tensor() -> Error {
    Error::internal("a tensor of a pass that the plan has not allocated")
}

/// The tensors of a pass over the heads of one member.
#[derive(Default)]
pub(super) struct ShardTensors {
    /// Inputs, and dout and dlse.
    pub(super) inputs: TensorSet,
    /// Results of a forward pass. The rounding residual of out is allocated by the first pass that
    /// asks for it.
    pub(super) results: TensorSet,
    pub(super) gradients: TensorSet,
    /// dK and dV of the own rows and all heads, if several members have parts of them.
    pub(super) sums: Option<[ShardTensor; 2]>,
    /// Of several key columns.
    pub(super) columns: Option<ColumnTensors>,
}

impl ShardTensors {
    /// Allocates the tensors of `passes` of `spec`, that of all heads.
    pub(super) fn new(
        spec: &Spec,
        exchange: &HeadExchange,
        passes: &[&PassFields],
        backward: bool,
    ) -> Result<Self> {
        let mut tensors = Self::default();
        for (name, field) in passes.iter().flat_map(|pass| pass.all()) {
            tensors.add(name, field, exchange)?;
            if name == PassTensor::Max {
                tensors.add(PassTensor::Lse, field, exchange)?;
            }
        }
        let Dims { batch, head_dim, value_dim, kv_heads, .. } = spec.dims;
        let [q_rows, kv_rows] = [Side::Q, Side::Kv].map(|side| exchange.own_rows(side)[0].count);
        if backward && exchange.grid.replicas() > 1 {
            let sum = |dim| {
                let shape = [batch, kv_rows, kv_heads, dim];
                ShardTensor::new(shape, spec.dtype.accumulator())
            };
            tensors.sums = Some([sum(head_dim)?, sum(value_dim)?]);
        }
        if exchange.grid.columns() > 1 {
            tensors.columns = Some(ColumnTensors::new(spec, q_rows, backward)?);
        }
        Ok(tensors)
    }

    /// Allocates a tensor of the own heads, unless there is one.
    pub(super) fn add(
        &mut self,
        name: PassTensor,
        field: &HeadField,
        exchange: &HeadExchange,
    ) -> Result<()> {
        if let Entry::Vacant(entry) = self.set_of(name).entry(name) {
            let rows = index(exchange.group_rows(field.side));
            let shape = [field.batch, rows, field.heads.count(&exchange.grid), field.dim];
            entry.insert(ShardTensor::new(shape, field.dtype)?);
        }
        Ok(())
    }

    fn set_of(&mut self, name: PassTensor) -> &mut TensorSet {
        use PassTensor::{
            Bias, BiasTangent, Dbias, Dk, Dlse, Dout, Dq, Dv, K, KTangent, Q, QTangent, V, VTangent,
        };
        match name {
            Q | K | V | Bias | Dout | Dlse => &mut self.inputs,
            QTangent | KTangent | VTangent | BiasTangent => &mut self.inputs,
            Dq | Dk | Dv | Dbias => &mut self.gradients,
            _ => &mut self.results,
        }
    }

    /// Returns a tensor, as it is in messages.
    pub(super) fn view(&mut self, name: PassTensor) -> Result<HostView<'_>> {
        self.set_of(name).get(&name).ok_or_else(no_tensor)?.view()
    }

    /// As [`ShardTensors::view`], for writing.
    pub(super) fn view_mut(&mut self, name: PassTensor) -> Result<HostViewMut<'_>> {
        self.set_of(name).get_mut(&name).ok_or_else(no_tensor)?.view_mut()
    }

    /// Returns the bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        let sets = [&self.inputs, &self.results, &self.gradients].map(BTreeMap::values);
        let tensors = sets.into_iter().flatten().chain(self.sums.iter().flatten());
        tensors.map(ShardTensor::bytes).sum::<u64>()
            + self.columns.as_ref().map_or(0, ColumnTensors::bytes)
    }
}

/// Tensors of the own queries and all heads in a plan with several key columns.
pub(super) struct ColumnTensors {
    pub(super) merge: PartialMerge,
    /// Of a plan with a backward pass.
    pub(super) backward: Option<ColumnGradients>,
}

/// Tensors of the own queries in a backward pass.
pub(super) struct ColumnGradients {
    /// dlse − ⟨out, dout⟩; of an output that is not normalised dlse.
    pub(super) minus_delta: ShardTensor,
    /// −⟨out, dout⟩ / ties, of an output that is not normalised.
    pub(super) minus_share: Option<ShardTensor>,
    /// Sum of the partial dq.
    pub(super) dq: ShardTensor,
}

impl ColumnTensors {
    /// Allocates the tensors of `rows` own queries.
    pub(super) fn new(spec: &Spec, rows: usize, backward: bool) -> Result<Self> {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
        let sums = spec.dtype.accumulator();
        let tensor = |dim| ShardTensor::new([batch, rows, q_heads, dim], sums);
        let gradients = || {
            let minus_share = (!spec.normalize).then(|| tensor(1)).transpose()?;
            Ok(ColumnGradients { minus_delta: tensor(1)?, minus_share, dq: tensor(head_dim)? })
        };
        let backward = backward.then(gradients).transpose()?;
        let shape = [batch, rows, q_heads, value_dim];
        let merge = PartialMerge::new(shape, spec.normalize, spec.statistics)?;
        Ok(Self { merge, backward })
    }

    pub(super) fn bytes(&self) -> u64 {
        let gradients = self
            .backward
            .iter()
            .flat_map(|of| [&of.minus_delta, &of.dq].into_iter().chain(&of.minus_share));
        self.merge.bytes() + gradients.map(ShardTensor::bytes).sum::<u64>()
    }
}

impl ColumnGradients {
    /// Computes −delta of the own queries, or dlse and the shares of their maxima.
    ///
    /// # Errors
    /// [`Error::Internal`] without ties of an output that is not normalised.
    pub(super) fn compute(&mut self, inputs: &BackwardInputs<HostView<'_>>) -> Result<()> {
        let subtract = |into: &mut HostViewMut<'_>| {
            let parts = std::iter::once(&inputs.out).chain(&inputs.out_residual);
            parts.for_each(|out| into.subtract_row_products(out, &inputs.dout));
        };
        let mut into = self.minus_delta.view_mut()?;
        match inputs.dlse {
            Some(dlse) => into.round_from(&dlse.swap_rows_and_heads()),
            None => into.fill_zero(),
        }
        let Some(share) = &mut self.minus_share else {
            subtract(&mut into);
            return Ok(());
        };
        let ties = inputs.ties.ok_or_else(|| Error::internal("no ties"))?;
        let mut into = share.view_mut()?;
        into.fill_zero();
        subtract(&mut into);
        into.divide(&ties.swap_rows_and_heads());
        Ok(())
    }
}
