//! Memory of split-KV decode: partial results of the splits, and scratch of a thread. GQA packing:
//! the queries of a KV head's group as blocks of packed rows.

use std::ops::Range;

use annulus_core::{Dims, Result, Spec};

use crate::{
    simd::{
        dispatch::{IsaToken, Real},
        tile_unit::TILE_SIZE,
        vector::MAX_LANES,
    },
    tile::{
        aligned::{Aligned, list_bytes},
        ds_tile::DsTile,
        geometry::Geometry,
        pack::{Panel, padded_dim},
        softmax::{Partial, PartialLens},
        terms::{MAX_TERMS, Terms},
        tile_mask::TILE,
    },
};

/// Maximum packed rows per block, with 32 registers.
pub(crate) const MAX_PACKED: usize = 4;

pub(crate) const TWO: usize = 2;
pub(crate) const ONE: usize = 1;

/// Least packed rows of a KV head whose products are computed on tiles, by the terms of an element:
/// where they are faster by the estimate of [`crate::decode::tiles`], in whole tiles.
const MIN_TILE_ROWS: [usize; MAX_TERMS] = [16, 32, 64];

/// True if the products of a group with `queries` queries are computed on tiles.
pub(crate) const fn is_on_tiles(geometry: &Geometry, queries: usize) -> bool {
    match geometry.tile_terms {
        Some(Terms { inputs: terms @ 1..=MAX_TERMS, .. }) => {
            let packed_rows = geometry.dims.group() * queries;
            packed_rows >= MIN_TILE_ROWS[terms - 1] && tile_keys(geometry) == TILE
        }
        _ => false,
    }
}

/// Packed rows of one KV head, in blocks that are processed in lockstep. Each block is a strip,
/// `[dim / lanes][packed rows][lanes]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedQueries {
    len: usize,
    max_block_len: usize,
}

impl PackedQueries {
    /// Describes the packed rows of a group with `queries` queries.
    pub(crate) const fn of_group(geometry: &Geometry, queries: usize) -> Self {
        let max_block_len = match (geometry.token.max_vectors(), geometry.lanes(1)) {
            // C of a product on tiles
            _ if is_on_tiles(geometry, queries) => ONE,
            (MAX_PACKED.., MAX_LANES) => MAX_PACKED,
            // f64 vectors are left to the compiler, which takes two registers for each
            (MAX_PACKED.., _) => TWO,
            _ => ONE,
        };
        Self { len: geometry.dims.group() * queries, max_block_len }
    }

    /// Returns the number of packed rows.
    #[inline]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Returns the length of the block that starts with packed row `first`: [`MAX_PACKED`], two or
    /// one packed rows; 0 after the last block.
    #[inline(always)]
    pub(crate) const fn block_len(&self, first: usize) -> usize {
        let left = self.len.saturating_sub(first);
        let mut count = self.max_block_len;
        while count > left {
            count /= 2;
        }
        count
    }

    /// Iterates over the blocks in order.
    fn blocks(self) -> impl Iterator<Item = Range<usize>> {
        let block = move |first| Some(first..first + self.block_len(first));
        let blocks = std::iter::successors(block(0), move |last: &Range<usize>| block(last.end));
        blocks.take_while(|block| !block.is_empty())
    }

    /// Returns the element ranges, one per register, of the vector of length `dim` of one packed
    /// row. The last is padded.
    pub(crate) fn vectors<A: Real>(
        self,
        packed_row: usize,
        dim: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let block = self.blocks().find(|block| block.contains(&packed_row)).unwrap_or_default();
        let first =
            block.start * padded_dim::<A>(dim) + packed_row.saturating_sub(block.start) * A::WIDTH;
        (0..dim.div_ceil(A::WIDTH))
            .map(move |vector| first + vector * block.len() * A::WIDTH)
            .map(|first| first..first + A::WIDTH)
    }
}

/// Maximum splits of a block of keys. More splits balance better over threads; fewer need less
/// memory for partial results.
const MAX_SPLITS: usize = 64;

/// Minimum keys of a split, except the last, so that merging costs little beside reading.
const MIN_SPLIT_KEYS: usize = 512;

/// Partial results of all splits of one workspace.
#[derive(Debug)]
pub(crate) struct Decode<A> {
    /// Statistics as `[query heads][queries]`. Sums: `[KV heads]` of packed queries of vectors of
    /// length value_dim.
    pub(crate) partials: Vec<Partial<Aligned<A>>>,
}

/// Scratch of one thread for decode.
#[derive(Debug)]
pub(crate) struct DecodeScratch<A> {
    /// `[KV heads]` of packed queries of vectors of length head_dim.
    pub(crate) q: Aligned<A>,
    /// Scores, then probabilities: `[packed rows][keys of a tile]`.
    pub(crate) tile: Aligned<A>,
    /// `[packed rows of a block][lanes][lanes]`: products with as many keys as a vector has lanes,
    /// summed over dims but not across lanes.
    pub(crate) products: Aligned<A>,
    /// `[packed rows]`: e^{m − m'}, by which the accumulator is rescaled.
    pub(crate) rescale: Aligned<A>,
    /// `[packed rows]`: bits of the visible keys of a tile.
    pub(crate) visible: Vec<u64>,
    /// Operands of products on tiles; `q` and `products` are then empty.
    pub(crate) tiles: Option<TileOperands<A>>,
}

