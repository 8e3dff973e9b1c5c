//! Message overhead: time by which messages delay the tiles that a rank computes meanwhile.
//!
//! ```text
//! pass      forward and backward of full attention over all ranks, tiles longer than messages
//! overhead  (time of the pass − FLOPs / rate) / bytes that a rank sends and receives
//! ```
//! It has what hidden messages cost a rank: copies, the network stack on the cores that compute
//! tiles, waits of ranks that run out of step.

use annulus::{Attention, Plan};
use annulus_comm::ring::PassKind;
use annulus_core::{ComputeRate, DType, Dims, Element, Link, Result};
use half::{bf16, f16};

use super::{
    links::Links,
    median,
    rates::{HEADS, round, tensor},
};
use crate::{
    backend::BackendChoice,
    failure::Outcome,
    job::{Endpoint, Job},
};

/// Time of the tiles of a step in units of the time of its messages: those are hidden, also if a
/// rank is somewhat late.
const COVER: f64 = 2.0;
/// Rows of a rank.
const LEAST_LEN: usize = 512;
const MOST_LEN: usize = 8192;
/// Most seconds of the tiles of a forward pass: with longer ones, fewer heads are computed.
const LONGEST: f64 = 1.0;
const WARM_UP: usize = 1;
const ROUNDS: usize = 5;

/// A pass that is measured: the same of all ranks.
#[derive(Debug, Clone, Copy)]
struct Case {
    ranks: usize,
    /// Queries and keys of a rank.
    len: usize,
    heads: usize,
    head_dim: usize,
}

impl Case {
    /// Returns the pass for these links and this rate. `None` if it takes too long with one head:
    /// many ranks on slow links.
    fn new(ranks: usize, links: &Links, rate: &ComputeRate) -> Option<Self> {
        // tiles: 4 · heads · dim · len² / rate; K and V: 2 · heads · dim · len elements
        let element = rate.dtype.bytes() as f64;
        let len = COVER * element * rate.forward * seconds_per_byte(links) / 2.0;
        let len = (len.clamp(LEAST_LEN as f64, MOST_LEN as f64) as usize).next_multiple_of(64);
        let mut case = Self { ranks, len, heads: HEADS, head_dim: rate.head_dim };
        let is_long = |case: &Self| case.flops(4.0) / rate.forward > LONGEST;
        while case.heads > 1 && is_long(&case) {
            case.heads /= 2;
        }
        (!is_long(&case)).then_some(case)
    }

    /// Returns the FLOPs of one rank with so many for each pair and element of the head dim.
    fn flops(&self, of_pair: f64) -> f64 {
        let Self { ranks, len, heads, head_dim } = *self;
        of_pair * (ranks * len * len * heads * head_dim) as f64
    }

    /// Measures the seconds of a forward and a backward pass, and counts the bytes that this rank
    /// sends.
    fn pass_of_rank<T: Element>(&self, plan: &mut Plan) -> Result<[f64; 2]> {
        let x = tensor::<T>(self.len, self.heads, self.head_dim);
        let mut times = Vec::new();
        for number in 0..WARM_UP + ROUNDS {
            let [forward, backward] = round(plan, &x)?;
            if number >= WARM_UP {
                times.push((forward + backward).as_secs_f64());
            }
        }
        let passes = [PassKind::Forward, PassKind::Backward];
        let bytes: u64 = passes.iter().map(|&pass| plan.bytes_predicted(pass)).sum();
        Ok([median(times), bytes as f64])
    }
}

/// Returns the time of a byte on the slowest link.
fn seconds_per_byte(links: &Links) -> f64 {
    let Links { ranks_per_node, inside_node, between_nodes, node_bandwidth } = links;
    let of_link = |link: &Option<Link>| {
        link.map_or(
            0.0,
            |Link { bandwidth, is_full_duplex, .. }| {
                if is_full_duplex { 1.0 / bandwidth } else { 2.0 / bandwidth }
            },
        )
    };
    let of_node = node_bandwidth.map_or(0.0, |bandwidth| *ranks_per_node as f64 / bandwidth);
    of_link(inside_node).max(of_link(between_nodes)).max(of_node)
}

