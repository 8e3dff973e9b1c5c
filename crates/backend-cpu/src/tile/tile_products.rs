//! Products on the tiles of [`crate::simd::amx`]: the micro-kernels of [`crate::tile::gemm`]. Their
//! operands are sums of bf16 terms ([`crate::tile::terms`]).
//!
//! ```text
//! nn:  S = K·Qᵀ      A = rows of pairs along the dims        B = strip, a line per pair of dims
//! tn:  Oᵀ += Vᵀ·P    A = dims, with pairs along the rows     B = P, a line per pair of rows
//! ```
//! Rows of A are 16 of a tile or fewer, lanes of B are the vectors of a strip. Sizes along k are
//! padded with zeros to whole tiles. Products of masked pairs are computed too: their results are
//! overwritten (nn), or one of their factors is 0 and the other is made finite (tn, dQ by rows).

use crate::{
    simd::{
        amx::TileProduct,
        dispatch::{IsaToken, MAX_REGISTER_ROWS, Real},
        tile_unit::{TILE_SIZE, TileUnit},
    },
    tile::{
        bf16_pairs::{LOW, as_pairs, as_pairs_mut},
        operands::{GemmEpilogue, Previous, TileProducts, Weights},
        pack::PanelView,
        terms::{Products, ROW_PAIRS},
        tile_mask::TileMask,
    },
};

/// Calls of the epilogue for a tile of C: as many as register tiles of the vector kernels.
const EPILOGUES: usize = TILE_SIZE * TILE_SIZE / (MAX_REGISTER_ROWS * TILE_SIZE);

/// Computes tile\[r\] ← panel\[r\]·lanes for the tiles that hold visible rows; see
/// [`crate::tile::gemm::gemm_nn`].
pub(crate) fn nn<A: Real>(
    unit: TileUnit,
    (token, vectors): (IsaToken, usize),
    tile_mask: &TileMask,
    panel: PanelView<'_, A>,
    lanes: &[A],
    tile: &mut [A],
    epilogue: &mut impl GemmEpilogue,
) -> TileProducts {
    let width = vectors * TILE_SIZE;
    let row_ranges = tile_mask.row_ranges();
    let pairs = panel.stride / panel.terms;
    let (lanes, of_lanes) = as_pairs(lanes).split_at(panel.stride * width);
    let of_rows = as_pairs(panel.row_factors());
    let visible = tile_mask.rows();
    let is_one = |factors: &[f32]| factors.iter().all(|&factor| factor == 1.0);
    let has_factors =
        !is_one(of_rows.get(visible.clone()).unwrap_or_default()) || !is_one(of_lanes);
    let mut products = Products::new(panel.terms, panel.terms, panel.terms.min(2));
    let passes = products.passes(|[query, key]| {
        let [row, lane] = if panel.is_of_queries { [query, key] } else { [key, query] };
        [row * pairs, lane * pairs * width]
    });
    let tile = as_pairs_mut(tile);
    let first_block = visible.start / TILE_SIZE * TILE_SIZE;
    for row in (first_block..visible.end).step_by(TILE_SIZE) {
        // adjacent vectors share the loads of A
        let is_needed = |&vector: &usize| {
            row_ranges.as_ref().is_none_or(|ranges| {
                let rows = &ranges[vector];
                rows.start < row + TILE_SIZE && row < rows.end
            })
        };
        let Some(first) = (0..vectors).find(is_needed) else { continue };
        let last = (first..vectors).rfind(is_needed).unwrap_or(first);
        let factors = || {
            let of_rows = of_rows.get(row..).unwrap_or_default();
            [of_rows, of_lanes.get(first * TILE_SIZE..).unwrap_or_default()]
        };
        let product = TileProduct {
            a: as_pairs(panel.rows(row..row + TILE_SIZE)),
            a_stride: panel.stride,
            b: &lanes[first * TILE_SIZE..],
            b_stride: width,
            passes,
            c: &mut tile[row * width + first * TILE_SIZE..],
            c_stride: width,
            previous: Previous::Overwrite,
            factors: has_factors.then(factors),
            rows: TILE_SIZE,
            chunks: pairs / TILE_SIZE,
            tiles: last + 1 - first,
        };
        unit.run(token, product);
        (0..EPILOGUES * vectors).for_each(|_| epilogue.after_register_tile());
    }
    if has_factors {
        for row in visible.clone() {
            for (lane, of_lane) in of_lanes.iter().enumerate() {
                if of_lane.is_nan() || of_rows[row].is_nan() {
                    let row_pairs = &as_pairs(panel.rows(row..row + 1))[..pairs];
                    tile[row * width + lane] = first_terms(row_pairs, &lanes[lane..], width);
                }
            }
        }
    }
    let first = visible.start;
    let row_ranges = row_ranges.map(|ranges| {
        ranges.map(|rows| rows.start.saturating_sub(first)..rows.end.saturating_sub(first))
    });
    TileProducts { max_known: false, masked: false, row_ranges }
}

