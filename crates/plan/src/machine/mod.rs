//! A machine as data, and the time that a strategy takes on it.
//!
//! A [`Machine`] has latency and bandwidth of its two kinds of links, and the rates and the memory
//! of its ranks. [`Prediction`] adds up the messages and the tiles of each rank (`prediction.rs`).
//!
//! # Source
//! The latency-bandwidth model: Hockney 1994, The communication challenge for MPI. The selection of
//! a division by its predicted time is that of COSMA (Kwasniewski et al. 2019), applied to
//! attention.

mod prediction;
#[cfg(test)]
mod tests;

pub use prediction::Prediction;

use annulus_core::{DType, Error, Fingerprint, Placement, Result};

/// Figures of a machine: links, compute rates and memory of its ranks.
///
/// # Examples
/// Two nodes of four ranks, with 100 Gbit/s between them.
/// ```
/// use annulus_core::DType;
/// use annulus_plan::{ComputeRate, Link, Machine};
///
/// let machine = Machine {
///     ranks_per_node: 4,
///     inside_node: Some(Link { latency: 2e-6, bandwidth: 2e10 }),
///     between_nodes: Some(Link { latency: 5e-6, bandwidth: 1.25e10 }),
///     node_bandwidth: Some(1.25e10),
///     rates: vec![ComputeRate {
///         dtype: DType::F32,
///         head_dim: 64,
///         forward: 1e12,
///         backward: 8e11,
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
    /// Bytes per second that all ranks of a node together send to other nodes, while they receive
    /// as many; `None` if there is one node.
    pub node_bandwidth: Option<f64>,
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
    /// Bytes per second that a rank sends while it receives as many, above 0.
    pub bandwidth: f64,
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
            if let Some(Link { latency, bandwidth }) = link {
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
        if self.rates.is_empty() {
            return Err(Error::invalid("rates", "none", "at least one"));
        }
        for (index, rate) in self.rates.iter().enumerate() {
            at_least_1(&format!("rates[{index}].head_dim"), rate.head_dim as u64)?;
            above_0(&format!("rates[{index}].forward"), rate.forward)?;
            above_0(&format!("rates[{index}].backward"), rate.backward)?;
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
            Some(link) => {
                into.number(1).number(link.latency.to_bits()).number(link.bandwidth.to_bits())
            }
            None => into.number(0),
        };
        let into = Fingerprint::new().number(self.ranks_per_node as u64).number(self.memory);
        let into = link(link(into, &self.inside_node), &self.between_nodes);
        let into = into.optional(self.node_bandwidth.map(f64::to_bits));
        let rate = |into: Fingerprint, rate: &ComputeRate| {
            into.text(rate.dtype.name())
                .number(rate.head_dim as u64)
                .number(rate.forward.to_bits())
                .number(rate.backward.to_bits())
        };
        self.rates.iter().fold(into.number(self.rates.len() as u64), rate).finish()
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
