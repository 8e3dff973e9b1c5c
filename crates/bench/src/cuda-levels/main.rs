//! Speed and correctness of the CUDA backend on one GPU, forward and backward. Prints JSON lines.
//!
//! ```text
//! cuda-levels [device=0] [levels=matrix] [dtypes=bf16,f16,f32] [dims=64,128] [lens=8192,16384]
//!             [heads=16] [batch=4] [rounds=10] [causal=0,1]
//! cuda-levels queries=1 [kv_heads=8] [lens=131072] …        decoding: forward only
//! cuda-levels verify=1 [device=0] [levels=matrix] [dtypes=bf16,f16] [dims=64,128,256] [lens=4099]
//!             [heads=8] [masks=full,causal,window,gqa,cross,cap,decode] [mistake=0]
//! cuda-levels compile=9.0 [cubins=FOLDER] [dtypes=bf16] [dims=64,128]
//! ```
//! Inputs are normally distributed, and tensors stay on the device.
//!
//! * **Times.** A pass is one call of a ring of one rank, by the host's clock, with the device idle
//!   before and after: `pass_ms`. `kernel_ms` is the time of each kernel by the device's clock, in
//!   further passes. Both are medians of `rounds` (at least 10); the levels alternate. FLOPs are
//!   useful ones: forward 4·batch·heads·len²·dim, half of it for a causal mask; backward 2.5 times
//!   as many. With `queries` there are fewer queries than keys, no mask and no backward pass, and
//!   `gbps` is the rate at which keys and values are read, in GB/s.
//!   Level `warpgroup-tiles` is `warpgroup` with a thread block for each tile of a forward launch,
//!   instead of one for each multiprocessor.
//! * **verify** compares each level with level `plain` in f32 from the same inputs rounded to 16
//!   bits: the relative error of out, dq, dk and dv stays below 5·10⁻³ (bf16) or 10⁻³ (f16), and of
//!   lse below 10⁻⁴. The error of a row, relative to the largest row, stays below twice as much. A
//!   second pass has the same bits. The exit status is 1 if a check fails. With `mistake=1` the
//!   window of the reference is a key too long, which must be found.
//! * **compile** compiles every kernel for a compute capability into the kernel cache
//!   (`ANNULUS_KERNEL_CACHE`), without a GPU, or only those of some element types and dims; the
//!   cubins of bf16 also into a folder, for a disassembler (`scripts/cuda-model`).
//!
//! `scripts/gpu-lease` runs it beside peers. `device=emulated` checks on any machine that it runs;
//! its times mean nothing.

mod pass;

use std::{
    collections::BTreeMap,
    num::NonZero,
    panic::resume_unwind,
    process::ExitCode,
    sync::atomic::{AtomicUsize, Ordering},
};

use annulus::{Attention, DType, Dims, Error, Result};
use annulus_bench::{
    Parameters, draw, median, {SHAPES, Verification},
};
use annulus_cuda::{
    Cuda, Level, Variant,
    device::{Api, Architecture, Compiler, CompilerSymbols, ImageCache, Symbols},
};
use annulus_cuda_emulator as emulator;
use serde_json::json;

use pass::Passes;

/// Names of the parameters.
const NAMES: [&str; 16] = [
    "device", "levels", "dtypes", "dims", "lens", "heads", "batch", "rounds", "causal", "masks",
    "verify", "compile", "cubins", "mistake", "queries", "kv_heads",
];

