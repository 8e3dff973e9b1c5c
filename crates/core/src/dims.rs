//! The six lengths of a problem and the offsets they make, all in 64 bits.

use crate::{Error, Result};

/// Lengths of the *global* tensors, whatever the number of ranks.
///
/// # Shapes
/// q `[batch, q_len, q_heads, head_dim]` · k `[batch, kv_len, kv_heads, head_dim]` · v `[batch, kv_len, kv_heads, value_dim]` ·
/// out `[batch, q_len, q_heads, value_dim]` · lse `[batch, q_heads, q_len]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Independent problems.
    pub batch: usize,
    /// Queries, 0 or more.
    pub q_len: usize,
    /// Keys, 0 or more.
    pub kv_len: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Dim of queries and keys.
    pub head_dim: usize,
    /// Dim of values and outputs.
    pub value_dim: usize,
}

impl Dims {
    /// Largest head dim or value dim.
    pub const MOST_DIM: usize = 512;

    /// Self-attention with one length, `heads` query and key heads and one head dim.
    pub const fn new(batch: usize, len: usize, heads: usize, dim: usize) -> Self {
        Self {
            batch,
            q_len: len,
            kv_len: len,
            q_heads: heads,
            kv_heads: heads,
            head_dim: dim,
            value_dim: dim,
        }
    }

    /// Sets the key and value heads (GQA, MQA).
    #[must_use]
    pub const fn kv_heads(self, kv_heads: usize) -> Self {
        Self { kv_heads, ..self }
    }

    /// Sets the number of keys (cross-attention, decoding).
    #[must_use]
    pub const fn kv_len(self, kv_len: usize) -> Self {
        Self { kv_len, ..self }
    }

    /// Sets the dim of values and outputs.
    #[must_use]
    pub const fn value_dim(self, value_dim: usize) -> Self {
        Self { value_dim, ..self }
    }

    /// Checks that the lengths mean something and that every tensor's byte count fits 63 bits.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the field.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("batch", self.batch),
            ("q_heads", self.q_heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ];
        for (name, value) in at_least_one {
            if value == 0 {
                return Err(Error::invalid(name, 0, "at least 1"));
            }
        }
        for (name, value) in [("head_dim", self.head_dim), ("value_dim", self.value_dim)] {
            if value > Self::MOST_DIM {
                return Err(Error::invalid(name, value, format!("at most {}", Self::MOST_DIM)));
            }
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(Error::invalid(
                "q_heads",
                self.q_heads,
                format!("a multiple of kv_heads ({})", self.kv_heads),
            ));
        }
        let tensors = [
            ("q_len", self.q_len, self.q_heads, self.head_dim.max(self.value_dim)),
            ("kv_len", self.kv_len, self.kv_heads, self.head_dim.max(self.value_dim)),
        ];
        for (name, len, heads, dim) in tensors {
            // 8 bytes an element, twice for a key/value pair: the largest thing ever addressed; a
            // length of 0 leaves its batch rows and heads, which are counted too
            let bytes = [len.max(1), heads, dim, 16]
                .iter()
                .try_fold(self.batch as u64, |product, &x| product.checked_mul(x as u64));
            if bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
                if len == 0 {
                    let lines = format!("{} with {heads} heads", self.batch);
                    return Err(Error::invalid(
                        "batch",
                        lines,
                        "fewer than 2^59 lines of all heads",
                    ));
                }
                return Err(Error::invalid(name, len, "a tensor of less than 2^63 bytes"));
            }
        }
        Ok(())
    }

    /// Query heads that share a key head.
    pub const fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// The key head that query head `head` reads.
    pub const fn kv_head(&self, head: usize) -> usize {
        head / self.group()
    }

    /// Element offset of `q[batch, row, head, 0]` in a dense tensor.
    pub const fn q_offset(&self, batch: usize, row: usize, head: usize) -> u64 {
        ((batch as u64 * self.q_len as u64 + row as u64) * self.q_heads as u64 + head as u64)
            * self.head_dim as u64
    }

    /// Element offset of `k[batch, row, head, 0]` in a dense tensor.
    pub const fn k_offset(&self, batch: usize, row: usize, head: usize) -> u64 {
        ((batch as u64 * self.kv_len as u64 + row as u64) * self.kv_heads as u64 + head as u64)
            * self.head_dim as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_cross_the_31_32_and_33_bit_boundaries() {
        let dims = Dims {
            batch: 3,
            q_len: 1 << 25,
            kv_len: 1 << 26,
            q_heads: 8,
            kv_heads: 4,
            head_dim: 128,
            value_dim: 64,
        };
        dims.validate().unwrap();
        for bits in [31u32, 32, 33] {
            let row = (1usize << bits) / (8 * 128);
            assert_eq!(dims.q_offset(0, row, 0), 1u64 << bits);
            assert_eq!(dims.q_offset(0, row - 1, 7) + 127, (1u64 << bits) - 1);
            let row = (1usize << bits) / (4 * 128);
            assert_eq!(dims.k_offset(0, row, 0), 1u64 << bits);
        }
        assert_eq!(dims.q_offset(2, 5, 3), ((2u64 << 25) + 5) * 1024 + 3 * 128);
    }

    #[test]
    fn lengths_without_meaning_are_refused_by_name() {
        let good = Dims::new(1, 4, 2, 8);
        good.validate().unwrap();
        Dims { q_len: 0, kv_len: 0, ..good }.validate().unwrap();
        let name = |dims: Dims| match dims.validate() {
            Err(Error::InvalidArgument { argument, .. }) => argument,
            other => panic!("{other:?}"),
        };
        assert_eq!(name(Dims { batch: 0, ..good }), "batch");
        assert_eq!(name(Dims { q_heads: 0, ..good }), "q_heads");
        assert_eq!(name(Dims { kv_heads: 0, ..good }), "kv_heads");
        assert_eq!(name(Dims { q_heads: 3, ..good }), "q_heads");
        assert_eq!(name(Dims { head_dim: 0, ..good }), "head_dim");
        assert_eq!(name(Dims { head_dim: 513, ..good }), "head_dim");
        assert_eq!(name(Dims { value_dim: 0, ..good }), "value_dim");
        assert_eq!(name(Dims { q_len: usize::MAX, ..good }), "q_len");
        assert_eq!(name(Dims { kv_len: 1 << 60, ..good }), "kv_len");
        // lines that cannot be counted, of no rows
        assert_eq!(
            name(Dims { batch: 1 << 40, q_heads: 1 << 40, q_len: 0, kv_len: 0, ..good }),
            "batch"
        );
    }
}
