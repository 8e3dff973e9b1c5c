//! Detects the launcher of this process (`mpirun`, `mpiexec`, `srun`) from the environment
//! variables in which launchers pass a rank and the number of ranks.

use std::sync::atomic::{AtomicBool, Ordering};

/// Known launchers in order of precedence, with the variables that have the rank of this process
/// and, if there is one, the number of processes.
const LAUNCHERS: [(&str, &str, Option<&str>); 7] = [
    ("OpenMPI", "OMPI_COMM_WORLD_RANK", Some("OMPI_COMM_WORLD_SIZE")),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", Some("MV2_COMM_WORLD_SIZE")),
    ("PMI", "PMI_RANK", Some("PMI_SIZE")),
    ("Flux", "FLUX_TASK_RANK", Some("FLUX_JOB_SIZE")),
    ("JSM", "JSM_NAMESPACE_RANK", Some("JSM_NAMESPACE_SIZE")),
    // not SLURM_NTASKS: a batch script has it and SLURM_PROCID, but is not a task of a job step
    ("Slurm", "SLURM_PROCID", Some("SLURM_STEP_NUM_TASKS")),
    ("PMIx", "PMIX_RANK", None),
];

/// Rank of this process according to its launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaunchedRank {
    /// Name of the launcher.
    pub(crate) launcher: &'static str,
    /// Rank of this process.
    pub(crate) rank: usize,
    /// Number of processes; `None` if no variable has it.
    pub(crate) ranks: Option<usize>,
}

impl LaunchedRank {
    /// Returns the number of processes for a message: `several` if it is unknown.
    pub(crate) fn count(&self) -> String {
        self.ranks.map_or_else(|| "several".to_owned(), |ranks| ranks.to_string())
    }
}

/// Returns the rank of this process, if a launcher started it.
pub(crate) fn launched_rank() -> Option<LaunchedRank> {
    rank_in(|name| std::env::var(name).ok())
}

/// As [`launched_rank`], but `None` for the only process of a job.
pub(crate) fn one_of_several() -> Option<LaunchedRank> {
    launched_rank().filter(|launched| launched.ranks != Some(1))
}

fn rank_in(variable: impl Fn(&str) -> Option<String>) -> Option<LaunchedRank> {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let found = LAUNCHERS.iter().filter_map(|&(launcher, rank, ranks)| {
        Some(LaunchedRank { launcher, rank: number(rank)?, ranks: ranks.and_then(number) })
    });
    // a launcher with a known size takes precedence: OpenMPI and Slurm set PMIX_RANK too. Of the
    // others only PMIx counts, which never has a size
    let (sized, unsized_ones): (Vec<_>, Vec<_>) = found.partition(|found| found.ranks.is_some());
    let pmix = || unsized_ones.into_iter().find(|found| found.launcher == "PMIx");
    sized.into_iter().next().or_else(pmix)
}

/// True after [`force_single`].
static SINGLE: AtomicBool = AtomicBool::new(false);

/// Makes this process independent of the others that its launcher started, as
/// `--transport threads` does: it prints its own output.
pub(crate) fn force_single() {
    SINGLE.store(true, Ordering::Relaxed);
}

/// True if this process prints what is printed once per job: rank 0, or a single process.
pub(crate) fn is_leader_output() -> bool {
    SINGLE.load(Ordering::Relaxed) || one_of_several().is_none_or(|launched| launched.rank == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Option<LaunchedRank> {
        rank_in(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_launcher_is_detected_by_its_variables() {
        assert_eq!(of(&[]), None);
        for (launcher, rank, ranks) in LAUNCHERS {
            let found = of(&[(rank, "3"), (ranks.unwrap_or("ANOTHER"), "8")]);
            let want = LaunchedRank { launcher, rank: 3, ranks: ranks.map(|_| 8) };
            assert_eq!(found, Some(want), "{launcher}");
        }
        // Slurm sets the rank of PMIx as well
        let both = of(&[("PMIX_RANK", "1"), ("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")]);
        assert_eq!(both, Some(LaunchedRank { launcher: "Slurm", rank: 1, ranks: Some(2) }));
    }

    #[test]
    fn a_batch_script_and_a_malformed_rank_are_ignored() {
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), None);
        assert_eq!(of(&[("PMI_RANK", "x"), ("PMI_SIZE", "4")]), None);
    }
}
