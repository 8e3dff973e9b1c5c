//! JVP and double backward: state of a plan, and what both kinds of tiles share.
//!
//! A tangent is the derivative along the direction (q̇, k̇, v̇, ḃ, ȧ): the tangents of a JVP, or the
//! cotangents of the gradients in a double backward. Queries lie in lanes in all tiles.
//!
//! ```text
//! Ẋ = scale·(K·Q̇ᵀ + K̇·Qᵀ)       one product over 2·head_dim, of rows [k, k̇] and lanes [q̇; q]
//! Ṡ = ∂s/∂x·Ẋ + Ḃ                or ∂s/∂x·(Ẋ + Ḃ) with the bias before the soft cap
//! ```
//!
//! | file | pass |
//! |---|---|
//! | `jvp.rs` | out, lse and their tangents, block by block |
//! | `gradients.rs` | tangents of dq, dk, dv and dbias, block by block |
//! | `finish.rs` | what is written at the end of either |
//!
//! # Source
//! Derived in `docs/semantics.md`, "Second derivatives".

pub(crate) mod finish;
pub(crate) mod gradients;
pub(crate) mod jvp;

use std::ops::Range;

use annulus_core::{
    BiasOrder, Block, DType, Element, Host, HostView, RankShard, Result, TangentInputs, TileBits,
    Visibility,
};
use ndarray::ArrayView4;

use crate::{
    simd::{
        dispatch::{ArrayKernel, Real},
        element::Float,
        vector::{opaque_rows, strip, strip_mut},
    },
    tile::{
        bias::load_bias,
        gemm::gemm_nn,
        geometry::{Geometry, Strip, TileCoord},
        input::{Acc, TileInput, TileSource, array},
        pack::PanelView,
        scores::{MaskFill, Scores},
        tile_mask::{LaneAxis, TileMask},
    },
    workspace::{
        query_tiles::QueryTileCache,
        state::PassState,
        tangents::{Chunk, TangentState, TangentTiles},
    },
};

/// Prepares the state for a JVP or, with `is_double`, a double backward.
pub(crate) fn begin<A: Real>(
    state: &mut PassState<A>,
    threads: usize,
    is_double: bool,
) -> Result<()> {
    state.query_tiles.begin();
    if state.tangents.as_ref().is_none_or(|made| is_double && !made.is_double) {
        state.tangents = None;
        let made = TangentState::new(&state.shard, &state.geometry, threads, is_double)?;
        state.tangents = Some(Box::new(made));
    }
    let Some(tangents) = &mut state.tangents else { return Ok(()) };
    for Chunk { out, out_tangent, dq, row, .. } in &mut tangents.chunks {
        row.max.fill(-A::INFINITY);
        [out, out_tangent, dq, &mut row.sum, &mut row.mean]
            .into_iter()
            .for_each(|list| list.fill(A::ZERO));
    }
    tangents.dbias.fill(A::ZERO);
    Ok(())
}

/// Returns the range of a strip's elements in a list of vectors of `dim` numbers per query.
fn strip_elements(strip: &Strip, dim: usize) -> Range<usize> {
    let first = strip.rows.start;
    first * dim..(first + strip.width) * dim
}

/// Inputs that all tasks of a pass over one block read.
struct TangentBlock<'a, E: TileInput> {
    geometry: Geometry,
    visibility: Visibility<'a>,
    query_tiles: &'a QueryTileCache,
    scores: Scores<'a, Acc<E>>,
    bias_tangent: Option<ArrayView4<'a, Acc<E>>>,
    q: TileSource<'a, E>,
    q_tangent: TileSource<'a, E>,
    /// Rows [k, k̇] and [v, v̇] of the block.
    keys: TileSource<'a, E>,
    values: TileSource<'a, E>,
}

