//! Findings about an MPI job: the library, node and cores of each rank, and slow settings.

use std::collections::{BTreeMap, BTreeSet};

use annulus_comm::mpi::{GpuAwareness, GpuRuntime, RankLocation};

use super::Findings;
use crate::{failure::Outcome, job::World};

/// Variable that makes waiting ranks of OpenMPI yield their core.
const OPENMPI_YIELDS: &str = "OMPI_MCA_mpi_yield_when_idle";

/// Adds the findings about the job to the report.
pub(super) fn add_findings(world: &World, findings: &mut Findings) -> Outcome {
    let mut line = |name: &str, what: &str| findings.line(name, what);
    let launch = &world.launch;
    let nodes = &world.nodes;
    let library = launch.library()?;
    let library = library.lines().next().unwrap_or_default().trim().to_owned();
    line("mpi", &library);
    line("mpi threads", &launch.thread_level()?.to_string());
    for runtime in [GpuRuntime::Cuda, GpuRuntime::Hip] {
        let aware = launch.gpu_awareness(runtime);
        let blocks = aware.decides().map_or_else(
            |error| error.to_string(),
            |takes| {
                let how = if takes { "is passed to mpi" } else { "is staged through the host" };
                format!("{runtime} memory {how}")
            },
        );
        let variable = GpuAwareness::VARIABLE;
        line("gpu-aware", &format!("{aware}: {blocks} ({variable} decides, 1 or 0)"));
    }
    let reported =
        GpuRuntime::ALL.map(|runtime| format!("{runtime} {}", launch.gpu_awareness(runtime)));
    line("gpu memory", &format!("accepted by mpi: {}", reported.join(", ")));
    line(
        "ranks",
        &format!(
            "{} on {} node{}",
            nodes.locations().len(),
            nodes.nodes(),
            if nodes.nodes() == 1 { "" } else { "s" }
        ),
    );
    of_nodes(nodes.locations()).iter().for_each(|nodes| line("nodes", nodes));
    line("mpi tags", &format!("0 to {}", world.last_tag));
    let yields = std::env::var(OPENMPI_YIELDS).is_ok_and(|value| value.trim() == "1");
    let advice = if library.contains("Open MPI") { Some(yields) } else { None };
    warnings(nodes.locations(), advice).iter().for_each(|warning| line("warning", warning));
    Ok(())
}

/// Describes the nodes by their number of ranks: `1000 of 8 ranks: n0001 to n1000`.
fn of_nodes(locations: &[RankLocation]) -> Vec<String> {
    let mut hosts: Vec<(&str, usize)> = Vec::new();
    for RankLocation { node, host, .. } in locations {
        // nodes count from 0 in the order of their first ranks
        if *node == hosts.len() {
            hosts.push((host, 0));
        }
        if let Some((_, ranks)) = hosts.get_mut(*node) {
            *ranks += 1;
        }
    }
    let mut by_ranks: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for (host, ranks) in hosts {
        by_ranks.entry(ranks).or_default().push(host);
    }
    let described = |(ranks, hosts): (&usize, &Vec<&str>)| {
        let plural = if *ranks == 1 { "" } else { "s" };
        let named = match hosts[..] {
            [first, _, .., last] => format!("{first} to {last}"),
            _ => hosts.join(", "),
        };
        format!("{} of {ranks} rank{plural}: {named}", hosts.len())
    };
    by_ranks.iter().map(described).collect()
}

/// Lists settings that make the job slow, by node. `openmpi_yields` is true if waiting ranks yield
/// their core, and `None` if the library is not OpenMPI.
fn warnings(locations: &[RankLocation], openmpi_yields: Option<bool>) -> Vec<String> {
    let mut warnings = Vec::new();
    for node in locations.iter().map(|location| location.node).collect::<BTreeSet<_>>() {
        let here: Vec<&RankLocation> =
            locations.iter().filter(|location| location.node == node).collect();
        let all: BTreeSet<usize> =
            here.iter().flat_map(|location| location.cores.iter().cloned().flatten()).collect();
        // unknown cores: nothing can be said about their use
        if here.iter().any(|location| location.cores.is_empty()) {
            continue;
        }
        let host = here.first().map_or("", |location| location.host.as_str());
        let ranks = here.len();
        let cores = all.len();
        if ranks > 1 && cores == 1 {
            warnings.push(format!(
                "all {ranks} ranks of {host} are bound to one core ({}): bind each to its own \
                 cores, or bind none (OpenMPI: --bind-to none)",
                all.first().copied().unwrap_or_default()
            ));
        } else if ranks > cores {
            let remedy = match openmpi_yields {
                Some(true) => continue,
                Some(false) => "; with --mca mpi_yield_when_idle 1 waiting ranks yield their core",
                None => "; ranks that wait in MPI occupy a core",
            };
            warnings.push(format!("{ranks} ranks share {cores} cores of {host}{remedy}"));
        } else if let Some(bound) =
            here.iter().find(|location| location.core_count() == Some(1)).filter(|_| cores > ranks)
        {
            warnings.push(format!(
                "rank {} of {host} is bound to one core of {cores}: it has one thread \
                 (OpenMPI: --map-by slot:PE=N binds to N)",
                bound.rank_on_node
            ));
        }
    }
    warnings
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;

    fn locations(of: &[(usize, &[RangeInclusive<usize>])]) -> Vec<RankLocation> {
        let location = |&(node, cores): &(usize, &[RangeInclusive<usize>])| RankLocation {
            node,
            host: format!("host{node}"),
            rank_on_node: 0,
            cores: cores.to_vec(),
        };
        of.iter().map(location).collect()
    }

    #[test]
    fn slow_bindings_are_warned_of_by_node() {
        let warned = |of: &[(usize, &[RangeInclusive<usize>])], yields| {
            warnings(&locations(of), yields).join("\n")
        };
        assert_eq!(warned(&[(0, &[0..=3]), (0, &[0..=3])], Some(false)), "");
        assert_eq!(warned(&[(0, &[0..=0]), (0, &[1..=1])], Some(false)), "");
        assert!(
            warned(&[(1, &[4..=4]), (1, &[4..=4]), (0, &[0..=9])], Some(true))
                .starts_with("all 2 ranks of host1 are bound to one core (4)")
        );
        let crowded = &[(0, &[0..=1][..]), (0, &[0..=1]), (0, &[0..=1])];
        assert!(
            warned(crowded, Some(false))
                .contains("3 ranks share 2 cores of host0; with --mca mpi_yield_when_idle 1")
        );
        assert!(warned(crowded, None).contains("occupy a core"));
        assert_eq!(warned(crowded, Some(true)), "");
        assert!(warned(&[(0, &[0..=7]), (0, &[3..=3])], None).contains("one thread"));
        assert_eq!(warned(&[(0, &[]), (0, &[])], None), "");
    }

    #[test]
    fn nodes_are_described_by_their_number_of_ranks() {
        let of = |nodes: &[usize]| {
            let all: Vec<_> = nodes.iter().map(|&node| (node, &[][..])).collect();
            of_nodes(&locations(&all))
        };
        assert_eq!(of(&[0]), ["1 of 1 rank: host0"]);
        assert_eq!(of(&[0, 1, 0, 1]), ["2 of 2 ranks: host0, host1"]);
        let many: Vec<usize> = (0..8000).map(|rank| rank / 8).chain([1000]).collect();
        assert_eq!(of(&many), ["1 of 1 rank: host1000", "1000 of 8 ranks: host0 to host999"]);
    }
}
