//! Nodes, hosts, cores and message settings of all ranks, gathered once when an endpoint is
//! created, and rings of the first ranks of a job. Relies on the rules of [`super::ffi`].
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{
    collections::HashMap,
    ffi::{c_char, c_int},
    ops::RangeInclusive,
    ptr,
    sync::Arc,
};

use annulus_core::{Error, Placement, Result};
use annulus_mpi::ffi;

use super::{
    Mpi, Settings, Timeout,
    communicator::{MpiCommunicator, ParentCommunicator, complete},
    ffi::{PeerStep, check, count},
};

/// Bytes of a rank's record. A longer host name is cut.
const RECORD: usize = 1024;
/// Longest list of cores in a record, in bytes: half of it, so that a host name of any usual length
/// (at most 255 bytes) fits as well. The rest of a longer list is left out.
const LONGEST_LIST: usize = RECORD / 2;

/// Node, host and cores of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankLocation {
    /// Number of its node. Nodes count from 0 in the order of their first ranks.
    pub node: usize,
    /// MPI's name of its processor, as a rule the host name.
    pub host: String,
    /// Number of lower ranks on this node.
    pub rank_on_node: usize,
    /// Cores on which the system lets it run, as runs of ascending numbers; empty if unknown.
    pub cores: Vec<RangeInclusive<usize>>,
}

impl RankLocation {
    /// Returns the number of cores on which the rank may run; `None` if unknown.
    pub fn core_count(&self) -> Option<usize> {
        let count = |run: &RangeInclusive<usize>| run.end() - run.start() + 1;
        (!self.cores.is_empty()).then(|| self.cores.iter().map(count).sum())
    }
}

/// Locations of all ranks; equal on all ranks.
///
/// Two ranks are on one node if their systems have the same host name and boot ID, or on systems
/// other than Linux, if MPI names the same processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeMap {
    locations: Vec<RankLocation>,
    placement: Placement,
}

impl NodeMap {
    /// Returns the location of every rank, by rank.
    pub fn locations(&self) -> &[RankLocation] {
        &self.locations
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.locations.iter().map(|location| location.node + 1).max().unwrap_or(0)
    }

    /// Returns the node of every rank, as the automatic choice of a ring order takes it.
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Builds the map from the records of all ranks.
    pub(super) fn new(records: Vec<Record>) -> Self {
        let mut numbers: HashMap<String, usize> = HashMap::new();
        let mut ranks_of_nodes: Vec<usize> = Vec::new();
        let mut locations: Vec<RankLocation> = Vec::with_capacity(records.len());
        for Record { node, host, cores, .. } in records {
            let next_node = ranks_of_nodes.len();
            let node = *numbers.entry(node).or_insert(next_node);
            if node == next_node {
                ranks_of_nodes.push(0);
            }
            let rank_on_node = ranks_of_nodes[node];
            ranks_of_nodes[node] += 1;
            locations.push(RankLocation { node, host, rank_on_node, cores });
        }
        let placement = Placement::new(locations.iter().map(|location| location.node).collect());
        Self { locations, placement }
    }
}

/// Gathers the records of all ranks, on all ranks; `messages` are the message settings of this one.
///
/// `MPI_Comm_split_type` would find nodes as well, but it blocks: a rank that does not come is
/// waited for without a limit, and MPICH keeps a core busy meanwhile.
///
/// Collective over the ranks of `communicator`, which the caller has entered.
pub(super) fn gather_records(
    communicator: &MpiCommunicator,
    messages: &str,
    timeout: &Timeout,
) -> Result<Vec<Record>> {
    let host = processor_name()?;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mine = encode(&node_id(&host), allowed_cores(&status), messages, &host);
    let all = all_gather(communicator, mine, timeout)?;
    let decode = |(peer, record): (usize, &[u8; RECORD])| {
        let malformed =
            || Error::Comm { peer, step: 0, what: "the record of its node is malformed".into() };
        decode(&String::from_utf8_lossy(record)).ok_or_else(malformed)
    };
    all.iter().enumerate().map(decode).collect()
}

/// Location of a rank as it reports it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Equal for the ranks of a node, and for no others.
    node: String,
    host: String,
    cores: Vec<RangeInclusive<usize>>,
    /// Settings of its messages.
    pub(super) messages: String,
}

/// Returns an identifier of the node of this process, whose processor MPI calls `processor`.
///
/// Neither name suffices: nodes may all be called localhost, and virtual machines that resume from
/// one snapshot have one boot ID. Containers with host names of their own count as nodes.
fn node_id(processor: &str) -> String {
    let read = |name| std::fs::read_to_string(format!("/proc/sys/kernel/{name}"));
    match (read("random/boot_id"), read("hostname")) {
        (Ok(boot), Ok(host)) => format!("{} {}", boot.trim(), host.trim()),
        _ => processor.to_owned(),
    }
}

