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
    Visibility, memory,
};
use ndarray::ArrayView4;

use crate::{
    backward::begin::begin_list_bias,
    simd::{
        dispatch::{ArrayKernel, Real},
        element::Float,
        vector::{map, opaque_rows, strip, strip_mut, zip},
    },
    tile::{
        bias::{ListBias, load_bias},
        bias_table::TableTile,
        gemm::gemm_nn,
        geometry::{Geometry, Strip, TileCoord},
        input::{Acc, TileInput, TileSource, array},
        operands::{GemmEpilogue, TileProducts},
        pack::PanelView,
        prefetch::PrefetchRows,
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
    list_bias: Option<&[f64]>,
) -> Result<()> {
    if is_double {
        begin_list_bias(state, true)?;
    }
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
    tangents.list_direction.clear();
    if let Some(list_bias) = list_bias {
        let list = &mut tangents.list_direction;
        memory::reserve("the direction of key_list_bias", list, list_bias.len())?;
        list.extend_from_slice(list_bias);
    }
    Ok(())
}

/// Epilogue of products that prefetches what is packed later, a row after each register tile: the
/// rows of a head lie far apart, and packing them would wait for each.
#[derive(Default)]
struct RowsAhead {
    /// What is packed next, and what is packed after it: rows of each of three sources.
    lists: [([PrefetchRows; 3], Range<usize>); 2],
    /// Rows of both lists.
    left: usize,
}

impl RowsAhead {
    fn new(lists: [([PrefetchRows; 3], Range<usize>); 2]) -> Self {
        let left = lists.iter().map(|(_, rows)| rows.len()).sum();
        Self { lists, left }
    }

    /// Prefetches the next row. Not inlined: it would take registers from the register tile.
    #[inline(never)]
    fn issue(&mut self) {
        self.left -= 1;
        let next = self.lists.iter_mut().find_map(|(sources, rows)| Some((sources, rows.next()?)));
        if let Some((sources, row)) = next {
            sources.iter().for_each(|source| source.prefetch(row));
        }
    }
}

impl GemmEpilogue for RowsAhead {
    #[inline(always)]
    fn after_register_tile(&mut self) {
        if self.left > 0 {
            self.issue();
        }
    }
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
    list_tangent: Option<ListBias<'a>>,
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
        list_direction: &'a [f64],
        inputs: &TangentInputs<HostView<'i>>,
        block: &Block<'b, Host>,
    ) -> Result<Self> {
        let spec = &*shard.spec;
        let TangentInputs { primal, tangent, .. } = inputs;
        let queries = &*shard.queries;
        let keys = block.rows;
        let bias = |view| array::<Acc<E>>("bias", view);
        let record = spec.tangent_row_layout();
        let visibility = shard.visibility(queries, keys);
        let list_bias = ListBias::of(visibility.key_lists);
        let source = |field| TileSource::records(block.buffer.bytes(), keys.len(), &record, field);
        Ok(Self {
            geometry,
            visibility,
            query_tiles,
            scores: Scores {
                spec,
                token: geometry.token,
                queries,
                keys,
                bias: primal.bias.map(bias).transpose()?,
                list_bias,
            },
            list_tangent: list_bias
                .filter(|_| !list_direction.is_empty())
                .map(|bias| bias.with(list_direction)),
            bias_tangent: tangent.bias.map(bias).transpose()?,
            q: TileSource::tensor(array("q", primal.q)?),
            q_tangent: TileSource::tensor(array("q", tangent.q)?),
            keys: source(0)?,
            values: source(1)?,
        })
    }

    /// Packs the lanes of q̇ and q of a strip of queries.
    fn pack_queries(
        &self,
        batch: usize,
        head: usize,
        rows: Range<usize>,
        width: usize,
        into: &mut [Acc<E>],
    ) {
        let (q_tangent, q) = into.split_at_mut(self.geometry.dims.head_dim * width);
        self.geometry.pack_strip(self.q.plane(batch, head), rows.clone(), width, q);
        self.geometry.pack_strip(self.q_tangent.plane(batch, head), rows, width, q_tangent);
    }

    /// Returns the rows of q and q̇ of one head.
    fn query_rows(&self, batch: usize, head: usize) -> [PrefetchRows; 2] {
        [self.q, self.q_tangent].map(|source| PrefetchRows::of(source.plane(batch, head)))
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

    /// Computes S in `tiles.s` and Ṡ in `tiles.s_tangent` for the visible rows of a tile, both
    /// divided by [`Scores::deferred_scale`]. Masked pairs are unspecified in Ṡ; in S they are −∞
    /// with `tile_max`, which may receive the maximum of each lane, and else unspecified. Without
    /// `tile_max` also ∂s/∂x and its tangent, if there is a soft cap.
    fn scores(
        &self,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        panel: PanelView<'_, Acc<E>>,
        q_lanes: &[Acc<E>],
        tiles: &mut TangentTiles<Acc<E>>,
        (tile_max, ahead): (Option<&mut [Acc<E>]>, &mut RowsAhead),
    ) -> TileProducts {
        let Self { geometry: Geometry { token, dims, .. }, scores, .. } = self;
        let strip = (*token, coord.vectors);
        let q = &q_lanes[dims.head_dim * coord.width..];
        let TangentTiles { s, s_tangent, .. } = tiles;
        let is_jvp = tile_max.is_some();
        let tile_max = tile_max.filter(|_| !scores.needs_epilogue());
        let products = gemm_nn(strip, tile_mask, panel, q, s, tile_max, ahead);
        gemm_nn(strip, tile_mask, panel, q_lanes, s_tangent, None, ahead);
        if scores.needs_epilogue() {
            self.finish_scores(coord, tile_mask, tiles, !is_jvp);
        }
        let TangentTiles { s, .. } = tiles;
        if let Some(words) = tile_mask.words().filter(|_| is_jvp && !products.masked) {
            let span = coord.span(tile_mask.rows());
            let kernel = MaskFill { tile: &mut s[span], value: -Acc::<E>::INFINITY, words };
            Acc::<E>::run_kernel(*token, coord.vectors, kernel);
        }
        products
    }

    /// Applies scale, rounding, bias and soft cap to the products of a tile.
    fn finish_scores(
        &self,
        coord: &TileCoord,
        tile_mask: &mut TileMask,
        tiles: &mut TangentTiles<Acc<E>>,
        slopes: bool,
    ) {
        let Self { geometry: Geometry { token, .. }, scores, .. } = self;
        let TangentTiles { s, s_tangent, slope, slope_tangent, extra, bias_tangent, .. } = tiles;
        let has_bias = scores.has_bias();
        if has_bias {
            scores.fill_bias(coord, tile_mask, extra);
        }
        if let (Some(bias), Some(table)) = (self.bias_tangent, &scores.spec.bias_table) {
            let sides = (scores.queries, scores.keys);
            TableTile::new(table, sides, coord, tile_mask.rows()).fill(bias, bias_tangent);
        } else if let Some(bias) = self.bias_tangent {
            let pairs = coord.pairs(tile_mask.rows());
            let rows = &scores.keys.rows()[coord.keys.clone()][pairs.keys.clone()];
            let keys = (pairs.keys.start, rows);
            load_bias(*token, bias, coord, keys, pairs.queries, bias_tangent);
        }
        let span = coord.span(tile_mask.rows());
        if let Some(list_tangent) = &self.list_tangent {
            if self.bias_tangent.is_none() {
                bias_tangent[span.clone()].fill(Acc::<E>::ZERO);
            }
            list_tangent.add(coord, tile_mask, scores.keys, bias_tangent);
        }
        let has_tangent = self.bias_tangent.is_some() || self.list_tangent.is_some();
        let spec = scores.spec;
        let slopes = slopes && scores.has_soft_cap_slope();
        let epilogue = TangentEpilogue {
            s: &mut s[span.clone()],
            s_tangent: &mut s_tangent[span.clone()],
            bias: has_bias.then(|| &extra[span.clone()]),
            bias_tangent: has_tangent.then(|| &bias_tangent[span.clone()]),
            slopes: slopes.then(|| [&mut slope[span.clone()], &mut slope_tangent[span.clone()]]),
            round: scores.rounding(),
            scale: Acc::<E>::from_f64(spec.scale),
            cap: spec.soft_cap.map(|cap| [cap, 1.0 / cap].map(Acc::<E>::from_f64)),
            bias_first: spec.bias_order == BiasOrder::BeforeSoftCap,
        };
        Acc::<E>::run(*token, coord.vectors, epilogue);
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
        let rows = opaque_rows(strip_mut::<A, 1, WIDTH>(s));
        // whole vectors in each step, as in `tile/scores.rs`
        for (index, ([s], [t])) in rows.zip(strip_mut::<A, 1, WIDTH>(s_tangent)).enumerate() {
            if let Some(dtype) = round {
                *s = map(*s, |s| s.rounded(dtype));
            }
            *s = map(*s, |s| scale * s);
            *t = map(*t, |t| scale * t);
            let bias = bias.and_then(|bias| bias.get(index));
            let bias_tangent = bias_tangent.and_then(|bias| bias.get(index));
            if bias_first {
                add(s, bias);
                add(t, bias_tangent);
            }
            if let Some([cap, inverse]) = cap {
                let tanh = map(*s, |s| (s * inverse).tanh::<FUSED>());
                let slope = map(tanh, |tanh| A::ONE - tanh * tanh);
                *s = map(tanh, |tanh| cap * tanh);
                *t = zip(*t, slope, |t, slope| slope * t);
                if let Some([of_slope, of_tangent]) = &mut slopes {
                    of_slope[index][0] = slope;
                    of_tangent[index][0] = zip(tanh, *t, |tanh, t| -(tanh + tanh) * t * inverse);
                }
            }
            if !bias_first {
                add(s, bias);
                add(t, bias_tangent);
            }
        }
    }
}

/// Adds a vector, if there is one.
#[inline(always)]
fn add<A: Real, const WIDTH: usize>(into: &mut [A; WIDTH], term: Option<&[[A; WIDTH]; 1]>) {
    if let Some([term]) = term {
        *into = zip(*into, *term, |a, b| a + b);
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
