//! Measures the limits of one core: multiply-adds in registers, and reads from memory beyond the
//! caches. One JSON line each.
//!
//! `cargo run --release -p annulus-bench --features cpu --bin cpu-limits`. Pin it to the core of a
//! benchmark and run it beside the benchmark, because clock rates change over time. The clock is
//! the thread's CPU time; the best of many short rounds counts.

use std::hint::black_box;

use annulus_cpu::Isa;
use rustix::time::{ClockId, clock_gettime};

/// Independent accumulators: more than latency × throughput of the multiply-add units (4 cycles ×
/// 2), so that none waits.
const SUMS: usize = 12;
/// Multiply-adds of every accumulator per round.
const STEPS: usize = 1_000_000;
/// f32 elements to read: 256 MiB, more than any cache holds.
const READ: usize = 1 << 26;

fn main() -> Result<(), annulus_core::Error> {
    let isa = Isa::chosen()?;
    let Limits { width, multiply_add, read } = Limits::of(isa);
    let seconds = least(40, || {
        black_box(multiply_add(black_box(0.999)));
    });
    let flops = (2 * width * SUMS * STEPS) as f64;
    println!(
        r#"{{"limit":"multiply-add","dtype":"f32","isa":"{isa}","gflops":{:.1}}}"#,
        flops / seconds / 1e9
    );

    let memory = vec![1.0f32; READ];
    let seconds = least(6, || {
        black_box(read(black_box(&memory)));
    });
    let bytes = (READ * size_of::<f32>()) as f64;
    println!(
        r#"{{"limit":"read","bytes":{bytes},"isa":"{isa}","gigabytes_per_second":{:.1}}}"#,
        bytes / seconds / 1e9
    );
    Ok(())
}

/// Returns the minimum CPU time of a few rounds, after one warm-up round.
fn least(rounds: usize, mut work: impl FnMut()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    };
    work();
    (0..rounds).fold(f64::INFINITY, |least, _| {
        let start = now();
        work();
        least.min(now() - start)
    })
}

/// Loops for one instruction set.
struct Limits {
    /// f32 lanes of a vector.
    width: usize,
    /// Runs [`STEPS`] multiply-adds by the factor in each of [`SUMS`] vectors.
    multiply_add: fn(f32) -> f32,
    /// Sums all elements.
    read: fn(&[f32]) -> f32,
}

impl Limits {
    /// Selects the loops for `isa`, which the machine has.
    fn of(isa: Isa) -> Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Self {
                width: 16,
                // SAFETY: the machine has the instruction set that `Isa::chosen` returns.
                multiply_add: |a| unsafe { avx512::multiply_add(a) },
                // SAFETY: as above.
                read: |a| unsafe { avx512::read(a) },
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Self {
                width: 8,
                // SAFETY: as above.
                multiply_add: |a| unsafe { avx2::multiply_add(a) },
                // SAFETY: as above.
                read: |a| unsafe { avx2::read(a) },
            },
            _ => Self { width: 4, multiply_add: portable::multiply_add, read: portable::read },
        }
    }
}

/// Defines the two loops over vectors of `$width` elements.
macro_rules! loops {
    (
        $(#[$attribute:meta])* $width:literal, $splat:ident, $load:ident, $add:ident,
        $fused:ident, $first:expr
    ) => {
        $(#[$attribute])*
        pub(super) fn multiply_add(factor: f32) -> f32 {
            let factor = $splat(factor);
            let term = $splat(1e-3);
            let mut sums = [$splat(1.0); SUMS];
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = $fused(*sum, factor, term);
                }
            }
            $first(sums.into_iter().reduce(|a, b| $add(a, b)).unwrap_or(term))
        }

        $(#[$attribute])*
        pub(super) fn read(memory: &[f32]) -> f32 {
            let mut sums = [$splat(0.0); 4];
            for lines in memory.as_chunks::<$width>().0.as_chunks::<4>().0 {
                for (sum, line) in sums.iter_mut().zip(lines) {
                    *sum = $add(*sum, $load(line));
                }
            }
            $first(sums.into_iter().reduce(|a, b| $add(a, b)).unwrap_or($splat(0.0)))
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{STEPS, SUMS};

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(from: &[f32; 16]) -> __m512 {
        // SAFETY: 64 bytes can be read.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    loops!(
        #[target_feature(enable = "avx512f")]
        16,
        _mm512_set1_ps,
        load,
        _mm512_add_ps,
        _mm512_fmadd_ps,
        |sum| _mm512_reduce_add_ps(sum)
    );
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{STEPS, SUMS};

    #[inline]
    #[target_feature(enable = "avx")]
    fn load(from: &[f32; 8]) -> __m256 {
        // SAFETY: 32 bytes can be read.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    loops!(
        #[target_feature(enable = "avx2,fma")]
        8,
        _mm256_set1_ps,
        load,
        _mm256_add_ps,
        _mm256_fmadd_ps,
        |sum| _mm256_cvtss_f32(sum)
    );
}

mod portable {
    use super::{STEPS, SUMS};

    fn splat(element: f32) -> [f32; 4] {
        [element; 4]
    }

    fn load(from: &[f32; 4]) -> [f32; 4] {
        *from
    }

    fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    fn fused(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    loops!(4, splat, load, add, fused, |sum: [f32; 4]| sum[0]);
}
