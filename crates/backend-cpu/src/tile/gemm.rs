//! Micro-kernels: the two matrix products of a tile. Every product of attention is one of them.
//!
//! ```text
//! nn:  C[i][l] = Σ_k A[i][k]·B[k][l]
//!      S = K·Qᵀ, dP = V·dOᵀ, and with queries and keys exchanged
//! tn:  C[i][l] = C[i][l]·rescale[l] + Σ_k A[k][i]·B[k][l]
//!      Oᵀ += Vᵀ·P, dQᵀ += Kᵀ·dS, dVᵀ += dOᵀ·P, dKᵀ += Qᵀ·dS
//!
//! for each register tile of ROWS × VECTORS vectors of C:
//!     sums ← 0                                               ROWS × VECTORS registers
//!     for k ascending:  sums[r][v] += splat(A[r][k]) · B[k][v]
//!     C ← sums   or   C·rescale + sums
//!     epilogue.after_register_tile()
//! ```
//! B and C are strips: rows of a few vectors. A is a panel, and its elements are broadcast, so that
//! neither product transposes an operand. Each element of C is one chain of multiply-adds over the
//! whole of k in ascending order. The bits of a score therefore depend on nothing but its two
//! vectors, and backward recomputes exactly the scores of forward.
//!
//! # Source
//! Register tiles and packed operands as in BLIS (Van Zee and van de Geijn 2015) and
//! matrixmultiply.

use std::ops::Range;

use crate::{
    simd::{
        dispatch::{ArrayKernel, IsaToken, Kernel, MAX_REGISTER_ROWS, Real},
        lanes::{multiply_add, scaled_add, select, strip, strip_mut, unrolled, zip},
        vector::Vector,
    },
    tile::{
        bf16_pairs::{self, MaskedPairProducts},
        pack::Panel,
        tile_mask::{MAX_STRIP_VECTORS, TileMask},
    },
};

/// Runs a body for each register tile of `$rows` rows, with the number of rows as its second type
/// argument: tiles of `$most` rows, then one of 4 and one of 2 where `$most` leaves rows over.
macro_rules! each_register_tile {
    ($most:ident, $rows:expr, $first:ident =>
        $on:ident.$tile:ident::<$vector:ty, $vectors:ident>($($argument:expr),*)) => {{
        let rows = $rows;
        let mut $first = 0;
        while $first + $most <= rows {
            $on.$tile::<$vector, $most, $vectors>($($argument),*);
            $first += $most;
        }
        if !MAX_REGISTER_ROWS.is_multiple_of($most) {
            if $first + 4 <= rows {
                $on.$tile::<$vector, 4, $vectors>($($argument),*);
                $first += 4;
            }
            if $first + 2 <= rows {
                $on.$tile::<$vector, 2, $vectors>($($argument),*);
            }
        }
    }};
}
pub(crate) use each_register_tile;

/// Work after each register tile of a product: short, and without a result that the next tile waits
/// for.
pub(crate) trait Epilogue {
    /// Called after each register tile.
    fn after_register_tile(&mut self);
}

/// No epilogue.
impl Epilogue for () {
    #[inline(always)]
    fn after_register_tile(&mut self) {}
}

