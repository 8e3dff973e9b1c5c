//! State and scratch of the JVP and the double backward.
//!
//! Memory beyond O(tile) per thread: for each local query and query head 2·value_dim + 5 numbers;
//! of a double backward head_dim more, and with a bias one number per element of dbias.

use std::ops::Range;

use annulus_core::{Error, QueryTile, RankShard, Result, TileBits, memory};

use crate::{
    simd::dispatch::Real,
    tile::{
        aligned::{Aligned, list_bytes},
        geometry::Geometry,
        pack::{Panel, PanelFormat, padded},
        tile_mask::{TILE, TileMask},
    },
};

/// Queries of a [`Chunk`]: as many share a packed tile of keys. It does not depend on the number
/// of threads, and neither do the bits.
const CHUNK_ROWS: usize = 4 * TILE;

/// Tiles of keys in a block of a double backward, which share packed queries: their panels and
/// gradients take 4·64·(3·head_dim + 3·value_dim) numbers, 0.4 MiB of f32 with dims of 64.
pub(crate) const KEY_TILES: usize = 4;

/// State of the second derivatives of one plan.
#[derive(Debug)]
pub(crate) struct TangentState<A> {
    pub(crate) geometry: Geometry,
    /// True if there is memory for a double backward.
    pub(crate) is_double: bool,
    /// By owner, then batch row, head and rows. Chunks of one owner add to the same gradients.
    pub(crate) chunks: Vec<Chunk<A>>,
    pub(crate) scratch: Vec<TangentScratch<A>>,
    /// Tangent of dbias, owner by owner: `[b|1, heads|1, local q_len|1, kv_len|1]`.
    pub(crate) dbias: Aligned<A>,
    /// Elements of `dbias` of one owner.
    pub(crate) dbias_len: usize,
    /// Direction of the bias of key lists; empty for 0.
    pub(crate) list_direction: Vec<f64>,
}

/// Some queries of one batch row and head.
#[derive(Debug)]
pub(crate) struct Chunk<A> {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) owner: usize,
    pub(crate) rows: Range<usize>,
    /// Σ P·keep·v in strips of queries; at the end out.
    pub(crate) out: Aligned<A>,
    /// Σ P·keep·(ṡ·v + v̇) in strips; at the end the tangent of out.
    pub(crate) out_tangent: Aligned<A>,
    /// Tangent of dq / scale in strips.
    pub(crate) dq: Aligned<A>,
    pub(crate) row: RowStatistics<A>,
}

/// One number of each kind for each query of a chunk. Lanes without a query have probability 0.
#[derive(Debug)]
pub(crate) struct RowStatistics<A> {
    /// Running maximum; at the end +∞ for a row without visible keys and sinks.
    pub(crate) max: Aligned<A>,
    /// Running sum ℓ; at the end 1/ℓ.
    pub(crate) sum: Aligned<A>,
    /// Σ P·ṡ; at the end the tangent of lse.
    pub(crate) mean: Aligned<A>,
    /// ⟨dout, out⟩ − dlse.
    pub(crate) delta: Aligned<A>,
    /// ⟨dout, tangent of out⟩.
    pub(crate) delta_tangent: Aligned<A>,
}

/// Scratch of one thread.
#[derive(Debug)]
pub(crate) struct TangentScratch<A> {
    /// Rows [k, k̇] and [v, v̇] of some tiles of keys.
    pub(crate) keys: Panel<A>,
    pub(crate) values: Panel<A>,
    /// For each strip of a chunk the lanes of q̇ and q.
    pub(crate) q_lanes: Aligned<A>,
    pub(crate) dout_lanes: Aligned<A>,
    pub(crate) tiles: TangentTiles<A>,
    pub(crate) tile_max: Aligned<A>,
    pub(crate) rescale: Aligned<A>,
    pub(crate) gradients: GradientScratch<A>,
    pub(crate) chunk_tile: QueryTile,
    pub(crate) bits: TileBits,
    pub(crate) whole_mask: TileMask,
    pub(crate) tile_mask: TileMask,
}

