//! Layouts that balance the work of a batch of documents, under any mask.
//!
//! ```text
//! for m = 1, 2, 4, …:                             # chunks per rank
//!     cut the rows into m·ranks chunks of equal length; w[c] = visible pairs of chunk c's queries
//!     deal the chunks, most pairs first, in rounds of one chunk per rank:
//!         the chunk with the most pairs to the rank with the fewest so far
//!     exchange chunks of the ranks with the most and the fewest pairs while that helps
//!     if m > 1: exchange whole tiles of rows between ranks (RowExchange)
//!     stop if no rank has more than 1.02 times the mean, of pairs and of rows
//! if none did: exchange single rows between ranks (RowExchange)
//! exchange chunks that bring documents together (SegmentExchange)
//! ```
//! Every rank gets m chunks, and every exchange of rows is of equal numbers, so that numbers of
//! rows differ by at most one per chunk; chunks are exchanged for documents within 1 % of the rows.
//! Few long chunks are tried first: they keep documents together, so that fewer rows are sent. With
//! a causal mask and no documents, the second round gives the zigzag layout.
//!
//! # The bound
//! A query is indivisible: no layout gives the busiest rank fewer pairs than its queries' mean,
//! rounded up to whole queries. Exchanges of single rows reach 1.02 if no query has more than 1 %
//! of the pairs of a rank (`row_exchange.rs`): under a causal mask over one sequence, from about
//! 200 rows per rank on. With fewer they mostly do, because queries differ. A number of rows is
//! indivisible too: 1.02 needs a multiple of the ranks, or 50 rows per rank.
//!
//! # Tiles
//! Chunks have at least the rows of a tile, and an exchange is one of whole tiles while that
//! suffices: with a number of rows that is a multiple of 64·m·ranks, as many tiles contain a
//! visible pair as on one rank. Single rows are exchanged where whole tiles are too coarse, with a
//! few tiles per rank. The parts then come last in the shard of a rank, so that its whole tiles
//! stay so.
//!
//! In the reproducible order chunks are whole leaves, of which the last round may lack some: then
//! numbers of rows differ by up to one chunk, and no rows are exchanged.

use std::{cmp::Reverse, sync::Arc};

use super::{
    Choice, Order, Route,
    query_work::QueryWork,
    row_exchange::{Chunk, Limits, RowExchange},
    segment_exchange::SegmentExchange,
};
use crate::{
    Batch, CustomLayout, Error, Layout, NeedsIndex, Result, RingShards, Run, Runs, Side, Spec,
    index, memory,
};

/// Imbalance, of pairs and of rows, at which no shorter chunks are tried.
const BALANCED: f64 = 1.02;
/// Imbalance up to which chunks are exchanged to send fewer rows: half of the tolerance, because
/// the time of a pass is that of the busiest rank.
const EXCHANGED: f64 = 1.01;
/// Rows of a tile of the CPU kernels, and the fewest of a chunk, because a shorter one fills a part
/// of a tile.
const TILE_ROWS: usize = 64;

impl Choice {
    /// Chooses the layout of [`Layout::balanced`], and the route that sends the fewest rows of this
    /// batch. With that route every row sent is a row needed by its receiver. The ring order is
    /// that of the ranks, because the caller distributes the rows by rank.
    ///
    /// # Errors
    /// As [`Layout::balanced`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        let layout = Layout::balanced(spec, batch, ranks)?;
        let shards = RingShards::of_batch(&spec.dims, spec.alignment, &layout, ranks, batch)?;
        let tick = &mut || ();
        let (heads, batch_rows) = (spec.dims.q_heads, spec.dims.batch);
        let needs = NeedsIndex::of_queries(&*spec.mask, heads, batch_rows, &shards, tick);
        let route = Route::cheapest(&needs, u128::MAX, tick).map_or(Route::Direct, |best| best.0);
        Ok(Self { layout, route, order: Order::ascending(ranks) })
    }
}

