//! A round of a call in the default order: one message to each rank, merged in the order of ranks.
//! [`Rounds`] divides the queries of a call so that messages are short.
//!
//! A message has the normalised output and the softmax statistics of some queries over the keys of
//! one rank (their merge: `merged_softmax.rs`).
//!
//! ```text
//! message   max, sum [b, queries, q_heads], accumulator's type · out [b, queries, q_heads, dv]
//! ```
//! Sums are in f64 and in the order of ranks, so that all ranks have the same bits.
//!
//! # Source
//! Milakov, Gimelshein 2018, Online normalizer calculation for softmax, §3; the reduction of
//! split-KV decoding in FlashDecoding (Dao et al. 2023), over ranks.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, Channel, DType, Dims, Error, ForwardPass, HostBuffer, HostTensors, HostView,
    HostViewMut, Inputs, MessageHeader, Outputs, RankShard, Result, Rows, Workspace, index,
};

use super::KvCache;
use crate::{
    merged_softmax::{MergedSoftmax, PartialMerge, too_short},
    ring::{PassKind, in_flight::InFlight, program::MessageGroup, step_events::Observer},
};

impl<B: Backend<Space: HostTensors>> KvCache<B> {
    /// Allocates what a call with these rounds needs.
    pub(super) fn prepare_partials(&mut self, rounds: &Rounds) -> Result<()> {
        let rows = rounds.rows(0);
        self.attend_to_queries(&rows)?;
        let bytes = self.partial_shape(annulus_core::index(rows.end - rows.start)).bytes();
        self.buffers.reserve(bytes, bytes, self.ranks)
    }

    /// Adapts the workspace to the queries with the row numbers `rows`.
    pub(super) fn attend_to_queries(&mut self, rows: &Range<u64>) -> Result<()> {
        let shard = self.shard(self.query_rows(rows)?);
        self.attend_to_shard(&shard)
    }

    pub(super) const fn partial_shape(&self, queries: usize) -> RankPartialShape {
        RankPartialShape { dims: self.spec.dims, dtype: self.spec.dtype, queries }
    }

    /// Returns the input of the workspace for these queries.
    fn shard(&self, queries: Arc<Rows>) -> RankShard {
        RankShard {
            spec: Arc::clone(&self.local_spec),
            most_query_rows: queries.len() as u64,
            queries,
            keys: Arc::default(),
            attention_mask: None,
            key_lists: None,
            received_lists: None,
            most_block_rows: self.segments.segment_rows(),
            leaves: None,
        }
    }

