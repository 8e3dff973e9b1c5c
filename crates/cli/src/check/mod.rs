//! `annulus check`: computes every case of a folder on every requested ring, forward and backward.

mod case;
#[cfg(feature = "mpi")]
mod processes;

use std::{
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
};

use annulus_comm::threads::each_rank;
use annulus_core::{DType, Error, Result};
use annulus_plan::Strategy;
use annulus_test_cases::golden::Index;
use clap::Args;

use crate::{
    arguments::{
        ring::cores,
        values::{LayoutName, dtype, ranks, strategy, threads},
    },
    backend::{BackendChoice, DeviceFlags},
    failure::{Failure, Outcome},
    job::{DEFAULT_DEADLINE, Job},
    message,
    report::complain,
    say,
};
use case::{CheckedRing, Verdict};

const EXAMPLES: &str = "Examples:
  annulus check cases/
  annulus check cases/ --case 'sinks*' --ranks 4 --layout zigzag --dtype f64
  annulus check cases/ --ranks 1,2,3,4,7,33 --layout auto,contiguous,zigzag,striped
  annulus check cases/ --reproducible --ranks 1,2,3,5,7,8,16 --threads 1,2
  mpirun -n 4 annulus check cases/ --ranks 1,2,3,4

Under a launcher (mpirun, mpiexec, srun) the first N processes form a ring of N ranks; the others
wait.";

/// Computes every case of a folder on every requested ring, and compares with its expected arrays
///
/// Each failure is a line; the last line is `N passed, N failed`. The exit code is 1 if a case
/// failed or is unsupported, or if no case matched.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CheckFlags {
    /// Folder with index.json in the format annulus-cases-1
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    device: DeviceFlags,
    /// Ring sizes, each 1 to 128; they may exceed the number of rows. Default: 1,2,3,4,7; under MPI
    /// the number of processes
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = ranks)]
    ranks: Vec<usize>,
    /// Layouts
    #[arg(long, value_enum, default_value = "contiguous,zigzag,striped", value_delimiter = ',')]
    layout: Vec<LayoutName>,
    /// Strategies: ring; heads:H, groups of H ranks among which heads are divided; grid:QxK, Q
    /// query parts and K key columns, or grid:HxQxK; all-gather; all-to-all; once-per-node:N, with
    /// nodes of N ranks; pass-q; auto, the one that sends the fewest bytes. A case whose ranks or
    /// heads a strategy does not divide is unsupported
    #[arg(long, value_name = "NAME,...", default_value = "ring", value_delimiter = ',',
        value_parser = strategy)]
    strategy: Vec<Strategy>,
    /// Element types to compute in. In f16 and bf16, for which cases have no expected arrays, those
    /// of the rounded inputs are computed in f64, and an error may be twice that of a plain
    /// computation in the type
    #[arg(long, value_parser = dtype(), default_value = "f32,f64", value_delimiter = ',')]
    dtype: Vec<DType>,
    /// Only cases whose id matches this pattern of * and ?
    #[arg(long, value_name = "GLOB", default_value = "*")]
    case: String,
    /// Compute in the reproducible order, and compare the bits of every ring with those of the
    /// first one. Not over MPI
    #[arg(long)]
    reproducible: bool,
    /// Threads per rank with --reproducible, each 1 to 1024. Default: 1,2
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', requires = "reproducible",
        value_parser = threads)]
    threads: Vec<usize>,
    /// Count unsupported cases separately instead of as failed
    #[arg(long)]
    skip_unsupported: bool,
}

/// Counts of verdicts.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// The first failure.
    first: Option<String>,
}

/// Case to compute in one element type.
struct Unit {
    /// Id as it is printed.
    id: String,
    /// Number in the index.
    number: usize,
    dtype: DType,
}

/// Default ring sizes of threads: a prime and a power of two beside the smallest.
const SIZES: [usize; 5] = [1, 2, 3, 4, 7];

/// Runs `annulus check`.
pub(crate) fn run(flags: &CheckFlags) -> Outcome {
    flags.device.run_job("check", DEFAULT_DEADLINE, |job, backend| check(flags, job, &backend))
}

