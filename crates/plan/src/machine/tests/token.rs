//! Tokens of a sharded KV cache, against times computed by hand.

use super::*;
use crate::CacheShards;
use annulus_core::Error;

/// 10 pages of 64 rows and one of 10 on 4 ranks: rank 0 and 1 have 3 whole pages, rank 2 two and
/// the rest.
const CACHED: usize = 650;

fn shards(ranks: usize) -> CacheShards<'static> {
    CacheShards { ranks, page_rows: 64, placement: None }
}

#[test]
fn a_token_reads_the_cache_and_gathers_its_results() {
    // GQA 8:2, dims 64 and 32: a row has 2 · (64 + 32) · 4 bytes, a result 8 · (32 + 2) · 4
    let dims = Dims { q_heads: 8, value_dim: 32, ..Dims::new(1, CACHED, 8, 64).kv_heads(2) };
    let spec = Spec::new(dims, DType::F32);
    let traffic = shards(4).traffic(&spec).unwrap();
    assert_eq!((traffic.read, traffic.pairs, traffic.result), (192 * 768, 192 * 8, 1088));

    assert_eq!(traffic.further_pairs, 192 * (8 - 2));

    // rank 0 reads 147,456 bytes in 1.5 s, and 6 of 8 heads add 4 · 48 FLOPs for each pair in 0.25
    // s; 3 messages of 1,088 bytes at once in 0.1 + 3 · 0.5 s; two agreements of two rounds
    let mut machine = machine(link(0.1, 2.0 * 1088.0), 1e30);
    let of_further = 192.0 * 6.0 * 4.0 * 48.0;
    let rate = TokenRate { bandwidth: 147_456.0 / 1.5, further_heads: of_further / 0.25 };
    machine.rates[0].token = Some(rate);
    let token = machine.token(&spec, &shards(4)).unwrap();
    is_near(token.tiles, 1.75);
    is_near(token.exposed, 4.0 * 0.1 + 0.1 + 1.5);
    is_near(token.seconds, token.tiles + token.exposed);
    assert!(!token.reads_are_assumed);

    // without the rate of a token: 4 · 48 FLOPs for each pair and head
    let forward = 192.0 * 8.0 * 4.0 * 48.0 / 2.0;
    let rates = vec![ComputeRate { forward, token: None, ..machine.rates[0] }];
    let token = Machine { rates, ..machine.clone() }.token(&spec, &shards(4)).unwrap();
    assert!(token.reads_are_assumed);
    is_near(token.tiles, 2.0);
    // one rank sends nothing
    assert_eq!(machine.token(&spec, &shards(1)).unwrap().exposed, 0.0);
}

#[test]
fn results_cross_nodes_over_their_shared_network() {
    let spec = Spec::new(Dims::new(1, CACHED, 1, 64), DType::F32);
    let result = 66.0 * 4.0;
    let machine = Machine {
        ranks_per_node: 2,
        inside_node: Some(link(0.01, result)),
        node_bandwidth: Some(result / 2.0),
        ..machine(link(0.1, result), 1e30)
    };
    // 1 message inside the node takes 1 s, 2 of each of two ranks to the other node 8 s
    let token = machine.token(&spec, &shards(4)).unwrap();
    is_near(token.exposed, 4.0 * 0.1 + 0.1 + 8.0);
}

#[test]
fn masks_limit_the_rows_that_a_token_reads() {
    let rows = |mask: mask::SharedMask| {
        let spec = Spec { mask, ..Spec::new(Dims::new(1, CACHED, 1, 64), DType::F32) };
        shards(4).traffic(&spec).unwrap().pairs
    };
    assert_eq!(rows(Arc::new(mask::Causal::default())), 192);
    // the last 100 rows: 10 of page 10 on rank 2, 64 of page 9 on rank 1, 26 of page 8 on rank 0
    let window = mask::Window { left: Some(99), right: Some(0), first_visible: 0, offset: 0 };
    assert_eq!(rows(Arc::new(window)), 64);

    // the heads of a KV head may differ: what one of them needs is read once
    let heads = [9, 99, 19, 29].map(|left| {
        let window = mask::Window { left: Some(left), right: Some(0), first_visible: 0, offset: 0 };
        Arc::new(window) as mask::SharedMask
    });
    let dims = Dims { q_heads: 4, ..Dims::new(3, CACHED, 4, 64).kv_heads(2) };
    let per_head: mask::SharedMask = Arc::new(mask::PerHead(heads.to_vec()));
    let spec = Spec { mask: per_head, ..Spec::new(dims, DType::F32) };
    let traffic = shards(4).traffic(&spec).unwrap();
    // rank 1 has the most: of page 9 none and 64 rows for the first KV head, 10 and 20 for the
    // other
    assert_eq!(traffic.pairs, 3 * (64 + 10 + 20));
    assert_eq!(traffic.read, 3 * (64 + 20) * 128 * 4);
    // rank 2 has the most: 10 rows of page 10, to which both heads of both KV heads attend
    assert_eq!(traffic.further_pairs, 3 * (10 + 10));

    let reproducible = Spec { leaf_rows: Some(256), ..spec.clone() };
    assert!(matches!(shards(4).traffic(&reproducible), Err(Error::Unsupported { .. })));
    let none = CacheShards { page_rows: 0, ..shards(4) };
    assert_eq!(none.traffic(&spec).unwrap_err().to_string(), "page_rows: got 0, want at least 1");
}
