//! Operands of the products on tiles: elements as sums of bf16 terms, in pairs.
//!
//! ```text
//! x = h + m + l     h = bf16(x)   m = bf16(x − h)   l = bf16(x − h − m)     exact to 2⁻²⁴ of x
//! x·y = Σ (terms of x)·(terms of y), without products below the last bit
//! ```
//! | inputs | terms | P and dS | products S, dP | products with P or dS |
//! |---|---|---|---|---|
//! | bf16 | 1 | 2, or 1 with [`Precision::Default`] | 1 | 2 or 1 |
//! | f16 | 2 | 2 | 4 | 3 |
//! | f32 | 3 | 3 | 6 | 6 |
//!
//! Smaller products are added first. Their order depends on which operand comes from the queries,
//! not on which is in lanes, so that backward recomputes the bits of forward.
//!
//! **Range.** Tiles read subnormal numbers as 0, and the last term of an f32 x is 2⁻¹⁷ of it or
//! less. Vectors of f32 with a largest element outside 2⁻³² … 2³² are therefore multiplied by a
//! power of two, their factor: each row and lane of S and dP has its own, so that bits depend on
//! the two vectors alone; sums over rows have one for each tile of 64 rows and, of dS, for each
//! query or key. Products are divided by both factors.
//!
//! **Values that are not finite** have the terms (x, 0, 0): ∞ times a term 0 is NaN, so that scores
//! of such a vector are computed anew from first terms. Its factor is NaN.
//!
//! ```text
//! S, dP    A  rows      [row][term][pair of dims]       B  strip    [term][pair of dims][lane]
//! tn       A  by dim    [dim][term][pair of rows]       B  P, dS    [term][pair of rows][lane]
//! dQ       A  dS        [query][term][pair of keys]     B  by row   [term][pair of keys][dim]
//! decode   A  P         as dS, rows are packed rows     B  by row
//! ```
//!
//! # Source
//! Henry, Tang and Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for
//! higher-precision computations".

use std::ops::Range;

use annulus_core::{DType, Precision};

use crate::{
    simd::{
        dispatch::PairKernel,
        tile_unit::TILE_SIZE,
        vector::{Bf16Pairs, unrolled},
    },
    tile::tile_mask::TILE,
};

/// Maximum terms of an element.
pub(crate) const MAX_TERMS: usize = 3;

/// Pairs of the rows of a tile.
pub(crate) const ROW_PAIRS: usize = TILE / 2;

/// Numbers of terms of the operands of one dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Of q, k, v and dO.
    pub(crate) inputs: usize,
    /// Of P and dS.
    pub(crate) weights: usize,
}

impl Terms {
    /// Returns the terms of inputs of this dtype; `None` if their products are not computed on
    /// tiles.
    pub(crate) const fn new(dtype: DType, precision: Precision) -> Option<Self> {
        match (dtype, precision) {
            (DType::F64, _) => None,
            (DType::F32, _) => Some(Self { inputs: 3, weights: 3 }),
            (DType::F16, _) => Some(Self { inputs: 2, weights: 2 }),
            (DType::Bf16, Precision::Default) => Some(Self { inputs: 1, weights: 1 }),
            (DType::Bf16, _) => Some(Self { inputs: 1, weights: 2 }),
        }
    }
}

/// Products of terms, as the numbers of two terms each, in the order of summation.
pub(crate) struct Products {
    list: [[usize; 2]; MAX_TERMS * MAX_TERMS],
    len: usize,
}

impl Products {
    /// Returns the products of sums of `first` and of `second` terms whose numbers add up to at
    /// most `last`, the smallest ones first.
    pub(crate) fn new(first: usize, second: usize, last: usize) -> Self {
        let mut products = Self { list: Default::default(), len: 0 };
        for sum in (0..=last).rev() {
            for one in 0..first.min(sum + 1) {
                if sum - one < second {
                    products.list[products.len] = [one, sum - one];
                    products.len += 1;
                }
            }
        }
        products
    }

    /// Maps the numbers of terms to first elements of A and B, in place.
    pub(crate) fn passes(&mut self, first: impl Fn([usize; 2]) -> [usize; 2]) -> &[[usize; 2]] {
        let list = &mut self.list[..self.len];
        list.iter_mut().for_each(|terms| *terms = first(*terms));
        list
    }
}

/// Positions of the rows of a tile among 64 row numbers: of the rows of a leaf, some of which a
/// block may lack. In other orders a row's position is its index.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowPositions<'a>(pub(crate) Option<&'a [u8; TILE]>);

impl RowPositions<'_> {
    pub(crate) fn of(self, row: usize) -> usize {
        self.0.map_or(row, |positions| usize::from(positions[row]))
    }

    /// Returns the chunks of 32 positions that hold the rows `rows`.
    pub(crate) fn chunks(self, rows: &Range<usize>) -> Range<usize> {
        const CHUNK: usize = 2 * TILE_SIZE;
        self.of(rows.start) / CHUNK..self.of(rows.end - 1) / CHUNK + 1
    }

    /// Returns the row at each position, of the rows `rows`.
    pub(super) fn rows(self, rows: Range<usize>) -> [Option<usize>; TILE] {
        let mut at = [None; TILE];
        rows.for_each(|row| at[self.of(row)] = Some(row));
        at
    }
}

