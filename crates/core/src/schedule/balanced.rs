//! Layouts that balance the work of a batch of documents, under any mask.
//!
//! ```text
//! for m = 1, 2, 4, …:                             # chunks per rank
//!     cut the rows into m·ranks chunks of equal length; w[c] = visible pairs of chunk c's queries
//!     deal the chunks, most pairs first, in rounds of one chunk per rank:
//!         the chunk with the most pairs to the rank with the fewest so far
//!     exchange chunks of the ranks with the most and the fewest pairs while that helps
//!     stop if no rank has more than 1.02 times the mean, of pairs and of rows
//! exchange chunks that bring documents together (SegmentExchange)
//! ```
//! Every rank gets m chunks, so that numbers of rows differ by at most one per chunk. Few long
//! chunks are tried first: they keep documents together, so that fewer rows are sent. With a causal
//! mask and no documents, the second round gives the zigzag layout.
//!
//! In the reproducible order chunks are whole leaves, of which the last round may lack some: then
//! numbers of rows differ by up to one chunk.

use std::{cmp::Reverse, sync::Arc};

use super::{Choice, Order, Route, Work, segment_exchange::SegmentExchange};
use crate::{
    Batch, CustomLayout, Error, Layout, NeedsIndex, Result, RingShards, Run, Runs, Shard, Side,
    Spec, index, memory,
};

/// Imbalance, of pairs and of rows, at which no shorter chunks are tried.
const BALANCED: f64 = 1.02;
/// Imbalance up to which chunks are exchanged to send fewer rows: half of the tolerance, because
/// the time of a pass is that of the busiest rank.
const EXCHANGED: f64 = 1.01;
/// Fewest rows of a chunk: the KV tile of the CPU kernels, of which a shorter chunk fills a part.
const LEAST_ROWS: usize = 64;

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
    /// Returns a layout that gives every rank the same number of rows, and the same number of
    /// visible pairs up to 2 % where chunks of at least 64 rows permit it; otherwise the best one
    /// found. `batch` is that of all rows. Its dense mask is not counted, since kernels compute
    /// tiles. The same arguments give the same layout on every rank.
    ///
    /// Rows are assigned by their queries' pairs. A rank has the keys of its queries' rows if there
    /// are as many keys as queries; otherwise keys are divided into one chunk per rank. Of fewer
    /// rows than ranks some ranks have none. With [`Spec::leaf_rows`] a rank has whole leaves, so
    /// that the balance depends on the number of leaves.
    ///
    /// [`Choice::balanced`] also returns the route that sends a row only to ranks that need it.
    ///
    /// Takes O(rows) time for each number of chunks tried, and for masks without a
    /// [`Band`](crate::mask::Band) as many evaluations of the mask.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `ranks` or a field of the batch, [`Error::OutOfMemory`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
        spec.validate_batch(batch, q_len, kv_len)?;
        let mut q = memory::list("the rows of all ranks", ranks)?;
        let whole = RingShards::of_batch(&spec.dims, spec.alignment, &Self::Contiguous, 1, batch)?;
        let mut best: Option<Dealt> = None;
        let mut per_rank = 1;
        loop {
            let cuts = Cuts::new(spec, ranks, per_rank);
            let edges = cuts.edges()?;
            let work = work_of_chunks(spec, &whole, &edges);
            let dealt = Dealt::new(work, edges, ranks);
            let worst = dealt.worst;
            if best.as_ref().is_none_or(|best| worst < best.worst) {
                best = Some(dealt);
            }
            if worst <= BALANCED || cuts.are_shortest() {
                break;
            }
            per_rank *= 2;
        }
        let Some(mut best) = best else { return Ok(Self::Contiguous) };
        best.join_segments(&whole);
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
    are_shortest: bool,
}

impl Cuts {
    /// Divides the queries of `spec` into `per_rank` chunks per rank, or fewer in the reproducible
    /// order.
    fn new(spec: &Spec, ranks: usize, per_rank: usize) -> Self {
        let rows = spec.dims.q_len;
        let chunks = ranks.saturating_mul(per_rank);
        let Some(leaf) = spec.leaf_rows else {
            let are_shortest = rows / chunks.saturating_mul(2) < LEAST_ROWS;
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

    /// Returns true if no shorter chunks are allowed.
    const fn are_shortest(&self) -> bool {
        self.are_shortest
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
    /// The larger imbalance of pairs and of rows.
    worst: f64,
    /// Chunks of each rank.
    ranks: Vec<Vec<usize>>,
    /// Visible pairs of each chunk.
    work: Vec<u128>,
    /// Rows of each chunk.
    rows: Vec<u128>,
    /// First row of each chunk, and the end of the last.
    edges: Vec<u64>,
}

impl Dealt {
    fn new(work: Vec<u128>, edges: Vec<u64>, ranks: usize) -> Self {
        let rows: Vec<u128> = edges.windows(2).map(|edge| (edge[1] - edge[0]).into()).collect();
        let ranks = deal(&work, ranks);
        let worst = imbalance(&work, &ranks).max(imbalance(&rows, &ranks));
        Self { worst, ranks, work, rows, edges }
    }

    /// Exchanges chunks so that fewer rows are sent, and the imbalance stays below [`EXCHANGED`] or
    /// does not grow. `whole` has all rows on one rank.
    fn join_segments(&mut self, whole: &RingShards) {
        let most = |of: &[u128]| {
            let bound = EXCHANGED.max(imbalance(of, &self.ranks));
            // rounded up, so that the rank with the most is not excluded
            (bound * of.iter().sum::<u128>() as f64 / self.ranks.len() as f64).ceil() as u128
        };
        let (most_work, most_rows) = (most(&self.work), most(&self.rows));
        let chunks: Vec<Shard> =
            whole.q.iter().flat_map(|queries| queries.divide(&self.edges)).collect();
        let exchange = SegmentExchange::new(&chunks, &self.work, &self.rows, &self.ranks);
        if let Some(mut exchange) = exchange {
            exchange.run(&mut self.ranks, most_work, most_rows);
        }
    }
}

/// Returns the rows of some chunks, ascending. Adjacent chunks are one run.
fn rows_of(chunks: &[usize], edges: &[u64]) -> Runs {
    let mut rows = Runs::new();
    for adjacent in chunks.chunk_by(|a, b| a + 1 == *b) {
        if let (Some(first), Some(last)) = (adjacent.first(), adjacent.last()) {
            let (start, end) = (edges[*first], edges[last + 1]);
            rows.push_run(Run { start: start.cast_signed(), step: 1, count: end - start });
        }
    }
    rows
}

/// Returns the visible pairs of the queries of each chunk. `whole` has all rows on one rank.
fn work_of_chunks(spec: &Spec, whole: &RingShards, edges: &[u64]) -> Vec<u128> {
    let chunks = whole.q.iter().flat_map(|queries| queries.divide(edges)).map(Arc::new);
    let shards = RingShards { q: chunks.collect(), kv: whole.kv.clone() };
    let work = Work::of(&*spec.mask, spec.dims.q_heads, spec.dims.batch, &shards);
    (0..shards.q.len()).map(|chunk| work.of_rank(chunk)).collect()
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
    let sum = |shard: &Vec<usize>| shard.iter().map(|&chunk| work[chunk]).sum::<u128>();
    let (most, total) = (shards.iter().map(sum).max().unwrap_or(0), work.iter().sum::<u128>());
    if total == 0 { 1.0 } else { most as f64 * shards.len() as f64 / total as f64 }
}
