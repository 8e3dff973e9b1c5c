//! Wire format of one row. It is independent of the backend, so that ranks with different backends
//! can exchange blocks.
//!
//! Keys and values of a row are adjacent, so that any run of rows is one byte range of a block.

use crate::DType;

/// Part of a record that one tensor fills: elements `[batch, heads, dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowField {
    /// Number of batch rows.
    pub batch: usize,
    /// Number of heads.
    pub heads: usize,
    /// Number of elements per head.
    pub dim: usize,
    /// Element type.
    pub dtype: DType,
}

/// Layout of the record of one row: its fields, one after another without padding, and then the
/// extra fields of [`RowLayout::with_extra`].
///
/// A block of n rows consists of n records in ascending local order. The records are:
///
/// | block | fields | element type |
/// |---|---|---|
/// | keys and values | k `[b, kv_heads, d]`, v `[b, kv_heads, dv]` | that of the inputs |
/// | the same with tangents | (k, its tangent) `[b, kv_heads, 2d]`, (v, its tangent) | inputs |
/// | their gradients | dk, dv in the same shapes | that of the accumulator |
/// | the same, reproducible with a bias broadcast over queries | dk, dv, dbias | accumulator |
/// | queries, two-pass backward | q, dout, row statistics | inputs, inputs, accumulator |
/// | the same, reproducible | and its rows of a bias and of a dense mask | accumulator, bits |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLayout {
    // the first `len` are in use: an array, because passes make layouts and must not allocate
    fields: [RowField; Self::MAX_FIELDS],
    len: usize,
    /// Number of fields without padding before them.
    packed: usize,
}

/// Alignment of extra fields and, if there are any, of the record, in bytes.
const ALIGNMENT: u64 = 8;

impl RowLayout {
    /// Largest number of fields of a record.
    pub const MAX_FIELDS: usize = 5;

    /// Number of extra fields.
    pub const EXTRA: usize = 2;

    /// Creates the layout of records with `fields`. Too many fields do not compile.
    pub fn new<const N: usize>(fields: [RowField; N]) -> Self {
        const { assert!(N + Self::EXTRA <= Self::MAX_FIELDS) };
        let unused = RowField { batch: 0, heads: 0, dim: 0, dtype: DType::F32 };
        let fields = std::array::from_fn(|index| fields.get(index).copied().unwrap_or(unused));
        Self { fields, len: N, packed: N }
    }

    /// Appends fields that start at multiples of 8 bytes, so that they can be read in place, and
    /// pads the record to such a multiple. A field without elements is kept, so that the others
    /// have fixed numbers. Returns the layout unchanged if none has elements.
    #[must_use]
    pub fn with_extra(mut self, extra: [RowField; Self::EXTRA]) -> Self {
        if extra.iter().any(|field| field.bytes() > 0) {
            self.fields[self.len..self.len + Self::EXTRA].copy_from_slice(&extra);
            self.len += Self::EXTRA;
        }
        self
    }

    /// Returns the number of bytes of one record.
    pub fn bytes(&self) -> u64 {
        let bytes = self.first_byte(self.len);
        if self.len > self.packed { bytes.next_multiple_of(ALIGNMENT) } else { bytes }
    }

    /// Returns the fields in order.
    pub fn fields(&self) -> &[RowField] {
        &self.fields[..self.len]
    }

    /// Returns the byte offset in a record of element `[batch, head, 0]` of field `field`.
    pub fn offset(&self, field: usize, batch: usize, head: usize) -> u64 {
        let RowField { heads, dim, dtype, .. } = self.fields()[field];
        self.first_byte(field)
            + ((batch as u64 * heads as u64 + head as u64) * dim as u64) * dtype.bytes() as u64
    }

    /// Returns the byte at which field `field` starts; that after the last field for their number.
    fn first_byte(&self, field: usize) -> u64 {
        let mut first = 0;
        for (index, before) in self.fields()[..field].iter().enumerate() {
            first += before.bytes();
            if index + 1 >= self.packed && self.len > self.packed {
                first = first.next_multiple_of(ALIGNMENT);
            }
        }
        first
    }
}

impl RowField {
    const fn bytes(&self) -> u64 {
        self.batch as u64 * self.heads as u64 * self.dim as u64 * self.dtype.bytes() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_stored_one_after_another() {
        let field = |heads, dim, dtype| RowField { batch: 2, heads, dim, dtype };
        let record = RowLayout::new([field(3, 5, DType::Bf16), field(3, 7, DType::F32)]);
        assert_eq!(record.bytes(), 2 * 3 * 5 * 2 + 2 * 3 * 7 * 4);
        assert_eq!(record.offset(0, 1, 2), (3 + 2) * 5 * 2);
        assert_eq!(record.offset(1, 1, 2), 60 + (3 + 2) * 7 * 4);
    }

    #[test]
    fn extra_fields_are_aligned() {
        let field = |batch, heads, dim, dtype| RowField { batch, heads, dim, dtype };
        let record = RowLayout::new([field(1, 3, 5, DType::Bf16)]);
        let none = field(0, 0, 0, DType::F64);
        assert_eq!(record.clone().with_extra([none, none]), record);
        let both =
            record.clone().with_extra([field(2, 1, 3, DType::F32), field(1, 1, 1, DType::F64)]);
        // 30 bytes, 2 of padding, 24, 8
        assert_eq!([both.offset(1, 1, 0), both.offset(2, 0, 0), both.bytes()], [32 + 12, 56, 64]);
        let mask = record.with_extra([none, field(1, 2, 1, DType::F64)]);
        assert_eq!([mask.offset(2, 0, 1), mask.bytes()], [32 + 8, 48]);
    }
}
