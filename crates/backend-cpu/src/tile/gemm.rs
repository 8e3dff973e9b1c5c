//! Micro-kernels: the two matrix products of a tile. Every product of attention is one of them.
//!
//! ```text
//! nn:  C[i][l] = Σ_k A[i][k]·B[k][l]
//!      S = K·Qᵀ, dP = V·dOᵀ, and with queries and keys exchanged
//! tn:  C[i][l] = C[i][l]·rescale[l] + Σ_k A[k][i]·B[k][l]      (or C = Σ, or C += Σ)
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
        dispatch::{IsaToken, MAX_REGISTER_ROWS, Real, SimdKernel},
        vector::{Vector, unrolled},
    },
    tile::{
        bf16_pairs::{self, MaskedPairProducts},
        operands::{GemmEpilogue, Previous, TileProducts, Weights},
        pack::PanelView,
        tile_mask::{RowRanges, TILE, TileMask},
        tile_products,
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

/// Computes the visible rows of a tile: tile\[r\] ← panel\[r\]·lanes.
///
/// Rows around them, up to whole register tiles, are unspecified. Elements that
/// [`TileMask::row_ranges`] trims are left unchanged.
///
/// `tile_max` is given if the products are scores up to a positive factor. Then masked pairs become
/// −∞ and the maximum of each lane is written to it, both while the products are in registers (not
/// for masked tiles of bf16 pairs). NaN is never the maximum.
pub(crate) fn gemm_nn<A: Real>(
    (token, vectors): (IsaToken, usize),
    tile_mask: &TileMask,
    panel: PanelView<'_, A>,
    lanes: &[A],
    tile: &mut [A],
    tile_max: Option<&mut [A]>,
    epilogue: &mut impl GemmEpilogue,
) -> TileProducts {
    if let Some(unit) = token.tile_unit().filter(|_| panel.pairs) {
        return tile_products::nn(unit, (token, vectors), tile_mask, panel, lanes, tile, epilogue);
    }
    let width = vectors * A::WIDTH;
    let rows = tile_mask.rows();
    let padded_rows = rows.start / MAX_REGISTER_ROWS * MAX_REGISTER_ROWS
        ..rows.end.next_multiple_of(MAX_REGISTER_ROWS);
    let is_full = tile_mask.words().is_none() && padded_rows == *rows;
    let tile_max = tile_max.filter(|_| is_full || !panel.pairs);
    let max_known = tile_max.is_some();
    let masked = max_known && !is_full;
    let lane_words = if masked { tile_mask.lane_words() } else { [0; TILE] };
    let lane_words = masked.then(|| &lane_words[padded_rows.clone()]);
    let row_ranges = tile_mask.row_ranges();
    let c = &mut tile[padded_rows.start * width..padded_rows.end * width];
    let a = panel.rows(padded_rows.clone());
    let gemm = GemmNn { a, stride: panel.stride, b: lanes, c, lane_words, tile_max, epilogue };
    match &row_ranges {
        Some(row_ranges) => {
            let row_ranges = row_ranges.clone().map(|rows| {
                rows.start.saturating_sub(padded_rows.start) / MAX_REGISTER_ROWS
                    ..rows.end.saturating_sub(padded_rows.start).div_ceil(MAX_REGISTER_ROWS)
            });
            let kernel = PartialGemmNn { gemm, row_ranges };
            A::run_products(token, panel.pairs, vectors, kernel);
        }
        None => A::run_products(token, panel.pairs, vectors, gemm),
    }
    let first = rows.start;
    let row_ranges = row_ranges.map(|row_ranges| {
        row_ranges.map(|rows| rows.start.saturating_sub(first)..rows.end.saturating_sub(first))
    });
    TileProducts { max_known, masked, row_ranges }
}

/// Computes C ← C + A·B for a strip B and as many rows of A, `stride` apart, as C has: a multiple of
/// [`MAX_REGISTER_ROWS`].
pub(crate) fn gemm_rows<A: Real>(
    (token, vectors): (IsaToken, usize),
    a: &[A],
    stride: usize,
    b: &[A],
    c: &mut [A],
) {
    A::run_kernel(token, vectors, GemmRows { a, stride, b, c });
}

/// Accumulates the visible rows of a panel, weighted by `probs`.
///
/// ```text
/// sums ← sums·rescale + Σ_r panel[r]ᵀ·probs[r]      (see [`Previous`])
/// ```
/// Masked pairs contribute nothing, also if the panel holds NaN. `probs` starts at the first
/// visible row or, for bf16 pairs, at the line that holds it; see [`Weights`] for tiles.
pub(crate) fn gemm_tn<A: Real>(
    (token, vectors): (IsaToken, usize),
    tile_mask: &TileMask,
    panel: PanelView<'_, A>,
    probs: Weights<'_, A>,
    sums: &mut [A],
    previous: Previous<'_, A>,
    epilogue: &mut impl GemmEpilogue,
) {
    if let Some(unit) = token.tile_unit().filter(|_| panel.pairs) {
        tile_products::tn(unit, (token, vectors), tile_mask, panel, probs, sums, previous);
        let register_tiles = sums.len() / (vectors * A::WIDTH * MAX_REGISTER_ROWS) * vectors;
        (0..register_tiles).for_each(|_| epilogue.after_register_tile());
        return;
    }
    let rows = tile_mask.rows();
    // rows per line of `probs`
    let step = if panel.pairs { 2 } else { 1 };
    let first = rows.start / step;
    let lines = |rows: &Range<usize>| {
        (rows.start / step).saturating_sub(first)..rows.end.div_ceil(step).saturating_sub(first)
    };
    let b = &probs.elements[..lines(rows).len() * vectors * A::WIDTH];
    let every_lane = [!0; TILE];
    let masked_words = match tile_mask.words() {
        _ if panel.finite => None,
        Some(words) => Some(words),
        // the pair of the first or last row may hold the row before or after it, which is masked
        None if panel.pairs && (rows.start % 2 == 1 || rows.end % 2 == 1) => {
            Some(&every_lane[..rows.len()])
        }
        None => None,
    };
    let mut previous = previous;
    if masked_words.is_some() && matches!(previous, Previous::Overwrite) {
        // a rare case: the kernels that skip masked pairs need no third form
        sums.fill(A::ZERO);
        previous = Previous::Add;
    }
    if let Some(lane_words) = masked_words.filter(|_| panel.pairs) {
        let kernel = MaskedPairProducts {
            a: bf16_pairs::as_pairs(panel.reduction_rows(rows)),
            stride: panel.reduction_stride,
            b: bf16_pairs::as_pairs(b),
            c: bf16_pairs::as_pairs_mut(sums),
            rescale: previous.rescale().map(bf16_pairs::as_pairs),
            lane_words,
            odd: !rows.start.is_multiple_of(2),
        };
        token.run_pair_kernel(vectors, kernel);
        return;
    }
    let (a, stride) = (panel.reduction_rows(rows), panel.reduction_stride);
    let gemm = GemmTn { a, stride, b, c: sums, previous, epilogue };
    match masked_words {
        Some(words) => A::run_kernel(token, vectors, MaskedGemmTn { gemm, words }),
        None => match tile_mask.row_ranges() {
            Some(row_ranges) => {
                let row_ranges = row_ranges.map(|rows| lines(&rows));
                A::run_products(token, panel.pairs, vectors, PartialGemmTn { gemm, row_ranges });
            }
            None => A::run_products(token, panel.pairs, vectors, gemm),
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
    /// Visible lanes of each row of C, if masked elements become −∞.
    lane_words: Option<&'a [u64]>,
    /// One row: receives the maximum of each column of C.
    tile_max: Option<&'a mut [A]>,
    epilogue: &'a mut B,
}

impl<A: Real, B: GemmEpilogue> SimdKernel<A> for GemmNn<'_, A, B> {
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

impl<A: Real, B: GemmEpilogue> GemmNn<'_, A, B> {
    /// Computes `ROWS` rows of C from `row` on, and updates the maximum of each column.
    #[inline(always)]
    fn register_tile<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        row: usize,
        top: &mut [V; VECTORS],
    ) {
        self.vectors::<V, VECTORS, ROWS, VECTORS>(row, 0, top);
    }

    /// As [`GemmNn::register_tile`], of the `COUNT` vectors from `first` on.
    #[inline(always)]
    fn vectors<V: Vector<A>, const VECTORS: usize, const ROWS: usize, const COUNT: usize>(
        &mut self,
        row: usize,
        first: usize,
        top: &mut [V; VECTORS],
    ) {
        let b = V::strip::<VECTORS>(self.b);
        let Some(c) = V::strip_mut::<VECTORS>(self.c)[row..].first_chunk_mut::<ROWS>() else {
            return;
        };
        let a = &self.a[row * self.stride..];
        let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
        let mut sums = [[V::splat(A::ZERO); COUNT]; ROWS];
        // loop 2: k, one chain of multiply-adds per element of the register tile
        for (k, b) in b.iter().enumerate() {
            let Some(b) = b[first..].first_chunk::<COUNT>() else { break };
            unrolled!(
                r < ROWS,
                v < COUNT,
                sums[r][v] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r][v])
            );
        }
        if let Some(words) = self.lane_words.and_then(|words| words[row..].first_chunk::<ROWS>()) {
            let masked = V::splat(-A::INFINITY);
            unrolled!(r < ROWS, v < COUNT, {
                sums[r][v] = sums[r][v].select(words[r] >> ((first + v) * V::WIDTH), masked);
            });
        }
        // the maximum is taken from registers, so that the softmax need not read the tile twice
        let Some(top) = top[first..].first_chunk_mut::<COUNT>() else { return };
        unrolled!(r < ROWS, {
            if let Some(c) = c[r][first..].first_chunk_mut::<COUNT>() {
                unrolled!(v < COUNT, {
                    top[v] = sums[r][v].if_larger(top[v]);
                    sums[r][v].store(&mut c[v]);
                });
            }
        });
        self.epilogue.after_register_tile();
    }
}

