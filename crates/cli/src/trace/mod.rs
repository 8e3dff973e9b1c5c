//! `annulus trace`, and the trace files of `annulus attend --trace`, one for each rank.

mod merge;

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use annulus::comm::trace::{TraceLog, write_chrome};
use clap::{Args, Subcommand};

use crate::{
    failure::{Failure, Outcome, io},
    file::TextDocument,
    job::Job,
    message,
    report::counted,
    stdout::say,
};

const EXAMPLES: &str = "Examples:
  annulus attend --input in.safetensors --output out.safetensors --ranks 4 --trace traces/
  annulus trace merge traces/ --output trace.json

Time zero is a synchronization of all ranks before the plan is created. Under MPI the merge aligns
the clocks of all ranks with that of rank 0 at each pass, if there are several; the lines of two
ranks may be shifted against each other by the latency of a message.";

/// Processes traces of `annulus attend --trace`
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    Merge(MergeFlags),
}

/// Joins the traces of all ranks of a job into one file for Perfetto or chrome://tracing
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MergeFlags {
    /// Folder with rank-0.json, rank-1.json, …
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// File to write, which appears only when it is complete; or a pipe, a device, /dev/stdout
    #[arg(long, alias = "out", value_name = "FILE")]
    output: PathBuf,
    /// Print errors only
    #[arg(long, short)]
    quiet: bool,
}

impl TraceCommand {
    /// Paths that flags name.
    pub(crate) fn paths(&self) -> Vec<(&'static str, &Path)> {
        let Self::Merge(flags) = self;
        vec![("DIR", &flags.folder), ("--output", &flags.output)]
    }
}

/// Runs `annulus trace`.
pub(crate) fn run(command: &TraceCommand) -> Outcome {
    let TraceCommand::Merge(MergeFlags { folder, output, quiet }) = command;
    let (ranks, events) = merge::merge(folder, output)?;
    if !quiet {
        let events = counted(events as u64, "event", "events");
        let ranks = counted(ranks as u64, "rank", "ranks");
        say!("wrote {}: {events} of {ranks}", message::path(output));
    }
    Ok(())
}

/// Identity of one run, which distinguishes its trace files from those that an earlier run left in
/// the folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunId {
    id: u64,
    ranks: usize,
    /// True if each rank has a clock of its own: under MPI.
    own_clocks: bool,
}

impl RunId {
    /// Creates the id of this run, equal on all processes: rank 0's, from its clock and PID.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// The loss of a process.
    pub(crate) fn agree(job: &mut Job) -> Outcome<Self> {
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let mine = now ^ u64::from(std::process::id()).rotate_left(40);
        let all = job.all_gather(&mine.to_le_bytes())?;
        let id = all
            .first()
            .and_then(|bytes| bytes.first_chunk::<8>())
            .map_or(mine, |bytes| u64::from_le_bytes(*bytes));
        Ok::<_, Failure>(Self { id, ranks: job.ranks(), own_clocks: job.is_mpi() })
    }

    /// Adds the id to a rank's trace as `otherData`, a field that the Chrome trace format allows.
    pub(crate) fn mark(&self, events: Vec<u8>) -> Vec<u8> {
        let Self { id, ranks, own_clocks } = self;
        let run = format!("\"run\":\"{id:016x}\",\"ranks\":{ranks},\"own_clocks\":{own_clocks}");
        let head = format!("{{\"otherData\":{{{run}}},").into_bytes();
        [&head, events.strip_prefix(b"{").unwrap_or(&events)].concat()
    }
}

/// Trace files of this process's ranks. They are created before the passes, so that a folder that
/// cannot be written is an early error. They get their names when they are complete.
#[derive(Debug)]
pub(crate) struct Traces {
    files: Vec<TextDocument>,
}

impl Traces {
    /// Creates the folder if it is missing, and the files in it.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`annulus_core::Error::Io`] naming the folder or the file.
    pub(crate) fn create(folder: &Path, job: &mut Job) -> Outcome<Self> {
        let own =
            if job.is_mpi() { job.first_rank()..job.first_rank() + 1 } else { 0..job.ranks() };
        let make = || {
            std::fs::create_dir_all(folder).map_err(|error| io(folder, error))?;
            let files = own
                .map(|rank| TextDocument::create(&folder.join(rank_file(rank))))
                .collect::<annulus_core::Result<_>>()?;
            Ok(Self { files })
        };
        job.agree(make().map_err(|error: annulus_core::Error| error.into()))
    }

    /// Writes the records of this process's ranks.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`annulus_core::Error::Io`] naming the file.
    pub(crate) fn write(self, job: &mut Job, logs: Vec<TraceLog>, run: &RunId) -> Outcome {
        let items: Vec<(TextDocument, TraceLog)> = self.files.into_iter().zip(logs).collect();
        job.run_local_phase(items, |_, (file, log)| {
            let mut events = Vec::new();
            write_chrome(&mut events, std::slice::from_ref(&log))
                .map_err(|error| io(Path::new(&rank_file(log.rank())), error))?;
            file.finish(&run.mark(events))
        })?;
        Ok(())
    }
}

/// Returns the name of a rank's file.
pub(crate) fn rank_file(rank: usize) -> String {
    format!("rank-{rank}.json")
}