impl Layout {
    /// Returns a layout that gives every rank the same number of rows up to 1 %, and the same
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
    /// Takes O((chunks + documents) log documents) time for each number of chunks tried, from one
    /// per rank to one per 64 rows, which doubles; masks without a [`Band`](crate::mask::Band) are
    /// evaluated once for each query.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `ranks` or a field of the batch, [`Error::OutOfMemory`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
        spec.validate_batch(batch, q_len, kv_len)?;
        let whole = RingShards::of_batch(&spec.dims, spec.alignment, &Self::Contiguous, 1, batch)?;
        let pairs = QueryWork::new(spec, &whole)?;
        let mut best = Dealt::best(spec, &pairs, ranks)?;
        best.join_segments(&whole);
        let mut q = memory::list("the rows of all ranks", ranks)?;
        q.extend(best.ranks.iter().map(|chunks| rows_of(chunks, &best.edges)));
        let kv = if q_len == kv_len {
            q.clone()
        } else {
            let plain =
                spec.leaf_rows.map_or(Self::Contiguous, |rows| Self::Contiguous.at_leaves(rows));
            (0..ranks).map(|rank| plain.shard(Side::Kv, kv_len, rank, ranks)).collect()
        };
        Ok(Self::Balanced(Arc::new(CustomLayout { q, kv })))
    }
}

/// Division of the queries into chunks of equal length.
struct Cuts {
    rows: usize,
    chunks: usize,
    /// Rows of a chunk in the reproducible order, a multiple of those of a leaf.
    of_leaves: Option<u64>,
    /// True if no shorter chunks are allowed.
    are_shortest: bool,
}

impl Cuts {
    /// Divides the queries of `spec` into `per_rank` chunks per rank, or fewer in the reproducible
    /// order.
    fn new(spec: &Spec, ranks: usize, per_rank: usize) -> Self {
        let rows = spec.dims.q_len;
        let chunks = ranks.saturating_mul(per_rank);
        let Some(leaf) = spec.leaf_rows else {
            let are_shortest = rows / chunks.saturating_mul(2) < TILE_ROWS;
            return Self { rows, chunks, of_leaves: None, are_shortest };
        };
        let leaves = rows.div_ceil(index(leaf));
        let of_chunk = leaves.div_ceil(chunks).max(1);
        Self {
            rows,
            chunks: leaves.div_ceil(of_chunk).max(1),
            of_leaves: Some((of_chunk as u64).saturating_mul(leaf)),
            are_shortest: of_chunk == 1,
        }
    }

    /// Returns the first row of each chunk, and the end of the last.
    fn edges(&self) -> Result<Vec<u64>> {
        let edge = |chunk: usize| match self.of_leaves {
            Some(rows) => (chunk as u64).saturating_mul(rows).min(self.rows as u64),
            // chunk lengths differ by at most one row
            None => (self.rows as u128 * chunk as u128 / self.chunks as u128) as u64,
        };
        let count = self.chunks.saturating_add(1);
        memory::collect("the edges of chunks", count, (0..=self.chunks).map(edge))
    }
}

/// Chunks that are dealt to ranks.
struct Dealt {
    /// Chunks of each rank.
    ranks: Vec<Vec<usize>>,
    /// Visible pairs of each chunk.
    work: Vec<u128>,
    /// First row of each chunk, and the end of the last.
    edges: Vec<u64>,
}

impl Dealt {
    fn new(pairs: &QueryWork, edges: Vec<u64>, ranks: usize) -> Self {
        let before: Vec<u128> = edges.iter().map(|&row| pairs.before(row)).collect();
        let work: Vec<u128> = before.windows(2).map(|sums| sums[1] - sums[0]).collect();
        Self { ranks: deal(&work, ranks), work, edges }
    }

