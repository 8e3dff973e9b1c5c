//! The wire format of one row: the schedule's, not a backend's, so that ranks with different backends share a ring.

use crate::DType;

/// One tensor's share of a record: `[batch][heads][dim]` elements, in that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowField {
    /// Heads.
    pub heads: usize,
    /// Elements a head.
    pub dim: usize,
    /// Element type.
    pub dtype: DType,
}

/// What travels for one row: its fields one after another. A block of n rows is n records in ascending local order, with no padding.
///
/// Keys and values: `[k: kv_heads × head_dim][v: kv_heads × value_dim]` in the inputs' type; their gradients: the same in the accumulator's type;
/// queries of the two-pass backward: `[q][dout][row statistics]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLayout {
    batch: usize,
    fields: Vec<RowField>,
}

impl RowLayout {
    /// A record of these fields.
    pub fn new(batch: usize, fields: Vec<RowField>) -> Self {
        Self { batch, fields }
    }

    /// Bytes of one row.
    pub fn bytes(&self) -> u64 {
        self.fields.iter().map(|field| self.field_bytes(field)).sum()
    }

    /// The fields in order.
    pub fn fields(&self) -> &[RowField] {
        &self.fields
    }

    /// Byte offset within a record of element 0 of head `head` of batch row `batch` of field `field`.
    pub fn offset(&self, field: usize, batch: usize, head: usize) -> u64 {
        let before: u64 = self.fields[..field].iter().map(|field| self.field_bytes(field)).sum();
        let RowField { heads, dim, dtype } = self.fields[field];
        before + ((batch as u64 * heads as u64 + head as u64) * dim as u64) * dtype.bytes() as u64
    }

    fn field_bytes(&self, field: &RowField) -> u64 {
        self.batch as u64 * field.heads as u64 * field.dim as u64 * field.dtype.bytes() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_one_after_another() {
        let field = |heads, dim, dtype| RowField { heads, dim, dtype };
        let record = RowLayout::new(2, vec![field(3, 5, DType::Bf16), field(3, 7, DType::F32)]);
        assert_eq!(record.bytes(), 2 * 3 * 5 * 2 + 2 * 3 * 7 * 4);
        assert_eq!(record.offset(0, 1, 2), (3 + 2) * 5 * 2);
        assert_eq!(record.offset(1, 1, 2), 60 + (3 + 2) * 7 * 4);
    }
}
