//! Kernel dispatch: the only calls that depend on the chosen instruction set.
//!
//! ```text
//! Cpu::isa_for(spec) → Isa → IsaToken::new (checks the processor) → run…(kernel)
//! run…:  match isa { Avx512 => unsafe { avx512::<K>(kernel) }, … }
//! avx512:  #[target_feature(enable = …)] fn { kernel.run::<FUSED, ROWS, VECTORS, WIDTH>() }
//! ```
//! Hot loops are generic bodies, compiled once per instruction set. An [`ArrayKernel`] works on
//! fixed-size arrays that the compiler vectorises. A [`SimdKernel`], for the hottest loops, works
//! on [`Vector`]s that stay in registers. An [`IsaToken`] proves that the machine has the
//! instructions: its only constructor checks the processor.
//!
//! # Source
//! The layout of memchr: one generic algorithm, thin `#[target_feature]` leaves, runtime detection
//! once.

use annulus_core::Result;

use crate::simd::{
    element::Float,
    isa::Isa,
    tile_unit::TileUnit,
    vector::{Array, Bf16Pairs, Vector},
};

#[cfg(target_arch = "aarch64")]
use crate::simd::neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Ymms, avx512};

/// Proof that this machine has an instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IsaToken {
    // invariant: both are available, because `IsaToken::new` is the only constructor
    isa: Isa,
    /// Instruction set of vectors: `isa`, unless that is one of tiles.
    vectors: Isa,
}

/// Hot loop over fixed-size arrays, vectorised by the compiler.
///
/// The body must be `#[inline(always)]`, so that it is compiled for the instruction set of its
/// caller. `FUSED`: use fused multiply-adds. Register tiles have `ROWS` × `VECTORS` vectors of
/// `WIDTH` elements (64 bytes on every machine).
pub(crate) trait ArrayKernel {
    type Output;
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(
        self,
    ) -> Self::Output;
}

/// Hot loop over vectors that stay in registers, for accumulators of type `A`.
///
/// The body must be `#[inline(always)]`, as for an [`ArrayKernel`]. Register tiles have `ROWS` ×
/// `VECTORS` vectors.
pub(crate) trait SimdKernel<A: Float> {
    type Output;
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> Self::Output;
}

/// Hot loop that creates or masks pairs of bf16.
pub(crate) trait PairKernel {
    fn run<V: Bf16Pairs, const VECTORS: usize>(self);
}

/// Maximum rows of a register tile. Every instruction set's rows (2, 4 or 8) divide it, so that
/// padding to it suits all of them; those of AVX2 (6) leave 2 or 4 rows over.
pub(crate) const MAX_REGISTER_ROWS: usize = 8;

impl IsaToken {
    pub(crate) fn new(isa: Isa) -> Result<Self> {
        let isa = isa.require()?;
        let vectors = match isa {
            Isa::Amx => Isa::Avx512Bf16,
            // pairs are made by the instructions or, in strips of one vector, by arrays
            Isa::AmxEmulated => [Isa::Avx512Bf16, Isa::Avx2]
                .into_iter()
                .find(|isa| isa.is_available())
                .unwrap_or(Isa::Portable),
            other => other,
        };
        Ok(Self { isa, vectors })
    }

    /// Returns the unit that multiplies pairs of bf16 on tiles, if the instruction set has one.
    pub(crate) const fn tile_unit(self) -> Option<TileUnit> {
        match self.isa {
            Isa::Amx => Some(TileUnit::Amx),
            Isa::AmxEmulated => Some(TileUnit::Emulated),
            _ => None,
        }
    }

    /// Returns the instruction set.
    pub(crate) const fn isa(self) -> Isa {
        self.isa
    }

    /// Returns the maximum width of a register tile in vectors.
    ///
    /// 4 × 4 or 8 × 2 accumulators of 512 bits take 16 of AVX-512's 32 registers. Elsewhere a
    /// 64-byte vector takes two registers (AVX2) or four (NEON), so that 6 × 1 vectors take 12 of
    /// 16 and 4 × 1 vectors 16 of 32. AVX2 needs more than 8 chains to hide the latency of its two
    /// multiply-adds a cycle (4 cycles).
    pub(crate) const fn max_vectors(self) -> usize {
        match self.vectors {
            Isa::Avx512 | Isa::Avx512Bf16 => 4,
            _ => 1,
        }
    }