/// Returns the power of two by which numbers up to this magnitude, given by its bits, are
/// multiplied.
pub(super) fn factor(bits: u32) -> f32 {
    const BIAS: i32 = 127;
    const WITHOUT_FACTOR: i32 = 32;
    let exponent = (bits >> 23).cast_signed() - BIAS;
    if bits == 0 || exponent.abs() <= WITHOUT_FACTOR {
        return 1.0;
    }
    // factors are normal numbers
    f32::from_bits((BIAS - exponent.clamp(-126, 126)).cast_unsigned() << 23)
}

/// Bits of the magnitude of infinity; those of NaN are larger.
pub(super) const INFINITY: u32 = 0x7f80_0000;

/// Loads a vector.
#[inline(always)]
pub(super) fn load<V: Bf16Pairs>(elements: &[f32]) -> V {
    V::row::<1>(elements).map_or(V::splat(0.0), |[vector]| V::load(vector))
}

/// Stores a vector.
#[inline(always)]
pub(super) fn store<V: Bf16Pairs>(vector: V, into: &mut [f32]) {
    if let Some([into]) = V::row_mut::<1>(into) {
        vector.store(into);
    }
}

/// Returns x − bf16(x), which is exact; 0 if x is infinite or NaN.
#[inline(always)]
fn rest<V: Bf16Pairs>(x: V) -> V {
    let zero = V::splat(0.0);
    // the second element of a pair is the upper half of an f32
    let rest = x.minus(V::interleaved(zero, x));
    rest.if_equal(rest, rest, zero)
}

/// Passes the terms of two vectors to `take`, paired by `pair`.
#[inline(always)]
pub(super) fn each_term<V: Bf16Pairs>(
    terms: usize,
    [mut first, mut second]: [V; 2],
    pair: impl Fn(V, V) -> V,
    mut take: impl FnMut(usize, V),
) {
    for term in 0..terms {
        take(term, pair(first, second));
        if term + 1 < terms {
            [first, second] = [first, second].map(rest);
        }
    }
}

/// Splits the rows `rows` of a tile of P or dS into terms, with pairs of rows.
pub(crate) struct SplitWeights<'a> {
    /// Rows of `VECTORS` vectors.
    pub(crate) tile: &'a [f32],
    pub(crate) rows: Range<usize>,
    pub(crate) positions: RowPositions<'a>,
    pub(crate) terms: usize,
    /// `[terms][ROW_PAIRS][width]`; only chunks that hold a row are written.
    pub(crate) into: &'a mut [f32],
    /// Factors of the lanes, if elements may be of any magnitude.
    pub(crate) factors: Option<&'a mut [f32]>,
}

impl PairKernel for SplitWeights<'_> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let Self { tile, rows, positions, terms, into, factors } = self;
        let tile = V::strip::<VECTORS>(tile);
        let one = V::splat(1.0);
        let mut scale = [one; VECTORS];
        if let Some(factors) = factors {
            let mut most = [V::splat(0.0); VECTORS];
            for row in &tile[rows.clone()] {
                unrolled!(v < VECTORS, {
                    most[v] = V::load(&row[v]).masked(!(1 << 31)).if_larger(most[v]);
                });
            }
            unrolled!(v < VECTORS, {
                store(most[v], &mut factors[v * TILE_SIZE..]);
            });
            for factor_of_lane in &mut factors[..VECTORS * TILE_SIZE] {
                let bits = factor_of_lane.to_bits();
                *factor_of_lane = if bits < INFINITY { factor(bits) } else { 1.0 };
            }
            unrolled!(v < VECTORS, scale[v] = load(&factors[v * TILE_SIZE..]));
        }
        let chunks = positions.chunks(&rows);
        let at = positions.rows(rows);
        let of_term = ROW_PAIRS * VECTORS * TILE_SIZE;
        for pair in chunks.start * TILE_SIZE..chunks.end * TILE_SIZE {
            let two = [at[2 * pair], at[2 * pair + 1]].map(|row| row.map(|row| &tile[row]));
            unrolled!(v < VECTORS, {
                let two = two.map(|row| row.map_or(V::splat(0.0), |row| V::load(&row[v])));
                each_term(terms, two.map(|x| x.times(scale[v])), V::interleaved, |term, pairs| {
                    let first = term * of_term + (pair * VECTORS + v) * TILE_SIZE;
                    store(pairs, &mut into[first..]);
                });
            });
        }
    }
}

/// Splits a tile of 64 × 64 elements into terms, with pairs of neighbouring elements of a row.
pub(crate) struct SplitRows<'a> {
    pub(crate) tile: &'a [f32],
    pub(crate) terms: usize,
    /// `[rows][terms][ROW_PAIRS]`
    pub(crate) into: &'a mut [f32],
    /// Factors of the rows.
    pub(crate) factors: &'a mut [f32],
}

impl PairKernel for SplitRows<'_> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let Self { tile, terms, into, factors } = self;
        let lines = tile.chunks_exact(TILE).zip(into.chunks_exact_mut(terms * ROW_PAIRS));
        for ((line, into), of_row) in lines.zip(factors) {
            *of_row = 1.0;
            if terms == MAX_TERMS {
                let bits = |element: &f32| element.to_bits() & !(1 << 31);
                let all = line.iter().map(bits).fold(0, u32::max);
                *of_row = if all < INFINITY { factor(all) } else { 1.0 };
            }
            let scale = V::splat(*of_row);
            for pair in (0..ROW_PAIRS).step_by(TILE_SIZE) {
                let two = [2 * pair, 2 * pair + TILE_SIZE]
                    .map(|first| load::<V>(&line[first..]).times(scale));
                each_term(terms, two, V::in_order, |term, pairs| {
                    store(pairs, &mut into[term * ROW_PAIRS + pair..]);
                });
            }
        }
    }
}
