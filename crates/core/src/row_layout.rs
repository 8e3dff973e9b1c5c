//! Wire format of one row. It is independent of the backend, so that ranks with different backends
//! can exchange blocks.

use crate::DType;

/// Part of a record that one tensor fills: elements `[batch, heads, dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowField {
    /// Number of heads.
    pub heads: usize,
    /// Number of elements per head.
    pub dim: usize,
    /// Element type.
    pub dtype: DType,
}

/// Layout of the record of one row: its fields, one after another without padding.
///
/// A block of n rows consists of n records in ascending local order. The records are:
///
/// | block | fields | element type |
/// |---|---|---|
/// | keys and values | k `[b, kv_heads, d]`, v `[b, kv_heads, dv]` | that of the inputs |
/// | their gradients | dk, dv in the same shapes | that of the accumulator |
/// | queries, two-pass backward | q, dout, row statistics | inputs, inputs, accumulator |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLayout {
    batch: usize,
    // the first `len` are in use: an array, because passes make layouts and must not allocate
    fields: [RowField; Self::MAX_FIELDS],
    len: usize,
}

impl RowLayout {
    /// Largest number of fields of a record.
    pub const MAX_FIELDS: usize = 3;

    /// Creates the layout of records with `fields` for `batch` batch rows. More than
    /// [`Self::MAX_FIELDS`] do not compile.
    pub fn new<const N: usize>(batch: usize, fields: [RowField; N]) -> Self {
        const { assert!(N <= Self::MAX_FIELDS) };
        let unused = RowField { heads: 0, dim: 0, dtype: DType::F32 };
        let fields = std::array::from_fn(|index| fields.get(index).copied().unwrap_or(unused));
        Self { batch, fields, len: N }
    }

    /// Returns the number of bytes of one record.
    pub fn bytes(&self) -> u64 {
        self.fields().iter().map(|field| self.field_bytes(field)).sum()
    }

    /// Returns the fields in order.
    pub fn fields(&self) -> &[RowField] {
        &self.fields[..self.len]
    }

    /// Returns the byte offset in a record of element `[batch, head, 0]` of field `field`.
    pub fn offset(&self, field: usize, batch: usize, head: usize) -> u64 {
        let before: u64 = self.fields()[..field].iter().map(|field| self.field_bytes(field)).sum();
        let RowField { heads, dim, dtype } = self.fields()[field];
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
    fn fields_are_stored_one_after_another() {
        let field = |heads, dim, dtype| RowField { heads, dim, dtype };
        let record = RowLayout::new(2, [field(3, 5, DType::Bf16), field(3, 7, DType::F32)]);
        assert_eq!(record.bytes(), 2 * 3 * 5 * 2 + 2 * 3 * 7 * 4);
        assert_eq!(record.offset(0, 1, 2), (3 + 2) * 5 * 2);
        assert_eq!(record.offset(1, 1, 2), 60 + (3 + 2) * 7 * 4);
    }
}
