//! A machine as data, and the time that a strategy takes on it.
//!
//! A [`Machine`] has the figures of its links, its ranks and their memory. [`Prediction`] executes
//! the steps of a plan on these figures, without running a pass:
//!
//! ```text
//! ring step   post blocks of later steps, compute the tiles, wait for the block of the next step
//! tiles       FLOPs / rate
//! message     latency + bytes / bandwidth; messages of a step share ports and networks of nodes
//! overlap     share of the bandwidth that messages have while tiles are computed
//! overhead    tiles are delayed by each byte that the rank sends or receives in their step
//! transfer    begins when both ends have posted it: blocks up to `receive_ahead` steps ahead, if
//!             there is a buffer; messages of an exchange when both have reached its round
//! agreement   all-gather before and after a pass: ⌈log₂ ranks⌉ short messages, one after another
//! merge       bytes of the partial results of each key column / rate; that of a part overlaps the
//!             message of the next
//! ```
//! The time of a pass beyond the tiles and merges of the rank that has the most of them is exposed.
//! The prologue and the epilogue of a pass are not modelled.
//!
//! # Source
//! The latency-bandwidth model: Hockney 1994, The communication challenge for MPI. The overhead of
//! a byte is O of LogGOPS (Hoefler et al. 2010). The selection of a division by its predicted time
//! is that of COSMA (Kwasniewski et al. 2019), applied to attention.

mod choice;
mod exchange_rounds;
mod execution;
mod large_plan;
mod mean_steps;
mod network;
mod pace;
mod prediction;
mod ring_steps;
mod steps;
#[cfg(test)]
mod tests;
mod timed_step;
mod token;

pub use choice::Comparison;
pub(crate) use exchange_rounds::{ExchangeRounds, Exchanged, agreement};
pub use prediction::{LinkBytes, PassTime, Prediction};
pub(crate) use steps::{MOST_STEPPED_RANKS, pair_seconds};
pub use token::{CacheShards, TokenPrediction, TokenTraffic};

use crate::{DType, Error, Fingerprint, Placement, Result};

/// Figures of a machine: links, compute rates and memory of its ranks.
///
/// # Examples
/// Two nodes of four ranks, with 100 Gbit/s between them.
/// ```
/// use annulus_core::{ComputeRate, DType, Link, Machine, TokenRate};
///
/// let machine = Machine {
///     ranks_per_node: 4,
///     inside_node: Some(Link { latency: 2e-6, bandwidth: 2e10, is_full_duplex: true }),
///     between_nodes: Some(Link { latency: 5e-6, bandwidth: 1.25e10, is_full_duplex: true }),
///     node_bandwidth: Some(1.25e10),
///     message_overhead: 0.0,
///     overlap: 1.0,
///     merge_bandwidth: Some(4e9),
///     rates: vec![ComputeRate {
///         dtype: DType::F32,
///         head_dim: 64,
///         forward: 1e12,
///         backward: 8e11,
///         token: Some(TokenRate { bandwidth: 1e11, further_heads: 4e11 }),
///     }],
///     memory: 64 << 30,
/// };
/// machine.check()?;
/// assert_eq!(machine.rate(DType::F32, 128)?.forward, 1e12);
/// assert!(machine.rate(DType::Bf16, 64).is_err());
/// # Ok::<(), annulus_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Ranks of a node, at least 1. Rank r is on node r / `ranks_per_node`, unless a transport
    /// knows the nodes.
    pub ranks_per_node: usize,
    /// Link between two ranks of a node; `None` if a node has one rank.
    pub inside_node: Option<Link>,
    /// Link between two ranks of different nodes; `None` if there is one node.
    pub between_nodes: Option<Link>,
    /// Bytes per second that all ranks of a node together send to other nodes, in one direction;
    /// `None` if there is one node.
    pub node_bandwidth: Option<f64>,
    /// Seconds by which each byte that a rank sends or receives delays the tiles that it computes
    /// meanwhile, at least 0: copies and the network stack use the same cores.
    pub message_overhead: f64,
    /// Share of the bandwidth of its link that a message has while its sender or its receiver
    /// computes tiles, 0 to 1: ranks move messages between tiles, and not at all while another
    /// process has their core.
    pub overlap: f64,
    /// Bytes per second of partial results of key columns that a rank merges, in the accumulator's
    /// type; `None` if that is not known, and merges take no time.
    pub merge_bandwidth: Option<f64>,
    /// Compute rates, at least one.
    pub rates: Vec<ComputeRate>,
    /// Memory of a rank in bytes, at least 1.
    pub memory: u64,
}

