//! Pages that the queries of a call attend to, in the reproducible order.
//!
//! A page outside has no visible key, so its partial result is empty, and merging it would change
//! no bit. It is neither computed nor sent. All ranks derive the same pages from the mask and the
//! row numbers of the queries.

use std::{ops::Range, sync::Arc};

use annulus_core::{NeedsIndex, RingShards, RowSet, Runs, Shard, Spec};

use super::pages::Pages;

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
        let shard = |rows: Range<u64>| {
            let rows = Runs::counting(rows.start.cast_signed(), rows.end - rows.start);
            Arc::new(Shard { positions: vec![rows.clone()], rows, segments: Vec::new() })
        };
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
}
