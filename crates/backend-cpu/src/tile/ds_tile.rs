//! dS of one tile of 64 queries × 64 keys, and its contribution to dq: dQ += dS·K.
//!
//! ```text
//! for each strip of keys:  dS[queries][lanes of the strip]  →  columns of the tile
//! for each register tile:  sums[r][v] = Σ_k dS[r][k]·K[k][v]      dQ[r][v] += sums[r][v]
//! ```
//! Scores are computed with keys in lanes, while dq sums over keys. The strips of a tile are
//! therefore stored side by side, so that one chain of multiply-adds sums over all 64 keys of a row
//! of queries.
//!
//! Gradients of a tile's scores.
//!
//! ```text
//! e = e^{s − max}     p = e·(1/sum)
//! normalised:    ds = p·(keep·dp − delta)                       prob = keep·p
//! unnormalised:  ds = e·keep·dp − p·delta − [s = max]·share     prob = keep·e
//! ```
//! Masked pairs give 0, also if their operands are NaN. `prob` multiplies dO in dV.
//!
//! # Source
//! Dao et al. 2022, algorithm 4; the unnormalised form differentiates out = Σ e^{s − max}·v, with
//! the gradient of the maximum split evenly among ties.

use std::ops::Range;

use annulus_core::{Result, Spec};

use crate::{
    simd::{
        amx::{MAX_TILE_LANES, TileProduct},
        dispatch::{IsaToken, MAX_REGISTER_ROWS, Real, SimdKernel},
        tile_unit::{TILE_SIZE, TileUnit},
        vector::{Vector, each_row_mut, unrolled},
    },
    tile::{
        aligned::Aligned,
        bf16_pairs::{LOW, MaskedPairRow, as_pairs, as_pairs_mut, narrow_rows},
        gemm::each_register_tile,
        geometry::{Geometry, TileCoord},
        operands::Previous,
        pack::PanelView,
        terms::{Products, ROW_PAIRS, SplitRows},
        tile_mask::{TILE, TileMask},
        tile_products::{finite_pairs, halves},
    },
};

/// dS of 64 queries × 64 keys, assembled from strips of keys.
#[derive(Debug)]
pub(crate) struct DsTile<A> {
    elements: Aligned<A>,
    /// Terms of the elements as operand of products on tiles ([`crate::tile::terms`]), and the
    /// factor of each row; else empty.
    terms: Aligned<A>,
    factors: Aligned<A>,
    /// Elements of a row: 64, or 32 pairs of bf16.
    stride: usize,
    /// Visible keys of each query.
    lane_words: [u64; TILE],
    /// Lanes of the strips that were inserted.
    inserted: u64,
}

impl<A: Real> DsTile<A> {
    pub(crate) fn new(geometry: &Geometry, backward: bool) -> Result<Self> {
        let rows = if backward { TILE } else { 0 };
        let terms = geometry.tile_terms.map_or(0, |terms| terms.weights);
        let stride = if terms > 0 { TILE } else { geometry.packed_rows(TILE) };
        Ok(Self {
            elements: Aligned::zeroed(rows * stride)?,
            terms: Aligned::zeroed(rows * terms * ROW_PAIRS)?,
            factors: Aligned::zeroed(if terms > 0 { rows } else { 0 })?,
            stride,
            lane_words: [0; TILE],
            inserted: 0,
        })
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.elements.bytes() + self.terms.bytes() + self.factors.bytes()
    }

    /// Resets the tile to no visible pair. Its elements are unspecified until [`DsTile::complete`]:
    /// zeroing the 16 KiB of a full tile in advance would displace operands from the first-level
    /// cache.
    pub(crate) fn clear(&mut self) {
        self.lane_words.fill(0);
        self.inserted = 0;
        if self.stride != TILE {
            self.elements.fill(A::ZERO);
        }
    }

    /// Zeroes the columns of strips that were not inserted, and splits elements into terms.
    pub(crate) fn complete(&mut self, token: IsaToken) {
        if self.stride != TILE {
            return;
        }
        let mut missing = !self.inserted;
        while missing != 0 {
            let first = missing.trailing_zeros() as usize;
            let count = (missing >> first).trailing_ones() as usize;
            self.zero(0..TILE, first..first + count);
            missing &= !(!0u64 >> (TILE - count) << first);
        }
        if !self.terms.is_empty() {
            self.split(token, TILE);
        }
    }

