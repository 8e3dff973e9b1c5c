//! The time of a token of a KV cache that is sharded over ranks.
//!
//! ```text
//! call       agreement, tiles, all-gather of (out, max, sum), agreement
//! tiles      keys and values that the query attends to / bandwidth, on the rank with the most, and
//!            FLOPs of further query heads of the same KV head / their rate
//! all-gather every rank sends its result to each other rank at once: latency + bytes / bandwidth
//! agreement  ⌈log₂ ranks⌉ short messages, one after another
//! ```
//! Rank r of P has the pages r, r + P, r + 2·P …; the queries are those of the last row. Both terms
//! of the tiles add up, because a CPU core hides few of its reads under products: tokens of 1 to 16
//! query heads of a KV head are linear in their number within 14 %
//! (`benches/record/strategies.md`). Without a [`TokenRate`] tiles are assumed to run at the
//! compute rate of a pass, which is too fast for few query heads of each KV head.

use std::ops::Range;

use super::{Machine, TokenRate, network::Network, prediction::forward_seconds};
use annulus_core::{Error, KeyIntervals, Placement, Result, Spec, mask::Query};

/// Ranks and pages of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShards<'a> {
    /// Number of ranks, at least 1.
    pub ranks: usize,
    /// Rows of a page, at least 1.
    pub page_rows: u64,
    /// Nodes of the ranks; by [`Machine::ranks_per_node`] without them.
    pub placement: Option<&'a Placement>,
}

/// Bytes of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenTraffic {
    /// Bytes of keys and values that are read by the rank that reads the most.
    pub read: u128,
    /// Visible pairs of the rank that computes the most, all heads and batch rows.
    pub pairs: u128,
    /// Those beyond one pair of each KV head and key that is read, of the rank that has the most.
    pub further_pairs: u128,
    /// Bytes of the result of a rank, out, max and sum, which it sends to every other rank.
    pub result: u128,
}

/// Predicted time of a token, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenPrediction {
    /// Time until all ranks have the result.
    pub seconds: f64,
    /// Time of the tiles of the slowest rank.
    pub tiles: f64,
    /// Time of the all-gather and of both agreements.
    pub exposed: f64,
    /// True if the rate of the machine has no [`ComputeRate::token`](super::ComputeRate::token), so
    /// that tiles are assumed to run at the compute rate of a pass.
    pub reads_are_assumed: bool,
}

impl CacheShards<'_> {
    /// Returns the rows of a rank among the first `len` rows.
    fn local_len(&self, rank: usize, len: u64) -> u64 {
        let pages = len / self.page_rows;
        let (ranks, rank) = (self.ranks as u64, rank as u64);
        let last_page = match rank.cmp(&(pages % ranks)) {
            std::cmp::Ordering::Less => self.page_rows,
            std::cmp::Ordering::Equal => len % self.page_rows,
            std::cmp::Ordering::Greater => 0,
        };
        pages / ranks * self.page_rows + last_page
    }

    /// Returns the rows of a rank among these row numbers of `len` cached rows.
    fn rows(&self, rank: usize, len: u64, visible: &KeyIntervals) -> u64 {
        let of = |range: &Range<i64>| {
            let [start, end] =
                [range.start, range.end].map(|row| row.clamp(0, len.cast_signed()).unsigned_abs());
            self.local_len(rank, end.max(start)) - self.local_len(rank, start)
        };
        visible.ranges().iter().map(of).sum()
    }

    /// Counts the bytes of a token with [`annulus_core::Dims::kv_len`] cached rows, the token's
    /// included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `ranks` or `page_rows`; [`Error::Unsupported`] of the
    /// reproducible order, whose messages grow with the pages.
    pub fn traffic(&self, spec: &Spec) -> Result<TokenTraffic> {
        for (name, count) in [("ranks", self.ranks as u64), ("page_rows", self.page_rows)] {
            if count == 0 {
                return Err(Error::invalid(name, 0, "at least 1"));
            }
        }
        if spec.leaf_rows.is_some() {
            return Err(Error::unsupported("reproducible", "the prediction of a token"));
        }
        let dims = &spec.dims;
        let len = dims.kv_len as u64;
        let group = dims.q_heads / dims.kv_heads.max(1);
        let mask = &spec.mask;
        // of a KV head and its query heads, for each mask that differs
        let batches = if mask.per_batch() { dims.batch } else { 1 };
        let kv_heads = if mask.per_head() { dims.kv_heads } else { 1 };
        let repeats = (dims.batch / batches.max(1) * (dims.kv_heads / kv_heads.max(1))) as u128;
        let last = len.saturating_sub(1);
        let visible = |batch: usize, head: usize| {
            mask.bound(&Query { batch, head, row: last, position: last.cast_signed() })
        };
        let groups: Vec<Vec<KeyIntervals>> = (0..batches)
            .flat_map(|batch| (0..kv_heads).map(move |kv_head| (batch, kv_head)))
            .map(|(batch, kv_head)| {
                (0..group).map(|head| visible(batch, kv_head * group + head)).collect()
            })
            .collect();
        let of_rank = |rank: usize| {
            let rows_of = |group: &Vec<KeyIntervals>| {
                group.iter().map(|visible| self.rows(rank, len, visible)).collect::<Vec<u64>>()
            };
            let of_groups: Vec<Vec<u64>> = groups.iter().map(rows_of).collect();
            let rows = of_groups.iter().map(|rows| rows.iter().copied().max().unwrap_or(0));
            let [rows, pairs] = [rows.sum::<u64>(), of_groups.iter().flatten().sum()];
            [rows, pairs, pairs - rows].map(|count| u128::from(count) * repeats)
        };
        let all: Vec<[u128; 3]> = (0..self.ranks).map(of_rank).collect();
        let [rows, pairs, further_pairs] =
            [0, 1, 2].map(|which: usize| all.iter().map(|of| of[which]).max().unwrap_or(0));
        let row = (dims.head_dim + dims.value_dim) * spec.dtype.bytes();
        let result = dims.value_dim * spec.dtype.bytes() + 2 * spec.dtype.accumulator().bytes();
        Ok(TokenTraffic {
            read: rows * row as u128,
            pairs,
            further_pairs,
            result: (dims.batch * dims.q_heads * result) as u128,
        })
    }
}

