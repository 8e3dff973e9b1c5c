//! What messages cost beside tiles: the overhead of a byte, and the overlap.
//!
//! ```text
//! pass      forward and backward of full attention over all ranks
//! tiles     the same tiles without messages, until all ranks have computed theirs
//! overhead  of a pass whose tiles hide its messages: (pass − tiles) / bytes that a rank sends and
//!           receives
//! overlap   of a pass whose messages take longer than its tiles: the one with which it is
//!           predicted to take as long as measured
//! ```
//! Times are medians over rounds. Overhead is what hidden messages cost a rank: copies, the network
//! stack on the cores that compute tiles. Overlap is how fast messages move under tiles: a rank
//! moves them between tiles, and on cores that ranks share a rank that waits for its core moves
//! none.
//!
//! A round measures pass and tiles one after another, because the difference is a few percent of
//! them: a rate that was measured at another time differs by as much on cores that ranks share.
//! Both end when the last rank has ended: of ranks that share a core one ends first, and the median
//! of their own times is up to a tenth less.

use std::time::Instant;

use annulus::{Attention, Batch, Plan};
use annulus_comm::{ring::PassKind, threads::ring};
use annulus_core::{
    ComputeRate, DType, Dims, Element, Error, HeadGrid, Link, Machine, Prediction, Result, Spec,
    StrategyTraffic, TrafficOptions,
};
use half::{bf16, f16};

use super::{
    links::Links,
    median,
    rates::{HEADS, round, tensor},
};
use crate::{
    backend::BackendChoice,
    failure::Outcome,
    job::{Job, RankEndpoint},
};

/// Figures of messages beside tiles.
#[derive(Debug, Clone, Copy)]
pub(super) struct Overlap {
    /// As [`Machine::message_overhead`].
    pub(super) message_overhead: f64,
    /// As [`Machine::overlap`].
    pub(super) overlap: f64,
}

/// Time of the tiles of a step in units of the time of its messages: with tiles so long, messages
/// are hidden also if they have half of the bandwidth. At least [`LEAST_LONG`], where the rows of a
/// rank are limited.
const LONG: f64 = 2.5;
const LEAST_LONG: f64 = 1.25;
/// With tiles so short, messages are not hidden, so that the time depends on how fast they move
/// under tiles. At most [`MOST_SHORT`], where the rows of a rank are limited.
const SHORT: f64 = 0.6;
const MOST_SHORT: f64 = 0.8;
/// Rows of a rank.
const LEAST_LEN: usize = 512;
const MOST_LEN: usize = 8192;
/// Most seconds of the tiles of a forward pass: with longer ones, fewer heads are computed.
const LONGEST: f64 = 0.5;
const WARM_UP: usize = 1;
/// Seconds of the measured rounds, which bound their number. A trade-off: fewer scatter more, and
/// both passes together take most of the time of `annulus measure`. Overheads of nine measurements
/// of four ranks on two cores were 0.59 to 1.46 ns/byte
/// (`benches/record/strategies.md`).
const BUDGET: f64 = 16.0;
const LEAST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 50;
/// Bisections of the overlap, to a thousandth.
const HALVINGS: usize = 10;

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
    /// Returns the pass whose tiles take `cover` times as long as its messages on these links, at
    /// this rate. `None` if it takes too long with one head: many ranks on slow links.
    fn new(ranks: usize, links: &Links, rate: &ComputeRate, cover: f64) -> Option<Self> {
        let len = cover * Self::hiding_len(links, rate);
        let len = (len.clamp(LEAST_LEN as f64, MOST_LEN as f64) as usize).next_multiple_of(64);
        let mut case = Self { ranks, len, heads: HEADS, head_dim: rate.head_dim };
        let is_long = |case: &Self| case.flops(4.0) / rate.forward > LONGEST;
        while case.heads > 1 && is_long(&case) {
            case.heads /= 2;
        }
        (!is_long(&case)).then_some(case)
    }

    /// Returns the rows with which tiles take as long as the messages of a forward pass.
    fn hiding_len(links: &Links, rate: &ComputeRate) -> f64 {
        // tiles: 4 · heads · dim · len² / rate; K and V: 2 · heads · dim · len elements
        rate.dtype.bytes() as f64 * rate.forward * seconds_per_byte(links) / 2.0
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

    /// Measures a forward and a backward pass and their tiles alone, on this rank.
    fn times_of_rank<T: Element>(&self, mut plans: Plans, rounds: usize) -> Result<Times> {
        let Plans { of_ring, alone } = &mut plans;
        let x = tensor::<T>(self.len, self.heads, self.head_dim);
        let (mut delays, mut all_tiles) = (Vec::new(), Vec::new());
        for number in 0..WARM_UP + rounds {
            // an update ends when all ranks have begun it: they begin at the same time, and the
            // tiles end with those of the last rank, as a pass does
            of_ring.update(&Batch::default())?;
            let [forward, backward] = round(of_ring, &x)?;
            let pass = forward + backward;
            of_ring.update(&Batch::default())?;
            let begin = Instant::now();
            for _ in 0..self.ranks {
                round(alone, &x)?;
            }
            of_ring.update(&Batch::default())?;
            let tiles = begin.elapsed().as_secs_f64();
            if number >= WARM_UP {
                delays.push(pass.as_secs_f64() - tiles);
                all_tiles.push(tiles);
            }
        }
        let passes = [PassKind::Forward, PassKind::Backward];
        let bytes: u64 = passes.iter().map(|&pass| of_ring.bytes_predicted(pass)).sum();
        let spec = of_ring.spec().clone();
        Ok(Times { delay: median(delays), tiles: median(all_tiles), bytes: bytes as f64, spec })
    }

    /// Measures the pass on all ranks. Returns medians over the ranks.
    ///
    /// # Ordering
    /// Collective over the ranks.
    fn measure(
        &self,
        job: &mut Job,
        backend: &BackendChoice,
        threads: usize,
        attention: &Attention,
        rate: &ComputeRate,
    ) -> Outcome<Times> {
        let dims = |ranks: usize| Dims::new(1, ranks * self.len, self.heads, self.head_dim);
        let attention = attention.clone().dtype(rate.dtype);
        let rounds = self.rounds(rate);
        let of_rank = |_, endpoint: RankEndpoint| {
            let none = || Error::internal("a ring has no rank");
            let alone = RankEndpoint::Thread(Box::new(ring(1).pop().ok_or_else(none)?));
            let plans = Plans {
                of_ring: backend.plan(threads, endpoint, &attention, dims(self.ranks))?,
                alone: backend.plan(threads, alone, &attention, dims(1))?,
            };
            match rate.dtype {
                DType::F64 => self.times_of_rank::<f64>(plans, rounds),
                DType::F32 => self.times_of_rank::<f32>(plans, rounds),
                DType::Bf16 => self.times_of_rank::<bf16>(plans, rounds),
                DType::F16 => self.times_of_rank::<f16>(plans, rounds),
            }
        };
        let endpoints = job.endpoints()?;
        let own = job.run_phase(endpoints, of_rank)?;
        let numbers: Vec<[f64; 3]> = own.iter().map(|of| [of.delay, of.tiles, of.bytes]).collect();
        let all = job.all_gather_numbers(&medians(&numbers))?;
        let all: Vec<[f64; 3]> = all.iter().map(|of| [of[0], of[1], of[2]]).collect();
        let [delay, tiles, bytes] = medians(&all);
        let first = own.into_iter().next();
        let Times { spec, .. } = first.ok_or_else(|| Error::internal("no rank has measured"))?;
        Ok(Times { delay, tiles, bytes, spec })
    }
}

