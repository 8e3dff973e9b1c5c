//! Dense masks: one bit per pair.

use ndarray::ArrayView4;

use crate::{Dims, Error, Fingerprint, Result, memory};

mod sealed {
    pub trait Sealed {}
}

/// Element types of a dense mask: booleans and integers. Floating-point types are excluded, because
/// the zeros of an additive mask would be read as masked.
pub trait MaskElement: Copy + Default + PartialEq + sealed::Sealed {}

macro_rules! mask_elements {
    ($($type:ty)*) => {
        $(impl sealed::Sealed for $type {} impl MaskElement for $type {})*
    };
}
mask_elements!(bool i8 i16 i32 i64 u8 u16 u32 u64);

/// A dense mask `[b|1, heads|1, q rows, kv rows]`, one bit per pair, indexed by row number.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct DenseMask {
    shape: [usize; 4],
    /// Number of 64-bit words per query row.
    words: usize,
    bits: Vec<u64>,
}

impl DenseMask {
    /// Adds shape and elements to a fingerprint.
    pub fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        let into = self.shape.iter().fold(into, |into, &len| into.number(len as u64));
        self.bits.iter().fold(into, |into, &word| into.number(word))
    }

    /// Creates a mask from booleans or integers: every non-zero value is visible, also a negative
    /// one. Panics or aborts if the allocation fails; see [`DenseMask::try_from_fn`].
    pub fn from_integers<T: MaskElement>(mask: ArrayView4<'_, T>) -> Self {
        Self::from_fn(mask.dim().into(), |index| mask[index] != T::default())
    }

    /// Creates a mask from a predicate of `[batch, head, query row, key row]`. Panics or aborts if
    /// the allocation fails, as the standard collections do; see [`DenseMask::try_from_fn`].
    pub fn from_fn(shape: [usize; 4], visible: impl Fn([usize; 4]) -> bool) -> Self {
        let words = shape[3].div_ceil(64);
        let bits = vec![0u64; shape[0] * shape[1] * shape[2] * words];
        Self { shape, words, bits }.filled(visible)
    }

    /// As [`DenseMask::from_fn`], with an error if the allocation fails.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn try_from_fn(shape: [usize; 4], visible: impl Fn([usize; 4]) -> bool) -> Result<Self> {
        let words = shape[3].div_ceil(64);
        let bits = memory::zeroed(WHAT, Self::all_words(shape, words))?;
        Ok(Self { shape, words, bits }.filled(visible))
    }

    /// Returns the number of words of a mask, or `usize::MAX` if it overflows.
    fn all_words([batch, heads, queries, _]: [usize; 4], words: usize) -> usize {
        [batch, heads, queries].into_iter().fold(words, usize::saturating_mul)
    }

    /// Sets the bits of all visible pairs.
    fn filled(self, visible: impl Fn([usize; 4]) -> bool) -> Self {
        let Self { shape, words, mut bits } = self;
        if bits.is_empty() {
            return Self { shape, words, bits };
        }
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

    /// Copies the mask, with an error if the allocation fails.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn try_clone(&self) -> Result<Self> {
        let bits = memory::collect(WHAT, self.bits.len(), self.bits.iter().copied())?;
        Ok(Self { shape: self.shape, words: self.words, bits })
    }

    /// Returns the heap bytes.
    pub const fn bytes(&self) -> usize {
        self.bits.capacity() * size_of::<u64>()
    }

    /// Returns `[b|1, heads|1, q rows, kv rows]`.
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Returns the bits of one query row, 64 keys per word, lowest bit first; none if there is no
    /// such row. `batch` and `head` are broadcast.
    pub fn line(&self, batch: usize, head: usize, q: usize) -> &[u64] {
        let b = if self.shape[0] == 1 { 0 } else { batch };
        let h = if self.shape[1] == 1 { 0 } else { head };
        if b >= self.shape[0] || h >= self.shape[1] || q >= self.shape[2] {
            return &[];
        }
        let first = ((b * self.shape[1] + h) * self.shape[2] + q) * self.words;
        &self.bits[first..first + self.words]
    }

    /// Returns true if query row `q` attends to key row `k`; false if there is no such row. `batch`
    /// and `head` are broadcast.
    pub fn visible(&self, batch: usize, head: usize, q: usize, k: usize) -> bool {
        self.line(batch, head, q).get(k / 64).is_some_and(|word| word >> (k % 64) & 1 != 0)
    }

    /// Replaces the mask by one of `shape`, whose rows `line(batch, head, query)` are the bytes of
    /// their words, as of [`DenseMask::line`], in the order of the machine. Reuses the memory. A
    /// row that is too short is filled with masked pairs.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn refill<'a>(
        &mut self,
        shape: [usize; 4],
        line: impl Fn(usize, usize, usize) -> &'a [u8],
    ) -> Result<()> {
        let words = shape[3].div_ceil(64);
        let all = Self::all_words(shape, words);
        self.bits.clear();
        memory::reserve(WHAT, &mut self.bits, all)?;
        self.shape = shape;
        self.words = words;
        let [batches, heads, queries, _] = shape;
        let rows = (0..batches).flat_map(|b| (0..heads).map(move |h| (b, h)));
        for (b, h) in rows {
            for q in 0..queries {
                let bytes = line(b, h, q).as_chunks::<8>().0.iter();
                let line = bytes.map(|&word| u64::from_ne_bytes(word));
                self.bits.extend(line.chain(std::iter::repeat(0)).take(words));
            }
        }
        Ok(())
    }

    /// Checks that the shape is `[b|1, q_heads|1, q_rows, kv_len]`. Errors name `argument`.
    pub(crate) fn validate(&self, argument: &str, dims: &Dims, q_rows: usize) -> Result<()> {
        let got = self.shape;
        let want = [dims.batch, dims.q_heads, q_rows, dims.kv_len];
        if (got[0] != 1 && got[0] != want[0])
            || (got[1] != 1 && got[1] != want[1])
            || got[2..] != want[2..]
        {
            return Err(Error::invalid(
                argument,
                format!("{got:?}"),
                format!("{want:?}, where batch or heads may be 1"),
            ));
        }
        Ok(())
    }

    /// Returns the mask of the query rows `rows`, in that order. A row that does not exist attends
    /// to no key.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn select_queries(&self, rows: &[u64]) -> Result<Self> {
        let shape = [self.shape[0], self.shape[1], rows.len(), self.shape[3]];
        let all = Self::all_words(shape, self.words);
        let mut bits = memory::list(WHAT, all)?;
        if all == 0 {
            return Ok(Self { shape, words: self.words, bits });
        }
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for &q in rows {
                    let line = self.line(b, h, crate::index(q)).iter().copied();
                    // zeros for a row that does not exist
                    bits.extend(line.chain(std::iter::repeat(0)).take(self.words));
                }
            }
        }
        Ok(Self { shape, words: self.words, bits })
    }
}