/// C = C + A·B.
struct GemmRows<'a, A> {
    a: &'a [A],
    stride: usize,
    b: &'a [A],
    c: &'a mut [A],
}

impl<A: Real> SimdKernel<A> for GemmRows<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let rows = self.c.len() / (VECTORS * V::WIDTH);
        each_register_tile!(ROWS, rows, first => self.register_tile::<V, VECTORS>(first));
    }
}

impl<A: Real> GemmRows<'_, A> {
    /// Computes `ROWS` rows of C from `row` on.
    #[inline(always)]
    fn register_tile<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(&mut self, row: usize) {
        let b = V::strip::<VECTORS>(self.b);
        let Some(c) = V::strip_mut::<VECTORS>(self.c)[row..].first_chunk_mut::<ROWS>() else {
            return;
        };
        let a = &self.a[row * self.stride..];
        let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * self.stride..][..b.len()]);
        let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
        for (k, b) in b.iter().enumerate() {
            unrolled!(
                r < ROWS,
                v < VECTORS,
                sums[r][v] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r][v])
            );
        }
        unrolled!(r < ROWS, v < VECTORS, {
            V::load(&c[r][v]).plus(sums[r][v]).store(&mut c[r][v]);
        });
    }
}

/// C = A·B restricted to a range of rows for each vector: for partial tiles, where whole strips
/// would compute masked pairs.
struct PartialGemmNn<'a, A, B> {
    gemm: GemmNn<'a, A, B>,
    /// For each vector, a range of register tiles of [`MAX_REGISTER_ROWS`] rows.
    row_ranges: RowRanges,
}

