//! Packing of vectors into operands of the products on tiles: sums of bf16 terms, in pairs
//! ([`crate::tile::terms`]).
//!
//! ```text
//! for each row:  factor ← largest magnitude     [term][pair of dims] ← terms of row · factor
//! along rows:    pairs of two packed rows, 32 dims at a time
//! ```
//! bf16 is a pair in memory: its rows are copied, not split. All rows are read from memory once.

use std::ops::Range;

use annulus_core::DType;
use half::{bf16, f16};

use crate::{
    simd::{dispatch::PairKernel, tile_unit::TILE_SIZE, vector::Bf16Pairs},
    tile::{
        bf16_pairs::as_pairs_mut,
        input::{Plane, TileInput},
        terms::{INFINITY, MAX_TERMS, ROW_PAIRS, RowPositions, each_term, factor, load, store},
        tile_mask::TILE,
    },
};

/// Returns a vector of a plane, through `copy` if its elements are not contiguous.
#[inline(always)]
fn contiguous<'a, 's: 'a, E: TileInput>(
    plane: &Plane<'s, E>,
    row: usize,
    copy: &'a mut Vec<E>,
) -> &'a [E] {
    match plane.slice(row) {
        Some(vector) => vector,
        None => {
            copy.clear();
            copy.extend(plane.vector(row));
            copy
        }
    }
}

/// Widens the first 16 elements of a slice, with 0 beyond its end.
#[inline(always)]
fn widened<E: TileInput, V: Bf16Pairs>(elements: &[E]) -> V {
    match E::DTYPE {
        DType::Bf16 => V::widen::<bf16>(bytemuck::try_cast_slice(elements).unwrap_or_default()),
        DType::F16 => V::widen::<f16>(bytemuck::try_cast_slice(elements).unwrap_or_default()),
        _ => V::widen::<f32>(bytemuck::try_cast_slice(elements).unwrap_or_default()),
    }
}

/// Loads 32 elements of bf16 as pairs, which they are in memory; `None` for other types and for
/// fewer elements.
#[inline(always)]
fn raw_pairs<E: TileInput, V: Bf16Pairs>(elements: &[E]) -> Option<V> {
    if E::DTYPE != DType::Bf16 {
        return None;
    }
    let bytes = bytemuck::cast_slice::<E, u8>(elements).first_chunk::<{ 4 * TILE_SIZE }>()?;
    Some(load(&bytemuck::pod_read_unaligned::<[f32; TILE_SIZE]>(bytes)))
}

/// Splits 32 elements or fewer, multiplied by `factor`, into terms, and passes the pairs of each to
/// `take`.
#[inline(always)]
fn each_pairs<E: TileInput, V: Bf16Pairs>(
    elements: &[E],
    terms: usize,
    factor: f32,
    mut take: impl FnMut(usize, V),
) {
    if let Some(pairs) = raw_pairs(elements) {
        return take(0, pairs);
    }
    let factor = V::splat(if factor.is_nan() { 1.0 } else { factor });
    let first = widened::<E, V>(elements).times(factor);
    let second = widened::<E, V>(elements.get(TILE_SIZE..).unwrap_or_default()).times(factor);
    each_term(terms, [first, second], V::in_order, take);
}

/// Returns the bits of the largest magnitude of finite elements, and true if all are finite. 0
/// unless `wanted` or an element is not finite.
#[inline(always)]
fn magnitude<E: TileInput, V: Bf16Pairs>(vector: &[E], wanted: bool) -> (u32, bool) {
    const MAGNITUDE: u32 = !(1 << 31);
    let zero = V::splat(0.0);
    let mut most = zero;
    // NaN if an element is not finite
    let mut probe = zero;
    for elements in vector.chunks(TILE_SIZE) {
        let elements = widened::<E, V>(elements);
        probe = elements.multiply_add(zero, probe);
        if wanted {
            most = elements.masked(MAGNITUDE).if_larger(most);
        }
    }
    let is_finite = probe.all_equal(zero);
    if is_finite && !wanted {
        return (0, true);
    }
    let mut lanes = [0.0f32; TILE_SIZE];
    store(most, &mut lanes);
    let mut finite = lanes.iter().fold(0, |most, lane| lane.to_bits().max(most));
    if !is_finite {
        finite = 0;
        for elements in vector.chunks(TILE_SIZE) {
            store(widened::<E, V>(elements).masked(MAGNITUDE), &mut lanes);
            let bits = lanes.iter().map(|lane| lane.to_bits()).filter(|&bits| bits < INFINITY);
            finite = bits.fold(finite, u32::max);
        }
    }
    (finite, is_finite)
}

