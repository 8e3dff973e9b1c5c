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
//! Memory beyond O(tile) per thread: for each local query and query head 2·value_dim + 5 numbers;
//! of a double backward head_dim more, and with a bias one number per element of dbias.
//!
//! # Source
//! Derived in `docs/semantics.md`, "Second derivatives".

pub(crate) mod finish;
pub(crate) mod gradients;
pub(crate) mod jvp;

use std::ops::Range;

use annulus_core::{
    BiasOrder, Block, DType, Element, Host, HostView, QueryTile, RankShard, Result, TangentInputs,
    TileBits, Visibility, memory,
};
use ndarray::ArrayView4;

use crate::{
    simd::{
        dispatch::{ArrayKernel, Real},
        element::Float,
        vector::{opaque_rows, strip, strip_mut},
    },
    tile::{
        aligned::{Aligned, list_bytes},
        bias::load_bias,
        gemm::gemm_nn,
        geometry::{Geometry, Strip, TileCoord},
        input::{Acc, TileInput, TileSource, array},
        pack::{Panel, PanelFormat, PanelView, padded},
        scores::{MaskFill, Scores},
        tile_mask::{LaneAxis, TILE, TileMask},
    },
    workspace::{query_tiles::QueryTileCache, state::PassState},
};

/// Queries of a [`Chunk`]: as many share a packed tile of keys. It does not depend on the number
/// of threads, and neither do the bits.
const CHUNK_ROWS: usize = 4 * TILE;

/// Tiles of keys in a block of a double backward, which share packed queries: their panels and
/// gradients take 4·64·(3·head_dim + 3·value_dim) numbers, 0.4 MiB of f32 with dims of 64.
const KEY_TILES: usize = 4;

/// State of the second derivatives of one plan.
#[derive(Debug)]
pub(crate) struct TangentState<A> {
    geometry: Geometry,
    /// True if there is memory for a double backward.
    is_double: bool,
    /// By owner, then batch row, head and rows. Chunks of one owner add to the same gradients.
    chunks: Vec<Chunk<A>>,
    scratch: Vec<TangentScratch<A>>,
    /// Tangent of dbias, owner by owner: `[b|1, heads|1, local q_len|1, kv_len|1]`.
    dbias: Aligned<A>,
    /// Elements of `dbias` of one owner.
    dbias_len: usize,
}

/// Some queries of one batch row and head.
#[derive(Debug)]
struct Chunk<A> {
    batch: usize,
    head: usize,
    owner: usize,
    rows: Range<usize>,
    /// Σ P·keep·v in strips of queries; at the end out.
    out: Aligned<A>,
    /// Σ P·keep·(ṡ·v + v̇) in strips; at the end the tangent of out.
    out_tangent: Aligned<A>,
    /// Tangent of dq / scale in strips.
    dq: Aligned<A>,
    row: RowStatistics<A>,
}

/// One number of each kind for each query of a chunk. Lanes without a query have probability 0.
#[derive(Debug)]
struct RowStatistics<A> {
    /// Running maximum; at the end +∞ for a row without visible keys and sinks.
    max: Aligned<A>,
    /// Running sum ℓ; at the end 1/ℓ.
    sum: Aligned<A>,
    /// Σ P·ṡ; at the end the tangent of lse.
    mean: Aligned<A>,
    /// ⟨dout, out⟩ − dlse.
    delta: Aligned<A>,
    /// ⟨dout, tangent of out⟩.
    delta_tangent: Aligned<A>,
}

/// Scratch of one thread.
#[derive(Debug)]
struct TangentScratch<A> {
    /// Rows [k, k̇] and [v, v̇] of some tiles of keys.
    keys: Panel<A>,
    values: Panel<A>,
    /// For each strip of a chunk the lanes of q, q̇ and q again.
    q_lanes: Aligned<A>,
    dout_lanes: Aligned<A>,
    tiles: TangentTiles<A>,
    rescale: Aligned<A>,
    gradients: gradients::GradientScratch<A>,
    chunk_tile: QueryTile,
    bits: TileBits,
    whole_mask: TileMask,
    tile_mask: TileMask,
}

/// Tiles of [`TILE`] keys × one strip of queries.
#[derive(Debug)]
struct TangentTiles<A> {
    s: Aligned<A>,
    s_tangent: Aligned<A>,
    dp: Aligned<A>,
    dp_tangent: Aligned<A>,
    slope: Aligned<A>,
    slope_tangent: Aligned<A>,
    /// Bias, then dropout factors.
    extra: Aligned<A>,
    bias_tangent: Aligned<A>,
}

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