impl<A: Real, B: GemmEpilogue> SimdKernel<A> for PartialGemmNn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { mut gemm, row_ranges } = self;
        let mut top = [V::splat(-A::INFINITY); VECTORS];
        let blocks = gemm.c.len() / (MAX_REGISTER_ROWS * VECTORS * V::WIDTH);
        for block in 0..blocks {
            // adjacent vectors share the loads of A: one vector alone would wait for them
            let needs = |&v: &usize| row_ranges[v].contains(&block);
            let Some(first) = (0..VECTORS).find(needs) else { continue };
            let count = (first..VECTORS).rfind(needs).map_or(1, |last| last + 1 - first);
            let row = block * MAX_REGISTER_ROWS;
            // as many rows as registers allow
            match count {
                1 => gemm.vectors::<V, VECTORS, 8, 1>(row, first, &mut top),
                2 => gemm.vectors::<V, VECTORS, 8, 2>(row, first, &mut top),
                3 => (0..2).for_each(|half| {
                    gemm.vectors::<V, VECTORS, 4, 3>(row + 4 * half, first, &mut top);
                }),
                _ => (0..2).for_each(|half| {
                    gemm.vectors::<V, VECTORS, 4, 4>(row + 4 * half, first, &mut top);
                }),
            }
        }
        if let Some(tile_max) = gemm.tile_max.and_then(V::row_mut::<VECTORS>) {
            unrolled!(v < VECTORS, top[v].store(&mut tile_max[v]));
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
    previous: Previous<'a, A>,
    epilogue: &'a mut B,
}

