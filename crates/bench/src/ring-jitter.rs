//! Simulates the forward pass of a relay ring whose ranks have jitter, by the number of steps that
//! blocks are received ahead, and of rails over nodes.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin ring-jitter
//! ```
//!
//! Every event of a rank is a maximum of earlier ones. With k steps ahead (`Division::receive_ahead`)
//! a rank has k + 1 buffers, and of block t + 1 of rank r, with p and n the ranks before and after
//! it on the path of that block and of block t + 1 − k:
//!
//! ```text
//! send           = max(arrive[p][t]             rank p holds the block, and it
//!                      start[p][t + 1 − k])     is no further ahead
//! post           = max(start[r][t + 1 − k]      the buffer is used
//!                      arrive[n][t + 1 − k])    and sent
//! arrive[r][t+1] = transfer + max(send, post, the last arrival on the same link)
//! start[r][t+1]  = max(start[r][t] + tiles · (1 + jitter), arrive[r][t+1])
//! ```
//! A rank that waits for its sends at the end of each step, the first column, has in addition:
//!
//! ```text
//! start[r][t+1] ≥ arrive[n][t+1]                the block of step t is sent
//! ```
//! The tiles of a step take 1 on a quiet rank. Jitter of a rank and step is exponential, or rare
//! and long; transfers take the same time always.
//!
//! Prints lines of Markdown tables: mean makespan of the seeds, divided by the number of steps. The
//! first table has the share of the loss over one rank alone that is removed; the second compares
//! relay and rails over nodes, whose links within a node and between nodes differ.
//! It uses no crate, so `rustc --edition 2024 -O` compiles it alone, too.

const RANKS: usize = 1024;
const SEEDS: u64 = 8;
/// Ranks of a node in the second table.
const NODE_RANKS: usize = 8;

/// Distribution of the time by which the tiles of a step take longer.
#[derive(Clone, Copy)]
enum Jitter {
    None,
    /// Exponential with this mean.
    Exponential(f64),
    /// This time, in a step of this probability.
    Rare {
        time: f64,
        probability: f64,
    },
    /// One rank always takes this much longer.
    SlowRank(f64),
}

impl Jitter {
    fn mean(self) -> f64 {
        match self {
            Self::None | Self::SlowRank(_) => 0.0,
            Self::Exponential(mean) => mean,
            Self::Rare { time, probability } => time * probability,
        }
    }

    fn sample(self, rank: usize, random: &mut Random) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Exponential(mean) => -mean * (1.0 - random.draw()).ln(),
            Self::Rare { time, probability } if random.draw() < probability => time,
            Self::SlowRank(time) if rank == 0 => time,
            Self::Rare { .. } | Self::SlowRank(_) => 0.0,
        }
    }
}

impl std::fmt::Display for Jitter {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => write!(formatter, "none"),
            Self::Exponential(mean) => write!(formatter, "exponential, mean {mean}"),
            Self::Rare { time, probability } => write!(formatter, "{time} with p = {probability}"),
            Self::SlowRank(time) => write!(formatter, "one rank slower by {time}"),
        }
    }
}

