//! Pages of cached rows: their distribution over ranks ([`Pages`]), and those that the queries of a
//! call attend to, in the reproducible order ([`PageSet`]).
//!
//! A page outside has no visible key, so its partial result is empty, and merging it would change
//! no bit. It is neither computed nor sent. All ranks derive the same pages from the mask and the
//! row numbers of the queries.
//!
//! ```text
//! row      0 … R−1   R … 2R−1   2R …                    R rows of a page
//! page     0         1          2      …
//! rank     0         1          2      …   P−1  0  1    page mod P
//! ```
//! A row number alone determines rank and local row, so that no rank stores a table of pages, and
//! the ranks' numbers of rows differ by at most one page after any sequence of appends.

use std::{ops::Range, sync::Arc};

use annulus_core::{RowSet, Run, Runs, Shard, Spec};
use annulus_plan::{NeedsIndex, RingShards};

/// Pages of all ranks that any of some queries may attend to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PageSet {
    /// Numbers of the pages, among those of all ranks.
    numbers: RowSet,
    /// Pages of the set before each range of `numbers`.
    before: Vec<u64>,
    /// Pages of the set of each rank.
    of_ranks: Vec<u64>,
}

impl PageSet {
    /// Computes the pages with keys in the bounds of the queries `queries`, of any head and batch
    /// row, in a cache of `len` rows.
    pub(super) fn visible(spec: &Spec, pages: Pages, len: u64, queries: Range<u64>) -> Self {
        let shard = |rows: Range<u64>| Arc::new(shard_of(counting(&rows)));
        let shards = RingShards { q: vec![shard(queries)], kv: vec![shard(0..len)] };
        let (heads, batch) = (spec.dims.q_heads, spec.dims.batch);
        let needs = NeedsIndex::of_queries(spec.mask.as_ref(), heads, batch, &shards, &mut || ());
        let rows = needs.in_tiles(pages.rows).rows(0, 0);
        let page = |rows: &Range<u64>| rows.start / pages.rows..rows.end.div_ceil(pages.rows);
        Self::new(rows.ranges().iter().map(page).collect(), pages.ranks)
    }

    fn new(numbers: RowSet, ranks: u64) -> Self {
        let mut before = Vec::with_capacity(numbers.ranges().len());
        let mut count = 0;
        for range in numbers.ranges() {
            before.push(count);
            count += range.end - range.start;
        }
        let of_rank = |rank| {
            // pages below `end` of the rank
            let below = |end: u64| (end + ranks - 1 - rank) / ranks;
            numbers.ranges().iter().map(|range| below(range.end) - below(range.start)).sum()
        };
        let of_ranks = (0..ranks).map(of_rank).collect();
        Self { numbers, before, of_ranks }
    }

    /// Returns the number of pages of all ranks.
    pub(super) fn count(&self) -> u64 {
        self.numbers.count()
    }

    /// Returns the numbers of the pages of all ranks, ascending.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.numbers.iter()
    }

    /// Returns the number of pages of `rank`.
    pub(super) fn count_of(&self, rank: u64) -> u64 {
        self.of_ranks.get(annulus_core::index(rank)).copied().unwrap_or(0)
    }

    /// Returns the most pages of a rank.
    pub(super) fn most(&self) -> u64 {
        self.of_ranks.iter().copied().max().unwrap_or(0)
    }

    /// Returns the numbers of the pages of `rank`, ascending.
    pub(super) fn numbers_of(&self, rank: u64) -> impl Iterator<Item = u64> + '_ {
        let ranks = self.of_ranks.len();
        self.numbers.ranges().iter().flat_map(move |range| {
            let modulus = ranks.max(1) as u64;
            let first = range.start + (rank + modulus - range.start % modulus) % modulus;
            (first..range.end).step_by(ranks.max(1))
        })
    }

    /// Returns the index of a page of the set among those of all ranks.
    pub(super) fn index_of(&self, number: u64) -> u64 {
        let ranges = self.numbers.ranges();
        let range = ranges.partition_point(|range| range.end <= number);
        let first = ranges.get(range).map_or(number, |range| range.start);
        self.before.get(range).map_or(self.count(), |before| before + (number - first))
    }
}

/// Returns a shard of these rows, whose positions are their numbers.
pub(super) fn shard_of(rows: Runs) -> Shard {
    Shard { positions: vec![rows.clone()], rows, segments: Vec::new() }
}

/// Returns consecutive row numbers.
pub(super) fn counting(rows: &Range<u64>) -> Runs {
    Runs::counting(rows.start.cast_signed(), rows.end - rows.start)
}

/// Pages of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pages {
    /// Rows of a page, at least 1.
    pub(super) rows: u64,
    pub(super) ranks: u64,
    pub(super) rank: u64,
}

impl Pages {
    /// Returns the number of rows of this rank among the rows `0..len`.
    pub(super) const fn local_len(&self, len: u64) -> u64 {
        let whole_pages = len / self.rows;
        let rounds = whole_pages / self.ranks;
        // the last round of pages: whole ones, then one that is being filled
        let last_rank = whole_pages % self.ranks;
        let last_page = if self.rank < last_rank {
            self.rows
        } else if self.rank == last_rank {
            len % self.rows
        } else {
            0
        };
        rounds * self.rows + last_page
    }

