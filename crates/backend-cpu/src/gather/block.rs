//! The pairs of key lists in one block, and the choice between tiles and gathered rows.
//!
//! A tile of 64 × 64 pairs computes each pair in a fraction of the time that a gathered pair takes,
//! but also the pairs that are not listed. The cheaper form of a block follows from the two counts,
//! so that it depends on the lists alone.

use annulus_core::{ListedPairs, RankShard, Result, Rows, Spec, TransposedPairs};
use ndarray::Array4;

use crate::{
    gather::rows::{PART, RowScratch, ScoreRule},
    simd::dispatch::Real,
    tile::{
        aligned::Aligned,
        geometry::Geometry,
        input::{TileInput, TileSource},
        tile_mask::TILE,
    },
};

/// Time of a gathered pair in units of a pair of a full tile (`benches/record/lists.md`): it reads
/// two rows that no panel holds.
const GATHER_COST: u64 = 32;

/// Pairs of the block that is computed on.
#[derive(Debug, Default)]
pub(crate) struct ListedBlock {
    pub(crate) pairs: ListedPairs,
    pub(crate) transposed: TransposedPairs,
}

impl ListedBlock {
    /// Computes the visible pairs of a block of `keys`. Returns true if its rows are gathered:
    /// false without key lists, and where tiles take less time or have features that gathered rows
    /// lack.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn gathers<A: Real>(&mut self, shard: &RankShard, keys: &Rows) -> Result<bool> {
        let Some(lists) = shard.key_lists.as_deref().filter(|_| !needs_tiles::<A>(shard)) else {
            return Ok(false);
        };
        let spec = &*shard.spec;
        let visibility = shard.visibility(&shard.queries, keys);
        self.pairs.refill(&visibility, spec.dims.batch)?;
        if lists.bias().is_some() {
            return Ok(true);
        }
        let tiles = self.pairs.count_tiles(TILE, keys.len())?;
        let rows = TILE.min(shard.queries.len().next_multiple_of(A::WIDTH));
        Ok(self.pairs.len() as u64 * GATHER_COST < tiles * (rows * TILE) as u64)
    }

    /// Returns the heap bytes.
    pub(crate) const fn bytes(&self) -> usize {
        self.pairs.bytes() + self.transposed.bytes()
    }
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

/// Scratch of a thread that gathers rows, allocated by its first pass.
#[derive(Debug, Default)]
pub(crate) struct GatherScratch<A> {
    /// A row of each plane, padded to whole vectors.
    pub(crate) own: [Aligned<A>; 2],
    /// Sums of a row of each plane, padded to whole vectors.
    pub(crate) sums: [Aligned<A>; 2],
    block: Aligned<A>,
    /// Products, dP, slopes; dropout factors, list bias, statistics, gradient of the list bias.
    parts: [Aligned<A>; 9],
}

/// Numbers of the lists of [`GatherScratch::split`]: dropout factors, list bias, three of
/// statistics, and the gradient of the list bias.
pub(crate) const KEEP: usize = 0;
pub(crate) const BIAS: usize = 1;
pub(crate) const STATISTICS: usize = 2;

/// Rows, sums, the scratch of a kernel, and lists of numbers a pair.
type SplitScratch<'a, A> =
    ([&'a mut [A]; 2], [&'a mut [A]; 2], RowScratch<'a, A>, [&'a mut [A]; 6]);

impl<A: Real> GatherScratch<A> {
    /// Allocates the scratch, unless it is.
    pub(crate) fn allocate(&mut self, geometry: &Geometry) -> Result<()> {
        if !self.block.is_empty() {
            return Ok(());
        }
        let dims = [geometry.dims.head_dim, geometry.dims.value_dim];
        let dims = dims.map(|dim| dim.next_multiple_of(A::WIDTH));
        for lists in [&mut self.own, &mut self.sums] {
            for (list, dim) in lists.iter_mut().zip(dims) {
                *list = Aligned::zeroed(dim)?;
            }
        }
        for list in &mut self.parts {
            *list = Aligned::zeroed(PART)?;
        }
        self.block = Aligned::zeroed(A::WIDTH * A::WIDTH)?;
        Ok(())
    }

    /// Divides the scratch.
    pub(crate) fn split(&mut self) -> SplitScratch<'_, A> {
        let Self { own, sums, block, parts } = self;
        let [s, dp, slope, keep, bias, max, inverse_sum, delta, dbias] =
            parts.each_mut().map(|list| &mut **list);
        let scratch = RowScratch { block, s, dp, slope };
        let lists = [keep, bias, max, inverse_sum, delta, dbias];
        (
            own.each_mut().map(|list| &mut **list),
            sums.each_mut().map(|list| &mut **list),
            scratch,
            lists,
        )
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let lists = self.own.iter().chain(&self.sums).chain(&self.parts).chain([&self.block]);
        lists.map(Aligned::bytes).sum()
    }
}

/// Widens a row; the elements after it stay 0.
pub(crate) fn widen<E: TileInput>(row: &[E], into: &mut [E::Accumulator]) {
    into.iter_mut().zip(row).for_each(|(into, &element)| *into = element.widen());
}