/// Link between two ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Seconds from the post of a short message to its arrival, above 0.
    pub latency: f64,
    /// Bytes per second that a rank sends in one direction, above 0.
    pub bandwidth: f64,
    /// True if a rank sends and receives at the full bandwidth at the same time. Otherwise both
    /// directions share it.
    pub is_full_duplex: bool,
}

/// Rate of the tiles of one rank while all ranks of its node compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComputeRate {
    /// Element type of queries, keys and values.
    pub dtype: DType,
    /// Dim of queries, keys and values.
    pub head_dim: usize,
    /// FLOP per second of a forward pass, which has 4 · `head_dim` FLOPs for each visible pair.
    pub forward: f64,
    /// FLOP per second of a backward pass, which has 10 · `head_dim` FLOPs for each visible pair.
    pub backward: f64,
    /// Rate of a token of a KV cache; `None` if that is not known.
    pub token: Option<TokenRate>,
}

/// Rate of one query over cached keys and values that are in no processor cache, while all ranks of
/// a node read theirs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenRate {
    /// Bytes per second of keys and values that a rank reads and attends to with one query head of
    /// each KV head.
    pub bandwidth: f64,
    /// FLOP per second of the further query heads of a KV head, for which nothing is read again: 4
    /// · `head_dim` FLOPs for each visible pair.
    pub further_heads: f64,
}

impl Machine {
    /// Checks that all numbers are finite and above 0, and that the links that the ranks of a node
    /// need are there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the field, such as `inside_node.latency`.
    pub fn check(&self) -> Result<()> {
        let Self { ranks_per_node, inside_node, between_nodes, node_bandwidth, .. } = self;
        let at_least_1 = |field: &str, got: u64| match got {
            0 => Err(Error::invalid(field, got, "at least 1")),
            _ => Ok(()),
        };
        at_least_1("ranks_per_node", *ranks_per_node as u64)?;
        for (name, link) in [("inside_node", inside_node), ("between_nodes", between_nodes)] {
            if let Some(Link { latency, bandwidth, .. }) = link {
                above_0(&format!("{name}.latency"), *latency)?;
                above_0(&format!("{name}.bandwidth"), *bandwidth)?;
            }
        }
        if *ranks_per_node > 1 && inside_node.is_none() {
            return Err(Error::invalid(
                "inside_node",
                "null",
                "a link, because a node has several ranks",
            ));
        }
        match (between_nodes, node_bandwidth) {
            (Some(_), Some(bandwidth)) => above_0("node_bandwidth", *bandwidth)?,
            (None, None) => {}
            (between, _) => {
                let (got, want) = match between {
                    Some(_) => ("null", "a number, as between_nodes is a link"),
                    None => ("a number", "null, as between_nodes is null"),
                };
                return Err(Error::invalid("node_bandwidth", got, want));
            }
        }
        if !(self.message_overhead.is_finite() && self.message_overhead >= 0.0) {
            let want = "a finite number of at least 0";
            return Err(Error::invalid("message_overhead", self.message_overhead, want));
        }
        if !(0.0..=1.0).contains(&self.overlap) {
            return Err(Error::invalid("overlap", self.overlap, "0 to 1"));
        }
        if let Some(bandwidth) = self.merge_bandwidth {
            above_0("merge_bandwidth", bandwidth)?;
        }
        if self.rates.is_empty() {
            return Err(Error::invalid("rates", "none", "at least one"));
        }
        for (index, rate) in self.rates.iter().enumerate() {
            at_least_1(&format!("rates[{index}].head_dim"), rate.head_dim as u64)?;
            above_0(&format!("rates[{index}].forward"), rate.forward)?;
            above_0(&format!("rates[{index}].backward"), rate.backward)?;
            if let Some(TokenRate { bandwidth, further_heads }) = rate.token {
                above_0(&format!("rates[{index}].token.bandwidth"), bandwidth)?;
                above_0(&format!("rates[{index}].token.further_heads"), further_heads)?;
            }
        }
        at_least_1("memory", self.memory)
    }