/// Computes the visible rows of a tile: tile\[r\] ← panel\[r\]·lanes.
///
/// Rows around them, up to whole register tiles, are unspecified. Elements that
/// [`TileMask::row_ranges`] trims are left unchanged.
///
/// Writes the maximum product of each lane to `tile_max` and returns true, if it is given, every
/// computed row is visible and nothing is trimmed. NaN is never the maximum.
pub(crate) fn gemm_nn<A: Real>(
    (token, vectors): (IsaToken, usize),
    tile_mask: &TileMask,
    panel: &Panel<A>,
    lanes: &[A],
    tile: &mut [A],
    tile_max: Option<&mut [A]>,
    epilogue: &mut impl Epilogue,
) -> bool {
    let width = vectors * A::WIDTH;
    let rows = tile_mask.rows();
    let padded_rows = rows.start / MAX_REGISTER_ROWS * MAX_REGISTER_ROWS
        ..rows.end.next_multiple_of(MAX_REGISTER_ROWS);
    let tile_max = tile_max.filter(|_| padded_rows == *rows);
    let wanted = tile_max.is_some();
    let c = &mut tile[padded_rows.start * width..padded_rows.end * width];
    let a = panel.rows(padded_rows.clone());
    let stride = panel.stride();
    match tile_mask.row_ranges(vectors, A::WIDTH) {
        Some(row_ranges) => {
            let row_ranges = row_ranges.map(|rows| {
                rows.start.saturating_sub(padded_rows.start) / MAX_REGISTER_ROWS
                    ..rows.end.saturating_sub(padded_rows.start).div_ceil(MAX_REGISTER_ROWS)
            });
            A::run_products(
                token,
                panel.holds_pairs(),
                vectors,
                PartialGemmNn { a, stride, b: lanes, c, row_ranges, epilogue },
            );
            false
        }
        None => {
            A::run_products(
                token,
                panel.holds_pairs(),
                vectors,
                GemmNn { a, stride, b: lanes, c, tile_max, epilogue },
            );
            wanted
        }
    }
}

/// Accumulates the visible rows of a panel, weighted by `probs`.
///
/// ```text
/// sums ← sums·rescale + Σ_r panel[r]ᵀ·probs[r]
/// ```
/// Masked pairs contribute nothing, also if the panel holds NaN. `probs` starts at the first
/// visible row or, for bf16 pairs, at the line that holds it.
pub(crate) fn gemm_tn<A: Real>(
    (token, vectors): (IsaToken, usize),
    tile_mask: &TileMask,
    panel: &Panel<A>,
    probs: &[A],
    sums: &mut [A],
    rescale: Option<&[A]>,
    epilogue: &mut impl Epilogue,
) {
    let rows = tile_mask.rows();
    let a = panel.reduction_rows(rows);
    let stride = panel.reduction_stride();
    // rows per line of `probs`
    let step = if panel.holds_pairs() { 2 } else { 1 };
    let first = rows.start / step;
    let lines = |rows: &Range<usize>| {
        (rows.start / step).saturating_sub(first)..rows.end.div_ceil(step).saturating_sub(first)
    };
    let b = &probs[..lines(rows).len() * vectors * A::WIDTH];
    let gemm = GemmTn { a, stride, b, c: sums, rescale, epilogue };
    match tile_mask.words().filter(|_| !panel.finite()) {
        Some(words) if panel.holds_pairs() => {
            let GemmTn { a, stride, b, c, rescale, .. } = gemm;
            let a = bf16_pairs::as_pairs(a);
            let b = bf16_pairs::as_pairs(b);
            let c = bf16_pairs::as_pairs_mut(c);
            let rescale = rescale.map(bf16_pairs::as_pairs);
            token.run_pair_kernel(
                vectors,
                MaskedPairProducts {
                    a,
                    stride,
                    b,
                    c,
                    rescale,
                    lane_words: words,
                    odd: !rows.start.is_multiple_of(2),
                },
            );
        }
        Some(words) => A::run(token, vectors, MaskedGemmTn { gemm, words }),
        None => match tile_mask.row_ranges(vectors, A::WIDTH) {
            Some(row_ranges) => {
                let row_ranges = row_ranges.map(|rows| lines(&rows));
                A::run_products(
                    token,
                    panel.holds_pairs(),
                    vectors,
                    PartialGemmTn { gemm, row_ranges },
                );
            }
            None => A::run_products(token, panel.holds_pairs(), vectors, gemm),
        },
    }
}

/// C = A·B.
struct GemmNn<'a, A, B> {
    /// As many rows as C, `stride` apart.
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    /// A multiple of [`MAX_REGISTER_ROWS`] rows.
    c: &'a mut [A],
    /// One row: receives the maximum of each column of C.
    tile_max: Option<&'a mut [A]>,
    epilogue: &'a mut B,
}

