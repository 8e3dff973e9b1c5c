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

use annulus_core::{Batch, Order, Result, Run, Runs, Side, Spec, memory};

use crate::{
    CustomLayout, Layout, NeedsIndex, RingShards,
    layout::check_ranks,
    schedule::{
        Choice, Route,
        document_deal::DocumentDeal,
        query_work::{QueryWork, UnitWork},
        row_exchange::{Chunk, Limits, RowExchange},
        tile_order::{TILE_ROWS, first_rows_apart, tile_order},
    },
};

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

// Ends of documents, from the segment ids of rows.

/// Ends of documents, from the runs of their ids.
///
/// Consecutive documents of one row, which need no other row, are dealt as one. So the documents
/// depend on the ids alone, and not on the runs into which these are compressed: the ids 0 0 1 2 2
/// are the runs 0 0, 1 2 and 2, or 0 0, 1 and 2 2.
#[derive(Default)]
pub(super) struct DocumentEnds {
    ends: Vec<u64>,
    /// Id of the rows at the end, and their number.
    last: Option<(i64, u64)>,
    /// True if the last document in `ends` has rows of different ids.
    is_of_single_rows: bool,
}

impl DocumentEnds {
    /// Returns the ends of the documents that divide `rows` rows, ascending.
    pub(super) fn of(ids: &[Run], rows: u64) -> Vec<u64> {
        let mut all = Self::default();
        for run in ids.iter().filter(|run| run.count > 0) {
            if run.step == 0 || run.count == 1 {
                all.add_rows(run.start, run.count);
            } else {
                // only the first and the last row can have the id of rows of another run
                all.add_rows(run.start, 1);
                all.end_document();
                all.add_document(run.count - 2, true);
                all.add_rows(run.at(run.count - 1), 1);
            }
        }
        all.end_document();
        let end = all.ends.last().copied().unwrap_or(0);
        all.add_document(rows.saturating_sub(end), false);
        all.ends
    }

    fn add_rows(&mut self, id: i64, count: u64) {
        match &mut self.last {
            Some((last, rows)) if *last == id => *rows += count,
            _ => {
                self.end_document();
                self.last = Some((id, count));
            }
        }
    }

    fn end_document(&mut self) {
        if let Some((_, rows)) = self.last.take() {
            self.add_document(rows, rows == 1);
        }
    }

    fn add_document(&mut self, rows: u64, is_of_single_rows: bool) {
        if rows == 0 {
            return;
        }
        let begin = self.ends.last().copied().unwrap_or(0);
        if is_of_single_rows && self.is_of_single_rows {
            self.ends.pop();
        }
        self.ends.push(begin + rows);
        self.is_of_single_rows = is_of_single_rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_of_one_row_are_one_however_ids_are_compressed() {
        let run = |start, step, count| Run { start, step, count };
        let of = DocumentEnds::of;
        let want = [2, 4, 7];
        for runs in [
            &[run(0, 0, 2), run(1, 0, 1), run(2, 0, 1), run(3, 0, 3)][..],
            &[run(0, 0, 2), run(1, 1, 3), run(3, 0, 2)],
            &[run(0, 0, 1), run(0, 1, 4), run(3, 0, 2)],
            &[run(0, 0, 2), run(9, -2, 2), run(3, 0, 3)],
        ] {
            assert_eq!(of(runs, 7), want, "{runs:?}");
            assert_eq!(of(runs, 9), [2, 4, 7, 9], "rows without ids");
        }
        assert_eq!(of(&[run(5, 1, 6)], 6), [6]);
        assert_eq!(of(&[run(5, 1, 2), run(6, 0, 1), run(6, 1, 2)], 5), [1, 4, 5]);
        assert_eq!(of(&[], 3), [3]);
    }
}
