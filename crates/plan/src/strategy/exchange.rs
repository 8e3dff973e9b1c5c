//! Tensors that the members of a group exchange: rows of all heads for heads of all rows.

use super::HeadGrid;
use annulus_core::{BackwardMode, DType, Dims, Side, Spec};

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

/// Tensors that are exchanged before and after a pass over the heads of a member. Rows of queries
/// are exchanged with all members of the group, those of keys with the members of the own column.
/// If heads are not divided, k, v, dk and dv stay on their rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeFields {
    /// Sent as own rows of each member's heads: `[q, k, v]`, bias; of a backward pass also
    /// `[out, max, sum, dout, dlse]`, and of an output that is not normalised ties. With several
    /// key columns `[max, sum, dout, −delta]` in place of `[out, max, sum, dout, dlse]`, and of an
    /// output that is not normalised `[max, sum, dout, dlse, −⟨out, dout⟩ / ties]`.
    pub inputs: Vec<HeadField>,
    /// Sent as each member's rows of the own heads: `[out, lse, max, sum]`, and of an output that
    /// is not normalised ties; of a backward pass `[dq, dk, dv]`, dbias. With several key columns
    /// out and dq are partial, in the accumulator's type, and lse is not sent.
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
    pub fn of_forward(spec: &Spec, grid: &HeadGrid) -> Self {
        let fields = Fields { spec, grid };
        // max and sum; lse; ties
        let statistics = 2 + usize::from(grid.columns() == 1) + usize::from(!spec.normalize);
        let mut outputs = vec![fields.result(fields.out())];
        outputs.extend([fields.statistic()].repeat(statistics));
        outputs.extend(spec.statistics.then(|| fields.score_statistics()));
        Self { inputs: fields.inputs(), outputs }
    }

    /// Returns the tensors of a backward pass.
    pub fn of_backward(spec: &Spec, grid: &HeadGrid) -> Self {
        let fields = Fields { spec, grid };
        let mut inputs = fields.inputs();
        // gradients have the shapes of their inputs
        let mut outputs = inputs.clone();
        outputs[0] = fields.result(outputs[0]);
        let out = fields.out();
        let statistic = fields.statistic();
        if grid.columns() == 1 {
            inputs.push(out);
        }
        inputs.extend([statistic, statistic, out, statistic]);
        inputs.extend((!spec.normalize).then_some(statistic));
        Self { inputs, outputs }
    }

    /// Returns the tensors of a JVP or, if `is_double`, of a double backward of one key column: the
    /// inputs and their direction; the tangents of out and lse. Of a JVP also `[out, lse]`, of a
    /// double backward `[dout, dlse]`, and the gradients.
    pub fn of_tangents(spec: &Spec, grid: &HeadGrid, is_double: bool) -> Self {
        let fields = Fields { spec, grid };
        let own = fields.inputs();
        let of_rows = [fields.out(), fields.statistic()];
        let mut inputs = own.repeat(2);
        let mut outputs = of_rows.to_vec();
        if is_double {
            inputs.extend(of_rows);
            outputs.extend(own);
        } else {
            outputs.extend(of_rows);
        }
        Self { inputs, outputs }
    }

    /// Returns the bytes that a member sends: before the pass its own rows to each other member,
    /// after it to each the rows of that member. `rows` are the query and the key rows of every
    /// member.
    pub fn bytes_sent(&self, grid: &HeadGrid, member: usize, rows: &[[u64; 2]]) -> u128 {
        let own = rows.get(member).copied().unwrap_or_default();
        let others = rows.iter().enumerate().filter(|&(other, _)| other != member);
        others
            .map(|(other, &of_other)| {
                Self::bytes_between(&self.inputs, grid, [member, other], own)
                    + Self::bytes_between(&self.outputs, grid, [member, other], of_other)
            })
            .sum()
    }

    /// Returns the bytes of `rows`, query and key rows, of the heads of one member, in a message
    /// between two members.
    pub fn bytes_between(
        fields: &[HeadField],
        grid: &HeadGrid,
        [member, other]: [usize; 2],
        rows: [u64; 2],
    ) -> u128 {
        let shared = fields.iter().filter(|field| grid.shares(field.side, member, other));
        shared.map(|field| field.bytes(grid, rows[usize::from(field.side == Side::Kv)])).sum()
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

struct Fields<'a> {
    spec: &'a Spec,
    grid: &'a HeadGrid,
}

impl Fields<'_> {
    fn field(&self, side: Side, heads: HeadAxis, dim: usize) -> HeadField {
        HeadField { side, heads, batch: self.spec.dims.batch, dim, dtype: self.spec.dtype }
    }

    fn inputs(&self) -> Vec<HeadField> {
        let Dims { head_dim, value_dim, .. } = self.spec.dims;
        let mut fields = vec![self.field(Side::Q, HeadAxis::Query, head_dim)];
        if self.grid.head_parts() > 1 {
            let of_keys = |dim| self.field(Side::Kv, HeadAxis::Kv, dim);
            fields.extend([head_dim, value_dim].map(of_keys));
        }
        fields.extend(self.bias());
        fields
    }

    /// A result of queries, which is partial with several key columns.
    fn result(&self, field: HeadField) -> HeadField {
        let is_partial = self.grid.columns() > 1;
        HeadField {
            dtype: if is_partial { field.dtype.accumulator() } else { field.dtype },
            ..field
        }
    }

    fn out(&self) -> HeadField {
        self.field(Side::Q, HeadAxis::Query, self.spec.dims.value_dim)
    }

    fn statistic(&self) -> HeadField {
        let field = self.field(Side::Q, HeadAxis::Query, 1);
        HeadField { dtype: self.spec.dtype.accumulator(), ..field }
    }

    fn score_statistics(&self) -> HeadField {
        HeadField { dim: Spec::SCORE_STATISTICS, ..self.statistic() }
    }

    /// A bias tensor with a query axis; without one, every rank has all of it.
    fn bias(&self) -> Option<HeadField> {
        let [batch, heads, _, dim] = self.spec.bias.filter(|shape| shape[2] != 1)?;
        let heads = if heads == 1 { HeadAxis::Shared } else { HeadAxis::Query };
        let dtype = self.spec.dtype.accumulator();
        Some(HeadField { side: Side::Q, heads, batch, dim, dtype })
    }
}

/// Returns the form of the backward pass over several ranks: two passes in the reproducible order,
/// whatever the spec says, because no accumulator is sent.
pub(crate) fn backward_mode(spec: &Spec) -> BackwardMode {
    if spec.leaf_rows.is_some() { BackwardMode::TwoPass } else { spec.backward }
}
