//! Messages of a phase of a pass over the links of a machine.

use super::{Link, Machine};
use annulus_core::{Error, Result};

/// Links between the ranks of a plan, in the order of the caller's numbers.
pub(super) struct Network<'a> {
    machine: &'a Machine,
    /// Node of each rank, as a number below the number of nodes.
    nodes: Vec<usize>,
    node_count: usize,
}

/// Kinds of links: 0 inside a node, 1 between nodes.
const LINKS: [usize; 2] = [0, 1];

/// Messages of a phase, by rank and kind of link.
pub(super) struct Loads<'a> {
    network: &'a Network<'a>,
    of_ranks: Vec<RankLoad>,
    /// Bytes that leave and enter each node.
    of_nodes: Vec<[f64; 2]>,
}

/// Messages of a rank in a phase, by kind of link.
#[derive(Clone, Copy, Default)]
struct RankLoad {
    /// Messages that it receives and whose latency it waits for.
    messages: [u32; 2],
    /// Bytes `[sent, received]`.
    bytes: [[f64; 2]; 2],
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
        Ok(Self { machine, nodes: nodes.iter().map(number).collect(), node_count: names.len() })
    }

    /// Returns the seconds of the agreements before and after a pass: ⌈log₂ ranks⌉ short messages,
    /// one after another, in each.
    pub(super) fn agreements(&self) -> f64 {
        let latency = |link: Option<Link>| link.map_or(0.0, |link| link.latency);
        let Machine { inside_node, between_nodes, .. } = *self.machine;
        let inside = latency(inside_node.filter(|_| self.node_count < self.nodes.len()));
        let between = latency(between_nodes.filter(|_| self.node_count > 1));
        2.0 * f64::from(self.nodes.len().next_power_of_two().ilog2()) * inside.max(between)
    }

    /// Returns the seconds of the messages of a rank over a kind of link: latency · messages +
    /// bytes / bandwidth, or as long as its node takes for the bytes of all its ranks.
    fn seconds(&self, link: usize, messages: f64, bytes: f64, of_node: f64) -> f64 {
        let Machine { inside_node, between_nodes, node_bandwidth, .. } = *self.machine;
        let Some(Link { latency, bandwidth }) = [inside_node, between_nodes][link] else {
            return 0.0;
        };
        let of_node = node_bandwidth.map_or(0.0, |of| of_node / of);
        latency * messages + (bytes / bandwidth).max(of_node)
    }

    /// Returns the kind of the link between two ranks: 0 inside a node, 1 between nodes.
    pub(super) fn link(&self, [from, to]: [usize; 2]) -> usize {
        usize::from(self.nodes[from] != self.nodes[to])
    }

    /// Returns the loads of no message.
    pub(super) fn loads(&'a self) -> Loads<'a> {
        Loads {
            network: self,
            of_ranks: vec![RankLoad::default(); self.nodes.len()],
            of_nodes: vec![[0.0; 2]; self.node_count],
        }
    }
}

impl Loads<'_> {
    /// Adds a message. The receiver waits for its latency, unless other messages hide it.
    pub(super) fn add(&mut self, [from, to]: [usize; 2], bytes: f64, waits: bool) {
        let link = self.network.link([from, to]);
        self.of_ranks[from].bytes[link][0] += bytes;
        let receiver = &mut self.of_ranks[to];
        receiver.messages[link] += u32::from(waits);
        receiver.bytes[link][1] += bytes;
        if link == 1 {
            self.of_nodes[self.network.nodes[from]][0] += bytes;
            self.of_nodes[self.network.nodes[to]][1] += bytes;
        }
    }

    /// Returns the number of messages that a rank receives and waits for.
    pub(super) fn messages(&self, rank: usize) -> usize {
        self.of_ranks[rank].messages.iter().map(|&count| count as usize).sum()
    }

    /// Returns the seconds of the messages of a rank over each kind of link, of the direction with
    /// more bytes.
    pub(super) fn seconds(&self, rank: usize) -> [f64; 2] {
        let larger = |[sent, received]: [f64; 2]| sent.max(received);
        LINKS.map(|link| {
            let RankLoad { messages, bytes } = self.of_ranks[rank];
            let messages = f64::from(messages[link]);
            let bytes = larger(bytes[link]);
            let is_shared = link == 1 && bytes > 0.0;
            let of_node =
                if is_shared { larger(self.of_nodes[self.network.nodes[rank]]) } else { 0.0 };
            self.network.seconds(link, messages, bytes, of_node)
        })
    }
}