    /// Splits the elements of the first rows into terms.
    fn split(&mut self, token: IsaToken, rows: usize) {
        let kernel = SplitRows {
            tile: as_pairs(&self.elements[..rows * TILE]),
            terms: self.terms.len() / (TILE * ROW_PAIRS),
            into: as_pairs_mut(&mut self.terms),
            factors: as_pairs_mut(&mut self.factors),
        };
        token.run_pair_kernel(1, kernel);
    }

    /// Replaces the first rows, on tiles, by `rows` with the visible keys `lane_words`. Rows
    /// without a visible key become 0.
    pub(crate) fn replace(&mut self, token: IsaToken, rows: &[A], lane_words: &[u64]) {
        self.lane_words[..lane_words.len()].copy_from_slice(lane_words);
        let rows = rows.chunks_exact(TILE).zip(lane_words);
        for (into, (row, &word)) in self.elements.chunks_exact_mut(TILE).zip(rows) {
            if word == 0 {
                into.fill(A::ZERO);
            } else {
                into.copy_from_slice(row);
            }
        }
        self.split(token, lane_words.len());
    }

    /// Returns the range of elements of a row that holds the visible keys of the rows `rows`.
    /// Around it dS is 0, so that leaving it out changes no bit of a sum.
    fn keys(&self, rows: Range<usize>) -> Range<usize> {
        if self.stride != TILE {
            return 0..self.stride;
        }
        let visible = self.lane_words[rows].iter().fold(0, |visible, word| visible | word);
        let end = TILE - visible.leading_zeros() as usize;
        (visible.trailing_zeros() as usize).min(end)..end
    }

    /// Zeroes elements of some rows, which are not pairs.
    fn zero(&mut self, rows: Range<usize>, lanes: Range<usize>) {
        for row in self.elements[rows.start * TILE..rows.end * TILE].chunks_exact_mut(TILE) {
            row[lanes.clone()].fill(A::ZERO);
        }
    }

    /// Zeroes the lanes `lanes` of rows of pairs: those without a key, which are unspecified and may
    /// be NaN. The end is even.
    fn zero_pairs(&mut self, rows: Range<usize>, lanes: Range<usize>) {
        if lanes.is_empty() {
            return;
        }
        let rows = rows.start * self.stride..rows.end * self.stride;
        for row in self.elements[rows].chunks_exact_mut(self.stride) {
            let row = as_pairs_mut(row);
            if !lanes.start.is_multiple_of(2) {
                let pair = &mut row[lanes.start / 2];
                *pair = f32::from_bits(pair.to_bits() & LOW);
            }
            row[lanes.start.div_ceil(2)..lanes.end / 2].fill(0.0);
        }
    }

    /// Inserts the visible rows of a strip whose first key is the tile's key `lane`, and zeros as
    /// the other rows.
    pub(crate) fn insert_strip(
        &mut self,
        token: IsaToken,
        coord: &TileCoord,
        tile_mask: &TileMask,
        lane: usize,
        tile: &[A],
    ) {
        let rows = tile_mask.rows().clone();
        let strip = !0 >> (TILE - coord.width);
        for (index, into) in self.lane_words[rows.clone()].iter_mut().enumerate() {
            // bits of lanes that the strip lacks are unspecified
            *into |= tile_mask.words().map_or(strip, |words| words[index] & strip) << lane;
        }
        if self.stride == TILE {
            self.inserted |= strip << lane;
            self.zero(0..rows.start, lane..lane + coord.width);
            self.zero(rows.end..TILE, lane..lane + coord.width);
        }
        let from = &tile[coord.span(&rows)];
        let into = &mut self.elements[rows.start * self.stride..rows.end * self.stride];
        if self.stride == TILE {
            A::run_kernel(token, coord.vectors, CopyStrip { from, into, lane });
            if !self.terms.is_empty() {
                self.zero(rows, lane + coord.keys.len()..lane + coord.width);
            }
        } else {
            let to = (self.stride, lane / 2);
            narrow_rows(token, coord.vectors, from, into, to);
            self.zero_pairs(rows, lane + coord.keys.len()..lane + coord.width);
        }
    }
}

