//! What the environment says of the launcher that started this process: `mpirun`, `mpiexec`, `srun` and their kin leave a rank and a size.

use std::sync::atomic::{AtomicBool, Ordering};

/// The variables of each launcher: what it is called, a rank, a number of ranks. The first whose rank is set speaks.
const VARIABLES: [(&str, &str, Option<&str>); 7] = [
    ("OpenMPI", "OMPI_COMM_WORLD_RANK", Some("OMPI_COMM_WORLD_SIZE")),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", Some("MV2_COMM_WORLD_SIZE")),
    ("PMI", "PMI_RANK", Some("PMI_SIZE")),
    ("Flux", "FLUX_TASK_RANK", Some("FLUX_JOB_SIZE")),
    ("JSM", "JSM_NAMESPACE_RANK", Some("JSM_NAMESPACE_SIZE")),
    // of a step: a batch script has a SLURM_PROCID as well, and is no rank of anything
    ("Slurm", "SLURM_PROCID", Some("SLURM_STEP_NUM_TASKS")),
    // names no size of its own
    ("PMIx", "PMIX_RANK", None),
];

/// This process's place, as its launcher has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The launcher.
    pub(crate) by: &'static str,
    /// This process.
    pub(crate) rank: usize,
    /// All processes; `None` if the launcher does not say.
    pub(crate) size: Option<usize>,
}

/// This process's place, if a launcher has started it.
pub(crate) fn place() -> Option<Place> {
    place_in(|name| std::env::var(name).ok())
}

/// This process's place, if it is one of several.
pub(crate) fn among_others() -> Option<Place> {
    place().filter(|place| place.size != Some(1))
}

fn place_in(variable: impl Fn(&str) -> Option<String>) -> Option<Place> {
    let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
    let places = VARIABLES.iter().filter_map(|&(by, rank, size)| {
        Some(Place { by, rank: number(rank)?, size: size.and_then(number) })
    });
    // one that knows the size says more
    let (sized, unsized_ones): (Vec<_>, Vec<_>) = places.partition(|place| place.size.is_some());
    sized.into_iter().next().or_else(|| unsized_ones.into_iter().find(|place| place.by == "PMIx"))
}

/// Set where this process is for itself, whatever its launcher says.
static ALONE: AtomicBool = AtomicBool::new(false);

/// From now on this process speaks for itself: it shares nothing with the others that its launcher has started.
pub(crate) fn stand_alone() {
    ALONE.store(true, Ordering::Relaxed);
}

/// Whether this process is the one that says what all of them would say.
pub(crate) fn speaks() -> bool {
    ALONE.load(Ordering::Relaxed) || among_others().is_none_or(|place| place.rank == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Option<Place> {
        place_in(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_launcher_is_known_by_its_variables() {
        assert_eq!(of(&[]), None);
        for (by, rank, size) in VARIABLES {
            let place = of(&[(rank, "3"), (size.unwrap_or("ANOTHER"), "8")]);
            assert_eq!(place, Some(Place { by, rank: 3, size: size.map(|_| 8) }), "{by}");
        }
        // OpenMPI and Slurm leave the variables of PMIx as well, and those have no size
        let both = of(&[("PMIX_RANK", "1"), ("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")]);
        assert_eq!(both, Some(Place { by: "Slurm", rank: 1, size: Some(2) }));
    }

    #[test]
    fn a_batch_script_and_nonsense_are_no_launcher() {
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), None);
        assert_eq!(of(&[("PMI_RANK", "x"), ("PMI_SIZE", "4")]), None);
    }
}