fn check(flags: &CheckFlags, job: &mut Job, backend: &BackendChoice) -> Outcome {
    let sizes = job.agree(flags.sizes(job).and_then(|sizes| {
        flags.check_bits(job)?;
        Ok(sizes)
    }))?;
    let index = job.agree(Index::read(&flags.folder))?;
    let rings: Vec<(CheckedRing, String)> = sizes
        .iter()
        .flat_map(|&ranks| flags.layout.iter().map(move |&layout| (ranks, layout)))
        .flat_map(|(ranks, layout)| flags.strategy.iter().map(move |&of| (ranks, layout, of)))
        .flat_map(|(ranks, layout, strategy)| flags.rings(ranks, layout, strategy))
        .collect();
    let units = units(&index, flags);
    if units.is_empty() {
        if job.is_leader() {
            let pattern = message::name(&flags.case);
            complain!(
                "--case: got {pattern}, want the id, or a pattern of ids, of a case in {}",
                message::path(&Index::path(&flags.folder))
            );
            say!("0 passed, 0 failed");
        }
        return Err(Failure::Reported);
    }
    let verdicts = compute(&index, &units, &rings, job, backend)?;
    let mut count = Count::default();
    for (unit, verdicts) in units.iter().zip(verdicts) {
        count.unit(unit, &rings, &verdicts, flags.skip_unsupported);
    }
    // with MPI only rank 0 has the verdicts; the others agree with it below
    let failed = count.failed > 0;
    if job.is_leader() {
        if flags.skip_unsupported {
            say!("{} unsupported", count.skipped);
        }
        say!("{} passed, {} failed", count.passed, count.failed);
        if let Some(first) = &count.first {
            complain!("{} failed; first: {first}", count.failed);
        }
    }
    job.agree(if failed { Err(Failure::Reported) } else { Ok(()) })
}

impl CheckFlags {
    /// Refuses to compare bits over MPI, where no process has the outputs of all ranks.
    fn check_bits(&self, job: &Job) -> Outcome {
        if self.reproducible && job.is_mpi() {
            let by =
                "check over MPI; the output files of `annulus attend --reproducible` are equal";
            return Err(Error::unsupported("--reproducible", by).into());
        }
        Ok(())
    }

    /// Returns the rings of this size and layout, with their names: one, or with `--reproducible`
    /// one for each number of threads.
    fn rings(
        &self,
        ranks: usize,
        layout: LayoutName,
        strategy: Strategy,
    ) -> Vec<(CheckedRing, String)> {
        let mut name = format!("ranks={ranks} layout={layout}");
        if strategy != Strategy::Ring {
            name = format!("{name} strategy={strategy}");
        }
        if !self.reproducible {
            return vec![(
                CheckedRing { ranks, layout, strategy, threads: 1, reproducible: false },
                name,
            )];
        }
        let threads = if self.threads.is_empty() { &[1, 2] } else { &self.threads[..] };
        let ring = |&threads: &usize| {
            let ring = CheckedRing { ranks, layout, strategy, threads, reproducible: true };
            (ring, format!("{name} threads={threads}"))
        };
        threads.iter().map(ring).collect()
    }