/// Operands of products on tiles.
#[derive(Debug)]
pub(crate) struct TileOperands<A> {
    /// Queries of each KV head, one packed row per row.
    pub(crate) q: Vec<Panel<A>>,
    /// Keys of a tile, one per lane.
    pub(crate) k: Aligned<A>,
    /// Values of a tile, with pairs along the rows.
    pub(crate) v: Panel<A>,
    /// Probabilities of up to 64 packed rows.
    pub(crate) probs: DsTile<A>,
}

impl<A: Real> TileOperands<A> {
    fn new(geometry: &Geometry, packed_rows: usize) -> Result<Self> {
        let Dims { kv_heads, head_dim, value_dim, .. } = geometry.dims;
        let rows = packed_rows.next_multiple_of(TILE_SIZE);
        let q = || Panel::with_stride(rows, head_dim, 0, geometry.panel_format(false));
        let (stride, format) = (padded_dim::<A>(value_dim), geometry.dq_panel_format());
        Ok(Self {
            q: (0..kv_heads).map(|_| q()).collect::<Result<_>>()?,
            k: Aligned::zeroed(TILE * geometry.packed_rows(head_dim))?,
            v: Panel::with_stride(TILE, value_dim, stride, format)?,
            probs: DsTile::new(geometry, true)?,
        })
    }

    /// Returns the heap bytes.
    fn bytes(&self) -> usize {
        let Self { q, k, v, probs } = self;
        let of_queries = list_bytes(q) + q.iter().map(Panel::bytes).sum::<usize>();
        of_queries + k.bytes() + v.bytes() + probs.bytes()
    }
}

/// True if a pass of `queries` queries runs as split-KV decode.
pub(crate) fn is_decode<A: Real>(
    token: IsaToken,
    spec: &Spec,
    queries: usize,
    backward: bool,
) -> bool {
    // a full vector of queries is faster with queries in lanes; with few registers, half a vector
    // is
    let enough = if token.max_vectors() > 1 { A::WIDTH } else { A::WIDTH / 2 };
    // decode sums scores in another order, so that the bits would depend on the number of queries
    let any_order = spec.leaf_rows.is_none();
    !backward && any_order && spec.normalize && !spec.statistics && (1..enough).contains(&queries)
}

/// Returns the keys of a tile: the lanes of a strip.
pub(crate) const fn tile_keys(geometry: &Geometry) -> usize {
    geometry.with_tile_aligned_strips().strip_lanes()
}

impl<A: Real> DecodeScratch<A> {
    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let Self { q, tile, products, rescale, visible, tiles } = self;
        let arrays = [q, tile, products, rescale].map(Aligned::bytes);
        let tiles = tiles.as_ref().map_or(0, TileOperands::bytes);
        arrays.iter().sum::<usize>() + list_bytes(visible) + tiles
    }

    /// Allocates scratch for `queries` queries (0: none).
    pub(crate) fn new(geometry: &Geometry, queries: usize) -> Result<Self> {
        let packed = geometry.dims.q_heads * queries;
        let tiles = is_on_tiles(geometry, queries)
            .then(|| TileOperands::new(geometry, geometry.dims.group() * queries))
            .transpose()?;
        let of_vectors = if tiles.is_some() { 0 } else { packed };
        // products on tiles write whole tiles of rows
        let rows = if tiles.is_some() { packed + TILE_SIZE } else { packed };
        Ok(Self {
            q: Aligned::zeroed(of_vectors * padded_dim::<A>(geometry.dims.head_dim))?,
            tile: Aligned::zeroed(rows * tile_keys(geometry))?,
            products: Aligned::zeroed(of_vectors.min(MAX_PACKED) * A::WIDTH * A::WIDTH)?,
            rescale: Aligned::zeroed(packed)?,
            visible: vec![0; packed],
            tiles,
        })
    }
}

/// Returns the keys of each split of a block of `keys` keys.
pub(crate) fn split_keys(keys: usize) -> usize {
    keys.div_ceil(MAX_SPLITS).next_multiple_of(TILE).max(MIN_SPLIT_KEYS)
}

impl<A: Real> Decode<A> {
    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        list_bytes(&self.partials) + self.partials.iter().map(Partial::bytes).sum::<usize>()
    }

    /// Allocates partial results for `queries` queries and blocks of up to `keys` keys.
    pub(crate) fn new(geometry: &Geometry, queries: usize, keys: usize) -> Result<Self> {
        let dims = geometry.dims;
        let splits = keys.div_ceil(split_keys(keys));
        let packed = dims.q_heads * queries;
        let sums = packed * padded_dim::<A>(dims.value_dim);
        let lens = PartialLens { sums, rows: packed, ..PartialLens::default() };
        let partials = (0..splits * dims.batch).map(|_| Partial::new(lens));
        Ok(Self { partials: partials.collect::<Result<_>>()? })
    }
}
