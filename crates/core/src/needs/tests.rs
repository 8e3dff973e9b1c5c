//! Needs against a count of every pair, and their cost where ids are in no order.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use proptest::prelude::*;

use super::{
    Needs,
    samples::{Problem, Sample, packed, plain, problems},
};
use crate::{Coordinates, Layout, Mask, RowSet, Spans, mask};

fn rows(sets: &[Vec<BTreeSet<u64>>]) -> Vec<Vec<RowSet>> {
    sets.iter().map(|owners| owners.iter().map(|set| set.iter().map(|&row| row..row + 1).collect()).collect()).collect()
}

fn counted(problem: &Problem) -> (Vec<Vec<RowSet>>, Vec<Vec<RowSet>>) {
    let ranks = problem.coordinates.q.len();
    let mut of_queries = vec![vec![BTreeSet::new(); ranks]; ranks];
    let mut of_keys = of_queries.clone();
    problem.pairs(|query_rank, query, key_rank, key| {
        of_queries[query_rank][key_rank].insert(key);
        of_keys[key_rank][query_rank].insert(query);
    });
    (rows(&of_queries), rows(&of_keys))
}

fn assert_exact(problem: &Problem) {
    let Problem { mask, heads, batch, coordinates } = problem;
    let (of_queries, of_keys) = counted(problem);
    let got = Needs::of_queries(mask, *heads, *batch, coordinates);
    assert_eq!(got.held, coordinates.kv.iter().map(|shard| shard.rows.len()).collect::<Vec<_>>());
    assert_eq!(got.rows, of_queries, "of queries: {problem:?}");
    let got = Needs::of_keys(mask, *heads, *batch, coordinates);
    assert_eq!(got.held, coordinates.q.iter().map(|shard| shard.rows.len()).collect::<Vec<_>>());
    assert_eq!(got.rows, of_keys, "of keys: {problem:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn needs_are_the_pairs(problem in problems()) {
        assert_exact(&problem);
    }
}

#[test]
fn needs_are_the_pairs_in_every_layout_with_few_rows_and_many_ranks() {
    for mask in Sample::ALL {
        for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped] {
            for (len, ranks) in [(0, 1), (0, 3), (1, 4), (3, 7), (17, 3), (40, 9), (31, 33)] {
                assert_exact(&Problem { mask, heads: 2, batch: 2, coordinates: plain(len, &layout, ranks) });
                assert_exact(&Problem { mask, heads: 2, batch: 1, coordinates: packed(len, 5, len / 4, &layout, ranks) });
            }
        }
    }
}

#[test]
fn lowering_is_the_mask_or_more() {
    for sample in Sample::ALL {
        for (i, j) in (0..20u64).flat_map(|i| (0..20u64).map(move |j| (i, j))) {
            for (batch, head) in [(0, 0), (1, 1)] {
                let query = mask::Query { batch, head, row: i, position: i as i64 - 3 };
                let key = mask::Key { row: j, position: j as i64 - 3 };
                let (meant, lowered) = (sample.visible(&query, &key), sample.lowered(&query, &key));
                assert!(lowered == meant || (lowered && sample.spans(&query).is_none()), "{sample:?} {query:?} {key:?}");
            }
        }
    }
}

/// A causal mask that counts how often it is asked.
#[derive(Debug, Default)]
struct Counting(AtomicUsize);

impl Mask for Counting {
    fn visible(&self, query: &mask::Query, key: &mask::Key) -> bool {
        Sample::Causal.visible(query, key)
    }
    fn spans(&self, query: &mask::Query) -> Option<Spans> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Sample::Causal.spans(query)
    }
}

#[test]
fn every_query_is_asked_once_and_only_if_somebody_has_its_id() {
    let asked = |coordinates: &Coordinates| {
        let mask = Counting::default();
        Needs::of_queries(&mask, 4, 3, coordinates);
        mask.0.into_inner()
    };
    assert_eq!(asked(&plain(100, &Layout::Zigzag, 3)), 100);
    assert_eq!(asked(&packed(100, 7, 10, &Layout::Striped, 3)), 90);
}

#[test]
fn ids_and_positions_in_no_order_do_not_take_quadratic_time() {
    // 2 × 65 536 rows in no order, each position and almost each id once: a quadratic plan would take minutes
    let len = 65_536i64;
    let scramble = |row: i64| row * 40_503 % len;
    for with_ids in [false, true] {
        let mut coordinates = plain(len as usize, &Layout::Contiguous, 8);
        for shard in coordinates.q.iter_mut().chain(&mut coordinates.kv) {
            let shard = Arc::make_mut(shard);
            let noise: Vec<i64> = shard.rows.iter().map(|row| scramble(scramble(row) ^ 21_845)).collect();
            shard.positions = vec![noise.iter().copied().collect()];
            shard.segments = if with_ids { vec![noise.iter().map(|id| id ^ 3).collect()] } else { Vec::new() };
        }
        let needs = Needs::of_queries(&Sample::Window(0, 0), 1, 1, &coordinates);
        assert_eq!(needs.rows.iter().flatten().map(RowSet::count).sum::<u64>(), 65_536);
        assert_eq!(Needs::of_keys(&Sample::Window(0, 0), 1, 1, &coordinates), needs);
    }
}