/// Operands of dQ += dS·K besides the tile.
pub(crate) struct DqUpdate<'a, A> {
    /// Row of the tile that belongs to the first row of `into`.
    pub(crate) first_row: usize,
    /// Keys, one per row of whole vectors.
    pub(crate) panel: PanelView<'a, A>,
    /// Rows of the panel that are the tile's keys.
    pub(crate) keys: Range<usize>,
    /// Rows of dq: a multiple of [`crate::simd::dispatch::MAX_REGISTER_ROWS`].
    pub(crate) into: &'a mut [A],
    /// Elements of a row of dq: whole vectors.
    pub(crate) width: usize,
}

impl<A: Real> DsTile<A> {
    /// Computes dQ += dS·K, in column ranges of nearly equal width that fit a register tile.
    pub(crate) fn accumulate_dq(&self, token: IsaToken, of: DqUpdate<'_, A>) {
        let DqUpdate { first_row, panel, keys, into, width } = of;
        let vectors = width / A::WIDTH;
        let strips = vectors.div_ceil(token.max_vectors());
        let mut column = 0;
        for strip in 0..strips {
            let vectors = (vectors + strips - 1 - strip) / strips;
            let kernel = DqProducts {
                tile: self,
                first_row,
                panel,
                keys: keys.clone(),
                into: &mut *into,
                width,
                column,
            };
            if let Some(unit) = token.tile_unit().filter(|_| panel.pairs) {
                kernel.run_on_tiles(unit, token, vectors);
            } else if panel.pairs && !panel.finite {
                kernel.run_masked_pairs(token, vectors);
            } else {
                A::run_products(token, panel.pairs, vectors, kernel);
            }
            column += vectors * A::WIDTH;
        }
    }
}

/// Copies a strip into columns `lane ..` of a wider tile.
struct CopyStrip<'a, A> {
    from: &'a [A],
    into: &'a mut [A],
    lane: usize,
}

impl<A: Real> SimdKernel<A> for CopyStrip<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let rows = self.into.chunks_exact_mut(TILE);
        for (from, into) in V::strip::<VECTORS>(self.from).iter().zip(rows) {
            if let Some(into) = V::row_mut::<VECTORS>(&mut into[self.lane..]) {
                *into = *from;
            }
        }
    }
}

/// C\[i\]\[l\] += Σ_k A\[i\]\[k\]·B\[k\]\[l\] for the columns `column ..` of C and B.
struct DqProducts<'a, A> {
    tile: &'a DsTile<A>,
    /// Row of the tile that belongs to the first row of C.
    first_row: usize,
    panel: PanelView<'a, A>,
    /// Rows of the panel.
    keys: Range<usize>,
    /// C: a multiple of [`crate::simd::dispatch::MAX_REGISTER_ROWS`] rows of `width` elements.
    into: &'a mut [A],
    width: usize,
    column: usize,
}

impl<A: Real> SimdKernel<A> for DqProducts<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(mut self) {
        if !self.panel.finite {
            return self.run_masked::<V, VECTORS>();
        }
        let rows = self.into.len() / self.width;
        each_register_tile!(ROWS, rows, first => self.register_tile::<V, VECTORS>(first));
    }
}

