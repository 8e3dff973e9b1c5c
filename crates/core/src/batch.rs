//! What comes with a batch rather than with the problem: segment ids, positions, dense masks, packed lengths.

use ndarray::{Array2, Array4, ArrayView4};

use crate::{Dims, Error, Result};

/// A dense mask `[b|1, heads|1, q rows, kv rows]`, one bit a pair, looked up by row number.
#[derive(Clone, PartialEq, Eq)]
pub struct DenseMask {
    shape: [usize; 4],
    /// 64-bit words a query row
    words: usize,
    bits: Vec<u64>,
}

impl DenseMask {
    /// From numbers: any non-zero value, negative included, is visible.
    pub fn from_integers<T: Copy + Default + PartialEq>(mask: ArrayView4<'_, T>) -> Self {
        Self::from_fn(mask.dim().into(), |index| mask[index] != T::default())
    }

    /// From a predicate of `[batch, head, query row, key row]`.
    pub fn from_fn(shape: [usize; 4], visible: impl Fn([usize; 4]) -> bool) -> Self {
        let words = shape[3].div_ceil(64);
        let mut bits = vec![0u64; shape[0] * shape[1] * shape[2] * words];
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for q in 0..shape[2] {
                    let line = ((b * shape[1] + h) * shape[2] + q) * words;
                    for k in 0..shape[3] {
                        bits[line + k / 64] |= u64::from(visible([b, h, q, k])) << (k % 64);
                    }
                }
            }
        }
        Self { shape, words, bits }
    }

    /// `[b|1, heads|1, q rows, kv rows]`.
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The bits of one query row, 64 keys a word, lowest bit first. `batch` and `head` are broadcast.
    pub fn line(&self, batch: usize, head: usize, q: usize) -> &[u64] {
        let b = if self.shape[0] == 1 { 0 } else { batch };
        let h = if self.shape[1] == 1 { 0 } else { head };
        let first = ((b * self.shape[1] + h) * self.shape[2] + q) * self.words;
        &self.bits[first..first + self.words]
    }

    /// Whether query row `q` sees key row `k`. `batch` and `head` are broadcast.
    pub fn visible(&self, batch: usize, head: usize, q: usize, k: usize) -> bool {
        self.line(batch, head, q)[k / 64] >> (k % 64) & 1 != 0
    }

    /// The same mask with only the query rows `rows`, in that order.
    pub fn select_queries(&self, rows: &[u64]) -> Self {
        let shape = [self.shape[0], self.shape[1], rows.len(), self.shape[3]];
        let mut bits = Vec::with_capacity(shape[0] * shape[1] * shape[2] * self.words);
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                rows.iter().for_each(|&q| bits.extend_from_slice(self.line(b, h, crate::index(q))));
            }
        }
        Self { shape, words: self.words, bits }
    }
}

impl std::fmt::Debug for DenseMask {
    /// Shape and a digest of the bits: enough for ranks to agree, short enough to print.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digest = self.bits.iter().fold(crate::Fingerprint::new(), |digest, &word| digest.number(word)).finish();
        write!(f, "DenseMask({:?}, {digest:016x})", self.shape)
    }
}

/// What a batch brings. On a ring every rank gives its own rows (`cum_seqlens` whole); in one process the whole batch is given.
///
/// Every condition is and-ed with the spec's mask.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// `[b, q rows]`; negative = padding. If only one of the two is given it serves for both, and lengths must agree.
    pub q_segment_ids: Option<Array2<i32>>,
    /// `[b, kv rows]`.
    pub kv_segment_ids: Option<Array2<i32>>,
    /// `[b, q rows]`: explicit positions, used as they are (alignment adds nothing).
    pub q_positions: Option<Array2<i64>>,
    /// `[b, kv rows]`: explicit positions.
    pub kv_positions: Option<Array2<i64>>,
    /// `[b|1, q_heads|1, q rows, **all** kv rows]`.
    pub attention_mask: Option<DenseMask>,
    /// `[sequences + 1]`, ascending from 0, the same packing in every batch row; rows after the last are padding. If only one of
    /// the two is given it serves for both, and lengths must agree.
    pub cum_seqlens_q: Option<Vec<i64>>,
    /// `[sequences + 1]`.
    pub cum_seqlens_k: Option<Vec<i64>>,
}

