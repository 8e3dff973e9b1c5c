//! `annulus trace`, and the trace files of `annulus attend --trace`, one for each rank.
//!
//! `annulus trace merge` concatenates the events of all ranks, on the clock of rank 0. All ranks
//! complete an all-gather at about the same time, so the all-gathers of each pass show how
//! far the clock of a rank has drifted from that of rank 0.
//!
//! ```text
//! d_k       = completion of all-gather k on rank 0 - that on rank r
//! offset(t) = median of d_k over the WINDOW all-gathers around t
//! ```
//! The median removes what a single completion is late by: a poll, or the latency of a message.
//! With fewer all-gathers than that, clocks stay as they are: in so short a job they drift by less.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use annulus::comm::trace::{TraceLog, write_chrome};
use annulus_core::{Error, Result};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

use crate::{
    failure::{Outcome, io},
    file::{TextDocument, read_text},
    job::Job,
    message,
    report::{counted, json_line},
    say,
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

impl TraceCommand {}

/// Runs `annulus trace`.
pub(crate) fn run(command: &TraceCommand) -> Outcome {
    let TraceCommand::Merge(MergeFlags { folder, output, quiet }) = command;
    let (ranks, events) = merge(folder, output)?;
    if !quiet {
        let events = counted(events as u64, "event", "events");
        let ranks = counted(ranks as u64, "rank", "ranks");
        say!("wrote {}: {events} of {ranks}", message::path(output));
    }
    Ok(())
}

/// Identity of one run, which distinguishes its trace files from those that an earlier run left in
/// the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunId {
    run: String,
    ranks: usize,
    /// True if each rank has a clock of its own: under MPI.
    #[serde(default)]
    own_clocks: bool,
}

impl RunId {
    /// Creates the id of this run, equal on all processes: rank 0's, from its clock and PID.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(crate) fn agree(job: &mut Job) -> Outcome<Self> {
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let mine = now ^ u64::from(std::process::id()).rotate_left(40);
        let id = job.all_gather_values(&mine)?.first().copied().unwrap_or(mine);
        Ok(Self { run: format!("{id:016x}"), ranks: job.ranks(), own_clocks: job.is_mpi() })
    }

    /// Adds the id to a rank's trace as `otherData`, a field that the Chrome trace format allows.
    pub(crate) fn mark(&self, events: Vec<u8>) -> Vec<u8> {
        let head = format!("{{\"otherData\":{},", json_line(self)).into_bytes();
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
            Ok::<_, Error>(Self { files })
        };
        job.agree(make())
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

/// All-gathers whose median is an offset: of several passes, and few beside those of a minute, in
/// which clocks drift by some microseconds.
const WINDOW: usize = 15;

/// Completions of all-gathers on one rank: time in microseconds, by round.
type Completions = HashMap<u64, f64>;

/// The fields of an event that concern time.
#[derive(Deserialize)]
struct Times {
    ph: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    ts: Option<f64>,
    #[serde(default)]
    args: Value,
}

/// Returns the completions of all-gathers in a trace.
fn completions(events: &[&RawValue]) -> Completions {
    let completion = |event: &&RawValue| {
        let Times { ph, cat, ts, args } = serde_json::from_str(event.get()).ok()?;
        let round = args.get("round")?.as_u64()?;
        (ph == "e" && cat == "gather").then_some((round, ts?))
    };
    events.iter().filter_map(completion).collect()
}

/// Offsets of the clock of one rank.
#[derive(Debug, Default)]
struct Offsets(Vec<(f64, f64)>);

impl Offsets {
    /// Derives the offsets of a rank from its completions and those of rank 0.
    fn new(rank0: &Completions, own: &Completions) -> Self {
        let mut pairs: Vec<(f64, f64)> = own
            .iter()
            .filter_map(|(round, &at)| rank0.get(round).map(|reference| (at, reference - at)))
            .collect();
        if pairs.len() < WINDOW {
            return Self::default();
        }
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let smoothed = |index: usize| {
            let first = index.saturating_sub(WINDOW / 2).min(pairs.len() - WINDOW);
            let window = pairs.iter().skip(first).take(WINDOW);
            let mut offsets: Vec<f64> = window.map(|&(_, offset)| offset).collect();
            offsets.sort_by(f64::total_cmp);
            offsets[offsets.len() / 2]
        };
        Self((0..pairs.len()).map(|index| (pairs[index].0, smoothed(index))).collect())
    }

    /// Returns the offset at a time: that of the last all-gather before it, or of the first one.
    fn at(&self, time: f64) -> f64 {
        let behind = self.0.partition_point(|&(at, _)| at <= time);
        self.0.get(behind.saturating_sub(1)).map_or(0.0, |&(_, offset)| offset)
    }

    /// Returns an event with its time on the clock of rank 0, or as it is if it has none.
    fn align(&self, event: &RawValue) -> String {
        let aligned = || {
            let mut value: Value = serde_json::from_str(event.get()).ok()?;
            let time = value.get("ts")?.as_f64()?;
            // to the nanosecond, and not before time zero
            let time = ((time + self.at(time)) * 1e3).round().max(0.0) / 1e3;
            *value.get_mut("ts")? = time.into();
            Some(value.to_string())
        };
        aligned().unwrap_or_else(|| event.get().to_owned())
    }
}