impl<A: Real, B: GemmEpilogue> SimdKernel<A> for GemmTn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        // loop 1: register tiles of C
        let rows = self.c.len() / (VECTORS * V::WIDTH);
        each_register_tile!(ROWS, rows, first => self.register_tile::<V, VECTORS>(first));
    }
}

impl<A: Real, B: GemmEpilogue> GemmTn<'_, A, B> {
    /// Computes the rows of C from `first` on.
    #[inline(always)]
    fn register_tile<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        first: usize,
    ) {
        let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
        let lines = 0..V::strip::<VECTORS>(self.b).len();
        // loop 2: k, one chain of multiply-adds per element of the register tile
        self.sum::<V, VECTORS, 0, 0, VECTORS, VECTORS, ROWS>(first, lines, &mut sums);
        self.update::<V, VECTORS, 0, VECTORS, ROWS>(first, &sums);
    }
}

/// C = C·rescale + Aᵀ·B restricted to a range of rows of B for each vector. B is 0 in the other
/// rows, so that the bits equal those of [`GemmTn`].
///
/// Two vectors at a time where their ranges overlap, so that they share the loads of A: one vector
/// alone would wait for them.
struct PartialGemmTn<'a, A, B> {
    gemm: GemmTn<'a, A, B>,
    row_ranges: RowRanges,
}

impl<A: Real, B: GemmEpilogue> SimdKernel<A> for PartialGemmTn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let Self { mut gemm, row_ranges: [rows0, rows1, rows2, rows3] } = self;
        gemm.two_vectors::<V, VECTORS, 0>(&rows0, &rows1);
        if VECTORS == 3 {
            gemm.one_vector::<V, VECTORS, 2>(&rows2);
        } else if VECTORS > 3 {
            gemm.two_vectors::<V, VECTORS, 2>(&rows2, &rows3);
        }
    }
}

