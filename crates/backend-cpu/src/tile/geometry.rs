//! Blocking parameters: splits rows into tasks, and tasks into strips one register tile wide.
//!
//! Coordinates of a tile: its queries, keys and strip, and where a pair lies in it.

use std::ops::Range;

use annulus_core::{DType, Dims, Spec};

use crate::{
    simd::{
        dispatch::{IsaToken, Real},
        tile_unit::TILE_SIZE,
    },
    tile::{
        bf16_pairs::{PackPairLanes, as_pairs, as_pairs_mut, interleave_rows},
        input::{Acc, Plane, TileInput},
        operands::Weights,
        pack::{AlongRows, PackLanes, PanelFormat, padded},
        pack_terms::PackLaneTerms,
        terms::{MAX_TERMS, ROW_PAIRS, RowPositions, SplitWeights, Terms},
        tile_mask::{LaneAxis, TILE},
    },
};

/// Maximum query rows (lanes) of a task per head. A packed tile of keys is reused by all rows of
/// the task, so that packing it costs little.
pub(crate) const WIDE_TASK_ROWS: usize = 2048;

/// Maximum rows of a task under a narrow mask. Smaller tasks keep the rows that the next head reads
/// in nearby cache lines and pages.
pub(crate) const NARROW_TASK_ROWS: usize = 512;

/// Maximum lanes of all heads of a task, so that its packed queries stay in the second-level cache
/// (2,048 × 64 f32 are 512 KiB).
const MAX_TASK_LANES: usize = 2048;

/// Maximum elements of K and V in a [`Geometry::key_block`]: 512 KiB of f32, so that a key block's
/// packed operands and accumulators stream from the second-level cache.
const KEY_BLOCK_ELEMENTS: usize = 1 << 17;

/// Maximum tiles of a [`Geometry::key_block`]: 512 keys. Against 128 keys this saved 5 % of forward
/// and backward (`benches/record/cpu.md`).
const MAX_KEY_BLOCK_TILES: usize = 8;

/// Rows of a block that lie in the lanes of one register tile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Strip {
    /// Rows of the block.
    pub(crate) rows: Range<usize>,
    /// Number of 64-byte vectors.
    pub(crate) vectors: usize,
    /// Number of lanes, of which the first `rows.len()` are used.
    pub(crate) width: usize,
}

impl Strip {
    /// Returns the rows of the strip, of a block or task that starts at row `first`.
    pub(crate) const fn rows_from(&self, first: usize) -> Range<usize> {
        first + self.rows.start..first + self.rows.end
    }
}

/// Lengths of one rank's shard that all kernels use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) dims: Dims,
    pub(crate) token: IsaToken,
    /// Lanes of a 64-byte vector.
    vector_lanes: usize,
    /// Vectors of a full strip.
    strip_vectors: usize,
    /// True if operands of products are pairs of bf16; see [`crate::tile::bf16_pairs`].
    pub(crate) bf16_pairs: bool,
    /// Terms of operands that are multiplied on tiles; see [`crate::tile::terms`].
    pub(crate) tile_terms: Option<Terms>,
}

impl Geometry {
    pub(crate) const fn new<A: Real>(spec: &Spec, token: IsaToken) -> Self {
        let tile_terms = match token.tile_unit() {
            Some(_) => Terms::new(spec.dtype, spec.precision),
            None => None,
        };
        // without tiles, pairs of keys are adjacent rows of a block, which the reproducible order
        // must not depend on
        let bf16_pairs = token.isa().multiplies_pairs()
            && matches!(spec.dtype, DType::Bf16)
            && spec.leaf_rows.is_none();
        Self {
            dims: spec.dims,
            token,
            vector_lanes: A::WIDTH,
            strip_vectors: token.max_vectors(),
            bf16_pairs: bf16_pairs || tile_terms.is_some(),
            tile_terms,
        }
    }

    /// Returns the rows of a packed strip of vectors of length `dim`: one per element, or one per
    /// pair of elements, on tiles of each term in whole tiles and one of factors.
    pub(crate) const fn packed_rows(&self, dim: usize) -> usize {
        match (self.bf16_pairs, self.tile_terms) {
            (false, _) => dim,
            (true, None) => dim.div_ceil(2),
            (true, Some(Terms { inputs, .. })) => {
                inputs * dim.div_ceil(2).next_multiple_of(TILE_SIZE) + (inputs > 1) as usize
            }
        }
    }

    /// Returns the format of panels; `interleaved` for panels that are also summed along their
    /// rows.
    pub(crate) fn panel_format(&self, interleaved: bool) -> PanelFormat {
        match (self.tile_terms, self.bf16_pairs, interleaved) {
            (Some(Terms { inputs: terms, .. }), ..) => {
                PanelFormat::Tiles { terms, along_rows: interleaved.then_some(AlongRows::ByDim) }
            }
            (None, false, _) => PanelFormat::Widened,
            (None, true, false) => PanelFormat::Pairs,
            (None, true, true) => PanelFormat::InterleavedPairs,
        }
    }