    /// Deals longer chunks first, then shorter ones, until no rank has more than [`BALANCED`] times
    /// the mean. Returns the best of all.
    fn best(spec: &Spec, pairs: &QueryWork, ranks: usize) -> Result<Self> {
        let has_leaves = spec.leaf_rows.is_some();
        let deal = |per_rank: usize| {
            let cuts = Cuts::new(spec, ranks, per_rank);
            let mut dealt = Self::new(pairs, cuts.edges()?, ranks);
            if !has_leaves && per_rank > 1 {
                dealt.exchange_rows(pairs, TILE_ROWS as u64);
            }
            Ok((dealt, cuts.are_shortest))
        };
        let mut per_rank = 1;
        let (mut best, mut are_shortest) = deal(per_rank)?;
        while best.worst() > BALANCED && !are_shortest {
            per_rank *= 2;
            let (dealt, is_last) = deal(per_rank)?;
            are_shortest = is_last;
            if dealt.worst() < best.worst() {
                best = dealt;
            }
        }
        if !has_leaves && best.worst() > BALANCED {
            best.exchange_rows(pairs, 1);
        }
        Ok(best)
    }

    /// Returns the rows of each chunk.
    fn rows(&self) -> Vec<u128> {
        self.edges.windows(2).map(|edge| (edge[1] - edge[0]).into()).collect()
    }

    /// Returns the larger imbalance of pairs and of rows.
    fn worst(&self) -> f64 {
        imbalance(&self.work, &self.ranks).max(imbalance(&self.rows(), &self.ranks))
    }

    /// Exchanges multiples of `unit` rows between ranks until none has more than [`BALANCED`] times
    /// the mean of the pairs, if there are such exchanges.
    fn exchange_rows(&mut self, pairs: &QueryWork, unit: u64) {
        let limit = |percent| most_of(percent, &self.work, self.ranks.len());
        let limits =
            Limits { balanced: limit(BALANCED), target: limit(EXCHANGED), mean: limit(1.0) };
        let has_few = |chunks: &Vec<usize>| sum(&self.work, chunks) <= limits.balanced;
        if self.ranks.iter().all(has_few) {
            return;
        }
        let chunk = |&chunk: &usize| Chunk {
            rows: self.edges[chunk]..self.edges[chunk + 1],
            work: self.work[chunk],
        };
        let of_ranks = self.ranks.iter().map(|chunks| chunks.iter().map(chunk).collect());
        let of_ranks = RowExchange::new(pairs, of_ranks.collect(), limits).run(unit);
        let owned = |(rank, chunks): (usize, Vec<Chunk>)| {
            chunks.into_iter().map(move |chunk| (rank, chunk))
        };
        let mut all: Vec<(usize, Chunk)> =
            of_ranks.into_iter().enumerate().flat_map(owned).collect();
        all.sort_unstable_by_key(|(_, chunk)| chunk.rows.start);
        self.ranks.iter_mut().for_each(Vec::clear);
        all.iter().enumerate().for_each(|(index, of)| self.ranks[of.0].push(index));
        self.work = all.iter().map(|(_, chunk)| chunk.work).collect();
        let end = self.edges.last().copied();
        self.edges = all.iter().map(|(_, chunk)| chunk.rows.start).chain(end).collect();
    }

    /// Exchanges chunks so that fewer rows are sent, and the imbalance stays below [`EXCHANGED`] or
    /// does not grow. `whole` has all rows on one rank.
    fn join_segments(&mut self, whole: &RingShards) {
        let rows = self.rows();
        let most = |of: &[u128]| {
            let now = self.ranks.iter().map(|chunks| sum(of, chunks)).max().unwrap_or(0);
            now.max(most_of(EXCHANGED, of, self.ranks.len()))
        };
        let [most_work, most_rows] = [most(&self.work), most(&rows)];
        let segments = whole.q.first().and_then(|queries| queries.segments.first());
        let exchange = segments.and_then(|segments| {
            SegmentExchange::new(segments, &self.edges, &self.work, &self.ranks)
        });
        if let Some(mut exchange) = exchange {
            exchange.run(&mut self.ranks, most_work, most_rows);
        }
    }
}

/// Returns the sum over some chunks.
fn sum(of: &[u128], chunks: &[usize]) -> u128 {
    chunks.iter().map(|&chunk| of[chunk]).sum()
}