impl Machine {
    /// Predicts the time of a token of a sharded KV cache with [`annulus_core::Dims::kv_len`] rows.
    ///
    /// # Errors
    /// As [`CacheShards::traffic`]; [`Error::InvalidArgument`] naming `machine` if it is invalid,
    /// has no rate of the element type, or lacks a link.
    pub fn token(&self, spec: &Spec, shards: &CacheShards<'_>) -> Result<TokenPrediction> {
        self.check()?;
        let traffic = shards.traffic(spec)?;
        let rate = self.rate(spec.dtype, spec.dims.head_dim)?;
        let seconds = |pairs: u128, forward: f64| pairs as f64 * forward_seconds(spec, forward);
        let tiles = match rate.token {
            Some(TokenRate { bandwidth, further_heads }) => {
                traffic.read as f64 / bandwidth + seconds(traffic.further_pairs, further_heads)
            }
            None => seconds(traffic.pairs, rate.forward),
        };
        let network = Network::new(self, &self.nodes(shards.ranks, shards.placement))?;
        let exposed = network.all_gather(traffic.result as f64) + network.agreements();
        let reads_are_assumed = rate.token.is_none();
        Ok(TokenPrediction { seconds: tiles + exposed, tiles, exposed, reads_are_assumed })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{
        super::{
            ComputeRate,
            tests::{is_near, link, machine},
        },
        *,
    };
    use annulus_core::{DType, Dims, mask};

    /// 10 pages of 64 rows and one of 10 on 4 ranks: rank 0 and 1 have 3 whole pages, rank 2 two
    /// and the rest.
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

        // rank 0 reads 147,456 bytes in 1.5 s, and 6 of 8 heads add 4 · 48 FLOPs for each pair in
        // 0.25 s; 3 messages of 1,088 bytes at once in 0.1 + 3 · 0.5 s; two agreements of two
        // rounds
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
        // the last 100 rows: 10 of page 10 on rank 2, 64 of page 9 on rank 1, 26 of page 8 on rank
        // 0
        let window = mask::Window { left: Some(99), right: Some(0), first_visible: 0, offset: 0 };
        assert_eq!(rows(Arc::new(window)), 64);

        // the heads of a KV head may differ: what one of them needs is read once
        let heads = [9, 99, 19, 29].map(|left| {
            let window =
                mask::Window { left: Some(left), right: Some(0), first_visible: 0, offset: 0 };
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
        assert_eq!(
            none.traffic(&spec).unwrap_err().to_string(),
            "page_rows: got 0, want at least 1"
        );
    }
}
