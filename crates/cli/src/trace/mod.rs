//! `annulus trace`: the traces that the ranks of a job have left, each in a file of its own, as one.

mod merge;

use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use clap::{Args, Subcommand};

use crate::{
    crew::Crew,
    failure::{Failure, Outcome},
    report::say,
};

const EXAMPLES: &str = "Examples:
  annulus attend --input in.safetensors --output out.safetensors --ranks 4 --trace traces/
  annulus trace merge traces/ --out trace.json

Every rank counts time from a moment that all ranks meet in before the plan is made. Under MPI that meeting is a few messages long: the lines of
two ranks may be shifted against each other by as much as a message takes, and by what their clocks drift apart during the job.";

/// Works on traces that `annulus attend --trace` has written
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    Merge(MergeFlags),
}

/// Joins the traces of all ranks of a job into one file for Perfetto or chrome://tracing
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MergeFlags {
    /// The folder with rank-0.json, rank-1.json, …
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Runs `annulus trace`.
pub(crate) fn run(command: &TraceCommand) -> Outcome {
    let TraceCommand::Merge(MergeFlags { folder, out }) = command;
    let (ranks, events) = merge::merge(folder, out)?;
    say!("wrote {}: {events} events of {ranks} rank{}", out.display(), if ranks == 1 { "" } else { "s" });
    Ok(())
}

/// One run of a job: what tells the files of its ranks from those that an earlier run has left in the same folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    id: u64,
    ranks: usize,
}

impl Run {
    /// The run that all processes of the crew are in.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// The loss of a process.
    pub(crate) fn agreed(crew: &mut Crew) -> Outcome<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let mine = now ^ u64::from(std::process::id()).rotate_left(40);
        let all = crew.share(&mine.to_le_bytes())?;
        let id = all.first().and_then(|bytes| bytes.first_chunk::<8>()).map_or(mine, |bytes| u64::from_le_bytes(*bytes));
        Ok::<_, Failure>(Self { id, ranks: crew.ranks() })
    }

    /// A trace of a rank of this run: the form allows further fields beside the events.
    pub(crate) fn mark(&self, events: Vec<u8>) -> Vec<u8> {
        let head = format!("{{\"otherData\":{{\"run\":\"{:016x}\",\"ranks\":{}}},", self.id, self.ranks).into_bytes();
        [&head, events.strip_prefix(b"{").unwrap_or(&events)].concat()
    }
}

/// The name of a rank's file.
pub(crate) fn rank_file(rank: usize) -> String {
    format!("rank-{rank}.json")
}