/// Name of a mask in [`Error::OutOfMemory`].
const WHAT: &str = "attention_mask with one bit per pair";

impl std::fmt::Debug for DenseMask {
    /// Writes the shape and a digest of the bits.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digest = self
            .bits
            .iter()
            .fold(crate::Fingerprint::new(), |digest, &word| digest.number(word))
            .finish();
        write!(f, "DenseMask({:?}, {digest:016x})", self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array4;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bits_are_the_nonzero_elements_broadcast(
            shape in (1usize..3, 1usize..3, 0usize..5, 0usize..140),
            seed in any::<u64>(),
            selected in prop::collection::vec(0u64..7, 0..6),
        ) {
            let number = |b, h, q, k| {
                ((b * 7 + h * 5 + q * 3 + k) as u64).wrapping_mul(seed | 1) as i32 >> 30
            };
            let numbers = Array4::from_shape_fn(shape, |(b, h, q, k)| number(b, h, q, k));
            let mask = DenseMask::from_integers(numbers.view());
            let booleans = numbers.mapv(|number| number != 0);
            prop_assert_eq!(&mask, &DenseMask::from_integers(booleans.view()));
            let part = mask.select_queries(&selected).unwrap();
            prop_assert_eq!(&mask.try_clone().unwrap(), &mask);
            let mut refilled = DenseMask::from_fn([2, 1, 3, 70], |_| true);
            let bytes = |b, h, q| bytemuck::cast_slice(mask.line(b, h, q));
            refilled.refill(mask.shape(), bytes).unwrap();
            prop_assert_eq!(&refilled, &mask);
            for b in 0..2 {
                for h in 0..2 {
                    for k in 0..150 {
                        let want = |q| {
                            let exists = q < shape.2 && k < shape.3;
                            exists && number(b % shape.0, h % shape.1, q, k) != 0
                        };
                        for q in 0..6 {
                            prop_assert_eq!(mask.visible(b, h, q, k), want(q));
                        }
                        for (index, &q) in selected.iter().enumerate() {
                            prop_assert_eq!(part.visible(b, h, index, k), want(q as usize));
                        }
                    }
                }
            }
            prop_assert!(!mask.visible(2, 0, 0, 0) || shape.0 == 1);
        }
    }

    #[test]
    fn the_debug_text_distinguishes_masks() {
        let text =
            |hole| format!("{:?}", DenseMask::from_fn([1, 1, 9, 9], |[_, _, q, k]| (q, k) != hole));
        assert_eq!(text((3, 3)), text((3, 3)));
        assert_ne!(text((3, 3)), text((3, 4)));
    }
}