/// Random numbers of splitmix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    /// Returns a number of [0, 1).
    fn draw(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Time at which a rank receives and sends blocks.
#[derive(Clone, Copy)]
struct Buffering {
    /// Steps that blocks are received ahead.
    ahead: usize,
    /// True if each step ends when the block of the step is sent.
    waits_for_sends: bool,
}

/// Path of the blocks.
#[derive(Clone, Copy, PartialEq)]
enum Path {
    /// From rank r to r + 1.
    Relay,
    /// Around the ranks of a node, then from all of them to the same ranks of the next node.
    Rails,
}

/// Path of the blocks, and the time of a transfer within a node and between nodes.
#[derive(Clone, Copy)]
struct Network {
    path: Path,
    node_ranks: usize,
    inner: f64,
    outer: f64,
}

impl Network {
    /// Returns a ring with links of one kind.
    const fn uniform(transfer: f64) -> Self {
        Self { path: Path::Relay, node_ranks: 1, inner: transfer, outer: transfer }
    }

    /// Returns the rank from which `rank` receives the block of step `step`, at least 1, and the
    /// time of the transfer.
    fn before(&self, rank: usize, step: usize, ranks: usize) -> (usize, f64) {
        let Self { path, node_ranks, inner, outer } = *self;
        let is_outer = match path {
            Path::Relay => rank.is_multiple_of(node_ranks),
            Path::Rails => step.is_multiple_of(node_ranks),
        };
        let before = match (path, is_outer) {
            (Path::Relay, _) => (rank + ranks - 1) % ranks,
            (Path::Rails, true) => (rank + ranks - node_ranks) % ranks,
            (Path::Rails, false) => {
                let first = rank / node_ranks * node_ranks;
                first + (rank - first + node_ranks - 1) % node_ranks
            }
        };
        (before, if is_outer { outer } else { inner })
    }

    /// Returns the rank that receives the block of step `step` − 1 of `rank` for step `step`.
    fn after(&self, rank: usize, step: usize, ranks: usize) -> usize {
        let node_ranks = self.node_ranks;
        match self.path {
            Path::Relay => (rank + 1) % ranks,
            Path::Rails if step.is_multiple_of(node_ranks) => (rank + node_ranks) % ranks,
            Path::Rails => {
                let first = rank / node_ranks * node_ranks;
                first + (rank - first + 1) % node_ranks
            }
        }
    }
}

/// Returns the time at which the last rank has computed its last step.
fn makespan(
    ranks: usize,
    buffering: Buffering,
    network: Network,
    jitter: Jitter,
    seed: u64,
) -> f64 {
    let Buffering { ahead, waits_for_sends } = buffering;
    let mut random = Random(seed);
    // by step
    let mut start: Vec<Vec<f64>> = vec![vec![0.0; ranks]];
    let mut arrive: Vec<Vec<f64>> = vec![vec![0.0; ranks]];
    for next in 1..=ranks {
        // drawn in the same order for every number of buffers, so that those are compared alike
        let tiles: Vec<f64> =
            (0..ranks).map(|rank| 1.0 + jitter.sample(rank, &mut random)).collect();
        let ends: Vec<f64> =
            start[next - 1].iter().zip(tiles).map(|(start, of)| start + of).collect();
        if next == ranks {
            return ends.into_iter().fold(0.0, f64::max);
        }
        let of_buffer = next.checked_sub(ahead);
        let arrives = |rank: usize| {
            let (before, transfer) = network.before(rank, next, ranks);
            let window = of_buffer.map_or(0.0, |step| start[step][before]);
            let send: f64 = arrive[next - 1][before].max(window);
            let post = of_buffer.filter(|&step| step > 0).map_or(0.0, |step| {
                start[step][rank].max(arrive[step][network.after(rank, step, ranks)])
            });
            // blocks of one sender share its link
            let same = |&step: &usize| network.before(rank, step, ranks).0 == before;
            let last = (1..next).rev().take(network.node_ranks).find(same);
            transfer + send.max(post).max(last.map_or(0.0, |step| arrive[step][rank]))
        };
        let arrivals: Vec<f64> = (0..ranks).map(arrives).collect();
        let starts = |rank: usize| {
            let sent = arrivals[network.after(rank, next, ranks)];
            let sent = if waits_for_sends { sent } else { 0.0 };
            ends[rank].max(arrivals[rank]).max(sent)
        };
        start.push((0..ranks).map(starts).collect());
        arrive.push(arrivals);
    }
    0.0
}

/// Returns the mean makespan of the seeds, divided by the number of steps.
fn mean(buffering: Buffering, network: Network, jitter: Jitter) -> f64 {
    let all = (0..SEEDS).map(|seed| makespan(RANKS, buffering, network, jitter, seed));
    all.sum::<f64>() / (SEEDS as f64 * RANKS as f64)
}

/// Checks cases without jitter: a step takes the longer one of tiles and transfer, and the last one
/// its tiles.
fn check() -> Result<(), String> {
    for (transfer, ahead) in [(0.5, 1), (0.5, 3), (2.0, 1), (2.0, 2)] {
        for waits_for_sends in [false, true] {
            let buffering = Buffering { ahead, waits_for_sends };
            let got = makespan(16, buffering, Network::uniform(transfer), Jitter::None, 0);
            let want = 15.0 * transfer.max(1.0) + 1.0;
            if (got - want).abs() > 1e-9 {
                return Err(format!("makespan {got} instead of {want}"));
            }
        }
    }
    // 16 ranks on 4 nodes: 3 transfers between nodes, each in a step of its own
    let rails = Network { path: Path::Rails, node_ranks: 4, inner: 0.5, outer: 3.0 };
    let buffering = Buffering { ahead: 1, waits_for_sends: false };
    let got = makespan(16, buffering, rails, Jitter::None, 0);
    if (got - (3.0 * 3.0 + 13.0)).abs() > 1e-9 {
        return Err(format!("makespan {got} of rails"));
    }
    Ok(())
}

fn main() -> Result<(), String> {
    check()?;
    let before = Buffering { ahead: 1, waits_for_sends: true };
    let ahead = |ahead| Buffering { ahead, waits_for_sends: false };
    println!("| transfer | jitter | alone | waits | 1 ahead | less loss | 2 | less | 3 | less |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let jitters = [
        Jitter::None,
        Jitter::Exponential(0.02),
        Jitter::Exponential(0.1),
        Jitter::Exponential(0.5),
        Jitter::Rare { time: 1.0, probability: 0.001 },
        Jitter::Rare { time: 10.0, probability: 0.001 },
        Jitter::SlowRank(0.1),
    ];
    for transfer in [0.2, 0.5, 0.8, 1.0] {
        for jitter in jitters {
            let network = Network::uniform(transfer);
            let alone = 1.0 + jitter.mean();
            let waits = mean(before, network, jitter);
            let removed = |time: f64| match waits - alone {
                loss if loss > 1e-3 => format!("{:.0} %", (waits - time) / loss * 100.0),
                _ => "–".to_owned(),
            };
            let columns = [1, 2, 3].map(|steps| {
                let time = mean(ahead(steps), network, jitter);
                format!("{time:.3} | {}", removed(time))
            });
            let columns = columns.join(" | ");
            println!("| {transfer} | {jitter} | {alone:.3} | {waits:.3} | {columns} |");
        }
    }
    println!();
    println!("| inner | outer | jitter | relay, 1 ahead | 2 | rails, 1 ahead | 2 | 4 |");
    println!("|---|---|---|---|---|---|---|---|");
    for outer in [0.5, 1.0, 2.0, 4.0, 8.0] {
        for jitter in [Jitter::None, Jitter::Exponential(0.1)] {
            let inner = 0.2;
            let network = |path| Network { path, node_ranks: NODE_RANKS, inner, outer };
            let time = |path, steps| format!("{:.3}", mean(ahead(steps), network(path), jitter));
            let relay = [1, 2].map(|steps| time(Path::Relay, steps)).join(" | ");
            let rails = [1, 2, 4].map(|steps| time(Path::Rails, steps)).join(" | ");
            println!("| {inner} | {outer} | {jitter} | {relay} | {rails} |");
        }
    }
    Ok(())
}