/// Tiles of [`TILE`] keys × one strip of queries.
#[derive(Debug)]
pub(crate) struct TangentTiles<A> {
    pub(crate) s: Aligned<A>,
    pub(crate) s_tangent: Aligned<A>,
    pub(crate) dp: Aligned<A>,
    pub(crate) dp_tangent: Aligned<A>,
    pub(crate) slope: Aligned<A>,
    pub(crate) slope_tangent: Aligned<A>,
    /// Bias, then dropout factors.
    pub(crate) extra: Aligned<A>,
    pub(crate) bias_tangent: Aligned<A>,
}

impl<A: Real> TangentState<A> {
    pub(crate) fn new(
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
        let list_direction = Vec::new();
        Ok(Self { geometry, is_double, chunks, scratch, dbias, dbias_len, list_direction })
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        list_bytes(&self.chunks)
            + self.chunks.iter().map(Chunk::bytes).sum::<usize>()
            + self.scratch.iter().map(TangentScratch::bytes).sum::<usize>()
            + self.dbias.bytes()
            + list_bytes(&self.list_direction)
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
            q_lanes: Aligned::zeroed(2 * head * CHUNK_ROWS)?,
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
            tile_max: Aligned::zeroed(lanes)?,
            rescale: Aligned::zeroed(lanes)?,
            gradients: GradientScratch::new(geometry, is_double)?,
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
        let lists = [
            &self.q_lanes,
            &self.dout_lanes,
            &self.tile_max,
            &self.rescale,
            &self.tiles.bias_tangent,
        ];
        tiles.into_iter().chain(lists).map(Aligned::bytes).sum::<usize>()
            + self.keys.bytes()
            + self.values.bytes()
            + self.gradients.bytes()
            + self.chunk_tile.bytes()
    }
}

/// Scratch of one thread for the gradients of a block of keys.
#[derive(Debug)]
pub(crate) struct GradientScratch<A> {
    /// Rows of q, q̇ and dout of a strip of queries.
    pub(crate) rows: [RowPanel<A>; 3],
    /// Tangents of dk / scale and dv of the block's keys.
    pub(crate) dk: Aligned<A>,
    pub(crate) dv: Aligned<A>,
}

/// Vectors, one per row, in panels of as many columns as a strip has lanes: the vector operand of
/// [`gemm_rows`].
#[derive(Debug)]
pub(crate) struct RowPanel<A> {
    pub(crate) elements: Aligned<A>,
    pub(crate) rows: usize,
    /// True if no element is NaN or infinite.
    pub(crate) finite: bool,
}

impl<A: Real> GradientScratch<A> {
    fn new(geometry: &Geometry, is_double: bool) -> Result<Self> {
        let wanted = |len: usize| Aligned::zeroed(if is_double { len } else { 0 });
        let [head, value] = row_lengths::<A>(geometry);
        let panel = |len: usize| {
            let elements = wanted(geometry.strip_lanes() * len)?;
            Ok::<_, Error>(RowPanel { elements, rows: 0, finite: true })
        };
        Ok(Self {
            rows: [panel(head)?, panel(head)?, panel(value)?],
            dk: wanted(KEY_TILES * TILE * head)?,
            dv: wanted(KEY_TILES * TILE * value)?,
        })
    }

    fn bytes(&self) -> usize {
        let rows = self.rows.each_ref().map(|panel| panel.elements.bytes());
        rows.iter().sum::<usize>() + self.dk.bytes() + self.dv.bytes()
    }
}

/// Returns head_dim and value_dim as whole vectors.
pub(crate) fn row_lengths<A: Real>(geometry: &Geometry) -> [usize; 2] {
    [geometry.dims.head_dim, geometry.dims.value_dim].map(|dim| dim.next_multiple_of(A::WIDTH))
}
