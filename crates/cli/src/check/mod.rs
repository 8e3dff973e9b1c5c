//! `annulus check`: every case of a folder, on every ring that is asked for, forward and backward.

mod case;
mod compare;
mod glob;
mod index;
#[cfg(feature = "mpi")]
mod processes;

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use annulus_comm::threads::each_rank;
use annulus_core::{Error, Result};
use clap::{Args, ValueEnum};

use crate::{
    arguments::{
        ring::{BackendName, TransportName, cores},
        values::{LayoutName, ranks, whole},
    },
    crew::{Crew, PATIENCE},
    engine::Engine,
    failure::{self, Failure, Outcome},
    message,
    report::{complain, say},
};
use case::{Ring, Verdict};
use index::{Case, Index};

const EXAMPLES: &str = "Examples:
  annulus check cases/
  annulus check cases/ --case 'sinks*' --ranks 4 --layout zigzag --dtype f64
  annulus check cases/ --ranks 1,2,3,4,7,33 --layout auto,contiguous,zigzag,striped
  mpirun -n 4 annulus check cases/ --ranks 1,2,3,4

Under a launcher (mpirun, mpiexec, srun) a ring of N ranks is made of the first N processes; the others wait.";

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
    /// Which device, counted from 0 as `annulus doctor` lists them; the first if not said
    #[arg(long, value_name = "N", value_parser = whole)]
    device: Option<usize>,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value = "auto")]
    transport: TransportName,
    /// Ring sizes, each 1 to 128; they may exceed the number of rows. Default: 1,2,3,4,7; under MPI
    /// the number of processes
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = ranks)]
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
    /// The first failure.
    first: Option<String>,
}

/// A case to compute in one element type: its id as it is printed.
type Unit = (String, Result<Case>, CheckedDType);

/// Ring sizes of threads, where no flag says them.
const SIZES: [usize; 5] = [1, 2, 3, 4, 7];

/// Runs `annulus check`.
pub(crate) fn run(flags: &CheckFlags) -> Outcome {
    let engine = Engine::open(flags.backend, flags.device, flags.transport, PATIENCE)?;
    let mut crew = Crew::form("check", flags.transport, PATIENCE)?;
    let done = check(flags, &mut crew, &engine);
    crew.end(done)
}

fn check(flags: &CheckFlags, crew: &mut Crew, engine: &Engine) -> Outcome {
    let sizes = crew.agree(flags.sizes(crew))?;
    let index = crew.agree(Index::read(&flags.folder).map_err(Failure::from))?;
    let rings: Vec<(Ring, String)> = sizes
        .iter()
        .flat_map(|&ranks| flags.layout.iter().map(move |&layout| ring(ranks, layout)))
        .collect();
    let units = units(&index, flags);
    if units.is_empty() {
        if crew.leads() {
            let pattern = message::name(&flags.case);
            complain!(
                "--case: got {pattern}, want the id of a case of {} or a pattern of it",
                message::path(&Index::path(&flags.folder))
            );
            say!("0 passed, 0 failed");
        }
        return Err(Failure::Reported);
    }
    let verdicts = compute(&flags.folder, &units, &rings, crew, engine)?;
    let mut count = Count::default();
    for (unit, verdicts) in units.iter().zip(verdicts) {
        count.unit(unit, &rings, verdicts, flags.skip_unsupported);
    }
    // where ranks are processes the first has every verdict, and the others follow it
    let failed = count.failed > 0;
    if crew.leads() {
        if flags.skip_unsupported {
            say!("{} unsupported", count.skipped);
        }
        say!("{} passed, {} failed", count.passed, count.failed);
        if let Some(first) = &count.first {
            complain!("{} failed, the first: {first}", count.failed);
        }
    }
    crew.agree(if failed { Err(Failure::Reported) } else { Ok(()) })
}

impl CheckFlags {
    /// The files that flags name.
    pub(crate) fn paths(&self) -> Vec<(&'static str, &Path)> {
        vec![("DIR", &self.folder)]
    }

    /// The ring sizes: as asked, or those that fit the crew.
    fn sizes(&self, crew: &Crew) -> Outcome<Vec<usize>> {
        if !crew.is_of_processes() {
            return Ok(if self.ranks.is_empty() { SIZES.to_vec() } else { self.ranks.clone() });
        }
        let all = crew.ranks();
        match self.ranks.iter().find(|&&ranks| ranks > all) {
            Some(ranks) => Err(Failure::usage(
                "--ranks",
                ranks,
                format!("at most {all}, the processes of this job"),
            )),
            None if self.ranks.is_empty() => Ok(vec![all]),
            None => Ok(self.ranks.clone()),
        }
    }
}

