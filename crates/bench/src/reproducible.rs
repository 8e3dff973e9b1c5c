//! Measures what the reproducible order costs: CPU time of a forward and of a backward pass,
//! relative to the free order.
//!
//! ```text
//! cargo run --release -p annulus-bench --features cpu --bin reproducible -- \
//!     pairs=21 n=4096 heads=8 d=64 ranks=4 causal=false
//! ```
//!
//! One process holds a plan of each order and runs passes of both in turns, first one, then the
//! other order first, so that other load on a shared machine affects both alike. Prints one JSON
//! line per pass: median and quartiles of the ratios of all pairs, and the ratio of the least
//! times. A first pair is not counted. With `backward=false`, plans are made for forward passes
//! only. Ranks are threads of this process, with one thread each.

use annulus::{Attention, Cpu, Dims, Error, LocalRing, Plan, Result, Tensors};
use ndarray::Array4;
use rustix::time::{ClockId, clock_gettime};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let known = ["pairs", "n", "heads", "d", "ranks", "causal", "backward"];
    for argument in &arguments {
        let name = argument.split_once('=').map_or("", |(name, _)| name);
        if !known.contains(&name) {
            let want = known.map(|name| format!("{name}=…")).join(", ");
            return Err(Error::invalid("argument", argument.clone(), want));
        }
    }
    let find = |name: &str| {
        arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='))
    };
    let number = |name: &'static str, otherwise: usize| match find(name) {
        Some(text) => text
            .parse()
            .ok()
            .filter(|&number| number > 0)
            .ok_or_else(|| Error::invalid(name, text, "a number of at least 1")),
        None => Ok(otherwise),
    };
    let flag = |name: &'static str, otherwise: bool| match find(name) {
        Some(text) => text.parse().map_err(|_| Error::invalid(name, text, "true or false")),
        None => Ok(otherwise),
    };
    let pairs = number("pairs", 21)?;
    let ranks = number("ranks", 1)?;
    let backward = flag("backward", true)?;
    let causal = flag("causal", false)?;
    let dims = Dims::new(1, number("n", 4096)?, number("heads", 8)?, number("d", 64)?);

    let times = measure(dims, ranks, pairs, causal, backward)?;
    for (name, [free, reproducible]) in ["forward", "backward"].into_iter().zip(&times) {
        if free.is_empty() {
            continue;
        }
        let mut ratios: Vec<f64> = free.iter().zip(reproducible).map(|(a, b)| b / a).collect();
        ratios.sort_by(f64::total_cmp);
        let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
        let line = serde_json::json!({
            "pass": name,
            "n": dims.q_len,
            "heads": dims.q_heads,
            "d": dims.head_dim,
            "ranks": ranks,
            "causal": causal,
            "pairs": pairs,
            "ratio": ratios[pairs / 2],
            "quartiles": [ratios[pairs / 4], ratios[3 * pairs / 4]],
            "ratio_least": least(reproducible) / least(free),
            "seconds_least": least(reproducible),
        });
        println!("{line}");
    }
    Ok(())
}

/// Returns CPU times in seconds: of forward and backward passes, in the free and in the
/// reproducible order, by pair.
fn measure(
    dims: Dims,
    ranks: usize,
    pairs: usize,
    causal: bool,
    backward: bool,
) -> Result<[[Vec<f64>; 2]; 2]> {
    let mut state = 12_345u64;
    let mut normal = || {
        // a sum of four uniform numbers, of variance 1
        let uniform = std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        });
        uniform.take(4).sum::<f32>() * 3f32.sqrt()
    };
    let mut tensor =
        || Array4::from_shape_simple_fn((1, dims.q_len, dims.q_heads, dims.head_dim), &mut normal);
    let [q, k, v, dout] = [tensor(), tensor(), tensor(), tensor()];
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let plan = |reproducible| {
        let attention =
            Attention::new().causal(causal).reproducible(reproducible).forward_only(!backward);
        LocalRing::from_plans(&attention, dims, ranks, |_, setup, endpoint| {
            Plan::with_backend(setup, dims, Cpu::new(1)?, endpoint)
        })
    };
    let mut plans = [plan(false)?, plan(true)?];
    let mut times = <[[Vec<f64>; 2]; 2]>::default();
    for pair in 0..=pairs {
        let orders = if pair % 2 == 0 { [0, 1] } else { [1, 0] };
        for order in orders {
            let plan = &mut plans[order];
            let start = cpu_seconds();
            let forward = plan.forward(&tensors)?;
            let middle = cpu_seconds();
            if backward {
                plan.backward(&tensors, &forward, dout.view(), None)?;
            }
            let end = cpu_seconds();
            // the first pass of a plan allocates its workspace
            if pair > 0 {
                times[0][order].push(middle - start);
                if backward {
                    times[1][order].push(end - middle);
                }
            }
        }
    }
    Ok(times)
}

/// Returns the CPU time of all threads of this process.
fn cpu_seconds() -> f64 {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    cpu.tv_sec as f64 + cpu.tv_nsec as f64 * 1e-9
}
