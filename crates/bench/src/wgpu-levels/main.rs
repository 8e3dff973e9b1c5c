//! Times forward and backward passes at every level of a wgpu adapter, beside a plain matrix
//! product in the same run. Prints JSON lines. `benches/wgpu-levels.sh` runs it.
//!
//! ```text
//! wgpu-levels [device=0] [dims=64,128] [lens=4096,8192,16384,32768] [heads=16] [seconds=2]
//!             [rounds=7] [roof=4096]
//! ```
//! Tensors stay on the device. Time is measured by the device's timestamps, or by the host's clock
//! if it has none (field `clock`). The levels alternate, round by round. `seconds` is the median of
//! the rounds; `speedup` is the median of the rounds' ratios to the level below, so a level is
//! faster than the one below if it is above 1. For a software adapter, `cpu_seconds` and
//! `cpu_speedup` are the same for the CPU time of the process. Useful FLOPs: forward
//! 4·heads·len²·dim, half of that with a causal mask; backward 2.5 times as many.

mod clock;
mod pass;
mod roof;

use std::process::ExitCode;

use annulus::DType;
use annulus_core::{Error, Result};
use annulus_wgpu::{Gpu, Level, Options};
use serde_json::{Value, json};

use clock::{Took, median, repetitions, time};
use pass::{Passes, Problem, What};

/// Problems and durations of the measurement.
struct Settings {
    device: usize,
    dims: Vec<usize>,
    lens: Vec<usize>,
    heads: usize,
    /// Seconds per level and pass, over all rounds.
    seconds: f64,
    rounds: usize,
    roof: usize,
}

impl Settings {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self> {
        let lens = vec![4096, 8192, 16384, 32768];
        let mut all = Self {
            device: 0,
            dims: vec![64, 128],
            lens,
            heads: 16,
            seconds: 2.0,
            rounds: 7,
            roof: 4096,
        };
        for word in words {
            let wrong = || {
                Error::invalid(
                    "argument",
                    &word,
                    "device=, dims=, lens=, heads=, seconds=, rounds= or roof=, and numbers",
                )
            };
            let (name, value) = word.split_once('=').ok_or_else(wrong)?;
            let numbers = || {
                value
                    .split(',')
                    .map(|number| number.parse().map_err(|_| wrong()))
                    .collect::<Result<Vec<usize>>>()
            };
            let number = || value.parse::<usize>().map_err(|_| wrong());
            match name {
                "device" => all.device = number()?,
                "dims" => all.dims = numbers()?,
                "lens" => all.lens = numbers()?,
                "heads" => all.heads = number()?,
                "seconds" => all.seconds = value.parse().map_err(|_| wrong())?,
                "rounds" => all.rounds = number()?.max(1),
                "roof" => all.roof = number()?,
                _ => return Err(wrong()),
            }
        }
        Ok(all)
    }
}

/// Returns the largest size up to `most` whose matrices fit a binding of the device.
fn roof_size(gpu: &Gpu, most: usize) -> usize {
    let bytes = gpu.device().limits().max_storage_buffer_binding_size;
    let mut size = most.max(64) / 64 * 64;
    while size > 64 && (size * size * 4) as u64 > bytes {
        size -= 64;
    }
    size
}

fn print_roof(gpu: &Gpu, settings: &Settings) -> Result<()> {
    let size = roof_size(gpu, settings.roof);
    let product = roof::Product::new(gpu, size)?;
    let times = repetitions(gpu, settings.seconds, || product.run())?;
    let Took { seconds, clock, .. } = time(gpu, times, || product.run())?;
    let tflops = 2.0 * (size as f64).powi(3) / seconds / 1e12;
    println!(
        "{}",
        json!({
            "what": "matmul",
            "dtype": "f32",
            "len": size,
            "seconds": rounded(seconds),
            "tflops": rounded(tflops),
            "clock": clock,
        })
    );
    Ok(())
}

/// Rounds to six decimal places.
fn rounded(number: f64) -> Value {
    if number.is_finite() { json!((number * 1e6).round() / 1e6) } else { Value::Null }
}

