//! Layouts that balance the work of a batch of documents, under any mask.
//!
//! ```text
//! contiguous shards; stop if no rank has more than 1.02 times the mean of the pairs
//! deal documents: whole ones, and parts of long ones (DocumentDeal)
//! exchange rows between ranks until none has more: whole tiles, then single rows (RowExchange)
//! order the rows of each rank such that they fill whole tiles (tile_order)
//! ```
//! Every rank gets equal rows up to one. With a causal mask and no documents, the deal gives the
//! zigzag layout. In the reproducible order the same is done with whole leaves in place of rows, so
//! that numbers of rows differ by up to one leaf.
//!
//! # The bound of the balance
//! A query is indivisible: no layout gives the busiest rank fewer pairs than its queries' mean,
//! rounded up to whole queries. Exchanges of single rows reach 1.02 if no query has more than 1 %
//! of the pairs of a rank (`row_exchange.rs`): under a causal mask over one sequence, from about
//! 200 rows per rank on. A number of rows is indivisible too: 1.02 needs a multiple of the ranks,
//! or 50 rows per rank.

use std::{ops::Range, sync::Arc};

use super::{
    Choice, Route,
    document_deal::DocumentDeal,
    document_ends::DocumentEnds,
    query_work::{QueryWork, UnitWork},
    row_exchange::{Chunk, Limits, RowExchange},
    tile_order::{TILE_ROWS, first_rows_apart, tile_order},
};
use crate::{CustomLayout, Layout, NeedsIndex, RingShards, layout::check_ranks};
use annulus_core::{Batch, Order, Result, Run, Runs, Side, Spec, memory};

/// Imbalance of pairs at which no rows are exchanged, and up to which a grid is chosen for
/// documents.
pub(crate) const BALANCED: f64 = 1.02;

/// Imbalance of a rank that has received rows: half of the tolerance, because the time of a pass is
/// that of the busiest rank.
const EXCHANGED: f64 = 1.01;

impl Choice {
    /// Chooses the layout of [`Layout::balanced`], and the route that sends the fewest rows of this
    /// batch. With that route every row sent is a row needed by its receiver. The ring order is
    /// that of the ranks, because the caller distributes the rows by rank.
    ///
    /// # Errors
    /// As [`Layout::balanced`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        let Spec { dims, alignment, .. } = spec;
        let layout = Layout::balanced(spec, batch, ranks)?;
        let shards = RingShards::of_batch(dims, *alignment, &layout, ranks, batch)?;
        let tick = &mut || ();
        let needs = NeedsIndex::of_queries(&*spec.mask, dims.q_heads, dims.batch, &shards, tick);
        let route = Route::sending(&needs, None, tick);
        Ok(Self { layout, route, order: Order::ascending(ranks) })
    }
}

impl Layout {
    /// Returns a layout that gives every rank the same number of rows up to one, and the same
    /// number of visible pairs up to 2 % unless single queries have more than 1 % of the pairs of a
    /// rank; then the best one found. The rows of a rank are runs, not always ascending: those of
    /// whole tiles come first. `batch` is that of all rows. Its dense mask is not counted, since
    /// kernels compute tiles. The same arguments give the same layout on every rank.
    ///
    /// Rows are assigned by their queries' pairs. A rank has the keys of its queries' rows if there
    /// are as many keys as queries; otherwise keys are divided into one chunk per rank. Of fewer
    /// rows than ranks some ranks have none. With [`Spec::leaf_rows`] a rank has whole leaves, so
    /// that the balance depends on the number of leaves.
    ///
    /// [`Choice::balanced`] also returns the route that sends a row only to ranks that need it.
    ///
    /// Takes O((ranks + documents) log² rows) time; masks without a
    /// [`Band`](annulus_core::mask::Band) are evaluated once for each query.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming `ranks` or a field of the batch,
    /// [`annulus_core::Error::OutOfMemory`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        check_ranks(ranks)?;
        let Spec { dims, alignment, leaf_rows, .. } = spec;
        spec.validate_batch(batch, dims.q_len, dims.kv_len)?;
        let whole = RingShards::of_batch(dims, *alignment, &Self::Contiguous, 1, batch)?;
        let pairs = QueryWork::new(spec, &whole)?;
        let rows = dims.q_len as u64;
        let work = UnitWork { pairs: &pairs, unit: leaf_rows.unwrap_or(1), rows };
        let ids = whole.q.first().and_then(|queries| queries.segments.first());
        let ends = DocumentEnds::of(ids.map_or(&[], Runs::runs), rows);
        let dealt = Dealt::best(&work, &ends, ranks);
        let mut q = memory::list("the rows of all ranks", ranks)?;
        q.extend(dealt.ranks.iter().map(|chunks| dealt.rows_of(chunks, &work)));
        let kv = if dims.q_len == dims.kv_len {
            q.clone()
        } else {
            let plain = leaf_rows.map_or(Self::Contiguous, |rows| Self::Contiguous.at_leaves(rows));
            (0..ranks).map(|rank| plain.shard(Side::Kv, dims.kv_len, rank, ranks)).collect()
        };
        Ok(Self::Balanced(Arc::new(CustomLayout { q, kv })))
    }
}