/// Encodes a record as four lines, padded with zeros: node, cores, message settings, host.
fn encode(node: &str, cores: &str, messages: &str, host: &str) -> [u8; RECORD] {
    // a list is cut between two runs
    let end = if cores.len() <= LONGEST_LIST {
        cores.len()
    } else {
        cores[..LONGEST_LIST].rfind(',').unwrap_or(0)
    };
    let mut record = [0; RECORD];
    let text = format!("{node}\n{}\n{messages}\n{host}", &cores[..end]);
    record.iter_mut().zip(text.bytes()).for_each(|(into, byte)| *into = byte);
    record
}

/// Returns the cores on which Linux lets this process run, as `/proc/self/status` lists them:
/// `0-3,8`.
fn allowed_cores(status: &str) -> &str {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map_or("", str::trim)
}

/// Decodes a record; `None` if it is malformed.
fn decode(record: &str) -> Option<Record> {
    let mut lines = record.trim_end_matches('\0').splitn(4, '\n');
    let node = lines.next()?.to_owned();
    let cores = runs(lines.next()?);
    let messages = lines.next()?.to_owned();
    Some(Record { node, host: lines.next()?.to_owned(), cores, messages })
}

/// Parses a list of cores. Returns no run if it is malformed: cores are only displayed, so this is
/// no error.
fn runs(list: &str) -> Vec<RangeInclusive<usize>> {
    let run = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let first: usize = first.parse().ok()?;
        let last: usize = last.parse().ok()?;
        (first <= last).then_some(first..=last)
    };
    list.split(',').map(run).collect::<Option<_>>().unwrap_or_default()
}

/// A communicator of the first ranks of the job, for any number of rings, also at the same time.
///
/// It lives until `MPI_Finalize`: freeing it is collective, and would wait for a lost rank.
pub struct FirstRanks {
    communicator: MpiCommunicator,
    /// Gathered once, for all rings.
    nodes: Arc<NodeMap>,
}

impl FirstRanks {
    /// Creates a communicator of the first `count` ranks of the job; `None` on the others.
    ///
    /// # Ordering
    /// Collective over **all** ranks of the job.
    /// # Errors
    /// [`Error::InvalidArgument`] if the job has fewer ranks or MPI is not alive,
    /// [`Error::Unsupported`] on a thread that may not call MPI, [`Error::Comm`] if MPI fails or
    /// not all ranks come within `timeout`.
    pub fn of_world(count: usize, timeout: Timeout) -> Result<Option<Self>> {
        // the wait for a duplicate warns and may end, that for a split does not: once the duplicate
        // exists all ranks have come, so the split follows at once
        let world =
            MpiCommunicator::duplicate(ParentCommunicator::world(), c"annulus job", &timeout)?;
        if !(1..=world.ranks).contains(&count) {
            return Err(Error::invalid(
                "ranks",
                count,
                format!("1 to {}, the ranks of this job", world.ranks),
            ));
        }
        let first = world.first_ranks(count)?;
        world.free();
        let Some(communicator) = first else { return Ok(None) };
        let ring =
            Mpi::over(communicator.as_parent(), Settings { timeout, ..Settings::default() })?;
        let nodes = Arc::clone(&ring.nodes);
        Ok(Some(Self { communicator, nodes }))
    }

    /// Number of these ranks.
    pub const fn ranks(&self) -> usize {
        self.communicator.ranks
    }

    /// Creates this rank's endpoint of a new ring of these ranks.
    ///
    /// # Ordering
    /// Collective over these ranks.
    /// # Errors
    /// As [`Mpi::world`].
    pub fn ring(&self, settings: Settings) -> Result<Mpi> {
        let mut endpoint = Mpi::unmapped(self.communicator.as_parent(), settings)?;
        endpoint.nodes = Arc::clone(&self.nodes);
        Mpi::of(endpoint)
    }
}

impl std::fmt::Debug for FirstRanks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FirstRanks").field("ranks", &self.ranks()).finish_non_exhaustive()
    }
}

/// Tag of the records. Frames, which a rank may send while others still gather, have another.
const TAG: c_int = 1;

/// Returns MPI's name of the processor of this process. The caller has entered a communicator.
pub(super) fn processor_name() -> Result<String> {
    // SAFETY: a constant of the linked MPI
    let capacity = count(unsafe { ffi::RSMPI_MAX_PROCESSOR_NAME });
    let mut text = vec![0u8; capacity + 1];
    let mut length = 0;
    // SAFETY: rule 1 (the caller has entered); MPI writes at most `capacity` characters and the
    // length
    let code =
        unsafe { ffi::MPI_Get_processor_name(text.as_mut_ptr().cast::<c_char>(), &raw mut length) };
    check(code, PeerStep::of(0))?;
    text.truncate(count(length).min(capacity));
    Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
}

