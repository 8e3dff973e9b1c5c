//! Layouts that balance the work of a batch of documents, under any mask.
//!
//! ```text
//! k = whole tiles of 64 rows per rank
//! deal one chunk of k tiles per rank; stop if no rank has more than 1.02 times the mean, of pairs
//!     and of rows
//! if k > 16, later queries of documents have more pairs, as under a causal mask, and the pass
//!     takes 300 times as long: deal whole documents, and parts of long ones (DocumentDeal)
//! for tiles of a chunk = k, k/2, k/4, … > 1:
//!     cut the rows into chunks; w[c] = visible pairs of chunk c's queries
//!     deal the chunks in rounds, and exchange chunks (ChunkDeal)
//!     exchange whole tiles of rows between ranks (RowExchange)
//!     stop if it is balanced
//! if no chunks are balanced: deal single tiles, of which those that no rank can have are cut
//!     (TileDeal); exchange single rows between ranks (RowExchange)
//! if that is not balanced either, and a rank has few rows: deal parts of tiles, down to single
//!     rows
//! exchange chunks that bring documents together (SegmentExchange)
//! of the balanced layouts choose the one whose busiest rank has the fewest tiles, and sends and
//!     receives the fewest rows (TILE_COST)
//! order the rows of each rank such that they fill whole tiles (tile_order)
//! ```
//! Every rank gets equal rows up to one, before chunks are exchanged that bring documents together.
//! Few long chunks are tried first: they keep documents together. With a causal mask and no
//! documents, two chunks per rank are the zigzag layout.
//!
//! # The bound of the balance
//! A query is indivisible: no layout gives the busiest rank fewer pairs than its queries' mean,
//! rounded up to whole queries. Exchanges of single rows reach 1.02 if no query has more than 1 %
//! of the pairs of a rank (`row_exchange.rs`): under a causal mask over one sequence, from about
//! 200 rows per rank on. With fewer, deals of parts of tiles mostly do, because queries differ. A
//! number of rows is indivisible too: 1.02 needs a multiple of the ranks, or 50 rows per rank.
//!
//! # Tiles
//! Chunks are whole tiles while that suffices: then as many tiles contain a visible pair as on one
//! rank. A tile that has more pairs than a rank may have must be cut, and costs more
//! (`tile_bound.rs` derives how much at least). Ranks with unequal rows would not help: where the
//! rows of a rank fill its tiles, one row more is one tile more. Documents that are dealt fill
//! whole tiles with their last rows. Their first rows, which attend to few tiles of keys under a
//! causal mask, share tiles with those of other documents.
//!
//! In the reproducible order chunks are whole leaves, of which the last round may lack some: then
//! numbers of rows differ by up to one chunk, and no rows are exchanged.

use std::sync::Arc;

use super::{
    Choice, Order, Route,
    chunk_deal::{Chunk, ChunkDeal, Limits, sorted_indices},
    document_cost::DocumentCost,
    document_deal::{AFTER_WHOLE, DocumentDeal},
    query_work::QueryWork,
    ring_traffic::needs_more,
    row_exchange::RowExchange,
    segment_exchange::SegmentExchange,
    tile_deal::{RankChunks, Shares, TILE_ROWS, TileDeal},
    tile_order::{first_rows_apart, tile_order},
};
use crate::{
    Batch, CustomLayout, Layout, NeedsIndex, Result, RingShards, Run, Runs, Side, Spec, index,
    layout::check_ranks, memory, needs::BatchNeeds,
};

/// Imbalance, of pairs and of rows, at which no shorter chunks are tried, and up to which a grid is
/// chosen for documents.
pub(crate) const BALANCED: f64 = 1.02;
/// Imbalance up to which chunks are exchanged to send fewer rows: half of the tolerance, because
/// the time of a pass is that of the busiest rank.
const EXCHANGED: f64 = 1.01;

/// Pairs of a rank for each step of a deal of documents, from which on documents are dealt, and
/// from which on several deals are compared. A step takes about 1 µs, and these pairs 0.3 and
/// 1.6 ms of a pass at 45 GFLOP/s with dim 128: all deals take less than 1 % of a pass.
const DEAL_PAIRS: [u128; 2] = [8_000, 40_000];

