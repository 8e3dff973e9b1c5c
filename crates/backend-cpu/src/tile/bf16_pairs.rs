//! Products of bf16 pairs for [`crate::Isa::Avx512Bf16`]: rounding and pairing of their operands.
//!
//! A pair of bf16 takes the place of an f32. A product over k consumes two k per step, so both
//! operands are paired along k:
//!
//! ```text
//! S, dP          k = dims   rows and lanes hold two neighbouring dims per pair, as the caller does
//! O, dV, dK, dQ  k = rows   the panel holds two rows per line; P and dS are interleaved likewise
//! dQ by rows     k = keys   a query's dS in order, two neighbouring keys per pair
//! ```
//! P and dS are rounded to bf16 once; accumulators stay f32. Chains start at even rows, and a masked
//! row contributes a 0 in its pair, so that all passes add the same terms in the same order. Pairs
//! that are multiplied on tiles: [`crate::tile::terms`].
//!
//! # Source
//! Dao et al. 2022: P in the inputs' type for the second product. Intel's manual on `VDPBF16PS`.

use std::ops::Range;

use crate::{
    simd::{
        dispatch::{ArrayKernel, IsaToken, PairKernel, Real},
        vector::{Bf16Pairs, unrolled},
    },
    tile::input::{Plane, TileInput, TileSource},
};

/// Lanes of a vector of pairs.
const WIDTH: usize = 16;

/// Views elements as pairs. `A` is f32 wherever pairs exist.
pub(crate) fn as_pairs<A: Real>(elements: &[A]) -> &[f32] {
    bytemuck::cast_slice(elements)
}

/// Views mutable elements as pairs.
pub(crate) fn as_pairs_mut<A: Real>(elements: &mut [A]) -> &mut [f32] {
    bytemuck::cast_slice_mut(elements)
}

/// Returns the pairs that hold the rows `rows`.
pub(crate) const fn pairs_of(rows: &Range<usize>) -> Range<usize> {
    rows.start / 2..rows.end.div_ceil(2)
}

/// Rounds the rows `rows` of a tile and interleaves them two by two, in place. Line `n`, counted
/// from row `rows.start`, becomes pair `n` of [`pairs_of`].
pub(crate) fn interleave_rows<A: Real>(
    token: IsaToken,
    vectors: usize,
    rows: &Range<usize>,
    tile: &mut [A],
) {
    let width = vectors * WIDTH;
    let odd = !rows.start.is_multiple_of(2);
    let tile = &mut as_pairs_mut(tile)[rows.start * width..rows.end * width];
    token.run_pair_kernel(vectors, InterleaveRows { tile, odd });
}

struct InterleaveRows<'a> {
    tile: &'a mut [f32],
    /// True if the first row is the second of its pair.
    odd: bool,
}

impl PairKernel for InterleaveRows<'_> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let tile = V::strip_mut::<VECTORS>(self.tile);
        let count = tile.len();
        let skip = usize::from(self.odd);
        let zero = V::splat(0.0);
        for pair in 0..(count + skip).div_ceil(2) {
            // a line is written only after its two rows have been read
            let low = (2 * pair).checked_sub(skip);
            let high = 2 * pair + 1 - skip;
            unrolled!(v < VECTORS, {
                let first = low.map_or(zero, |low| V::load(&tile[low][v]));
                let second = if high < count { V::load(&tile[high][v]) } else { zero };
                V::interleaved(first, second).store(&mut tile[pair][v]);
            });
        }
    }
}

/// Rounds the rows of a tile into rows of pairs, `stride` apart and from pair `first_pair` on, with
/// lanes in order.
///
/// Two vectors become one. The second half for an odd last vector is 0.
pub(crate) fn narrow_rows<A: Real>(
    token: IsaToken,
    vectors: usize,
    rows: &[A],
    into: &mut [A],
    (stride, first_pair): (usize, usize),
) {
    let (rows, into) = (as_pairs(rows), as_pairs_mut(into));
    token.run_pair_kernel(vectors, NarrowRows { rows, into, stride, first_pair });
}

