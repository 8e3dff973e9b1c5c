//! The pairs of sparse masks in one block, and the choice between tiles and listed rows.
//!
//! A tile of 64 × 64 pairs computes each pair in a fraction of the time that a listed pair takes,
//! but also the pairs that are masked. The cheaper form of a block follows from the two counts, so
//! that it depends on the mask alone. Masks of one interval a query are always computed by tiles.

use annulus_core::{ListedPairs, RankShard, Result, Rows, Spec, TransposedPairs};
use ndarray::Array4;

use crate::{
    gather::{
        operands::{GROUP, MergedLists, PackedRows},
        rows::{PART, RowScratch, ScoreRule},
    },
    simd::dispatch::Real,
    tile::{
        aligned::{Aligned, list_bytes},
        geometry::Geometry,
        input::{TileInput, TileSource},
        pack::padded_dim,
        tile_mask::TILE,
    },
};

/// Time of a pair of a merged list, and of another, in halves of a pair of a partial tile
/// (`benches/record/lists.md`): rows of scattered lists are in no near cache.
const MERGED_PAIR_COST: u64 = 4;
const PAIR_COST: u64 = 16;

/// Most pairs of a query whose lists are made from the intervals of a mask: they take 3 KiB for
/// both directions. More pairs fill tiles well enough.
const MOST_PAIRS: usize = 256;

/// Pairs of the block that is computed on, by query and by key.
#[derive(Debug, Default)]
pub(crate) struct ListedBlock<A> {
    pub(crate) pairs: ListedPairs,
    /// Lists of four neighbouring queries.
    pub(crate) merged: MergedLists,
    /// Index in the block of each key that has a number in `pairs`.
    pub(crate) keys: Vec<u32>,
    pub(crate) transposed: TransposedPairs,
    /// Lists of four neighbouring keys, in the order of their numbers.
    pub(crate) merged_by_key: MergedLists,
    /// Index of each query that has a number in `transposed`.
    pub(crate) queries: Vec<u32>,
    /// K and V of one head, and Q and dO.
    pub(crate) rows: [PackedRows<A>; 2],
    /// Versions of the queries and keys that the pairs are of, and if listed rows are computed.
    known: Option<([u64; 2], bool)>,
    is_transposed: bool,
    /// True if the pairs of a mask without key lists are few; known of one batch.
    is_sparse: Option<bool>,
}

impl<A: Real> ListedBlock<A> {
    /// Forgets the pairs: the batch has changed.
    pub(crate) const fn begin(&mut self) {
        self.known = None;
        self.is_sparse = None;
    }

    /// Computes the visible pairs of a block of `keys`, unless they are known. Returns true if
    /// listed rows are computed: false where tiles take less time or have features that listed rows
    /// lack.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn gathers(&mut self, shard: &RankShard, keys: &Rows) -> Result<bool> {
        let lists = shard.key_lists.as_deref();
        if lists.is_none() && !self.is_sparse(shard) || needs_tiles::<A>(shard) {
            return Ok(false);
        }
        let versions = [shard.queries.version(), keys.version()];
        if let Some((known, gathers)) = self.known
            && known == versions
            && !versions.contains(&0)
        {
            return Ok(gathers);
        }
        self.known = None;
        self.is_transposed = false;
        let Spec { dims, .. } = &*shard.spec;
        let visibility = shard.visibility(&shard.queries, keys);
        let has_bias = lists.is_some_and(|lists| lists.bias().is_some());
        match lists {
            Some(_) => self.pairs.refill(&visibility, dims.batch)?,
            None => self.pairs.refill_from_intervals(&visibility, [dims.batch, dims.q_heads])?,
        }
        let tiles = self.pairs.count_tiles(TILE, keys.len())?;
        self.keys = self.pairs.compact(keys.len())?;
        let planes = self.pairs.lists() / shard.queries.len().max(1);
        let rows = [planes, shard.queries.len()];
        let Self { pairs, merged, .. } = self;
        // entries of the list bias are those of one row
        merged.refill(rows, self.keys.len(), !has_bias, |list| {
            &pairs.all_keys()[pairs.pairs(list)]
        })?;
        let single = (pairs.len() - merged.pairs) as u64;
        let cost = merged.pairs as u64 * MERGED_PAIR_COST + single * PAIR_COST;
        let gathers = has_bias || cost < 2 * tiles * pairs_of_tile::<A>(shard);
        self.known = Some((versions, gathers));
        Ok(gathers)
    }

    /// Computes the pairs by key, unless they are known.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn transpose(&mut self, shard: &RankShard) -> Result<()> {
        if self.is_transposed {
            return Ok(());
        }
        let Self { pairs, transposed, merged_by_key, keys, .. } = self;
        transposed.refill(pairs, keys.len())?;
        self.queries = transposed.compact(shard.queries.len())?;
        let has_bias = shard.key_lists.as_ref().is_some_and(|lists| lists.bias().is_some());
        let planes = transposed.lists() / keys.len().max(1);
        let transposed = &*transposed;
        merged_by_key.refill([planes, keys.len()], self.queries.len(), !has_bias, |list| {
            &transposed.all_queries()[transposed.pairs(list)]
        })?;
        self.is_transposed = true;
        Ok(())
    }

    /// Returns true if the mask of the spec lowers to several intervals a query that leave most
    /// pairs of their tiles masked.
    fn is_sparse(&mut self, shard: &RankShard) -> bool {
        *self.is_sparse.get_or_insert_with(|| {
            let sample = shard.visibility(&shard.queries, &shard.keys).sample_intervals(TILE);
            sample.is_some_and(|[pairs, tiles]| {
                pairs <= MOST_PAIRS * TILE
                    && (pairs as u64) * MERGED_PAIR_COST
                        < 2 * tiles as u64 * pairs_of_tile::<A>(shard)
            })
        })
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.pairs.bytes()
            + self.transposed.bytes()
            + self.merged.bytes()
            + self.merged_by_key.bytes()
            + list_bytes(&self.keys)
            + list_bytes(&self.queries)
            + self.rows[0].bytes()
            + self.rows[1].bytes()
    }
}