impl<A: Real, B: GemmEpilogue> GemmTn<'_, A, B> {
    /// Computes vector `FIRST` of all rows of C, from the rows `rows` of B.
    #[inline(always)]
    fn one_vector<V: Vector<A>, const VECTORS: usize, const FIRST: usize>(
        &mut self,
        rows: &Range<usize>,
    ) {
        for row in (0..self.c.len() / (VECTORS * V::WIDTH)).step_by(MAX_REGISTER_ROWS) {
            let mut sums = [[V::splat(A::ZERO)]; MAX_REGISTER_ROWS];
            self.sum::<V, VECTORS, FIRST, 0, 1, 1, _>(row, rows.clone(), &mut sums);
            self.update::<V, VECTORS, FIRST, 1, _>(row, &sums);
        }
    }

    /// Computes vectors `FIRST` and `FIRST + 1` of all rows of C, each from its own range of rows
    /// of B.
    #[inline(always)]
    fn two_vectors<V: Vector<A>, const VECTORS: usize, const FIRST: usize>(
        &mut self,
        low: &Range<usize>,
        high: &Range<usize>,
    ) {
        // the rows of both; rows of one alone come before or after them, because a chain ascends
        let both = low.start.max(high.start)..low.end.min(high.end);
        let both =
            if both.is_empty() { low.end.max(high.start)..low.end.max(high.start) } else { both };
        for row in (0..self.c.len() / (VECTORS * V::WIDTH)).step_by(MAX_REGISTER_ROWS) {
            let mut sums = [[V::splat(A::ZERO); 2]; MAX_REGISTER_ROWS];
            self.sum::<V, VECTORS, FIRST, 0, 1, 2, _>(
                row,
                low.start..low.end.min(both.start),
                &mut sums,
            );
            self.sum::<V, VECTORS, FIRST, 1, 1, 2, _>(
                row,
                high.start..high.end.min(both.start),
                &mut sums,
            );
            self.sum::<V, VECTORS, FIRST, 0, 2, 2, _>(row, both.clone(), &mut sums);
            self.sum::<V, VECTORS, FIRST, 0, 1, 2, _>(
                row,
                low.start.max(both.end)..low.end,
                &mut sums,
            );
            self.sum::<V, VECTORS, FIRST, 1, 1, 2, _>(
                row,
                high.start.max(both.end)..high.end,
                &mut sums,
            );
            self.update::<V, VECTORS, FIRST, 2, _>(row, &sums);
        }
    }

    /// Continues the chains of `COUNT` vectors of `ROWS` rows of C, from vector `FIRST + AT` on,
    /// over rows of B.
    #[inline(always)]
    fn sum<
        V: Vector<A>,
        const VECTORS: usize,
        const FIRST: usize,
        const AT: usize,
        const COUNT: usize,
        const WIDTH: usize,
        const ROWS: usize,
    >(
        &self,
        row: usize,
        rows: Range<usize>,
        sums: &mut [[V; WIDTH]; ROWS],
    ) {
        if rows.is_empty() {
            return;
        }
        let a = &self.a[rows.start * self.stride + row..];
        let b = &V::strip::<VECTORS>(self.b)[rows];
        for (k, b) in b.iter().enumerate() {
            let Some(a) = a[k * self.stride..].first_chunk::<ROWS>() else { break };
            unrolled!(
                r < ROWS,
                v < COUNT,
                sums[r][AT + v] =
                    V::splat(a[r]).product(V::load(&b[FIRST + AT + v]), sums[r][AT + v])
            );
        }
    }

    /// Adds sums to `WIDTH` vectors of C from vector `FIRST` on.
    #[inline(always)]
    fn update<
        V: Vector<A>,
        const VECTORS: usize,
        const FIRST: usize,
        const WIDTH: usize,
        const ROWS: usize,
    >(
        &mut self,
        row: usize,
        sums: &[[V; WIDTH]; ROWS],
    ) {
        let rescale = self.previous.rescale().and_then(V::row::<VECTORS>);
        let Some(c) = V::strip_mut::<VECTORS>(self.c)[row..].first_chunk_mut::<ROWS>() else {
            return;
        };
        if let Some(rescale) = rescale {
            unrolled!(
                r < ROWS,
                v < WIDTH,
                V::load(&rescale[FIRST + v])
                    .multiply_add(V::load(&c[r][FIRST + v]), sums[r][v])
                    .store(&mut c[r][FIRST + v])
            );
        } else if matches!(self.previous, Previous::Overwrite) {
            // 0 + sums: a sum of −0 becomes 0, as where C holds 0
            let zero = V::splat(A::ZERO);
            unrolled!(r < ROWS, v < WIDTH, zero.plus(sums[r][v]).store(&mut c[r][FIRST + v]));
        } else {
            unrolled!(
                r < ROWS,
                v < WIDTH,
                V::load(&c[r][FIRST + v]).plus(sums[r][v]).store(&mut c[r][FIRST + v])
            );
        }
        self.epilogue.after_register_tile();
    }
}

