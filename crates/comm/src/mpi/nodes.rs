//! Which rank runs on which node, and on which of its cores: what MPI and the system say, gathered once when an endpoint is made.

use std::{collections::HashMap, ops::RangeInclusive};

use annulus_core::{Error, Placement, Result};

use super::{Mpi, topology};

/// Bytes of what a rank says of itself; the rest of a longer list of cores, or of a longer name, is left out.
const RECORD: usize = 1024;
const LONGEST_LIST: usize = 512;

/// Where one rank runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The number of its node: nodes count from 0 in the order of their first ranks.
    pub node: usize,
    /// What MPI calls its processor, as a rule the name of the host.
    pub host: String,
    /// How many lower ranks run on this node.
    pub rank_on_node: usize,
    /// The cores that the system lets it run on, as runs of ascending numbers; empty where the system does not say.
    pub cores: Vec<RangeInclusive<usize>>,
}

impl Place {
    /// How many cores the rank may run on; `None` where the system does not say.
    pub fn core_count(&self) -> Option<usize> {
        let count = |run: &RangeInclusive<usize>| run.end() - run.start() + 1;
        (!self.cores.is_empty()).then(|| self.cores.iter().map(count).sum())
    }
}

/// Where every rank runs; the same on all ranks.
///
/// Ranks are on one node if MPI says that they can share memory (`MPI_Comm_split_type`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeMap {
    places: Vec<Place>,
    placement: Placement,
}

impl NodeMap {
    /// `places[rank]`.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.places.iter().map(|place| place.node + 1).max().unwrap_or(0)
    }

    /// Nodes by rank, as an automatic choice of a ring wants them.
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Makes the map from what every rank says of itself: the first rank of its node, host, cores.
    pub(super) fn new(said: Vec<(usize, String, Vec<RangeInclusive<usize>>)>) -> Self {
        let mut nodes_by_first_rank: HashMap<usize, usize> = HashMap::new();
        let mut ranks_of_nodes: Vec<usize> = Vec::new();
        let mut places: Vec<Place> = Vec::with_capacity(said.len());
        for (first, host, cores) in said {
            let node = *nodes_by_first_rank.entry(first).or_insert(ranks_of_nodes.len());
            if node == ranks_of_nodes.len() {
                ranks_of_nodes.push(0);
            }
            let rank_on_node = ranks_of_nodes[node];
            ranks_of_nodes[node] += 1;
            places.push(Place { node, host, rank_on_node, cores });
        }
        let placement = Placement::new(places.iter().map(|place| place.node).collect());
        Self { places, placement }
    }
}

impl Mpi {
    /// Makes the map. Every rank is there: they have just duplicated a communicator together.
    pub(super) fn map_nodes(&self) -> Result<NodeMap> {
        let (_, communicator) = self.enter()?;
        let first = topology::first_on_node(communicator)?;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let said = record(first, allowed(&status), &topology::processor()?);
        let all = topology::gather(communicator, said, self.settings.patience)?;
        let read = |(peer, said): (usize, &[u8; RECORD])| {
            let broken =
                || Error::Comm { peer, step: 0, what: "where it runs came broken".to_owned() };
            read(&String::from_utf8_lossy(said)).ok_or_else(broken)
        };
        all.iter().enumerate().map(read).collect::<Result<_>>().map(NodeMap::new)
    }
}

/// What a rank says of itself, filled up with zeros.
fn record(first: usize, cores: &str, host: &str) -> [u8; RECORD] {
    // a list is cut between two runs
    let end = if cores.len() <= LONGEST_LIST {
        cores.len()
    } else {
        cores[..LONGEST_LIST].rfind(',').unwrap_or(0)
    };
    let mut record = [0; RECORD];
    let text = format!("{first}\n{}\n{host}", &cores[..end]);
    record.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
    record
}

/// The cores on which Linux lets this process run, as it lists them: `0-3,8`.
fn allowed(status: &str) -> &str {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map_or("", str::trim)
}

/// What a rank said of itself.
fn read(said: &str) -> Option<(usize, String, Vec<RangeInclusive<usize>>)> {
    let mut lines = said.trim_end_matches('\0').splitn(3, '\n');
    let first = lines.next()?.parse().ok()?;
    let cores = lines.next()?;
    Some((first, lines.next()?.to_owned(), runs(cores)))
}

/// A list of cores as runs; none if it makes no sense, for nothing depends on it but what people are told.
fn runs(list: &str) -> Vec<RangeInclusive<usize>> {
    let run = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then_some(first..=last)
    };
    list.split(',').map(run).collect::<Option<_>>().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_count_in_the_order_of_their_first_ranks() {
        let said =
            [0, 1, 0, 4, 1, 0].map(|first| read(&format!("{first}\n0-3,8\nhost {first}")).unwrap());
        let map = NodeMap::new(said.into());
        assert_eq!(map.placement().nodes(), [0, 1, 0, 2, 1, 0]);
        assert_eq!(map.nodes(), 3);
        assert_eq!(
            map.places().iter().map(|place| place.rank_on_node).collect::<Vec<_>>(),
            [0, 0, 1, 0, 1, 2]
        );
        assert_eq!(
            (map.places()[3].host.as_str(), map.places()[3].core_count()),
            ("host 4", Some(5))
        );
        assert_eq!(NodeMap::new(Vec::new()).nodes(), 0);
    }

    /// Quadratic in ranks, this map takes a minute.
    #[test]
    fn thousands_of_ranks_are_mapped_at_once() {
        let started = std::time::Instant::now();
        let said = (0..60_000).map(|rank| (rank % 30_000, String::new(), Vec::new())).collect();
        let map = NodeMap::new(said);
        assert_eq!((map.nodes(), map.places()[59_999].rank_on_node), (30_000, 1));
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }

    #[test]
    fn cores_are_read_as_linux_lists_them() {
        assert_eq!(runs("0-3,8"), [0..=3, 8..=8]);
        for nonsense in ["", "3-1", "a", "1,,2"] {
            assert_eq!(runs(nonsense), []);
        }
        assert_eq!(allowed("Name:\tx\nCpus_allowed_list:\t0-1\nMems:\t0"), "0-1");
        assert_eq!(read("x\n0\nhost"), None);
        assert_eq!(read("1\n0"), None);
        let told = |cores: &str| read(&String::from_utf8_lossy(&record(7, cores, "host")));
        assert_eq!(told("0-3"), Some((7, "host".to_owned(), vec![0..=3])));
        let (_, _, cores) =
            told(&(0..400).map(|core| (2 * core).to_string()).collect::<Vec<_>>().join(","))
                .unwrap();
        assert!(
            cores.len() > 100
                && cores.iter().enumerate().all(|(place, run)| *run == (2 * place..=2 * place))
        );
    }
}
