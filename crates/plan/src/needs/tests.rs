//! Needs compared with an enumeration of all pairs, and the time for unordered ids.
//! The masks and shards here are also those of the tests of work and schedules. They follow the
//! definitions literally.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use annulus_core::{
    Alignment, Dims, Fingerprint, KeyIntervals, Mask, RowSet, Runs, Shard, Side,
    mask::{self, Band, ChunkedCausal, Key, Query},
};
use proptest::prelude::*;

use super::Needs;
use crate::{CustomLayout, Layout, RingShards};

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

/// One small mask of each kind.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sample {
    Full,
    Causal,
    /// Left and right.
    Window(i64, i64),
    /// Causal window, and the first keys.
    FirstAndWindow(i64, i64),
    Chunked(i64),
    /// A causal window of another width for each head.
    PerHead,
    /// A window of another width for each batch row.
    PerBatch,
    /// Near keys of the same parity of row numbers, without intervals.
    Parity,
    /// Causal for even queries, full for odd queries; intervals for even queries only.
    Half,
}

impl Mask for Sample {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text(&format!("{self:?}"))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let i = query.position;
        let j = key.position;
        match *self {
            Self::Full => true,
            Self::Causal => j <= i,
            Self::Window(left, right) => i - left <= j && j <= i + right,
            Self::FirstAndWindow(first, left) => j <= i && (j < first || j >= i - left),
            Self::Chunked(size) => i.div_euclid(size) == j.div_euclid(size) && j <= i,
            Self::PerHead => j <= i && j >= i - 3 * query.head as i64,
            Self::PerBatch => j >= i && j <= i + query.batch as i64,
            Self::Parity => query.row % 2 == key.row % 2 && (i - 6..=i + 6).contains(&j),
            Self::Half => !query.row.is_multiple_of(2) || j <= i,
        }
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        let i = query.position;
        let to = |low| KeyIntervals::one(low, i + 1);
        match *self {
            Self::Full => Some(KeyIntervals::everything()),
            Self::Causal => Some(to(i64::MIN)),
            Self::Window(left, right) => Some(KeyIntervals::one(i - left, i + right + 1)),
            Self::FirstAndWindow(first, left) => {
                Some(KeyIntervals::one(i64::MIN, first.min(i + 1)).or(&to(i - left)))
            }
            Self::Chunked(size) => Some(to(i.div_euclid(size) * size)),
            Self::PerHead => Some(to(i - 3 * query.head as i64)),
            Self::PerBatch => Some(KeyIntervals::one(i, i + query.batch as i64 + 1)),
            Self::Parity => None,
            Self::Half => query.row.is_multiple_of(2).then(|| to(i64::MIN)),
        }
    }

    fn bound(&self, query: &Query) -> KeyIntervals {
        let near = || KeyIntervals::one(query.position - 6, query.position + 7);
        self.intervals(query).unwrap_or_else(|| {
            if matches!(self, Self::Parity) { near() } else { KeyIntervals::everything() }
        })
    }

    fn band(&self, _: usize, head: usize) -> Option<Band> {
        let everything = Band::everything();
        match *self {
            Self::Full => Some(everything),
            Self::Causal => Some(everything.ending(1)),
            Self::Window(left, right) => {
                Some(everything.starting((-left).into()).ending((right + 1).into()))
            }
            Self::Chunked(size) => ChunkedCausal { size: size as u64 }.band(0, head),
            Self::PerHead => Some(everything.starting(-3 * head as i128).ending(1)),
            _ => None,
        }
    }

    fn per_head(&self) -> bool {
        matches!(self, Self::PerHead)
    }

    fn per_batch(&self) -> bool {
        matches!(self, Self::PerBatch)
    }
}

impl Sample {
    /// One of each kind.
    pub(crate) const ALL: [Self; 10] = [
        Self::Full,
        Self::Causal,
        Self::Window(3, 0),
        Self::Window(2, 4),
        Self::FirstAndWindow(2, 3),
        Self::Chunked(5),
        Self::PerHead,
        Self::PerBatch,
        Self::Parity,
        Self::Half,
    ];
}

/// A problem small enough to count its pairs one by one.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) mask: Arc<dyn Mask>,
    pub(crate) heads: usize,
    pub(crate) batch: usize,
    pub(crate) shards: RingShards,
}

/// Returns the shards of self-attention over `len` rows, without a batch.
pub(crate) fn plain(len: usize, layout: &Layout, ranks: usize) -> RingShards {
    RingShards::plain(&Dims::new(1, len, 1, 1), Alignment::TopLeft, layout, ranks)
}

/// Returns the shards of self-attention over packed documents of `document` rows each; the last
/// `padding` rows are padding.
pub(crate) fn packed(
    len: usize,
    document: i64,
    padding: usize,
    layout: &Layout,
    ranks: usize,
) -> RingShards {
    let mut shards = plain(len, layout, ranks);
    for shard in shards.q.iter_mut().chain(&mut shards.kv) {
        let id = |row: i64| if row < (len - padding) as i64 { row / document } else { -1 };
        Arc::make_mut(shard).segments = vec![shard.rows.iter().map(id).collect()];
    }
    shards
}