/// Times one pass of a problem at all levels, round by round; prints one line per level.
fn compare(
    levels: &[(Level, &Gpu)],
    passes: &mut Passes,
    problem: &Problem,
    what: What,
    settings: &Settings,
    software: bool,
) -> Result<()> {
    let each = settings.seconds / settings.rounds as f64;
    let times = levels
        .iter()
        .enumerate()
        .map(|(plan, (_, gpu))| repetitions(gpu, each, || passes.run(plan, what)));
    let times = times.collect::<Result<Vec<_>>>()?;
    let mut took: Vec<Vec<Took>> = vec![Vec::new(); levels.len()];
    for round in 0..settings.rounds {
        // alternating direction, so that a drift of the machine affects all levels alike
        let order = (0..levels.len())
            .map(|index| if round % 2 == 0 { index } else { levels.len() - 1 - index });
        for plan in order {
            took[plan].push(time(levels[plan].1, times[plan], || passes.run(plan, what))?);
        }
    }
    let (name, factor) = if what == What::Forward { ("forward", 1.0) } else { ("backward", 2.5) };
    for (plan, (level, _)) in levels.iter().enumerate() {
        let of = |which: fn(&Took) -> f64| median(took[plan].iter().map(which).collect());
        // median of the rounds' ratios
        let speedup = |which: fn(&Took) -> f64| {
            let below = plan.checked_sub(1)?;
            Some(median(
                took[below]
                    .iter()
                    .zip(&took[plan])
                    .map(|(below, own)| which(below) / which(own))
                    .collect(),
            ))
        };
        let seconds = of(|took| took.seconds);
        let flops = factor * problem.forward_flops();
        let mut line = json!({
            "what": name,
            "level": level.name(),
            "dtype": problem.dtype.name(),
            "dim": problem.dim,
            "len": problem.len,
            "causal": problem.causal,
            "seconds": rounded(seconds),
            "tflops": rounded(flops / seconds / 1e12),
            "speedup": speedup(|took| took.seconds).map(rounded),
            "clock": took[plan].first().map(|took| took.clock),
        });
        if let Some(line) = line.as_object_mut().filter(|_| software) {
            line.insert("cpu_seconds".into(), rounded(of(|took| took.cpu)));
            line.insert("cpu_speedup".into(), json!(speedup(|took| took.cpu).map(rounded)));
        }
        println!("{line}");
    }
    Ok(())
}

fn measure(settings: &Settings) -> Result<()> {
    let Some(adapter) = Gpu::list().into_iter().nth(settings.device) else {
        return Gpu::open(&Options { number: settings.device, ..Options::default() }).map(drop);
    };
    println!(
        "{}",
        json!({
            "device": adapter.name,
            "driver": adapter.driver,
            "subgroups": adapter.subgroups,
            "chosen": adapter.chosen.name(),
            "rounds": settings.rounds,
        })
    );
    // one device for all levels, opened for the highest
    let highest = adapter.levels.last().copied();
    let device =
        Gpu::open(&Options { number: settings.device, level: highest, ..Options::default() })?;
    let gpus = adapter
        .levels
        .iter()
        .map(|&level| Ok((level, device.at(level)?)))
        .collect::<Result<Vec<_>>>()?;
    print_roof(&device, settings)?;
    for (&dim, &len) in
        settings.dims.iter().flat_map(|dim| settings.lens.iter().map(move |len| (dim, len)))
    {
        for (dtype, causal) in [DType::F32, DType::F16]
            .into_iter()
            .flat_map(|dtype| [false, true].map(|causal| (dtype, causal)))
        {
            let problem = Problem { heads: settings.heads, len, dim, dtype, causal };
            let levels =
                gpus.iter().filter(|(level, _)| *level != Level::Matrix || dtype == DType::F16);
            let levels: Vec<(Level, &Gpu)> = levels.map(|(level, gpu)| (*level, gpu)).collect();
            let of_levels: Vec<&Gpu> = levels.iter().map(|(_, gpu)| *gpu).collect();
            let mut passes = Passes::new(&of_levels, &problem)?;
            for what in [What::Forward, What::Backward] {
                compare(&levels, &mut passes, &problem, what, settings, adapter.software)?;
            }
        }
    }
    // shows a drift of the machine during the run
    print_roof(&device, settings)
}

fn main() -> ExitCode {
    match Settings::parse(std::env::args().skip(1)).and_then(|settings| measure(&settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wgpu-levels: {error}");
            ExitCode::FAILURE
        }
    }
}
