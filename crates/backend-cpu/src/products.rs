//! The two matrix products of a tile. All of attention's products are one of them:
//!
//! ```text
//! rows:     C[i][l] = Σ_k A[i][k] · B[k][l]                      S = K·Qᵀ, dP = V·dOᵀ, or with the roles of queries and keys exchanged
//! columns:  C[i][l] = C[i][l] · rescale[l] + Σ_k A[k][i] · B[k][l]    Oᵀ += Vᵀ·P, dQᵀ += Kᵀ·dS, dVᵀ += dOᵀ·P, dKᵀ += Qᵀ·dS
//! ```
//! B and C are strips: rows of a few vectors. A is never transposed: its elements are the broadcast operand. A register tile of C is summed over the
//! whole of k, one chain of multiply-adds an element in ascending k, so that the bits of a logit depend on nothing but its two vectors: the backward
//! pass meets the very logits of the forward pass.

use std::ops::Range;

use crate::{
    isa::{Job, Kernel, MOST_ROWS, Path},
    lanes::{multiply_add, scaled_add, select, strip, strip_mut, unrolled, zip},
    pack::Panel,
    pairs::{self, VisiblePairs},
    real::Real,
    sight::{MOST_PARTS, Sight},
    vector::Vector,
};

/// What is done between the register tiles of a product: little, and nothing that it waits for.
pub(crate) trait Between {
    /// After each register tile.
    fn step(&mut self);
}

/// Nothing.
impl Between for () {
    #[inline(always)]
    fn step(&mut self) {}
}

/// The products of the visible rows of a tile: tile\[r\] ← panel\[r\]·lanes. Rows around them, up to whole register tiles, come out as they may.
///
/// Nor are the products of pairs that [`Sight::parts`] leaves out made: they stay what they were.
///
/// `largest`, if given, becomes the largest product of each lane, and NaN is never that; true if it did: it does not where rows around the visible
/// ones would count.
pub(crate) fn row_products<A: Real>(
    (path, vectors): (Path, usize),
    sight: &Sight,
    panel: &Panel<A>,
    lanes: &[A],
    tile: &mut [A],
    largest: Option<&mut [A]>,
    between: &mut impl Between,
) -> bool {
    let width = vectors * A::WIDTH;
    let rows = sight.rows();
    let whole = rows.start / MOST_ROWS * MOST_ROWS..rows.end.next_multiple_of(MOST_ROWS);
    let largest = largest.filter(|_| whole == *rows);
    let wanted = largest.is_some();
    let c = &mut tile[whole.start * width..whole.end * width];
    let (a, stride) = (panel.rows(whole.clone()), panel.stride());
    match sight.parts(vectors, A::WIDTH) {
        Some(parts) => {
            let parts = parts
                .map(|rows| rows.start.saturating_sub(whole.start) / MOST_ROWS..rows.end.saturating_sub(whole.start).div_ceil(MOST_ROWS));
            A::run_products(path, panel.pairs(), vectors, PartialRowProducts { a, stride, b: lanes, c, parts, between });
            false
        }
        None => {
            A::run_products(path, panel.pairs(), vectors, RowProducts { a, stride, b: lanes, c, largest, between });
            wanted
        }
    }
}

/// Adds the visible rows of a panel, weighted: sums ← sums·rescale + Σ_r panel\[r\]ᵀ·weights\[r\]. Only visible pairs count, whatever is in the panel. `weights` begin with the
/// first visible row, or the line of words that holds it.
pub(crate) fn column_products<A: Real>(
    (path, vectors): (Path, usize),
    sight: &Sight,
    panel: &Panel<A>,
    weights: &[A],
    sums: &mut [A],
    rescale: Option<&[A]>,
    between: &mut impl Between,
) {
    let rows = sight.rows();
    let (a, stride) = (panel.lines(rows), panel.line_stride());
    // rows of the weights, or lines of two
    let step = if panel.pairs() { 2 } else { 1 };
    let first = rows.start / step;
    let lines = |rows: &Range<usize>| (rows.start / step).saturating_sub(first)..rows.end.div_ceil(step).saturating_sub(first);
    let b = &weights[..lines(rows).len() * vectors * A::WIDTH];
    let products = ColumnProducts { a, stride, b, c: sums, rescale, between };
    match sight.words().filter(|_| !panel.finite()) {
        Some(words) if panel.pairs() => {
            let ColumnProducts { a, stride, b, c, rescale, .. } = products;
            let (a, b, c, rescale) = (pairs::words(a), pairs::words(b), pairs::words_mut(c), rescale.map(pairs::words));
            path.run_pairing(vectors, VisiblePairs { a, stride, b, c, rescale, words, odd: !rows.start.is_multiple_of(2) });
        }
        Some(words) => A::run(path, vectors, VisibleColumnProducts { products, words }),
        None => match sight.parts(vectors, A::WIDTH) {
            Some(parts) => {
                let parts = parts.map(|rows| lines(&rows));
                A::run_products(path, panel.pairs(), vectors, PartialColumnProducts { products, parts });
            }
            None => A::run_products(path, panel.pairs(), vectors, products),
        },
    }
}

/// C = A·B.
struct RowProducts<'a, A, B> {
    /// As many rows as C, `stride` apart.
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    /// A multiple of [`MOST_ROWS`] rows.
    c: &'a mut [A],
    /// One row: the largest element of each column of C, if wanted.
    largest: Option<&'a mut [A]>,
    between: &'a mut B,
}