/// Packs a vector, multiplied by `factor`, as `[terms][pairs of dims]`.
#[inline(always)]
fn pack_row<E: TileInput, V: Bf16Pairs>(vector: &[E], terms: usize, factor: f32, into: &mut [f32]) {
    let of_term = into.len() / terms;
    for (index, elements) in vector.chunks(2 * TILE_SIZE).enumerate() {
        each_pairs::<E, V>(elements, terms, factor, |term, pairs| {
            store(pairs, &mut into[term * of_term + index * TILE_SIZE..]);
        });
    }
}

/// Packs up to 64 rows of a panel.
pub(crate) struct PackRows<'a, 's, E: TileInput> {
    pub(crate) plane: Plane<'s, E>,
    pub(crate) rows: Range<usize>,
    pub(crate) terms: usize,
    pub(crate) positions: RowPositions<'a>,
    /// `[rows][terms][stride / terms]`
    pub(crate) elements: &'a mut [E::Accumulator],
    pub(crate) stride: usize,
    pub(crate) along_rows: PairsAlongRows<'a, E::Accumulator>,
    /// Of the rows, and of sums over them; none for one term.
    pub(crate) factors: Option<(&'a mut [E::Accumulator], &'a mut E::Accumulator)>,
    /// Out: true if all elements are finite.
    pub(crate) finite: &'a mut bool,
}

/// Second copy of a panel, with pairs along the rows.
pub(crate) enum PairsAlongRows<'a, A> {
    Absent,
    /// `[dims][terms][ROW_PAIRS]`
    ByDim(&'a mut [A]),
    /// `[terms][pairs of rows][stride]`, from the tile's first pair on.
    ByRow {
        elements: &'a mut [A],
        of_term: usize,
        stride: usize,
    },
}

