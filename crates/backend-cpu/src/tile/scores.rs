//! Scores of one tile: the epilogue between QKᵀ and the softmax.
//!
//! ```text
//! x = scale · round(q·k)
//! s = cap·tanh(x / cap) + bias   or   cap·tanh((x + bias) / cap)      −∞ for masked pairs
//! ```
//! A tile without soft cap, bias, rounding and masked pairs skips the epilogue: softmax and score
//! gradients read the products and apply the deferred scale themselves.

use std::ops::Range;

use annulus_core::{
    BiasFunction, BiasOrder, DType, DropoutMask, RankShard, Rows, Spec,
    mask::{Key, Query},
};
use ndarray::ArrayView4;

use crate::{
    simd::{
        dispatch::{ArrayKernel, IsaToken, Real, SimdKernel},
        vector::{self, Vector, map, strip, strip_mut, unrolled, zip},
    },
    tile::{
        bias::ListBias,
        bias::load_bias,
        bias_table::{MOST_DIAGONALS, TableTile},
        dropout::{ExpandKeepBits, keep_bits},
        geometry::{QueryKeyPairs, TileCoord},
        tile_mask::{LaneAxis, TILE, TileMask, transpose},
    },
};

/// Parameters of the scores between a range of queries and a range of keys.
pub(crate) struct Scores<'a, A> {
    pub(crate) spec: &'a Spec,
    pub(crate) token: IsaToken,
    pub(crate) queries: &'a Rows,
    pub(crate) keys: &'a Rows,
    /// `[b|1, heads|1, q rows|1, kv rows of the whole sequence|1]`.
    pub(crate) bias: Option<ArrayView4<'a, A>>,
    pub(crate) list_bias: Option<ListBias<'a>>,
}

