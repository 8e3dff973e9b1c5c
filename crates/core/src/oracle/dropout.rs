//! Dropout of the oracle, implemented independently of the backends' [`crate::DropoutMask`].
//!
//! The probability of a pair (i, j) is dropped if and only if word j mod 4 of the output of
//! Philox4×32-10 is less than ⌊p·2³²⌋, with
//!
//! ```text
//! key       seed low, seed high
//! counter   i low, ⌊j/4⌋ low, (i high)·2¹⁶ + (⌊j/4⌋ high), b·q_heads + h
//! ```

use crate::{Dims, Dropout};

/// Returns true if the probability of query row `i` and key row `j` is dropped.
pub(super) fn dropped(
    dims: &Dims,
    dropout: Dropout,
    b: usize,
    h: usize,
    i: usize,
    j: usize,
) -> bool {
    let i = i as u64;
    let quad = j as u64 / 4;
    let key = [low(dropout.seed), high(dropout.seed)];
    let counter =
        [low(i), low(quad), (high(i) << 16) + high(quad), low((b * dims.q_heads + h) as u64)];
    f64::from(philox(counter, key)[j % 4]) < (dropout.probability * 2f64.powi(32)).floor()
}

/// Computes Philox4×32 with ten rounds.
///
/// # Source
/// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the constants are those of
/// its library, Random123.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = 0xD251_1F53 * u64::from(counter[0]);
        let second = 0xCD9E_8D57 * u64::from(counter[2]);
        counter = [
            high(second) ^ counter[1] ^ key[0],
            low(second),
            high(first) ^ counter[3] ^ key[1],
            low(first),
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[expect(clippy::cast_possible_truncation, reason = "returns the lower half")]
const fn low(number: u64) -> u32 {
    number as u32
}

const fn high(number: u64) -> u32 {
    low(number >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_computes_the_published_test_vectors() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let (counter, key) =
            ([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(philox(counter, key), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