    /// Returns the number of the local page `page` among the pages of all ranks.
    const fn number(&self, page: u64) -> u64 {
        page * self.ranks + self.rank
    }

    /// Returns the row numbers of the local rows `local`, as one run per page.
    pub(super) fn runs(&self, local: Range<u64>) -> impl Iterator<Item = Run> + use<> {
        let pages = *self;
        let rows = self.rows;
        let mut next = local.start;
        std::iter::from_fn(move || {
            let row_of_page = next % rows;
            let count = (rows - row_of_page).min(local.end.checked_sub(next)?);
            let start = pages.number(next / rows) * rows + row_of_page;
            next += count;
            (count > 0).then_some(Run { start: start.cast_signed(), step: 1, count })
        })
    }

    /// Returns the row numbers of the local rows `local`.
    pub(super) fn row_numbers(&self, local: Range<u64>) -> Runs {
        let mut numbers = Runs::new();
        self.runs(local).for_each(|run| numbers.push_run(run));
        numbers
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{DType, Dims, Mask, mask};
    use proptest::prelude::*;

    use super::*;

    fn spec(mask: Arc<dyn Mask>) -> Spec {
        let dims = Dims { q_heads: 2, ..Dims::new(1, 1, 2, 8) };
        Spec { mask, ..Spec::new(dims, DType::F32) }
    }

    fn masks() -> impl Strategy<Value = Arc<dyn Mask>> {
        let causal = || Arc::new(mask::Causal::default()) as Arc<dyn Mask>;
        let window = |left: u64, first_visible: u64| {
            let window =
                mask::Window { left: Some(left), right: Some(0), first_visible, offset: 0 };
            Arc::new(window) as Arc<dyn Mask>
        };
        prop_oneof![
            Just(Arc::new(mask::Everything) as Arc<dyn Mask>),
            Just(causal()),
            (0u64..40).prop_map(move |left| window(left, 0)),
            (0u64..20, 1u64..9).prop_map(move |(left, first)| window(left, first)),
            (1u64..50).prop_map(|size| Arc::new(mask::ChunkedCausal { size }) as Arc<dyn Mask>),
        ]
    }

    proptest! {
        #[test]
        fn pages_are_those_with_visible_keys(
            mask in masks(), rows in 1u64..9, ranks in 1u64..6, len in 1u64..120,
            first in 0u64..120, count in 0u64..30,
        ) {
            let first = first.min(len);
            let queries = first..(first + count).min(len);
            let spec = spec(mask);
            let pages = Pages { rows, ranks, rank: 0 };
            let set = PageSet::visible(&spec, pages, len, queries.clone());
            let sees = |query: u64, key: u64| {
                let position = query.cast_signed();
                let query = mask::Query { batch: 0, head: 0, row: query, position };
                let key = mask::Key { row: key, position: key.cast_signed() };
                spec.mask.visible(&query, &key)
            };
            let is_visible = |page: &u64| {
                let mut keys = page * rows..((page + 1) * rows).min(len);
                keys.any(|key| queries.clone().any(|query| sees(query, key)))
            };
            let want: Vec<u64> = (0..len.div_ceil(rows)).filter(is_visible).collect();
            prop_assert_eq!(set.numbers().collect::<Vec<_>>(), want.clone());
            prop_assert_eq!(set.count(), want.len() as u64);
            for (index, &number) in want.iter().enumerate() {
                prop_assert_eq!(set.index_of(number), index as u64);
            }
            for rank in 0..ranks {
                let of_rank: Vec<u64> =
                    want.iter().copied().filter(|number| number % ranks == rank).collect();
                prop_assert_eq!(set.count_of(rank), of_rank.len() as u64);
                prop_assert_eq!(set.numbers_of(rank).collect::<Vec<_>>(), of_rank);
            }
            prop_assert_eq!(set.most(), (0..ranks).map(|rank| set.count_of(rank)).max().unwrap());
        }
    }

    proptest! {
        #[test]
        fn every_row_is_on_one_rank_and_ranks_differ_by_a_page(
            rows in 1u64..70,
            ranks in 1u64..17,
            appends in proptest::collection::vec(0u64..300, 0..12),
        ) {
            let mut len = 0;
            let mut cached = vec![Vec::new(); ranks as usize];
            for count in appends {
                for (rank, numbers) in (0..).zip(&mut cached) {
                    let pages = Pages { rows, ranks, rank };
                    let local = pages.local_len(len)..pages.local_len(len + count);
                    numbers.extend(pages.row_numbers(local).iter());
                }
                len += count;
                let of_rank = |rank| Pages { rows, ranks, rank }.local_len(len);
                let most = (0..ranks).map(of_rank).max().unwrap_or(0);
                let fewest = (0..ranks).map(of_rank).min().unwrap_or(0);
                prop_assert!(most - fewest <= rows);
            }
            for (rank, numbers) in (0..).zip(&cached) {
                // the appends of a rank are its rows in ascending order
                let pages = Pages { rows, ranks, rank };
                let all = pages.row_numbers(0..pages.local_len(len));
                prop_assert!(all.iter().eq(numbers.iter().copied()));
            }
            let mut all: Vec<i64> = cached.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..len.cast_signed()));
        }
    }
}
