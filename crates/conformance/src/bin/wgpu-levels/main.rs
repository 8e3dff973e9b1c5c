//! The speed of every level of a wgpu adapter, forward and backward, beside that of a plain matrix product in the same run. Prints JSON lines.
//!
//! ```text
//! wgpu-levels [device=0] [dims=64,128] [lens=4096,8192,16384,32768] [heads=16] [seconds=1] [roof=4096]
//! ```
//! Tensors stay on the device, and the device's own timestamps tell the time (`clock` says so; where it has none, the host's clock). FLOPs are useful
//! ones: forward 4·heads·len²·dim, half of it where the mask is causal; backward 2.5 times as many. `benches/wgpu-levels.sh` runs it.

mod pass;
mod roof;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use annulus::DType;
use annulus_core::{Error, Result};
use annulus_wgpu::{Gpu, Level, Options, Stopwatch};

/// What is measured.
struct Settings {
    device: usize,
    dims: Vec<usize>,
    lens: Vec<usize>,
    heads: usize,
    seconds: f64,
    roof: usize,
}

impl Settings {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self> {
        let mut all = Self { device: 0, dims: vec![64, 128], lens: vec![4096, 8192, 16384, 32768], heads: 16, seconds: 1.0, roof: 4096 };
        for word in words {
            let wrong = || Error::invalid("argument", &word, "device=, dims=, lens=, heads=, seconds= or roof=, and numbers");
            let (name, value) = word.split_once('=').ok_or_else(wrong)?;
            let numbers = || value.split(',').map(|number| number.parse().map_err(|_| wrong())).collect::<Result<Vec<usize>>>();
            let number = || value.parse::<usize>().map_err(|_| wrong());
            match name {
                "device" => all.device = number()?,
                "dims" => all.dims = numbers()?,
                "lens" => all.lens = numbers()?,
                "heads" => all.heads = number()?,
                "seconds" => all.seconds = value.parse().map_err(|_| wrong())?,
                "roof" => all.roof = number()?,
                _ => return Err(wrong()),
            }
        }
        Ok(all)
    }
}

/// The mean time of `work`, done again and again for about so many seconds, after one time that nobody looks at; and whose clock told it.
fn time(gpu: &Gpu, seconds: f64, mut work: impl FnMut() -> Result<()>) -> Result<(f64, &'static str)> {
    work()?;
    gpu.synchronize()?;
    let start = Instant::now();
    work()?;
    gpu.synchronize()?;
    let once = start.elapsed().max(Duration::from_micros(1)).as_secs_f64();
    let times = (seconds / once).ceil().clamp(1.0, 1000.0) as u32;
    let watch = Stopwatch::start(gpu)?;
    let start = Instant::now();
    (0..times).try_for_each(|_| work())?;
    gpu.synchronize()?;
    let host = start.elapsed();
    let (all, clock) = watch.map_or(Ok((host, "host")), |watch| watch.stop().map(|told| (told, "device")))?;
    Ok((all.as_secs_f64() / f64::from(times), clock))
}

/// The largest product up to n that one binding of the device holds.
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
    let (seconds, clock) = time(gpu, settings.seconds, || product.run())?;
    let rate = 2.0 * (size as f64).powi(3) / seconds / 1e12;
    println!(r#"{{"what":"matmul","dtype":"f32","len":{size},"seconds":{seconds:.6},"tflops":{rate:.5},"clock":"{clock}"}}"#);
    Ok(())
}

fn measure(settings: &Settings) -> Result<()> {
    let Some(adapter) = Gpu::list().into_iter().nth(settings.device) else {
        return Gpu::open(&Options { number: settings.device, ..Options::default() }).map(drop);
    };
    println!(r#"{{"device":{},"driver":{}}}"#, serde_json::json!(adapter.name), serde_json::json!(adapter.driver));
    let open = |level| Gpu::open(&Options { number: settings.device, level: Some(level), ..Options::default() });
    let plain = open(Level::Plain)?;
    print_roof(&plain, settings)?;
    for (&dim, &len) in settings.dims.iter().flat_map(|dim| settings.lens.iter().map(move |len| (dim, len))) {
        for (dtype, causal) in [DType::F32, DType::F16].into_iter().flat_map(|dtype| [false, true].map(|causal| (dtype, causal))) {
            // the levels take turns, so that what changes meanwhile meets them all
            for &level in adapter.levels.iter().filter(|&&level| level != Level::Matrix || dtype == DType::F16) {
                let gpu = open(level)?;
                let mut pass = pass::Pass::new(&gpu, settings.heads, len, dim, dtype, causal)?;
                let forward = 4.0 * settings.heads as f64 * (len as f64).powi(2) * dim as f64 / if causal { 2.0 } else { 1.0 };
                for (what, flops) in [("forward", forward), ("backward", 2.5 * forward)] {
                    let (seconds, clock) =
                        time(&gpu, settings.seconds, || if what == "forward" { pass.forward() } else { pass.backward() })?;
                    println!(
                        r#"{{"what":"{what}","level":"{}","dtype":"{dtype}","dim":{dim},"len":{len},"causal":{causal},"seconds":{seconds:.6},"tflops":{:.5},"clock":"{clock}"}}"#,
                        level.name(),
                        flops / seconds / 1e12
                    );
                }
            }
        }
    }
    // whether the machine was the same at the end
    print_roof(&plain, settings)
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