/// Computes the product of the first terms of a row and of a lane.
fn first_terms(row: &[f32], lanes: &[f32], width: usize) -> f32 {
    let pairs = row.iter().zip(lanes.iter().step_by(width));
    pairs.fold(0.0, |sum, (&row, &lane)| {
        let ([low, high], [other_low, other_high]) = (halves(row), halves(lane));
        sum + low * other_low + high * other_high
    })
}

/// Computes C = C·rescale + A·P with pairs along the rows of a panel; see
/// [`crate::tile::gemm::gemm_tn`].
///
/// If the panel is not finite, tiles multiply a copy in which its other elements are 0, and visible
/// lanes add the products of these elements: a masked NaN changes no bit.
pub(crate) fn tn<A: Real>(
    unit: TileUnit,
    (token, vectors): (IsaToken, usize),
    tile_mask: &TileMask,
    panel: PanelView<'_, A>,
    weights: Weights<'_, A>,
    sums: &mut [A],
    previous: Previous<'_, A>,
) {
    let width = vectors * TILE_SIZE;
    let rows = tile_mask.rows();
    let chunks = weights.positions.chunks(rows);
    let first = chunks.start * TILE_SIZE;
    let b = as_pairs(weights.elements);
    let copy = (!panel.finite).then(|| finite_pairs(as_pairs(panel.along_rows())));
    let a = copy.as_deref().unwrap_or(as_pairs(panel.along_rows()));
    let b_terms = b.len() / (ROW_PAIRS * width);
    let mut products = Products::new(b_terms, panel.terms, b_terms - 1);
    let passes = products.passes(|[weight, input]| {
        [input * ROW_PAIRS + first, (weight * ROW_PAIRS + first) * width]
    });
    let of_panel = as_pairs(panel.tile_factor(0));
    let of_lanes = as_pairs(weights.factors);
    let has_factors = of_panel.iter().chain(of_lanes).any(|&factor| factor != 1.0);
    let of_rows = [of_panel.first().copied().unwrap_or(1.0); TILE_SIZE];
    let c = as_pairs_mut(sums);
    // all rows of C have the factor of the panel
    let blocks = if has_factors { TILE_SIZE * width } else { c.len() };
    for (index, c) in c.chunks_mut(blocks).enumerate() {
        let product = TileProduct {
            a: &a[index * TILE_SIZE * panel.reduction_stride..],
            a_stride: panel.reduction_stride,
            b,
            b_stride: width,
            passes,
            rows: c.len() / width,
            c,
            c_stride: width,
            previous: previous.as_pairs(),
            factors: has_factors.then_some([&of_rows[..], of_lanes]),
            chunks: chunks.len(),
            tiles: vectors,
        };
        unit.run(token, product);
    }
    if panel.finite {
        return;
    }
    let lines = as_pairs(panel.along_rows()).chunks(panel.reduction_stride);
    for (line, c) in lines.zip(c.chunks_exact_mut(width)) {
        for row in rows.clone() {
            let position = weights.positions.of(row);
            let element = halves(line[position / 2])[position % 2];
            if element.is_finite() {
                continue;
            }
            let word = tile_mask.words().map_or(!0, |words| words[row - rows.start]);
            for lane in (0..width).filter(|lane| word >> lane & 1 != 0) {
                c[lane] += element * halves(b[position / 2 * width + lane])[position % 2];
            }
        }
    }
}

/// Returns the two elements of a pair.
pub(crate) fn halves(pair: f32) -> [f32; 2] {
    [pair.to_bits() << 16, pair.to_bits() & !LOW].map(f32::from_bits)
}

/// Copies pairs, with 0 in place of NaN and infinities.
pub(crate) fn finite_pairs(pairs: &[f32]) -> Vec<f32> {
    let finite = |pair: f32| {
        let [low, high] = halves(pair).map(|half| if half.is_finite() { half } else { 0.0 });
        f32::from_bits(low.to_bits() >> 16 | high.to_bits())
    };
    pairs.iter().map(|&pair| finite(pair)).collect()
}