/// C = C·rescale + Aᵀ·B with masked pairs skipped instead of multiplied by 0: for panels that are
/// not finite, where 0·NaN would leak. For finite A the bits equal those of [`GemmTn`].
struct MaskedGemmTn<'a, A, B> {
    gemm: GemmTn<'a, A, B>,
    /// Visible lanes of each row of B.
    words: &'a [u64],
}

impl<A: Real, B> SimdKernel<A> for MaskedGemmTn<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let GemmTn { a, stride, b, c, previous, .. } = self.gemm;
        let b = V::strip::<VECTORS>(b);
        let rescale = previous.rescale().and_then(V::row::<VECTORS>);
        for (i, c) in V::strip_mut::<VECTORS>(c).iter_mut().enumerate() {
            unrolled!(v < VECTORS, {
                let mut sum = V::splat(A::ZERO);
                for (k, (b, &word)) in b.iter().zip(self.words).enumerate() {
                    let more = V::splat(a[k * stride + i]).multiply_add(V::load(&b[v]), sum);
                    sum = more.select(word >> (v * V::WIDTH), sum);
                }
                let old = V::load(&c[v]);
                match rescale {
                    Some(rescale) => V::load(&rescale[v]).multiply_add(old, sum).store(&mut c[v]),
                    None => old.plus(sum).store(&mut c[v]),
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::{
        simd::{element::Float, isa::Isa},
        tile::{
            input::TileSource,
            pack::{Panel, PanelFormat},
        },
    };

    /// Elements of a vector: more than a register tile's rows, and no power of two.
    const DIM: usize = 40;

    /// Numbers of both signs without a pattern.
    fn number(i: usize) -> f32 {
        let hash = (i as u32).wrapping_mul(0x9e37_79b9) >> 8;
        hash as f32 / (1 << 23) as f32 - 1.0
    }

    /// Computes a step of a chain as the instruction set does.
    fn step(isa: Isa, a: f32, b: f32, sum: f32) -> f32 {
        if isa == Isa::Portable { a * b + sum } else { a.mul_add(b, sum) }
    }

    /// Masks by the visibility of (row, lane).
    fn masks() -> Vec<(&'static str, [u64; TILE])> {
        let of = |visible: fn(usize, usize) -> bool| {
            std::array::from_fn(|row| {
                (0..TILE).fold(0, |word, lane| word | u64::from(visible(row, lane)) << lane)
            })
        };
        vec![
            ("full", of(|_, _| true)),
            ("causal", of(|row, lane| row <= lane)),
            ("window", of(|row, lane| row > lane)),
            ("rows of a document", of(|row, _| (13..50).contains(&row))),
            ("two documents", of(|row, lane| (row < 19) == (lane < 30))),
            ("disjoint vectors", of(|row, lane| row / 16 == 3 - lane / 16)),
            ("gaps", of(|row, lane| row % 3 == 0 && lane / 16 != 1)),
            ("one pair", of(|row, lane| row == 41 && lane == 17)),
        ]
    }

    #[test]
    fn partial_tiles_have_the_bits_of_chains_over_visible_pairs() {
        let rows = Array4::from_shape_fn((1, TILE, 1, DIM), |(_, row, _, i)| number(row * DIM + i));
        for isa in Isa::ALL.into_iter().filter(|&isa| isa.is_available()) {
            let Ok(token) = IsaToken::new(isa) else { continue };
            for vectors in 1..=token.max_vectors() {
                for (name, words) in masks() {
                    check(isa, token, vectors, &rows, (name, words));
                }
            }
        }
    }

    fn check(
        isa: Isa,
        token: IsaToken,
        vectors: usize,
        rows: &Array4<f32>,
        (name, words): (&str, [u64; TILE]),
    ) {
        let width = vectors * f32::WIDTH;
        let of_strip = !0u64 >> (TILE - width);
        let Some(tile_mask) =
            TileMask::of_words(words.map(|word| word & of_strip), width, f32::WIDTH)
        else {
            return;
        };
        let mut panel = Panel::<f32>::new(DIM, PanelFormat::Widened).unwrap();
        panel.fill(token, &TileSource::tensor(rows.view()), 0, 0, 0..TILE);
        let lanes: Vec<f32> = (0..DIM * width).map(|i| number(7000 + i)).collect();
        let mut tile = vec![f32::NAN; TILE * width];
        let mut tile_max = vec![f32::NAN; width];
        let products = gemm_nn(
            (token, vectors),
            &tile_mask,
            panel.view(),
            &lanes,
            &mut tile,
            Some(&mut tile_max),
            &mut (),
        );
        assert!(products.max_known, "{name}");
        for lane in 0..width {
            let mut max = f32::NEG_INFINITY;
            for row in tile_mask.rows().clone() {
                let visible = tile_mask.visible(row, lane);
                let product = (0..DIM).fold(0.0, |sum, i| {
                    step(isa, rows[[0, row, 0, i]], lanes[i * width + lane], sum)
                });
                let got = tile[row * width + lane];
                let computed = products.row_ranges.as_ref().is_none_or(|ranges| {
                    ranges[lane / f32::WIDTH].contains(&(row - tile_mask.rows().start))
                });
                assert!(computed || !visible);
                if visible {
                    max = max.max(product);
                    assert_eq!(got.to_bits(), product.to_bits(), "{isa} {name} {row} {lane}");
                } else if computed {
                    assert_eq!(got, f32::NEG_INFINITY, "{isa} {name} {row} {lane}");
                }
            }
            assert_eq!(tile_max[lane], max, "{isa} {name} {lane}");
        }
        let probs: Vec<f32> = (0..TILE * width)
            .map(|i| if tile_mask.visible(i / width, i % width) { number(90_000 + i) } else { 0.0 })
            .collect();
        let before: Vec<f32> = (0..DIM * width).map(|i| number(300 + i)).collect();
        let rescale: Vec<f32> = (0..width).map(|i| number(50 + i)).collect();
        for previous in [Previous::Overwrite, Previous::Add, Previous::Rescale(&rescale)] {
            let mut sums = before.clone();
            if matches!(previous, Previous::Overwrite) {
                sums.fill(f32::NAN);
            }
            let visible = &probs[tile_mask.rows().start * width..tile_mask.rows().end * width];
            gemm_tn(
                (token, vectors),
                &tile_mask,
                panel.view(),
                visible.into(),
                &mut sums,
                previous,
                &mut (),
            );
            for (i, &got) in sums.iter().enumerate() {
                let (dim, lane) = (i / width, i % width);
                let sum = tile_mask.rows().clone().fold(0.0, |sum, row| {
                    step(isa, rows[[0, row, 0, dim]], probs[row * width + lane], sum)
                });
                let wanted = match previous {
                    Previous::Overwrite => sum,
                    Previous::Add => before[i] + sum,
                    Previous::Rescale(rescale) => step(isa, rescale[lane], before[i], sum),
                };
                assert_eq!(got.to_bits(), wanted.to_bits(), "{isa} {name} {previous:?} {i}");
            }
        }
    }
}