impl Problem {
    /// Returns row number, position and segment id of one local row.
    fn row(shard: &Shard, batch: usize, row: usize) -> (u64, i64, Option<i64>) {
        let of = |lists: &[Runs]| {
            lists.get(if lists.len() > 1 { batch } else { 0 }).and_then(|list| list.iter().nth(row))
        };
        (
            shard.rows.iter().nth(row).unwrap().cast_unsigned(),
            of(&shard.positions).unwrap(),
            of(&shard.segments),
        )
    }

    /// Calls `found` for every pair that may be visible: (query's rank, its row, key's rank, its
    /// row).
    pub(crate) fn pairs(&self, mut found: impl FnMut(usize, u64, usize, u64)) {
        let expanded = |shards: &[Arc<Shard>], batch| {
            let mut all = Vec::new();
            for (rank, shard) in shards.iter().enumerate() {
                all.extend(
                    (0..shard.rows.len())
                        .map(|row| (rank, row, Self::row(shard, batch, annulus_core::index(row)))),
                );
            }
            all
        };
        for batch in 0..self.batch {
            let queries = expanded(&self.shards.q, batch);
            let keys = expanded(&self.shards.kv, batch);
            for &(user, i, (row, position, q_id)) in &queries {
                for head in 0..self.heads {
                    let query = Query { batch, head, row, position };
                    for &(owner, j, (_, position, kv_id)) in &keys {
                        let same =
                            q_id.is_none() || kv_id.is_none() || (q_id == kv_id && q_id >= Some(0));
                        if same && self.mask.bound(&query).contains(position) {
                            found(user, i, owner, j);
                        }
                    }
                }
            }
        }
    }
}

/// Returns any mask, layout and lengths on up to 9 ranks, with or without ids and explicit
/// positions, each with one list or one per batch row.
pub(crate) fn problems() -> impl Strategy<Value = Problem> {
    problems_of(9, 23)
}

/// As [`problems`], on up to `most_ranks` ranks with up to `most_rows` rows on each side.
pub(crate) fn problems_of(most_ranks: usize, most_rows: usize) -> impl Strategy<Value = Problem> {
    let numbers = |numbers: std::ops::Range<i64>, len| prop::collection::vec(numbers, len);
    let rows = 0..=most_rows;
    let sizes = (1..=most_ranks, rows.clone(), rows, 1usize..4, 0usize..4);
    (0..Sample::ALL.len(), sizes).prop_flat_map(
        move |(mask, (ranks, q_len, kv_len, batch, layout))| {
            let lists = move |range: std::ops::Range<i64>, len: usize| {
                prop_oneof![Just(0usize), Just(1), Just(batch)].prop_flat_map(move |lists| {
                    prop::collection::vec(numbers(range.clone(), len), lists)
                })
            };
            let side = |len| {
                let assigned = prop::collection::vec(0..ranks, len);
                (lists(-3..12, len), lists(-10..30, len), assigned)
                    .prop_map(|(ids, positions, assigned)| SideRows { ids, positions, assigned })
            };
            (side(q_len), side(kv_len), any::<bool>()).prop_map(move |(q, kv, sorted)| {
                let custom = Layout::Custom(Arc::new(CustomLayout {
                    q: q.custom_shards(ranks),
                    kv: kv.custom_shards(ranks),
                }));
                let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped, custom];
                let layout = &layouts[layout];
                let shards = RingShards {
                    q: q.shards(layout, Side::Q, ranks, sorted),
                    kv: kv.shards(layout, Side::Kv, ranks, sorted),
                };
                Problem { mask: Arc::new(Sample::ALL[mask]), heads: 2, batch, shards }
            })
        },
    )
}

/// Random properties of all rows of one side.
#[derive(Debug, Clone)]
struct SideRows {
    /// Segment ids times 4: no list, one, or one per batch row.
    ids: Vec<Vec<i64>>,
    /// Explicit positions: no list, one, or one per batch row.
    positions: Vec<Vec<i64>>,
    /// Rank of each row in a custom layout.
    assigned: Vec<usize>,
}

impl SideRows {
    /// Returns the rows of each rank in descending order, for a custom layout.
    fn custom_shards(&self, ranks: usize) -> Vec<Runs> {
        let of_rank = |rank| {
            (0..self.assigned.len())
                .rev()
                .filter(|&row| self.assigned[row] == rank)
                .map(|row| row as i64)
                .collect()
        };
        (0..ranks).map(of_rank).collect()
    }

    fn shards(&self, layout: &Layout, side: Side, ranks: usize, sorted: bool) -> Vec<Arc<Shard>> {
        let select = |lists: &[Vec<i64>], rows: &Runs| {
            lists
                .iter()
                .map(|list| rows.iter().map(|row| list[row as usize]).collect())
                .collect::<Vec<Runs>>()
        };
        // divided by 4, random ids form runs of equal ids, but are unordered
        let mut ids: Vec<Vec<i64>> =
            self.ids.iter().map(|ids| ids.iter().map(|id| id.div_euclid(4)).collect()).collect();
        if sorted {
            ids.iter_mut().for_each(|ids| ids.sort_unstable());
        }
        let shard = |rank| {
            let rows = layout.shard(side, self.assigned.len(), rank, ranks);
            let positions = if self.positions.is_empty() {
                vec![rows.clone()]
            } else {
                select(&self.positions, &rows)
            };
            Arc::new(Shard { segments: select(&ids, &rows), positions, rows })
        };
        (0..ranks).map(shard).collect()
    }
}
