//! Products of pairs of bf16, for [`crate::Isa::Avx512Bf16`]: how pairs are made.
//!
//! A word is a pair of bf16, in the place of an f32. A product over k takes two k a step, so both operands are words along k:
//!
//! ```text
//! S, dP          k = dims        rows and lanes as the caller's vectors have them, two neighbouring dims a word
//! O, dV, dK, dQ  k = rows        a panel "crossed": two rows a line of words; weights and dS made into words here, rows two by two
//! dQ by rows     k = keys        dS of a query in order, two neighbouring keys a word
//! ```
//! Weights and gradients of logits are rounded to bf16, once; sums stay f32. Chains begin at even rows, and a row that is not visible is a 0 in its
//! word, so that all passes add the same terms in the same order.
//!
//! # Source
//! Dao et al. 2022: weights in the inputs' type for the second product; Intel's manual on `VDPBF16PS`.

use std::ops::Range;

use crate::{
    input::{Input, Plane, Source},
    isa::{Job, PairKernel, Path},
    lanes::unrolled,
    real::Real,
    vector::Pairs,
};

/// Lanes of a vector of words.
const WIDTH: usize = 16;

/// Elements seen as words.
pub(crate) fn words<A: Real>(elements: &[A]) -> &[f32] {
    bytemuck::cast_slice(elements)
}

/// Elements seen as words, for writing.
pub(crate) fn words_mut<A: Real>(elements: &mut [A]) -> &mut [f32] {
    bytemuck::cast_slice_mut(elements)
}

/// The pairs of rows that hold the rows `rows`.
pub(crate) const fn pairs_of(rows: &Range<usize>) -> Range<usize> {
    rows.start / 2..rows.end.div_ceil(2)
}

/// Rounds the rows `rows` of a tile in place: word line `n` of them, counted from row `rows.start`, becomes the pair `n` of [`pairs_of`].
pub(crate) fn pair_rows<A: Real>(path: Path, vectors: usize, rows: &Range<usize>, tile: &mut [A]) {
    let width = vectors * WIDTH;
    let tile = &mut words_mut(tile)[rows.start * width..rows.end * width];
    path.run_pairing(vectors, PairRows { tile, odd: !rows.start.is_multiple_of(2) });
}

struct PairRows<'a> {
    tile: &'a mut [f32],
    /// Whether the first row is the second of its pair.
    odd: bool,
}

impl PairKernel for PairRows<'_> {
    #[inline(always)]
    fn run<V: Pairs, const VECTORS: usize>(self) {
        let tile = V::strip_mut::<VECTORS>(self.tile);
        let (count, skip, zero) = (tile.len(), usize::from(self.odd), V::splat(0.0));
        for pair in 0..(count + skip).div_ceil(2) {
            // a line is written where its rows have been read
            let (low, high) = ((2 * pair).checked_sub(skip), 2 * pair + 1 - skip);
            unrolled!(v < VECTORS, {
                let first = low.map_or(zero, |low| V::load(&tile[low][v]));
                let second = if high < count { V::load(&tile[high][v]) } else { zero };
                V::interleaved(first, second).store(&mut tile[pair][v]);
            });
        }
    }
}

/// Rounds the rows `rows` of a tile into rows of words, `stride` apart and from word `word` on, their lanes in order. Two vectors become one; the second
/// of an odd number of them is 0.
pub(crate) fn narrow_rows<A: Real>(path: Path, vectors: usize, rows: &[A], into: &mut [A], stride: usize, word: usize) {
    path.run_pairing(vectors, NarrowRows { rows: words(rows), into: words_mut(into), stride, word });
}

struct NarrowRows<'a> {
    rows: &'a [f32],
    into: &'a mut [f32],
    stride: usize,
    word: usize,
}

impl PairKernel for NarrowRows<'_> {
    #[inline(always)]
    fn run<V: Pairs, const VECTORS: usize>(self) {
        for (row, into) in V::strip::<VECTORS>(self.rows).iter().zip(self.into.chunks_exact_mut(self.stride)) {
            for (two, into) in row.chunks(2).zip(V::strip_mut::<1>(&mut into[self.word..])) {
                let second = two.get(1).map_or(V::splat(0.0), |second| V::load(second));
                V::in_order(V::load(&two[0]), second).store(&mut into[0]);
            }
        }
    }
}