/// Times of a forward and a backward pass of full attention in a ring.
struct Times {
    /// Seconds of the pass beyond those of the tiles alone.
    delay: f64,
    tiles: f64,
    /// Bytes that a rank sends.
    bytes: f64,
    spec: Spec,
}

fn medians(of_ranks: &[[f64; 3]]) -> [f64; 3] {
    [0, 1, 2].map(|figure| median(of_ranks.iter().map(|rank| rank[figure]).collect()))
}

/// Plans of a rank.
struct Plans {
    /// Of the ring over all ranks.
    of_ring: Plan,
    /// Of the rank's own rows alone: the tiles of a ring step.
    alone: Plan,
}

impl Links {
    /// Returns a machine of these links with ranks of one rate.
    fn machine(&self, rate: ComputeRate, overlap: Overlap) -> Machine {
        let Self { ranks_per_node, inside_node, between_nodes, node_bandwidth } = *self;
        let Overlap { message_overhead, overlap } = overlap;
        Machine {
            ranks_per_node,
            inside_node,
            between_nodes,
            node_bandwidth,
            message_overhead,
            overlap,
            merge_bandwidth: None,
            rates: vec![rate],
            memory: u64::MAX,
        }
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

/// Measures the overhead of a byte and the overlap, with tiles of `rate`. Without a pass that hides
/// its messages in a short time, as of one rank, the overhead is 0; without one whose messages take
/// longer than its tiles, the overlap is 1. `attention` has the deadline.
///
/// # Ordering
/// Collective over the ranks.
pub(super) fn measure(
    job: &mut Job,
    backend: &BackendChoice,
    threads: usize,
    attention: &Attention,
    links: &Links,
    rate: &ComputeRate,
) -> Outcome<Overlap> {
    let ranks = job.ranks();
    let mut measured = Overlap { message_overhead: 0.0, overlap: 1.0 };
    // equal on all ranks, as are the links and the rate
    let case = |cover, [least, most]: [f64; 2]| {
        let case = Case::new(ranks, links, rate, cover).filter(|_| ranks > 1);
        let cover = |case: &Case| case.len as f64 / Case::hiding_len(links, rate);
        case.filter(|case| (least..=most).contains(&cover(case)))
    };
    if let Some(long) = case(LONG, [LEAST_LONG, f64::INFINITY]) {
        let Times { delay, bytes, .. } = long.measure(job, backend, threads, attention, rate)?;
        // a rank receives as many bytes as it sends
        measured.message_overhead = (delay / (2.0 * bytes)).max(0.0);
    }
    if let Some(short) = case(SHORT, [0.0, MOST_SHORT]) {
        let times = short.measure(job, backend, threads, attention, rate)?;
        // the rate at which these tiles were computed
        let faster = short.seconds(rate) / times.tiles;
        let rate = ComputeRate {
            forward: rate.forward * faster,
            backward: rate.backward * faster,
            ..*rate
        };
        let machine = links.machine(rate, measured);
        let pass = PredictedPass::new(&times.spec, ranks)?;
        measured.overlap = pass.overlap(times.tiles + times.delay, machine)?;
    }
    Ok(measured)
}

/// A forward and a backward pass of full attention in a ring, whose time is predicted.
struct PredictedPass<'a> {
    spec: &'a Spec,
    traffic: StrategyTraffic,
}

impl<'a> PredictedPass<'a> {
    const OPTIONS: TrafficOptions<'static> =
        TrafficOptions { backward: true, ..TrafficOptions::FORWARD };

