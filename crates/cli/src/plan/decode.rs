//! `annulus plan --decode`: a token of a KV cache that is sharded over ranks.

use annulus_core::{Result, Spec};
use annulus_plan::{CacheShards, Machine, TokenTraffic};
use serde::Serialize;

use super::strategies::seconds;
use crate::{
    report::{bytes, counted},
    stdout::say,
};

/// Figures of a token.
#[derive(Debug, Serialize)]
pub(super) struct TokenFigures {
    /// Number of ranks.
    ranks: usize,
    /// The mask in words.
    mask: String,
    /// Cached rows, that of the token included.
    cached_rows: usize,
    /// Rows of a page.
    page_rows: u64,
    /// Bytes of keys and values that are read by the rank that reads the most.
    bytes_read_max_rank: u128,
    /// Payload bytes that every rank sends.
    bytes_sent_rank: u128,
    /// Predicted seconds of a token; null without a machine, as are the fields below.
    time_predicted: Option<f64>,
    /// Predicted seconds of the tiles.
    tiles_predicted: Option<f64>,
    /// Predicted seconds of the reduction: its all-gather and both agreements.
    exposed_predicted: Option<f64>,
    /// True if the rate has no `token`, so that tiles run at the compute rate of a pass.
    reads_are_assumed: Option<bool>,
}

impl TokenFigures {
    /// Computes the figures, with the times on a machine.
    pub(super) fn new(
        spec: &Spec,
        shards: &CacheShards<'_>,
        mask: String,
        machine: Option<&Machine>,
    ) -> Result<Self> {
        let TokenTraffic { read, result, .. } = shards.traffic(spec)?;
        let predicted = machine.map(|machine| machine.token(spec, shards)).transpose()?;
        Ok(Self {
            ranks: shards.ranks,
            mask,
            cached_rows: spec.dims.kv_len,
            page_rows: shards.page_rows,
            bytes_read_max_rank: read,
            bytes_sent_rank: (shards.ranks as u128 - 1) * result,
            time_predicted: predicted.map(|of| of.seconds),
            tiles_predicted: predicted.map(|of| of.tiles),
            exposed_predicted: predicted.map(|of| of.exposed),
            reads_are_assumed: predicted.map(|of| of.reads_are_assumed),
        })
    }

    /// Prints the figures.
    pub(super) fn print(&self) {
        let rows = counted(self.cached_rows as u64, "cached row", "cached rows");
        let ranks = counted(self.ranks as u64, "rank", "ranks");
        let page = counted(self.page_rows, "row", "rows");
        say!("{} · a token after {rows} · {ranks} · pages of {page}", self.mask);
        let read = bytes(self.bytes_read_max_rank);
        say!("reads     {read} of keys and values, on the rank with the most");
        say!("sends     {} from each rank, whatever the rows", bytes(self.bytes_sent_rank));
        let (Some(time), Some(tiles), Some(exposed)) =
            (self.time_predicted, self.tiles_predicted, self.exposed_predicted)
        else {
            return;
        };
        say!(
            "predicted {}: tiles {}, reduction {}",
            seconds(time),
            seconds(tiles),
            seconds(exposed)
        );
        if self.reads_are_assumed == Some(true) {
            say!(
                "          the rate of the machine has no token, so tiles are assumed to run at \
                 the rate of a pass"
            );
        }
    }
}