impl<A: Real, B: Epilogue> Kernel<A> for GemmNn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let mut top = [V::splat(-A::INFINITY); VECTORS];
        // loop 1: register tiles of C
        let rows = self.c.len() / (VECTORS * V::WIDTH);
        each_register_tile!(ROWS, rows, first => self.register_tile::<V, VECTORS>(first, &mut top));
        if let Some(tile_max) = self.tile_max.and_then(V::row_mut::<VECTORS>) {
            unrolled!(v < VECTORS, top[v].store(&mut tile_max[v]));
        }
    }
}

impl<A: Real, B: Epilogue> GemmNn<'_, A, B> {
    /// Computes the rows of C from `first` on, and updates the maximum of each column.
    #[inline(always)]
    fn register_tile<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        first: usize,
        top: &mut [V; VECTORS],
    ) {
        let b = V::strip::<VECTORS>(self.b);
        let Some(c) = V::strip_mut::<VECTORS>(self.c)[first..].first_chunk_mut::<ROWS>() else {
            return;
        };
        let a = &self.a[first * self.stride..];
        let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
        let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
        // loop 2: k, one chain of multiply-adds per element of the register tile
        for (k, b) in b.iter().enumerate() {
            unrolled!(
                r < ROWS,
                v < VECTORS,
                sums[r][v] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r][v])
            );
        }
        // the maximum is taken from registers, so that the softmax need not read the tile twice
        unrolled!(r < ROWS, v < VECTORS, {
            top[v] = sums[r][v].if_larger(top[v]);
            sums[r][v].store(&mut c[r][v]);
        });
        self.epilogue.after_register_tile();
    }
}

/// C = A·B restricted to a range of rows for each vector, one vector at a time: for partial tiles,
/// where whole strips would compute masked pairs.
struct PartialGemmNn<'a, A, B> {
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    c: &'a mut [A],
    /// For each vector, a range of register tiles of [`MAX_REGISTER_ROWS`] rows.
    row_ranges: [Range<usize>; MAX_STRIP_VECTORS],
    epilogue: &'a mut B,
}

impl<A: Real, B: Epilogue> Kernel<A> for PartialGemmNn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let b = V::strip::<VECTORS>(self.b);
        let (c, _) = V::strip_mut::<VECTORS>(self.c).as_chunks_mut::<MAX_REGISTER_ROWS>();
        for (v, blocks) in self.row_ranges.into_iter().enumerate().take(VECTORS) {
            for block in blocks {
                let a = &self.a[block * MAX_REGISTER_ROWS * self.stride..];
                let a: [&[A]; MAX_REGISTER_ROWS] =
                    std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
                let mut sums = [V::splat(A::ZERO); MAX_REGISTER_ROWS];
                for (k, b) in b.iter().enumerate() {
                    unrolled!(
                        r < MAX_REGISTER_ROWS,
                        sums[r] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r])
                    );
                }
                unrolled!(r < MAX_REGISTER_ROWS, sums[r].store(&mut c[block][r][v]));
                self.epilogue.after_register_tile();
            }
        }
    }
}

/// C = C·rescale + Aᵀ·B.
struct GemmTn<'a, A, B> {
    /// As many rows as B, `stride` apart, each at least as long as C has rows.
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    /// A multiple of [`MAX_REGISTER_ROWS`] rows.
    c: &'a mut [A],
    /// One row; `None` means 1.
    rescale: Option<&'a [A]>,
    epilogue: &'a mut B,
}

impl<A: Real, B: Epilogue> Kernel<A> for GemmTn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        // loop 1: register tiles of C
        let rows = self.c.len() / (VECTORS * V::WIDTH);
        each_register_tile!(ROWS, rows, first => self.register_tile::<V, VECTORS>(first));
    }
}