impl<A: Real> Scores<'_, A> {
    /// True if the QKᵀ tile needs an epilogue (bias, soft cap, rounding, non-positive
    /// scale, unnormalised output). Otherwise the scale is deferred to the softmax.
    pub(crate) fn needs_epilogue(&self) -> bool {
        // a non-positive scale would not keep the order of the products, whose maximum the softmax
        // uses; an unnormalised output compares scores with the maximum, bit for bit
        self.has_bias()
            || self.spec.soft_cap.is_some()
            || self.spec.scale <= 0.0
            || !self.spec.normalize
            || self.rounding().is_some()
    }

    /// Returns the positive factor from elements of a finished tile to scores.
    pub(crate) fn deferred_scale(&self) -> A {
        if self.needs_epilogue() { A::ONE } else { A::from_f64(self.spec.scale) }
    }

    /// True if scores have a bias: a tensor, a function, or that of key lists.
    pub(crate) const fn has_bias(&self) -> bool {
        self.bias.is_some() || self.spec.bias_function.is_some() || self.list_bias.is_some()
    }

    /// True if ∂s/∂x differs from 1.
    pub(crate) const fn has_soft_cap_slope(&self) -> bool {
        self.spec.soft_cap.is_some()
    }

    /// Replaces the products in the visible rows of `tile` by scores / [`Scores::deferred_scale`].
    ///
    /// Forward: masked pairs become −∞. Backward, where `soft_cap_slope` is given: writes ∂s/∂x to
    /// it if [`Scores::has_soft_cap_slope`] (0 for masked pairs); scores of masked pairs are
    /// unspecified, because the kernel of score gradients replaces theirs by 0. `extra` is scratch.
    pub(crate) fn finish(
        &self,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        tile: &mut [A],
        soft_cap_slope: Option<&mut [A]>,
        extra: &mut [A],
    ) {
        let maxima = LaneMaxima { products: &mut [], scores: &mut [] };
        self.finish_with_maxima(coord, tile_mask, tile, soft_cap_slope, extra, maxima);
    }

    /// As [`Scores::finish`]. Updates `maxima.products`, unless it is empty. Returns true if it has
    /// written `maxima.scores`.
    pub(crate) fn finish_with_maxima(
        &self,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        tile: &mut [A],
        mut soft_cap_slope: Option<&mut [A]>,
        extra: &mut [A],
        maxima: LaneMaxima<'_, A>,
    ) -> bool {
        let has_bias = self.has_bias();
        // neither soft cap nor rounding
        let is_linear = !self.has_soft_cap_slope() && self.rounding().is_none();
        let mut line = [A::ZERO; MOST_DIAGONALS];
        let diagonals = match (self.bias, &self.spec.bias_table, &self.spec.bias_function) {
            (Some(bias), Some(table), None) if is_linear && self.list_bias.is_none() => {
                let sides = (self.queries, self.keys);
                let tile = TableTile::new(table, sides, coord, tile_mask.rows());
                tile.fill_diagonals(bias, &mut line)
            }
            _ => None,
        };
        if has_bias && diagonals.is_none() {
            self.fill_bias(coord, tile_mask, extra);
        }
        let span = coord.span(tile_mask.rows());
        if !maxima.products.is_empty() {
            self.update_max_product(coord, tile_mask, &tile[span.clone()], maxima.products);
        }
        if has_bias && is_linear {
            let is_forward = soft_cap_slope.is_none();
            let kernel = LinearEpilogue {
                tile: &mut tile[span.clone()],
                scale: A::from_f64(self.spec.scale),
                bias: match diagonals {
                    Some(of) => BiasRows::Diagonals(&line[..of.rows() - 1 + coord.width]),
                    None => BiasRows::Tile(&extra[span]),
                },
                words: tile_mask.words().filter(|_| is_forward),
                top: &mut *maxima.scores,
            };
            A::run_kernel(self.token, coord.vectors, kernel);
            return !maxima.scores.is_empty();
        }
        if self.needs_epilogue() {
            let epilogue = ScoreEpilogue {
                tile: &mut tile[span.clone()],
                bias: has_bias.then(|| &extra[span.clone()]),
                soft_cap_slope: soft_cap_slope
                    .as_deref_mut()
                    .map(|soft_cap_slope| &mut soft_cap_slope[span.clone()]),
                round: self.rounding(),
                scale: A::from_f64(self.spec.scale),
                cap: self.spec.soft_cap.map(|cap| (A::from_f64(cap), A::from_f64(1.0 / cap))),
                bias_first: self.spec.bias_order == BiasOrder::BeforeSoftCap,
            };
            A::run(self.token, coord.vectors, epilogue);
        }
        if let Some(words) = tile_mask.words() {
            let fill = match soft_cap_slope {
                None => Some((tile, -A::INFINITY)),
                Some(slope) => self.has_soft_cap_slope().then_some((slope, A::ZERO)),
            };
            if let Some((into, value)) = fill {
                let kernel = MaskFill { tile: &mut into[span], words, value };
                A::run_kernel(self.token, coord.vectors, kernel);
            }
        }
        false
    }

    /// True if the largest scale·q·k differs from the largest score.
    pub(crate) fn has_max_product(shard: &RankShard) -> bool {
        let spec = &*shard.spec;
        let has_list_bias = shard.key_lists.as_ref().is_some_and(|lists| lists.bias().is_some());
        let has_bias = spec.bias.is_some() || spec.bias_function.is_some() || has_list_bias;
        spec.statistics && (has_bias || spec.soft_cap.is_some())
    }

    /// Updates the largest scale·q·k of each lane by the visible pairs of a tile of products.
    ///
    /// Rounding and scaling keep the order of the products, or reverse it: they are applied to the
    /// largest alone, or to the smallest.
    fn update_max_product(
        &self,
        coord: &TileCoord,
        tile_mask: &TileMask,
        products: &[A],
        max_product: &mut [A],
    ) {
        let scale = A::from_f64(self.spec.scale);
        let sign = if self.spec.scale < 0.0 { -A::ONE } else { A::ONE };
        let mut largest = [A::ZERO; TILE];
        let largest = &mut largest[..coord.width];
        let words = tile_mask.words();
        A::run_kernel(
            self.token,
            coord.vectors,
            LaneMaximum { tile: products, words, sign, into: &mut *largest },
        );
        for (into, &mut largest) in max_product.iter_mut().zip(largest) {
            if largest == -A::INFINITY {
                continue;
            }
            let product = sign * largest;
            let product = scale * self.rounding().map_or(product, |dtype| product.rounded(dtype));
            if product > *into {
                *into = product;
            }
        }
    }

    /// Writes the dropout factor of each probability, 1/(1 − p) or 0, for the rows `rows`. Returns
    /// false if there is no dropout.
    pub(crate) fn fill_keep(&self, coord: &TileCoord, rows: &Range<usize>, keep: &mut [A]) -> bool {
        let Some(mask) = self.spec.dropout.map(DropoutMask::new) else { return false };
        let mut words = [0; TILE];
        let (head, q_heads) = self.spec.whole_head(coord.head);
        let plane = (coord.batch, head, q_heads);
        let (queries, keys) =
            (&self.queries.rows()[coord.queries.clone()], &self.keys.rows()[coord.keys.clone()]);
        keep_bits(self.token, &mask, plane, queries, keys, &mut words);
        if coord.lane_axis == LaneAxis::Queries {
            transpose(&mut words);
        }
        let expand = ExpandKeepBits {
            tile: &mut keep[coord.span(rows)],
            words: &words[rows.clone()],
            keep_scale: A::from_f64(mask.keep_scale()),
        };
        A::run_kernel(self.token, coord.vectors, expand);
        true
    }

    /// Returns the type to which products are rounded, if it is narrower than the accumulator.
    pub(crate) fn rounding(&self) -> Option<DType> {
        let wanted = self.spec.logits_dtype;
        let have = A::DTYPE;
        (wanted.bytes() < have.bytes()).then_some(wanted)
    }

    /// Writes the bias of the visible rows, and masks out pairs with a bias of −∞.
    pub(crate) fn fill_bias(&self, coord: &TileCoord, tile_mask: &mut TileMask, into: &mut [A]) {
        let rows = tile_mask.rows().clone();
        let pairs = coord.pairs(&rows);
        match (self.bias, &self.spec.bias_table) {
            (Some(bias), Some(table)) => {
                let tile = TableTile::new(table, (self.queries, self.keys), coord, &rows);
                if tile.fill(bias, into) {
                    hide_infinite(coord, tile_mask, pairs.clone(), into);
                }
            }
            (Some(bias), None) => {
                self.fill_bias_tensor(bias, coord, tile_mask, pairs.clone(), into)
            }
            (None, _) => into[coord.span(&rows)].fill(A::ZERO),
        }
        if let Some(function) = &self.spec.bias_function {
            self.add_bias_function(&**function, coord, tile_mask, pairs, into);
        }
        if let Some(list_bias) = &self.list_bias {
            list_bias.add(coord, tile_mask, self.keys, into);
        }
    }

    /// Writes the bias tensor's elements.
    fn fill_bias_tensor(
        &self,
        bias: ArrayView4<'_, A>,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        QueryKeyPairs { queries, keys }: QueryKeyPairs,
        into: &mut [A],
    ) {
        let key_rows = &self.keys.rows()[coord.keys.clone()][keys.clone()];
        if !load_bias(self.token, bias, coord, (keys.start, key_rows), queries.clone(), into) {
            return;
        }
        hide_infinite(coord, tile_mask, QueryKeyPairs { queries, keys }, into);
    }

    /// Adds the bias function to the visible pairs.
    fn add_bias_function(
        &self,
        function: &dyn BiasFunction,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        QueryKeyPairs { queries, keys }: QueryKeyPairs,
        into: &mut [A],
    ) {
        let positions = (self.queries.positions(coord.batch), self.keys.positions(coord.batch));
        for query in queries {
            let q = coord.queries.start + query;
            let at = Query {
                batch: coord.batch,
                head: coord.head,
                row: self.queries.rows()[q],
                position: positions.0[q],
            };
            for key in keys.clone() {
                let (row, lane) = coord.row_and_lane(query, key);
                if !tile_mask.visible(row, lane) {
                    continue;
                }
                let k = coord.keys.start + key;
                let bias = A::from_f64(
                    function.bias(&at, &Key { row: self.keys.rows()[k], position: positions.1[k] }),
                );
                if bias == -A::INFINITY {
                    tile_mask.hide(row, lane);
                }
                into[coord.element(query, key)] += bias;
            }
        }
    }
}

