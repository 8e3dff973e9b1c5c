//! Times of messages between pairs of ranks, both of which send and receive at the same time.
//!
//! ```text
//! latency         time of a short message
//! bandwidth       bytes / (time of a long message − latency)
//! node bandwidth  all ranks of a node at once; bytes of all / time of the slowest
//! ```
//! All pairs of a kind are measured at the same time: those inside nodes, then one between each two
//! nodes, then all between each two nodes. A time is the median of the rounds of a pair; of several
//! pairs it is the median of theirs.

use std::time::{Duration, Instant};

use annulus_comm::{Deadline, all_gather};
use annulus_core::{
    Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Placement,
    Result, Transport,
};
use annulus_plan::Link;

use super::median;

/// Bytes of a short message.
const SHORT: u64 = 8;
/// Bytes of a long message, of the size of KV blocks: 4 MiB, or 16 MiB where 1 MiB takes less than
/// [`SHORT_TIME`]. 1 MiB may take too long: over TCP the reply that a message waits for before it
/// is sent queues behind buffers of data, for as long as some 100 KiB take.
const LONG: [u64; 2] = [4 << 20, 16 << 20];
/// Bytes by which the length of the long message is chosen.
const PROBE: u64 = 1 << 20;
const SHORT_TIME: f64 = 2e-3;
/// Rounds that are not measured: connections are made in the first.
const WARM_UP: usize = 3;
/// Time of the measured rounds of a kind, which bounds their number.
const BUDGET: f64 = 0.3;
const LEAST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 201;
/// Longest wait of one poll.
const PATIENCE: Duration = Duration::from_millis(20);

/// Links of a machine, equal on all ranks that have measured them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Links {
    pub(super) ranks_per_node: usize,
    pub(super) inside_node: Option<Link>,
    pub(super) between_nodes: Option<Link>,
    pub(super) node_bandwidth: Option<f64>,
}

/// Partner of each rank; `None` for a rank that has none.
type Pairs = Vec<Option<usize>>;

impl Links {
    /// Measures the links of this rank of `transport`.
    ///
    /// # Ordering
    /// Collective.
    /// # Errors
    /// Those of the transport; the loss of a rank at the deadline.
    pub(super) fn measure(transport: Box<dyn Transport<Host>>, deadline: Duration) -> Result<Self> {
        let ranks = transport.ranks();
        let nodes = transport.placement().map(Placement::nodes).map(<[usize]>::to_vec);
        let nodes = members(&nodes.unwrap_or_else(|| vec![0; ranks]));
        let mut rank = Rank::new(Deadline::new(transport, deadline)?)?;
        let inside_node = rank.link(&inside(&nodes, ranks))?;
        let one = between(&nodes, ranks, 1);
        let between_nodes = rank.link(&one)?;
        let all = between(&nodes, ranks, usize::MAX);
        let node_bandwidth = match between_nodes {
            Some(link) if all == one => Some(link.bandwidth),
            Some(link) => Some(rank.node_bandwidth(&nodes, &all, link.latency)?),
            None => None,
        };
        let ranks_per_node = nodes.iter().map(Vec::len).max().unwrap_or(1);
        Ok(Self { ranks_per_node, inside_node, between_nodes, node_bandwidth })
    }
}

/// Returns the ranks of each node.
fn members(nodes: &[usize]) -> Vec<Vec<usize>> {
    let mut members = vec![Vec::new(); nodes.iter().max().map_or(0, |most| most + 1)];
    nodes.iter().enumerate().for_each(|(rank, &node)| members[node].push(rank));
    members.retain(|ranks| !ranks.is_empty());
    members
}

/// Returns pairs of neighbours on each node.
fn inside(nodes: &[Vec<usize>], ranks: usize) -> Pairs {
    let pairs = nodes.iter().flat_map(|node| node.chunks_exact(2).map(|two| [two[0], two[1]]));
    partners(pairs, ranks)
}

