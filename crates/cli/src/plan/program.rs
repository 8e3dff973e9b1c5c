//! Program of one rank: its ring steps, with the messages that it sends in them; and the partial
//! results of leaves that wait to be merged in the reproducible order.

use std::sync::Arc;

use annulus_core::{LeafMerges, RankLeaves, Result, Shard, leaves_of};
use annulus_plan::{Layout, RankSchedule, Strategy};
use serde::Serialize;

use super::ring::{PlannedRing, QueryPass, Send};
use crate::{
    report::{bytes, counted, grouped},
    say,
};

/// Number of steps that are printed from the beginning and from the end of a long program.
const PRINTED_STEPS: usize = 24;

/// Program of one rank in a forward and, if there is one, a backward pass.
#[derive(Debug, Serialize)]
pub(super) struct Program {
    /// The rank.
    rank: usize,
    /// Steps up to the last one with any work.
    steps: Vec<ProgramStep>,
    /// Steps of the second pass of a backward pass in the reproducible order, in which queries are
    /// sent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    query_steps: Vec<ProgramStep>,
}

/// One step of the program.
#[derive(Debug, Serialize)]
struct ProgramStep {
    /// Number of the step.
    step: usize,
    /// Owner of the block that the rank's queries attend to.
    owner: usize,
    /// Number of the owner's rows in the block.
    rows: u64,
    /// Blocks that the rank sends during the step.
    sends: Vec<Send>,
    /// Gradients that the rank sends after the step, in a backward pass.
    sends_gradients: Vec<Send>,
}

impl Program {
    /// Derives the program of a rank of `ring`. A backward pass sends queries in the reproducible
    /// order, and gradients in any other.
    pub(super) fn new(ring: &PlannedRing<'_>, rank: usize) -> Self {
        let queries = ring.queries.as_ref().filter(|_| ring.backward);
        let schedule = ring.schedule_of(rank, ring.backward && queries.is_none());
        let [block, gradient] = [ring.spec.kv_row_layout(), ring.spec.gradient_row_layout()];
        let query_steps = queries.map(|pass| steps(&pass.schedule_of(rank), pass.row_bytes, 0));
        Self {
            rank,
            steps: steps(&schedule, block.bytes(), gradient.bytes()),
            query_steps: query_steps.unwrap_or_default(),
        }
    }

    /// Returns the payload bytes that the rank sends in a forward and in a backward pass.
    fn bytes_sent(&self) -> [u128; 2] {
        let sum = |sends: &[Send]| sends.iter().map(|send| send.bytes).sum::<u128>();
        let blocks: u128 = self.steps.iter().map(|step| sum(&step.sends)).sum();
        let gradients: u128 = self.steps.iter().map(|step| sum(&step.sends_gradients)).sum();
        let queries: u128 = self.query_steps.iter().map(|step| sum(&step.sends)).sum();
        [blocks, blocks + gradients + queries]
    }

    /// Prints the program as one table, or as one for each pass of blocks around the ring.
    pub(super) fn print(&self) {
        let Self { rank, steps, query_steps } = self;
        print_steps(&format!("program of rank {rank}"), steps);
        if !query_steps.is_empty() {
            print_steps(&format!("queries of a backward pass, rank {rank}"), query_steps);
        }
    }
}

/// Returns the steps up to the last one with any work, for records of these sizes.
fn steps(schedule: &RankSchedule, block_bytes: u64, gradient_bytes: u64) -> Vec<ProgramStep> {
    let active = schedule.last_step().map_or(1, |last| last + 1);
    let steps = schedule.steps.iter().take(active).enumerate();
    let steps = steps.map(|(number, step)| ProgramStep {
        step: number,
        owner: step.owner,
        rows: step.rows.count(),
        sends: Send::of(&step.before.sends, block_bytes),
        sends_gradients: Send::of(&step.after.sends, gradient_bytes),
    });
    steps.collect()
}

/// Prints steps as a table.
fn print_steps(title: &str, steps: &[ProgramStep]) {
    say!("");
    say!("{title}");
    let sends_gradients = steps.iter().any(|step| !step.sends_gradients.is_empty());
    let gradients = |words: &str| match sends_gradients {
        true => format!(" {words:>26}"),
        false => String::new(),
    };
    let columns = gradients("sends gradients");
    say!("{:>5} {:>8} {:>13} {:>26}{columns}", "step", "block of", "rows", "sends");
    let omitted = steps.len().saturating_sub(2 * PRINTED_STEPS);
    for (index, step) in steps.iter().enumerate() {
        if omitted > 0 && index == PRINTED_STEPS {
            say!("      … {} more steps, which --json has", grouped(omitted as u64));
        }
        if omitted == 0 || index < PRINTED_STEPS || index >= PRINTED_STEPS + omitted {
            say!(
                "{:>5} {:>8} {:>13} {:>26}{}",
                step.step,
                step.owner,
                grouped(step.rows),
                in_words(&step.sends),
                gradients(&in_words(&step.sends_gradients))
            );
        }
    }
}

/// Describes messages by receiver and bytes.
fn in_words(sends: &[Send]) -> String {
    let send = |send: &Send| format!("{} to {}", bytes(send.bytes), send.to);
    sends.iter().map(send).collect::<Vec<_>>().join(", ")
}

/// Describes a plan of these numbers of queries and keys in one line.
pub(super) fn title(mask: &str, [q_len, kv_len]: [usize; 2], ranks: usize, layout: &str) -> String {
    let queries = counted(q_len as u64, "query", "queries");
    let keys = counted(kv_len as u64, "key", "keys");
    let ranks = counted(ranks as u64, "rank", "ranks");
    format!("{mask} · {queries} × {keys} · {ranks} · {layout} layout")
}

