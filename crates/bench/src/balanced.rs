//! Measures the balanced layout of packed documents: its balance, the rows that it sends, and the
//! time of the solver relative to the pass that it serves.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin balanced -- gflops=45 seed=7
//! ```
//!
//! Prints one JSON line per distribution of lengths and number of ranks, for 2²⁰ rows of 32 heads
//! of dim 128. `gflops` is the rate of a rank, from which the time of a forward and a backward pass
//! is predicted; `seed` draws the lengths (default: 7). `benches/packed.py` measures the
//! rate of packed passes.

use std::time::Instant;

use annulus::{Attention, Batch, Dims, Error, Result};
use annulus_core::{Choice, NeedsIndex, RingShards, RingTraffic, Side, Work};
use rustix::time::{ClockId, clock_gettime};

const ROWS: usize = 1 << 20;
const HEADS: usize = 32;
const DIM: usize = 128;
/// Operations per visible pair and element of a head: 2 products forward, 5 backward.
const FLOPS: f64 = 2.0 * 7.0;

fn main() -> Result<()> {
    let mut gflops: f64 = 45.0;
    let mut seed = 7;
    for given in std::env::args().skip(1) {
        let parsed = match given.split_once('=') {
            Some(("gflops", rate)) => rate.parse().map(|rate| gflops = rate).ok(),
            Some(("seed", number)) => number.parse().map(|number| seed = number).ok(),
            _ => None,
        };
        parsed.ok_or_else(|| Error::invalid("argument", given, "gflops=NUMBER or seed=NUMBER"))?;
    }
    for (name, lens) in distributions(ROWS, seed) {
        for ranks in [8, 16, 64] {
            solver(name, &lens, ranks, gflops * 1e9)?;
        }
    }
    Ok(())
}

/// Returns the lengths of documents of `rows` rows, by distribution.
fn distributions(rows: usize, seed: u64) -> [(&'static str, Vec<usize>); 4] {
    let normal = |uniform: &mut dyn FnMut() -> f64| {
        (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    };
    let mut one_long = vec![rows / 3];
    one_long.extend(documents(rows - rows / 3, seed, |uniform| 50.0 + 400.0 * uniform()));
    [
        ("log-normal", documents(rows, seed, |uniform| (6.5 + 1.2 * normal(uniform)).exp())),
        ("Zipf", documents(rows, seed, |uniform| 64.0 / (1.0 - uniform()).powf(1.0 / 1.2))),
        (
            "bimodal",
            documents(rows, seed, |u| if u() < 0.8 { 100.0 + 300.0 * u() } else { 4096.0 }),
        ),
        ("one long", one_long),
    ]
}

/// Draws lengths until they fill `rows` rows, from uniform numbers in 0..1.
fn documents(
    rows: usize,
    seed: u64,
    mut draw: impl FnMut(&mut dyn FnMut() -> f64) -> f64,
) -> Vec<usize> {
    let mut state = seed;
    let mut uniform = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let mut lens = Vec::new();
    let mut rest = rows;
    while rest > 0 {
        let next = (draw(&mut uniform) as usize).clamp(1, rest);
        lens.push(next);
        rest -= next;
    }
    lens
}

fn packed(lens: &[usize]) -> Batch {
    let ends = lens.iter().scan(0i64, |end, &len| {
        *end += len as i64;
        Some(*end)
    });
    Batch { cum_seqlens_q: Some(std::iter::once(0).chain(ends).collect()), ..Batch::default() }
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Visible pairs of one head.
fn pairs_of(lens: &[usize]) -> f64 {
    lens.iter().map(|&len| len as f64 * (len + 1) as f64 / 2.0).sum()
}

/// Measures the solver against the time of a pass at `rate` operations per second of each rank.
fn solver(name: &str, lens: &[usize], ranks: usize, rate: f64) -> Result<()> {
    let rows = lens.iter().sum();
    let dims = Dims::new(1, rows, HEADS, DIM);
    let spec = Attention::new().causal(true).spec(dims)?;
    let documents = packed(lens);
    let mut seconds = Vec::new();
    let mut chosen = Choice::balanced(&spec, &documents, ranks)?;
    for _ in 0..3 {
        let begin = cpu_seconds();
        let wall = Instant::now();
        chosen = Choice::balanced(&spec, &documents, ranks)?;
        // the clock of CPU time may have a coarser unit than the solver takes
        let cpu = cpu_seconds() - begin;
        seconds.push(if cpu > 0.0 { cpu } else { wall.elapsed().as_secs_f64() });
    }
    let seconds = median(&mut seconds);
    let Choice { layout, route, .. } = chosen;
    let shards = RingShards::of_batch(&dims, spec.alignment, &layout, ranks, &documents)?;
    let work = Work::of(&*spec.mask, dims.q_heads, 1, &shards).max_over_mean();
    let most = (0..ranks).map(|rank| layout.shard(Side::Q, rows, rank, ranks).len()).max();
    let balance = most.unwrap_or_default() as f64 * ranks as f64 / rows as f64;
    let tick = &mut || ();
    let needs = NeedsIndex::of_queries(&*spec.mask, dims.q_heads, 1, &shards, tick);
    let sent = RingTraffic::of(&needs, route, tick).total().block_rows;
    let redundancy = sent as f64 / RingTraffic::rows_read(&needs, tick).max(1) as f64;
    let pass = FLOPS * (HEADS * DIM) as f64 * pairs_of(lens) / (rate * ranks as f64);
    println!(
        "{{\"what\":\"balanced\",\"documents\":\"{name}\",\"count\":{},\"rows\":{rows},\
         \"ranks\":{ranks},\"runs\":{},\"work_max_over_mean\":{work:.4},\
         \"rows_max_over_mean\":{balance:.4},\"redundancy\":{redundancy:.3},\
         \"seconds\":{seconds:.6},\"pass_seconds\":{pass:.2},\"share\":{:.6}}}",
        lens.len(),
        shards.q.iter().map(|shard| shard.rows.runs().len()).sum::<usize>(),
        seconds / pass
    );
    Ok(())
}