fn ring(ranks: usize, layout: LayoutName) -> (Ring, String) {
    let name =
        layout.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    (Ring { ranks, layout: layout.layout() }, format!("ranks={ranks} layout={name}"))
}

/// Every case that matches, in every element type. A case that cannot be read fails in all of them.
fn units(index: &Index, flags: &CheckFlags) -> Vec<Unit> {
    let mut units = Vec::new();
    let path = Index::path(&flags.folder);
    for (number, value) in index.cases.iter().enumerate() {
        // a case without an id is malformed, and fails as such
        let id = value.get("id").and_then(serde_json::Value::as_str);
        let id = id.map_or_else(|| format!("(no id, number {number})"), str::to_owned);
        if !glob::fits(&flags.case, &id) {
            continue;
        }
        for &dtype in &flags.dtype {
            units.push((message::name(&id), Case::read(&path, &id, value), dtype));
        }
    }
    units
}

/// Every unit's verdicts, a ring each; where ranks are processes, on the first of them, and none on the others.
fn compute(
    folder: &Path,
    units: &[Unit],
    rings: &[(Ring, String)],
    crew: &mut Crew,
    engine: &Engine,
) -> Outcome<Vec<Vec<Verdict>>> {
    let rings: Vec<Ring> = rings.iter().map(|(ring, _)| ring.clone()).collect();
    #[cfg(feature = "mpi")]
    if crew.is_of_processes() {
        return processes::compute(folder, units, &rings, crew, engine);
    }
    #[cfg(not(feature = "mpi"))]
    let _: &Crew = crew;
    Ok(compute_on_threads(folder, units, &rings, engine)?)
}

/// Every unit's verdicts, computed on as many threads as the machine runs at once.
fn compute_on_threads(
    folder: &Path,
    units: &[Unit],
    rings: &[Ring],
    engine: &Engine,
) -> Result<Vec<Vec<Verdict>>> {
    let next = AtomicUsize::new(0);
    let judge = |(_, case, dtype): &Unit| match (case, dtype) {
        (Ok(case), CheckedDType::F32) => case::run::<f32>(folder, case, rings, engine),
        (Ok(case), CheckedDType::F64) => case::run::<f64>(folder, case, rings, engine),
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
    let mut verdicts: Vec<_> =
        each_rank(vec![(); cores()], worker)?.into_iter().flatten().collect();
    verdicts.sort_by_key(|&(place, _)| place);
    Ok(verdicts.into_iter().map(|(_, verdicts)| verdicts).collect())
}

impl Count {
    /// Counts the verdicts of a unit. What is wrong with the case itself, and so the same on every
    /// ring, is printed once.
    fn unit(
        &mut self,
        (id, case, dtype): &Unit,
        rings: &[(Ring, String)],
        verdicts: Vec<Verdict>,
        skip_unsupported: bool,
    ) {
        let dtype = dtype.name();
        let alike = match verdicts.split_first() {
            Some((Verdict::Failed(error), rest)) if case.is_err() || !rest.is_empty() => {
                rest.iter().all(|other| matches!(other, Verdict::Failed(same) if same == error))
            }
            _ => false,
        };
        let names = rings.iter().map(|(_, ring)| {
            if alike { format!("{id} dtype={dtype}") } else { format!("{id} {ring} dtype={dtype}") }
        });
        for (index, (name, verdict)) in names.zip(verdicts).enumerate() {
            self.add(&name, &verdict, skip_unsupported, alike && index > 0);
        }
    }

    /// Counts one verdict, and prints a line for every way in which it is a failure, unless that
    /// has been said.
    fn add(&mut self, name: &str, verdict: &Verdict, skip_unsupported: bool, said: bool) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed(Error::Unsupported { .. }) if skip_unsupported => self.skipped += 1,
            Verdict::Failed(error) => {
                self.failed += 1;
                if !said {
                    self.fail(format!("{name}: {}", failure::text(error)));
                }
            }
            Verdict::Wrong(arrays) => {
                self.failed += 1;
                for (array, error, tolerance) in arrays {
                    self.fail(format!(
                        "{name}: {} error {error:.3e} tolerance {tolerance:.3e}",
                        message::name(array)
                    ));
                }
            }
        }
    }

    fn fail(&mut self, what: String) {
        say!("FAIL {what}");
        self.first.get_or_insert(what);
    }
}
