//! Joining the traces of ranks: their events, one file after the other.

use std::path::Path;

use annulus_core::Result;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::rank_file;
use crate::{failure::io, file::write_text};

/// A trace of one rank. Events are kept as they are written.
#[derive(Debug, Deserialize)]
struct Trace<'a> {
    #[serde(rename = "otherData")]
    run: RunMark,
    #[serde(borrow, rename = "traceEvents")]
    events: Vec<&'a RawValue>,
}

/// What says which run a trace is of.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct RunMark {
    run: String,
    ranks: usize,
}

/// Joins the files of `folder` into `out`; how many ranks and how many events they are.
///
/// # Errors
/// [`annulus_core::Error::Io`] naming the file that is missing, is no trace of a rank, or is of another run than that of rank 0.
pub(super) fn merge(folder: &Path, out: &Path) -> Result<(usize, usize)> {
    let mut text = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    let (mut count, mut first, mut rank) = (0, None::<RunMark>, 0);
    while first.as_ref().is_none_or(|first| rank < first.ranks) {
        let path = folder.join(rank_file(rank));
        let content = std::fs::read_to_string(&path).map_err(|error| io(&path, error))?;
        let trace: Trace<'_> = serde_json::from_str(&content).map_err(|error| io(&path, format!("is no trace of a rank: {error}")))?;
        let of = first.get_or_insert_with(|| trace.run.clone());
        if *of != trace.run {
            let what = format!("is of another run (of {} ranks) than {} (of {} ranks)", trace.run.ranks, rank_file(0), of.ranks);
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
    write_text(out, &text)?;
    Ok((rank, count))
}
