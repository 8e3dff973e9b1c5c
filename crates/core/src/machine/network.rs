//! Messages of one step over the links of a machine.

use super::{Link, LinkBytes, Machine, pace::Pace};
use crate::{Error, Result};

/// A message between two ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Transfer {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) bytes: f64,
    pub(super) pace: Pace,
}

impl Transfer {
    /// Creates a message that begins and ends in its step.
    pub(super) const fn in_step(from: usize, to: usize, bytes: f64) -> Self {
        Self { from, to, bytes, pace: Pace::InStep }
    }
}

/// Links between the ranks of a plan, in the order of the caller's numbers.
pub(super) struct Network<'a> {
    machine: &'a Machine,
    /// Node of each rank, as a number below the number of nodes.
    nodes: Vec<usize>,
    node_count: usize,
    /// Ranks of its node that each rank stands for, itself included: they send as much.
    weights: Vec<f64>,
}

/// Bytes that ranks and nodes send and receive in one step, `[sent, received]`.
struct Loads {
    inside: Vec<[f64; 2]>,
    between: Vec<[f64; 2]>,
    of_node: Vec<[f64; 2]>,
}

impl<'a> Network<'a> {
    /// Creates the network of ranks on these nodes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `machine` if it lacks a link between some of the ranks.
    pub(super) fn new(machine: &'a Machine, nodes: &[usize]) -> Result<Self> {
        let mut names = nodes.to_vec();
        names.sort_unstable();
        let has_neighbours = names.windows(2).any(|two| two[0] == two[1]);
        names.dedup();
        let ranks = nodes.len();
        let lacks = |which: &str| {
            let want = format!("one that has it: {ranks} ranks are on {} nodes", names.len());
            Err(Error::invalid("machine", format!("no link {which}"), want))
        };
        if names.len() > 1 && machine.between_nodes.is_none() {
            return lacks("between_nodes");
        }
        if has_neighbours && machine.inside_node.is_none() {
            return lacks("inside_node");
        }
        let number = |node: &usize| names.binary_search(node).unwrap_or(0);
        let nodes = nodes.iter().map(number).collect();
        Ok(Self { machine, nodes, node_count: names.len(), weights: vec![1.0; ranks] })
    }

    /// Returns the network of some `ranks`, each of which stands for `weights` ranks of its node.
    pub(super) fn of_some(&self, ranks: &[usize], weights: Vec<f64>) -> Self {
        let Self { machine, ref nodes, node_count, .. } = *self;
        Self {
            machine,
            nodes: ranks.iter().map(|&rank| nodes[rank]).collect(),
            node_count,
            weights,
        }
    }

    /// Returns the node of a rank.
    pub(super) fn node(&self, rank: usize) -> usize {
        self.nodes[rank]
    }

    /// Returns the most ranks of a node.
    pub(super) fn node_ranks(&self) -> usize {
        self.ranks_of_nodes().into_iter().max().unwrap_or(1)
    }

    fn ranks_of_nodes(&self) -> Vec<usize> {
        let mut counts = vec![0; self.node_count];
        self.nodes.iter().for_each(|&node| counts[node] += 1);
        counts
    }

    /// Returns the seconds in which every rank sends so many bytes to each other rank, all messages
    /// at the same time: those of [`Network::seconds`], without a list of them.
    pub(super) fn all_gather_seconds(&self, bytes: f64) -> f64 {
        let ranks = self.nodes.len();
        let seconds = |is_inside: bool, peers: usize, leaving: usize| {
            let Some(link) = self.link(is_inside).filter(|_| peers > 0) else { return 0.0 };
            let both = if link.is_full_duplex { 1.0 } else { 2.0 };
            let of_rank = both * bytes * peers as f64 / link.bandwidth;
            let of_node = self.machine.node_bandwidth.filter(|_| leaving > 0);
            let of_node = of_node.map_or(0.0, |of| both * bytes * leaving as f64 / of);
            link.latency + of_rank.max(of_node)
        };
        let of_node = |count: usize| {
            let others = ranks - count;
            seconds(true, count - 1, 0).max(seconds(false, others, count * others))
        };
        self.ranks_of_nodes().into_iter().map(of_node).fold(0.0, f64::max)
    }

