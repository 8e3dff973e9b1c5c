//! The KV cache in the reproducible order: its bits are those of one attention over all rows.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use annulus::{
    Attention, Cache, CacheShape, DType, Dims, Division, Element, Error, LocalCache, LocalRing,
    Result, Runtime, Setup, SinkShape, Tensors,
    bias::Alibi,
    comm::threads::{each_rank, ring},
};
use annulus_conformance::{
    Altered,
    suite::kv_cache::{Sequence, numbers},
};
use annulus_core::{
    Fingerprint, KeyIntervals, LEAF_ROWS, LeafMerges, Mask, RankLeaves, RankShard, mask,
};
use half::bf16;
use ndarray::{Array4, s};
use proptest::prelude::*;

/// Rows of the sequence: 6 leaves, of which the last one is short.
const ROWS: usize = 1399;

const DIMS: Dims = Dims {
    batch: 2,
    q_len: ROWS,
    kv_len: ROWS,
    q_heads: 4,
    kv_heads: 2,
    head_dim: 8,
    value_dim: 6,
};

const SHAPE: CacheShape = CacheShape::new(2, 4, 8).kv_heads(2).value_dim(6);

/// Bits of out `[b, queries, q_heads, dv]` and lse `[b, q_heads, queries]`.
type Bits = (Vec<u64>, Vec<u64>);

fn bits<'a, T: Element>(numbers: impl Iterator<Item = &'a T>) -> Vec<u64> {
    numbers.map(|x| x.to_f64().to_bits()).collect()
}

/// Returns the tensors of the whole sequence.
fn sequence<T: Element>(attention: &Attention) -> Sequence<T> {
    Sequence::new(DIMS, attention.spec(DIMS).unwrap().sinks)
}

/// Appends rows, which every rank has or each rank its own, and attends with the queries of the
/// last `queries` of them.
fn step<T: Element>(
    all: &Sequence<T>,
    cache: &mut Cache,
    rows: Range<usize>,
    queries: usize,
    sharded: bool,
) -> Result<Bits> {
    let own: Vec<usize> = if sharded {
        let own = cache.own_rows(rows.len())?;
        own.iter().map(|row| rows.start + row as usize).collect()
    } else {
        rows.clone().collect()
    };
    let of_rows = |x: &Array4<T>| x.select(ndarray::Axis(1), &own);
    let (k, v) = (of_rows(&all.k), of_rows(&all.v));
    if sharded {
        cache.append_own(rows.len(), k.view(), v.view())?;
    } else {
        cache.append(k.view(), v.view())?;
    }
    let q = all.q.slice(s![.., rows.end - queries..rows.end, .., ..]);
    let predicted = cache.bytes_predicted(queries);
    assert_eq!(predicted, cache.bytes_predicted_at(cache.len(), queries));
    let forward = cache.attend(q, all.sinks.as_ref().map(|sinks| sinks.view()))?;
    let report = forward.reports[0];
    assert_eq!((report.bytes_sent, report.bytes_predicted), (predicted, predicted));
    Ok((bits(forward.out.iter()), bits(forward.lse.iter())))
}

/// Returns the bits of one reproducible attention over the first `end` rows, of their last
/// `queries` queries.
fn one_shot<T: Element>(
    all: &Sequence<T>,
    attention: &Attention,
    end: usize,
    queries: usize,
) -> Bits {
    let dims = Dims { q_len: end, kv_len: end, ..DIMS };
    let attention = Setup::from((
        attention.clone().dtype(T::DTYPE),
        Division::new(),
        Runtime::new().threads(1),
    ));
    let mut whole = LocalRing::new(&attention, dims, 1).unwrap();
    let rows = s![.., ..end, .., ..];
    let tensors = Tensors::new(all.q.slice(rows), all.k.slice(rows), all.v.slice(rows));
    let tensors = match &all.sinks {
        Some(sinks) => tensors.with_softmax_aux(sinks.view()),
        None => tensors,
    };
    let forward = whole.forward(&tensors).unwrap();
    (
        bits(forward.out.slice(s![.., end - queries.., .., ..]).iter()),
        bits(forward.lse.slice(s![.., .., end - queries..]).iter()),
    )
}

/// Rows that are appended, and how many of them attend.
#[derive(Debug, Clone, Copy)]
struct Append {
    rows: usize,
    queries: usize,
    sharded: bool,
}

const fn append(rows: usize, queries: usize) -> Append {
    Append { rows, queries, sharded: false }
}

/// A prefill over two pages, tokens around the end of a leaf, a sharded chunk, chunks, a token.
const STEPS: [Append; 7] = [
    append(510, 7),
    append(1, 1),
    append(1, 1),
    append(1, 1),
    Append { rows: 500, queries: 3, sharded: true },
    append(385, 65),
    append(1, 1),
];