/// C = C·rescale + Aᵀ·B over words, where pairs that are not visible are skipped: for panels that are not finite.
pub(crate) struct VisiblePairs<'a> {
    /// Lines of words, `stride` apart.
    pub(crate) a: &'a [f32],
    pub(crate) stride: usize,
    /// Words.
    pub(crate) b: &'a [f32],
    pub(crate) c: &'a mut [f32],
    pub(crate) rescale: Option<&'a [f32]>,
    /// Which lanes the rows count in, from the first visible row on.
    pub(crate) words: &'a [u64],
    /// Whether the first row is the second of its pair.
    pub(crate) odd: bool,
}

impl PairKernel for VisiblePairs<'_> {
    #[inline(always)]
    fn run<V: Pairs, const VECTORS: usize>(self) {
        let (b, skip, zero) = (V::strip::<VECTORS>(self.b), usize::from(self.odd), V::splat(0.0));
        let rescale = self.rescale.and_then(V::row::<VECTORS>);
        let seen = |row: Option<usize>| row.and_then(|row| self.words.get(row)).copied().unwrap_or(0);
        for (i, c) in V::strip_mut::<VECTORS>(self.c).iter_mut().enumerate() {
            for v in 0..VECTORS {
                let mut sum = zero;
                for (pair, b) in b.iter().enumerate() {
                    let a = V::splat(self.a[pair * self.stride + i]);
                    let (low, high) = (seen((2 * pair).checked_sub(skip)), seen(Some(2 * pair + 1 - skip)));
                    let (low, high) = (low >> (v * WIDTH), high >> (v * WIDTH));
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

/// The first of a pair.
const LOW: u32 = 0xffff;
/// The second.
const HIGH: u32 = !LOW;

/// c\[..\] += Σ_pairs of a word of `a` and a line of words, where the keys of `seen` alone are taken.
pub(crate) struct VisibleLine<'a> {
    pub(crate) a: &'a [f32],
    /// Lines, `stride` apart.
    pub(crate) b: &'a [f32],
    pub(crate) stride: usize,
    /// A bit a key.
    pub(crate) seen: u64,
    pub(crate) c: &'a mut [f32],
}

impl PairKernel for VisibleLine<'_> {
    #[inline(always)]
    fn run<V: Pairs, const VECTORS: usize>(self) {
        let Some(c) = V::row_mut::<VECTORS>(self.c) else { return };
        let mut sums = [V::splat(0.0); VECTORS];
        for (pair, (&a, b)) in self.a.iter().zip(self.b.chunks(self.stride)).enumerate() {
            let Some(b) = V::row::<VECTORS>(b) else { break };
            let mask = match self.seen >> (2 * pair) & 3 {
                0 => continue,
                1 => LOW,
                2 => HIGH,
                _ => LOW | HIGH,
            };
            unrolled!(v < VECTORS, sums[v] = V::splat(a).product(V::load(&b[v]).masked(mask), sums[v]));
        }
        unrolled!(v < VECTORS, V::load(&c[v]).plus(sums[v]).store(&mut c[v]));
    }
}

/// The bits of an element of 16.
#[inline(always)]
fn bits<E: Input>(element: &E) -> u16 {
    bytemuck::pod_read_unaligned(&bytemuck::bytes_of(element)[..size_of::<u16>()])
}

/// Takes vectors as they are, two dims a word, and, where `crossed` has room, two vectors a line.
pub(crate) struct FillPairs<'a, 's, E: Input> {
    pub(crate) source: &'a Source<'s, E>,
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) rows: Range<usize>,
    /// `[rows][stride]`
    pub(crate) natural: &'a mut [E::Accumulator],
    pub(crate) stride: usize,
    /// `[pairs of rows][crossed_stride]`
    pub(crate) crossed: &'a mut [E::Accumulator],
    pub(crate) crossed_stride: usize,
}

impl<E: Input> Job for FillPairs<'_, '_, E> {
    /// Whether no element is NaN or infinite.
    type Output = bool;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const W: usize>(self) -> bool {
        let plane = self.source.plane(self.batch, self.head);
        let count = self.rows.len();
        let line = self.stride * 2;
        let natural: &mut [u16] = bytemuck::cast_slice_mut(&mut self.natural[..count * self.stride]);
        for (row, into) in self.rows.zip(natural.chunks_exact_mut(line)) {
            let vector = plane.vector(row);
            match vector.to_slice() {
                Some(vector) => into.iter_mut().zip(vector).for_each(|(into, element)| *into = bits(element)),
                None => into.iter_mut().zip(vector).for_each(|(into, element)| *into = bits(element)),
            }
        }
        if !self.crossed.is_empty() {
            let crossed: &mut [u32] = bytemuck::cast_slice_mut(self.crossed);
            for (two, into) in natural.chunks(2 * line).zip(crossed.chunks_exact_mut(self.crossed_stride)) {
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
        // a bf16 whose exponent is all ones
        natural.iter().fold(0u16, |found, &bits| found | u16::from(bits & 0x7f80 == 0x7f80)) == 0
    }
}

/// Transposes the vectors `rows` into a strip of `width` lanes of words; lanes without a vector are 0.
pub(crate) struct FillPairLanes<'a, 's, E: Input> {
    pub(crate) plane: Plane<'s, E>,
    pub(crate) rows: Range<usize>,
    pub(crate) width: usize,
    pub(crate) strip: &'a mut [E::Accumulator],
}

impl<E: Input> Job for FillPairLanes<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const W: usize>(self) {
        let Self { plane, rows, width, strip } = self;
        let strip = words_mut(strip);
        for first in (0..width).step_by(WIDTH) {
            let used = rows.len().saturating_sub(first).min(WIDTH);
            for (chunk, lines) in strip.chunks_mut(WIDTH * width).enumerate() {
                let mut block = [[0u16; 2 * WIDTH]; WIDTH];
                for (row, into) in (rows.start + first..).zip(&mut block[..used]) {
                    let vector = plane.vector(row);
                    let at = chunk * 2 * WIDTH;
                    if let Some(whole) = vector.to_slice().and_then(|vector| vector[at..].first_chunk::<{ 2 * WIDTH }>()) {
                        for i in 0..2 * WIDTH {
                            into[i] = bits(&whole[i]);
                        }
                    } else {
                        into.iter_mut().zip(vector.iter().skip(at)).for_each(|(into, element)| *into = bits(element));
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
    use crate::{Isa, vector::Array};

    /// Ties, signs, large and small.
    fn number(i: usize) -> f32 {
        [1.0 + 1.0 / 256.0, -3e30, 2e-30, 0.7][i % 4] * (1.0 + i as f32 / 256.0)
    }

    /// The words of what is made by instructions and by the types that stand in for them.
    fn both(vectors: usize, make: impl Fn(Option<Path>, &mut Vec<f32>)) -> Option<[Vec<u32>; 2]> {
        let path = Path::new(Isa::Avx512Bf16).ok()?;
        Some([Some(path), None].map(|path| {
            let mut tile = (0..9 * vectors * WIDTH).map(number).collect();
            make(path, &mut tile);
            tile.into_iter().map(f32::to_bits).collect()
        }))
    }

    #[test]
    fn instructions_make_the_words_that_the_types_promise() {
        for rows in [0..8, 0..5, 1..2, 3..8, 1..9] {
            let made = both(4, |path, tile| match path {
                Some(path) => pair_rows(path, 4, &rows, tile),
                None => {
                    let tile = &mut tile[rows.start * 64..rows.end * 64];
                    PairRows { tile, odd: rows.start % 2 == 1 }.run::<Array<f32, false, 16>, 4>();
                }
            });
            let Some([leaf, types]) = made else { return eprintln!("NOT RUN: this processor multiplies no pairs of bf16") };
            assert_eq!(leaf, types, "{rows:?}");
            let rounded = |row: usize, lane: usize| u32::from(half::bf16::from_f32(number(row * 64 + lane)).to_bits());
            assert!(rows != (0..8) || leaf[64 + 7] == rounded(2, 7) | rounded(3, 7) << 16);
        }
        for vectors in [1, 2, 3, 4] {
            let made = both(vectors, |path, tile| {
                let rows = tile.clone();
                let (rows, into) = (&rows[..2 * vectors * WIDTH], &mut tile[..2 * 40]);
                into.fill(0.0);
                match (path, vectors) {
                    (Some(path), _) => narrow_rows(path, vectors, rows, into, 40, 8),
                    (None, 1) => NarrowRows { rows, into, stride: 40, word: 8 }.run::<Array<f32, false, 16>, 1>(),
                    (None, 2) => NarrowRows { rows, into, stride: 40, word: 8 }.run::<Array<f32, false, 16>, 2>(),
                    (None, 3) => NarrowRows { rows, into, stride: 40, word: 8 }.run::<Array<f32, false, 16>, 3>(),
                    (None, _) => NarrowRows { rows, into, stride: 40, word: 8 }.run::<Array<f32, false, 16>, 4>(),
                }
            });
            let Some([leaf, types]) = made else { return };
            assert_eq!(leaf, types, "{vectors}");
        }
    }
}