/// Rows that a rank sends or receives which count as much as a tile of 64 queries and 64 keys, when
/// layouts are compared. On a core of an AMD EPYC a tile takes as long as reading 100 rows of a
/// block (`benches/record/documents.md`). On a GPU of 400 TFLOP/s a tile
/// of 32 heads of dim 128 takes as long as half a row of 8 KV heads in 16 bits at 12.5 GB/s. This
/// is about their geometric mean.
const TILE_COST: u64 = 8;

/// Rows of a rank up to which parts of tiles are dealt if nothing else is balanced. With more,
/// exchanges of rows balanced all of 5,040 draws (`benches/record/documents.md`).
const FEW_ROWS: u64 = 512;

/// Tiles of a chunk up to which the pairs before each tile are counted, once for this and all
/// shorter chunks: they are at most four times as many as those before each chunk.
const SHORT_CHUNK: u64 = 4;

/// Tiles of a rank up to which it is checked first that none of them must be cut.
const FEW_TILES: u64 = 16;

impl Choice {
    /// Chooses the layout of [`Layout::balanced`], and the route that sends the fewest rows of this
    /// batch. With that route every row sent is a row needed by its receiver. The ring order is
    /// that of the ranks, because the caller distributes the rows by rank.
    ///
    /// # Errors
    /// As [`Layout::balanced`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        let whole = whole_rows(spec, batch, ranks)?;
        let pairs = QueryWork::new(spec, &whole)?;
        let layout = balanced_layout(spec, &whole, &pairs, ranks)?;
        let Spec { dims, alignment, .. } = spec;
        let shards =
            |owners| RingShards::of_owners(dims, *alignment, &layout, owners, ranks, batch);
        let route = if relays_send_more(spec, &whole, &pairs, &shards(0..ranks.min(2))?) {
            (2..ranks).try_for_each(|rank| batch.validate_layout(dims, &layout, rank, ranks))?;
            Route::Direct
        } else {
            let (tick, shards) = (&mut || (), shards(0..ranks)?);
            let needs =
                NeedsIndex::of_queries(&*spec.mask, dims.q_heads, dims.batch, &shards, tick);
            Route::sending(&needs, None, tick)
        };
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
    /// Takes O((chunks + documents) log documents) time for each deal of documents, at most three,
    /// and for each length of chunks tried, from one per rank to one per 64 rows, which is halved;
    /// masks without a [`Band`](crate::mask::Band) are evaluated once for each query.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] naming `ranks` or a field of the batch,
    /// [`crate::Error::OutOfMemory`].
    pub fn balanced(spec: &Spec, batch: &Batch, ranks: usize) -> Result<Self> {
        let whole = whole_rows(spec, batch, ranks)?;
        balanced_layout(spec, &whole, &QueryWork::new(spec, &whole)?, ranks)
    }
}

/// Checks the batch, and returns its rows on one rank.
pub(super) fn whole_rows(spec: &Spec, batch: &Batch, ranks: usize) -> Result<RingShards> {
    check_ranks(ranks)?;
    spec.validate_batch(batch, spec.dims.q_len, spec.dims.kv_len)?;
    RingShards::of_batch(&spec.dims, spec.alignment, &Layout::Contiguous, 1, batch)
}

/// Returns the layout of [`Layout::balanced`]. `whole` has all rows on one rank, and `pairs` their
/// pairs.
fn balanced_layout(
    spec: &Spec,
    whole: &RingShards,
    pairs: &QueryWork,
    ranks: usize,
) -> Result<Layout> {
    let (q_len, kv_len) = (spec.dims.q_len, spec.dims.kv_len);
    let best = match spec.leaf_rows {
        Some(leaf) => Dealt::best_of_leaves(q_len as u64, leaf, pairs, ranks).join_segments(whole),
        None => Dealt::best(Shares { rows: q_len as u64, ranks }, pairs, whole),
    };
    let mut q = memory::list("the rows of all ranks", ranks)?;
    q.extend(best.ranks.iter().map(|chunks| best.rows_of(chunks)));
    let kv = if q_len == kv_len {
        q.clone()
    } else {
        let plain =
            spec.leaf_rows.map_or(Layout::Contiguous, |rows| Layout::Contiguous.at_leaves(rows));
        (0..ranks).map(|rank| plain.shard(Side::Kv, kv_len, rank, ranks)).collect()
    };
    Ok(Layout::Balanced(Arc::new(CustomLayout { q, kv })))
}

