//! The execution of the steps of one pass on all ranks.
//!
//! ```text
//! for each step, in order:
//!   begin     the tiles of the step before have ended, and what its messages bring has arrived
//!   tiles     begin + seconds and delay by messages; of a block in parts, each once it is there
//!   messages  begin when both ranks may post them and the link is free; see `pace.rs`. While one
//!             of them computes tiles, they have the share `overlap` of the bandwidth
//! ```
//! A message is posted in its step or earlier, and depends on steps up to its own only, so one
//! sweep over the steps finds all times. With an `overlap` of 1 each is a maximum, a minimum or a
//! sum of others: nothing gets faster if something else takes longer. Exchanges move without tiles,
//! and so at the full bandwidth.
//!
//! Messages of one step share their links ([`Network::seconds`]). Those of a rank in different
//! steps follow each other, on each kind of link and in each direction, blocks and gradients apart:
//! in bandwidth they share a step already. A message whose receiver has no buffer holds none up
//! that goes to another rank, and a final gradient none that comes from another rank.

use std::collections::VecDeque;

use super::{
    LinkBytes, PassTime,
    network::{Network, Transfer},
    pace::{BlockPace, Pace},
    timed_step::TimedStep,
};

/// Steps that were executed, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Executed {
    /// Time until the last rank has finished.
    pub(super) seconds: f64,
    /// Tiles and merges of all steps, of the rank that has the most.
    pub(super) tiles: f64,
}

impl Executed {
    /// Returns the time of steps of which `self` is the slowest and has the most tiles.
    pub(super) fn time(self) -> PassTime {
        PassTime { seconds: self.seconds, exposed: (self.seconds - self.tiles).max(0.0) }
    }

    /// Returns the later end, and the larger tiles, of steps that are executed at the same time.
    pub(super) const fn most(self, other: Self) -> Self {
        Self { seconds: self.seconds.max(other.seconds), tiles: self.tiles.max(other.tiles) }
    }
}

/// Executes the steps of one pass and adds its bytes.
pub(super) fn execute(
    network: &Network<'_>,
    steps: &[TimedStep],
    ranks: usize,
    bytes: &mut LinkBytes,
) -> Executed {
    let mut tiles = vec![0.0; ranks];
    let mut execution = Execution::new(network, ranks);
    for step in steps {
        let mut of_step = LinkBytes::default();
        step.transfers.iter().for_each(|transfer| network.count(transfer, &mut of_step));
        bytes.add(&of_step, step.repeats as f64);
        for (tiles, seconds) in tiles.iter_mut().zip(&step.compute) {
            *tiles += seconds * step.repeats as f64;
        }
        if step.repeats == 1 {
            execution.execute(step);
        } else {
            execution.repeat(step);
        }
    }
    let most = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
    Executed { seconds: most(&execution.clocks), tiles: most(&tiles) }
}

/// A block that arrives in parts while the tiles of its step are computed.
#[derive(Clone, Copy)]
struct Arrival {
    /// Time at which it has begun and the tiles before those of its step have ended.
    from: f64,
    /// Seconds of the bytes at the full bandwidth.
    seconds: f64,
    /// Seconds of the bytes that have arrived at `from`.
    arrived: f64,
}

impl Arrival {
    /// Parts of a block, as the ring engine divides it.
    const PARTS: [f64; 4] = [0.5, 0.25, 0.125, 0.125];

    /// Returns the time at which tiles of `compute` seconds that begin at `begin` end: those of a
    /// part begin when it has arrived, and the next part moves under them.
    fn tiles_end(self, begin: f64, compute: f64, overlap: f64) -> f64 {
        let mut end = begin.max(self.from);
        let mut arrived = self.arrived + end - self.from;
        let mut due = 0.0;
        for part in Self::PARTS {
            due += self.seconds * part;
            let wait = (due - arrived).max(0.0);
            let tiles = compute * part;
            end += wait + tiles;
            arrived += wait + tiles * overlap;
        }
        end
    }
}

/// Times of one step, by rank. 0 stands for what does not happen.
struct StepTimes {
    begins: Vec<f64>,
    tiles_end: Vec<f64>,
    /// Arrival of the block that is received in this step.
    arrived: Vec<f64>,
    /// End of the sends of this step that read a buffer of received blocks.
    sent: Vec<f64>,
}

/// Times from which a rank sends and receives on, in `[sends, receives]`.
type Port = [f64; 2];

/// Clocks of all ranks in a pass.
struct Execution<'a> {
    network: &'a Network<'a>,
    /// Begin of the next step of each rank.
    clocks: Vec<f64>,
    /// The steps so far; repeated steps count as one.
    steps: Vec<StepTimes>,
    /// Blocks that arrive in parts under the tiles of the next step.
    arrivals: Vec<Option<Arrival>>,
    /// Times for which a rank waits before it begins later steps, from the next one on.
    waits: VecDeque<Vec<f64>>,
    /// End of the sends of blocks of each rank in this ring.
    sends_end: Vec<f64>,
    /// Times at which each final gradient of a rank, and all before it, have arrived.
    finals: Vec<Vec<f64>>,
    /// By [`Execution::port`].
    ports: Vec<Port>,
}