fn reproducible() -> Attention {
    Attention::new().causal(true).reproducible(true)
}

/// Computes `steps` on each number of ranks and with each page size, and compares the bits on every
/// rank with those of one attention over the rows so far.
fn compare<T: Element>(
    name: &str,
    attention: &Attention,
    ranks: &[usize],
    page_rows: &[u64],
    steps: &[Append],
) {
    let attention = attention.clone().dtype(T::DTYPE);
    let all = sequence::<T>(&attention);
    let mut want: BTreeMap<usize, Bits> = BTreeMap::new();
    for &ranks in ranks {
        for &page_rows in page_rows {
            let of_ranks = each_rank(ring(ranks), |_, transport| {
                let shape = SHAPE.page_rows(page_rows);
                let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
                let mut end = 0;
                let step = |step: &Append| {
                    let rows = end..end + step.rows;
                    end = rows.end;
                    self::step(&all, &mut cache, rows, step.queries, step.sharded)
                };
                steps.iter().map(step).collect::<Result<Vec<Bits>>>()
            })
            .unwrap();
            let mut end = 0;
            for (number, step) in steps.iter().enumerate() {
                end += step.rows;
                let one_shot = || one_shot(&all, &attention, end, step.queries);
                let want = want.entry(end).or_insert_with(one_shot);
                for (rank, of_rank) in of_ranks.iter().enumerate() {
                    let place = format!("{name}, step {number}, rank {rank} of {ranks}");
                    assert!(of_rank[number] == *want, "{place}, pages of {page_rows} rows");
                }
            }
        }
    }
}

#[test]
fn bits_are_those_of_one_attention_on_any_number_of_ranks_and_with_any_pages() {
    let attention = reproducible();
    let pages = [256, 512, 1024, 8192];
    compare::<f32>("f32", &attention, &[1, 2, 3, 8], &pages, &STEPS);
    compare::<bf16>("bf16", &attention, &[1, 2, 3, 8], &pages, &STEPS);
    compare::<f64>("f64", &attention, &[1, 3], &pages, &STEPS);
}

#[test]
fn bits_are_those_of_one_attention_with_every_mask_and_option() {
    let cases = [
        ("window", reproducible().sliding_window(300, 0)),
        ("window, first keys", reproducible().sliding_window(9, 0).attention_sink_size(3)),
        ("chunks", Attention::new().reproducible(true).chunk_size(512)),
        ("soft cap, scale", reproducible().logits_soft_cap(0.7).softmax_scale(-0.9)),
        ("ALiBi", reproducible().bias_function(Arc::new(Alibi::published(4)))),
        ("sinks of heads", reproducible().softmax_aux(SinkShape::per_head(2))),
        ("sinks", reproducible().sliding_window(2, 0).softmax_aux(SinkShape::shared(3))),
        ("dropout", reproducible().dropout(0.3, 11)),
        ("logits", reproducible().logits_dtype(DType::Bf16)),
    ];
    for (name, attention) in cases {
        compare::<f32>(name, &attention, &[2, 3], &[256, 512], &STEPS);
        compare::<bf16>(name, &attention, &[8], &[256], &STEPS);
    }
}