impl<A: Real> DqProducts<'_, A> {
    /// Computes the rows of C from `first` on.
    #[inline(always)]
    fn register_tile<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        first: usize,
    ) {
        let Self { tile, panel, width, column, .. } = *self;
        let keys = tile.keys(self.first_row + first..self.first_row + first + ROWS);
        let b = panel.reduction_rows(&self.keys);
        let b = b.get(keys.start * panel.reduction_stride..).unwrap_or_default();
        let c = &mut self.into[first * width..];
        let a = &tile.elements[(self.first_row + first) * tile.stride..];
        let a: [&[A]; ROWS] = std::array::from_fn(|r| &a[r * tile.stride..][keys.clone()]);
        let mut sums = [[V::splat(A::ZERO); VECTORS]; ROWS];
        // the last row of a panel in place may end with its vector
        for (k, b) in b.chunks(panel.reduction_stride).enumerate().take(keys.len()) {
            let Some(b) = V::row::<VECTORS>(b.get(column..).unwrap_or_default()) else { break };
            unrolled!(
                r < ROWS,
                v < VECTORS,
                sums[r][v] = V::splat(a[r][k]).product(V::load(&b[v]), sums[r][v])
            );
        }
        unrolled!(r < ROWS, {
            if let Some(c) = V::row_mut::<VECTORS>(&mut c[r * width + column..]) {
                unrolled!(v < VECTORS, V::load(&c[v]).plus(sums[r][v]).store(&mut c[v]));
            }
        });
    }

    /// Computes the product on tiles.
    fn run_on_tiles(self, unit: TileUnit, token: IsaToken, vectors: usize) {
        let Self { tile, first_row, panel, keys, into, width, column } = self;
        let stride = panel.reduction_stride;
        let terms = tile.terms.len() / (TILE * ROW_PAIRS);
        let lines = as_pairs(panel.along_rows());
        let first_line = keys.start / 2 * stride;
        let copy = (!panel.finite).then(|| finite_pairs(lines));
        let mut products = Products::new(terms, panel.terms, terms - 1);
        let passes = products.passes(|[weight, input]| {
            let plane = input * (lines.len() / panel.terms);
            [weight * ROW_PAIRS, plane + first_line + column]
        });
        let of_keys = [as_pairs(panel.tile_factor(keys.start)).first().copied().unwrap_or(1.0);
            MAX_TILE_LANES];
        let of_rows = &as_pairs(&tile.factors)[first_row..];
        let has_factors = of_rows.iter().chain(&of_keys[..1]).any(|&factor| factor != 1.0);
        let product = TileProduct {
            a: &as_pairs(&tile.terms)[first_row * terms * ROW_PAIRS..],
            a_stride: terms * ROW_PAIRS,
            b: copy.as_deref().unwrap_or(lines),
            b_stride: stride,
            passes,
            rows: into.len() / width,
            c: &mut as_pairs_mut(into)[column..],
            c_stride: width,
            previous: Previous::Add,
            factors: has_factors.then_some([of_rows, &of_keys[..]]),
            chunks: keys.len().div_ceil(2 * TILE_SIZE),
            tiles: vectors,
        };
        unit.run(token, product);
        if panel.finite {
            return;
        }
        // visible queries add the products of the elements that are not finite
        for (key, dim) in
            (0..keys.len()).flat_map(|key| (0..vectors * TILE_SIZE).map(move |dim| (key, dim)))
        {
            let pair = lines[first_line + key / 2 * stride + column + dim];
            let element = halves(pair)[key % 2];
            if element.is_finite() {
                continue;
            }
            for (row, c) in (first_row..).zip(as_pairs_mut(into).chunks_exact_mut(width)) {
                if tile.lane_words[row] >> key & 1 != 0 {
                    c[column + dim] += element * as_pairs(&tile.elements)[row * TILE + key];
                }
            }
        }
    }

    /// Computes the product over bf16 pairs with masked keys skipped, for panels that are not
    /// finite.
    fn run_masked_pairs(self, token: IsaToken, vectors: usize) {
        let Self { tile, first_row, panel, keys, into, width, column } = self;
        let (b, stride) =
            (&as_pairs(panel.reduction_rows(&keys))[column..], panel.reduction_stride);
        for (row, c) in (first_row..).zip(into.chunks_exact_mut(width)) {
            let a = as_pairs(&tile.elements[row * tile.stride..][..tile.stride]);
            let c = &mut as_pairs_mut(c)[column..];
            let visible = tile.lane_words[row];
            token.run_pair_kernel(vectors, MaskedPairRow { a, b, stride, visible, c });
        }
    }

    /// Computes the product with masked keys skipped, for panels that are not finite.
    #[inline(always)]
    fn run_masked<V: Vector<A>, const VECTORS: usize>(self) {
        let Self { tile, first_row, panel, keys, into, width, column } = self;
        for (row, c) in (first_row..).zip(into.chunks_exact_mut(width)) {
            let mut sums = [V::splat(A::ZERO); VECTORS];
            for k in (0..keys.len()).filter(|k| tile.lane_words[row] >> k & 1 != 0) {
                let Some(b) =
                    V::row::<VECTORS>(&panel.rows(keys.start + k..keys.start + k + 1)[column..])
                else {
                    break;
                };
                let a = tile.elements[row * TILE + k];
                unrolled!(v < VECTORS, sums[v] = V::splat(a).multiply_add(V::load(&b[v]), sums[v]));
            }
            if let Some(c) = V::row_mut::<VECTORS>(&mut c[column..]) {
                unrolled!(v < VECTORS, V::load(&c[v]).plus(sums[v]).store(&mut c[v]));
            }
        }
    }
}