/// Trace of one rank. Events are kept as raw JSON.
#[derive(Debug, Deserialize)]
struct RankTrace<'a> {
    #[serde(rename = "otherData")]
    run: RunId,
    #[serde(borrow, rename = "traceEvents")]
    events: Vec<&'a RawValue>,
}

/// Joins the files of `folder` into `out`. Returns the numbers of ranks and of events.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file that is missing, is not a trace of a rank, or
/// belongs to another run than that of rank 0.
fn merge(folder: &Path, out: &Path) -> Result<(usize, usize)> {
    let document = TextDocument::create(out)?;
    let mut text = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    let mut count = 0;
    let mut first = None::<RunId>;
    let mut rank = 0;
    let mut rank0 = Completions::new();
    while first.as_ref().is_none_or(|first| rank < first.ranks) {
        let path = folder.join(rank_file(rank));
        let content = read_text(&path)?;
        let trace = parse(&path, &content)?;
        let run = trace.run;
        let of = first.get_or_insert_with(|| run.clone());
        if *of != run {
            let own = message::name(&run.run);
            let other = message::name(&of.run);
            let what = format!(
                "belongs to another run ({own} of {} ranks) than {} ({other} of {} ranks)",
                run.ranks,
                rank_file(0),
                of.ranks
            );
            return Err(io(&path, what));
        }
        let offsets = match rank {
            _ if !run.own_clocks => None,
            0 => {
                rank0 = completions(&trace.events);
                None
            }
            _ => Some(Offsets::new(&rank0, &completions(&trace.events))),
        };
        for event in &trace.events {
            text.push_str(if count == 0 { "\n" } else { ",\n" });
            match &offsets {
                Some(offsets) => text.push_str(&offsets.align(event)),
                None => text.push_str(event.get()),
            }
            count += 1;
        }
        rank += 1;
    }
    text.push_str("\n]}\n");
    document.finish(text.as_bytes())?;
    Ok((rank, count))
}

/// Parses the trace of a rank.
fn parse<'a>(path: &Path, content: &'a str) -> Result<RankTrace<'a>> {
    let wrong = |what: String| io(path, format!("is not a trace of a rank: {what}"));
    let mut text = serde_json::Deserializer::from_str(content);
    let trace: RankTrace<'_> = serde_path_to_error::deserialize(&mut text)
        .map_err(|error| wrong(message::of_json(&error)))?;
    text.end().map_err(|error| wrong(error.to_string()))?;
    if trace.run.ranks == 0 {
        return Err(wrong("otherData.ranks: got 0, want at least 1".to_owned()));
    }
    match trace.events.iter().position(|event| !event.get().starts_with('{')) {
        Some(index) => Err(wrong(format!("traceEvents[{index}]: want an object"))),
        None => Ok(trace),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time on a clock that begins 300 µs late and drifts by 20 ppm.
    fn drifted(time: f64) -> f64 {
        (time - 300.0) / 1.000_02
    }

    #[test]
    fn a_clock_that_drifts_is_aligned_at_each_pass() {
        // an hour of passes of 10 s; a completion is up to 40 µs late
        let late = |round: u64| ((round * 7919) % 41) as f64;
        let rounds = 0..360u64;
        let at = |round: u64| 1e7 * (round + 1) as f64;
        let rank0 = rounds.clone().map(|round| (round, at(round) + late(round))).collect();
        let own = rounds.map(|round| (round, drifted(at(round) + late(3 * round + 1)))).collect();
        let offsets = Offsets::new(&rank0, &own);
        for second in (1..3600).step_by(60) {
            let time = 1e6 * f64::from(second);
            let own = drifted(time);
            let aligned = own + offsets.at(own);
            // the drift of half a window, 1.5 ms, at the ends; else that of one pass
            let most = if (100..3500).contains(&second) { 300.0 } else { 2000.0 };
            assert!((aligned - time).abs() < most, "{second} s: {} µs", aligned - time);
            assert!(second < 200 || (own - time).abs() > 3000.0);
        }
    }

    #[test]
    fn events_without_a_time_and_clocks_without_all_gathers_stay_as_they_are() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        let named = raw("{\"ph\":\"M\",\"pid\":1}");
        let span = raw("{\"ph\":\"X\",\"ts\":12.500,\"dur\":3.000}");
        let gather = raw("{\"ph\":\"e\",\"cat\":\"gather\",\"ts\":10.0,\"args\":{\"round\":4}}");
        let own = completions(&[&named, &span, &gather]);
        assert_eq!(own, Completions::from([(4, 10.0)]));
        let value = |text: String| serde_json::from_str::<Value>(&text).unwrap();
        let of = |time: f64| serde_json::json!({"ph": "X", "ts": time, "dur": 3.0});
        assert_eq!(value(Offsets::default().align(&span)), of(12.5));
        assert_eq!(Offsets::new(&own, &own).at(7.0), 0.0);
        // a clock that is late by 2.25 µs, and too few all-gathers to tell
        let rounds = |count: u64, at: f64| -> Completions {
            (0..count).map(|round| (round, at + round as f64)).collect()
        };
        let few = WINDOW as u64 - 1;
        assert_eq!(Offsets::new(&rounds(few, 12.25), &rounds(few, 10.0)).at(12.5), 0.0);
        let offsets = Offsets::new(&rounds(few + 1, 12.25), &rounds(few + 1, 10.0));
        assert_eq!(offsets.align(&named), named.get());
        assert_eq!(value(offsets.align(&span)), of(14.75));
    }
}
