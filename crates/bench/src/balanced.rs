//! Measures packed documents on the balanced layout: the time of the solver relative to a pass, and
//! the rate of packed passes relative to the same documents one by one.
//!
//! ```text
//! cargo run --release -p annulus-bench --features plan --bin packed -- rows=16384 heads=4 pairs=5
//! ```
//!
//! Prints one JSON line per distribution of lengths and number of ranks.
//!
//! * `"what":"rate"`: forward and backward of all documents packed on 2 and 4 ranks of one thread
//!   (a), and of each document alone on one rank (b), in turns. `ratio` is the median of CPU time b
//!   / CPU time a over `pairs` pairs: 1 if packing costs nothing. CPU time, because the ranks may
//!   share cores with other programs.
//! * `"what":"solver"`: balance and time of the layout of 2²⁰ rows on 8, 16 and 64 ranks, and the
//!   predicted time of a forward and backward pass of 32 heads of dim 128 at the rate per core that
//!   the documents alone have reached.

use std::time::Instant;

use annulus::{Attention, Batch, Dims, LocalRing, Result, Tensors};
use annulus_core::{Choice, NeedsIndex, RingShards, RingTraffic, Side, Spec, Work};
use ndarray::{Array4, Axis, Slice};
use rustix::time::{ClockId, clock_gettime};

const DIM: usize = 64;
/// Floating-point operations per visible pair and element of a head: 2 products forward, 5 backward.
const FLOPS: f64 = 2.0 * 7.0;

fn main() -> Result<()> {
    let argument = |name: &str, default: usize| {
        let value = std::env::args().find_map(|given| {
            given.strip_prefix(&format!("{name}=")).and_then(|value| value.parse().ok())
        });
        value.unwrap_or(default)
    };
    let (rows, heads) = (argument("rows", 16_384), argument("heads", 4));
    let pairs = argument("pairs", 5).max(1);
    let mut rates = Vec::new();
    for (name, lens) in distributions(rows) {
        for ranks in [2, 4] {
            rates.push(rate(name, &lens, heads, ranks, pairs)?);
        }
    }
    for (name, lens) in distributions(1 << 20) {
        for ranks in [8, 16, 64] {
            solver(name, &lens, ranks, median(&mut rates))?;
        }
    }
    Ok(())
}

/// Returns the lengths of documents of `rows` rows, by distribution.
fn distributions(rows: usize) -> [(&'static str, Vec<usize>); 4] {
    let normal = |uniform: &mut dyn FnMut() -> f64| {
        (-2.0 * (1.0 - uniform()).ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()
    };
    let mut one_long = vec![rows / 3];
    one_long.extend(documents(rows - rows / 3, |uniform| 50.0 + 400.0 * uniform()));
    [
        ("log-normal", documents(rows, |uniform| (6.5 + 1.2 * normal(uniform)).exp())),
        ("Zipf", documents(rows, |uniform| 64.0 / (1.0 - uniform()).powf(1.0 / 1.2))),
        ("bimodal", documents(rows, |u| if u() < 0.8 { 100.0 + 300.0 * u() } else { 4096.0 })),
        ("one long", one_long),
    ]
}

/// Draws lengths until they fill `rows` rows, from uniform numbers in 0..1.
fn documents(rows: usize, mut draw: impl FnMut(&mut dyn FnMut() -> f64) -> f64) -> Vec<usize> {
    let mut state = 7u64;
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

/// Runs both passes and returns their CPU time.
fn both_passes(ring: &mut LocalRing, tensors: &Tensors<'_, f32>) -> Result<f64> {
    let begin = cpu_seconds();
    let forward = ring.forward(tensors)?;
    ring.backward(tensors, &forward, tensors.q, None)?;
    Ok(cpu_seconds() - begin)
}

/// Measures packed passes against those of each document, and returns the rate of the latter in
/// operations per second of one core.
fn rate(name: &str, lens: &[usize], heads: usize, ranks: usize, pairs: usize) -> Result<f64> {
    let rows = lens.iter().sum();
    let x = Array4::<f32>::from_shape_fn((1, rows, heads, DIM), |(_, i, h, c)| {
        ((i * 31 + h * 17 + c * 7) % 97) as f32 / 97.0 - 0.5
    });
    let dims = Dims::new(1, rows, heads, DIM);
    let documents = packed(lens);
    let causal = Attention::new().causal(true).threads(1);
    let mut ring = causal.clone().balanced(dims, &documents, ranks)?.local_ring(dims, ranks)?;
    ring.update(&documents)?;
    let whole = Tensors::new(x.view(), x.view(), x.view());
    // a plan of one rank for each length
    let mut lengths = lens.to_vec();
    lengths.sort_unstable();
    lengths.dedup();
    let plan = |&len: &usize| causal.local_ring(Dims::new(1, len, heads, DIM), 1);
    let mut alone = lengths.iter().map(plan).collect::<Result<Vec<_>>>()?;
    let mut one_by_one = || -> Result<f64> {
        let (mut seconds, mut start) = (0.0, 0);
        for len in lens {
            let document = x.slice_axis(Axis(1), Slice::from(start..start + len));
            let tensors = Tensors::new(document, document, document);
            let index = lengths.partition_point(|length| length < len);
            seconds += both_passes(&mut alone[index], &tensors)?;
            start += len;
        }
        Ok(seconds)
    };
    both_passes(&mut ring, &whole)?;
    one_by_one()?;
    let (mut ratios, mut rates) = (Vec::new(), Vec::new());
    let operations = FLOPS * (heads * DIM) as f64 * pairs_of(lens);
    for _ in 0..pairs {
        let together = both_passes(&mut ring, &whole)?;
        let apart = one_by_one()?;
        ratios.push(apart / together);
        rates.push(operations / apart);
    }
    let ratio = median(&mut ratios);
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    let rate = median(&mut rates);
    println!(
        "{{\"what\":\"rate\",\"documents\":\"{name}\",\"count\":{},\"rows\":{rows},\
         \"heads\":{heads},\"dim\":{DIM},\"ranks\":{ranks},\"ratio\":{ratio:.3},\
         \"least\":{least:.3},\"most\":{most:.3},\"gflops_alone\":{:.1}}}",
        lens.len(),
        rate / 1e9
    );
    Ok(rate)
}

/// Measures the solver against the time of a pass at `rate` operations per second of each rank.
fn solver(name: &str, lens: &[usize], ranks: usize, rate: f64) -> Result<()> {
    let rows = lens.iter().sum();
    let dims = Dims::new(1, rows, 32, 128);
    let spec: Spec = Attention::new().causal(true).spec(dims)?;
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
    let pass = FLOPS * (32 * 128) as f64 * pairs_of(lens) / (rate * ranks as f64);
    println!(
        "{{\"what\":\"solver\",\"documents\":\"{name}\",\"count\":{},\"rows\":{rows},\
         \"ranks\":{ranks},\"runs\":{},\"work_max_over_mean\":{work:.4},\
         \"rows_max_over_mean\":{balance:.4},\"redundancy\":{redundancy:.3},\
         \"seconds\":{seconds:.6},\"pass_seconds\":{pass:.2},\"share\":{:.6}}}",
        lens.len(),
        shards.q.iter().map(|shard| shard.rows.runs().len()).sum::<usize>(),
        seconds / pass
    );
    Ok(())
}