/// Returns pairs of at most `most` ranks of each two nodes.
fn between(nodes: &[Vec<usize>], ranks: usize, most: usize) -> Pairs {
    let of_two = |two: &[Vec<usize>]| -> Vec<[usize; 2]> {
        two[0].iter().zip(&two[1]).take(most).map(|(&first, &second)| [first, second]).collect()
    };
    partners(nodes.chunks_exact(2).flat_map(of_two), ranks)
}

fn partners(pairs: impl Iterator<Item = [usize; 2]>, ranks: usize) -> Pairs {
    let mut partners = vec![None; ranks];
    for [first, second] in pairs {
        partners[first] = Some(second);
        partners[second] = Some(first);
    }
    partners
}

/// One rank that exchanges messages.
struct Rank {
    transport: Deadline<Box<dyn Transport<Host>>, Host>,
    /// Number of the next all-gather.
    round: u64,
    tag: u64,
    outgoing: HostBuffer,
    incoming: Option<HostBuffer>,
}

impl Rank {
    fn new(transport: Deadline<Box<dyn Transport<Host>>, Host>) -> Result<Self> {
        let [_, most] = LONG;
        let outgoing = HostBuffer::zeroed(most)?;
        let incoming = Some(HostBuffer::zeroed(most)?);
        Ok(Self { transport, round: 1, tag: 0, outgoing, incoming })
    }

    /// Measures the link between the ranks of each pair; `None` without pairs.
    fn link(&mut self, pairs: &Pairs) -> Result<Option<Link>> {
        if pairs.iter().all(Option::is_none) {
            return Ok(None);
        }
        let latency = median(self.seconds(pairs, SHORT)?);
        let [shorter, longer] = LONG;
        let probe = median(self.seconds(pairs, PROBE)?);
        let bytes = if probe < SHORT_TIME { longer } else { shorter };
        let seconds = median(self.seconds(pairs, bytes)?);
        Ok(Some(Link { latency, bandwidth: bandwidth(bytes, seconds, latency) }))
    }

    /// Measures the bytes per second between two nodes if all pairs send at once.
    fn node_bandwidth(&mut self, nodes: &[Vec<usize>], pairs: &Pairs, latency: f64) -> Result<f64> {
        let slowest = self.seconds(pairs, PROBE)?;
        let slowest = slowest.into_iter().fold(0.0, f64::max);
        let senders =
            |node: &Vec<usize>| node.iter().filter(|&&rank| pairs[rank].is_some()).count();
        let most = nodes.iter().map(senders).max().unwrap_or(1);
        Ok(most as f64 * bandwidth(PROBE, slowest, latency))
    }

    /// Returns the median seconds of a message of each pair, equal on all ranks.
    fn seconds(&mut self, pairs: &Pairs, bytes: u64) -> Result<Vec<f64>> {
        let partner = pairs.get(self.transport.rank()).copied().flatten();
        for _ in 0..WARM_UP {
            self.exchange(partner, bytes)?;
        }
        let once = self.exchange(partner, bytes)?;
        let slowest = self.gather(once)?.into_iter().flatten().fold(0.0, f64::max);
        let rounds = (BUDGET / slowest.max(1e-9)) as usize;
        let rounds = rounds.clamp(LEAST_ROUNDS, MOST_ROUNDS);
        let times: Result<Vec<Option<f64>>> =
            (0..rounds).map(|_| self.exchange(partner, bytes)).collect();
        let times: Vec<f64> = times?.into_iter().flatten().collect();
        let mine = (!times.is_empty()).then(|| median(times));
        Ok(self.gather(mine)?.into_iter().flatten().collect())
    }