impl<A: Real, B: Between> Kernel<A> for RowProducts<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let b = V::strip::<VECTORS>(self.b);
        let mut top = [V::splat(-A::INFINITY); VECTORS];
        for (block, c) in V::strip_mut::<VECTORS>(self.c).chunks_exact_mut(ROWS).enumerate() {
            let a = &self.a[block * ROWS * self.stride..];
            let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
            let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
            for (k, b) in b.iter().enumerate() {
                unrolled!(r < ROWS, v < VECTORS, sums[r][v] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r][v]));
            }
            unrolled!(r < ROWS, v < VECTORS, {
                top[v] = sums[r][v].if_larger(top[v]);
                sums[r][v].store(&mut c[r][v]);
            });
            self.between.step();
        }
        if let Some(largest) = self.largest.and_then(V::row_mut::<VECTORS>) {
            unrolled!(v < VECTORS, top[v].store(&mut largest[v]));
        }
    }
}

/// C = A·B for some rows of each vector: one vector after another, at an edge of what is visible.
struct PartialRowProducts<'a, A, B> {
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    c: &'a mut [A],
    /// Of each vector, register tiles of [`MOST_ROWS`] rows.
    parts: [Range<usize>; MOST_PARTS],
    between: &'a mut B,
}

impl<A: Real, B: Between> Kernel<A> for PartialRowProducts<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let b = V::strip::<VECTORS>(self.b);
        let (c, _) = V::strip_mut::<VECTORS>(self.c).as_chunks_mut::<MOST_ROWS>();
        for (v, blocks) in self.parts.into_iter().enumerate().take(VECTORS) {
            for block in blocks {
                let a = &self.a[block * MOST_ROWS * self.stride..];
                let a: [&[A]; MOST_ROWS] = std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
                let mut sums = [V::splat(A::ZERO); MOST_ROWS];
                for (k, b) in b.iter().enumerate() {
                    unrolled!(r < MOST_ROWS, sums[r] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r]));
                }
                unrolled!(r < MOST_ROWS, sums[r].store(&mut c[block][r][v]));
                self.between.step();
            }
        }
    }
}

/// C = C·rescale + Aᵀ·B.
struct ColumnProducts<'a, A, B> {
    /// As many rows as B, `stride` apart, each at least as long as C has rows.
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    /// A multiple of [`MOST_ROWS`] rows.
    c: &'a mut [A],
    /// One row; absent = 1.
    rescale: Option<&'a [A]>,
    between: &'a mut B,
}

impl<A: Real, B: Between> Kernel<A> for ColumnProducts<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let b = V::strip::<VECTORS>(self.b);
        let rescale = self.rescale.and_then(V::row::<VECTORS>);
        for (block, c) in V::strip_mut::<VECTORS>(self.c).chunks_exact_mut(ROWS).enumerate() {
            let a = &self.a[block * ROWS..];
            let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
            for (k, b) in b.iter().enumerate() {
                let Some(a) = a[k * self.stride..].first_chunk::<ROWS>() else { break };
                unrolled!(r < ROWS, v < VECTORS, sums[r][v] = V::splat(a[r]).product(V::load(&b[v]), sums[r][v]));
            }
            if let Some(rescale) = rescale {
                unrolled!(r < ROWS, v < VECTORS, V::load(&rescale[v]).multiply_add(V::load(&c[r][v]), sums[r][v]).store(&mut c[r][v]));
            } else {
                unrolled!(r < ROWS, v < VECTORS, V::load(&c[r][v]).plus(sums[r][v]).store(&mut c[r][v]));
            }
            self.between.step();
        }
    }
}

/// As [`ColumnProducts`] with some rows of B for each vector; the other rows are 0 there. The same bits.
struct PartialColumnProducts<'a, A, B> {
    products: ColumnProducts<'a, A, B>,
    parts: [Range<usize>; MOST_PARTS],
}

impl<A: Real, B: Between> Kernel<A> for PartialColumnProducts<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let ColumnProducts { a, stride, b, c, rescale, between } = self.products;
        let b = V::strip::<VECTORS>(b);
        let rescale = rescale.and_then(V::row::<VECTORS>);
        let (c, _) = V::strip_mut::<VECTORS>(c).as_chunks_mut::<MOST_ROWS>();
        for (v, rows) in self.parts.into_iter().enumerate().take(VECTORS) {
            let factor = rescale.map(|rescale| V::load(&rescale[v]));
            for (block, c) in c.iter_mut().enumerate() {
                let mut sums = [V::splat(A::ZERO); MOST_ROWS];
                for (k, b) in rows.clone().zip(&b[rows.clone()]) {
                    let Some(a) = a[k * stride + block * MOST_ROWS..].first_chunk::<MOST_ROWS>() else { break };
                    unrolled!(r < MOST_ROWS, sums[r] = V::splat(a[r]).product(V::load(&b[v]), sums[r]));
                }
                if let Some(factor) = factor {
                    unrolled!(r < MOST_ROWS, factor.multiply_add(V::load(&c[r][v]), sums[r]).store(&mut c[r][v]));
                } else {
                    unrolled!(r < MOST_ROWS, V::load(&c[r][v]).plus(sums[r]).store(&mut c[r][v]));
                }
                between.step();
            }
        }
    }
}

/// As [`ColumnProducts`], but pairs that are not visible are skipped instead of multiplied by 0: for tiles in which A is not finite. The same bits
/// where it is.
struct VisibleColumnProducts<'a, A, B> {
    products: ColumnProducts<'a, A, B>,
    /// Which lanes each row of B counts in.
    words: &'a [u64],
}

impl<A: Real, B> Job for VisibleColumnProducts<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let ColumnProducts { a, stride, b, c, rescale, .. } = self.products;
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