    /// Returns the format of the keys of dQ += dS·K, which are the vector operand.
    pub(crate) fn dq_panel_format(&self) -> PanelFormat {
        match self.panel_format(true) {
            PanelFormat::Tiles { terms, .. } => {
                PanelFormat::Tiles { terms, along_rows: Some(AlongRows::ByRow) }
            }
            other => other,
        }
    }

    /// Rounds the rows of a strip of accumulators up to whole register tiles.
    const fn accumulator_rows(&self, dim: usize) -> usize {
        if self.tile_terms.is_some() { dim.next_multiple_of(TILE_SIZE) } else { padded(dim) }
    }

    /// Returns the same geometry with strips of which a whole number covers a tile of
    /// [`crate::tile::tile_mask::TILE`] lanes.
    pub(crate) const fn with_tile_aligned_strips(self) -> Self {
        let mut strip_vectors = self.token.max_vectors();
        while !TILE.is_multiple_of(strip_vectors * self.vector_lanes) {
            strip_vectors -= 1;
        }
        Self { strip_vectors, ..self }
    }

    /// Returns the same geometry without pairs of bf16.
    pub(crate) const fn without_pairs(self) -> Self {
        Self { bf16_pairs: false, tile_terms: None, ..self }
    }

    /// Returns the lanes of a full strip.
    pub(crate) const fn strip_lanes(&self) -> usize {
        self.strip_vectors * self.vector_lanes
    }

    /// Returns the number of keys, in whole tiles, that the fused backward processes for each
    /// packed tile of queries.
    ///
    /// Larger blocks amortise the packing of queries and the update of dq. Smaller ones keep the
    /// packed keys and their gradients in a near cache.
    pub(crate) fn key_block(&self) -> usize {
        let tiles = KEY_BLOCK_ELEMENTS / (self.head_rows() + self.value_rows()) / TILE;
        TILE * tiles.clamp(1, MAX_KEY_BLOCK_TILES)
    }

    /// Returns head_dim rounded up to whole vectors.
    pub(crate) const fn padded_head_dim(&self) -> usize {
        self.dims.head_dim.next_multiple_of(self.vector_lanes)
    }

    /// Returns the lanes of `rows` rows: whole vectors.
    pub(crate) const fn lanes(&self, rows: usize) -> usize {
        rows.next_multiple_of(self.vector_lanes)
    }

    /// Iterates over the strips of a block of `rows` rows. Strip boundaries do not depend on the
    /// block's size if that is a whole number of strips.
    pub(crate) fn strips(&self, rows: usize) -> impl ExactSizeIterator<Item = Strip> + use<> {
        let vector_lanes = self.vector_lanes;
        let lanes = self.strip_lanes();
        (0..rows.div_ceil(lanes)).map(move |index| {
            let rows = index * lanes..rows.min((index + 1) * lanes);
            let vectors = rows.len().div_ceil(vector_lanes);
            Strip { rows, vectors, width: vectors * vector_lanes }
        })
    }

    /// Returns the rows of a task: at most `most` (at least one strip), and few enough that `rows`
    /// rows of every (batch row, KV head) plane give at least four tasks per thread where possible
    /// (one thread needs no balance).
    pub(crate) fn block_rows(
        &self,
        rows: usize,
        heads: usize,
        threads: usize,
        most: usize,
    ) -> usize {
        let strip = self.strip_lanes();
        let planes = self.dims.batch * self.dims.kv_heads;
        let mut strips = (most / strip).max(1);
        while strips > 1
            && (strips * strip * heads > MAX_TASK_LANES
                || threads > 1 && rows.div_ceil(strips * strip) * planes < 4 * threads)
        {
            strips /= 2;
        }
        strips * strip
    }

    /// Returns the elements of a strip in the packed strips of a task, for vectors of `dim` rows.
    pub(crate) const fn strip_range(&self, coord: &TileCoord, dim: usize) -> Range<usize> {
        let first = coord.strip * self.strip_lanes() * dim;
        first..first + coord.width * dim
    }

    /// Packs the vectors `rows` of one head, transposed, into a strip of `width` lanes, one vector
    /// per lane. With bf16 pairs, each row of the strip holds pairs of neighbouring dims. Lanes
    /// without a vector are 0.
    pub(crate) fn pack_strip<E: TileInput>(
        &self,
        plane: Plane<'_, E>,
        rows: Range<usize>,
        width: usize,
        strip: &mut [E::Accumulator],
    ) {
        if let Some(Terms { inputs: terms, .. }) = self.tile_terms {
            let dim = plane.dim();
            let kernel = PackLaneTerms { plane, rows, width, dim, terms, strip };
            self.token.run_pair_kernel(1, kernel);
        } else if self.bf16_pairs {
            Acc::<E>::run(self.token, 1, PackPairLanes { plane, rows, width, strip });
        } else {
            Acc::<E>::run_kernel(self.token, 1, PackLanes { plane, rows, width, strip });
        }
    }