/// Opens the device at each level, with one stream for each.
fn open_levels(settings: &Parameters) -> Result<Vec<Setup>> {
    let named = |word: &str| {
        let is_form = word == TILES;
        let level = if is_form { Level::Warpgroup.name() } else { word };
        let level = Level::ALL.into_iter().find(|found| found.name() == level)?;
        Some((word.to_owned(), level))
    };
    let levels = settings.list("levels", Level::Matrix.name(), named)?;
    let device = settings.get("device").unwrap_or("0");
    let open = |level: Level| -> Result<Cuda> {
        if device == "emulated" {
            let driver = pass::watched(emulator::hopper_symbols());
            let nvrtc = || Ok(emulator::hopper_compiler_symbols());
            let cuda = Cuda::with_symbols(Ok(driver), nvrtc, ImageCache::of_user(), 0)?;
            return cuda.with_min_warpgroup_rows(0).at_level(level);
        }
        let number =
            device.parse().map_err(|_| Error::invalid("device", device, "a GPU's number"))?;
        let driver = Symbols::system(Api::Cuda).map(pass::watched);
        let cuda = Cuda::with_symbols(
            driver,
            || CompilerSymbols::system(Api::Cuda),
            ImageCache::of_user(),
            number,
        )?;
        cuda.at_level(level)
    };
    let open = |(name, level): (String, Level)| {
        let cuda = open(level)?;
        let cuda = if name == TILES { cuda.with_forward_blocks(usize::MAX) } else { cuda };
        Ok(Setup { name, cuda })
    };
    levels.into_iter().map(open).collect()
}

/// Name of level `warpgroup` with a thread block for each tile.
const TILES: &str = "warpgroup-tiles";

/// A level that is timed or verified.
struct Setup {
    name: String,
    cuda: Cuda,
}

/// One attention to be timed.
#[derive(Clone, Copy)]
struct Problem {
    dtype: DType,
    dims: Dims,
    is_causal: bool,
    rounds: usize,
}

/// Times forward and backward at all levels, and prints a line for each.
fn measure(levels: &[Setup], problem: Problem) -> Result<()> {
    let Problem { dtype, dims, is_causal, rounds } = problem;
    let attention = Attention::new().causal(is_causal);
    let numbers = draw(dims, dtype);
    let open = |setup: &Setup| Passes::new(&setup.cuda, &attention, dtype, dims, &numbers);
    let mut all = levels.iter().map(open).collect::<Result<Vec<_>>>()?;
    let pairs = (dims.batch * dims.q_heads) as f64
        * (dims.q_len as f64 * dims.kv_len as f64)
        * if is_causal { 0.5 } else { 1.0 };
    let kv_bytes = (2 * dims.batch * dims.kv_len * dims.kv_heads * dims.head_dim) as f64
        * dtype.bytes() as f64;
    let is_decoding = dims.q_len < dims.kv_len;
    let passes: &[_] = &[("fwd", true, 2.0), ("bwd", false, 5.0)];
    for &(what, is_forward, products) in if is_decoding { &passes[..1] } else { passes } {
        let mut times = vec![Vec::new(); all.len()];
        let mut kernels: Vec<BTreeMap<String, Vec<f64>>> = vec![BTreeMap::new(); all.len()];
        for passes in &mut all {
            passes.timed(is_forward)?;
        }
        for _ in 0..rounds {
            for (passes, times) in all.iter_mut().zip(&mut times) {
                times.push(passes.timed(is_forward)?);
            }
        }
        for _ in 0..rounds {
            for (passes, kernels) in all.iter_mut().zip(&mut kernels) {
                let (passed, spent) = pass::times(|| passes.timed(is_forward));
                passed?;
                spent.into_iter().for_each(|(name, ms)| kernels.entry(name).or_default().push(ms));
            }
        }
        for ((Setup { name, cuda }, times), kernels) in levels.iter().zip(times).zip(kernels) {
            let seconds = median(times);
            let kernel_ms: BTreeMap<_, _> =
                kernels.into_iter().map(|(name, ms)| (name, median(ms))).collect();
            let flops = products * 2.0 * pairs * dims.head_dim as f64;
            println!(
                "{}",
                json!({
                    "peer": "annulus-cuda", "gpu": cuda.to_string(), "level": name,
                    "what": what, "dtype": dtype.name(), "batch": dims.batch,
                    "heads": dims.q_heads, "kv_heads": dims.kv_heads, "head_dim": dims.head_dim,
                    "n": dims.kv_len, "queries": dims.q_len,
                    "gbps": is_decoding.then_some(kv_bytes / seconds / 1e9),
                    "causal": is_causal, "rounds": rounds, "pass_ms": seconds * 1e3,
                    "kernel_ms": kernel_ms, "tflops": flops / seconds / 1e12,
                })
            );
        }
    }
    Ok(())
}

