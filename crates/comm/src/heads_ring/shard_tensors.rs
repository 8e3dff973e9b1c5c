//! Tensors of the heads of one member: all query rows of its group and all key rows of its group
//! and column, allocated with the plan.

use annulus_core::{Dims, Result, Side, Spec};
use annulus_plan::{HeadAxis, HeadField};

use super::{column_merge::ColumnTensors, exchange::HeadExchange, shard_tensor::ShardTensor};

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