    /// Runs `kernel` on a strip of `vectors` vectors of `WIDTH` elements.
    pub(crate) fn run<K: ArrayKernel, const WIDTH: usize>(
        self,
        vectors: usize,
        kernel: K,
    ) -> K::Output {
        assert!((1..=self.max_vectors()).contains(&vectors));
        match self.vectors {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `self.vectors` is `Avx2`, and a token exists only for an instruction set that
            // `Isa::is_available` found on this machine: here AVX2, FMA and F16C, which are all the
            // features that `avx2` enables.
            Isa::Avx2 => unsafe { avx2::<K, WIDTH>(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `self.vectors` is `Avx512` or `Avx512Bf16`, and a token exists only for an
            // instruction set that `Isa::is_available` found on this machine: here AVX-512 F, VL,
            // BW, DQ and FMA, which are all the features that `avx512` enables (AVX-512 F implies
            // AVX2).
            Isa::Avx512 | Isa::Avx512Bf16 => unsafe {
                match vectors {
                    1 => avx512::<K, 1, WIDTH>(kernel),
                    2 => avx512::<K, 2, WIDTH>(kernel),
                    3 => avx512::<K, 3, WIDTH>(kernel),
                    _ => avx512::<K, 4, WIDTH>(kernel),
                }
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `self.vectors` is `Neon`, and a token exists only for an instruction set that
            // `Isa::is_available` found on this machine: NEON, which is all that `neon` enables.
            Isa::Neon => unsafe { neon::<K, WIDTH>(kernel) },
            // portable: no token of another architecture's instruction set exists
            _ => kernel.run::<false, 2, 1, WIDTH>(),
        }
    }

    /// Runs `kernel` on a strip of `vectors` vectors of f32 or, with `pairs`, of bf16 pairs, on
    /// [`Isa::Avx512Bf16`] only. A product step over pairs adds two products.
    fn run_f32<K: SimdKernel<f32>>(self, pairs: bool, vectors: usize, kernel: K) -> K::Output {
        assert!((1..=self.max_vectors()).contains(&vectors));
        assert!(!pairs || self.vectors == Isa::Avx512Bf16);
        match self.vectors {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `self.vectors` is `Avx512Bf16`, and a token exists only for an instruction set
            // that `Isa::is_available` found on this machine: here BF16 beside the features named
            // in `run`, which are all the features that `avx512_bf16_products` enables.
            Isa::Avx512Bf16 if pairs => unsafe {
                match vectors {
                    1 => avx512_bf16_products::<K, 8, 1>(kernel),
                    2 => avx512_bf16_products::<K, 8, 2>(kernel),
                    3 => avx512_bf16_products::<K, 4, 3>(kernel),
                    _ => avx512_bf16_products::<K, 4, 4>(kernel),
                }
            },
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
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run`.
            Isa::Avx2 => unsafe { avx2_f32(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as in `run`.
            Isa::Neon => unsafe { neon_f32(kernel) },
            _ => self.run_arrays::<_, _, 16>(vectors, kernel),
        }
    }

    /// Runs a kernel that creates or masks bf16 pairs.
    pub(crate) fn run_pair_kernel<K: PairKernel>(self, vectors: usize, kernel: K) {
        assert!((1..=self.max_vectors()).contains(&vectors));
        match self.vectors {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `run_f32` with `pairs`.
            Isa::Avx512Bf16 => unsafe {
                match vectors {
                    1 => avx512_pair_kernel::<K, 1>(kernel),
                    2 => avx512_pair_kernel::<K, 2>(kernel),
                    3 => avx512_pair_kernel::<K, 3>(kernel),
                    _ => avx512_pair_kernel::<K, 4>(kernel),
                }
            },
            _ => kernel.run::<Array<f32, false, 16>, 1>(),
        }
    }

    /// Runs `kernel` over [`Array`]s, whose registers the compiler allocates.
    fn run_arrays<K: SimdKernel<A>, A: Float, const WIDTH: usize>(
        self,
        vectors: usize,
        kernel: K,
    ) -> K::Output {
        self.run::<_, WIDTH>(vectors, OnArrays(kernel, std::marker::PhantomData))
    }
}

/// Adapts a kernel over vectors to a kernel over arrays.
struct OnArrays<K, A>(K, std::marker::PhantomData<A>);

impl<K: SimdKernel<A>, A: Float> ArrayKernel for OnArrays<K, A> {
    type Output = K::Output;

    #[inline(always)]
    fn run<const FUSED: bool, const ROWS: usize, const VECTORS: usize, const WIDTH: usize>(
        self,
    ) -> K::Output {
        self.0.run::<Array<A, FUSED, WIDTH>, ROWS, VECTORS>()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_f32<K: SimdKernel<f32>, const ROWS: usize, const VECTORS: usize>(kernel: K) -> K::Output {
    kernel.run::<avx512::Zmm<false>, ROWS, VECTORS>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_bf16_products<K: SimdKernel<f32>, const ROWS: usize, const VECTORS: usize>(
    kernel: K,
) -> K::Output {
    kernel.run::<avx512::Zmm<true>, ROWS, VECTORS>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_pair_kernel<K: PairKernel, const VECTORS: usize>(kernel: K) {
    kernel.run::<avx512::Zmm<true>, VECTORS>();
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon<K: ArrayKernel, const WIDTH: usize>(kernel: K) -> K::Output {
    kernel.run::<true, 4, 1, WIDTH>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon_f32<K: SimdKernel<f32>>(kernel: K) -> K::Output {
    kernel.run::<neon::Quad, 4, 1>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<K: ArrayKernel, const WIDTH: usize>(kernel: K) -> K::Output {
    kernel.run::<true, 4, 1, WIDTH>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2_f32<K: SimdKernel<f32>>(kernel: K) -> K::Output {
    kernel.run::<Ymms, 6, 1>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512<K: ArrayKernel, const VECTORS: usize, const WIDTH: usize>(kernel: K) -> K::Output {
    kernel.run::<true, 4, VECTORS, WIDTH>()
}

/// Type of scores, probabilities and accumulators, f32 or f64, with kernel dispatch.
pub(crate) trait Real: Float {
    /// Runs an array kernel on a strip of `vectors` vectors of [`Float::WIDTH`] elements.
    fn run<K: ArrayKernel>(token: IsaToken, vectors: usize, kernel: K) -> K::Output;
    /// Runs a product kernel, over pairs of bf16 if `pairs` (only on [`crate::Isa::Avx512Bf16`]).
    fn run_products<K: SimdKernel<Self>>(
        token: IsaToken,
        pairs: bool,
        vectors: usize,
        kernel: K,
    ) -> K::Output;
    /// Runs a kernel on a strip of `vectors` vectors of [`Float::WIDTH`] elements.
    fn run_kernel<K: SimdKernel<Self>>(token: IsaToken, vectors: usize, kernel: K) -> K::Output {
        Self::run_products(token, false, vectors, kernel)
    }
}

impl Real for f32 {
    fn run<K: ArrayKernel>(token: IsaToken, vectors: usize, kernel: K) -> K::Output {
        token.run::<K, 16>(vectors, kernel)
    }

    fn run_products<K: SimdKernel<Self>>(
        token: IsaToken,
        pairs: bool,
        vectors: usize,
        kernel: K,
    ) -> K::Output {
        token.run_f32(pairs, vectors, kernel)
    }
}

impl Real for f64 {
    fn run<K: ArrayKernel>(token: IsaToken, vectors: usize, kernel: K) -> K::Output {
        token.run::<K, 8>(vectors, kernel)
    }

    /// Ignores `pairs`: accumulators of type f64 have f64 inputs.
    fn run_products<K: SimdKernel<Self>>(
        token: IsaToken,
        _: bool,
        vectors: usize,
        kernel: K,
    ) -> K::Output {
        token.run_arrays::<_, _, 8>(vectors, kernel)
    }
}