/// Compiles all kernels, or those of the given types and dims, for a compute capability such as 9.0
/// into the user's cache.
fn compile(capability: &str, settings: &Parameters) -> Result<()> {
    let cubins = settings.get("cubins");
    let dtypes = settings.dtypes("f64,f32,bf16,f16")?;
    let dims = settings.numbers("dims", "32,64,128,256")?;
    let wrong = || Error::invalid("compile", capability, "a compute capability such as 9.0");
    let (major, minor) = capability.split_once('.').ok_or_else(wrong)?;
    let number = |text: &str| text.parse::<i32>().map_err(|_| wrong());
    let architecture = Architecture { major: number(major)?, minor: number(minor)? };
    let folder = || Error::invalid(ImageCache::VARIABLE, "no folder", "a folder for the images");
    let cache = ImageCache::of_user().ok_or_else(folder)?;
    let compiler = Compiler::new(Api::Cuda, Some(cache))?;
    let (kind, target) = compiler.target(&architecture.into())?;
    let is_wanted =
        |variant: &Variant| dtypes.contains(&variant.dtype) && dims.contains(&variant.dim);
    let variants: Vec<_> = Variant::all_on(architecture).filter(is_wanted).collect();
    let compile = |variant: Variant| -> Result<()> {
        let image = annulus_cuda::compile(&compiler, variant, None, kind, &target)?;
        let name = variant.to_string();
        let bytes = image.bytes.len();
        println!(
            "{}",
            json!({"what": "compile", "target": target, "variant": name, "bytes": bytes})
        );
        if let Some(folder) = cubins.filter(|_| variant.dtype == DType::Bf16) {
            let path = format!("{folder}/{}.cubin", name.replace(' ', "-"));
            std::fs::write(&path, &image.bytes)
                .map_err(|error| Error::Io { path, what: error.to_string() })?;
        }
        Ok(())
    };
    // the compiler takes seconds for each, on one core
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&variant) = variants.get(next.fetch_add(1, Ordering::Relaxed)) {
            compile(variant)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let mut joined = threads.into_iter().map(|thread| thread.join());
        joined.try_for_each(|result| result.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Returns false if a comparison failed.
fn run() -> Result<bool> {
    let settings = Parameters::parse(std::env::args().skip(1), &NAMES)?;
    if let Some(capability) = settings.get("compile") {
        return compile(capability, &settings).map(|()| true);
    }
    let levels = open_levels(&settings)?;
    if settings.number("verify", 0usize)? != 0 {
        let masks = settings.named("masks", &SHAPES.join(","), SHAPES, |mask| mask)?;
        let mistake = settings.number("mistake", 0)?;
        let mut all_right = true;
        for dtype in settings.dtypes("bf16,f16")? {
            for dim in settings.numbers("dims", "64,128,256")? {
                for len in settings.numbers("lens", "4099")? {
                    let (heads, masks) = (settings.number("heads", 8)?, &masks);
                    let problem = Verification { dtype, len, heads, dim, masks, mistake };
                    for setup in &levels {
                        all_right &= pass::verify(setup, &problem)?;
                    }
                }
            }
        }
        return Ok(all_right);
    }
    let heads = settings.number("heads", 16)?;
    let batch = settings.number("batch", 4)?;
    let rounds = settings.number("rounds", 10)?;
    for dtype in settings.dtypes("bf16,f16,f32")? {
        for len in settings.numbers("lens", "8192,16384")? {
            for dim in settings.numbers("dims", "64,128")? {
                let queries = settings.number("queries", len)?;
                let kv_heads = settings.number("kv_heads", heads)?;
                let dims = Dims { q_len: queries, kv_heads, ..Dims::new(batch, len, heads, dim) };
                let masks = if queries < len { "0" } else { "0,1" };
                for causal in settings.numbers("causal", masks)? {
                    measure(&levels, Problem { dtype, dims, is_causal: causal != 0, rounds })?;
                }
            }
        }
    }
    Ok(true)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("cuda-levels: a result differs from level plain");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("cuda-levels: {error}");
            ExitCode::FAILURE
        }
    }
}