impl<A: Real, B: Epilogue> GemmTn<'_, A, B> {
    /// Computes the rows of C from `first` on.
    #[inline(always)]
    fn register_tile<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        first: usize,
    ) {
        let b = V::strip::<VECTORS>(self.b);
        let rescale = self.rescale.and_then(V::row::<VECTORS>);
        let Some(c) = V::strip_mut::<VECTORS>(self.c)[first..].first_chunk_mut::<ROWS>() else {
            return;
        };
        let a = &self.a[first..];
        let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
        // loop 2: k, one chain of multiply-adds per element of the register tile
        for (k, b) in b.iter().enumerate() {
            let Some(a) = a[k * self.stride..].first_chunk::<ROWS>() else { break };
            unrolled!(
                r < ROWS,
                v < VECTORS,
                sums[r][v] = V::splat(a[r]).product(V::load(&b[v]), sums[r][v])
            );
        }
        if let Some(rescale) = rescale {
            unrolled!(
                r < ROWS,
                v < VECTORS,
                V::load(&rescale[v])
                    .multiply_add(V::load(&c[r][v]), sums[r][v])
                    .store(&mut c[r][v])
            );
        } else {
            unrolled!(
                r < ROWS,
                v < VECTORS,
                V::load(&c[r][v]).plus(sums[r][v]).store(&mut c[r][v])
            );
        }
        self.epilogue.after_register_tile();
    }
}

/// C = C·rescale + Aᵀ·B restricted to a range of rows of B for each vector. B is 0 in the other
/// rows, so that the bits equal those of [`GemmTn`].
struct PartialGemmTn<'a, A, B> {
    gemm: GemmTn<'a, A, B>,
    row_ranges: [Range<usize>; MAX_STRIP_VECTORS],
}

impl<A: Real, B: Epilogue> Kernel<A> for PartialGemmTn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let GemmTn { a, stride, b, c, rescale, epilogue } = self.gemm;
        let b = V::strip::<VECTORS>(b);
        let rescale = rescale.and_then(V::row::<VECTORS>);
        let (c, _) = V::strip_mut::<VECTORS>(c).as_chunks_mut::<MAX_REGISTER_ROWS>();
        for (v, rows) in self.row_ranges.into_iter().enumerate().take(VECTORS) {
            let factor = rescale.map(|rescale| V::load(&rescale[v]));
            for (block, c) in c.iter_mut().enumerate() {
                let mut sums = [V::splat(A::ZERO); MAX_REGISTER_ROWS];
                for (k, b) in rows.clone().zip(&b[rows.clone()]) {
                    let Some(a) = a[k * stride + block * MAX_REGISTER_ROWS..]
                        .first_chunk::<MAX_REGISTER_ROWS>()
                    else {
                        break;
                    };
                    unrolled!(
                        r < MAX_REGISTER_ROWS,
                        sums[r] = V::splat(a[r]).product(V::load(&b[v]), sums[r])
                    );
                }
                if let Some(factor) = factor {
                    unrolled!(
                        r < MAX_REGISTER_ROWS,
                        factor.multiply_add(V::load(&c[r][v]), sums[r]).store(&mut c[r][v])
                    );
                } else {
                    unrolled!(
                        r < MAX_REGISTER_ROWS,
                        V::load(&c[r][v]).plus(sums[r]).store(&mut c[r][v])
                    );
                }
                epilogue.after_register_tile();
            }
        }
    }
}

/// C = C·rescale + Aᵀ·B with masked pairs skipped instead of multiplied by 0: for panels that are
/// not finite, where 0·NaN would leak. For finite A the bits equal those of [`GemmTn`].
struct MaskedGemmTn<'a, A, B> {
    gemm: GemmTn<'a, A, B>,
    /// Visible lanes of each row of B.
    words: &'a [u64],
}

impl<A: Real, B> ArrayKernel for MaskedGemmTn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let GemmTn { a, stride, b, c, rescale, .. } = self.gemm;
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
