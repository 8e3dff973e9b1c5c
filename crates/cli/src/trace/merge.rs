//! Joins the traces of all ranks: concatenates their events, on the clock of rank 0.

use std::path::Path;

use annulus_core::Result;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    align::{self, Completions, Offsets},
    rank_file,
};
use crate::{
    failure::io,
    file::{Document, read_text},
    message,
};

/// Trace of one rank. Events are kept as raw JSON.
#[derive(Debug, Deserialize)]
struct Trace<'a> {
    #[serde(rename = "otherData")]
    run: RunMark,
    #[serde(borrow, rename = "traceEvents")]
    events: Vec<&'a RawValue>,
}

/// Id of the run, as [`super::RunId`] writes it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct RunMark {
    run: String,
    ranks: usize,
    /// True if each rank has a clock of its own.
    #[serde(default)]
    own_clocks: bool,
}

/// Joins the files of `folder` into `out`. Returns the numbers of ranks and of events.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file that is missing, is not a trace of a rank, or
/// belongs to another run than that of rank 0.
pub(super) fn merge(folder: &Path, out: &Path) -> Result<(usize, usize)> {
    let document = Document::create(out)?;
    let mut text = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    let mut count = 0;
    let mut first = None::<RunMark>;
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
                rank0 = align::completions(&trace.events);
                None
            }
            _ => Some(Offsets::new(&rank0, &align::completions(&trace.events))),
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
fn parse<'a>(path: &Path, content: &'a str) -> Result<Trace<'a>> {
    let wrong = |what: String| io(path, format!("is not a trace of a rank: {what}"));
    let mut text = serde_json::Deserializer::from_str(content);
    let trace: Trace<'_> = serde_path_to_error::deserialize(&mut text)
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