    /// Computes the queries `q` over this rank's rows, exchanges the results and merges them.
    pub(super) fn partial_round(
        &mut self,
        q: HostView<'_>,
        sinks: Option<&HostView<'_>>,
        mut results: Outputs<HostViewMut<'_>>,
        tag: u64,
    ) -> Result<Duration> {
        let none = || Error::internal("a KV cache without memory for a call");
        let shape = self.partial_shape(q.shape()[1]);
        let transfers = self.partial_transfers(shape.bytes());
        let Self { transport, segments, workspace, buffers, spec, rank, lengths, .. } = self;
        let workspace = workspace.as_mut().ok_or_else(none)?;
        let observer = Observer::of_messages(None, *rank, PassKind::Forward, Instant::now());
        let mut in_flight = InFlight::new(transport.as_mut(), tag, *lengths, observer);

        let mut own = buffers.own.take().ok_or_else(none)?;
        let message = own.bytes_mut().ok_or_else(none)?;
        // the rank's rows are blocks: none is in the tensors of the call
        let Dims { batch, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let empty = |dim| HostView::of_bytes(&[], spec.dtype, [batch, 0, kv_heads, dim]);
        let [k, v] = [empty(head_dim)?, empty(value_dim)?];
        let [q, k, v] = [q.reborrow(), k.reborrow(), v.reborrow()];
        let inputs = Inputs::new(q, k, v);
        let mut pass = workspace.forward(inputs, &mut || in_flight.tick())?;
        for block in segments.blocks() {
            pass.attend(&block?, &mut || in_flight.tick())?;
            in_flight.check()?;
        }
        // the rank's lse is computed, and not sent
        let mut lse = HostBuffer::zeroed(shape.statistic_bytes() as u64)?;
        let mut partial = shape.results(message, lse.bytes_mut().ok_or_else(none)?)?;
        pass.finish(&mut partial, &mut || in_flight.tick())?;
        in_flight.check()?;

        let source = (own, ());
        let receives = &mut buffers.receives;
        in_flight.post(&transfers, Some(&source), |_| receives.pop().ok_or_else(none))?;
        let mut arrived = in_flight.wait_all()?;
        arrived.sort_unstable_by_key(|(header, _)| header.peer);
        let before = arrived.partition_point(|(header, _)| header.peer < *rank);
        let Dims { batch, q_heads, value_dim, .. } = spec.dims;
        let mut merge = PartialMerge::new([batch, shape.queries, q_heads, value_dim], true, false)?;
        let [lower, higher] = [&arrived[..before], &arrived[before..]]
            .map(|ranks| ranks.iter().map(|(_, message)| message.buffer.bytes()));
        for message in lower.chain([source.0.bytes()]).chain(higher) {
            shape.add_to(&mut merge, message)?;
        }
        if let Some(sinks) = sinks {
            merge.add_sinks(sinks)?;
        }
        merge.finish(&mut results);
        buffers.receives.extend(arrived.into_iter().map(|(_, message)| message.buffer));
        buffers.own = Some(source.0);
        Ok(in_flight.waited())
    }

    /// Returns the messages of a round: one to each rank, the nearest first.
    pub(super) fn partial_transfers(&self, bytes: u64) -> MessageGroup {
        let header = |peer, bytes| MessageHeader {
            peer,
            channel: Channel::Kv,
            tag: 0,
            step: 0,
            ranges: std::iter::once(bytes).collect(),
            agreed: None,
        };
        MessageGroup::exchange([self.rank, self.ranks], 1..self.ranks, header, |_| {
            [0..bytes, 0..bytes]
        })
    }
}

/// Longest message in bytes, unless that of one query is longer. Queries of a longer prefill are
/// computed in several rounds, so that the memory for messages is at most ranks × 1 MiB; four times
/// as much in the reproducible order, whose messages differ and grow.
pub(super) const MESSAGE_BYTES: u64 = 1 << 20;

/// Tags of one round: one in the default order, two in the reproducible order.
pub(super) const ROUND_TAGS: u64 = 2;

/// Rounds of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Row numbers of all queries.
    rows: Range<u64>,
    /// Queries of all rounds but the last, which may have fewer.
    most: u64,
}

impl Rounds {
    /// Divides the queries with the row numbers `rows` into the fewest rounds of at most `longest`
    /// queries, at least 1.
    pub(super) fn new(rows: Range<u64>, longest: u64) -> Self {
        let queries = rows.end - rows.start;
        let rounds = queries.div_ceil(longest.max(1)).max(1);
        Self { rows, most: queries.div_ceil(rounds).max(1) }
    }

    /// Returns the number of queries.
    pub(super) const fn queries(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    /// Returns the row numbers of all queries.
    pub(super) fn all(&self) -> Range<u64> {
        self.rows.clone()
    }

    /// Returns the number of rounds.
    pub(super) const fn count(&self) -> u64 {
        self.queries().div_ceil(self.most)
    }

    /// Returns the row numbers of the queries of a round. The first round is the longest.
    pub(super) fn rows(&self, round: u64) -> Range<u64> {
        let first = (self.rows.start + round * self.most).min(self.rows.end);
        first..(first + self.most).min(self.rows.end)
    }
}

/// Shape of the messages of some queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankPartialShape {
    pub(super) dims: Dims,
    pub(super) dtype: DType,
    /// Queries of the message.
    pub(super) queries: usize,
}