#[test]
fn not_finite_and_invisible_rows_have_the_bits_of_one_attention() {
    let attention = reproducible().sliding_window(40, 0);
    for (name, number, row) in [
        ("NaN key", f64::NAN, 300),
        ("infinite key", f64::INFINITY, 1023),
        ("-inf key", f64::NEG_INFINITY, 520),
    ] {
        let mut all = sequence::<f32>(&attention);
        all.k.slice_mut(s![0, row, 0, ..]).fill(number as f32);
        all.v.slice_mut(s![1, row, 1, 2]).fill(f32::NAN);
        for queries in [1, 200] {
            let end = row + queries;
            let want = one_shot(&all, &attention, end, queries);
            let work = |_, transport| {
                let mut cache = Cache::new(&attention, &Runtime::new(), SHAPE, transport)?;
                step(&all, &mut cache, 0..end, queries, false)
            };
            for of_rank in each_rank(ring(3), work).unwrap() {
                assert!(of_rank == want, "{name}, {queries} queries");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn bits_do_not_depend_on_appends(
        ranks in 1usize..6,
        leaves in 0u32..4,
        appends in proptest::collection::vec((1usize..400, 1usize..9, any::<bool>()), 1..6),
    ) {
        let mut left = ROWS;
        let steps = appends.into_iter().map_while(|(rows, queries, sharded)| {
            let rows = rows.min(left);
            left -= rows;
            (rows > 0).then_some(Append { rows, queries: queries.min(rows), sharded })
        });
        let page_rows = LEAF_ROWS << leaves;
        let steps: Vec<_> = steps.collect();
        compare::<f32>("appends", &reproducible(), &[ranks], &[page_rows], &steps);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// Page 2·i + 1 and page 2·i + 2 are siblings.
    Shifted,
    /// The operands of every merge are exchanged.
    Mirrored,
}

impl Mistake {
    /// Returns a shard whose tree over pages is wrong.
    fn of_shard(self, shard: &RankShard) -> Result<RankShard> {
        let mut shard = shard.clone();
        // the attention over pages has one query of dim 1
        if shard.spec.dims.head_dim == 1
            && let Some(leaves) = &shard.leaves
        {
            let numbers = || leaves.keys.steps().iter().map(|step| step.leaf);
            let wrong = match self {
                Self::None => leaves.keys.clone(),
                Self::Shifted => LeafMerges::of_arrivals(numbers().map(|leaf| leaf + 1))?,
                Self::Mirrored => LeafMerges::of_arrivals(numbers().map(|leaf| 7 - leaf))?,
            };
            let keys = wrong.with_leaves(numbers());
            let leaves = RankLeaves { keys, ..RankLeaves::clone(leaves) };
            shard.leaves = Some(Arc::new(leaves));
        }
        Ok(shard)
    }
}

#[test]
fn a_wrong_tree_over_pages_changes_bits() {
    let attention = reproducible();
    let all = sequence::<f32>(&attention);
    let want = one_shot(&all, &attention, ROWS, 1);
    for mistake in [Mistake::None, Mistake::Shifted, Mistake::Mirrored] {
        let work = |_, transport| {
            let shard = move |shard: &RankShard| mistake.of_shard(shard);
            let backend = Altered::new(|same| same, shard)?;
            let mut cache =
                Cache::with_backend(&attention, &Runtime::new(), SHAPE, backend, transport)?;
            step(&all, &mut cache, 0..ROWS, 1, false)
        };
        for of_rank in each_rank(ring(2), work).unwrap() {
            assert_eq!(of_rank == want, mistake == Mistake::None, "{mistake:?}");
        }
    }
    // the default order has other bits
    let default = Attention::new().causal(true);
    let work = |_, transport| {
        let mut cache = Cache::new(&default, &Runtime::new(), SHAPE, transport)?;
        step(&all, &mut cache, 0..ROWS, 1, false)
    };
    assert!(each_rank(ring(2), work).unwrap()[0] != want);
}

#[test]
fn long_prefills_are_computed_in_rounds() {
    // a page has 36 bytes of a score row; 9 pages of rank 0 and half of the 512 score rows of a
    // query fill a message of 1 MiB with 12 queries, so 40 take 4 rounds of 10
    let causal = reproducible();
    let all_pages = |rank: usize, _: Range<usize>| [9, 8][rank];
    compare_prefill(&causal, 40, 10, all_pages);
    // a window of 4 keys: the pages 14 to 16, of which rank 0 has two, fill a message with 56
    // queries, so 700 take 13 rounds of 54. A round sends the pages of its own queries
    let window = reproducible().sliding_window(3, 0);
    let pages = |rank: usize, queries: Range<usize>| {
        let pages = (queries.start - 3) / 256..=(queries.end - 1) / 256;
        pages.filter(|page| page % 2 == rank).count()
    };
    compare_prefill(&window, 700, 54, pages);
}

/// Prefills 17 pages on two ranks; the last `queries` rows attend in rounds of `round` queries.
/// Compares the result with one attention, and the bytes with the `pages` that a rank sends in each
/// round.
fn compare_prefill(
    attention: &Attention,
    queries: usize,
    round: usize,
    pages: impl Fn(usize, Range<usize>) -> usize,
) {
    const ROWS: usize = 17 * 256;
    let dims = Dims::new(1, ROWS, 512, 1).kv_heads(1).value_dim(7);
    let shape = CacheShape::new(1, 512, 1).kv_heads(1).value_dim(7);
    let [k, v] = [1, 7].map(|dim| numbers::<f32>(dim, [1, ROWS, 1, dim as usize]));
    let q = numbers::<f32>(5, [1, ROWS, 512, 1]);
    let first = ROWS - queries;
    let last = s![.., first.., .., ..];
    let bytes = |rank: usize| -> usize {
        let rounds = (first..ROWS).step_by(round).map(|start| start..ROWS.min(start + round));
        rounds.map(|rows| rows.len() * 256 * (pages(rank, rows) * 36 + 8 * 4)).sum()
    };
    let bytes = [bytes(0) as u64, bytes(1) as u64];
    let of_ranks = each_rank(ring(2), |rank, transport| {
        let mut cache = Cache::new(attention, &Runtime::new(), shape, transport)?;
        cache.append(k.view(), v.view())?;
        assert_eq!(cache.bytes_predicted(queries), bytes[rank], "rank {rank}");
        let forward = cache.attend(q.slice(last), None)?;
        assert_eq!(forward.reports[0].bytes_sent, bytes[rank], "rank {rank}");
        // messages of one round: 2 MiB to send, 1 MiB to receive; keys and values are short
        assert!(cache.buffer_bytes() < 4 << 20);
        Ok(bits(forward.out.iter()))
    })
    .unwrap();
    let mut whole =
        LocalRing::new((attention, Division::new(), Runtime::new().threads(2)), dims, 1).unwrap();
    let forward = whole.forward(&Tensors::new(q.view(), k.view(), v.view())).unwrap();
    let want = bits(forward.out.slice(last).iter());
    assert!(of_ranks.iter().all(|of_rank| *of_rank == want));
}

/// Queries from row 600 on attend to no key, those before to all keys before row 256.
#[derive(Debug)]
struct FirstPage;

impl Mask for FirstPage {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("first page")
    }

    fn visible(&self, query: &mask::Query, key: &mask::Key) -> bool {
        query.position < 600 && key.position < 256
    }

    fn intervals(&self, query: &mask::Query) -> Option<KeyIntervals> {
        let end = if query.position < 600 { 256 } else { 0 };
        Some(KeyIntervals::one(0, end))
    }
}

#[test]
fn pages_without_visible_keys_are_not_sent() {
    // bits with sinks, and with queries that attend to no page
    let sinks = Attention::new().reproducible(true).mask(Arc::new(FirstPage));
    let sinks = sinks.softmax_aux(SinkShape::per_head(1));
    let steps = [append(599, 2), append(2, 2), append(300, 5), append(1, 1)];
    compare::<f32>("first page", &sinks, &[1, 2, 3], &[256, 512], &steps);
    let attention = Attention::new().reproducible(true).mask(Arc::new(FirstPage));
    let all = sequence::<f32>(&attention);
    let of_ranks = each_rank(ring(3), |_, transport| {
        let mut cache = Cache::new(&attention, &Runtime::new(), SHAPE, transport)?;
        step(&all, &mut cache, 0..590, 1, false)?;
        let visible = cache.bytes_predicted(1);
        step(&all, &mut cache, 590..1300, 1, false)?;
        Ok((visible, cache.bytes_predicted(1), cache.bytes_predicted(1301)))
    });
    // 8 score rows on 3 ranks: 2, 3 and 3. A page has 8 numbers of each, a result 7, for two ranks
    let results = |rows: u64| 2 * rows * 7 * 4;
    let pages = (8 - 2) * 8 * 4;
    let want = vec![
        (results(2) + pages, results(2), 0),
        (results(3), results(3), 0),
        (results(3), results(3), 0),
    ];
    assert_eq!(of_ranks.unwrap(), want);
}

#[test]
fn pages_that_are_no_nodes_of_the_tree_are_refused() {
    let attention = reproducible();
    for page_rows in [0, 1, 64, 128, 255, 257, 768, 1280] {
        let error = LocalCache::new(&attention, &Runtime::new(), SHAPE.page_rows(page_rows), 2)
            .unwrap_err();
        let named =
            matches!(error, Error::InvalidArgument { argument, .. } if argument == "page_rows");
        assert!(named, "{page_rows}");
    }
    let wide = CacheShape::new(1, 1, 8).value_dim(1024);
    let error = LocalCache::new(&attention, &Runtime::new(), wide, 1).unwrap_err().to_string();
    assert_eq!(error, "value_dim: got 1024, want at most 1023 in the reproducible order");
    assert!(LocalCache::new(&attention, &Runtime::new(), wide.value_dim(1023), 1).is_ok());
    assert_eq!(
        LocalCache::new(&attention, &Runtime::new(), SHAPE, 2).unwrap().page_rows(),
        LEAF_ROWS
    );
    // a rank in the other order is named on both
    let of_ranks = each_rank(ring(2), |rank, transport| {
        let attention = attention.clone().reproducible(rank == 0);
        let shape = SHAPE.page_rows(256);
        Ok(Cache::new(&attention, &Runtime::new(), shape, transport).map(drop).unwrap_err())
    });
    for error in of_ranks.unwrap() {
        assert!(matches!(error, Error::RankMismatch { .. }), "{error:?}");
    }
}
