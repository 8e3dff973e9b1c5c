//! Tensors that the members of a group exchange: rows of all heads for heads of all rows.

use super::HeadGrid;
use crate::{BackwardMode, DType, Dims, Side, Spec};

/// Heads of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadAxis {
    /// Query heads.
    Query,
    /// KV heads.
    Kv,
    /// One, which all heads share.
    Shared,
}

/// A tensor that is exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadField {
    /// Sequence of its rows.
    pub side: Side,
    /// Its heads.
    pub heads: HeadAxis,
    /// Batch rows.
    pub batch: usize,
    /// Elements per row and head.
    pub dim: usize,
    /// Element type.
    pub dtype: DType,
}

/// Tensors that are exchanged before and after a pass over the heads of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeFields {
    /// Sent as own rows of each member's heads: `[q, k, v]`, bias; of a backward pass also
    /// `[out, lse, dout, dlse]`, and of an output that is not normalised max and ties.
    pub inputs: Vec<HeadField>,
    /// Sent as each member's rows of the own heads: `[out, lse]`, and of an output that is not
    /// normalised max, sum and ties; of a backward pass `[dq, dk, dv]`, dbias.
    pub outputs: Vec<HeadField>,
}

impl HeadAxis {
    /// Returns the number of heads of a member's part.
    pub fn count(self, grid: &HeadGrid) -> usize {
        self.range(grid, 0).len()
    }

    /// Returns the heads of a member.
    pub const fn range(self, grid: &HeadGrid, member: usize) -> std::ops::Range<usize> {
        match self {
            Self::Query => grid.q_heads(member),
            Self::Kv => grid.kv_heads(member),
            Self::Shared => 0..1,
        }
    }
}

impl HeadField {
    /// Returns the bytes of `rows` rows of the heads of one member.
    pub fn bytes(&self, grid: &HeadGrid, rows: u64) -> u128 {
        let row = [self.batch, self.heads.count(grid), self.dim, self.dtype.bytes()];
        row.into_iter().fold(rows.into(), |bytes, len| bytes * len as u128)
    }
}

impl ExchangeFields {
    /// Returns the tensors of a forward pass.
    pub fn of_forward(spec: &Spec) -> Self {
        let fields = Fields(spec);
        let statistics = if spec.normalize { 0 } else { 3 };
        let mut outputs = vec![fields.out(), fields.statistic()];
        outputs.extend([fields.statistic()].repeat(statistics));
        Self { inputs: fields.inputs(), outputs }
    }

    /// Returns the tensors of a backward pass.
    pub fn of_backward(spec: &Spec) -> Self {
        let fields = Fields(spec);
        let statistics = if spec.normalize { 0 } else { 2 };
        let mut inputs = fields.inputs();
        let out = fields.out();
        let lse = fields.statistic();
        inputs.extend([out, lse, out, lse]);
        inputs.extend([lse].repeat(statistics));
        // gradients have the shapes of their inputs
        Self { inputs, outputs: fields.inputs() }
    }

    /// Returns the bytes that a member sends: before the pass as many to each other member, after
    /// it to each the rows of that member. `rows` are the query and the key rows of every member.
    pub fn bytes_sent(&self, grid: &HeadGrid, member: usize, rows: &[[u64; 2]]) -> u128 {
        let bytes = |fields: &[HeadField], of: &[u64; 2]| {
            let of_side = |side| of[usize::from(side == Side::Kv)];
            fields.iter().map(|field| field.bytes(grid, of_side(field.side))).sum::<u128>()
        };
        let others = || rows.iter().enumerate().filter(|&(other, _)| other != member);
        let own = rows.get(member).copied().unwrap_or_default();
        let inputs = bytes(&self.inputs, &own) * others().count() as u128;
        let outputs: u128 = others().map(|(_, of)| bytes(&self.outputs, of)).sum();
        inputs + outputs
    }

    /// Returns the bytes of the largest message between members with these rows.
    pub fn most_bytes(&self, grid: &HeadGrid, rows: &[[u64; 2]]) -> u128 {
        let most = |side: usize| rows.iter().map(|of| of[side]).max().unwrap_or(0);
        let bytes = |fields: &[HeadField]| {
            let of =
                |field: &HeadField| field.bytes(grid, most(usize::from(field.side == Side::Kv)));
            fields.iter().map(of).sum::<u128>()
        };
        bytes(&self.inputs).max(bytes(&self.outputs))
    }
}

impl ExchangeFields {
    /// Returns the bytes of the tensors of the own heads, of `rows` query and key rows.
    pub(super) fn tensor_bytes(&self, grid: &HeadGrid, rows: [u64; 2]) -> u128 {
        let of = |field: &HeadField| field.bytes(grid, rows[usize::from(field.side == Side::Kv)]);
        self.inputs.iter().chain(&self.outputs).map(of).sum()
    }
}

struct Fields<'a>(&'a Spec);

impl Fields<'_> {
    fn field(&self, side: Side, heads: HeadAxis, dim: usize) -> HeadField {
        HeadField { side, heads, batch: self.0.dims.batch, dim, dtype: self.0.dtype }
    }

    fn inputs(&self) -> Vec<HeadField> {
        let Dims { head_dim, value_dim, .. } = self.0.dims;
        let q = self.field(Side::Q, HeadAxis::Query, head_dim);
        let k = self.field(Side::Kv, HeadAxis::Kv, head_dim);
        let v = self.field(Side::Kv, HeadAxis::Kv, value_dim);
        [q, k, v].into_iter().chain(self.bias()).collect()
    }

    fn out(&self) -> HeadField {
        self.field(Side::Q, HeadAxis::Query, self.0.dims.value_dim)
    }

    fn statistic(&self) -> HeadField {
        let field = self.field(Side::Q, HeadAxis::Query, 1);
        HeadField { dtype: self.0.dtype.accumulator(), ..field }
    }

    /// A bias tensor with a query axis; without one, every rank has all of it.
    fn bias(&self) -> Option<HeadField> {
        let [batch, heads, _, dim] = self.0.bias.filter(|shape| shape[2] != 1)?;
        let heads = if heads == 1 { HeadAxis::Shared } else { HeadAxis::Query };
        let dtype = self.0.dtype.accumulator();
        Some(HeadField { side: Side::Q, heads, batch, dim, dtype })
    }
}

/// Returns the form of the backward pass over several ranks: two passes in the reproducible order,
/// whatever the spec says, because no accumulator is sent.
pub(super) fn backward_mode(spec: &Spec) -> BackwardMode {
    if spec.leaf_rows.is_some() { BackwardMode::TwoPass } else { spec.backward }
}
