//! Which instructions the tiles are compiled for, and the one place where that choice becomes a call.
//!
//! Every hot loop is a [`Job`]: a generic body over fixed-size arrays that is compiled once per instruction set by the thin
//! `#[target_feature]` functions below; the hottest are [`Kernel`]s, over vectors that stay in registers. [`Path`] is the proof that the machine has the instructions: it can only be made by asking.

use annulus_core::{Error, Result};

use crate::{
    real::Real,
    vector::{Array, Pairs, Vector},
};

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

/// An instruction set that tiles are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Whatever the target guarantees; products and sums are rounded separately.
    Portable,
    /// NEON of 64-bit ARM: 128-bit vectors, 32 registers.
    Neon,
    /// AVX2 with fused multiply-add: 256-bit vectors.
    Avx2,
    /// AVX-512 F, VL, BW, DQ: 512-bit vectors and 32 registers.
    Avx512,
    /// The same; and for bf16 inputs products of pairs of bf16 (AVX-512 BF16), for which weights and gradients of logits are rounded to bf16 before they
    /// are multiplied. Sums are f32. Never chosen but by [`Isa::VARIABLE`], [`crate::Cpu::with_isa`] or [`annulus_core::Precision::Default`].
    Avx512Bf16,
}

impl Isa {
    /// All of them, narrowest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The environment variable that forces one: `avx512bf16`, `avx512`, `avx2`, `neon` or `portable`.
    pub const VARIABLE: &'static str = "ANNULUS_CPU_ISA";

    /// The name in [`Isa::VARIABLE`] and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let has = match self {
            Self::Portable => true,
            Self::Neon => false,
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("fma")
            }
            Self::Avx512Bf16 => Self::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
        };
        #[cfg(target_arch = "aarch64")]
        let has = self == Self::Portable || self == Self::Neon && std::arch::is_aarch64_feature_detected!("neon");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has = self == Self::Portable;
        has
    }

    /// Whether products of pairs of bf16 are there and are faster than those of f32: twice as fast on AMD's processors, half as fast on those of Intel.
    /// That is asked of the processor's name and not of a clock, so that the answer never changes.
    pub(crate) fn pairs_pay() -> bool {
        #[cfg(target_arch = "x86_64")]
        let amd = {
            let name = std::arch::x86_64::__cpuid(0);
            [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
        };
        #[cfg(not(target_arch = "x86_64"))]
        let amd = false;
        amd && Self::Avx512Bf16.is_available()
    }

    /// The one that [`Isa::VARIABLE`] forces.
    ///
    /// # Errors
    /// As [`Isa::chosen`].
    pub(crate) fn forced() -> Result<Option<Self>> {
        Self::named(std::env::var_os(Self::VARIABLE).map(|name| name.to_string_lossy().into_owned()).as_deref())
    }

    /// The one that [`Isa::VARIABLE`] forces, else the widest that this machine has and that rounds nothing but results.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the variable if it holds no name of an instruction set, [`Error::Unsupported`] if the machine
    /// lacks the one that it names.
    pub fn chosen() -> Result<Self> {
        Ok(Self::forced()?.unwrap_or_else(Self::widest))
    }

    /// The widest that this machine has and that rounds nothing but results.
    pub(crate) fn widest() -> Self {
        let exact = Self::ALL.into_iter().rev().filter(|&isa| isa != Self::Avx512Bf16);
        exact.into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    fn named(name: Option<&str>) -> Result<Option<Self>> {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(None) };
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name);
        let isa = isa.ok_or_else(|| Error::invalid(Self::VARIABLE, name, "avx512bf16, avx512, avx2, neon or portable"))?;
        Path::new(isa).map(|_| Some(isa))
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An instruction set that this machine was seen to have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path {
    // invariant: available, because `Path::new` is the only way to make a `Path`
    isa: Isa,
}

/// A hot loop.
///
/// Its body must be `#[inline(always)]`, so that it is compiled for the instruction set of whoever calls it: `FUSED` multiply-adds or not, register
/// tiles of `ROWS` × `VECTORS` vectors of `WIDTH` elements (64 bytes, whatever the machine's vectors).
pub(crate) trait Job {
    type Output;
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) -> Self::Output;
}