    /// Returns true if both ranks are on one node.
    pub(super) fn is_inside(&self, from: usize, to: usize) -> bool {
        self.nodes[from] == self.nodes[to]
    }

    fn link(&self, inside: bool) -> Option<&Link> {
        let Machine { inside_node, between_nodes, .. } = self.machine;
        if inside { inside_node.as_ref() } else { between_nodes.as_ref() }
    }

    /// Returns the share of the bandwidth that a message has under tiles ([`Machine::overlap`]).
    pub(super) const fn overlap(&self) -> f64 {
        self.machine.overlap
    }

    /// Adds the bytes of a message to those of its link.
    pub(super) fn count(&self, transfer: &Transfer, into: &mut LinkBytes) {
        let of_link = if self.is_inside(transfer.from, transfer.to) {
            &mut into.inside_node
        } else {
            &mut into.between_nodes
        };
        *of_link += transfer.bytes;
    }

    /// Returns the seconds by which the messages of a step delay the tiles of each rank.
    pub(super) fn delays(&self, transfers: &[Transfer]) -> Vec<f64> {
        let mut delays = vec![0.0; self.nodes.len()];
        for transfer in transfers {
            let seconds = transfer.bytes * self.machine.message_overhead;
            delays[transfer.from] += seconds;
            delays[transfer.to] += seconds;
        }
        delays
    }

    /// Returns latency and seconds of the bytes of each message, if all move at the same time.
    ///
    /// All messages of a rank in one direction over one kind of link share its bandwidth, as do
    /// both directions of a link that is not full duplex, and all messages that leave or enter a
    /// node.
    pub(super) fn seconds(&self, transfers: &[Transfer]) -> Vec<[f64; 2]> {
        let loads = self.loads(transfers);
        transfers.iter().map(|transfer| self.seconds_of(transfer, &loads)).collect()
    }

    fn loads(&self, transfers: &[Transfer]) -> Loads {
        let ranks = self.nodes.len();
        let mut loads = Loads {
            inside: vec![[0.0; 2]; ranks],
            between: vec![[0.0; 2]; ranks],
            of_node: vec![[0.0; 2]; self.node_count],
        };
        for &Transfer { from, to, bytes, .. } in transfers {
            let ports = if self.is_inside(from, to) {
                &mut loads.inside
            } else {
                loads.of_node[self.nodes[from]][0] += bytes * self.weights[from];
                loads.of_node[self.nodes[to]][1] += bytes * self.weights[to];
                &mut loads.between
            };
            ports[from][0] += bytes;
            ports[to][1] += bytes;
        }
        loads
    }

    fn seconds_of(&self, transfer: &Transfer, loads: &Loads) -> [f64; 2] {
        let Transfer { from, to, .. } = *transfer;
        let inside = self.is_inside(from, to);
        let Some(link) = self.link(inside) else { return [0.0; 2] };
        let ports = if inside { &loads.inside } else { &loads.between };
        let shared = |[one, other]: [f64; 2]| if link.is_full_duplex { one } else { one + other };
        let [sent, received] = ports[to];
        let bytes = shared(ports[from]).max(shared([received, sent]));
        let mut seconds = bytes / link.bandwidth;
        if let Some(bandwidth) = self.machine.node_bandwidth.filter(|_| !inside) {
            let leaving = loads.of_node[self.nodes[from]];
            let [sent, received] = loads.of_node[self.nodes[to]];
            let bytes = shared(leaving).max(shared([received, sent]));
            seconds = seconds.max(bytes / bandwidth);
        }
        [link.latency, seconds]
    }
}