struct NarrowRows<'a> {
    rows: &'a [f32],
    into: &'a mut [f32],
    stride: usize,
    first_pair: usize,
}

impl PairKernel for NarrowRows<'_> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        for (row, into) in
            V::strip::<VECTORS>(self.rows).iter().zip(self.into.chunks_exact_mut(self.stride))
        {
            for (two, into) in row.chunks(2).zip(V::strip_mut::<1>(&mut into[self.first_pair..])) {
                let first = V::load(&two[0]);
                let second = two.get(1).map_or(V::splat(0.0), |second| V::load(second));
                V::in_order(first, second).store(&mut into[0]);
            }
        }
    }
}

/// C = C·rescale + Aᵀ·B over pairs, with masked elements skipped: for panels that are not finite,
/// where 0·NaN would leak.
pub(crate) struct MaskedPairProducts<'a> {
    /// Lines of pairs, `stride` apart.
    pub(crate) a: &'a [f32],
    pub(crate) stride: usize,
    /// Pairs.
    pub(crate) b: &'a [f32],
    pub(crate) c: &'a mut [f32],
    pub(crate) rescale: Option<&'a [f32]>,
    /// Visible lanes of each row, from the first visible row on.
    pub(crate) lane_words: &'a [u64],
    /// True if the first row is the second of its pair.
    pub(crate) odd: bool,
}

impl PairKernel for MaskedPairProducts<'_> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let b = V::strip::<VECTORS>(self.b);
        let skip = usize::from(self.odd);
        let zero = V::splat(0.0);
        let rescale = self.rescale.and_then(V::row::<VECTORS>);
        let visible =
            |row: Option<usize>| row.and_then(|row| self.lane_words.get(row)).copied().unwrap_or(0);
        for (i, c) in V::strip_mut::<VECTORS>(self.c).iter_mut().enumerate() {
            for v in 0..VECTORS {
                let mut sum = zero;
                for (pair, b) in b.iter().enumerate() {
                    let a = V::splat(self.a[pair * self.stride + i]);
                    let (low, high) =
                        (visible((2 * pair).checked_sub(skip)), visible(Some(2 * pair + 1 - skip)));
                    let low = low >> (v * WIDTH);
                    let high = high >> (v * WIDTH);
                    let one = a.masked(LOW).select(low, a.masked(HIGH));
                    let a = a.select(low & high, one).select(low | high, zero);
                    sum = a.product(V::load(&b[v]), sum);
                }
                let old = V::load(&c[v]);
                match rescale {
                    Some(rescale) => V::load(&rescale[v]).multiply_add(old, sum).store(&mut c[v]),
                    None => old.plus(sum).store(&mut c[v]),
                }
            }
        }
    }
}

/// Bits of the first element of a pair.
pub(crate) const LOW: u32 = 0xffff;
/// Bits of the second element.
const HIGH: u32 = !LOW;

/// c += Σ a·b over pairs of one row of `a`, restricted to the keys in `visible`.
pub(crate) struct MaskedPairRow<'a> {
    pub(crate) a: &'a [f32],
    /// Lines, `stride` apart.
    pub(crate) b: &'a [f32],
    pub(crate) stride: usize,
    /// One bit per key.
    pub(crate) visible: u64,
    pub(crate) c: &'a mut [f32],
}

impl PairKernel for MaskedPairRow<'_> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let Some(c) = V::row_mut::<VECTORS>(self.c) else { return };
        let mut sums = [V::splat(0.0); VECTORS];
        for (pair, (&a, b)) in self.a.iter().zip(self.b.chunks(self.stride)).enumerate() {
            let Some(b) = V::row::<VECTORS>(b) else { break };
            let mask = match self.visible >> (2 * pair) & 3 {
                0 => continue,
                1 => LOW,
                2 => HIGH,
                _ => LOW | HIGH,
            };
            unrolled!(
                v < VECTORS,
                sums[v] = V::splat(a).product(V::load(&b[v]).masked(mask), sums[v])
            );
        }
        unrolled!(v < VECTORS, V::load(&c[v]).plus(sums[v]).store(&mut c[v]));
    }
}