/// Masks out the pairs with a bias of −∞.
fn hide_infinite<A: Real>(
    coord: &TileCoord,
    tile_mask: &mut TileMask,
    QueryKeyPairs { queries, keys }: QueryKeyPairs,
    bias: &[A],
) {
    for query in queries {
        for key in keys.clone().filter(|&key| bias[coord.element(query, key)] == -A::INFINITY) {
            let (row, lane) = coord.row_and_lane(query, key);
            tile_mask.hide(row, lane);
        }
    }
}

/// One number for each lane, of the visible pairs of a tile; empty where it is not wanted.
pub(crate) struct LaneMaxima<'a, A> {
    /// Running maximum of scale·q·k.
    pub(crate) products: &'a mut [A],
    /// Largest score of the tile.
    pub(crate) scores: &'a mut [A],
}

/// Biases of the rows of a tile.
enum BiasRows<'a, A> {
    Tile(&'a [A]),
    /// One for each diagonal: row r, of n rows, has its biases from element n − 1 − r on.
    Diagonals(&'a [A]),
}

/// Scales and biases a tile, masks pairs and takes the maximum of each lane, reading it once: the
/// [`ScoreEpilogue`] of scores without soft cap and rounding.
struct LinearEpilogue<'a, A> {
    tile: &'a mut [A],
    scale: A,
    bias: BiasRows<'a, A>,
    /// Visible pairs, if the others become −∞.
    words: Option<&'a [u64]>,
    /// Out: the maximum of each lane, unless it is empty. NaN is never the maximum.
    top: &'a mut [A],
}

