//! A round of a call in the default order: one message to each rank, merged in the order of ranks.
//! [`Rounds`] divides the queries of a call so that messages are short.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Backend, Channel, Dims, Error, ForwardPass, HostBuffer, HostTensors, HostView, HostViewMut,
    Inputs, MessageHeader, Outputs, RankShard, Result, Rows, Workspace,
};

use super::{
    Buffers, KvCache,
    partials::{PartialResults, PartialShape, Results},
};
use crate::ring::{PassKind, in_flight::InFlight, program::Transfers, step_events::Observer};

impl<B: Backend<Space: HostTensors>> KvCache<B> {
    /// Allocates what a call with these rounds needs.
    pub(super) fn prepare_partials(&mut self, rounds: &Rounds) -> Result<()> {
        let rows = rounds.rows(0);
        self.attend_to_queries(&rows)?;
        let bytes = self.partial_shape(annulus_core::index(rows.end - rows.start)).bytes();
        if self.buffers.bytes < bytes {
            let mut receives = annulus_core::memory::list("messages", self.ranks - 1)?;
            let own = HostBuffer::zeroed(bytes)?;
            for _ in 1..self.ranks {
                receives.push(HostBuffer::zeroed(bytes)?);
            }
            self.buffers = Buffers { bytes, own: Some(own), receives };
        }
        Ok(())
    }

    /// Adapts the workspace to the queries with the row numbers `rows`.
    pub(super) fn attend_to_queries(&mut self, rows: &Range<u64>) -> Result<()> {
        let shard = self.shard(self.query_rows(rows)?);
        self.attend_to_shard(&shard)
    }

    pub(super) const fn partial_shape(&self, queries: usize) -> PartialShape {
        PartialShape { dims: self.spec.dims, dtype: self.spec.dtype, queries }
    }

    /// Returns the input of the workspace for these queries.
    fn shard(&self, queries: Arc<Rows>) -> RankShard {
        RankShard {
            spec: Arc::clone(&self.local_spec),
            most_query_rows: queries.len() as u64,
            queries,
            keys: Arc::default(),
            attention_mask: None,
            most_block_rows: self.segments.segment_rows(),
            leaves: None,
        }
    }

    /// Computes the queries `q` over this rank's rows, exchanges the results and merges them.
    pub(super) fn partial_round(
        &mut self,
        q: HostView<'_>,
        sinks: Option<&HostView<'_>>,
        results: Results<'_>,
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
        let PartialResults { out, max, sum } = shape.results(message)?;
        // the rank's rows are blocks: none is in the tensors of the call
        let Dims { batch, kv_heads, head_dim, value_dim, .. } = spec.dims;
        let empty = |dim| HostView::of_bytes(&[], spec.dtype, [batch, 0, kv_heads, dim]);
        let [k, v] = [empty(head_dim)?, empty(value_dim)?];
        let [q, k, v] = [q.reborrow(), k.reborrow(), v.reborrow()];
        let inputs = Inputs { q, k, v, bias: None, sinks: None };
        let mut pass = workspace.forward(inputs, &mut || in_flight.tick())?;
        for block in segments.blocks() {
            pass.attend(&block?, &mut || in_flight.tick())?;
            in_flight.check()?;
        }
        // the rank's lse is computed, and not sent
        let [batch, heads, queries, _] = max.shape();
        let sums = spec.dtype.accumulator();
        let mut lse = HostBuffer::zeroed((batch * heads * queries * sums.bytes()) as u64)?;
        let lse = lse.bytes_mut().ok_or_else(none)?;
        let lse = HostViewMut::of_bytes(lse, sums, max.shape())?;
        let partial = &mut Outputs {
            out,
            lse,
            max: Some(max),
            sum: Some(sum),
            ties: None,
            out_residual: None,
        };
        pass.finish(partial, &mut || in_flight.tick())?;
        in_flight.check()?;

        let source = (own, ());
        let receives = &mut buffers.receives;
        in_flight.post(&transfers, Some(&source), |_| receives.pop().ok_or_else(none))?;
        let mut arrived = in_flight.wait_all()?;
        arrived.sort_unstable_by_key(|(header, _)| header.peer);
        let before = arrived.partition_point(|(header, _)| header.peer < *rank);
        let mut messages = Vec::with_capacity(arrived.len() + 1);
        for (_, message) in &arrived {
            messages.push(message.buffer.bytes());
        }
        messages.insert(before, source.0.bytes());
        shape.merge(&messages, sinks, results)?;
        buffers.receives.extend(arrived.into_iter().map(|(_, message)| message.buffer));
        buffers.own = Some(source.0);
        Ok(in_flight.waited())
    }

    /// Returns the messages of a round: one to each rank, the nearest first.
    pub(super) fn partial_transfers(&self, bytes: u64) -> Transfers {
        let header = |peer| MessageHeader {
            peer,
            channel: Channel::Kv,
            tag: 0,
            step: 0,
            ranges: std::iter::once(0..bytes).collect(),
            agreed: None,
        };
        let distances = 1..self.ranks;
        let to = distances.clone().map(|distance| (self.rank + distance) % self.ranks);
        let from = distances.map(|distance| (self.rank + self.ranks - distance) % self.ranks);
        Transfers { sends: to.map(header).collect(), receives: from.map(header).collect() }
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
