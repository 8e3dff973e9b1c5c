//! Exchanges of rows between ranks with the most and the fewest visible pairs, where whole chunks
//! are too long to balance the work.
//!
//! ```text
//! while a rank has more than `balanced` pairs:
//!     heavy = the rank with the most pairs
//!     for each rank light with fewer pairs than the mean, fewest first:
//!         least = min(pairs of heavy - target, mean - pairs of light)
//!         most  = target - pairs of light
//!         for chunks a of heavy and b of light, those with the fewest pairs per row of a first:
//!             n = a number of rows such that n rows at an end of a have `least` to `most` pairs
//!                 more than n rows at an end of b
//!             exchange these rows, if there is such a number
//! ```
//! Numbers of rows do not change. After an exchange heavy is below the target or light above the
//! mean, and neither is changed again for the same reason, so there are at most two exchanges per
//! rank. Each cuts at most two chunks. If no chunks differ by `least` pairs, a part of it is moved
//! (`PARTS`), in more exchanges.
//!
//! n rows and n + 1 rows differ by at most the pairs of one query. The target is 1 % above the
//! mean, so a number of rows is found in any two chunks that differ enough, if no query has more
//! than 1 % of the mean.

use std::ops::{Range, RangeInclusive};

use super::query_work::UnitWork;

/// Ranks with few pairs that are considered for an exchange, fewest first. With 8 of them, and of
/// [`CHUNK_PAIRS`], 20 draws each of `benches/record/documents.md` were balanced alike in
/// 1.3 times the time.
const LIGHT_RANKS: usize = 4;

/// Pairs of chunks of two ranks that are considered for an exchange.
const CHUNK_PAIRS: usize = 4;

/// Parts of the least number of pairs that an exchange moves, tried one after the other. With the
/// first alone, a draw of bimodal documents under a window leaves a rank of 8 at 4 % above the mean
/// (test `a_rank_gives_its_pairs_away_in_parts`).
const PARTS: [u128; 3] = [1, 4, 16];

/// Consecutive rows, or leaves, of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) rows: Range<u64>,
    /// Visible pairs of the queries.
    pub(super) work: u128,
}

/// Pairs of a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Pairs above which a rank gives rows away.
    pub(super) balanced: u128,
    /// Pairs that a rank has at most when it has received rows.
    pub(super) target: u128,
    pub(super) mean: u128,
}

/// Rows of an exchange: as many at one end of a chunk of each rank.
struct Exchange {
    /// Indices of the chunks of the heavy and the light rank.
    chunks: [usize; 2],
    /// True if the rows are the last ones of the chunk, else the first.
    are_last: [bool; 2],
    count: u64,
}

/// The chunks of all ranks.
pub(super) struct RowExchange<'a> {
    work: &'a UnitWork<'a>,
    limits: Limits,
    /// Rows of an exchange are a multiple of these.
    unit: u64,
    ranks: Vec<Vec<Chunk>>,
    /// Pairs of each rank.
    sums: Vec<u128>,
    /// Ranks by pairs, fewest first.
    by_work: Vec<usize>,
    /// Rows, and pairs of a row, of the chunks of two ranks, kept to reuse their memory.
    means: [Vec<RowMean>; 2],
}

/// Rows of a chunk, and the mean of their pairs, rounded down.
struct RowMean {
    rows: u64,
    pairs: u128,
}

/// Key of the order and indices of two chunks of which rows may be exchanged.
type Candidate = ([u128; 3], usize, usize);

impl<'a> RowExchange<'a> {
    pub(super) fn new(work: &'a UnitWork<'a>, ranks: Vec<Vec<Chunk>>, limits: Limits) -> Self {
        let sum = |chunks: &Vec<Chunk>| chunks.iter().map(|chunk| chunk.work).sum();
        let sums: Vec<u128> = ranks.iter().map(sum).collect();
        let mut by_work: Vec<usize> = (0..sums.len()).collect();
        by_work.sort_unstable_by_key(|&rank| (sums[rank], rank));
        Self { work, limits, unit: 1, ranks, sums, by_work, means: [Vec::new(), Vec::new()] }
    }

