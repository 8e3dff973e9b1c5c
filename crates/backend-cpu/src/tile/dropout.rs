//! Dropout of one tile: keep bits, sixteen Philox draws at a time.
//!
//! ```text
//! draw(i, ⌊j/4⌋) → 4 words      pair (i, j) is kept  ⇔  word j mod 4 ≥ threshold
//! ```
//! The rule is [`DropoutMask`]'s. Keys of a tile mostly have consecutive rows. A query then needs
//! sixteen draws for its 64 keys (seventeen if they do not start at a multiple of four): one vector
//! of counters that differ in ⌊j/4⌋ only.

use annulus_core::DropoutMask;

use crate::{
    simd::{
        dispatch::{ArrayKernel, IsaToken, Real, SimdKernel},
        vector::{self, Vector, unrolled},
    },
    tile::{bias::is_consecutive, tile_mask::TILE},
};

/// Draws per vector.
const DRAWS: usize = 16;

/// Computes the keep bits of one head: bit k of `words[q]` is set if the pair (`queries[q]`,
/// `keys[k]`) is kept. Both are global rows, at most [`TILE`] of each.
pub(crate) fn keep_bits(
    token: IsaToken,
    mask: &DropoutMask,
    (batch, head, q_heads): (usize, usize, usize),
    queries: &[u64],
    keys: &[u64],
    words: &mut [u64; TILE],
) {
    words.fill(0);
    let (Some(&first), count) = (keys.first(), keys.len()) else { return };
    if !is_consecutive(keys) {
        for (word, &i) in words.iter_mut().zip(queries) {
            for (bit, &j) in keys.iter().enumerate() {
                *word |= u64::from(mask.keep(batch, head, q_heads, i, j)) << bit;
            }
        }
        return;
    }
    let plane = low(batch as u64 * q_heads as u64 + head as u64);
    let draw = DrawKeepBits {
        key: mask.key(),
        threshold: mask.threshold(),
        plane,
        queries,
        block: first / 4,
        words,
    };
    token.run::<_, DRAWS>(1, draw);
    // the first draw starts at a multiple of four keys
    let skipped = (first % 4) as usize;
    if skipped > 0 {
        for (word, &i) in words.iter_mut().zip(queries) {
            let last = mask.words(batch, head, q_heads, i, first / 4 + DRAWS as u64);
            let mut more = 0;
            for (bit, &random) in last.iter().enumerate() {
                more |= u64::from(mask.keeps(random)) << bit;
            }
            *word = *word >> skipped | more << (TILE - skipped);
        }
    }
    if count < TILE {
        words.iter_mut().for_each(|word| *word &= (1 << count) - 1);
    }
}

/// Draws [`DRAWS`] blocks of four keys from `block` on, for each query.
struct DrawKeepBits<'a> {
    key: [u32; 2],
    threshold: u32,
    plane: u32,
    queries: &'a [u64],
    block: u64,
    words: &'a mut [u64; TILE],
}

impl ArrayKernel for DrawKeepBits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let blocks: [u64; DRAWS] = std::array::from_fn(|draw| self.block + draw as u64);
        for (word, &i) in vector::opaque_rows(self.words).zip(self.queries) {
            let counter = [
                [low(i); DRAWS],
                blocks.map(low),
                blocks.map(|block| (high(i) << 16).wrapping_add(high(block))),
                [self.plane; DRAWS],
            ];
            let random = philox(counter, self.key);
            *word = 0;
            let draws = random[0].iter().zip(&random[1]).zip(&random[2]).zip(&random[3]);
            for (draw, (((&r0, &r1), &r2), &r3)) in draws.enumerate() {
                let keeps = |random: u32| u64::from(random >= self.threshold);
                *word |=
                    (keeps(r0) | keeps(r1) << 1 | keeps(r2) << 2 | keeps(r3) << 3) << (4 * draw);
            }
        }
    }
}

/// Computes Philox 4×32-10 for many counters at once: `counter[word][draw]`.
///
/// # Source
/// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
#[inline(always)]
fn philox(
    [mut c0, mut c1, mut c2, mut c3]: [[u32; DRAWS]; 4],
    [mut k0, mut k1]: [u32; 2],
) -> [[u32; DRAWS]; 4] {
    for _ in 0..10 {
        for draw in 0..DRAWS {
            let (product0, product2) =
                (0xd251_1f53 * u64::from(c0[draw]), 0xcd9e_8d57 * u64::from(c2[draw]));
            (c0[draw], c2[draw]) = (high(product2) ^ c1[draw] ^ k0, high(product0) ^ c3[draw] ^ k1);
            (c1[draw], c3[draw]) = (low(product2), low(product0));
        }
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    [c0, c1, c2, c3]
}

#[inline(always)]
const fn low(number: u64) -> u32 {
    number as u32
}

#[inline(always)]
const fn high(number: u64) -> u32 {
    (number >> 32) as u32
}

/// Expands keep bits to factors: `keep_scale` where a bit is set, else 0.
pub(crate) struct ExpandKeepBits<'a, A> {
    pub(crate) tile: &'a mut [A],
    pub(crate) words: &'a [u64],
    pub(crate) keep_scale: A,
}

impl<A: Real> SimdKernel<A> for ExpandKeepBits<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let (kept, zero) = (V::splat(self.keep_scale), V::splat(A::ZERO));
        let rows = vector::each_row_mut::<A, V, _>(V::strip_mut::<VECTORS>(self.tile));
        for (row, &word) in rows.zip(self.words) {
            unrolled!(v < VECTORS, kept.select(word >> (v * V::WIDTH), zero).store(&mut row[v]));
        }
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::Dropout;

    use super::*;
    use crate::simd::isa::Isa;

    #[test]
    fn keep_bits_equal_those_of_the_dropout_mask() {
        let mask = DropoutMask::new(Dropout { probability: 0.4, seed: 0x0123_4567_89ab_cdef });
        let queries = [0, 1, 7, 4_294_967_295, 4_294_967_296, 99_999_999_999];
        let runs = [
            (0u64, 64usize),
            (64, 64),
            (3, 64),
            (5, 61),
            (6, 1),
            (17_179_869_150, 64),
            (1 << 40, 33),
        ];
        let mut lists: Vec<Vec<u64>> =
            runs.iter().map(|&(first, count)| (first..).take(count).collect()).collect();
        lists.extend([(0..64).map(|j| 3 * j + 1).collect(), vec![9, 8, 2], Vec::new()]);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for keys in &lists {
                let mut words = [!0; TILE];
                keep_bits(
                    IsaToken::new(isa).unwrap(),
                    &mask,
                    (3, 2, 5),
                    &queries,
                    keys,
                    &mut words,
                );
                for (word, &i) in words.iter().zip(&queries) {
                    for bit in 0..TILE {
                        let want = keys.get(bit).is_some_and(|&j| mask.keep(3, 2, 5, i, j));
                        assert_eq!(word >> bit & 1 != 0, want, "{isa} {i} {keys:?} {bit}");
                    }
                }
            }
        }
    }
}