/// Returns the mean over the ranks times `imbalance`, rounded down.
fn most_of(imbalance: f64, of: &[u128], ranks: usize) -> u128 {
    // in thousandths: all pairs are fewer than 2¹¹⁸
    let thousandths = (imbalance * 1000.0).round() as u128;
    of.iter().sum::<u128>() * thousandths / (1000 * ranks.max(1) as u128)
}

/// Returns the rows of some chunks, which ascend. Adjacent chunks are one run. Runs of whole tiles
/// come before the others, so that these do not move their rows off the tiles of the kernels.
fn rows_of(chunks: &[usize], edges: &[u64]) -> Runs {
    let run = |adjacent: &[usize]| {
        let [first, last] = [adjacent.first(), adjacent.last()].map(|chunk| chunk.copied());
        let (start, end) = (edges[first.unwrap_or(0)], edges[last.map_or(0, |last| last + 1)]);
        Run { start: start.cast_signed(), step: 1, count: end - start }
    };
    let mut all: Vec<Run> = chunks.chunk_by(|a, b| a + 1 == *b).map(run).collect();
    all.sort_by_key(|run| !run.count.is_multiple_of(TILE_ROWS as u64));
    let mut rows = Runs::new();
    all.into_iter().for_each(|run| rows.push_run(run));
    rows
}

/// Assigns the chunks to `ranks` ranks, as many to each up to one. Returns the chunks of each rank,
/// ascending.
fn deal(work: &[u128], ranks: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..work.len()).collect();
    order.sort_by_key(|&chunk| (Reverse(work[chunk]), chunk));
    let mut shards = vec![Vec::new(); ranks];
    let mut sums = vec![0u128; ranks];
    for round in order.chunks(ranks) {
        let mut by_work: Vec<usize> = (0..ranks).collect();
        by_work.sort_by_key(|&rank| (sums[rank], rank));
        for (&rank, &chunk) in by_work.iter().zip(round) {
            shards[rank].push(chunk);
            sums[rank] += work[chunk];
        }
    }
    // each exchange lowers the sum of squares; few remain after the rounds
    for _ in 0..4 * ranks {
        if !exchange(work, &mut shards, &mut sums) {
            break;
        }
    }
    shards.iter_mut().for_each(|shard| shard.sort_unstable());
    shards
}

/// Exchanges one chunk of the rank with the most work with one of the rank with the least, such that
/// their difference becomes smallest. Returns false if no exchange makes it smaller.
fn exchange(work: &[u128], shards: &mut [Vec<usize>], sums: &mut [u128]) -> bool {
    let by_sum = |&rank: &usize| (sums[rank], rank);
    let (Some(most), Some(least)) =
        ((0..sums.len()).max_by_key(by_sum), (0..sums.len()).min_by_key(by_sum))
    else {
        return false;
    };
    let difference = sums[most] - sums[least];
    let mut best: Option<(u128, usize, usize)> = None;
    for (i, &heavy) in shards[most].iter().enumerate() {
        for (j, &light) in shards[least].iter().enumerate() {
            let Some(moved) = work[heavy].checked_sub(work[light]) else { continue };
            let left = difference.abs_diff(2 * moved);
            if left < best.map_or(difference, |(left, ..)| left) {
                best = Some((left, i, j));
            }
        }
    }
    let Some((_, i, j)) = best else { return false };
    let (heavy, light) = (shards[most][i], shards[least][j]);
    (shards[most][i], shards[least][j]) = (light, heavy);
    let moved = work[heavy] - work[light];
    sums[most] -= moved;
    sums[least] += moved;
    true
}

/// Returns the most work of a rank divided by the mean; 1 if there is none.
fn imbalance(work: &[u128], shards: &[Vec<usize>]) -> f64 {
    let most = shards.iter().map(|shard| sum(work, shard)).max().unwrap_or(0);
    let total: u128 = work.iter().sum();
    if total == 0 { 1.0 } else { most as f64 * shards.len() as f64 / total as f64 }
}
