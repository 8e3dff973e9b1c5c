//! Program of one rank: its ring steps, with the messages that it sends in them.

use annulus_core::Spec;
use annulus_plan::{Message, NeedsIndex, RankSchedule, Route};
use serde::Serialize;

use super::leaves::QueryPass;
use crate::{
    report::{bytes, grouped},
    stdout::say,
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

/// Message with a block or with gradients.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Send {
    /// Receiving rank.
    pub(super) to: usize,
    /// Owner of the rows.
    pub(super) owner: usize,
    /// Number of rows.
    pub(super) rows: u64,
    /// Payload bytes.
    pub(super) bytes: u128,
}

impl Send {
    pub(super) fn new(message: &Message, row_bytes: u64) -> Self {
        let rows = message.rows.count();
        Self {
            to: message.peer,
            owner: message.owner,
            rows,
            bytes: u128::from(rows) * u128::from(row_bytes),
        }
    }
}

impl Program {
    /// Derives the program of a forward pass, and with `backward` that of a backward pass, in which
    /// `queries` are sent in the reproducible order and gradients in any other.
    pub(super) fn derive(
        spec: &Spec,
        needs: &NeedsIndex<'_>,
        route: Route,
        rank: usize,
        backward: bool,
        queries: Option<&QueryPass<'_>>,
    ) -> Self {
        let gradients = backward && queries.is_none();
        let schedule = RankSchedule::derive(needs, route, gradients, rank, &mut || ());
        let [block, gradient] = [spec.kv_row_layout(), spec.gradient_row_layout()];
        let of_queries = |pass: &QueryPass<'_>| steps(&pass.schedule(rank), pass.row_bytes(), 0);
        Self {
            rank,
            steps: steps(&schedule, block.bytes(), gradient.bytes()),
            query_steps: queries.map(of_queries).unwrap_or_default(),
        }
    }

    /// Returns the payload bytes that the rank sends in a forward and in a backward pass.
    pub(super) fn bytes_sent(&self) -> [u128; 2] {
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
    let sends = |messages: &[Message], bytes: u64| {
        messages.iter().map(|message| Send::new(message, bytes)).collect()
    };
    let active = schedule.last_step().map_or(1, |last| last + 1);
    let steps = schedule.steps.iter().take(active).enumerate();
    let steps = steps.map(|(number, step)| ProgramStep {
        step: number,
        owner: step.owner,
        rows: step.rows.count(),
        sends: sends(&step.before.sends, block_bytes),
        sends_gradients: sends(&step.after.sends, gradient_bytes),
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
