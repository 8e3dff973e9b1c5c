//! Tensors of the heads of one member: all query rows of its group and all key rows of its group
//! and column, allocated with the plan.

//!
//! With several key columns the partial results of the own queries are merged, each when it arrives:
//! the own column first, then those before it, descending. The order depends on the grid alone.
//!
//! ```text
//! forward    (out, max, sum) of each column, and ties if the output is not normalised: an online
//!            softmax over columns, in f64 (`merged_softmax.rs`)
//! backward   dq = Σ over columns of the partial dq, in the accumulator's type
//! ```

use annulus_core::{
    BackwardInputs, DType, Dims, Error, Host, HostBuffer, HostView, HostViewMut, Result, Side,
    Space, Spec, index,
};
use annulus_plan::{HeadAxis, HeadField};

use super::exchange::{HeadExchange, count_bytes};
use crate::merged_softmax::PartialMerge;

/// A dense tensor `[batch, rows, heads, elements]`.
pub(super) struct ShardTensor {
    buffer: HostBuffer,
    dtype: DType,
    shape: [usize; 4],
}

impl ShardTensor {
    pub(super) fn new(field: &HeadField, rows: u64, heads: usize) -> Result<Self> {
        Self::with_shape([field.batch, index(rows), heads, field.dim], field.dtype)
    }

    pub(super) fn with_shape(shape: [usize; 4], dtype: DType) -> Result<Self> {
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

    /// Returns the tensor as `[batch, heads, rows, elements]`, as a pass takes statistics and bias.
    pub(super) fn heads_first(&self) -> Result<HostView<'_>> {
        self.view().map(HostView::swap_rows_and_heads)
    }

    /// As [`ShardTensor::heads_first`], for writing.
    pub(super) fn heads_first_mut(&mut self) -> Result<HostViewMut<'_>> {
        self.view_mut().map(HostViewMut::swap_rows_and_heads)
    }

    pub(super) fn bytes(&self) -> u64 {
        Host::size(&self.buffer)
    }
}

/// The tensors of a pass over the heads of one member.
pub(super) struct ShardTensors {
    pub(super) inputs: InputTensors,
    pub(super) out: ShardTensor,
    /// Rounding residual of out, allocated by the first pass that asks for it.
    pub(super) out_residual: Option<ShardTensor>,
    pub(super) lse: ShardTensor,
    pub(super) max: ShardTensor,
    pub(super) sum: ShardTensor,
    /// Of an output that is not normalised.
    pub(super) ties: Option<ShardTensor>,
    pub(super) backward: Option<ShardGradients>,
    /// Of several key columns.
    pub(super) columns: Option<ColumnTensors>,
}

/// Inputs of a forward pass that are exchanged.
pub(super) struct InputTensors {
    pub(super) q: ShardTensor,
    /// K and V, if heads are divided.
    pub(super) kv: Option<[ShardTensor; 2]>,
    /// A bias with a query axis.
    pub(super) bias: Option<ShardTensor>,
}

/// The further tensors of a backward pass.
pub(super) struct ShardGradients {
    pub(super) dout: ShardTensor,
    /// dlse, or −delta with several key columns.
    pub(super) dlse: ShardTensor,
    pub(super) dq: ShardTensor,
    /// dK and dV, if heads are divided.
    pub(super) dkv: Option<[ShardTensor; 2]>,
    pub(super) dbias: Option<ShardTensor>,
    /// dK and dV of the own rows and all heads, if several members have parts of them.
    pub(super) sums: Option<[ShardTensor; 2]>,
}

