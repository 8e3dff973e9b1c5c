//! What the processes of a job have: the MPI, who runs where, and settings that are known to be bad.

use std::{collections::BTreeSet, ops::RangeInclusive};

use annulus_comm::mpi::{GpuAwareness, RankLocation};

use super::Findings;
use crate::{crew::World, failure::Outcome};

/// By which OpenMPI lets ranks that wait leave their core to others.
const OPENMPI_YIELDS: &str = "OMPI_MCA_mpi_yield_when_idle";

/// Adds it to the report.
///
/// # Errors
/// MPI's own.
pub(super) fn of_job(world: &World, findings: &mut Findings) -> Outcome {
    let mut line = |name: &str, what: &str| findings.line(name, what);
    let (launch, nodes) = (world.launch(), world.nodes());
    let library = launch.library()?;
    let library = library.lines().next().unwrap_or_default().trim().to_owned();
    line("mpi", &library);
    line("mpi threads", &launch.thread_level()?.to_string());
    let aware = launch.gpu_awareness();
    let blocks = aware.decides().map_or_else(
        |error| error.to_string(),
        |takes| {
            format!(
                "CUDA memory {}",
                if takes { "is handed to mpi" } else { "is staged through the host" }
            )
        },
    );
    line("gpu-aware", &format!("{aware}: {blocks} ({} decides, 1 or 0)", GpuAwareness::VARIABLE));
    line(
        "ranks",
        &format!(
            "{} on {} node{}",
            nodes.locations().len(),
            nodes.nodes(),
            if nodes.nodes() == 1 { "" } else { "s" }
        ),
    );
    for (rank, place) in nodes.locations().iter().enumerate() {
        let cores = if place.cores.is_empty() {
            "cores unknown".to_owned()
        } else {
            format!("cores {}", listed(&place.cores))
        };
        line(&format!("rank {rank}"), &format!("{} (node {}), {cores}", place.host, place.node));
    }
    let yields = std::env::var(OPENMPI_YIELDS).is_ok_and(|value| value.trim() == "1");
    let advice = if library.contains("Open MPI") { Some(yields) } else { None };
    warnings(nodes.locations(), advice).iter().for_each(|warning| line("warning", warning));
    Ok(())
}

/// Cores as the system lists them: `0-3,8`.
fn listed(cores: &[RangeInclusive<usize>]) -> String {
    let run = |run: &RangeInclusive<usize>| match (run.start(), run.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    };
    cores.iter().map(run).collect::<Vec<_>>().join(",")
}

/// What will make the job slow, node by node. `openmpi_yields`: whether OpenMPI was told to yield, where it is OpenMPI.
fn warnings(places: &[RankLocation], openmpi_yields: Option<bool>) -> Vec<String> {
    let mut warnings = Vec::new();
    for node in places.iter().map(|place| place.node).collect::<BTreeSet<_>>() {
        let here: Vec<&RankLocation> = places.iter().filter(|place| place.node == node).collect();
        let all: BTreeSet<usize> =
            here.iter().flat_map(|place| place.cores.iter().cloned().flatten()).collect();
        // where the system does not say there is nothing to warn of
        if here.iter().any(|place| place.cores.is_empty()) {
            continue;
        }
        let host = here.first().map_or("", |place| place.host.as_str());
        let (ranks, cores) = (here.len(), all.len());
        if ranks > 1 && cores == 1 {
            warnings.push(format!(
                "all {ranks} ranks of {host} are bound to one core ({}): bind each to cores of its own, or none (OpenMPI: --bind-to none)",
                all.first().copied().unwrap_or_default()
            ));
        } else if ranks > cores {
            let remedy = match openmpi_yields {
                Some(true) => continue,
                Some(false) => {
                    "; --mca mpi_yield_when_idle 1 lets ranks that wait leave the cores to those that work"
                }
                None => "; ranks that wait within MPI keep the cores from those that work",
            };
            warnings.push(format!("{ranks} ranks share {cores} cores of {host}{remedy}"));
        } else if let Some(bound) =
            here.iter().find(|place| place.core_count() == Some(1)).filter(|_| cores > ranks)
        {
            warnings.push(format!(
                "rank {} of {host} is bound to one core of {cores}: it computes with one thread (OpenMPI: --map-by slot:PE=N gives N)",
                bound.rank_on_node
            ));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(of: &[(usize, &[RangeInclusive<usize>])]) -> Vec<RankLocation> {
        let place = |&(node, cores): &(usize, &[RangeInclusive<usize>])| RankLocation {
            node,
            host: format!("host{node}"),
            rank_on_node: 0,
            cores: cores.to_vec(),
        };
        of.iter().map(place).collect()
    }

    #[test]
    fn bad_bindings_are_warned_of_node_by_node() {
        let told = |of: &[(usize, &[RangeInclusive<usize>])], yields| {
            warnings(&places(of), yields).join("\n")
        };
        assert_eq!(told(&[(0, &[0..=3]), (0, &[0..=3])], Some(false)), "");
        assert_eq!(told(&[(0, &[0..=0]), (0, &[1..=1])], Some(false)), "");
        assert!(
            told(&[(1, &[4..=4]), (1, &[4..=4]), (0, &[0..=9])], Some(true))
                .starts_with("all 2 ranks of host1 are bound to one core (4)")
        );
        let crowded = &[(0, &[0..=1][..]), (0, &[0..=1]), (0, &[0..=1])];
        assert!(
            told(crowded, Some(false))
                .contains("3 ranks share 2 cores of host0; --mca mpi_yield_when_idle 1")
        );
        assert!(told(crowded, None).contains("keep the cores"));
        assert_eq!(told(crowded, Some(true)), "");
        assert!(told(&[(0, &[0..=7]), (0, &[3..=3])], None).contains("one thread"));
        assert_eq!(told(&[(0, &[]), (0, &[])], None), "");
    }

    #[test]
    fn cores_are_listed_as_the_system_does() {
        assert_eq!(listed(&[0..=3, 8..=8]), "0-3,8");
    }
}