    /// Sends to the partner and receives from it. Returns the seconds on the first rank of a pair.
    fn exchange(&mut self, partner: Option<usize>, bytes: u64) -> Result<Option<f64>> {
        let Some(peer) = partner else { return Ok(None) };
        let begin = Instant::now();
        self.tag += 1;
        let header = MessageHeader {
            peer,
            channel: Channel::Kv,
            tag: self.tag,
            step: 0,
            ranges: std::iter::once(0..bytes).collect(),
            agreed: None,
        };
        let send = Outgoing { header: header.clone(), buffer: &self.outgoing, ready: &() };
        let none = || Error::internal("the buffer of the last message is missing");
        let buffer = self.incoming.take().ok_or_else(none)?;
        let mut receives = vec![Incoming { header: header.clone(), buffer }];
        self.transport.post(&[send], &mut receives)?;
        let mut timeout = Duration::ZERO;
        loop {
            self.transport.progress(timeout)?;
            if self.incoming.is_none() {
                self.incoming = self.transport.take(&header)?.map(|arrived| arrived.buffer);
            }
            if self.incoming.is_some() && !self.transport.pending() {
                let seconds = begin.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
                return Ok((self.transport.rank() < peer).then_some(seconds));
            }
            timeout = PATIENCE;
        }
    }

    /// All-gathers a number, or none, of each rank.
    fn gather(&mut self, mine: Option<f64>) -> Result<Vec<Option<f64>>> {
        let bytes = mine.map(f64::to_le_bytes);
        let bytes = bytes.as_ref().map_or(&[][..], |bytes| bytes);
        let all = all_gather::<Host>(&mut self.transport, self.round, bytes)?;
        self.round += 1;
        Ok(all
            .iter()
            .map(|bytes| bytes.as_slice().try_into().ok().map(f64::from_le_bytes))
            .collect())
    }
}

/// Returns the bytes per second of a message of `bytes` bytes that takes `seconds`. The latency of
/// a message that takes hardly longer is not subtracted.
fn bandwidth(bytes: u64, seconds: f64, latency: f64) -> f64 {
    bytes as f64 / (seconds - latency).max(seconds / 2.0)
}

#[cfg(test)]
mod tests {
    use annulus_comm::threads::{each_rank, ring};

    use super::*;

    #[test]
    fn pairs_are_inside_and_between_nodes() {
        let nodes = members(&[0, 1, 0, 1, 0, 2, 3, 3]);
        assert_eq!(nodes, [vec![0, 2, 4], vec![1, 3], vec![5], vec![6, 7]]);
        let some = |pairs: &Pairs| {
            let pair = |(rank, partner): (usize, &Option<usize>)| {
                partner.filter(|&partner| rank < partner).map(|partner| [rank, partner])
            };
            pairs.iter().enumerate().filter_map(pair).collect::<Vec<_>>()
        };
        assert_eq!(some(&inside(&nodes, 8)), [[0, 2], [1, 3], [6, 7]]);
        assert_eq!(some(&between(&nodes, 8, 1)), [[0, 1], [5, 6]]);
        assert_eq!(some(&between(&nodes, 8, usize::MAX)), [[0, 1], [2, 3], [5, 6]]);
    }

    #[test]
    fn the_latency_is_part_of_a_message() {
        assert_eq!(bandwidth(1000, 3.0, 1.0), 500.0);
        assert_eq!(bandwidth(1000, 1.0, 0.9), 2000.0);
    }

    #[test]
    fn all_ranks_have_the_same_links() {
        let measure = |_, transport| Links::measure(Box::new(transport), Duration::from_secs(60));
        let all = each_rank(ring(3), measure).unwrap();
        for links in &all {
            assert_eq!(links.ranks_per_node, 3);
            assert_eq!(links.inside_node, all[0].inside_node);
            assert_eq!((links.between_nodes, links.node_bandwidth), (None, None));
        }
        let link = all[0].inside_node.unwrap();
        assert!(link.latency > 0.0 && link.latency < 1.0, "{link:?}");
        assert!(link.bandwidth > 1e6, "{link:?}");
    }
}
