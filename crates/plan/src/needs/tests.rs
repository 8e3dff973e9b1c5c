//! Needs compared with an enumeration of all pairs, and the time for unordered ids.

pub(crate) mod samples;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use proptest::prelude::*;

use self::samples::{Problem, Sample, packed, plain, problems};
use super::Needs;
use crate::{Layout, RingShards};
use annulus_core::{Fingerprint, KeyIntervals, Mask, RowSet, mask};

fn rows(sets: &[Vec<BTreeSet<u64>>]) -> Vec<Vec<RowSet>> {
    sets.iter()
        .map(|owners| {
            owners.iter().map(|set| set.iter().map(|&row| row..row + 1).collect()).collect()
        })
        .collect()
}

/// Computes the needs of queries and of keys from all visible pairs.
fn enumerated(problem: &Problem) -> (Vec<Vec<RowSet>>, Vec<Vec<RowSet>>) {
    let ranks = problem.shards.q.len();
    let mut of_queries = vec![vec![BTreeSet::new(); ranks]; ranks];
    let mut of_keys = of_queries.clone();
    problem.pairs(|query_rank, query, key_rank, key| {
        of_queries[query_rank][key_rank].insert(key);
        of_keys[key_rank][query_rank].insert(query);
    });
    (rows(&of_queries), rows(&of_keys))
}

fn assert_exact(problem: &Problem) {
    let Problem { mask, heads, batch, shards } = problem;
    let (of_queries, of_keys) = enumerated(problem);
    let got = Needs::of_queries(&**mask, *heads, *batch, shards);
    assert_eq!(got.held, shards.kv.iter().map(|shard| shard.rows.len()).collect::<Vec<_>>());
    assert_eq!(got.rows, of_queries, "of queries: {problem:?}");
    let got = Needs::of_keys(&**mask, *heads, *batch, shards);
    assert_eq!(got.held, shards.q.iter().map(|shard| shard.rows.len()).collect::<Vec<_>>());
    assert_eq!(got.rows, of_keys, "of keys: {problem:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn needs_match_all_pairs(problem in problems()) {
        assert_exact(&problem);
    }
}

/// A causal mask that counts its evaluations.
#[derive(Debug, Default)]
struct Counting(AtomicUsize);

impl Mask for Counting {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("counting")
    }

    fn visible(&self, query: &mask::Query, key: &mask::Key) -> bool {
        Sample::Causal.visible(query, key)
    }
    fn intervals(&self, query: &mask::Query) -> Option<KeyIntervals> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Sample::Causal.intervals(query)
    }
}

#[test]
fn the_mask_is_evaluated_once_for_every_query_with_keys_of_its_id() {
    let evaluations = |shards: &RingShards| {
        let mask = Counting::default();
        Needs::of_queries(&mask, 4, 3, shards);
        mask.0.into_inner()
    };
    assert_eq!(evaluations(&plain(100, &Layout::Zigzag, 3)), 100);
    assert_eq!(evaluations(&packed(100, 7, 10, &Layout::Striped, 3)), 90);
}

#[test]
fn unordered_ids_and_positions_do_not_take_quadratic_time() {
    // 2 × 65,536 unordered rows, each position and almost each id once: an algorithm with quadratic
    // time needs minutes
    let len = 65_536i64;
    let scramble = |row: i64| row * 40_503 % len;
    for with_ids in [false, true] {
        let mut shards = plain(len as usize, &Layout::Contiguous, 8);
        for shard in shards.q.iter_mut().chain(&mut shards.kv) {
            let shard = Arc::make_mut(shard);
            let noise: Vec<i64> =
                shard.rows.iter().map(|row| scramble(scramble(row) ^ 21_845)).collect();
            shard.positions = vec![noise.iter().copied().collect()];
            shard.segments =
                if with_ids { vec![noise.iter().map(|id| id ^ 3).collect()] } else { Vec::new() };
        }
        let needs = Needs::of_queries(&Sample::Window(0, 0), 1, 1, &shards);
        assert_eq!(needs.rows.iter().flatten().map(RowSet::count).sum::<u64>(), 65_536);
        assert_eq!(Needs::of_keys(&Sample::Window(0, 0), 1, 1, &shards), needs);
    }
}
