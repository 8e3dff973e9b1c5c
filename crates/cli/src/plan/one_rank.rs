//! The program of one rank of a ring of more ranks than messages are summed over.

use annulus_core::{Result, Spec};
use annulus_plan::{NeedsIndex, RingShards};
use serde::Serialize;

use super::{
    Planned,
    figures::{check_queries, check_rank},
    leaves::QueryPass,
    program::Program,
};
use crate::{
    report::{bytes, counted, grouped},
    stdout::say,
};

/// Program and figures of one rank.
#[derive(Debug, Serialize)]
pub(super) struct OneRank {
    /// Number of ranks.
    ranks: usize,
    /// Name of the strategy.
    strategy: String,
    /// Name of the layout.
    layout: &'static str,
    /// Name of the route.
    direction: &'static str,
    /// The mask in words.
    mask: String,
    /// Number of queries.
    q_len: usize,
    /// Number of keys.
    kv_len: usize,
    /// Query rows that the rank owns.
    q_rows: u64,
    /// Key rows that it owns.
    kv_rows: u64,
    /// Payload bytes that it sends in a forward pass.
    bytes_sent: u128,
    /// Payload bytes that it sends in a backward pass; null of a plan that is forward only.
    backward_bytes_sent: Option<u128>,
    /// Steps and messages.
    program: Program,
}

impl OneRank {
    /// Plans one rank of the ring of `spec`.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] for too many queries, a rank outside the ring, or a
    /// batch that does not fit.
    pub(super) fn new(spec: &Spec, planned: Planned, rank: usize) -> Result<Self> {
        let Planned { strategy, ranks, backward, layout, route, batch, mask, .. } = planned;
        check_queries(spec)?;
        check_rank(Some(rank), ranks)?;
        let shards = RingShards::of_batch(&spec.dims, spec.alignment, &layout, ranks, &batch)?;
        let (heads, batch_rows) = (spec.dims.q_heads, spec.dims.batch);
        let mask_of_spec = spec.mask.as_ref();
        let needs = NeedsIndex::of_queries(mask_of_spec, heads, batch_rows, &shards, &mut || ());
        let queries = if backward { QueryPass::new(spec, route, &shards)? } else { None };
        let program = Program::derive(spec, &needs, route, rank, backward, queries.as_ref());
        let [bytes_sent, of_backward] = program.bytes_sent();
        Ok(Self {
            ranks,
            strategy: strategy.published_on(ranks).to_string(),
            layout: layout.name(),
            direction: route.name(),
            mask,
            q_len: spec.dims.q_len,
            kv_len: spec.dims.kv_len,
            q_rows: shards.q[rank].rows.len(),
            kv_rows: shards.kv[rank].rows.len(),
            bytes_sent,
            backward_bytes_sent: backward.then_some(of_backward),
            program,
        })
    }

    /// Formats the program and its figures as JSON.
    pub(super) fn json(&self) -> String {
        // cannot fail: all keys are strings
        serde_json::to_string_pretty(self).map(|text| text + "\n").unwrap_or_default()
    }

    /// Prints the program and its figures.
    pub(super) fn print(&self) {
        let Self { mask, ranks, strategy, layout, direction, q_rows, kv_rows, .. } = self;
        let queries = counted(self.q_len as u64, "query", "queries");
        let keys = counted(self.kv_len as u64, "key", "keys");
        let ranks = counted(*ranks as u64, "rank", "ranks");
        say!("{mask} · {queries} × {keys} · {ranks} · {layout} layout");
        say!("strategy  {strategy}, {direction}");
        say!("rows      {} queries, {} keys", grouped(*q_rows), grouped(*kv_rows));
        say!("forward   {} sent", bytes(self.bytes_sent));
        if let Some(sent) = self.backward_bytes_sent {
            say!("backward  {} sent", bytes(sent));
        }
        self.program.print();
    }
}
