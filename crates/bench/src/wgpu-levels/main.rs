//! Speed and correctness of every level of a wgpu adapter, forward and backward. Prints JSON lines.
//! `scripts/wgpu-lease` runs it. A software adapter (`scripts/with-lavapipe`) needs smaller sizes,
//! such as `lens=256 heads=1 roof=256`.
//!
//! ```text
//! wgpu-levels [device=0] [levels=plain,matrix] [dtypes=f32,f16] [dims=64,128]
//!             [lens=4096,8192,16384,32768] [heads=16] [seconds=2] [rounds=7] [roof=4096]
//!             [query_tiles=32,64]
//! wgpu-levels verify=1 [device=0] [levels=plain,matrix] [dtypes=f32,bf16,f16]
//!             [dims=64,128,256] [lens=4099] [heads=8] [masks=full,causal,window,gqa,cross]
//!             [mistake=0] [query_tiles=32,64]
//! ```
//! Levels are those of the adapter, unless some of them are named. With `query_tiles` each level
//! runs once for each of these numbers of queries in a tile of forward, as levels of their own;
//! `query_tiles=32,64 levels=matrix` compares both.
//!
//! **Times.** Levels are timed beside a plain matrix product in the same run.
//! Tensors stay on the device. Time is measured by the device's timestamps, or by the host's clock
//! if it has none (field `clock`). The levels alternate, round by round. `seconds` is the median of
//! the rounds; `speedup` is the median of the rounds' ratios to the level below, so a level is
//! faster than the one below if it is above 1. For a software adapter, `cpu_seconds` and
//! `cpu_speedup` are the same for the CPU time of the process. Useful FLOPs: forward
//! 4·heads·len²·dim, half of that with a causal mask; backward 2.5 times as many.
//!
//! **verify** compares each level with the CPU backend in f32, from the same inputs, for tensors in
//! host memory: the relative error of out, dq, dk and dv stays below 2·10⁻⁵ (f32), 5·10⁻³ (bf16) or
//! 10⁻³ (f16), and of lse below 10⁻⁴. The error of a row, relative to the largest row, stays below
//! twice as much. A second pass has the same bits. The exit status is 1 if a check fails. With
//! `mistake=1` the window of the reference is one key too long, which must be found.

mod pass;
mod roof;

use std::process::ExitCode;

use annulus::DType;
use annulus_bench::{
    Parameters, median, {SHAPES, Verification},
};
use annulus_core::{Error, Result};
use annulus_wgpu::{Gpu, Level, Options, QueryTileSize};
use serde_json::{Value, json};

use pass::{Passes, Problem, What};
use roof::{Took, repetitions, time};

/// Problems and durations of the measurement.
struct Settings {
    device: usize,
    /// Names of levels; empty for all levels of the adapter.
    levels: Vec<Level>,
    /// Queries of a tile of forward; empty for those that the backend chooses.
    query_tiles: Vec<QueryTileSize>,
    dtypes: Vec<DType>,
    dims: Vec<usize>,
    lens: Vec<usize>,
    heads: usize,
    /// Seconds per level and pass, over all rounds.
    seconds: f64,
    rounds: usize,
    roof: usize,
    verify: bool,
    masks: Vec<&'static str>,
    mistake: u64,
}

impl Settings {
    const NAMES: [&str; 13] = [
        "device",
        "levels",
        "query_tiles",
        "dtypes",
        "dims",
        "lens",
        "heads",
        "seconds",
        "rounds",
        "roof",
        "verify",
        "masks",
        "mistake",
    ];