    /// Returns the rows `rows` of a tile of P or dS as factors of a product. Pairs of bf16 are made
    /// in place or, of terms on tiles, in `terms` with rows at `positions`. P is at most about 1,
    /// dS may be of any magnitude.
    pub(crate) fn weights<'a, A: Real>(
        &self,
        vectors: usize,
        rows: &Range<usize>,
        positions: RowPositions<'a>,
        any_magnitude: bool,
        tile: &'a mut [A],
        terms: &'a mut [A],
    ) -> Weights<'a, A> {
        let width = vectors * self.vector_lanes;
        if let Some(Terms { weights: count, .. }) = self.tile_terms {
            let (into, factors) = terms.split_at_mut(count * ROW_PAIRS * width);
            let has_factors = any_magnitude && count == MAX_TERMS;
            let factors = &mut factors[..if has_factors { width } else { 0 }];
            let kernel = SplitWeights {
                tile: as_pairs(tile),
                rows: rows.clone(),
                positions,
                terms: count,
                into: as_pairs_mut(into),
                factors: has_factors.then(|| as_pairs_mut(factors)),
            };
            self.token.run_pair_kernel(vectors, kernel);
            return Weights { elements: into, factors, positions };
        }
        if self.bf16_pairs {
            interleave_rows(self.token, vectors, rows, tile);
        }
        Weights::from(&tile[rows.start * width..rows.end * width])
    }

    /// Returns the query heads of the group of KV head `kv_head`.
    pub(crate) const fn heads(&self, kv_head: usize) -> Range<usize> {
        let group = self.dims.group();
        kv_head * group..(kv_head + 1) * group
    }

    /// Iterates over the query heads of a group: one by one if masks are `per_head`, else all at
    /// once.
    pub(crate) fn heads_with_one_mask(
        &self,
        kv_head: usize,
        per_head: bool,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let heads = self.heads(kv_head);
        let step = if per_head { 1 } else { heads.len() };
        heads.clone().step_by(step).map(move |first| first..first + step)
    }

    /// Returns the rows of a strip of q, k or their gradients: head_dim padded to whole register
    /// tiles.
    pub(crate) const fn head_rows(&self) -> usize {
        self.accumulator_rows(self.dims.head_dim)
    }

    /// Returns the rows of a strip of v, out or their gradients: value_dim padded to whole register
    /// tiles.
    pub(crate) const fn value_rows(&self) -> usize {
        self.accumulator_rows(self.dims.value_dim)
    }
}

/// Coordinates of a tile within a task.
#[derive(Debug, Clone)]
pub(crate) struct TileCoord {
    pub(crate) batch: usize,
    /// Query head.
    pub(crate) head: usize,
    /// Local query rows.
    pub(crate) queries: Range<usize>,
    /// Key rows, as indices into the block.
    pub(crate) keys: Range<usize>,
    pub(crate) lane_axis: LaneAxis,
    /// Index of the strip among all strips of the task.
    pub(crate) strip: usize,
    /// Vectors of the strip.
    pub(crate) vectors: usize,
    /// Elements of a row of the tile.
    pub(crate) width: usize,
}

/// Pairs of each of some queries with each of some keys of a tile, both counted from its first.
#[derive(Debug, Clone)]
pub(crate) struct QueryKeyPairs {
    pub(crate) queries: Range<usize>,
    pub(crate) keys: Range<usize>,
}

impl TileCoord {
    /// Returns the queries and keys in the rows `rows` of the tile.
    pub(crate) fn pairs(&self, rows: &Range<usize>) -> QueryKeyPairs {
        match self.lane_axis {
            LaneAxis::Queries => {
                QueryKeyPairs { queries: 0..self.queries.len(), keys: rows.clone() }
            }
            LaneAxis::Keys => QueryKeyPairs { queries: rows.clone(), keys: 0..self.keys.len() },
        }
    }

    /// Returns row and lane of a (query, key) pair.
    pub(crate) const fn row_and_lane(&self, query: usize, key: usize) -> (usize, usize) {
        match self.lane_axis {
            LaneAxis::Queries => (key, query),
            LaneAxis::Keys => (query, key),
        }
    }

    /// Returns the range of elements of the rows `rows`.
    pub(crate) const fn span(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.width..rows.end * self.width
    }

    /// Returns the element index of a (query, key) pair.
    pub(crate) const fn element(&self, query: usize, key: usize) -> usize {
        let (row, lane) = self.row_and_lane(query, key);
        row * self.width + lane
    }
}