impl<'a, E: TileInput> TangentBlock<'a, E> {
    fn new<'i: 'a, 'b: 'a>(
        geometry: Geometry,
        shard: &'a RankShard,
        query_tiles: &'a QueryTileCache,
        inputs: &TangentInputs<HostView<'i>>,
        block: &Block<'b, Host>,
    ) -> Result<Self> {
        let spec = &*shard.spec;
        let TangentInputs { primal, tangent, .. } = inputs;
        let queries = &*shard.queries;
        let keys = block.rows;
        let bias = |view| array::<Acc<E>>("bias", view);
        let record = spec.tangent_row_layout();
        let source = |field| TileSource::records(block.buffer.bytes(), keys.len(), &record, field);
        Ok(Self {
            geometry,
            visibility: shard.visibility(queries, keys),
            query_tiles,
            scores: Scores {
                spec,
                token: geometry.token,
                queries,
                keys,
                bias: primal.bias.map(bias).transpose()?,
            },
            bias_tangent: tangent.bias.map(bias).transpose()?,
            q: TileSource::tensor(array("q", primal.q)?),
            q_tangent: TileSource::tensor(array("q", tangent.q)?),
            keys: source(0)?,
            values: source(1)?,
        })
    }

    /// Packs the lanes of q, q̇ and q again of a strip of queries.
    fn pack_queries(
        &self,
        batch: usize,
        head: usize,
        rows: Range<usize>,
        width: usize,
        into: &mut [Acc<E>],
    ) {
        let one = self.geometry.dims.head_dim * width;
        let (q, rest) = into.split_at_mut(one);
        let (q_tangent, again) = rest.split_at_mut(one);
        self.geometry.pack_strip(self.q.plane(batch, head), rows.clone(), width, q);
        self.geometry.pack_strip(self.q_tangent.plane(batch, head), rows, width, q_tangent);
        again.copy_from_slice(q);
    }

    /// Classifies the tile of the 64 queries that contain local query `row` and `keys`. Returns
    /// false if it is empty.
    fn classify(
        &self,
        batch: usize,
        head: usize,
        row: usize,
        keys: &Range<usize>,
        (mask, bits): (&mut TileMask, &mut TileBits),
    ) -> bool {
        let tile = self.query_tiles.tile(batch, head, row);
        mask.classify(LaneAxis::Queries, &self.visibility, tile, keys.clone(), bits)
    }

    /// Computes S in `tiles.s` and Ṡ in `tiles.s_tangent` for the visible rows of a tile: −∞ and 0
    /// for masked pairs. With `slopes` also ∂s/∂x and its tangent, if there is a soft cap.
    fn scores(
        &self,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        panel: PanelView<'_, Acc<E>>,
        q_lanes: &[Acc<E>],
        tiles: &mut TangentTiles<Acc<E>>,
        slopes: bool,
    ) {
        let Self { geometry: Geometry { token, dims, .. }, scores, .. } = self;
        let strip = (*token, coord.vectors);
        let one = dims.head_dim * coord.width;
        let TangentTiles { s, s_tangent, slope, slope_tangent, extra, bias_tangent, .. } = tiles;
        gemm_nn(strip, tile_mask, panel, &q_lanes[..one], s, None, &mut ());
        gemm_nn(strip, tile_mask, panel, &q_lanes[one..3 * one], s_tangent, None, &mut ());
        let has_bias = scores.has_bias();
        if has_bias {
            scores.fill_bias(coord, tile_mask, extra);
        }
        if let Some(bias) = self.bias_tangent {
            let pairs = coord.pairs(tile_mask.rows());
            let rows = &scores.keys.rows()[coord.keys.clone()][pairs.keys.clone()];
            let keys = (pairs.keys.start, rows);
            load_bias(*token, bias, coord, keys, pairs.queries, bias_tangent);
        }
        let span = coord.span(tile_mask.rows());
        let spec = scores.spec;
        let slopes = slopes && scores.has_soft_cap_slope();
        let epilogue = TangentEpilogue {
            s: &mut s[span.clone()],
            s_tangent: &mut s_tangent[span.clone()],
            bias: has_bias.then(|| &extra[span.clone()]),
            bias_tangent: self.bias_tangent.map(|_| &bias_tangent[span.clone()]),
            slopes: slopes.then(|| [&mut slope[span.clone()], &mut slope_tangent[span.clone()]]),
            round: scores.rounding(),
            scale: Acc::<E>::from_f64(spec.scale),
            cap: spec.soft_cap.map(|cap| [cap, 1.0 / cap].map(Acc::<E>::from_f64)),
            bias_first: spec.bias_order == BiasOrder::BeforeSoftCap,
        };
        Acc::<E>::run(*token, coord.vectors, epilogue);
        if let Some(words) = tile_mask.words() {
            for (tile, value) in [(s, -Acc::<E>::INFINITY), (s_tangent, Acc::<E>::ZERO)] {
                let kernel = MaskFill { tile: &mut tile[span.clone()], value, words };
                Acc::<E>::run_kernel(*token, coord.vectors, kernel);
            }
        }
    }
}