/// Returns true if both relays send more rows than the direct route because of the first two ranks:
/// if each needs a row that the other neither needs nor owns. Else they may do so because of
/// others. It saves the shards and the needs of all others. `whole` has all rows on one rank,
/// `pairs` are their pairs, and `first_two` are the shards of these ranks.
fn relays_send_more(
    spec: &Spec,
    whole: &RingShards,
    pairs: &QueryWork,
    first_two: &RingShards,
) -> bool {
    if first_two.q.len() < 2 || whole.kv.iter().any(|kv| kv.differs_between_batch_rows()) {
        return false;
    }
    let Some((keys, segments)) = pairs.first_keys() else { return false };
    let (heads, batch_rows) = (spec.dims.q_heads, spec.dims.batch);
    let needs = BatchNeeds::of_few(&*spec.mask, heads, batch_rows, first_two, segments);
    [[0, 1], [1, 0]].into_iter().all(|[user, before]| needs_more(&needs, keys, user, before))
}

/// Chunks that are dealt to ranks.
struct Dealt {
    /// Chunks of each rank.
    ranks: Vec<Vec<usize>>,
    /// Visible pairs of each chunk.
    work: Vec<u128>,
    /// First row of each chunk, and the end of the last.
    edges: Vec<u64>,
    /// First row of each document, if these are dealt; else empty.
    documents: Vec<u64>,
    /// The larger imbalance of pairs and of rows.
    worst: f64,
}

impl Dealt {
    /// Deals chunks that begin at `edges`, the last of which is the end of the rows. If not all are
    /// as long, every `per_rank`-th has a length of its own, and each rank gets one of these.
    fn new(pairs: &QueryWork, edges: Vec<u64>, ranks: usize, per_rank: Option<usize>) -> Self {
        let before = pairs.before_each(edges.iter().copied());
        let work: Vec<u128> = before.windows(2).map(|sums| sums[1] - sums[0]).collect();
        let limits = limits_of(work.iter().sum(), ranks);
        let mut owned = match per_rank {
            Some(per_rank) => deal_with_tails(&work, ranks, per_rank, limits),
            None => {
                let mut deal = ChunkDeal::new(&work, vec![0; ranks]);
                // an exchange of all that two ranks have changes nothing
                if work.len() > ranks {
                    deal.exchange(&work, limits);
                }
                deal.ranks
            }
        };
        owned.iter_mut().for_each(|chunks| chunks.sort_unstable());
        Self::with(owned, work, edges)
    }

    fn with(ranks: Vec<Vec<usize>>, work: Vec<u128>, edges: Vec<u64>) -> Self {
        let mut dealt = Self { ranks, work, edges, documents: Vec::new(), worst: 0.0 };
        dealt.worst = dealt.imbalance();
        dealt
    }

    fn of_chunks(all: &RankChunks, ranks: usize) -> Self {
        // an empty chunk before the one with rows that begins at the same row
        let key = |(_, chunk): &(usize, Chunk)| {
            // all rows are fewer than 2⁵⁹
            chunk.rows.start << 1 | u64::from(!chunk.rows.is_empty())
        };
        let order = sorted_indices(all.iter().map(key));
        let in_order = || order.iter().map(|&index| &all[index]);
        let of_rank = all.len().div_ceil(ranks.max(1));
        let mut owned: Vec<Vec<usize>> = (0..ranks).map(|_| Vec::with_capacity(of_rank)).collect();
        in_order().enumerate().for_each(|(index, of)| owned[of.0].push(index));
        let end = in_order().next_back().map_or(0, |(_, chunk)| chunk.rows.end);
        let edges = in_order().map(|(_, chunk)| chunk.rows.start).chain(Some(end)).collect();
        let work = in_order().map(|(_, chunk)| chunk.work).collect();
        Self::with(owned, work, edges)
    }

    /// Deals one chunk per rank if that is balanced, else documents or shorter chunks.
    fn best(shares: Shares, pairs: &QueryWork, whole: &RingShards) -> Self {
        let tiles = shares.tiles();
        let mut longest = Self::of_tiles(shares, pairs, tiles.max(1));
        if longest.worst <= BALANCED || tiles == 0 {
            longest.exchange_rows(pairs, 1);
            return longest.or_parts_of_tiles(shares, pairs).join_segments(whole);
        }
        let ids = whole.q.first().and_then(|queries| queries.segments.first());
        let deal = ids.filter(|_| tiles > FEW_TILES);
        let pairs_of_rank = pairs.before(shares.rows) / shares.ranks as u128;
        let most_steps = pairs_of_rank / DEAL_PAIRS[0];
        match deal.and_then(|ids| DocumentDeal::new(pairs, shares, ids, most_steps)) {
            Some(deal) => {
                let are_several = pairs_of_rank >= DEAL_PAIRS[1] * deal.steps();
                let deals = if are_several { AFTER_WHOLE.len() } else { 1 };
                longest.or_documents(&deal, shares, pairs, whole, deals)
            }
            None => longest.or_shorter_chunks(shares, pairs).join_segments(whole),
        }
    }