    fn new(spec: &'a Spec, ranks: usize) -> Result<Self> {
        let ring = HeadGrid::new(&spec.dims, ranks, 1)?;
        Ok(Self { spec, traffic: StrategyTraffic::of(spec, ring, &Self::OPTIONS, &mut || ())? })
    }

    fn seconds(&self, machine: &Machine) -> Result<f64> {
        let Self { spec, traffic } = self;
        let of = Prediction::of(traffic, spec, &Self::OPTIONS, machine, &mut || ())?;
        Ok(of.seconds())
    }

    /// Returns the overlap, from 0 to 1, with which the pass is predicted to take `measured`
    /// seconds on a machine.
    fn overlap(&self, measured: f64, mut machine: Machine) -> Result<f64> {
        let mut is_slower = |overlap| {
            machine.overlap = overlap;
            Ok::<bool, Error>(self.seconds(&machine)? > measured)
        };
        // more overlap is less time
        let [mut least, mut most] = [0.0, 1.0];
        for _ in 0..HALVINGS {
            let middle = 0.5 * (least + most);
            if is_slower(middle)? {
                least = middle;
            } else {
                most = middle;
            }
        }
        // the pass is hidden, or waits for more than its messages
        Ok(if most < 1.0 { least } else { 1.0 })
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::DType;

    use super::*;

    #[test]
    fn tiles_take_so_many_times_as_long_as_their_messages() {
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
        let case = Case::new(4, &links, &rate, 1.25).unwrap();
        assert_eq!((case.len, case.heads), (1280, 4));
        assert_eq!(Case::new(4, &links, &rate, 0.625).unwrap().len, 640);
        let tiles = case.flops(4.0) / 4.0 / rate.forward;
        // two ranks share the bandwidth of the node
        let messages = 2.0 * (4 * 64 * 1280 * 4) as f64 * 2.0 / 1e9;
        assert!((1.2..1.3).contains(&(tiles / messages)), "{tiles} s, {messages} s");
        // many ranks: fewer heads, then none; a fast network: the fewest rows
        assert_eq!(Case::new(100, &links, &rate, 1.25).unwrap().heads, 2);
        assert!(Case::new(1000, &links, &rate, 1.25).is_none());
        links = Links { ranks_per_node: 1, node_bandwidth: Some(1e12), ..links };
        links.between_nodes = Some(link(1e12));
        assert_eq!(Case::new(4, &links, &rate, 1.25).unwrap().len, 512);
        // both directions share the link
        links.inside_node = Some(Link { is_full_duplex: false, ..link(1e9) });
        assert_eq!(Case::new(4, &links, &rate, 1.25).unwrap().len, 1280);
    }

    #[test]
    fn the_overlap_is_the_one_that_explains_a_pass() {
        let link = Link { latency: 1e-4, bandwidth: 1e8, is_full_duplex: true };
        let links = Links {
            ranks_per_node: 1,
            inside_node: None,
            between_nodes: Some(link),
            node_bandwidth: Some(1e8),
        };
        let rate = ComputeRate {
            dtype: DType::F32,
            head_dim: 64,
            forward: 5e10,
            backward: 4e10,
            token: None,
        };
        let spec = Spec::new(Dims::new(1, 4 * 512, 4, 64), DType::F32);
        // tiles of a block take 5 ms forward, its bytes 10 ms
        let machine = links.machine(rate, Overlap { message_overhead: 1e-10, overlap: 1.0 });
        let pass = PredictedPass::new(&spec, 4).unwrap();
        for overlap in [0.0, 0.125, 0.5, 0.875, 1.0] {
            let measured = pass.seconds(&Machine { overlap, ..machine.clone() }).unwrap();
            let found = pass.overlap(measured, machine.clone()).unwrap();
            assert!((found - overlap).abs() < 2e-3, "{found}, want {overlap}");
        }
        // a pass that takes less time than predicted, and one that takes more
        assert_eq!(pass.overlap(1e-3, machine.clone()), Ok(1.0));
        assert_eq!(pass.overlap(1.0, machine), Ok(0.0));
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
        assert_eq!([rounds(1397), rounds(100), rounds(8192)], [16, MOST_ROUNDS, LEAST_ROUNDS]);
    }
}