    /// Returns the ring sizes: as requested, or the defaults for the kind of ranks.
    ///
    /// # Errors
    /// [`Failure::Usage`] if a ring would be larger than the number of processes.
    fn sizes(&self, job: &Job) -> Outcome<Vec<usize>> {
        if !job.is_mpi() {
            return Ok(if self.ranks.is_empty() { SIZES.to_vec() } else { self.ranks.clone() });
        }
        let all = job.ranks();
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

/// Returns every matching case in every element type. A malformed case becomes a unit that fails.
fn units(index: &Index, flags: &CheckFlags) -> Vec<Unit> {
    let mut units = Vec::new();
    for (number, id) in index.ids().enumerate() {
        // a case without an id is malformed and fails
        let id = id.map_or_else(|| format!("(no id, number {number})"), str::to_owned);
        if matches(&flags.case, &id) {
            let unit = |&dtype: &DType| Unit { id: message::name(&id), number, dtype };
            units.extend(flags.dtype.iter().map(unit));
        }
    }
    units
}

/// Returns the verdicts of every unit, by ring. With MPI rank 0 returns them, and the others none.
///
/// # Ordering
/// Collective over the processes.
fn compute(
    index: &Index,
    units: &[Unit],
    rings: &[(CheckedRing, String)],
    job: &mut Job,
    backend: &BackendChoice,
) -> Outcome<Vec<Vec<Verdict>>> {
    let rings: Vec<CheckedRing> = rings.iter().map(|(ring, _)| *ring).collect();
    #[cfg(feature = "mpi")]
    if job.is_mpi() {
        return processes::compute(index, units, &rings, job, backend);
    }
    #[cfg(not(feature = "mpi"))]
    let _: &Job = job;
    Ok(compute_on_threads(index, units, &rings, backend)?)
}

/// As [`compute`] for rings of threads, with one worker thread per core.
fn compute_on_threads(
    index: &Index,
    units: &[Unit],
    rings: &[CheckedRing],
    backend: &BackendChoice,
) -> Result<Vec<Vec<Verdict>>> {
    let next = AtomicUsize::new(0);
    let judge = |unit: &Unit| case::run(index, unit.number, unit.dtype, rings, backend);
    let worker = |_, ()| {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(unit) = units.get(at) else { return Ok(done) };
            done.push((at, judge(unit)));
        }
    };
    let mut verdicts: Vec<_> =
        each_rank(vec![(); cores()], worker)?.into_iter().flatten().collect();
    verdicts.sort_by_key(|&(at, _)| at);
    Ok(verdicts.into_iter().map(|(_, verdicts)| verdicts).collect())
}

impl Count {
    /// Counts the verdicts of a unit, and prints a line for each failure. An error that is equal on
    /// all rings is an error of the case and is printed once.
    fn unit(
        &mut self,
        Unit { id, dtype, .. }: &Unit,
        rings: &[(CheckedRing, String)],
        verdicts: &[Verdict],
        skip_unsupported: bool,
    ) {
        let alike = match verdicts {
            [first @ Verdict::Failed { .. }, rest @ ..] if !rest.is_empty() => {
                rest.iter().all(|other| other == first)
            }
            _ => false,
        };
        for (index, ((_, ring), verdict)) in rings.iter().zip(verdicts).enumerate() {
            let ring = if alike { String::new() } else { format!(" {ring}") };
            let lines = match verdict {
                Verdict::Passed => {
                    self.passed += 1;
                    continue;
                }
                Verdict::Failed { unsupported: true, .. } if skip_unsupported => {
                    self.skipped += 1;
                    continue;
                }
                Verdict::Failed { .. } if alike && index > 0 => &[],
                Verdict::Failed { what, .. } => std::slice::from_ref(what),
                Verdict::Wrong(lines) => &lines[..],
            };
            self.failed += 1;
            lines.iter().for_each(|line| self.fail(format!("{id}{ring} dtype={dtype}: {line}")));
        }
    }

    fn fail(&mut self, what: String) {
        say!("FAIL {what}");
        self.first.get_or_insert(what);
    }
}

/// True if `pattern` matches the whole of `name`: `*` matches any characters, `?` one. Backtracks
/// to the last `*` only, so the time is O(pattern length · name length).
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // (pattern index after the last `*`, name index at which its match ended)
    let mut retry = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                p += 1;
                retry = Some((p, n));
            }
            Some(&letter) if letter == '?' || letter == name[n] => (p, n) = (p + 1, n + 1),
            _ => match &mut retry {
                Some((after, from)) => {
                    *from += 1;
                    (p, n) = (*after, *from);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&letter| letter == '*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, name) in [
            ("*", ""),
            ("*", "causal"),
            ("ca*al", "causal"),
            ("c?usal", "causal"),
            ("*_gqa*", "mask_causal_gqa"),
            ("a*b*c", "abbbc"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("", "a"), ("causal", "causal2"), ("c?", "c"), ("*b", "abc"), ("a*b*c", "acb")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