/// Returns the bits of a 16-bit element.
#[inline(always)]
fn bits<E: TileInput>(element: &E) -> u16 {
    bytemuck::pod_read_unaligned(&bytemuck::bytes_of(element)[..size_of::<u16>()])
}

/// Packs vectors without widening, two dims per pair, and if `along_rows` has room also pairs of
/// two vectors.
pub(crate) struct PackPairs<'a, 's, E: TileInput> {
    pub(crate) source: &'a TileSource<'s, E>,
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
    /// `[rows][stride]`
    pub(crate) rows_of_pairs: &'a mut [E::Accumulator],
    pub(crate) stride: usize,
    /// `[pairs of rows][along_rows_stride]`
    pub(crate) along_rows: &'a mut [E::Accumulator],
    pub(crate) along_rows_stride: usize,
}

impl<E: TileInput> ArrayKernel for PackPairs<'_, '_, E> {
    /// True if no element is NaN or infinite.
    type Output = bool;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const W: usize>(
        self,
    ) -> bool {
        let plane = self.source.plane(self.batch, self.head);
        let count = self.rows.len();
        let line = self.stride * 2;
        let rows_of_pairs: &mut [u16] =
            bytemuck::cast_slice_mut(&mut self.rows_of_pairs[..count * self.stride]);
        for (row, into) in self.rows.zip(rows_of_pairs.chunks_exact_mut(line)) {
            let vector = plane.vector(row);
            match vector.to_slice() {
                Some(vector) => {
                    into.iter_mut().zip(vector).for_each(|(into, element)| *into = bits(element))
                }
                None => {
                    into.iter_mut().zip(vector).for_each(|(into, element)| *into = bits(element))
                }
            }
        }
        if !self.along_rows.is_empty() {
            let along_rows: &mut [u32] = bytemuck::cast_slice_mut(self.along_rows);
            let stride = self.along_rows_stride;
            let lines = along_rows.chunks_exact_mut(stride);
            for (two, into) in rows_of_pairs.chunks(2 * line).zip(lines) {
                let (low, high) = two.split_at(line);
                let dims = line.min(into.len());
                if high.is_empty() {
                    into.iter_mut().zip(low).for_each(|(into, &low)| *into = low.into());
                } else {
                    for i in 0..dims {
                        into[i] = u32::from(low[i]) | u32::from(high[i]) << 16;
                    }
                }
            }
        }
        // not finite: all exponent bits of the bf16 are set
        rows_of_pairs.iter().fold(0u16, |found, &bits| found | u16::from(bits & 0x7f80 == 0x7f80))
            == 0
    }
}

/// Packs the vectors `rows`, transposed, into a strip of `width` lanes of pairs. Lanes without a
/// vector are 0.
pub(crate) struct PackPairLanes<'a, 's, E: TileInput> {
    pub(crate) plane: Plane<'s, E>,
    pub(crate) rows: Range<usize>,
    pub(crate) width: usize,
    pub(crate) strip: &'a mut [E::Accumulator],
}

