//! Joining the traces of ranks: their events, one file after the other.

use std::path::Path;

use annulus_core::Result;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::rank_file;
use crate::{
    failure::io,
    file::{Document, Object, read_text},
    message,
};

/// A trace of one rank. Events are kept as they are written.
#[derive(Debug, Deserialize)]
struct Trace<'a> {
    #[serde(rename = "otherData")]
    run: Object<RunMark>,
    #[serde(borrow, rename = "traceEvents")]
    events: Vec<&'a RawValue>,
}

/// The run that a trace is of.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct RunMark {
    run: String,
    ranks: usize,
}

/// Joins the files of `folder` into `out`; returns how many ranks and how many events they are.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file that is missing, is no trace of a rank, or is of another run than that of rank 0.
pub(super) fn merge(folder: &Path, out: &Path) -> Result<(usize, usize)> {
    let document = Document::create(out)?;
    let mut text = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    let (mut count, mut first, mut rank) = (0, None::<RunMark>, 0);
    while first.as_ref().is_none_or(|first| rank < first.ranks) {
        let path = folder.join(rank_file(rank));
        let content = read_text(&path)?;
        let trace = parse(&path, &content)?;
        let Object(run) = trace.run;
        let of = first.get_or_insert_with(|| run.clone());
        if *of != run {
            let (own, other) = (message::name(&run.run), message::name(&of.run));
            let what = format!(
                "is of another run ({own} of {} ranks) than {} ({other} of {} ranks)",
                run.ranks,
                rank_file(0),
                of.ranks
            );
            return Err(io(&path, what));
        }
        for event in &trace.events {
            text.push_str(if count == 0 { "\n" } else { ",\n" });
            text.push_str(event.get());
            count += 1;
        }
        rank += 1;
    }
    text.push_str("\n]}\n");
    document.finish(text.as_bytes())?;
    Ok((rank, count))
}

/// The trace of a rank that `content` is.
fn parse<'a>(path: &Path, content: &'a str) -> Result<Trace<'a>> {
    let wrong = |what: String| io(path, format!("is no trace of a rank: {what}"));
    let mut text = serde_json::Deserializer::from_str(content);
    let Object(trace): Object<Trace<'_>> = serde_path_to_error::deserialize(&mut text)
        .map_err(|error| wrong(message::of_json(&error)))?;
    text.end().map_err(|error| wrong(error.to_string()))?;
    if trace.run.0.ranks == 0 {
        return Err(wrong("otherData.ranks: got 0, want at least 1".to_owned()));
    }
    match trace.events.iter().position(|event| !event.get().starts_with('{')) {
        Some(index) => Err(wrong(format!("traceEvents[{index}]: want an object"))),
        None => Ok(trace),
    }
}