    /// Deals documents `deals` times, and shorter chunks. Returns the balanced result of the least
    /// cost, else that of chunks.
    fn or_documents(
        self,
        deal: &DocumentDeal<'_>,
        shares: Shares,
        pairs: &QueryWork,
        whole: &RingShards,
        deals: usize,
    ) -> Self {
        let balanced = |after_whole| {
            let mut dealt = Self::of_chunks(&deal.clone().run(after_whole), shares.ranks);
            dealt.exchange_rows(pairs, 1);
            dealt.documents = deal.begins().to_vec();
            (dealt.worst <= BALANCED).then(|| dealt.join_segments(whole))
        };
        let mut best = self.or_shorter_chunks(shares, pairs).join_segments(whole);
        let documents = DocumentCost { begins: deal.begins() };
        let mut least = if best.worst <= BALANCED { best.cost(&documents) } else { u64::MAX };
        for dealt in AFTER_WHOLE.into_iter().take(deals).filter_map(balanced) {
            let cost = dealt.cost(&documents);
            if cost < least {
                (best, least) = (dealt, cost);
            }
        }
        best
    }

    /// Returns the cost of the rank with the most: tiles of keys of its tiles of queries, and rows
    /// that it sends and receives, of which [`TILE_COST`] count as much as a tile.
    fn cost(&self, documents: &DocumentCost<'_>) -> u64 {
        let ranges = |chunks: &Vec<usize>| {
            chunks.iter().map(|&chunk| self.edges[chunk]..self.edges[chunk + 1]).collect()
        };
        let ranks: Vec<_> = self.ranks.iter().map(ranges).collect();
        let exchanged = documents.rows_exchanged(&ranks);
        let tiles = self.ranks.iter().map(|chunks| documents.tiles(&self.rows_of(chunks)));
        tiles.zip(exchanged).map(|(tiles, rows)| TILE_COST * tiles + rows).max().unwrap_or(0)
    }

    /// Deals longer chunks first, then shorter ones, until no rank has more than [`BALANCED`] times
    /// the mean. Returns the best of all.
    fn or_shorter_chunks(self, shares: Shares, pairs: &QueryWork) -> Self {
        let Shares { rows, ranks } = shares;
        let tiles = shares.tiles();
        let mut best = self;
        let limits = limits_of(pairs.before(rows), ranks);
        let deal = || TileDeal::new(pairs, shares, limits);
        // whole tiles do not suffice if one of them exceeds a rank; with many it does not
        let single_tiles = (tiles <= FEW_TILES).then(deal);
        let must_cut = single_tiles.as_ref().is_some_and(TileDeal::must_cut);
        let mut of_chunk = if must_cut { 1 } else { tiles / 2 };
        while best.worst > BALANCED && of_chunk > 1 {
            if of_chunk <= SHORT_CHUNK {
                pairs.before_tiles(rows);
            }
            let mut dealt = Self::of_tiles(shares, pairs, of_chunk);
            dealt.exchange_rows(pairs, TILE_ROWS);
            if dealt.worst < best.worst {
                best = dealt;
            }
            of_chunk /= 2;
        }
        if best.worst > BALANCED
            && let Some(chunks) = single_tiles.unwrap_or_else(deal).run()
        {
            let mut dealt = Self::of_chunks(&chunks, ranks);
            dealt.exchange_rows(pairs, 1);
            if dealt.worst < best.worst {
                best = dealt;
            }
        }
        if best.worst > BALANCED {
            best.exchange_rows(pairs, 1);
        }
        best.or_parts_of_tiles(shares, pairs)
    }

    /// Deals ever shorter parts of tiles, down to single rows, until no rank has more than
    /// [`BALANCED`] times the mean, if a rank has few rows. Returns the best of all.
    fn or_parts_of_tiles(self, shares: Shares, pairs: &QueryWork) -> Self {
        let mut best = self;
        let of_rank = shares.rows / shares.ranks as u64;
        let mut of_chunk = if of_rank > FEW_ROWS { 0 } else { (of_rank / 2).min(TILE_ROWS / 2) };
        while best.worst > BALANCED && of_chunk > 0 {
            let mut dealt = Self::of_rows(shares, pairs, of_chunk);
            dealt.exchange_rows(pairs, 1);
            if dealt.worst < best.worst {
                best = dealt;
            }
            of_chunk /= 2;
        }
        best
    }