    fn parse(words: impl Iterator<Item = String>) -> Result<Self> {
        let given = Parameters::parse(words, &Self::NAMES)?;
        let verify = given.number("verify", 0)? == 1;
        let (dtypes, dims, lens, heads) = if verify {
            ("f32,bf16,f16", "64,128,256", "4099", 8)
        } else {
            ("f32,f16", "64,128", "4096,8192,16384,32768", 16)
        };
        Ok(Self {
            device: given.number("device", 0)?,
            levels: given.named("levels", "", Level::ALL, Level::name)?,
            query_tiles: given.named("query_tiles", "", QueryTileSize::ALL, QueryTileSize::name)?,
            dtypes: given.dtypes(dtypes)?,
            dims: given.numbers("dims", dims)?,
            lens: given.numbers("lens", lens)?,
            heads: given.number("heads", heads)?,
            seconds: given.number("seconds", 2.0)?,
            rounds: given.count("rounds", 7)?,
            roof: given.number("roof", 4096)?,
            verify,
            masks: given.named("masks", &SHAPES.join(","), SHAPES, |mask| mask)?,
            mistake: given.number("mistake", 0)?,
        })
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
    for (plan, (level, gpu)) in levels.iter().enumerate() {
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
        if let Some(line) = line.as_object_mut().filter(|_| !settings.query_tiles.is_empty()) {
            line.insert("query_tile".into(), json!(gpu.query_tile().name()));
        }
        if let Some(line) = line.as_object_mut().filter(|_| software) {
            line.insert("cpu_seconds".into(), rounded(of(|took| took.cpu)));
            line.insert("cpu_speedup".into(), json!(speedup(|took| took.cpu).map(rounded)));
        }
        println!("{line}");
    }
    Ok(())
}

/// Measures or verifies; false if a result is wrong.
fn run(settings: &Settings) -> Result<bool> {
    let Some(adapter) = Gpu::list().into_iter().nth(settings.device) else {
        return Gpu::open(&Options { number: settings.device, ..Options::default() })
            .map(|_| false);
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
    let wanted = |level: &&Level| settings.levels.is_empty() || settings.levels.contains(level);
    let levels: Vec<Level> = adapter.levels.iter().filter(wanted).copied().collect();
    if let Some(missing) = settings.levels.iter().find(|level| !levels.contains(level)) {
        return Err(Error::unsupported(format!("level {}", missing.name()), &adapter.name));
    }
    // one device for all levels, opened for the highest
    let highest = levels.last().copied();
    let device =
        Gpu::open(&Options { number: settings.device, level: highest, ..Options::default() })?;
    let gpus = at_levels(&device, &levels, &settings.query_tiles)?;
    if settings.verify {
        verify_all(&gpus, settings)
    } else {
        measure(&gpus, &device, settings, adapter.software).map(|()| true)
    }
}

/// Returns the device at these levels, at each with each of the query tiles, if any.
fn at_levels(
    device: &Gpu,
    levels: &[Level],
    query_tiles: &[QueryTileSize],
) -> Result<Vec<(Level, Gpu)>> {
    let mut all = Vec::new();
    for &level in levels {
        let gpu = device.at(level)?;
        for &tile in query_tiles {
            all.push((level, gpu.with_query_tile(tile)?));
        }
        if query_tiles.is_empty() {
            all.push((level, gpu));
        }
    }
    Ok(all)
}

/// Verifies all levels; false if a result is wrong.
fn verify_all(gpus: &[(Level, Gpu)], settings: &Settings) -> Result<bool> {
    let Settings { heads, masks, mistake, .. } = settings;
    let mut all_right = true;
    for &dtype in &settings.dtypes {
        for (&dim, &len) in
            settings.dims.iter().flat_map(|dim| settings.lens.iter().map(move |len| (dim, len)))
        {
            for (level, gpu) in gpus {
                if *level == Level::Matrix && dtype != DType::F16 {
                    continue;
                }
                let (heads, mistake) = (*heads, *mistake);
                let problem = Verification { dtype, len, heads, dim, masks, mistake };
                all_right &= pass::verify(gpu, &problem)?;
            }
        }
    }
    Ok(all_right)
}

/// Times all levels.
fn measure(gpus: &[(Level, Gpu)], device: &Gpu, settings: &Settings, software: bool) -> Result<()> {
    print_roof(device, settings)?;
    for (&dim, &len) in
        settings.dims.iter().flat_map(|dim| settings.lens.iter().map(move |len| (dim, len)))
    {
        for (dtype, causal) in settings
            .dtypes
            .iter()
            .copied()
            .flat_map(|dtype| [false, true].map(|causal| (dtype, causal)))
        {
            let problem = Problem { heads: settings.heads, len, dim, dtype, causal };
            let levels =
                gpus.iter().filter(|(level, _)| *level != Level::Matrix || dtype == DType::F16);
            let levels: Vec<(Level, &Gpu)> = levels.map(|(level, gpu)| (*level, gpu)).collect();
            let of_levels: Vec<&Gpu> = levels.iter().map(|(_, gpu)| *gpu).collect();
            let mut passes = Passes::new(&of_levels, &problem)?;
            for what in [What::Forward, What::Backward] {
                compare(&levels, &mut passes, &problem, what, settings, software)?;
            }
        }
    }
    // shows a drift of the machine during the run
    print_roof(device, settings)
}

fn main() -> ExitCode {
    match Settings::parse(std::env::args().skip(1)).and_then(|settings| run(&settings)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("wgpu-levels: a result is wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("wgpu-levels: {error}");
            ExitCode::FAILURE
        }
    }
}