impl<A: Real> SimdKernel<A> for LinearEpilogue<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let infinity = V::splat(-A::INFINITY);
        let scale = V::splat(self.scale);
        let mut top = [infinity; VECTORS];
        let tile = V::strip_mut::<VECTORS>(self.tile);
        let rows = tile.len();
        for (index, row) in vector::each_row_mut::<A, V, _>(tile).enumerate() {
            let bias = match self.bias {
                BiasRows::Tile(bias) => &bias[index * VECTORS * V::WIDTH..],
                BiasRows::Diagonals(line) => &line[rows - 1 - index..],
            };
            let Some(bias) = V::row::<VECTORS>(bias) else { return };
            let word = self.words.map_or(u64::MAX, |words| words[index]);
            unrolled!(v < VECTORS, {
                let score = scale.times(V::load(&row[v])).plus(V::load(&bias[v]));
                let score = score.select(word >> (v * V::WIDTH), infinity);
                top[v] = score.if_larger(top[v]);
                score.store(&mut row[v]);
            });
        }
        if let Some(into) = V::row_mut::<VECTORS>(self.top) {
            unrolled!(v < VECTORS, top[v].store(&mut into[v]));
        }
    }
}

/// Rounds, scales, caps and biases a tile, in the order of the spec.
struct ScoreEpilogue<'a, A> {
    tile: &'a mut [A],
    bias: Option<&'a [A]>,
    soft_cap_slope: Option<&'a mut [A]>,
    /// Rounds to this type before scaling.
    round: Option<DType>,
    scale: A,
    /// cap and 1/cap.
    cap: Option<(A, A)>,
    bias_first: bool,
}

impl<A: Real> ArrayKernel for ScoreEpilogue<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(
        mut self,
    ) {
        // one vector at a time: the loop needs no register tile
        let tile = strip_mut::<A, 1, WIDTH>(self.tile);
        let bias = self.bias.map(strip::<A, 1, WIDTH>);
        let mut soft_cap_slope = self.soft_cap_slope.as_deref_mut().map(strip_mut::<A, 1, WIDTH>);
        for (index, [x]) in vector::opaque_rows(tile).enumerate() {
            if let Some(dtype) = self.round {
                *x = map(*x, |x| x.rounded(dtype));
            }
            *x = map(*x, |x| self.scale * x);
            let bias = bias.and_then(|bias| bias.get(index));
            if let Some([bias]) = bias.filter(|_| self.bias_first) {
                *x = zip(*x, *bias, |x, bias| x + bias);
            }
            if let Some((cap, inverse)) = self.cap {
                let tanh = map(*x, |x| (x * inverse).tanh::<FUSED>());
                *x = map(tanh, |tanh| cap * tanh);
                if let Some([soft_cap_slope]) =
                    soft_cap_slope.as_mut().and_then(|soft_cap_slope| soft_cap_slope.get_mut(index))
                {
                    *soft_cap_slope = map(tanh, |tanh| A::ONE - tanh * tanh);
                }
            }
            if let Some([bias]) = bias.filter(|_| !self.bias_first) {
                *x = zip(*x, *bias, |x, bias| x + bias);
            }
        }
    }
}

/// Writes the largest `sign`·x of the visible pairs of each lane; −∞ without one.
struct LaneMaximum<'a, A> {
    tile: &'a [A],
    /// Visible pairs, if some are masked.
    words: Option<&'a [u64]>,
    sign: A,
    into: &'a mut [A],
}

impl<A: Real> SimdKernel<A> for LaneMaximum<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let infinity = V::splat(-A::INFINITY);
        let sign = V::splat(self.sign);
        let mut largest = [infinity; VECTORS];
        let rows = vector::each_row::<A, V, _>(V::strip::<VECTORS>(self.tile));
        for (index, row) in rows.enumerate() {
            let word = self.words.map_or(u64::MAX, |words| words[index]);
            unrolled!(v < VECTORS, {
                let x = V::load(&row[v]).times(sign).select(word >> (v * V::WIDTH), infinity);
                largest[v] = x.if_larger(largest[v]);
            });
        }
        if let Some(into) = V::row_mut::<VECTORS>(self.into) {
            unrolled!(v < VECTORS, largest[v].store(&mut into[v]));
        }
    }
}

/// Writes `value` to the masked pairs of a tile.
pub(crate) struct MaskFill<'a, A> {
    pub(crate) tile: &'a mut [A],
    pub(crate) value: A,
    pub(crate) words: &'a [u64],
}

impl<A: Real> SimdKernel<A> for MaskFill<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let value = V::splat(self.value);
        let rows = vector::each_row_mut::<A, V, _>(V::strip_mut::<VECTORS>(self.tile));
        for (row, &word) in rows.zip(self.words) {
            unrolled!(v < VECTORS, {
                V::load(&row[v]).select(word >> (v * V::WIDTH), value).store(&mut row[v]);
            });
        }
    }
}