/// Measures the overhead in seconds for each byte that a rank sends or receives, with tiles of
/// `rate`; 0 of one rank, and if no pass with such tiles is short enough. `attention` has the
/// deadline.
///
/// # Ordering
/// Collective over the ranks.
/// # Errors
/// Those of the ranks.
pub(super) fn measure(
    job: &mut Job,
    backend: &BackendChoice,
    threads: usize,
    attention: &Attention,
    links: &Links,
    rate: &ComputeRate,
) -> Outcome<f64> {
    if job.ranks() == 1 {
        return Ok(0.0);
    }
    // equal on all ranks, as are the links and the rate
    let Some(case) = Case::new(job.ranks(), links, rate) else { return Ok(0.0) };
    let dims = Dims::new(1, case.ranks * case.len, case.heads, case.head_dim);
    let attention = attention.clone().dtype(rate.dtype);
    let of_rank = |_, endpoint: Endpoint| {
        let plan = &mut backend.plan(threads, endpoint, &attention, dims)?;
        match rate.dtype {
            DType::F64 => case.pass_of_rank::<f64>(plan),
            DType::F32 => case.pass_of_rank::<f32>(plan),
            DType::Bf16 => case.pass_of_rank::<bf16>(plan),
            DType::F16 => case.pass_of_rank::<f16>(plan),
        }
    };
    let endpoints = job.endpoints()?;
    let own = job.run_phase(endpoints, of_rank)?;
    let most = |of_ranks: &[[f64; 2]]| {
        [0, 1].map(|of| of_ranks.iter().map(|pass| pass[of]).fold(0.0, f64::max))
    };
    let all = job.all_gather_numbers(&most(&own))?;
    let all: Vec<[f64; 2]> = all.iter().map(|pass| [pass[0], pass[1]]).collect();
    let [seconds, bytes] = most(&all);
    let tiles = case.flops(4.0) / rate.forward + case.flops(10.0) / rate.backward;
    // a rank receives as many bytes as it sends
    Ok(((seconds - tiles) / (2.0 * bytes)).max(0.0))
}

#[cfg(test)]
mod tests {
    use annulus_core::DType;

    use super::*;

    #[test]
    fn tiles_take_twice_the_time_of_their_messages() {
        let link = |bandwidth| Link { latency: 1e-5, bandwidth, is_full_duplex: true };
        let mut links = Links {
            ranks_per_node: 2,
            inside_node: Some(link(1e10)),
            between_nodes: Some(link(1e9)),
            node_bandwidth: Some(1e9),
        };
        let rate = ComputeRate { dtype: DType::F32, head_dim: 64, forward: 2.5e11, backward: 2e11 };
        let case = Case::new(4, &links, &rate).unwrap();
        assert_eq!((case.len, case.heads), (2048, 4));
        let tiles = case.flops(4.0) / 4.0 / rate.forward;
        // two ranks share the bandwidth of the node
        let messages = 2.0 * (4 * 64 * 2048 * 4) as f64 * 2.0 / 1e9;
        assert!((1.9..2.1).contains(&(tiles / messages)), "{tiles} s, {messages} s");
        // many ranks: fewer heads, then none; a fast network: the fewest rows
        assert_eq!(Case::new(100, &links, &rate).unwrap().heads, 2);
        assert!(Case::new(1000, &links, &rate).is_none());
        links = Links { ranks_per_node: 1, node_bandwidth: Some(1e12), ..links };
        links.between_nodes = Some(link(1e12));
        assert_eq!(Case::new(4, &links, &rate).unwrap().len, 512);
        // both directions share the link
        links.inside_node = Some(Link { is_full_duplex: false, ..link(1e9) });
        assert_eq!(Case::new(4, &links, &rate).unwrap().len, 2048);
    }
}
