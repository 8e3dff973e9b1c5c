//! `annulus trace`: the traces that the ranks of a job have left, each in a file of its own, as one.

mod merge;

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use annulus::comm::trace::{TraceLog, write_chrome};
use clap::{Args, Subcommand};

use crate::{
    crew::Crew,
    failure::{Failure, Outcome, io},
    file::Document,
    interrupt::MadeFolders,
    message,
    report::{counted, say},
};

const EXAMPLES: &str = "Examples:
  annulus attend --input in.safetensors --output out.safetensors --ranks 4 --trace traces/
  annulus trace merge traces/ --output trace.json

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
    /// The file to write, whole or not at all; a pipe, a device or /dev/stdout is written into
    #[arg(long, alias = "out", value_name = "FILE")]
    output: PathBuf,
    /// Print errors only
    #[arg(long, short)]
    quiet: bool,
}

impl TraceCommand {
    /// The files that flags name.
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
        let (events, ranks) =
            (counted(events as u64, "event", "events"), counted(ranks as u64, "rank", "ranks"));
        say!("wrote {}: {events} of {ranks}", message::path(output));
    }
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
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let mine = now ^ u64::from(std::process::id()).rotate_left(40);
        let all = crew.share(&mine.to_le_bytes())?;
        let id = all
            .first()
            .and_then(|bytes| bytes.first_chunk::<8>())
            .map_or(mine, |bytes| u64::from_le_bytes(*bytes));
        Ok::<_, Failure>(Self { id, ranks: crew.ranks() })
    }

    /// A trace of a rank of this run: the form allows further fields beside the events.
    pub(crate) fn mark(&self, events: Vec<u8>) -> Vec<u8> {
        let head =
            format!("{{\"otherData\":{{\"run\":\"{:016x}\",\"ranks\":{}}},", self.id, self.ranks)
                .into_bytes();
        [&head, events.strip_prefix(b"{").unwrap_or(&events)].concat()
    }
}

/// The trace files of this process's ranks, made before the job so that a folder that cannot be
/// written is found then. They have no names until they are written; a folder that was made for
/// them goes again if they never are.
#[derive(Debug)]
pub(crate) struct Traces {
    files: Vec<Document>,
    // dropped after the files that are in it
    _folder: MadeFolders,
}

impl Traces {
    /// Makes the folder if it is missing, and the files in it.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`annulus_core::Error::Io`] naming the folder or the file.
    pub(crate) fn create(folder: &Path, crew: &mut Crew) -> Outcome<Self> {
        let own = if crew.is_of_processes() {
            crew.first_rank()..crew.first_rank() + 1
        } else {
            0..crew.ranks()
        };
        let make = || {
            let made = MadeFolders::create(folder)?;
            let files = own
                .map(|rank| Document::create(&folder.join(rank_file(rank))))
                .collect::<annulus_core::Result<_>>()?;
            Ok(Self { files, _folder: made })
        };
        crew.agree(make().map_err(|error: annulus_core::Error| error.into()))
    }

    /// Writes the records of this process's ranks.
    ///
    /// # Ordering
    /// Collective over the processes.
    /// # Errors
    /// [`annulus_core::Error::Io`] naming the file.
    pub(crate) fn write(self, crew: &mut Crew, logs: Vec<TraceLog>, run: &Run) -> Outcome {
        let items: Vec<(Document, TraceLog)> = self.files.into_iter().zip(logs).collect();
        crew.each_apart(items, |_, (file, log)| {
            let mut events = Vec::new();
            write_chrome(&mut events, std::slice::from_ref(&log))
                .map_err(|error| io(Path::new(&rank_file(log.rank())), error))?;
            file.finish(&run.mark(events))
        })?;
        Ok(())
    }
}

/// The name of a rank's file.
pub(crate) fn rank_file(rank: usize) -> String {
    format!("rank-{rank}.json")
}