/// Returns the pairs of a tile that kernels compute.
fn pairs_of_tile<A: Real>(shard: &RankShard) -> u64 {
    (TILE.min(shard.queries.len().next_multiple_of(A::WIDTH)) * TILE) as u64
}

/// Returns a tensor with contiguous vectors, in `copy` if those of `source` are not.
pub(crate) fn contiguous<'a, E: TileInput>(
    source: TileSource<'a, E>,
    copy: &'a mut Option<Array4<E>>,
) -> TileSource<'a, E> {
    match source {
        TileSource::Tensor(tensor) => {
            TileSource::tensor(copy.insert(tensor.as_standard_layout().into_owned()).view())
        }
        vectors @ TileSource::Vectors { .. } => vectors,
    }
}

/// Returns true if the attention has a feature that gathered rows lack.
pub(crate) fn needs_tiles<A: Real>(shard: &RankShard) -> bool {
    let spec = &*shard.spec;
    let is_rounded = spec.logits_dtype.bytes() < A::DTYPE.bytes();
    let has_bias = spec.bias.is_some() || spec.bias_function.is_some();
    shard.leaves.is_some() || !spec.normalize || has_bias || is_rounded || spec.statistics
}

/// Returns the rule of the scores.
pub(crate) fn rule<A: Real>(spec: &Spec) -> ScoreRule<A> {
    ScoreRule {
        scale: A::from_f64(spec.scale),
        cap: spec.soft_cap.map(|cap| (A::from_f64(cap), A::from_f64(1.0 / cap))),
        bias_first: spec.bias_order == annulus_core::BiasOrder::BeforeSoftCap,
    }
}

/// Scratch of a thread that computes listed rows, allocated by its first pass.
#[derive(Debug, Default)]
pub(crate) struct GatherScratch<A> {
    /// Up to [`TILE`] queries.
    pub(crate) q: Aligned<A>,
    /// Sums of as many rows of this side.
    pub(crate) sums: [Aligned<A>; 2],
    /// `[GROUP][PART]` each: products, dP, slopes; dropout factors, list bias, gradient of the list
    /// bias; statistics.
    parts: [Aligned<A>; 9],
}

/// Numbers of the lists of [`GatherScratch::split`]: dropout factors, list bias, its gradient, and
/// three of statistics.
pub(crate) const KEEP: usize = 0;
pub(crate) const BIAS: usize = 1;
pub(crate) const BIAS_GRADIENT: usize = 2;
pub(crate) const STATISTICS: usize = 3;

/// Queries, sums, the scratch of a kernel, and lists of numbers a pair.
type SplitScratch<'a, A> = (&'a mut [A], [&'a mut [A]; 2], RowScratch<'a, A>, [&'a mut [A]; 6]);

impl<A: Real> GatherScratch<A> {
    /// Allocates the scratch, unless it is.
    pub(crate) fn allocate(&mut self, geometry: &Geometry) -> Result<()> {
        if !self.parts[0].is_empty() {
            return Ok(());
        }
        let dims = [geometry.dims.head_dim, geometry.dims.value_dim].map(padded_dim::<A>);
        self.q = Aligned::zeroed(TILE * dims[0])?;
        for (list, dim) in self.sums.iter_mut().zip(dims) {
            *list = Aligned::zeroed(TILE * dim)?;
        }
        for list in &mut self.parts {
            *list = Aligned::zeroed(GROUP * PART)?;
        }
        Ok(())
    }

    /// Divides the scratch.
    pub(crate) fn split(&mut self) -> SplitScratch<'_, A> {
        let Self { q, sums, parts } = self;
        let [s, dp, slope, lists @ ..] = parts.each_mut().map(|list| &mut **list);
        let scratch = RowScratch { s, dp, slope };
        (&mut **q, sums.each_mut().map(|list| &mut **list), scratch, lists)
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let lists = [&self.q].into_iter().chain(&self.sums).chain(&self.parts);
        lists.map(Aligned::bytes).sum()
    }
}