impl RankPartialShape {
    /// Returns the bytes of a message.
    pub(super) fn bytes(&self) -> u64 {
        (self.queries as u64).saturating_mul(Self::query_bytes(&self.dims, self.dtype))
    }

    /// Returns the bytes of one query, of all batch rows and heads.
    pub(super) fn query_bytes(dims: &Dims, dtype: DType) -> u64 {
        let rows = dims.batch as u64 * dims.q_heads as u64;
        let statistics = 2 * dtype.accumulator().bytes() as u64;
        rows * (dims.value_dim as u64 * dtype.bytes() as u64 + statistics)
    }

    /// Returns the tensors of a message, and lse, for writing.
    fn results<'a>(
        &self,
        message: &'a mut [u8],
        lse: &'a mut [u8],
    ) -> Result<Outputs<HostViewMut<'a>>> {
        let bytes = message.get_mut(..index(self.bytes())).ok_or_else(too_short)?;
        let statistic = self.statistic_bytes();
        let (max, rest) = bytes.split_at_mut_checked(statistic).ok_or_else(too_short)?;
        let (sum, out) = rest.split_at_mut_checked(statistic).ok_or_else(too_short)?;
        let sums = self.dtype.accumulator();
        let shape = self.statistic_shape();
        let statistic =
            |bytes| HostViewMut::of_bytes(bytes, sums, shape).map(HostViewMut::swap_rows_and_heads);
        let out = HostViewMut::of_bytes(out, self.dtype, self.out_shape())?;
        let [lse, max, sum] = [statistic(lse)?, statistic(max)?, statistic(sum)?];
        Ok(Outputs { max: Some(max), sum: Some(sum), ..Outputs::new(out, lse) })
    }

    /// Adds a message to those of lower ranks.
    fn add_to(&self, merge: &mut PartialMerge, message: &[u8]) -> Result<()> {
        let bytes = message.get(..index(self.bytes())).ok_or_else(too_short)?;
        let (statistics, out) = bytes.split_at(2 * self.statistic_bytes());
        let (max, sum) = statistics.split_at(self.statistic_bytes());
        let sums = self.dtype.accumulator();
        let shape = self.statistic_shape();
        let [max, sum] = [max, sum].map(|bytes| HostView::of_bytes(bytes, sums, shape)?.widened());
        let out = HostView::of_bytes(out, self.dtype, self.out_shape())?.widened()?;
        // the cache has no use for ties
        let statistics = max?.into_iter().zip(sum?);
        let statistics = statistics.map(|(max, sum)| MergedSoftmax { max, sum, ties: 0.0 });
        merge.add(0..self.dims.q_heads, out.into_iter(), statistics, std::iter::empty());
        Ok(())
    }

    fn statistic_bytes(&self) -> usize {
        self.statistic_shape().iter().product::<usize>() * self.dtype.accumulator().bytes()
    }

    const fn statistic_shape(&self) -> [usize; 4] {
        [self.dims.batch, self.queries, self.dims.q_heads, 1]
    }

    const fn out_shape(&self) -> [usize; 4] {
        [self.dims.batch, self.queries, self.dims.q_heads, self.dims.value_dim]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_divided_evenly_into_the_fewest_rounds() {
        let rounds = |queries: u64, longest| {
            let rounds = Rounds::new(100..100 + queries, longest);
            (0..rounds.count()).map(|round| rounds.rows(round)).collect::<Vec<_>>()
        };
        assert_eq!(rounds(40, 12), [100..110, 110..120, 120..130, 130..140]);
        assert_eq!(rounds(7, 3), [100..103, 103..106, 106..107]);
        assert_eq!(rounds(3, 0), [100..101, 101..102, 102..103]);
        assert_eq!(rounds(3, u64::MAX), vec![100..103]);
        assert_eq!(rounds(0, 5), Vec::<Range<u64>>::new());
    }
}