/// A hot loop over sums of type `A`, written over vectors in registers.
///
/// Its body must be `#[inline(always)]`, as that of a [`Job`]: register tiles of `ROWS` × `VECTORS` vectors.
pub(crate) trait Kernel<A: Real> {
    type Output;
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> Self::Output;
}

/// A hot loop that makes or masks pairs of bf16.
pub(crate) trait PairKernel {
    fn run<V: Pairs, const VECTORS: usize>(self);
}

/// Whatever [`Path`] runs on, a register tile has at most this many rows and divides this.
pub(crate) const MOST_ROWS: usize = 8;

impl Path {
    pub(crate) fn new(isa: Isa) -> Result<Self> {
        if isa.is_available() { Ok(Self { isa }) } else { Err(Error::unsupported(isa.name(), "this processor")) }
    }

    /// What it runs.
    pub(crate) const fn isa(self) -> Isa {
        self.isa
    }

    /// The most vectors that a register tile is wide.
    pub(crate) const fn most_vectors(self) -> usize {
        match self.isa {
            Isa::Avx512 | Isa::Avx512Bf16 => 4,
            Isa::Avx2 | Isa::Neon | Isa::Portable => 1,
        }
    }

    /// Runs `job` on a strip of `vectors` vectors of `WIDTH` elements.
    pub(crate) fn run<J: Job, const WIDTH: usize>(self, vectors: usize, job: J) -> J::Output {
        debug_assert!((1..=self.most_vectors()).contains(&vectors));
        match self.isa {
            Isa::Portable => job.run::<false, 2, 1, WIDTH>(),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `self.isa` is `Avx2`, and a `Path` exists only of what `Isa::is_available` has found on this machine: here AVX2
            // and FMA, which are all the features that `avx2` enables.
            Isa::Avx2 => unsafe { avx2::<J, WIDTH>(job) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `self.isa` is `Avx512` or more, and a `Path` exists only of what `Isa::is_available` has found on this machine: here
            // AVX-512 F, VL, BW, DQ and FMA, which are all the features that `avx512` enables.
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe {
                match vectors {
                    1 => avx512::<J, 1, WIDTH>(job),
                    2 => avx512::<J, 2, WIDTH>(job),
                    3 => avx512::<J, 3, WIDTH>(job),
                    _ => avx512::<J, 4, WIDTH>(job),
                }
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `self.isa` is `Neon`, and a `Path` exists only of what `Isa::is_available` has found on this machine: NEON, which is all
            // that `neon` enables.
            Isa::Neon => unsafe { neon::<J, WIDTH>(job) },
            // no `Path` of another architecture exists
            #[cfg(target_arch = "x86_64")]
            Isa::Neon => job.run::<false, 2, 1, WIDTH>(),
            #[cfg(target_arch = "aarch64")]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 => job.run::<false, 2, 1, WIDTH>(),
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            Isa::Neon | Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 => job.run::<false, 2, 1, WIDTH>(),
        }
    }

    /// Runs `kernel` on a strip of `vectors` vectors of f32.
    pub(crate) fn run_f32<K: Kernel<f32>>(self, vectors: usize, kernel: K) -> K::Output {
        debug_assert!((1..=self.most_vectors()).contains(&vectors));
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe {
                match vectors {
                    1 => avx512_f32::<K, 8, 1>(kernel),
                    2 => avx512_f32::<K, 8, 2>(kernel),
                    3 => avx512_f32::<K, 4, 3>(kernel),
                    _ => avx512_f32::<K, 4, 4>(kernel),
                }
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::Neon => unsafe { neon_f32(kernel) },
            _ => self.run_arrays::<_, _, 16>(vectors, kernel),
        }
    }

    /// Runs `kernel` on a strip of `vectors` vectors of words, pairs of bf16, whose products are sums of two: on [`Isa::Avx512Bf16`] and no other.
    pub(crate) fn run_pairs<K: Kernel<f32>>(self, vectors: usize, kernel: K) -> K::Output {
        debug_assert!(self.isa == Isa::Avx512Bf16);
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `self.isa` is `Avx512Bf16`, and a `Path` exists only of what `Isa::is_available` has found on this machine: here BF16
            // beyond what `run` speaks of, which are all the features that `avx512_pairs` enables.
            Isa::Avx512Bf16 => unsafe {
                match vectors {
                    1 => avx512_pairs::<K, 8, 1>(kernel),
                    2 => avx512_pairs::<K, 8, 2>(kernel),
                    3 => avx512_pairs::<K, 4, 3>(kernel),
                    _ => avx512_pairs::<K, 4, 4>(kernel),
                }
            },
            _ => self.run_arrays::<_, _, 16>(vectors, kernel),
        }
    }

    /// Runs a kernel that makes pairs of bf16.
    pub(crate) fn run_pairing<K: PairKernel>(self, vectors: usize, kernel: K) {
        debug_assert!((1..=self.most_vectors()).contains(&vectors));
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run_pairs`.
            Isa::Avx512Bf16 => unsafe {
                match vectors {
                    1 => avx512_pairing::<K, 1>(kernel),
                    2 => avx512_pairing::<K, 2>(kernel),
                    3 => avx512_pairing::<K, 3>(kernel),
                    _ => avx512_pairing::<K, 4>(kernel),
                }
            },
            _ => kernel.run::<Array<f32, false, 16>, 1>(),
        }
    }

    /// Runs `kernel` on a strip of `vectors` vectors of f64.
    pub(crate) fn run_f64<K: Kernel<f64>>(self, vectors: usize, kernel: K) -> K::Output {
        self.run_arrays::<_, _, 8>(vectors, kernel)
    }

    /// Runs `kernel` over vectors that the compiler finds registers for.
    fn run_arrays<K: Kernel<A>, A: Real, const WIDTH: usize>(self, vectors: usize, kernel: K) -> K::Output {
        self.run::<_, WIDTH>(vectors, OverArrays(kernel, std::marker::PhantomData))
    }
}

/// Asks for memory that will soon be read, without waiting for it. Nothing happens where stable Rust reaches no such instruction.
#[inline(always)]
pub(crate) fn prefetch<T>(soon: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in soon.chunks(64 / size_of::<T>()) {
        // SAFETY: the hint may be given for any address and changes nothing but what the caches hold; SSE is part of every x86-64.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(soon);
}

/// The same for memory that will be read later: it is to wait in the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_far<T>(later: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in later.chunks(64 / size_of::<T>()) {
        // SAFETY: as in `prefetch`.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(later);
}

/// A kernel as a job.
struct OverArrays<K, A>(K, std::marker::PhantomData<A>);

impl<K: Kernel<A>, A: Real> Job for OverArrays<K, A> {
    type Output = K::Output;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(self) -> K::Output {
        self.0.run::<Array<A, FUSED, WIDTH>, ROWS, VECTORS>()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_f32<K: Kernel<f32>, const ROWS: usize, const VECTORS: usize>(kernel: K) -> K::Output {
    kernel.run::<avx512::Zmm<false>, ROWS, VECTORS>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_pairs<K: Kernel<f32>, const ROWS: usize, const VECTORS: usize>(kernel: K) -> K::Output {
    kernel.run::<avx512::Zmm<true>, ROWS, VECTORS>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_pairing<K: PairKernel, const VECTORS: usize>(kernel: K) {
    kernel.run::<avx512::Zmm<true>, VECTORS>();
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon<J: Job, const WIDTH: usize>(job: J) -> J::Output {
    job.run::<true, 4, 1, WIDTH>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon_f32<K: Kernel<f32>>(kernel: K) -> K::Output {
    kernel.run::<neon::Quad, 4, 1>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<J: Job, const WIDTH: usize>(job: J) -> J::Output {
    job.run::<true, 4, 1, WIDTH>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512<J: Job, const VECTORS: usize, const WIDTH: usize>(job: J) -> J::Output {
    job.run::<true, 4, VECTORS, WIDTH>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_name_is_taken_or_refused() {
        assert_eq!(Isa::named(Some("portable")), Ok(Some(Isa::Portable)));
        assert_eq!(Isa::named(Some("")), Ok(None));
        assert!(Isa::widest().is_available() && Isa::widest() != Isa::Avx512Bf16);
        assert_eq!(Isa::named(Some("sse9")).unwrap_err().code(), 1);
        for isa in Isa::ALL {
            match Isa::named(Some(isa.name())) {
                Ok(named) => assert!(named == Some(isa) && isa.is_available()),
                Err(error) => assert!(error.code() == 2 && !isa.is_available()),
            }
        }
    }
}
