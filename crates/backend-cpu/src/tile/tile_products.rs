//! Products of bf16 pairs on the tiles of [`crate::simd::amx`]: the micro-kernels of
//! [`crate::tile::gemm`].
//!
//! ```text
//! nn:  S = K·Qᵀ      A = rows of pairs along the dims        B = strip, a line per pair of dims
//! tn:  Oᵀ += Vᵀ·P    A = dims, with pairs along the rows     B = P, a line per pair of rows
//! ```
//! Rows of A are 16 of a tile or fewer, lanes of B are the vectors of a strip. Sizes along k are
//! padded with zeros to whole tiles. Products of masked pairs are computed too: their results are
//! overwritten (nn), or one of their factors is 0 and the other is finite (tn).

use crate::{
    simd::{
        amx::{TILE_SIZE, TileProduct, TileUnit},
        dispatch::{IsaToken, MAX_REGISTER_ROWS, Real},
    },
    tile::{
        bf16_pairs::{as_pairs, as_pairs_mut},
        gemm::{GemmEpilogue, Previous, TileProducts},
        pack::PanelView,
        tile_mask::{TILE, TileMask},
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
    let chunks = lanes.len() / width / TILE_SIZE;
    let visible = tile_mask.rows();
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
        let product = TileProduct {
            a: as_pairs(panel.rows(row..row + TILE_SIZE)),
            a_stride: panel.stride,
            b: &as_pairs(lanes)[first * TILE_SIZE..],
            b_stride: width,
            c: &mut as_pairs_mut(tile)[row * width + first * TILE_SIZE..],
            c_stride: width,
            rows: TILE_SIZE,
            chunks,
            tiles: last + 1 - first,
            add: false,
        };
        unit.run(token, product);
        (0..EPILOGUES * vectors).for_each(|_| epilogue.after_register_tile());
    }
    let first = visible.start;
    let row_ranges = row_ranges.map(|ranges| {
        ranges.map(|rows| rows.start.saturating_sub(first)..rows.end.saturating_sub(first))
    });
    TileProducts { max_known: false, masked: false, row_ranges }
}

/// Computes sums ← sums·rescale + Σ a·probs over pairs of rows; see [`crate::tile::gemm::gemm_tn`].
/// `a` has a line per row of `sums`, with its stride, and starts at the pair of the first line of
/// `probs`.
pub(crate) fn tn<A: Real>(
    unit: TileUnit,
    (token, vectors): (IsaToken, usize),
    (a, a_stride): (&[A], usize),
    probs: &[A],
    sums: &mut [A],
    previous: Previous<'_, A>,
    epilogue: &mut impl GemmEpilogue,
) {
    let width = vectors * TILE_SIZE;
    let (a, b) = (as_pairs(a), as_pairs(probs));
    if let Previous::Rescale(rescale) = previous {
        let rescale = &rescale[..width];
        for row in sums.chunks_exact_mut(width) {
            row.iter_mut().zip(rescale).for_each(|(sum, &factor)| *sum = *sum * factor);
        }
    }
    let c = as_pairs_mut(sums);
    let rows = c.len() / width;
    let pairs = b.len() / width;
    let whole = pairs / TILE_SIZE * TILE_SIZE;
    let mut add = !matches!(previous, Previous::Overwrite);
    if whole > 0 {
        let product = TileProduct {
            a,
            a_stride,
            b,
            b_stride: width,
            c,
            c_stride: width,
            rows,
            chunks: whole / TILE_SIZE,
            tiles: vectors,
            add,
        };
        unit.run(token, product);
        add = true;
    }
    if whole < pairs {
        // copies, padded with zeros: the rows after the last one need not be finite
        let mut last_b = [0.0; TILE_SIZE * TILE];
        last_b[..(pairs - whole) * width].copy_from_slice(&b[whole * width..]);
        for first in (0..rows).step_by(TILE_SIZE) {
            let mut last_a = [[0.0; TILE_SIZE]; TILE_SIZE];
            for (line, into) in (first..).zip(&mut last_a) {
                let from = line * a_stride;
                into[..pairs - whole].copy_from_slice(&a[from + whole..from + pairs]);
            }
            let product = TileProduct {
                a: last_a.as_flattened(),
                a_stride: TILE_SIZE,
                b: &last_b,
                b_stride: width,
                c: &mut c[first * width..],
                c_stride: width,
                rows: TILE_SIZE,
                chunks: 1,
                tiles: vectors,
                add,
            };
            unit.run(token, product);
        }
    }
    (0..rows / MAX_REGISTER_ROWS * vectors).for_each(|_| epilogue.after_register_tile());
}