impl Batch {
    /// Checks shapes and numbers; `q_rows` and `kv_rows` are the rows held here.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor.
    pub fn validate(&self, dims: &Dims, q_rows: usize, kv_rows: usize) -> Result<()> {
        fn shape<T>(name: &str, array: &Option<Array2<T>>, want: (usize, usize)) -> Result<()> {
            match array {
                Some(array) if array.dim() != want => Err(Error::invalid(name, format!("{:?}", array.dim()), format!("{want:?}"))),
                _ => Ok(()),
            }
        }
        shape("q_segment_ids", &self.q_segment_ids, (dims.batch, q_rows))?;
        shape("kv_segment_ids", &self.kv_segment_ids, (dims.batch, kv_rows))?;
        shape("q_positions", &self.q_positions, (dims.batch, q_rows))?;
        shape("kv_positions", &self.kv_positions, (dims.batch, kv_rows))?;
        for (name, positions) in [("q_positions", &self.q_positions), ("kv_positions", &self.kv_positions)] {
            // room for window and chunk arithmetic at both ends
            let most = i64::MAX / 4;
            if let Some(position) = positions.iter().flatten().find(|position| position.unsigned_abs() > most.unsigned_abs()) {
                return Err(Error::invalid(name, position, format!("positions between -{most} and {most}")));
            }
        }
        if self.q_segment_ids.is_some() != self.kv_segment_ids.is_some() && (q_rows != kv_rows || dims.q_len != dims.kv_len) {
            let (given, missing) =
                if self.q_segment_ids.is_some() { ("q_segment_ids", "kv_segment_ids") } else { ("kv_segment_ids", "q_segment_ids") };
            return Err(Error::invalid(given, "alone, with unequal lengths", format!("{missing} as well")));
        }
        if let Some(mask) = &self.attention_mask {
            let (got, want) = (mask.shape(), [dims.batch, dims.q_heads, q_rows, dims.kv_len]);
            if (got[0] != 1 && got[0] != want[0]) || (got[1] != 1 && got[1] != want[1]) || got[2..] != want[2..] {
                return Err(Error::invalid("attention_mask", format!("{got:?}"), format!("{want:?}, or 1 in place of batch or heads")));
            }
        }
        self.validate_cum_seqlens(dims)
    }

    fn validate_cum_seqlens(&self, dims: &Dims) -> Result<()> {
        for (name, lens, len) in [("cum_seqlens_q", &self.cum_seqlens_q, dims.q_len), ("cum_seqlens_k", &self.cum_seqlens_k, dims.kv_len)] {
            let Some(lens) = lens else { continue };
            if lens.first() != Some(&0) || lens.windows(2).any(|pair| pair[0] > pair[1]) {
                return Err(Error::invalid(name, format!("{lens:?}"), "ascending numbers from 0"));
            }
            if lens.last().is_none_or(|&last| last.cast_unsigned() > len as u64) {
                return Err(Error::invalid(name, format!("{lens:?}"), format!("a last number of at most {len}")));
            }
        }
        match (&self.cum_seqlens_q, &self.cum_seqlens_k) {
            (Some(q), Some(k)) if q.len() != k.len() => Err(Error::invalid(
                "cum_seqlens_k",
                format!("{} sequences", k.len() - 1),
                format!("{} sequences, as cum_seqlens_q", q.len() - 1),
            )),
            (Some(_), None) | (None, Some(_)) if dims.q_len != dims.kv_len => {
                Err(Error::invalid("cum_seqlens_q", "only one of q and k, with unequal lengths", "both"))
            }
            _ => Ok(()),
        }
    }

    /// This batch's share of one rank: the given global query and key rows, in that order.
    pub fn select(&self, q_rows: &[u64], kv_rows: &[u64]) -> Self {
        fn pick<T: Copy>(array: &Option<Array2<T>>, rows: &[u64]) -> Option<Array2<T>> {
            array.as_ref().map(|array| Array2::from_shape_fn((array.nrows(), rows.len()), |(b, i)| array[[b, crate::index(rows[i])]]))
        }
        Self {
            q_segment_ids: pick(&self.q_segment_ids, q_rows),
            kv_segment_ids: pick(&self.kv_segment_ids, kv_rows),
            q_positions: pick(&self.q_positions, q_rows),
            kv_positions: pick(&self.kv_positions, kv_rows),
            attention_mask: self.attention_mask.as_ref().map(|mask| mask.select_queries(q_rows)),
            cum_seqlens_q: self.cum_seqlens_q.clone(),
            cum_seqlens_k: self.cum_seqlens_k.clone(),
        }
    }

    /// A boolean array as a dense mask.
    pub fn with_attention_mask(mut self, mask: &Array4<bool>) -> Self {
        self.attention_mask = Some(DenseMask::from_integers(mask.view()));
        self
    }
}
