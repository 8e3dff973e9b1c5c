//! Bytes that a ring sends from one node to another.

use annulus_core::RowLayout;
use annulus_plan::{Group, Schedule};
use serde::Serialize;

use super::leaves::QueryPass;
use crate::report::bytes;

/// Messages from one node to another.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct BetweenNodes {
    /// Ranks of a node.
    node_ranks: usize,
    /// Payload bytes of all ranks in a forward pass.
    bytes_sent_total: u128,
    /// Payload bytes of the rank that sends most in a forward pass.
    bytes_max_rank: u128,
    /// Most steps of a forward pass in which any one rank sends to another node.
    steps_max_rank: usize,
    /// Payload bytes of all ranks in a backward pass; null of a plan that is forward only.
    backward_bytes_sent_total: Option<u128>,
}

impl BetweenNodes {
    /// Adds up the messages of `schedule`, which has gradients, and those of the queries of a
    /// backward pass in two passes.
    pub(super) fn new(
        node_ranks: usize,
        schedule: &Schedule,
        query_pass: Option<&QueryPass<'_>>,
        [block, gradient]: [&RowLayout; 2],
    ) -> Self {
        let of_group = |rank: usize, group: &Group, row_bytes: u64| -> u128 {
            let sends = group.sends.iter();
            let others = sends.filter(|send| send.peer / node_ranks != rank / node_ranks);
            others.map(|send| u128::from(send.rows.count()) * u128::from(row_bytes)).sum()
        };
        let mut figures = Self {
            node_ranks,
            bytes_sent_total: 0,
            bytes_max_rank: 0,
            steps_max_rank: 0,
            backward_bytes_sent_total: None,
        };
        let mut backward_bytes = 0;
        for (rank, steps) in schedule.steps.iter().enumerate() {
            let blocks =
                |row_bytes| steps.iter().map(move |step| of_group(rank, &step.before, row_bytes));
            let of_forward: u128 = blocks(block.bytes()).sum();
            let of_backward: u128 = match query_pass {
                Some(queries) => {
                    let steps = queries.schedule(rank).steps;
                    let row_bytes = queries.row_bytes();
                    steps.iter().map(|step| of_group(rank, &step.before, row_bytes)).sum()
                }
                None => {
                    steps.iter().map(|step| of_group(rank, &step.after, gradient.bytes())).sum()
                }
            };
            figures.bytes_sent_total += of_forward;
            backward_bytes += of_forward + of_backward;
            figures.bytes_max_rank = figures.bytes_max_rank.max(of_forward);
            let busy_steps = blocks(block.bytes()).filter(|&bytes| bytes > 0).count();
            figures.steps_max_rank = figures.steps_max_rank.max(busy_steps);
        }
        figures.backward_bytes_sent_total = Some(backward_bytes);
        figures
    }

    /// Returns the figures without those of the backward pass.
    pub(super) const fn forward_only(self) -> Self {
        Self { backward_bytes_sent_total: None, ..self }
    }

    /// Describes the bytes in one line.
    pub(super) fn in_words(self) -> String {
        let step = if self.steps_max_rank == 1 { "step" } else { "steps" };
        let backward = self.backward_bytes_sent_total;
        let backward = backward.map(|sent| format!("; {} backward", bytes(sent)));
        format!(
            "{} to other nodes of {} ranks; at most {} from one rank, in {} {step}{}",
            bytes(self.bytes_sent_total),
            self.node_ranks,
            bytes(self.bytes_max_rank),
            self.steps_max_rank,
            backward.unwrap_or_default()
        )
    }
}
