//! Simulates the forward pass of a relay ring whose ranks have jitter, with two and with three
//! block buffers per rank.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin ring-jitter
//! ```
//!
//! Every event of a rank is a maximum of earlier ones:
//!
//! ```text
//! arrive[r][t+1] = transfer + max(start[r−1][t]      the previous rank holds the block
//!                                 start[r][t]        its receive is posted, into a free buffer
//!                                 arrive[r][t])      messages of a link are sent in order
//! start[r][t+1]  = max(start[r][t] + tiles · (1 + jitter)
//!                      arrive[r][t+1]
//!                      arrive[r+1][t+1]  of two buffers: the block of step t is sent
//!                      arrive[r+1][t])   of three: that of step t − 1 is
//! ```
//! With three buffers a rank could also receive two steps ahead and forward a block as soon as it
//! has arrived, the last columns:
//!
//! ```text
//! arrive[r][t+1] = transfer + max(arrive[r−1][t], start[r][t−1], arrive[r+1][t−1], arrive[r][t])
//! start[r][t+1]  = max(start[r][t] + tiles · (1 + jitter), arrive[r][t+1])
//! ```
//! The tiles of a step take 1 on a quiet rank. Jitter of a rank and step is exponential, or rare
//! and long; transfers take the same time always.
//!
//! Prints one line of a Markdown table for each case: mean makespan of the seeds, divided by the
//! number of steps, and the share of the loss over one rank alone that the third buffer removes.
//! It uses no crate, so `rustc --edition 2024 -O` compiles it alone, too.

const RANKS: usize = 1024;
const SEEDS: u64 = 8;

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

/// Buffers for blocks of a rank, and the time at which it receives and sends one.
#[derive(Clone, Copy)]
enum Buffering {
    Two,
    Three,
    /// Three, with receives that are posted two steps ahead and sends at the arrival of a block.
    Ahead,
}

/// Returns the time at which the last rank has computed its last step.
fn makespan(ranks: usize, buffering: Buffering, transfer: f64, jitter: Jitter, seed: u64) -> f64 {
    let mut random = Random(seed);
    let mut start = vec![0.0; ranks];
    let mut arrive = vec![0.0; ranks];
    // of the step before
    let mut last_start = start.clone();
    let mut last_arrive = arrive.clone();
    for step in 0..ranks {
        // drawn in the same order for every number of buffers, so that those are compared alike
        let tiles: Vec<f64> =
            (0..ranks).map(|rank| 1.0 + jitter.sample(rank, &mut random)).collect();
        if step + 1 == ranks {
            return start.iter().zip(tiles).map(|(start, tiles)| start + tiles).fold(0.0, f64::max);
        }
        let arrives = |rank: usize| {
            let (previous, next) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
            let [held, posted]: [f64; 2] = match buffering {
                Buffering::Two | Buffering::Three => [start[previous], start[rank]],
                Buffering::Ahead => [arrive[previous], last_start[rank].max(last_arrive[next])],
            };
            transfer + held.max(posted).max(arrive[rank])
        };
        let next_arrive: Vec<f64> = (0..ranks).map(arrives).collect();
        let starts = |rank: usize| {
            let next = (rank + 1) % ranks;
            let free = match buffering {
                Buffering::Two => next_arrive[next],
                Buffering::Three => arrive[next],
                Buffering::Ahead => 0.0,
            };
            (start[rank] + tiles[rank]).max(next_arrive[rank]).max(free)
        };
        let next_start = (0..ranks).map(starts).collect();
        last_start = std::mem::replace(&mut start, next_start);
        last_arrive = std::mem::replace(&mut arrive, next_arrive);
    }
    0.0
}

fn main() -> Result<(), String> {
    // without jitter, a step takes the longer one of tiles and transfer, and the last one its tiles
    for transfer in [0.5, 2.0] {
        for buffers in [Buffering::Two, Buffering::Three, Buffering::Ahead] {
            let got = makespan(16, buffers, transfer, Jitter::None, 0);
            let want = 15.0 * transfer.max(1.0) + 1.0;
            if (got - want).abs() > 1e-9 {
                return Err(format!("makespan {got} instead of {want}"));
            }
        }
    }
    println!("| transfer | jitter | alone | two buffers | three | less loss | ahead | less loss |");
    println!("|---|---|---|---|---|---|---|---|");
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
            let mean = |buffers| {
                let all = (0..SEEDS).map(|seed| makespan(RANKS, buffers, transfer, jitter, seed));
                all.sum::<f64>() / (SEEDS as f64 * RANKS as f64)
            };
            let alone = 1.0 + jitter.mean();
            let [two, three, ahead] =
                [Buffering::Two, Buffering::Three, Buffering::Ahead].map(mean);
            let removed = |time: f64| match two - alone {
                loss if loss > 1e-3 => format!("{:.0} %", (two - time) / loss * 100.0),
                _ => "–".to_owned(),
            };
            println!(
                "| {transfer} | {jitter} | {alone:.3} | {two:.3} | {three:.3} | {} \
                 | {ahead:.3} | {} |",
                removed(three),
                removed(ahead)
            );
        }
    }
    Ok(())
}