impl ShardTensors {
    /// Allocates the tensors of `spec`, that of all heads.
    pub(super) fn new(spec: &Spec, exchange: &HeadExchange, backward: bool) -> Result<Self> {
        let Dims { batch, head_dim, value_dim, kv_heads, .. } = spec.dims;
        let sums_dtype = spec.dtype.accumulator();
        let tensor = |side, heads: HeadAxis, dim, dtype, batch| {
            let field = HeadField { side, heads, batch, dim, dtype };
            let heads = heads.count(&exchange.grid);
            ShardTensor::new(&field, exchange.group_rows(side), heads)
        };
        let query = |dim, dtype| tensor(Side::Q, HeadAxis::Query, dim, dtype, batch);
        let kv = |dim| tensor(Side::Kv, HeadAxis::Kv, dim, spec.dtype, batch);
        let bias = || {
            let shape = spec.bias.filter(|shape| shape[2] != 1);
            let of = |[batch, heads, _, keys]: [usize; 4]| {
                let heads = if heads == 1 { HeadAxis::Shared } else { HeadAxis::Query };
                tensor(Side::Q, heads, keys, sums_dtype, batch)
            };
            shape.map(of).transpose()
        };
        let statistic = || query(1, sums_dtype);
        let own_keys = |dim| {
            let field =
                HeadField { side: Side::Kv, heads: HeadAxis::Kv, batch, dim, dtype: sums_dtype };
            let [rows] = exchange.own_rows(Side::Kv);
            ShardTensor::new(&field, rows.count as u64, kv_heads)
        };
        let has_replicas = exchange.grid.replicas() > 1;
        let divides_heads = exchange.grid.head_parts() > 1;
        let has_columns = exchange.grid.columns() > 1;
        let results_dtype = if has_columns { sums_dtype } else { spec.dtype };
        let kv_pair = || {
            let pair = || Ok([kv(head_dim)?, kv(value_dim)?]);
            divides_heads.then(pair).transpose()
        };
        let gradients = || {
            Ok(ShardGradients {
                dout: query(value_dim, spec.dtype)?,
                dlse: statistic()?,
                dq: query(head_dim, results_dtype)?,
                dkv: kv_pair()?,
                dbias: bias()?,
                sums: has_replicas
                    .then(|| Ok([own_keys(head_dim)?, own_keys(value_dim)?]))
                    .transpose()?,
            })
        };
        Ok(Self {
            inputs: InputTensors { q: query(head_dim, spec.dtype)?, kv: kv_pair()?, bias: bias()? },
            out: query(value_dim, results_dtype)?,
            out_residual: None,
            lse: statistic()?,
            max: statistic()?,
            sum: statistic()?,
            ties: (!spec.normalize).then(statistic).transpose()?,
            backward: backward.then(gradients).transpose()?,
            columns: has_columns
                .then(|| {
                    let [rows] = exchange.own_rows(Side::Q);
                    ColumnTensors::new(spec, rows.count as u64, backward)
                })
                .transpose()?,
        })
    }

    /// Returns the bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        let Self { inputs, out, out_residual, lse, max, sum, ties, backward, columns } = self;
        let InputTensors { q, kv, bias } = inputs;
        let statistics = [max, sum].into_iter().chain(ties).chain(out_residual);
        let gradients = backward.iter().flat_map(|of| {
            let ShardGradients { dout, dlse, dq, dkv, dbias, sums } = of;
            let pairs = dkv.iter().chain(sums).flatten();
            [dout, dlse, dq].into_iter().chain(dbias).chain(pairs)
        });
        let forward = [q, out, lse].into_iter().chain(kv.iter().flatten()).chain(bias);
        let tensors: u64 = forward.chain(statistics).chain(gradients).map(ShardTensor::bytes).sum();
        tensors + columns.as_ref().map_or(0, ColumnTensors::bytes)
    }

    /// Returns the tensors that a forward pass receives, in the order of its fields.
    pub(super) fn forward_inputs(&mut self) -> Vec<&mut ShardTensor> {
        self.inputs.tensors().collect()
    }

    /// Returns the tensors that a forward pass sends, in the order of its fields.
    pub(super) fn forward_outputs(&self, has_columns: bool) -> Vec<&ShardTensor> {
        // lse is computed from the merged statistics of columns
        let lse = (!has_columns).then_some(&self.lse);
        let statistics = [&self.max, &self.sum].into_iter().chain(&self.ties);
        std::iter::once(&self.out).chain(lse).chain(statistics).collect()
    }

    /// Returns the tensors that a backward pass receives, in the order of its fields.
    pub(super) fn backward_inputs(&mut self) -> Vec<&mut ShardTensor> {
        let Self { inputs, out, max, sum, ties, backward, columns, .. } = self;
        let gradients = backward.iter_mut().flat_map(|of| [&mut of.dout, &mut of.dlse]);
        // −delta is sent in place of out
        let out = columns.is_none().then_some(out);
        let forward = inputs.tensors().chain(out).chain([max, sum]);
        forward.chain(gradients).chain(ties).collect()
    }
}

impl InputTensors {
    /// Returns all tensors, in the order of their fields.
    fn tensors(&mut self) -> impl Iterator<Item = &mut ShardTensor> {
        let Self { q, kv, bias } = self;
        std::iter::once(q).chain(kv.iter_mut().flatten()).chain(bias)
    }
}

impl ShardGradients {
    /// Returns the tensors that a backward pass sends, in the order of its fields.
    pub(super) fn outputs(&self) -> Vec<&ShardTensor> {
        let dkv = self.dkv.iter().flatten();
        std::iter::once(&self.dq).chain(dkv).chain(&self.dbias).collect()
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
    pub(super) fn new(spec: &Spec, rows: u64, backward: bool) -> Result<Self> {
        let Dims { batch, q_heads, head_dim, value_dim, .. } = spec.dims;
        let sums = spec.dtype.accumulator();
        let tensor = |dim| ShardTensor::with_shape([batch, index(rows), q_heads, dim], sums);
        let gradients = || {
            let minus_share = (!spec.normalize).then(|| tensor(1)).transpose()?;
            Ok(ColumnGradients { minus_delta: tensor(1)?, minus_share, dq: tensor(head_dim)? })
        };
        let backward = backward.then(gradients).transpose()?;
        let shape = [batch, index(rows), q_heads, value_dim];
        let merge = PartialMerge::new(shape, spec.normalize)?;
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