/// Gathers the records of all ranks, which have one length, on all ranks, by the algorithm of
/// [`super::circulant`] with blocking rounds.
///
/// Frames cannot carry them, because processing frames may abort an endpoint that is not created
/// yet. `MPI_Iallgather` would connect every pair of ranks in some MPIs (Open MPI's is linear),
/// which costs a descriptor for each.
///
/// Collective over the ranks of `communicator`, which the caller has entered; waits for at most
/// `timeout` in each round.
fn all_gather(
    communicator: &MpiCommunicator,
    mine: [u8; RECORD],
    timeout: &Timeout,
) -> Result<Vec<[u8; RECORD]>> {
    let (rank, ranks) = (communicator.rank, communicator.ranks);
    // records of `rank`, `rank + 1`, …; on the heap, and leaked if a round fails: MPI may read and
    // write it whenever the last rank comes
    let mut records = vec![[0u8; RECORD]; ranks];
    records[0] = mine;
    let records: *mut [u8; RECORD] = Box::leak(records.into_boxed_slice()).as_mut_ptr();
    let failure = "the ranks did not all report where they run";
    let bytes = |records: usize| c_int::try_from(records * RECORD).unwrap_or(c_int::MAX);
    let mut reach = 1;
    while reach < ranks {
        let count = reach.min(ranks - reach);
        let source = (rank + reach) % ranks;
        let target = (rank + ranks - reach) % ranks;
        // SAFETY: constants of the linked MPI
        let (mut receive, mut send) = unsafe { (ffi::RSMPI_REQUEST_NULL, ffi::RSMPI_REQUEST_NULL) };
        // SAFETY: rules 1 and 2 (the caller has entered); `count` records from number `reach` on
        // are within the allocation, which lives until both requests are complete, or for ever
        let started = unsafe {
            let into = records.add(reach).cast();
            let (byte, raw) = (ffi::RSMPI_UINT8_T, communicator.raw());
            let peer = rank_number(source);
            ffi::MPI_Irecv(into, bytes(count), byte, peer, TAG, raw, &raw mut receive)
        };
        check(started, PeerStep::of(source))?;
        // SAFETY: as above; the first `count` records are complete, and the receive writes behind
        // them
        let started = unsafe {
            let (byte, raw) = (ffi::RSMPI_UINT8_T, communicator.raw());
            let peer = rank_number(target);
            ffi::MPI_Isend(records.cast(), bytes(count), byte, peer, TAG, raw, &raw mut send)
        };
        check(started, PeerStep::of(target))?;
        complete(&mut receive, rank, timeout, failure)?;
        complete(&mut send, rank, timeout, failure)?;
        reach *= 2;
    }
    // SAFETY: the allocation of `ranks` records that was leaked above; all operations that used it
    // are complete
    let mut records = unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(records, ranks)) };
    records.rotate_right(rank);
    Ok(records.into_vec())
}

/// Converts a rank to the type of MPI.
fn rank_number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_count_in_the_order_of_their_first_ranks() {
        let record = |node: i32| decode(&format!("{node}\n0-3,8\n\nhost {node}")).unwrap();
        let map = NodeMap::new([0, 1, 0, 4, 1, 0].map(record).into());
        assert_eq!(map.placement().nodes(), [0, 1, 0, 2, 1, 0]);
        assert_eq!(map.nodes(), 3);
        let ranks_on_nodes: Vec<_> =
            map.locations().iter().map(|location| location.rank_on_node).collect();
        assert_eq!(ranks_on_nodes, [0, 0, 1, 0, 1, 2]);
        let fourth = &map.locations()[3];
        assert_eq!((fourth.host.as_str(), fourth.core_count()), ("host 4", Some(5)));
        assert_eq!(NodeMap::new(Vec::new()).nodes(), 0);
    }

    /// An implementation quadratic in ranks takes a minute.
    #[test]
    fn thousands_of_ranks_are_mapped_in_linear_time() {
        let started = std::time::Instant::now();
        let record = |rank: usize| Record {
            node: (rank % 30_000).to_string(),
            host: String::new(),
            cores: Vec::new(),
            messages: String::new(),
        };
        let map = NodeMap::new((0..60_000).map(record).collect());
        assert_eq!((map.nodes(), map.locations()[59_999].rank_on_node), (30_000, 1));
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }

    #[test]
    fn cores_are_parsed_as_linux_lists_them() {
        assert_eq!(runs("0-3,8"), [0..=3, 8..=8]);
        for malformed in ["", "3-1", "a", "1,,2"] {
            assert_eq!(runs(malformed), []);
        }
        assert_eq!(allowed_cores("Name:\tx\nCpus_allowed_list:\t0-1\nMems:\t0"), "0-1");
        assert_eq!(decode("1\n0\n"), None);
        let round_trip =
            |cores: &str| decode(&String::from_utf8_lossy(&encode("id", cores, "7", "host")));
        let record = Record {
            node: "id".to_owned(),
            host: "host".to_owned(),
            cores: vec![0..=3],
            messages: "7".to_owned(),
        };
        assert_eq!(round_trip("0-3"), Some(record));
        // of a list that is too long, the first cores are kept
        let even: Vec<String> = (0..400).map(|core| (2 * core).to_string()).collect();
        let cores = round_trip(&even.join(",")).unwrap().cores;
        assert!(cores.len() > 100);
        assert!(cores.iter().enumerate().all(|(i, run)| *run == (2 * i..=2 * i)));
    }
}