    /// Exchanges multiples of `unit` rows until no rank has too many pairs, or no exchange helps.
    /// Returns the chunks of each rank.
    pub(super) fn run(mut self, unit: u64) -> Vec<Vec<Chunk>> {
        self.unit = unit;
        for _ in 0..8 * self.ranks.len() {
            let Some(&heavy) = self.by_work.last() else { break };
            if self.sums[heavy] <= self.limits.balanced
                || !PARTS.into_iter().any(|part| self.relieve(heavy, part))
            {
                break;
            }
        }
        self.ranks
    }

    /// Exchanges rows of `heavy` with a rank of few pairs, and moves at least a `part`-th of the
    /// pairs that one of them has too many or too few. Returns false if there is no exchange.
    fn relieve(&mut self, heavy: usize, part: u128) -> bool {
        let Limits { target, mean, .. } = self.limits;
        for index in 0..LIGHT_RANKS.min(self.by_work.len()) {
            let light = self.by_work[index];
            if self.sums[light] >= mean {
                break;
            }
            let least = (self.sums[heavy] - target).min(mean - self.sums[light]);
            let wanted = least.div_ceil(part)..=target - self.sums[light];
            if let Some(exchange) = self.find(heavy, light, &wanted) {
                self.apply([heavy, light], &exchange);
                return true;
            }
        }
        false
    }

    /// Finds rows whose exchange moves a number of pairs in `wanted` from `heavy` to `light`.
    fn find(
        &mut self,
        heavy: usize,
        light: usize,
        wanted: &RangeInclusive<u128>,
    ) -> Option<Exchange> {
        for (means, rank) in self.means.iter_mut().zip([heavy, light]) {
            means.clear();
            means.extend(self.ranks[rank].iter().map(RowMean::of));
        }
        let few = self.candidates(*wanted.start());
        few.iter().flatten().find_map(|&(_, i, j)| self.find_rows([heavy, light], [i, j], wanted))
    }

    /// Returns the first pairs of chunks that are considered to move at least `least` pairs.
    fn candidates(&self, least: u128) -> [Option<Candidate>; CHUNK_PAIRS] {
        let mut few = [None; CHUNK_PAIRS];
        for (i, a) in self.means[0].iter().enumerate() {
            for (j, b) in self.means[1].iter().enumerate() {
                // the pairs that most rows would move if work were even within chunks
                let moved = a.pairs.saturating_sub(b.pairs) * u128::from(a.rows.min(b.rows));
                let suffices = moved >= least;
                if !suffices && self.unit != 1 {
                    continue;
                }
                // those that suffice, first those that cost least, and of equal ones the shortest;
                // then the others. A cut tile costs the key tiles of its queries, a whole one
                // nothing
                let cost = if self.unit == 1 { a.pairs } else { 0 };
                let order = if suffices { [0, cost, moved] } else { [1, 0, u128::MAX - moved] };
                insert_sorted(&mut few, (order, i, j));
            }
        }
        few
    }