/// Replaces scores by dS, and dP by the probabilities that multiply dO.
pub(crate) struct ScoreGradient<'a, A> {
    /// In: s / scale. Out: dS.
    pub(crate) s: &'a mut [A],
    /// Deferred scale: factor from elements of `s` to scores.
    pub(crate) scale: A,
    /// In: dP = ⟨dout, v⟩. Out: the factor of dout in dV.
    pub(crate) dp: &'a mut [A],
    /// Dropout factors of the probabilities.
    pub(crate) keep: Option<&'a [A]>,
    /// True if queries are the rows and not the lanes.
    pub(crate) by_row: bool,
    /// `[max, 1/sum, delta, share]` of the tile's queries ([`Spec::ROW_STATISTICS`]), each a list.
    pub(crate) statistics: [&'a [A]; Spec::ROW_STATISTICS],
    pub(crate) normalize: bool,
    /// Lane bits of each row, if the tile has masked pairs.
    pub(crate) words: Option<&'a [u64]>,
}

impl<A: Real> SimdKernel<A> for ScoreGradient<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        match (self.by_row, self.normalize) {
            (false, true) => self.run_specialized::<V, false, true, VECTORS>(),
            (true, true) => self.run_specialized::<V, true, true, VECTORS>(),
            (false, false) => self.run_specialized::<V, false, false, VECTORS>(),
            (true, false) => self.run_specialized::<V, true, false, VECTORS>(),
        }
    }
}

impl<A: Real> ScoreGradient<'_, A> {
    #[inline(always)]
    fn run_specialized<
        V: Vector<A>,
        const BY_ROW: bool,
        const NORMALIZE: bool,
        const VECTORS: usize,
    >(
        self,
    ) {
        let s = V::strip_mut::<VECTORS>(self.s);
        let dp = V::strip_mut::<VECTORS>(self.dp);
        let keep = self.keep.map(V::strip::<VECTORS>);
        let scale = V::splat(self.scale);
        let zero = V::splat(A::ZERO);
        let lanes = !0u64 >> (u64::BITS as usize - V::WIDTH);
        let [max, inverse_sum, delta, share] = self.statistics;
        for (row, (s, dp)) in each_row_mut::<A, V, _>(s).zip(dp).enumerate() {
            unrolled!(v < VECTORS, 'vector: {
                // a vector without a visible pair: the usual case beside the diagonal
                if let Some(words) = self.words
                    && words[row] >> (v * V::WIDTH) & lanes == 0
                {
                    zero.store(&mut s[v]);
                    zero.store(&mut dp[v]);
                    break 'vector;
                }
                let score = V::load(&s[v]).times(scale);
                let max = query_statistic::<A, V, BY_ROW, VECTORS>(max, row, v);
                let inverse_sum = query_statistic::<A, V, BY_ROW, VECTORS>(inverse_sum, row, v);
                let e = score.minus(max).softmax_exp();
                let p = e.times(inverse_sum);
                let delta = query_statistic::<A, V, BY_ROW, VECTORS>(delta, row, v);
                // keep·dp
                let mut kept = V::load(&dp[v]);
                if let Some(keep) = keep {
                    kept = kept.times(V::load(&keep[row][v]));
                }
                let (mut ds, mut prob);
                if NORMALIZE {
                    ds = p.times(kept.minus(delta));
                    prob = p;
                } else {
                    let share = query_statistic::<A, V, BY_ROW, VECTORS>(share, row, v);
                    prob = e;
                    ds = prob
                        .times(kept)
                        .minus(p.times(delta))
                        .minus(score.if_equal(max, share, zero));
                }
                if let Some(keep) = keep {
                    prob = prob.times(V::load(&keep[row][v]));
                }
                // masked pairs: p and dp may be NaN
                if let Some(words) = self.words {
                    let word = words[row] >> (v * V::WIDTH);
                    ds = ds.select(word, zero);
                    prob = prob.select(word, zero);
                }
                ds.store(&mut s[v]);
                prob.store(&mut dp[v]);
            });
        }
    }
}

/// Loads the statistic of vector `v` of row `row`.
#[inline(always)]
fn query_statistic<A: Real, V: Vector<A>, const BY_ROW: bool, const VECTORS: usize>(
    list: &[A],
    row: usize,
    v: usize,
) -> V {
    if BY_ROW {
        V::splat(list[row])
    } else {
        V::row::<VECTORS>(list).map_or(V::splat(A::ZERO), |list| V::load(&list[v]))
    }
}