impl<'a> Execution<'a> {
    /// Ports of a rank: inside a node and between nodes, of blocks and of gradients.
    const PORTS: usize = 4;

    fn new(network: &'a Network<'a>, ranks: usize) -> Self {
        Self {
            network,
            clocks: vec![0.0; ranks],
            steps: Vec::new(),
            arrivals: vec![None; ranks],
            waits: VecDeque::new(),
            sends_end: vec![0.0; ranks],
            finals: vec![Vec::new(); ranks],
            ports: vec![[0.0; 2]; Self::PORTS * ranks],
        }
    }

    fn execute(&mut self, step: &TimedStep) {
        let overlap = self.network.overlap();
        let begins = self.clocks.clone();
        let mut tiles_end = self.tiles(step);
        for (rank, tiles_end) in tiles_end.iter_mut().enumerate() {
            let begin = begins[rank];
            let compute = *tiles_end;
            *tiles_end = self.arrivals[rank]
                .take()
                .map_or(begin + compute, |arrival| arrival.tiles_end(begin, compute, overlap));
        }
        let none = vec![0.0; begins.len()];
        self.clocks.clone_from(&tiles_end);
        self.steps.push(StepTimes { begins, tiles_end, arrived: none.clone(), sent: none });

        let seconds = self.network.seconds(&step.transfers);
        let mut moved = Vec::new();
        let mut sends_end = self.sends_end.clone();
        for (transfer, &[latency, seconds]) in step.transfers.iter().zip(&seconds) {
            let &Transfer { from, to, pace, .. } = transfer;
            let [sends, receives] = self.posts(transfer);
            let ranks = [from, to];
            let (begin, end) = if pace == Pace::InStep {
                let begin = sends.max(receives) + latency;
                (begin, begin + seconds)
            } else {
                let ports = ranks.map(|rank| self.port(rank, transfer));
                let sends = sends.max(self.ports[ports[0]][0]);
                // final gradients arrive in any order
                let in_order = !matches!(pace, Pace::FinalGradient { .. });
                let receives =
                    if in_order { receives.max(self.ports[ports[1]][1]) } else { receives };
                let begin = sends.max(receives);
                let sent = self.moved(ranks, sends, seconds);
                let received = if in_order { self.moved(ranks, begin, seconds) } else { 0.0 };
                moved.push((ports, [sent, received]));
                (begin + latency, self.moved(ranks, begin + latency, seconds))
            };
            match pace {
                Pace::InStep => {
                    self.wait_after(1, from, end);
                    self.wait_after(1, to, end);
                }
                Pace::Block(BlockPace { from_local, in_parts, .. }) => {
                    sends_end[from] = sends_end[from].max(end);
                    if let Some(times) = self.steps.last_mut() {
                        times.arrived[to] = times.arrived[to].max(end);
                        if !from_local {
                            times.sent[from] = times.sent[from].max(end);
                        }
                    }
                    if in_parts {
                        let tiles_end = self.before(0).map_or(0.0, |of| of.tiles_end[to]);
                        let from = begin.max(tiles_end);
                        let [_, left] = self.moved_until(from, ranks, begin, seconds);
                        self.arrivals[to] =
                            Some(Arrival { from, seconds, arrived: seconds - left });
                    } else {
                        self.wait_after(1, to, end);
                    }
                }
                Pace::PartialGradient { sent } => {
                    self.wait_after(sent, from, end);
                    self.wait_after(1, to, end);
                }
                Pace::FinalGradient { sent, .. } => {
                    self.wait_after(sent, from, end);
                    let of_rank = &mut self.finals[to];
                    let before = of_rank.last().copied().unwrap_or(0.0);
                    of_rank.push(before.max(end));
                }
            }
        }
        // messages of one step share their links, and follow those of earlier steps
        for ([from, to], [sent, received]) in moved {
            self.ports[from][0] = self.ports[from][0].max(sent);
            self.ports[to][1] = self.ports[to][1].max(received);
        }
        self.sends_end = sends_end;
        self.begin_next(step.ends_ring);
    }

    /// Returns the time at which a message between `ranks` has moved that begins at `begin` and
    /// takes `seconds` at the full bandwidth.
    fn moved(&self, ranks: [usize; 2], begin: f64, seconds: f64) -> f64 {
        let [end, _] = self.moved_until(f64::INFINITY, ranks, begin, seconds);
        end
    }

    /// Moves such a message up to the time `until` at most. Returns the time at which it has moved,
    /// or `until`, and the seconds that are left of it.
    fn moved_until(&self, until: f64, ranks: [usize; 2], begin: f64, seconds: f64) -> [f64; 2] {
        let overlap = self.network.overlap();
        let tiles = self.tiles_since(ranks, begin).into_iter();
        let bandwidths = tiles.flat_map(|[begin, end]| [(begin, 1.0), (end, overlap)]);
        let (mut clock, mut left) = (begin, seconds);
        for (end, share) in bandwidths.chain([(f64::INFINITY, 1.0)]) {
            let moves = (end.min(until) - clock).max(0.0) * share;
            if left == 0.0 {
                break;
            }
            if left <= moves {
                return [clock + left / share, 0.0];
            }
            left -= moves;
            clock = clock.max(end.min(until));
        }
        [clock, left]
    }

