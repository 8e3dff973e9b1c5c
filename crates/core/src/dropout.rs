//! Dropout masks: a pure function of seed, batch row, head and row numbers, so that tile, layout
//! and number of ranks have no effect.
//!
//! ```text
//! key     = (seed low, seed high)
//! counter = (i low, ⌊j/4⌋ low, (i high)·2¹⁶ + (⌊j/4⌋ high), batch·q_heads + head)
//! words   = Philox4×32-10(key, counter)
//!
//! the probability of (i, j) is dropped iff words[j mod 4] < ⌊p·2³²⌋
//! ```
//! i and j are **row numbers**, not positions; "low" and "high" are 32-bit halves. One evaluation
//! covers four keys.

use crate::Dropout;

/// Computes Philox 4×32 with ten rounds, a counter-based random number generator.
///
/// # Source
/// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; multipliers and Weyl
/// constants are those of its library, Random123.
pub const fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
    const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
    let mut round = 0;
    while round < 10 {
        let (low0, high0) = halves(MULTIPLIERS[0] as u64 * counter[0] as u64);
        let (low1, high1) = halves(MULTIPLIERS[1] as u64 * counter[2] as u64);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        round += 1;
    }
    counter
}

/// Returns the low and the high 32 bits.
const fn halves(number: u64) -> (u32, u32) {
    (number as u32, (number >> 32) as u32)
}

/// A dropout mask. It is never stored: each kernel computes the words of its tile.
///
/// # Examples
/// ```
/// use annulus_core::{Dropout, DropoutMask};
/// let mask = DropoutMask::new(Dropout { probability: 0.25, seed: 7 });
/// let batch = 0;
/// let head = 2;
/// let q_heads = 8;
/// let row = 5;
/// // `words` serves four keys, here 12 to 15; `keep` serves one
/// let words = mask.words(batch, head, q_heads, row, 3);
/// assert_eq!(mask.keeps(words[1]), mask.keep(batch, head, q_heads, row, 13));
/// assert_eq!(mask.keep_scale(), 1.0 / 0.75);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutMask {
    key: [u32; 2],
    threshold: u32,
    keep_scale: f64,
}

impl DropoutMask {
    /// Creates the mask of a dropout with 0 ≤ p < 1, as [`crate::Spec::validate`] checks.
    pub fn new(dropout: Dropout) -> Self {
        let (low, high) = halves(dropout.seed);
        // exact: multiplication by 2³² changes only the exponent of p, and p < 1 bounds the product
        let threshold = (dropout.probability * 2f64.powi(32)).floor() as u32;
        Self { key: [low, high], threshold, keep_scale: 1.0 / (1.0 - dropout.probability) }
    }

    /// Returns the factor of kept probabilities, 1/(1 − p).
    pub const fn keep_scale(&self) -> f64 {
        self.keep_scale
    }

    /// Returns ⌊p·2³²⌋. A probability is dropped if its word is less.
    pub const fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Returns the key of Philox, for kernels that compute it on a device.
    pub const fn key(&self) -> [u32; 2] {
        self.key
    }

    /// Returns the words of query row `row_i` and key rows 4·`block_j` to 4·`block_j` + 3.
    pub const fn words(
        &self,
        batch: usize,
        head: usize,
        q_heads: usize,
        row_i: u64,
        block_j: u64,
    ) -> [u32; 4] {
        let (i_low, i_high) = halves(row_i);
        let (j_low, j_high) = halves(block_j);
        let (plane, _) = halves(batch as u64 * q_heads as u64 + head as u64);
        philox4x32_10([i_low, j_low, (i_high << 16).wrapping_add(j_high), plane], self.key)
    }

    /// Returns true if the probability with this word is kept.
    pub const fn keeps(&self, word: u32) -> bool {
        word >= self.threshold
    }

    /// Returns true if the probability of query row `row_i` and key row `row_j` is kept.
    pub const fn keep(
        &self,
        batch: usize,
        head: usize,
        q_heads: usize,
        row_i: u64,
        row_j: u64,
    ) -> bool {
        let words = self.words(batch, head, q_heads, row_i, row_j / 4);
        self.keeps(words[(row_j % 4) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(probability: f64, seed: u64) -> DropoutMask {
        DropoutMask::new(Dropout { probability, seed })
    }

    #[test]
    fn philox_computes_the_published_test_vectors() {
        let vectors = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in vectors {
            assert_eq!(philox4x32_10(counter, key), want);
        }
    }

    #[test]
    fn the_counter_has_the_documented_layout() {
        let mask = mask(0.5, 0x0123_4567_89ab_cdef);
        assert_eq!(mask.key(), [0x89ab_cdef, 0x0123_4567]);
        let i = 0x0003_0000_0005;
        let quad = 0x0002_0000_0007;
        let want = philox4x32_10([5, 7, (3 << 16) + 2, 2 * 6 + 4], mask.key());
        assert_eq!(mask.words(2, 4, 6, i, quad), want);
        for (word, want) in want.into_iter().enumerate() {
            assert_eq!(mask.keep(2, 4, 6, i, 4 * quad + word as u64), want >= 1 << 31);
        }
    }

    #[test]
    fn thresholds_are_exact() {
        for (probability, threshold) in [
            (0.0, 0),
            (0.5, 1 << 31),
            (0.3, 1_288_490_188),
            (2f64.powi(-33), 0),
            (1.0 - f64::EPSILON / 2.0, u32::MAX),
        ] {
            assert_eq!(mask(probability, 1).threshold(), threshold, "{probability}");
        }
        // nothing is dropped at p = 0, not even a word of 0
        assert!(mask(0.0, 9).keeps(0) && mask(0.0, 9).keep_scale() == 1.0);
    }
}