    /// Finds rows at the ends of two chunks.
    fn find_rows(
        &self,
        ranks: [usize; 2],
        chunks: [usize; 2],
        wanted: &RangeInclusive<u128>,
    ) -> Option<Exchange> {
        let [a, b] = [0, 1].map(|side: usize| &self.ranks[ranks[side]][chunks[side]]);
        let rows = (a.rows.end - a.rows.start).min(b.rows.end - b.rows.start);
        let units = rows / self.unit;
        for are_last in [[true, false], [true, true], [false, false], [false, true]] {
            // a chunk of one unit has the same rows at both ends
            let is_repeated = |(chunk, is_last): (&Chunk, bool)| {
                !is_last && chunk.rows.end - chunk.rows.start == self.unit
            };
            if [(a, are_last[0]), (b, !are_last[1])].into_iter().any(is_repeated) {
                continue;
            }
            let ends = [(a, are_last[0]), (b, are_last[1])].map(|(chunk, is_last)| {
                let row = if is_last { chunk.rows.end } else { chunk.rows.start };
                (row, is_last, self.work.before(row))
            });
            // pairs that the exchange of `units` units moves
            let moved = |units: u64| {
                let count = units * self.unit;
                let [of_a, of_b] = ends.map(|(row, is_last, before)| {
                    if is_last {
                        before - self.work.before(row - count)
                    } else {
                        self.work.before(row + count) - before
                    }
                });
                of_a.saturating_sub(of_b)
            };
            if let Some(units) = bisect(units, wanted, moved) {
                return Some(Exchange { chunks, are_last, count: units * self.unit });
            }
        }
        None
    }

    fn apply(&mut self, ranks: [usize; 2], exchange: &Exchange) {
        for side in [0, 1] {
            let [from, to] = [ranks[side], ranks[1 - side]];
            let chunk = self.ranks[from].swap_remove(exchange.chunks[side]);
            let are_last = exchange.are_last[side];
            let given = end_of(&chunk.rows, are_last, exchange.count);
            let work = self.work.between(&given);
            let kept =
                if are_last { chunk.rows.start..given.start } else { given.end..chunk.rows.end };
            if !kept.is_empty() {
                self.ranks[from].push(Chunk { rows: kept, work: chunk.work - work });
            }
            self.ranks[to].push(Chunk { rows: given, work });
            self.sums[from] -= work;
            self.sums[to] += work;
        }
        self.by_work.retain(|rank| !ranks.contains(rank));
        for rank in ranks {
            let key = (self.sums[rank], rank);
            let at = self.by_work.partition_point(|&other| (self.sums[other], other) < key);
            self.by_work.insert(at, rank);
        }
    }
}

impl RowMean {
    fn of(chunk: &Chunk) -> Self {
        let rows = chunk.rows.end - chunk.rows.start;
        Self { rows, pairs: chunk.work / u128::from(rows.max(1)) }
    }
}

/// Inserts a candidate in ascending order; the last one is removed if there is no place.
fn insert_sorted(few: &mut [Option<Candidate>; CHUNK_PAIRS], new: Candidate) {
    let is_after = |of: &Option<Candidate>| of.is_none_or(|of| new < of);
    if few.last().is_some_and(is_after) {
        let index = few.partition_point(|of| !is_after(of));
        few[index..].rotate_right(1);
        few[index] = Some(new);
    }
}

/// Returns a number of units up to `units` that moves a number of pairs in `wanted`, all of them if
/// they do. `moved` is 0 without units.
fn bisect(units: u64, wanted: &RangeInclusive<u128>, moved: impl Fn(u64) -> u128) -> Option<u64> {
    let mut too_few = 0;
    let mut too_many = units.saturating_add(1);
    let mut middle = units;
    while too_few < middle {
        let pairs = moved(middle);
        if pairs < *wanted.start() {
            too_few = middle;
        } else if pairs > *wanted.end() {
            too_many = middle;
        } else {
            return Some(middle);
        }
        middle = too_few + (too_many - too_few) / 2;
    }
    None
}