    /// Returns the begin and the end of the tiles of both ranks that end after a time, by their
    /// begin; none if messages move as fast under tiles.
    fn tiles_since(&self, ranks: [usize; 2], time: f64) -> Vec<[f64; 2]> {
        if self.network.overlap() == 1.0 {
            return Vec::new();
        }
        let of_rank = |rank: usize| {
            let steps = self.steps.iter().rev();
            let times = steps.map(move |of| [of.begins[rank], of.tiles_end[rank]]);
            times.take_while(move |&[_, end]| end > time)
        };
        let mut tiles: Vec<[f64; 2]> = ranks.into_iter().flat_map(of_rank).collect();
        tiles.sort_unstable_by(|a, b| a[0].total_cmp(&b[0]));
        tiles
    }

    /// Returns the times from which the sender and the receiver of a message of the current step
    /// have posted it.
    fn posts(&self, transfer: &Transfer) -> [f64; 2] {
        let &Transfer { from, to, pace, .. } = transfer;
        let begin =
            |rank: usize, ahead: usize| self.before(ahead).map_or(0.0, |of| of.begins[rank]);
        let BlockPace { ahead, frees, from_local, .. } = match pace {
            Pace::Block(pace) => pace,
            Pace::FinalGradient { buffers, .. } => {
                let freed = self.finals[to].iter().rev().nth(buffers.max(1) - 1);
                return [begin(from, 0), freed.copied().unwrap_or(0.0)];
            }
            _ => return [begin(from, 0), begin(to, 0)],
        };
        let [sends, receives] = [begin(from, ahead), begin(to, ahead)];
        let sends = if from_local {
            sends.max(self.sends_end[from]).min(begin(from, 0))
        } else {
            sends.max(self.before(1).map_or(0.0, |of| of.arrived[from]))
        };
        let freed = frees.and_then(|steps| self.before(steps));
        let freed = freed.map_or(0.0, |of| of.tiles_end[to].max(of.sent[to]));
        [sends, receives.max(freed)]
    }

    /// Returns the times of the step so many steps before the current one.
    fn before(&self, steps: usize) -> Option<&StepTimes> {
        self.steps.iter().rev().nth(steps)
    }

    fn port(&self, rank: usize, transfer: &Transfer) -> usize {
        let between = !self.network.is_inside(transfer.from, transfer.to);
        let gradients = !matches!(transfer.pace, Pace::Block(_));
        Self::PORTS * rank + 2 * usize::from(between) + usize::from(gradients)
    }

    /// Lets `rank` wait for `time` before it begins the step after so many, at least 1.
    fn wait_after(&mut self, steps: usize, rank: usize, time: f64) {
        while self.waits.len() < steps {
            self.waits.push_back(vec![0.0; self.clocks.len()]);
        }
        if let Some(waits) = self.waits.get_mut(steps - 1) {
            waits[rank] = waits[rank].max(time);
        }
    }

    /// Lets the ranks wait for what they need before the next step: at the end of a ring for all
    /// its messages.
    fn begin_next(&mut self, ends_ring: bool) {
        let due = if ends_ring { self.waits.len() } else { self.waits.len().min(1) };
        let mut due: Vec<Vec<f64>> = self.waits.drain(..due).collect();
        if ends_ring {
            due.push(std::mem::replace(&mut self.sends_end, vec![0.0; self.clocks.len()]));
            let last = |of_rank: Vec<f64>| of_rank.last().copied().unwrap_or(0.0);
            due.push(self.finals.iter_mut().map(std::mem::take).map(last).collect());
        }
        for waits in due {
            self.clocks.iter_mut().zip(waits).for_each(|(clock, wait)| *clock = clock.max(wait));
        }
    }

    /// Executes equal steps, whose messages all begin and end in them: each takes as long as that
    /// of the slowest rank, for which all ranks of a ring wait in the end.
    fn repeat(&mut self, step: &TimedStep) {
        let tiles = self.tiles(step);
        let mut longest = tiles.iter().copied().fold(0.0, f64::max);
        let seconds = self.network.seconds(&step.transfers);
        for (transfer, [latency, seconds]) in step.transfers.iter().zip(seconds) {
            let tiles = tiles[transfer.from].max(tiles[transfer.to]);
            let slower = (1.0 - self.network.overlap()) * (tiles - latency).max(0.0);
            longest = longest.max(latency + seconds * step.sharing + slower);
        }
        let repeats = step.repeats as f64;
        let end = self.clocks.iter().copied().fold(0.0, f64::max) + longest * repeats;
        self.clocks.fill(end);
    }

    /// Returns the seconds of the tiles of each rank, delayed by messages. A rank without tiles
    /// only waits.
    fn tiles(&self, step: &TimedStep) -> Vec<f64> {
        let delays = self.network.delays(&step.transfers);
        let tiles = step.compute.iter().zip(delays);
        tiles.map(|(&compute, delay)| if compute > 0.0 { compute + delay } else { 0.0 }).collect()
    }
}