/// Chunks of units that are dealt to ranks.
struct Dealt {
    ranks: Vec<Vec<Chunk>>,
    /// Ends of documents, of which chunks stay apart, if documents are dealt.
    ends: Vec<u64>,
}

impl Dealt {
    /// Deals contiguous shards if they are balanced, else the documents that end at the rows
    /// `ends`.
    fn best(work: &UnitWork<'_>, ends: &[u64], ranks: usize) -> Self {
        let units = work.units();
        let edge = |rank: usize| {
            // the product of a number of units and a number of ranks may exceed 64 bits
            (u128::from(units) * rank as u128 / ranks as u128) as u64
        };
        let of_rank = |rank: usize| edge(rank)..edge(rank + 1);
        let chunk = |units: Range<u64>| vec![Chunk { work: work.between(&units), rows: units }];
        let contiguous: Vec<_> = (0..ranks).map(|rank| chunk(of_rank(rank))).collect();
        let limits = limits_of(work.before(units), ranks);
        if most_work(&contiguous) <= limits.balanced {
            return Self { ranks: contiguous, ends: Vec::new() };
        }
        let mut ends_in_units: Vec<u64> = ends.iter().map(|end| end.div_ceil(work.unit)).collect();
        ends_in_units.dedup();
        let shares = (0..ranks).map(|rank| edge(rank + 1) - edge(rank));
        let mut dealt = DocumentDeal::run(work, &ends_in_units, shares);
        for unit in [TILE_ROWS, 1].into_iter().filter(|&unit| unit == 1 || work.unit == 1) {
            if most_work(&dealt) > limits.balanced {
                dealt = RowExchange::new(work, dealt, limits).run(unit);
            }
        }
        let ends = if work.unit == 1 { ends_in_units } else { Vec::new() };
        if most_work(&dealt) < most_work(&contiguous) {
            Self { ranks: dealt, ends }
        } else {
            Self { ranks: contiguous, ends: Vec::new() }
        }
    }

    /// Returns the rows of some chunks in local order. Adjacent chunks are one run, but not if a
    /// document ends between them.
    fn rows_of(&self, chunks: &[Chunk], work: &UnitWork<'_>) -> Runs {
        let mut ranges: Vec<_> = chunks.iter().map(|chunk| chunk.rows.clone()).collect();
        ranges.retain(|units| !units.is_empty());
        ranges.sort_unstable_by_key(|units| units.start);
        let is_one = |a: &Range<u64>, b: &Range<u64>| {
            a.end == b.start && self.ends.binary_search(&a.end).is_err()
        };
        let run = |adjacent: &[Range<u64>]| {
            let end = adjacent.last().map_or(0, |last| last.end);
            let [start, end] = [adjacent[0].start, end].map(|unit| work.row(unit));
            Run { start: start.cast_signed(), step: 1, count: end - start }
        };
        let mut all: Vec<Run> = ranges.chunk_by(is_one).map(run).collect();
        if !self.ends.is_empty() {
            all = first_rows_apart(all);
            tile_order(&mut all);
        }
        let mut rows = Runs::with_capacity(all.len());
        all.into_iter().for_each(|run| rows.push_run(run));
        rows
    }
}

/// Returns the pairs of the rank with the most.
fn most_work(ranks: &[Vec<Chunk>]) -> u128 {
    ranks.iter().map(|chunks| chunks.iter().map(|chunk| chunk.work).sum()).max().unwrap_or(0)
}

/// Returns the limits of the pairs of a rank if all ranks have `total`.
fn limits_of(total: u128, ranks: usize) -> Limits {
    // in thousandths: all pairs are fewer than 2¹¹⁸
    let limit = |imbalance: f64| {
        let thousandths = (imbalance * 1000.0).round() as u128;
        total * thousandths / (1000 * ranks.max(1) as u128)
    };
    Limits { balanced: limit(BALANCED), target: limit(EXCHANGED), mean: limit(1.0) }
}