    /// Returns the rate of an element type at the nearest head dim: of two with the same ratio to
    /// `head_dim`, the first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `machine` if there is none of the element type.
    pub fn rate(&self, dtype: DType, head_dim: usize) -> Result<ComputeRate> {
        let distance =
            |rate: &ComputeRate| (rate.head_dim.max(1) as f64 / head_dim.max(1) as f64).ln().abs();
        let of_dtype = self.rates.iter().filter(|rate| rate.dtype == dtype);
        of_dtype.min_by(|a, b| distance(a).total_cmp(&distance(b))).copied().ok_or_else(|| {
            let want = "a compute rate of this type: measure it with --dtype";
            Error::invalid("machine", format!("no rate of {}", dtype.name()), want)
        })
    }

    /// Returns a digest of all figures, by which ranks compare their machines.
    pub fn fingerprint(&self) -> u64 {
        let link = |into: Fingerprint, link: &Option<Link>| match link {
            Some(link) => into
                .number(1)
                .number(link.latency.to_bits())
                .number(link.bandwidth.to_bits())
                .number(u64::from(link.is_full_duplex)),
            None => into.number(0),
        };
        let into = Fingerprint::new().number(self.ranks_per_node as u64).number(self.memory);
        let into = link(link(into, &self.inside_node), &self.between_nodes);
        let into = into.optional(self.node_bandwidth.map(f64::to_bits));
        let into = into.number(self.message_overhead.to_bits()).number(self.overlap.to_bits());
        let into = into.optional(self.merge_bandwidth.map(f64::to_bits));
        let rate = |into: Fingerprint, rate: &ComputeRate| {
            into.text(rate.dtype.name())
                .number(rate.head_dim as u64)
                .number(rate.forward.to_bits())
                .number(rate.backward.to_bits())
                .optional(rate.token.map(|token| token.bandwidth.to_bits()))
                .optional(rate.token.map(|token| token.further_heads.to_bits()))
        };
        self.rates.iter().fold(into.number(self.rates.len() as u64), rate).finish()
    }

    /// Returns the seconds in which all of `ranks` ranks agree: ⌈log₂ ranks⌉ short messages, one
    /// after another. A node has at most `node_ranks` of them.
    pub(crate) fn agreement_seconds(&self, ranks: usize, node_ranks: usize) -> f64 {
        let latency = |link: Option<Link>| link.map_or(0.0, |link| link.latency);
        let inside = latency(self.inside_node.filter(|_| node_ranks > 1));
        let between = latency(self.between_nodes.filter(|_| node_ranks < ranks));
        f64::from(ranks.next_power_of_two().ilog2()) * inside.max(between)
    }

    /// Returns the most ranks of a node, of `ranks` ranks that are placed as
    /// [`Machine::nodes`] places them.
    pub(crate) fn node_ranks(&self, ranks: usize, placement: Option<&Placement>) -> usize {
        let mut nodes = self.nodes(ranks, placement);
        nodes.sort_unstable();
        nodes.chunk_by(|a, b| a == b).map(<[usize]>::len).max().unwrap_or(1)
    }

    /// Returns the node of each of `ranks` ranks: by `placement` if it is of as many ranks, else by
    /// [`Machine::ranks_per_node`].
    fn nodes(&self, ranks: usize, placement: Option<&Placement>) -> Vec<usize> {
        let placed = placement.map(Placement::nodes).filter(|nodes| nodes.len() == ranks);
        let by_number = || (0..ranks).map(|rank| rank / self.ranks_per_node.max(1)).collect();
        placed.map_or_else(by_number, <[usize]>::to_vec)
    }
}

fn above_0(field: &str, got: f64) -> Result<()> {
    if got.is_finite() && got > 0.0 {
        return Ok(());
    }
    Err(Error::invalid(field, got, "a finite number above 0"))
}