/// Program and figures of one rank of a ring of more ranks than messages are summed over.
#[derive(Debug, Serialize)]
pub(super) struct OneRank {
    /// Number of ranks.
    pub(super) ranks: usize,
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
    /// Plans one rank of `ring`. `mask` is the mask in words.
    pub(super) fn new(
        ring: &PlannedRing<'_>,
        rank: usize,
        strategy: Strategy,
        layout: &Layout,
        mask: String,
    ) -> Self {
        let program = Program::new(ring, rank);
        let [bytes_sent, of_backward] = program.bytes_sent();
        Self {
            ranks: ring.ranks(),
            strategy: strategy.published_on(ring.ranks()).to_string(),
            layout: layout.name(),
            direction: ring.route.name(),
            mask,
            q_len: ring.spec.dims.q_len,
            kv_len: ring.spec.dims.kv_len,
            q_rows: ring.shards.q[rank].rows.len(),
            kv_rows: ring.shards.kv[rank].rows.len(),
            bytes_sent,
            backward_bytes_sent: ring.backward.then_some(of_backward),
            program,
        }
    }

    /// Prints the program and its figures.
    pub(super) fn print(&self) {
        let Self { mask, ranks, strategy, layout, direction, q_rows, kv_rows, .. } = self;
        say!("{}", title(mask, [self.q_len, self.kv_len], *ranks, layout));
        say!("strategy  {strategy}, {direction}");
        say!("rows      {} queries, {} keys", grouped(*q_rows), grouped(*kv_rows));
        say!("forward   {} sent", bytes(self.bytes_sent));
        if let Some(sent) = self.backward_bytes_sent {
            say!("backward  {} sent", bytes(sent));
        }
        self.program.print();
    }
}

/// The most ranks of which every one is planned; of more, as many at equal distances.
const MOST_LEAF_RANKS: usize = 64;

/// Memory of partial results.
#[derive(Debug, Serialize)]
pub(super) struct LeafFigures {
    /// Rows of a leaf.
    rows: u64,
    /// The most partial results of a query that wait at one time, of any rank.
    most_partial_results: usize,
    /// Their bytes in a plan that is forward only, on the rank with the most.
    most_bytes: u64,
    /// The most partial results of dK and dV that wait at one time, of any rank; null of a plan
    /// that is forward only.
    most_partial_gradients: Option<usize>,
    /// Bytes of both kinds in a plan with a backward pass, on the rank with the most; null of a
    /// plan that is forward only.
    most_bytes_with_backward: Option<u64>,
    /// Number of ranks that were planned.
    ranks_planned: usize,
}

impl LeafFigures {
    /// Plans the merges of the ranks of `ring`.
    pub(super) fn new(ring: &PlannedRing<'_>, query_pass: &QueryPass<'_>) -> Result<Self> {
        let rows = ring.spec.leaf_rows.unwrap_or(1);
        let merges = |schedule: &RankSchedule, shards: &[Arc<Shard>]| {
            let mut arrivals = Vec::new();
            for step in &schedule.steps {
                let rows_of = &shards[step.owner].rows;
                leaves_of(rows_of, &step.rows, rows, |leaf| arrivals.push(leaf));
            }
            LeafMerges::of_arrivals(arrivals)
        };
        let ranks = ring.ranks();
        let planned: Vec<usize> = (0..ranks).step_by(ranks.div_ceil(MOST_LEAF_RANKS)).collect();
        let (mut results, mut forward, mut gradients, mut both) = (0, 0, 0, 0);
        for &rank in &planned {
            let leaves = RankLeaves {
                rows,
                keys: merges(&ring.schedule_of(rank, false), &ring.shards.kv)?,
                queries: merges(&query_pass.schedule_of(rank), &ring.shards.q)?,
                sends_queries: ranks > 1,
            };
            let queries = ring.shards.q[rank].rows.len();
            let keys = ring.shards.kv[rank].rows.len();
            let with_backward =
                leaves.bytes(ring.spec, queries, true) + leaves.gradient_bytes(ring.spec, keys);
            results = results.max(leaves.keys.slots());
            forward = forward.max(leaves.bytes(ring.spec, queries, false));
            gradients = gradients.max(leaves.queries.slots());
            both = both.max(with_backward);
        }
        Ok(Self {
            rows,
            most_partial_results: results,
            most_bytes: forward,
            most_partial_gradients: ring.backward.then_some(gradients),
            most_bytes_with_backward: ring.backward.then_some(both),
            ranks_planned: planned.len(),
        })
    }

    /// Describes the figures in one line for a plan that is forward only, and one more for a plan
    /// with a backward pass.
    pub(super) fn in_words(&self) -> Vec<String> {
        let results = |count: usize| counted(count as u64, "partial result", "partial results");
        let forward = format!(
            "of {} rows; at most {} of a query at a time, {} on a rank",
            self.rows,
            results(self.most_partial_results),
            bytes(self.most_bytes)
        );
        let with_backward = self.most_partial_gradients.zip(self.most_bytes_with_backward);
        let backward = with_backward.map(|(gradients, together)| {
            format!(
                "with a backward pass also at most {} of dK and dV, together {} on a rank",
                results(gradients),
                bytes(together)
            )
        });
        [forward].into_iter().chain(backward).collect()
    }
}
