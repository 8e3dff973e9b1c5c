//! Message overhead: time by which messages delay the tiles that a rank computes meanwhile.
//!
//! ```text
//! pass      forward and backward of full attention over all ranks
//! tiles     the same tiles without messages, while all ranks compute theirs
//! overhead  median over rounds of (pass − tiles) / bytes that a rank sends and receives
//! ```
//! It has what hidden messages cost a rank: copies, the network stack on the cores that compute
//! tiles, waits of ranks that run out of step. A round measures pass and tiles one after another,
//! because the difference is a few percent of them: a rate that was measured at another time
//! differs by as much on cores that ranks share.

use std::time::Duration;

use annulus::{Attention, Batch, Plan};
use annulus_comm::{ring::PassKind, threads::ring};
use annulus_core::{ComputeRate, DType, Dims, Element, Error, Link, Result};
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

/// Time of the tiles of a step in units of the time of its messages: just as long as hides them.
/// With longer tiles a byte delays them less, because ranks have time to catch up: on 4 hosts that
/// share two cores a cover of 2 measured 0.5 to 1.0 ns, while passes of 4,096 tokens, whose tiles
/// take 1.25 times as long as their messages, lose 1.6 to 1.8 ns
/// (`benches/record/2026-11-26-strategies.md`). The choice of a strategy depends on such passes.
const COVER: f64 = 1.25;
/// Rows of a rank.
const LEAST_LEN: usize = 512;
const MOST_LEN: usize = 8192;
/// Most seconds of the tiles of a forward pass: with longer ones, fewer heads are computed.
const LONGEST: f64 = 0.5;
const WARM_UP: usize = 1;
/// Seconds of the measured rounds, which bound their number.
const BUDGET: f64 = 8.0;
const LEAST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 25;

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

    /// Returns the seconds of the tiles of a forward and a backward pass at this rate.
    fn seconds(&self, rate: &ComputeRate) -> f64 {
        self.flops(4.0) / rate.forward + self.flops(10.0) / rate.backward
    }

    /// Returns the number of measured rounds at this rate, equal on all ranks.
    fn rounds(&self, rate: &ComputeRate) -> usize {
        ((BUDGET / (2.0 * self.seconds(rate))) as usize).clamp(LEAST_ROUNDS, MOST_ROUNDS)
    }

    /// Measures the seconds by which messages delay the tiles of a forward and a backward pass, and
    /// counts the bytes that this rank sends.
    fn delay_of_rank<T: Element>(&self, mut plans: Plans, rounds: usize) -> Result<[f64; 2]> {
        let Plans { of_ring, alone } = &mut plans;
        let x = tensor::<T>(self.len, self.heads, self.head_dim);
        let mut delays = Vec::new();
        for number in 0..WARM_UP + rounds {
            // an update ends when all ranks have begun it, so that they compute at the same time
            of_ring.update(&Batch::default())?;
            let [forward, backward] = round(of_ring, &x)?;
            let pass = forward + backward;
            of_ring.update(&Batch::default())?;
            let mut tiles = Duration::ZERO;
            for _ in 0..self.ranks {
                let [forward, backward] = round(alone, &x)?;
                tiles += forward + backward;
            }
            if number >= WARM_UP {
                delays.push(pass.as_secs_f64() - tiles.as_secs_f64());
            }
        }
        let passes = [PassKind::Forward, PassKind::Backward];
        let bytes: u64 = passes.iter().map(|&pass| of_ring.bytes_predicted(pass)).sum();
        Ok([median(delays), bytes as f64])
    }
}

/// Plans of a rank.
struct Plans {
    /// Of the ring over all ranks.
    of_ring: Plan,
    /// Of the rank's own rows alone: the tiles of a ring step.
    alone: Plan,
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
    let dims = |ranks: usize| Dims::new(1, ranks * case.len, case.heads, case.head_dim);
    let attention = attention.clone().dtype(rate.dtype);
    let rounds = case.rounds(rate);
    let of_rank = |_, endpoint: Endpoint| {
        let none = || Error::internal("a ring has no rank");
        let alone = Endpoint::Thread(Box::new(ring(1).pop().ok_or_else(none)?));
        let plans = Plans {
            of_ring: backend.plan(threads, endpoint, &attention, dims(case.ranks))?,
            alone: backend.plan(threads, alone, &attention, dims(1))?,
        };
        match rate.dtype {
            DType::F64 => case.delay_of_rank::<f64>(plans, rounds),
            DType::F32 => case.delay_of_rank::<f32>(plans, rounds),
            DType::Bf16 => case.delay_of_rank::<bf16>(plans, rounds),
            DType::F16 => case.delay_of_rank::<f16>(plans, rounds),
        }
    };
    let endpoints = job.endpoints()?;
    let own = job.run_phase(endpoints, of_rank)?;
    let medians = |of_ranks: &[[f64; 2]]| {
        [0, 1].map(|of| median(of_ranks.iter().map(|rank| rank[of]).collect()))
    };
    let all = job.all_gather_numbers(&medians(&own))?;
    let all: Vec<[f64; 2]> = all.iter().map(|rank| [rank[0], rank[1]]).collect();
    let [delay, bytes] = medians(&all);
    // a rank receives as many bytes as it sends
    Ok((delay / (2.0 * bytes)).max(0.0))
}

#[cfg(test)]
mod tests {
    use annulus_core::DType;

    use super::*;

    #[test]
    fn tiles_take_somewhat_longer_than_their_messages() {
        let link = |bandwidth| Link { latency: 1e-5, bandwidth, is_full_duplex: true };
        let mut links = Links {
            ranks_per_node: 2,
            inside_node: Some(link(1e10)),
            between_nodes: Some(link(1e9)),
            node_bandwidth: Some(1e9),
        };
        let rate = ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: 2.5e11,
            backward: 2e11,
            token: None,
        };
        let case = Case::new(4, &links, &rate).unwrap();
        assert_eq!((case.len, case.heads), (1280, 4));
        let tiles = case.flops(4.0) / 4.0 / rate.forward;
        // two ranks share the bandwidth of the node
        let messages = 2.0 * (4 * 64 * 1280 * 4) as f64 * 2.0 / 1e9;
        assert!((1.2..1.3).contains(&(tiles / messages)), "{tiles} s, {messages} s");
        // many ranks: fewer heads, then none; a fast network: the fewest rows
        assert_eq!(Case::new(100, &links, &rate).unwrap().heads, 2);
        assert!(Case::new(1000, &links, &rate).is_none());
        links = Links { ranks_per_node: 1, node_bandwidth: Some(1e12), ..links };
        links.between_nodes = Some(link(1e12));
        assert_eq!(Case::new(4, &links, &rate).unwrap().len, 512);
        // both directions share the link
        links.inside_node = Some(Link { is_full_duplex: false, ..link(1e9) });
        assert_eq!(Case::new(4, &links, &rate).unwrap().len, 1280);
    }

    #[test]
    fn rounds_fill_the_budget() {
        let rate = ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: 4e9,
            backward: 1e10,
            token: None,
        };
        let rounds = |len| Case { ranks: 2, len, heads: 1, head_dim: 64 }.rounds(&rate);
        // tiles of 2·len² pairs, 4·64 FLOPs forward and 10·64 backward: 0.5 s with 1,397 rows
        assert_eq!([rounds(1397), rounds(100), rounds(8192)], [8, MOST_ROUNDS, LEAST_ROUNDS]);
    }
}
