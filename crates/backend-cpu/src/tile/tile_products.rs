//! Products of bf16 pairs on the tiles of [`crate::simd::amx`]: the micro-kernels of
//! [`crate::tile::gemm`].
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

/// Operands of C = C·rescale + A·P, with pairs along the rows of a panel; see
/// [`crate::tile::gemm::gemm_tn`].
pub(crate) struct TileTn<'a, A> {
    /// A line per row of C, `a_stride` apart, from the pair of the first line of P on.
    pub(crate) a: &'a [f32],
    pub(crate) a_stride: usize,
    pub(crate) probs: Weights<'a, A>,
    /// Visible lanes of each row of the panel, from the first visible row on.
    pub(crate) lane_words: &'a [u64],
    /// True if the first row is the second of its pair.
    pub(crate) odd: bool,
}

impl<A: Real> TileTn<'_, A> {
    /// Computes the product.
    ///
    /// If A is not `finite`, tiles multiply a copy in which its other elements are 0, and visible
    /// lanes add the products of these elements: a masked NaN changes no bit.
    pub(crate) fn run(
        self,
        unit: TileUnit,
        (token, vectors): (IsaToken, usize),
        finite: bool,
        sums: &mut [A],
        previous: Previous<'_, A>,
    ) {
        let width = vectors * TILE_SIZE;
        if let Previous::Rescale(rescale) = previous {
            let rescale = &rescale[..width];
            for row in sums.chunks_exact_mut(width) {
                row.iter_mut().zip(rescale).for_each(|(sum, &factor)| *sum = *sum * factor);
            }
        }
        let c = as_pairs_mut(sums);
        let copy = (!finite).then(|| finite_pairs(self.a));
        let a = copy.as_deref().unwrap_or(self.a);
        let mut add = !matches!(previous, Previous::Overwrite);
        let Weights { elements, errors } = self.probs;
        for b in [Some(elements), errors].into_iter().flatten() {
            accumulate(unit, (token, vectors), (a, self.a_stride), as_pairs(b), c, add);
            add = true;
        }
        if !finite {
            self.add_nonfinite(width, c);
        }
    }

    /// Adds the products of elements that are not finite to the lanes that are visible.
    fn add_nonfinite(&self, width: usize, c: &mut [f32]) {
        let skip = usize::from(self.odd);
        for (line, c) in self.a.chunks(self.a_stride).zip(c.chunks_exact_mut(width)) {
            for (pair, b) in as_pairs(self.probs.elements).chunks_exact(width).enumerate() {
                for (half, element) in nonfinite_halves(line[pair]) {
                    let row = (2 * pair + half).checked_sub(skip);
                    let word = row.and_then(|row| self.lane_words.get(row)).copied().unwrap_or(0);
                    for lane in (0..width).filter(|lane| word >> lane & 1 != 0) {
                        c[lane] += element * halves(b[lane])[half];
                    }
                }
            }
        }
    }
}

/// Computes C = A·B, or C += A·B with `add`, in whole chunks of pairs and a last one padded with
/// zeros: the elements of A after the last pair need not be finite.
fn accumulate(
    unit: TileUnit,
    (token, tiles): (IsaToken, usize),
    (a, a_stride): (&[f32], usize),
    b: &[f32],
    c: &mut [f32],
    add: bool,
) {
    let width = tiles * TILE_SIZE;
    let rows = c.len() / width;
    let pairs = b.len() / width;
    let whole = pairs / TILE_SIZE * TILE_SIZE;
    let chunks = whole / TILE_SIZE;
    let [b_stride, c_stride] = [width; 2];
    unit.run(
        token,
        TileProduct { a, a_stride, b, b_stride, c, c_stride, rows, chunks, tiles, add },
    );
    if whole == pairs {
        return;
    }
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
            b_stride,
            c: &mut c[first * width..],
            c_stride,
            rows: TILE_SIZE,
            chunks: 1,
            tiles,
            add: add || whole > 0,
        };
        unit.run(token, product);
    }
}

/// Returns the two elements of a pair.
pub(crate) fn halves(pair: f32) -> [f32; 2] {
    [pair.to_bits() << 16, pair.to_bits() & !LOW].map(f32::from_bits)
}

/// Iterates over the elements of a pair that are NaN or infinite, with their places.
pub(crate) fn nonfinite_halves(pair: f32) -> impl Iterator<Item = (usize, f32)> {
    halves(pair).into_iter().enumerate().filter(|(_, element)| !element.is_finite())
}

/// Copies pairs, with 0 in place of NaN and infinities.
pub(crate) fn finite_pairs(pairs: &[f32]) -> Vec<f32> {
    let finite = |pair: f32| {
        let [low, high] = halves(pair).map(|half| if half.is_finite() { half } else { 0.0 });
        f32::from_bits(low.to_bits() >> 16 | high.to_bits())
    };
    pairs.iter().map(|&pair| finite(pair)).collect()
}