    /// Deals chunks of `of_chunk` whole tiles, and one per rank with its other rows.
    fn of_tiles(shares: Shares, pairs: &QueryWork, of_chunk: u64) -> Self {
        Self::of_rows(shares, pairs, of_chunk * TILE_ROWS)
    }

    /// Deals chunks of `of_chunk` rows, and one per rank with its other rows.
    fn of_rows(shares: Shares, pairs: &QueryWork, of_chunk: u64) -> Self {
        let Shares { rows, ranks } = shares;
        let per_rank = (rows / ranks as u64 / of_chunk).max(1);
        let chunks = move |rank| {
            let begin = shares.begin(rank);
            (0..per_rank).map(move |chunk| begin + chunk * of_chunk)
        };
        let edges = (0..ranks).flat_map(chunks).chain(Some(rows)).collect();
        let are_equal = rows == ranks as u64 * per_rank * of_chunk;
        Self::new(pairs, edges, ranks, (!are_equal).then_some(index(per_rank)))
    }

    /// As [`Dealt::best`], of chunks of whole leaves.
    fn best_of_leaves(rows: u64, leaf: u64, pairs: &QueryWork, ranks: usize) -> Self {
        let leaves = rows.div_ceil(leaf);
        let deal = |per_rank: u64| {
            let of_chunk = leaves.div_ceil(per_rank.saturating_mul(ranks as u64)).max(1);
            let chunks = leaves.div_ceil(of_chunk).max(1);
            let edges = (0..=chunks).map(|chunk| (chunk * of_chunk).saturating_mul(leaf).min(rows));
            (Self::new(pairs, edges.collect(), ranks, None), of_chunk == 1)
        };
        let mut per_rank = 1;
        let (mut best, mut are_shortest) = deal(per_rank);
        while best.worst > BALANCED && !are_shortest {
            per_rank *= 2;
            let (dealt, is_last) = deal(per_rank);
            are_shortest = is_last;
            if dealt.worst < best.worst {
                best = dealt;
            }
        }
        best
    }

    /// Returns the rows of some chunks, which ascend, in local order. Adjacent chunks are one run,
    /// but not if a document that is dealt begins between them.
    fn rows_of(&self, chunks: &[usize]) -> Runs {
        let edges = &self.edges;
        let is_one =
            |a: &usize, b: &usize| a + 1 == *b && self.documents.binary_search(&edges[*b]).is_err();
        let run = |adjacent: &[usize]| {
            let [first, last] = [adjacent.first(), adjacent.last()].map(|chunk| chunk.copied());
            let (start, end) = (edges[first.unwrap_or(0)], edges[last.map_or(0, |last| last + 1)]);
            Run { start: start.cast_signed(), step: 1, count: end - start }
        };
        let mut all = Vec::with_capacity(chunks.len());
        all.extend(chunks.chunk_by(is_one).map(run));
        if !self.documents.is_empty() {
            all = first_rows_apart(all);
        }
        tile_order(&mut all);
        let mut rows = Runs::with_capacity(all.len());
        all.into_iter().for_each(|run| rows.push_run(run));
        rows
    }

    /// Returns the larger imbalance of pairs and of rows.
    fn imbalance(&self) -> f64 {
        let [work, rows] = self.sums().map(|of| max_over_mean(of.most, of.total, self.ranks.len()));
        work.max(rows)
    }

    /// Returns the sums of pairs and of rows.
    fn sums(&self) -> [Sums; 2] {
        let rows_of = |&chunk: &usize| self.edges[chunk + 1] - self.edges[chunk];
        let of_ranks = self.ranks.iter().map(|chunks| {
            let rows: u64 = chunks.iter().map(rows_of).sum();
            [sum(&self.work, chunks), rows.into()]
        });
        let most = of_ranks.fold([0; 2], |most, of| [most[0].max(of[0]), most[1].max(of[1])]);
        let rows = self.edges.last().map_or(0, |end| end - self.edges[0]);
        let total = [self.work.iter().sum(), u128::from(rows)];
        [0, 1].map(|of: usize| Sums { most: most[of], total: total[of] })
    }