/// Turns products into scores and their tangents; see `tile/scores.rs`.
struct TangentEpilogue<'a, A> {
    s: &'a mut [A],
    s_tangent: &'a mut [A],
    bias: Option<&'a [A]>,
    bias_tangent: Option<&'a [A]>,
    /// ∂s/∂x and its tangent.
    slopes: Option<[&'a mut [A]; 2]>,
    round: Option<DType>,
    scale: A,
    /// cap and 1/cap.
    cap: Option<[A; 2]>,
    bias_first: bool,
}

impl<A: Real> ArrayKernel for TangentEpilogue<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) {
        let Self { s, s_tangent, bias, bias_tangent, slopes, round, scale, cap, bias_first } = self;
        let bias = bias.map(strip::<A, 1, WIDTH>);
        let bias_tangent = bias_tangent.map(strip::<A, 1, WIDTH>);
        let mut slopes = slopes.map(|slopes| slopes.map(strip_mut::<A, 1, WIDTH>));
        let zero = [A::ZERO; WIDTH];
        let rows = opaque_rows(strip_mut::<A, 1, WIDTH>(s));
        for (index, ([s], [t])) in rows.zip(strip_mut::<A, 1, WIDTH>(s_tangent)).enumerate() {
            let of = |bias: Option<&[[[A; WIDTH]; 1]]>| bias.map_or(zero, |bias| bias[index][0]);
            let (added, added_tangent) = (of(bias), of(bias_tangent));
            for lane in 0..WIDTH {
                let product = round.map_or(s[lane], |dtype| s[lane].rounded(dtype));
                s[lane] = scale * product;
                t[lane] = scale * t[lane];
                if bias_first {
                    s[lane] += added[lane];
                    t[lane] += added_tangent[lane];
                }
            }
            if let Some([cap, inverse]) = cap {
                let mut slope = zero;
                let mut slope_tangent = zero;
                for lane in 0..WIDTH {
                    let tanh = (s[lane] * inverse).tanh::<FUSED>();
                    slope[lane] = A::ONE - tanh * tanh;
                    s[lane] = cap * tanh;
                    t[lane] = slope[lane] * t[lane];
                    slope_tangent[lane] = -(tanh + tanh) * t[lane] * inverse;
                }
                if let Some([of_slope, of_tangent]) = &mut slopes {
                    of_slope[index][0] = slope;
                    of_tangent[index][0] = slope_tangent;
                }
            }
            if !bias_first {
                for lane in 0..WIDTH {
                    s[lane] += added[lane];
                    t[lane] += added_tangent[lane];
                }
            }
        }
    }
}

/// Returns the coordinates of the tile of a strip of `chunk` and `keys`.
fn coord<A>(chunk: &Chunk<A>, strip: &Strip, keys: &Range<usize>) -> TileCoord {
    TileCoord {
        batch: chunk.batch,
        head: chunk.head,
        queries: strip.rows_from(chunk.rows.start),
        keys: keys.clone(),
        lane_axis: LaneAxis::Queries,
        strip: 0,
        vectors: strip.vectors,
        width: strip.width,
    }
}