impl<A: Real> TangentState<A> {
    fn new(
        shard: &RankShard,
        geometry: &Geometry,
        threads: usize,
        is_double: bool,
    ) -> Result<Self> {
        let spec = &*shard.spec;
        let geometry = geometry.with_tile_aligned_strips().without_pairs();
        let dims = spec.dims;
        let len = shard.queries.len();
        let [b, h, q, k] = spec.bias.unwrap_or_default();
        let group = dims.group();
        // planes whose scores share a bias have one owner
        let batch_is_shared = spec.bias.is_some() && b == 1;
        let heads_are_shared = spec.bias.is_some() && h == 1;
        let mut chunks = Vec::new();
        for batch in 0..dims.batch {
            for head in 0..dims.q_heads {
                let of_batch = if batch_is_shared { 0 } else { batch };
                let of_head = if heads_are_shared { 0 } else { head / group };
                let owner = of_batch * if heads_are_shared { 1 } else { dims.kv_heads } + of_head;
                for first in (0..len).step_by(CHUNK_ROWS) {
                    let rows = first..len.min(first + CHUNK_ROWS);
                    chunks.push(Chunk::new(&geometry, [batch, head, owner], rows, is_double)?);
                }
            }
        }
        chunks.sort_by_key(|chunk| (chunk.owner, chunk.batch, chunk.head, chunk.rows.start));
        let q_rows = if q == 1 { 1 } else { len };
        let dbias_len = if is_double && spec.bias.is_some() {
            if heads_are_shared { q_rows * k } else { group * q_rows * k }
        } else {
            0
        };
        let owners = chunks.last().map_or(0, |last| last.owner + 1);
        let mut scratch = memory::list("the workspace", threads)?;
        for _ in 0..threads {
            scratch.push(TangentScratch::new(&geometry, is_double)?);
        }
        let dbias = Aligned::zeroed(owners * dbias_len)?;
        Ok(Self { geometry, is_double, chunks, scratch, dbias, dbias_len })
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        list_bytes(&self.chunks)
            + self.chunks.iter().map(Chunk::bytes).sum::<usize>()
            + self.scratch.iter().map(TangentScratch::bytes).sum::<usize>()
            + self.dbias.bytes()
    }
}

impl<A: Real> Chunk<A> {
    fn new(
        geometry: &Geometry,
        [batch, head, owner]: [usize; 3],
        rows: Range<usize>,
        is_double: bool,
    ) -> Result<Self> {
        let lanes = geometry.lanes(rows.len());
        let of_dq = if is_double { lanes * geometry.head_rows() } else { 0 };
        let list = || Aligned::zeroed(lanes);
        Ok(Self {
            batch,
            head,
            owner,
            rows,
            out: Aligned::zeroed(lanes * geometry.value_rows())?,
            out_tangent: Aligned::zeroed(lanes * geometry.value_rows())?,
            dq: Aligned::zeroed(of_dq)?,
            row: RowStatistics {
                max: list()?,
                sum: list()?,
                mean: list()?,
                delta: list()?,
                delta_tangent: list()?,
            },
        })
    }

    fn bytes(&self) -> usize {
        let RowStatistics { max, sum, mean, delta, delta_tangent } = &self.row;
        let lists = [&self.out, &self.out_tangent, &self.dq, max, sum, mean, delta, delta_tangent];
        lists.map(Aligned::bytes).iter().sum()
    }
}

/// Returns the range of a strip's elements in a list of vectors of `dim` numbers per query.
fn strip_elements(strip: &Strip, dim: usize) -> Range<usize> {
    let first = strip.rows.start;
    first * dim..(first + strip.width) * dim
}

impl<A: Real> TangentScratch<A> {
    fn new(geometry: &Geometry, is_double: bool) -> Result<Self> {
        let (head, value) = (geometry.dims.head_dim, geometry.dims.value_dim);
        let tiles = if is_double { KEY_TILES } else { 1 };
        // kernels read whole register tiles of the second half of a vector
        let panel =
            |dim| Panel::with_stride(tiles * TILE, 2 * dim, 2 * padded(dim), PanelFormat::Widened);
        let lanes = geometry.strip_lanes();
        let tile = |wanted: bool| Aligned::zeroed(if wanted { TILE * lanes } else { 0 });
        Ok(Self {
            keys: panel(head)?,
            values: panel(value)?,
            q_lanes: Aligned::zeroed(3 * head * CHUNK_ROWS)?,
            dout_lanes: Aligned::zeroed(if is_double { value * lanes } else { 0 })?,
            tiles: TangentTiles {
                s: tile(true)?,
                s_tangent: tile(true)?,
                dp: tile(is_double)?,
                dp_tangent: tile(is_double)?,
                slope: tile(is_double)?,
                slope_tangent: tile(is_double)?,
                extra: tile(true)?,
                bias_tangent: tile(true)?,
            },
            rescale: Aligned::zeroed(lanes)?,
            gradients: gradients::GradientScratch::new(geometry, is_double)?,
            chunk_tile: QueryTile::default(),
            bits: TileBits::default(),
            whole_mask: TileMask::default(),
            tile_mask: TileMask::default(),
        })
    }

    fn bytes(&self) -> usize {
        let TangentTiles { s, s_tangent, dp, dp_tangent, slope, slope_tangent, extra, .. } =
            &self.tiles;
        let tiles = [s, s_tangent, dp, dp_tangent, slope, slope_tangent, extra];
        let lists = [&self.q_lanes, &self.dout_lanes, &self.rescale, &self.tiles.bias_tangent];
        tiles.into_iter().chain(lists).map(Aligned::bytes).sum::<usize>()
            + self.keys.bytes()
            + self.values.bytes()
            + self.gradients.bytes()
            + self.chunk_tile.bytes()
    }
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
