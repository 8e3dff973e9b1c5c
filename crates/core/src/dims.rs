//! Lengths of the tensors of a problem.

use crate::{Error, Result};

/// Lengths of the *global* tensors, independent of the number of ranks.
///
/// # Shapes
/// q `[batch, q_len, q_heads, head_dim]` · k `[batch, kv_len, kv_heads, head_dim]` ·
/// v `[batch, kv_len, kv_heads, value_dim]` · out `[batch, q_len, q_heads, value_dim]` ·
/// lse `[batch, q_heads, q_len]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Number of batch rows, which are independent of each other.
    pub batch: usize,
    /// Number of queries. May be 0.
    pub q_len: usize,
    /// Number of keys. May be 0.
    pub kv_len: usize,
    /// Number of query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Elements per query or key.
    pub head_dim: usize,
    /// Elements per value or output.
    pub value_dim: usize,
}

/// One of the two sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Queries.
    Q,
    /// Keys and values.
    Kv,
}

impl Dims {
    /// Returns the length of a side.
    pub const fn len(&self, side: Side) -> usize {
        match side {
            Side::Q => self.q_len,
            Side::Kv => self.kv_len,
        }
    }

    /// Largest head dim or value dim. It bounds the memory that a thread needs for a tile, and
    /// admits the 576 of DeepSeek's latent attention. Backends on GPUs have limits of their own.
    pub const MAX_DIM: usize = 1024;

    /// Creates the dims of multi-head self-attention.
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

    /// Checks the range of every length and that the byte count of every tensor is below 2⁶³.
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
            if value > Self::MAX_DIM {
                return Err(Error::invalid(name, value, format!("at most {}", Self::MAX_DIM)));
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
            // 16 bytes per element: f64 keys and values together are the largest block. A length of
            // 0 counts as 1, because loops over batch rows and heads need their product in range
            let bytes = [len.max(1), heads, dim, 16]
                .iter()
                .try_fold(self.batch as u64, |product, &x| product.checked_mul(x as u64));
            if bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
                if len == 0 {
                    let got = format!("{} with {heads} heads of dim {dim}", self.batch);
                    let want = "batch · heads · dim below 2^59";
                    return Err(Error::invalid("batch", got, want));
                }
                return Err(Error::invalid(name, len, "a tensor of less than 2^63 bytes"));
            }
        }
        Ok(())
    }

    /// Returns the number of query heads per KV head.
    pub const fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Returns the KV head of query head `head`.
    pub const fn kv_head(&self, head: usize) -> usize {
        head / self.group()
    }
}
