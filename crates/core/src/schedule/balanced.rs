//! Layouts that balance the work of a batch of documents, under any mask.
//!
//! ```text
//! for m = 1, 2, 4, …:                             # chunks per rank
//!     cut the rows into m·ranks chunks of equal length; w[c] = visible pairs of chunk c's queries
//!     deal the chunks, most pairs first, in rounds of one chunk per rank:
//!         the chunk with the most pairs to the rank with the fewest so far
//!     exchange chunks of the ranks with the most and the fewest pairs while that helps
//!     stop if the most pairs of a rank are at most 1.02 times the mean
//! ```
//! Every rank gets m chunks, so that numbers of rows differ by at most one per chunk. Few long
//! chunks are tried first: they keep documents together, so that fewer rows are sent. With a causal
//! mask and no documents, the second round gives the zigzag layout.

use std::{cmp::Reverse, sync::Arc};

use super::Work;
use crate::{Batch, CustomLayout, Error, Layout, Result, RingShards, Runs, Shard, Side, Spec};

/// Imbalance ([`Work::max_over_mean`]) at which no shorter chunks are tried.
const BALANCED: f64 = 1.02;
/// Fewest rows of a chunk: the KV tile of the CPU kernels, of which a shorter chunk fills a part.
const LEAST_ROWS: usize = 64;

impl Layout {
    /// Returns a layout that gives every rank the same number of rows, and the same number of
    /// visible pairs up to 2 % where chunks of at least 64 rows permit it; otherwise the best one
    /// found. `batch` is that of all rows. Its dense mask is not counted, since kernels compute
    /// tiles. The same arguments give the same layout on every rank.
    ///
    /// Rows are assigned by their queries' pairs. A rank has the keys of its queries' rows if there
    /// are as many keys as queries; otherwise keys are divided into one chunk per rank. A row is
    /// sent only to the ranks that need it, with every layout.
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
        let batch = &Batch {
            q_segment_ids: batch.q_segment_ids.clone(),
            kv_segment_ids: batch.kv_segment_ids.clone(),
            q_positions: batch.q_positions.clone(),
            kv_positions: batch.kv_positions.clone(),
            attention_mask: None,
            cum_seqlens_q: batch.cum_seqlens_q.clone(),
            cum_seqlens_k: batch.cum_seqlens_k.clone(),
        };
        let mut best: Option<(f64, Vec<Vec<usize>>, usize)> = None;
        let mut chunks = ranks;
        loop {
            let work = work_of_chunks(spec, batch, chunks)?;
            let dealt = deal(&work, ranks);
            let imbalance = imbalance(&work, &dealt);
            if best.as_ref().is_none_or(|(least, ..)| imbalance < *least) {
                best = Some((imbalance, dealt, chunks));
            }
            let shorter = chunks.saturating_mul(2);
            if imbalance <= BALANCED || q_len / shorter < LEAST_ROWS {
                break;
            }
            chunks = shorter;
        }
        let Some((_, dealt, chunks)) = best else { return Ok(Self::Contiguous) };
        let rows_of = |shard: &Vec<usize>| -> Runs {
            let mut rows = Runs::new();
            for &chunk in shard {
                let runs = Self::Contiguous.shard(Side::Q, q_len, chunk, chunks);
                runs.runs().iter().for_each(|&run| rows.push_run(run));
            }
            rows
        };
        let q: Vec<Runs> = dealt.iter().map(rows_of).collect();
        let kv = if q_len == kv_len {
            q.clone()
        } else {
            (0..ranks).map(|rank| Self::Contiguous.shard(Side::Kv, kv_len, rank, ranks)).collect()
        };
        Ok(Self::Custom(Arc::new(CustomLayout { q, kv })))
    }
}

/// Returns the visible pairs of each of `chunks` chunks of queries.
fn work_of_chunks(spec: &Spec, batch: &Batch, chunks: usize) -> Result<Vec<u128>> {
    let (dims, layout) = (&spec.dims, &Layout::Contiguous);
    let mut shards = RingShards { q: Vec::with_capacity(chunks), kv: Vec::with_capacity(chunks) };
    for chunk in 0..chunks {
        batch.validate_layout(dims, layout, chunk, chunks)?;
        let rows = |side, len| -> Vec<u64> {
            layout.shard(side, len, chunk, chunks).iter().map(i64::cast_unsigned).collect()
        };
        let own = batch.select(&rows(Side::Q, dims.q_len), &rows(Side::Kv, dims.kv_len))?;
        let shard =
            |side| Arc::new(Shard::local(dims, spec.alignment, layout, side, chunk, chunks, &own));
        shards.q.push(shard(Side::Q));
        shards.kv.push(shard(Side::Kv));
    }
    let work = Work::of(&*spec.mask, dims.q_heads, dims.batch, &shards);
    Ok((0..chunks).map(|chunk| work.of_rank(chunk)).collect())
}

/// Assigns the chunks to `ranks` ranks, as many to each. Returns the chunks of each rank, ascending.
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

/// Returns the most pairs of a rank divided by the mean; 1 if there are none.
fn imbalance(work: &[u128], shards: &[Vec<usize>]) -> f64 {
    let sum = |shard: &Vec<usize>| shard.iter().map(|&chunk| work[chunk]).sum::<u128>();
    let (most, total) = (shards.iter().map(sum).max().unwrap_or(0), work.iter().sum::<u128>());
    if total == 0 { 1.0 } else { most as f64 * shards.len() as f64 / total as f64 }
}