    /// Exchanges multiples of `unit` rows between ranks until none has more than [`BALANCED`] times
    /// the mean of the pairs, if there are such exchanges.
    fn exchange_rows(&mut self, pairs: &QueryWork, unit: u64) {
        let limits = limits_of(self.work.iter().sum(), self.ranks.len());
        let has_few = |chunks: &Vec<usize>| sum(&self.work, chunks) <= limits.balanced;
        if self.ranks.iter().all(has_few) {
            return;
        }
        let chunk = |&chunk: &usize| Chunk {
            rows: self.edges[chunk]..self.edges[chunk + 1],
            work: self.work[chunk],
        };
        let of_ranks = self.ranks.iter().map(|chunks| chunks.iter().map(chunk).collect());
        let Some(of_ranks) = RowExchange::new(pairs, of_ranks.collect(), limits).run(unit) else {
            return;
        };
        let owned = |(rank, chunks): (usize, Vec<Chunk>)| {
            chunks.into_iter().map(move |chunk| (rank, chunk))
        };
        let all = of_ranks.into_iter().enumerate().flat_map(owned).collect();
        *self = Self::of_chunks(&all, self.ranks.len());
    }

    /// Exchanges chunks so that fewer rows are sent, and the imbalance stays below [`EXCHANGED`] or
    /// does not grow. `whole` has all rows on one rank.
    fn join_segments(mut self, whole: &RingShards) -> Self {
        let segments = whole.q.first().and_then(|queries| queries.segments.first());
        let exchange = segments.and_then(|segments| {
            SegmentExchange::new(segments, &self.edges, &self.work, &self.ranks)
        });
        if let Some(mut exchange) = exchange {
            let limit = |of: Sums| of.most.max(most_of(EXCHANGED, of.total, self.ranks.len()));
            let [most_work, most_rows] = self.sums().map(limit);
            exchange.run(&mut self.ranks, most_work, most_rows);
            self.worst = self.imbalance();
        }
        self
    }
}

/// Deals chunks of which every `per_rank`-th has a length of its own: one of these to each rank,
/// then the others. Returns the chunks of each rank.
fn deal_with_tails(
    work: &[u128],
    ranks: usize,
    per_rank: usize,
    limits: Limits,
) -> Vec<Vec<usize>> {
    let (tails, whole): (Vec<usize>, Vec<usize>) =
        (0..work.len()).partition(|chunk| (chunk + 1).is_multiple_of(per_rank));
    let of = |chunks: &[usize]| -> Vec<u128> { chunks.iter().map(|&chunk| work[chunk]).collect() };
    let first = ChunkDeal::new(&of(&tails), vec![0; ranks]);
    let of_whole = of(&whole);
    let mut deal = ChunkDeal::new(&of_whole, first.sums);
    deal.exchange(&of_whole, limits);
    let owned = deal.ranks.iter().zip(&first.ranks).map(|(of_whole, of_tails)| {
        let whole = of_whole.iter().map(|&chunk| whole[chunk]);
        whole.chain(of_tails.iter().map(|&chunk| tails[chunk])).collect()
    });
    owned.collect()
}

/// Pairs, or rows, of ranks.
struct Sums {
    /// Those of the rank with the most.
    most: u128,
    /// Those of all ranks.
    total: u128,
}

/// Returns the sum over some chunks.
fn sum(of: &[u128], chunks: &[usize]) -> u128 {
    chunks.iter().map(|&chunk| of[chunk]).sum()
}

/// Returns the mean over the ranks times `imbalance`, rounded down.
fn most_of(imbalance: f64, total: u128, ranks: usize) -> u128 {
    // in thousandths: all pairs are fewer than 2¹¹⁸
    let thousandths = (imbalance * 1000.0).round() as u128;
    total * thousandths / (1000 * ranks.max(1) as u128)
}

/// Returns the limits of the pairs of a rank, of which all ranks have `total`.
pub(super) fn limits_of(total: u128, ranks: usize) -> Limits {
    let limit = |imbalance| most_of(imbalance, total, ranks);
    Limits { balanced: limit(BALANCED), target: limit(EXCHANGED), mean: limit(1.0) }
}

/// Returns the most of a rank divided by the mean of all, which have `total`; 1 if that is 0.
fn max_over_mean(most: u128, total: u128, ranks: usize) -> f64 {
    if total == 0 { 1.0 } else { most as f64 * ranks as f64 / total as f64 }
}
