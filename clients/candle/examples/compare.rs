//! Peak memory and time of causal attention, forward and backward: this crate beside the matrix of
//! scores that candle's operators compute, in one run.
//!
//! ```sh
//! cargo run --release --example compare -- 8192 2 1 64       # rows, query heads, KV heads, dim
//! ```
//!
//! Memory is what is allocated above the inputs, at its highest; the time is the CPU time of one
//! pass, of all threads. Both have those of `RAYON_NUM_THREADS`, by default all cores. Linux only.
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use annulus_candle::{
    Options,
    annulus::{Attention, Runtime},
    attention,
};
use candle_core::{D, Device, Error, Result, Tensor, Var};
use candle_nn::ops::softmax;

/// The allocator of the system, with the bytes in use and their maximum.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the allocator of the system with the arguments of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as the caller promises
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(IN_USE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as the caller promises
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let numbers = words.iter().map(|word| word.parse().map_err(Error::wrap));
    let numbers = numbers.collect::<Result<Vec<usize>>>()?;
    let &[rows, heads, kv_heads, dim] = &numbers[..] else {
        return Err(Error::msg("arguments: rows, query heads, KV heads, dim"));
    };
    let draw = |heads| Var::randn(0f32, 1.0, (1, rows, heads, dim), &Device::Cpu);
    let inputs = [draw(heads)?, draw(kv_heads)?, draw(kv_heads)?];
    let weights = Tensor::randn(0f32, 1.0, (1, rows, heads, dim), &Device::Cpu)?;
    let runtime = Runtime::new().threads(candle_core::utils::get_num_threads());
    let options = Options::new(Attention::new().causal(true)).runtime(runtime);
    let [q, k, v] = &inputs;
    let ours = measure("annulus", &inputs, &weights, || attention(q, k, v, &options))?;
    let theirs = measure("candle", &inputs, &weights, || scores_in_memory(q, k, v))?;
    println!("memory {:.1} : 1, time {:.1} : 1", theirs.0 / ours.0, theirs.1 / ours.1);
    for (ours, theirs) in ours.2.iter().zip(&theirs.2) {
        let difference = (ours - theirs)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        println!("largest difference of a gradient {difference:.1e}");
    }
    Ok(())
}

/// Runs forward and backward. Returns megabytes, seconds and the gradients.
fn measure(
    name: &str,
    inputs: &[Var; 3],
    weights: &Tensor,
    forward: impl Fn() -> Result<Tensor>,
) -> Result<(f64, f64, Vec<Tensor>)> {
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let start = cpu_seconds()?;
    let loss = (forward()? * weights)?.sum_all()?;
    let all = loss.backward()?;
    let seconds = cpu_seconds()? - start;
    let gradients = inputs.iter().filter_map(|input| all.get(input)).map(Tensor::detach).collect();
    let megabytes = (PEAK.load(Relaxed) - before) as f64 / 1e6;
    println!("{name:8} forward and backward: {megabytes:.1} MB, {seconds:.2} s");
    Ok((megabytes, seconds, gradients))
}

/// Returns the CPU time of this process: other programs on the machine do not change it much.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    // utime and stime, in hundredths of a second
    let ticks = after_name.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<f64>());
    Ok(ticks.sum::<std::result::Result<f64, _>>().map_err(Error::wrap)? / 100.0)
}

/// Attention as candle's models compute it.
fn scores_in_memory(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (_, rows, heads, dim) = q.dims4()?;
    let repeat = |x: &Tensor| {
        let (batch, rows, kv_heads, dim) = x.dims4()?;
        let x = x.unsqueeze(3)?.expand((batch, rows, kv_heads, heads / kv_heads, dim))?;
        x.reshape((batch, rows, heads, dim))?.transpose(1, 2)?.contiguous()
    };
    let q = (q.transpose(1, 2)?.contiguous()? / (dim as f64).sqrt())?;
    let masked = |(i, j)| if j > i { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> =
        (0..rows).flat_map(|i| (0..rows).map(move |j| (i, j))).map(masked).collect();
    let mask = Tensor::from_vec(mask, (rows, rows), &Device::Cpu)?;
    let scores = q.matmul(&repeat(k)?.t()?)?.broadcast_add(&mask)?;
    softmax(&scores, D::Minus1)?.matmul(&repeat(v)?)?.transpose(1, 2)
}