/// Returns the last or the first `count` of `rows`.
const fn end_of(rows: &Range<u64>, are_last: bool, count: u64) -> Range<u64> {
    if are_last { rows.end - count..rows.end } else { rows.start..rows.start + count }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ndarray::Array2;

    use super::{super::query_work::QueryWork, *};
    use crate::{Layout, RingShards};
    use annulus_core::{
        Batch, DType, Dims, Spec,
        mask::{Causal, Everything, SharedMask},
    };

    fn pairs(len: usize, mask: SharedMask, batch: &Batch) -> QueryWork {
        let spec = Spec { mask, ..Spec::new(Dims::new(1, len, 1, 1), DType::F32) };
        let dims = &spec.dims;
        let whole = RingShards::of_batch(dims, spec.alignment, &Layout::Contiguous, 1, batch);
        whole.and_then(|whole| QueryWork::new(&spec, &whole)).expect("a valid spec")
    }

    /// Exchanges rows between ranks with one chunk of `rows` rows each. Returns the chunks of each.
    fn exchanged(pairs: &QueryWork, ranks: u64, rows: u64) -> Vec<Vec<Chunk>> {
        let work = UnitWork { pairs, unit: 1, rows: ranks * rows };
        let chunk = |rank| {
            let rows = rank * rows..(rank + 1) * rows;
            vec![Chunk { work: work.before(rows.end) - work.before(rows.start), rows }]
        };
        let mean = work.before(ranks * rows) / u128::from(ranks);
        let limits = Limits { balanced: mean * 102 / 100, target: mean * 101 / 100, mean };
        RowExchange::new(&work, (0..ranks).map(chunk).collect(), limits).run(1)
    }

    #[test]
    fn parts_of_chunks_are_exchanged_until_the_work_is_balanced() {
        let work = pairs(4096, Arc::new(Causal::default()), &Batch::default());
        for ranks in [2, 8, 64] {
            let rows = 4096 / ranks;
            let mean = work.before(4096) / u128::from(ranks);
            let of_ranks = exchanged(&work, ranks, rows);
            for chunks in &of_ranks {
                let len = |chunk: &Chunk| chunk.rows.end - chunk.rows.start;
                assert_eq!(chunks.iter().map(len).sum::<u64>(), rows);
                let pairs: u128 = chunks.iter().map(|chunk| chunk.work).sum();
                assert!(pairs <= mean * 102 / 100, "{pairs} of {mean}: {of_ranks:?}");
                for Chunk { rows, work: of_chunk } in chunks {
                    assert_eq!(*of_chunk, work.before(rows.end) - work.before(rows.start));
                }
            }
            // every row once
            let mut all: Vec<&Chunk> = of_ranks.iter().flatten().collect();
            all.sort_by_key(|chunk| chunk.rows.start);
            assert!(all.windows(2).all(|two| two[0].rows.end == two[1].rows.start));
            assert_eq!((all[0].rows.start, all[all.len() - 1].rows.end), (0, 4096));
            // at most two exchanges of a rank, each of which cuts two chunks
            assert!(all.len() as u64 <= ranks + 4 * ranks, "{of_ranks:?}");
        }
    }

    #[test]
    fn the_first_candidates_are_kept_in_order() {
        let all = [7, 3, 9, 1, 5, 0, 8, 2].map(|key: u128| ([0, key, 1], key as usize, 0));
        for count in 0..=all.len() {
            let mut few = [None; CHUNK_PAIRS];
            all[..count].iter().for_each(|&new| insert_sorted(&mut few, new));
            let mut want = all[..count].to_vec();
            want.sort_unstable();
            want.truncate(CHUNK_PAIRS);
            assert_eq!(few.into_iter().flatten().collect::<Vec<_>>(), want);
        }
    }

    #[test]
    fn a_query_is_not_divided() {
        // query 5 has all pairs, so that an exchange would only move them to the other rank
        let q_ids = Array2::from_shape_fn((1, 64), |(_, row)| if row == 5 { 0 } else { -1 });
        let batch = Batch {
            q_segment_ids: Some(q_ids),
            kv_segment_ids: Some(Array2::zeros((1, 64))),
            ..Batch::default()
        };
        let work = pairs(64, Arc::new(Everything), &batch);
        let chunks = |of: Vec<Vec<Chunk>>| -> Vec<_> {
            of.into_iter().flatten().map(|chunk| (chunk.rows, chunk.work)).collect()
        };
        assert_eq!(chunks(exchanged(&work, 2, 32)), [(0..32, 64), (32..64, 0)]);
    }
}
