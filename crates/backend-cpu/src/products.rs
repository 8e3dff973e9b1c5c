//! The two matrix products of a tile. All of attention's products are one of them:
//!
//! ```text
//! rows:     C[i][l] = scale · Σ_k A[i][k] · B[k][l]              S = K·Qᵀ, dP = V·dOᵀ, or with the roles of queries and keys exchanged
//! columns:  C[i][l] = C[i][l] · rescale[l] + Σ_k A[k][i] · B[k][l]    Oᵀ += Vᵀ·P, dQᵀ += Kᵀ·dS, dVᵀ += dOᵀ·P, dKᵀ += Qᵀ·dS
//! ```
//! B and C are strips: rows of a few vectors. A is never transposed: its elements are the broadcast operand. A register tile of C is summed over the
//! whole of k, one chain of multiply-adds an element in ascending k, so that the bits of a logit depend on nothing but its two vectors: the backward
//! pass meets the very logits of the forward pass.

use std::ops::Range;

use crate::{
    isa::{Job, MOST_ROWS, Path},
    lanes::{map, multiply_add, scaled_add, select, strip, strip_mut, unrolled, zip},
    pack::Panel,
    real::Real,
    sight::Sight,
};

/// The products of the visible rows of a tile: tile\[r\] ← scale · panel\[r\]·lanes. Rows around them, up to whole register tiles, come out as they
/// may.
pub(crate) fn row_products<A: Real>(
    path: Path,
    vectors: usize,
    rows: &Range<usize>,
    panel: &Panel<A>,
    lanes: &[A],
    tile: &mut [A],
    scale: A,
) {
    let width = vectors * A::WIDTH;
    let rows = rows.start / MOST_ROWS * MOST_ROWS..rows.end.next_multiple_of(MOST_ROWS);
    let c = &mut tile[rows.start * width..rows.end * width];
    A::run(path, vectors, RowProducts { a: panel.rows(rows), stride: panel.stride(), b: lanes, c, scale });
}

/// Adds the visible rows of a panel, weighted: sums ← sums·rescale + Σ_r panel\[r\]ᵀ·weights\[r\]. Only visible pairs count, whatever is in the panel.
pub(crate) fn column_products<A: Real>(
    path: Path,
    vectors: usize,
    sight: &Sight,
    panel: &Panel<A>,
    weights: &[A],
    sums: &mut [A],
    rescale: Option<&[A]>,
) {
    let products = ColumnProducts { a: panel.rows(sight.rows().clone()), stride: panel.stride(), b: weights, c: sums, rescale };
    match sight.words().filter(|_| !panel.finite()) {
        Some(words) => A::run(path, vectors, VisibleColumnProducts { products, words }),
        None => A::run(path, vectors, products),
    }
}

/// C = scale · A·B.
struct RowProducts<'a, A> {
    /// As many rows as C, `stride` apart.
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    /// A multiple of [`MOST_ROWS`] rows.
    c: &'a mut [A],
    scale: A,
}

impl<A: Real> Job for RowProducts<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let b = strip::<A, VECTORS, WIDTH>(self.b);
        for (block, c) in strip_mut::<A, VECTORS, WIDTH>(self.c).chunks_exact_mut(ROWS).enumerate() {
            let a = &self.a[block * ROWS * self.stride..];
            let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
            let mut sums = [[[A::ZERO; WIDTH]; VECTORS]; ROWS];
            for (k, b) in b.iter().enumerate() {
                unrolled!(r < ROWS, v < VECTORS, sums[r][v] = scaled_add::<A, FUSED, WIDTH>(a[r][k], b[v], sums[r][v]));
            }
            unrolled!(r < ROWS, v < VECTORS, c[r][v] = map(sums[r][v], |sum| self.scale * sum));
        }
    }
}

/// C = C·rescale + Aᵀ·B.
struct ColumnProducts<'a, A> {
    /// As many rows as B, `stride` apart, each at least as long as C has rows.
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    /// A multiple of [`MOST_ROWS`] rows.
    c: &'a mut [A],
    /// One row; absent = 1.
    rescale: Option<&'a [A]>,
}

impl<A: Real> Job for ColumnProducts<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let b = strip::<A, VECTORS, WIDTH>(self.b);
        let rescale = self.rescale.and_then(|row| strip::<A, VECTORS, WIDTH>(row).first());
        for (block, c) in strip_mut::<A, VECTORS, WIDTH>(self.c).chunks_exact_mut(ROWS).enumerate() {
            let a = &self.a[block * ROWS..];
            let mut sums = [[[A::ZERO; WIDTH]; VECTORS]; ROWS];
            for (k, b) in b.iter().enumerate() {
                let Some(a) = a[k * self.stride..].first_chunk::<ROWS>() else { break };
                unrolled!(r < ROWS, v < VECTORS, sums[r][v] = scaled_add::<A, FUSED, WIDTH>(a[r], b[v], sums[r][v]));
            }
            if let Some(rescale) = rescale {
                unrolled!(r < ROWS, v < VECTORS, c[r][v] = multiply_add::<A, FUSED, WIDTH>(rescale[v], c[r][v], sums[r][v]));
            } else {
                unrolled!(r < ROWS, v < VECTORS, c[r][v] = zip(c[r][v], sums[r][v], |c, sum| c + sum));
            }
        }
    }
}

/// As [`ColumnProducts`], but pairs that are not visible are skipped instead of multiplied by 0: for tiles in which A is not finite. The same bits
/// where it is.
struct VisibleColumnProducts<'a, A> {
    products: ColumnProducts<'a, A>,
    /// Which lanes each row of B counts in.
    words: &'a [u64],
}

impl<A: Real> Job for VisibleColumnProducts<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let ColumnProducts { a, stride, b, c, rescale } = self.products;
        let b = strip::<A, VECTORS, WIDTH>(b);
        let rescale = rescale.and_then(|row| strip::<A, VECTORS, WIDTH>(row).first());
        for (i, c) in strip_mut::<A, VECTORS, WIDTH>(c).iter_mut().enumerate() {
            unrolled!(v < VECTORS, {
                let mut sums = [A::ZERO; WIDTH];
                for (k, (b, &word)) in b.iter().zip(self.words).enumerate() {
                    let more = scaled_add::<A, FUSED, WIDTH>(a[k * stride + i], b[v], sums);
                    sums = select(word, v * WIDTH, more, sums);
                }
                c[v] = match rescale {
                    Some(rescale) => multiply_add::<A, FUSED, WIDTH>(rescale[v], c[v], sums),
                    None => zip(c[v], sums, |c, sum| c + sum),
                };
            });
        }
    }
}
