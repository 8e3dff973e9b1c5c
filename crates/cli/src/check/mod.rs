//! `annulus check`: every case of a folder, on every ring that is asked for, forward and backward.

mod case;
mod compare;
mod glob;
mod index;

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use annulus_comm::threads::each_rank;
use annulus_core::{Error, Result};
use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::{
    arguments::{
        ring::{BackendName, TransportName, cores},
        values::{LayoutName, ranks},
    },
    failure::{Failure, Outcome, one_line},
    report::say,
};
use case::{Ring, Verdict};
use index::{Case, Index};

const EXAMPLES: &str = "Examples:
  annulus check cases/
  annulus check cases/ --case 'sinks*' --ranks 4 --layout zigzag --dtype f64
  annulus check cases/ --ranks 1,2,3,4,7,33 --layout auto,contiguous,zigzag,striped";

/// Computes every case of a folder on every ring asked for, forward and backward, against its expected arrays
///
/// A line is printed for every failure, and last `N passed, N failed`. The exit code is 1 if any failed, if no case matched, or if a case
/// is unsupported.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckFlags {
    /// A folder with index.json in the format annulus-cases-1
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// What computes
    #[arg(long, value_enum, default_value = "cpu")]
    backend: BackendName,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "threads")]
    transport: TransportName,
    /// Ring sizes; they may exceed the number of rows
    #[arg(long, value_name = "N,N,...", default_value = "1,2,3,4,7", value_delimiter = ',', value_parser = ranks)]
    ranks: Vec<usize>,
    /// Layouts
    #[arg(long, value_enum, default_value = "contiguous,zigzag,striped", value_delimiter = ',')]
    layout: Vec<LayoutName>,
    /// Element types to compute in
    #[arg(long, value_enum, default_value = "f32,f64", value_delimiter = ',')]
    dtype: Vec<CheckedDType>,
    /// Only cases whose id fits this pattern of * and ?
    #[arg(long, value_name = "GLOB", default_value = "*")]
    case: String,
    /// Count unsupported cases apart instead of as failed
    #[arg(long)]
    skip_unsupported: bool,
}

/// Element types that cases have tolerances for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CheckedDType {
    /// Inputs as they are.
    F32,
    /// Inputs widened exactly.
    F64,
}

impl CheckedDType {
    const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }
}

/// What is counted.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// A case to compute in one element type.
type Unit = (String, Result<Case>, CheckedDType);

/// Runs `annulus check`.
pub(crate) fn run(flags: &CheckFlags) -> Outcome {
    flags.backend.check()?;
    flags.transport.check()?;
    let index = Index::read(&flags.folder)?;
    let rings: Vec<(Ring, String)> =
        flags.ranks.iter().flat_map(|&ranks| flags.layout.iter().map(move |&layout| ring(ranks, layout))).collect();
    let units = units(&index, flags);
    if units.is_empty() {
        say!("no case matches {}", one_line(&flags.case));
        say!("0 passed, 0 failed");
        return Err(Failure::Reported);
    }
    let verdicts = compute(&flags.folder, &units, &rings)?;
    let mut count = Count::default();
    for ((id, _, dtype), verdicts) in units.iter().zip(verdicts) {
        for ((_, ring), verdict) in rings.iter().zip(verdicts) {
            count.add(&format!("{id} {ring} dtype={}", dtype.name()), &verdict, flags.skip_unsupported);
        }
    }
    if flags.skip_unsupported {
        say!("{} unsupported", count.skipped);
    }
    say!("{} passed, {} failed", count.passed, count.failed);
    if count.failed == 0 { Ok(()) } else { Err(Failure::Reported) }
}

fn ring(ranks: usize, layout: LayoutName) -> (Ring, String) {
    let name = layout.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    (Ring { ranks, layout: layout.layout() }, format!("ranks={ranks} layout={name}"))
}

/// Every case that matches, in every element type. A case that cannot be read fails in all of them.
fn units(index: &Index, flags: &CheckFlags) -> Vec<Unit> {
    let mut units = Vec::new();
    for value in &index.cases {
        // a case without an id is malformed, and fails as such
        let id = value.get("id").and_then(serde_json::Value::as_str).map_or_else(|| "(no id)".into(), one_line);
        if !glob::fits(&flags.case, &id) {
            continue;
        }
        for &dtype in &flags.dtype {
            let case = Case::deserialize(value).map_err(|error| Error::invalid("index.json", error, "a case of its format"));
            units.push((id.clone(), case, dtype));
        }
    }
    units
}

/// Every unit's verdicts, a ring each, computed on as many threads as the machine runs at once.
fn compute(folder: &Path, units: &[Unit], rings: &[(Ring, String)]) -> Result<Vec<Vec<Verdict>>> {
    let rings: Vec<Ring> = rings.iter().map(|(ring, _)| ring.clone()).collect();
    let next = AtomicUsize::new(0);
    let judge = |(_, case, dtype): &Unit| match (case, dtype) {
        (Ok(case), CheckedDType::F32) => case::run::<f32>(folder, case, &rings),
        (Ok(case), CheckedDType::F64) => case::run::<f64>(folder, case, &rings),
        (Err(error), _) => rings.iter().map(|_| Verdict::Failed(error.clone())).collect(),
    };
    let worker = |_, ()| {
        let mut done = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(unit) = units.get(place) else { return Ok(done) };
            done.push((place, judge(unit)));
        }
    };
    let mut verdicts: Vec<_> = each_rank(vec![(); cores()], worker)?.into_iter().flatten().collect();
    verdicts.sort_by_key(|&(place, _)| place);
    Ok(verdicts.into_iter().map(|(_, verdicts)| verdicts).collect())
}

impl Count {
    /// Counts one verdict, and prints a line for every way in which it is a failure.
    fn add(&mut self, name: &str, verdict: &Verdict, skip_unsupported: bool) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed(Error::Unsupported { .. }) if skip_unsupported => self.skipped += 1,
            Verdict::Failed(error) => {
                self.failed += 1;
                say!("FAIL {name}: {}", one_line(&error.to_string()));
            }
            Verdict::Wrong(arrays) => {
                self.failed += 1;
                for (array, error, tolerance) in arrays {
                    say!("FAIL {name}: {array} error {error:.3e} tolerance {tolerance:.3e}");
                }
            }
        }
    }
}