impl<E: TileInput> PairKernel for PackRows<'_, '_, E> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let Self { plane, rows, terms, positions, elements, stride, along_rows, .. } = self;
        let elements = as_pairs_mut(elements);
        let mut vector = Vec::new();
        let mut of_rows = [1.0; TILE];
        let mut largest = 0;
        *self.finite = true;
        let lines = elements.chunks_exact_mut(stride);
        for ((row, of_row), into) in rows.clone().zip(&mut of_rows).zip(lines) {
            let vector = contiguous(&plane, row, &mut vector);
            let (bits, is_finite) = magnitude::<E, V>(vector, terms == MAX_TERMS);
            largest = largest.max(bits);
            if !is_finite {
                *self.finite = false;
                *of_row = f32::NAN;
            } else if terms == MAX_TERMS {
                *of_row = factor(bits);
            }
            pack_row::<E, V>(vector, terms, *of_row, into);
        }
        let of_tile = if terms == MAX_TERMS { factor(largest) } else { 1.0 };
        if let Some((into, tile)) = self.factors {
            as_pairs_mut(into)[..rows.len()].copy_from_slice(&of_rows[..rows.len()]);
            as_pairs_mut(std::slice::from_mut(tile))[0] = of_tile;
        }
        if matches!(along_rows, PairsAlongRows::Absent) {
            return;
        }
        // sums over rows have one factor
        let differs = |&of_row: &f32| of_row != of_tile && !(of_row.is_nan() && of_tile == 1.0);
        let mut copy = Vec::new();
        if of_rows[..rows.len()].iter().any(differs) {
            copy.resize(rows.len() * stride, 0.0);
            for (row, into) in rows.clone().zip(copy.chunks_exact_mut(stride)) {
                let vector = contiguous(&plane, row, &mut vector);
                pack_row::<E, V>(vector, terms, of_tile, into);
            }
        }
        let packed = PackedRows {
            elements: if copy.is_empty() { elements } else { &copy },
            stride,
            of_term: stride / terms,
            at: positions.rows(0..rows.len()),
        };
        match along_rows {
            PairsAlongRows::Absent => {}
            PairsAlongRows::ByRow { elements, of_term, stride } => {
                let elements = as_pairs_mut(elements);
                for pair in 0..ROW_PAIRS {
                    for term in 0..terms {
                        let line = &mut elements[term * of_term + pair * stride..][..stride];
                        for first in (0..stride).step_by(2 * TILE_SIZE) {
                            let [low, high] = packed.zipped::<V>(pair, term, first);
                            store(low, &mut line[first..]);
                            store(high, line.get_mut(first + TILE_SIZE..).unwrap_or_default());
                        }
                    }
                }
            }
            PairsAlongRows::ByDim(elements) => {
                let stride = terms * ROW_PAIRS;
                let two = 2 * TILE_SIZE * stride;
                for (index, lines) in as_pairs_mut(elements).chunks_mut(two).enumerate() {
                    for (term, chunk) in (0..terms)
                        .flat_map(|term| (0..ROW_PAIRS).step_by(TILE_SIZE).map(move |c| (term, c)))
                    {
                        let mut blocks = [[V::splat(0.0); TILE_SIZE]; 2];
                        let [low, high] = &mut blocks;
                        for (pair, (low, high)) in low.iter_mut().zip(high).enumerate() {
                            [*low, *high] =
                                packed.zipped(chunk + pair, term, index * 2 * TILE_SIZE);
                        }
                        for (block, lines) in
                            blocks.iter_mut().zip(lines.chunks_mut(TILE_SIZE * stride))
                        {
                            V::transpose(block);
                            for (line, &pairs) in lines.chunks_exact_mut(stride).zip(&*block) {
                                store(pairs, &mut line[term * ROW_PAIRS + chunk..]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Packed rows of a tile, from which pairs of rows are made.
struct PackedRows<'a> {
    /// `[rows][terms][of_term]`
    elements: &'a [f32],
    stride: usize,
    of_term: usize,
    /// Row at each position.
    at: [Option<usize>; TILE],
}

impl PackedRows<'_> {
    /// Pairs 32 dims of the rows at positions 2·pair and 2·pair + 1, with 0 for no row.
    #[inline(always)]
    fn zipped<V: Bf16Pairs>(&self, pair: usize, term: usize, first: usize) -> [V; 2] {
        V::zipped(self.load(2 * pair, term, first), self.load(2 * pair + 1, term, first))
    }

    #[inline(always)]
    fn load<V: Bf16Pairs>(&self, position: usize, term: usize, first: usize) -> V {
        match self.at[position] {
            Some(row) => {
                load(&self.elements[row * self.stride + term * self.of_term + first / 2..])
            }
            None => V::splat(0.0),
        }
    }
}

/// Packs the vectors `rows`, transposed, into a strip of `width` lanes. Lanes without a vector are
/// 0.
pub(crate) struct PackLaneTerms<'a, 's, E: TileInput> {
    pub(crate) plane: Plane<'s, E>,
    pub(crate) rows: Range<usize>,
    pub(crate) width: usize,
    pub(crate) dim: usize,
    pub(crate) terms: usize,
    /// `[terms][pairs of dims][width]` and, for several terms, a line of factors.
    pub(crate) strip: &'a mut [E::Accumulator],
}

impl<E: TileInput> PairKernel for PackLaneTerms<'_, '_, E> {
    #[inline(always)]
    fn run<V: Bf16Pairs, const VECTORS: usize>(self) {
        let Self { plane, rows, width, dim, terms, strip } = self;
        let lines = terms * dim.div_ceil(2).next_multiple_of(TILE_SIZE);
        let (strip, of_lanes) = as_pairs_mut(strip).split_at_mut(lines * width);
        let of_term = strip.len() / terms;
        let mut vector = Vec::new();
        let mut factors = [1.0; TILE];
        if terms > 1 {
            for (row, into) in rows.clone().zip(&mut factors) {
                let vector = contiguous(&plane, row, &mut vector);
                let (bits, is_finite) = magnitude::<E, V>(vector, terms == MAX_TERMS);
                *into = match (is_finite, terms) {
                    (false, _) => f32::NAN,
                    (true, MAX_TERMS) => factor(bits),
                    (true, _) => 1.0,
                };
            }
            of_lanes.copy_from_slice(&factors[..width]);
        }
        for lane in (0..width).step_by(TILE_SIZE) {
            for pair in (0..of_term / width).step_by(TILE_SIZE) {
                let mut blocks = [[V::splat(0.0); TILE_SIZE]; MAX_TERMS];
                for i in 0..TILE_SIZE.min(rows.len().saturating_sub(lane)) {
                    let vector = contiguous(&plane, rows.start + lane + i, &mut vector);
                    let elements = vector.get(2 * pair..).unwrap_or_default();
                    each_pairs(elements, terms, factors[lane + i], |term, pairs| {
                        blocks[term][i] = pairs;
                    });
                }
                for (term, block) in blocks.iter_mut().enumerate().take(terms) {
                    V::transpose(block);
                    let lines = &mut strip[term * of_term + pair * width..];
                    for (line, &pairs) in lines.chunks_mut(width).zip(&*block) {
                        store(pairs, &mut line[lane..]);
                    }
                }
            }
        }
    }
}