impl<E: TileInput> ArrayKernel for PackPairLanes<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const W: usize>(self) {
        let Self { plane, rows, width, strip } = self;
        let strip = as_pairs_mut(strip);
        for first in (0..width).step_by(WIDTH) {
            let used = rows.len().saturating_sub(first).min(WIDTH);
            for (chunk, lines) in strip.chunks_mut(WIDTH * width).enumerate() {
                let mut block = [[0u16; 2 * WIDTH]; WIDTH];
                for (row, into) in (rows.start + first..).zip(&mut block[..used]) {
                    let vector = plane.vector(row);
                    let at = chunk * 2 * WIDTH;
                    if let Some(whole) = vector
                        .to_slice()
                        .and_then(|vector| vector[at..].first_chunk::<{ 2 * WIDTH }>())
                    {
                        for i in 0..2 * WIDTH {
                            into[i] = bits(&whole[i]);
                        }
                    } else {
                        into.iter_mut()
                            .zip(vector.iter().skip(at))
                            .for_each(|(into, element)| *into = bits(element));
                    }
                }
                let block: [[f32; WIDTH]; WIDTH] = bytemuck::cast(block);
                for (word, line) in lines.chunks_exact_mut(width).enumerate() {
                    if let Some(into) = line[first..].first_chunk_mut::<WIDTH>() {
                        for lane in 0..WIDTH {
                            into[lane] = block[lane][word];
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{isa::Isa, vector::Array};

    /// Ties, both signs, large and small numbers.
    fn number(i: usize) -> f32 {
        [1.0 + 1.0 / 256.0, -3e30, 2e-30, 0.7][i % 4] * (1.0 + i as f32 / 256.0)
    }

    /// Computes the pairs with the instructions and with the reference implementation.
    fn both(
        vectors: usize,
        make: impl Fn(Option<IsaToken>, &mut Vec<f32>),
    ) -> Option<[Vec<u32>; 2]> {
        let token = IsaToken::new(Isa::Avx512Bf16).ok()?;
        Some([Some(token), None].map(|token| {
            let mut tile = (0..9 * vectors * WIDTH).map(number).collect();
            make(token, &mut tile);
            tile.into_iter().map(f32::to_bits).collect()
        }))
    }

    #[test]
    fn instructions_equal_the_reference_implementation() {
        for rows in [0..8, 0..5, 1..2, 3..8, 1..9] {
            let made = both(4, |token, tile| match token {
                Some(token) => interleave_rows(token, 4, &rows, tile),
                None => {
                    let tile = &mut tile[rows.start * 64..rows.end * 64];
                    InterleaveRows { tile, odd: rows.start % 2 == 1 }
                        .run::<Array<f32, false, 16>, 4>();
                }
            });
            let Some([leaf, types]) = made else {
                return eprintln!("NOT RUN: this processor lacks AVX-512 BF16");
            };
            assert_eq!(leaf, types, "{rows:?}");
            let rounded = |row: usize, lane: usize| {
                u32::from(half::bf16::from_f32(number(row * 64 + lane)).to_bits())
            };
            assert!(rows != (0..8) || leaf[64 + 7] == rounded(2, 7) | rounded(3, 7) << 16);
        }
        for vectors in [1, 2, 3, 4] {
            let made =
                both(vectors, |token, tile| {
                    let rows = tile.clone();
                    let rows = &rows[..2 * vectors * WIDTH];
                    let into = &mut tile[..2 * 40];
                    into.fill(0.0);
                    match (token, vectors) {
                        (Some(token), _) => narrow_rows(token, vectors, rows, into, (40, 8)),
                        (None, 1) => NarrowRows { rows, into, stride: 40, first_pair: 8 }
                            .run::<Array<f32, false, 16>, 1>(),
                        (None, 2) => NarrowRows { rows, into, stride: 40, first_pair: 8 }
                            .run::<Array<f32, false, 16>, 2>(),
                        (None, 3) => NarrowRows { rows, into, stride: 40, first_pair: 8 }
                            .run::<Array<f32, false, 16>, 3>(),
                        (None, _) => NarrowRows { rows, into, stride: 40, first_pair: 8 }
                            .run::<Array<f32, false, 16>, 4>(),
                    }
                });
            let Some([leaf, types]) = made else { return };
            assert_eq!(leaf, types, "{vectors}");
        }
    }
}
