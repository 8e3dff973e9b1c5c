//! Instruction sets of the kernels, and the choice of one.
//!
//! Prefetch instructions.

use annulus_core::{Error, Result};

#[cfg(target_arch = "x86_64")]
use crate::simd::tile_unit;

/// Instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Baseline of the compilation target. Products and sums are rounded separately.
    Portable,
    /// NEON of 64-bit ARM: 128-bit vectors, 32 registers.
    Neon,
    /// AVX2 with FMA and F16C: 256-bit vectors, 16 registers.
    Avx2,
    /// AVX-512 F, VL, BW, DQ: 512-bit vectors, 32 registers.
    Avx512,
    /// AVX-512 with BF16 dot products (`VDPBF16PS`) for bf16 inputs.
    ///
    /// Probabilities and dS are rounded to bf16 before their products; accumulators are f32.
    /// Selected only by [`Isa::VARIABLE`], [`crate::Cpu::with_isa`] or
    /// [`annulus_core::Precision::Default`].
    Avx512Bf16,
    /// [`Isa::Avx512Bf16`] with products on AMX tiles (`TDPBF16PS`) of bf16, f16 and f32 inputs: of
    /// f16 as sums of two bf16, of f32 as sums of three.
    Amx,
    /// [`Isa::Amx`] with emulated tiles of the same bits, on every processor: for tests. Slow.
    AmxEmulated,
}

impl Isa {
    /// All instruction sets, narrowest first.
    pub const ALL: [Self; 7] = [
        Self::Portable,
        Self::Neon,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::Amx,
        Self::AmxEmulated,
    ];

    /// Environment variable that forces an instruction set: `amx`, `amx-emulated`, `avx512bf16`,
    /// `avx512`, `avx2`, `neon` or `portable`.
    pub const VARIABLE: &'static str = "ANNULUS_CPU_ISA";

    /// Returns the name used in [`Isa::VARIABLE`] and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
            Self::AmxEmulated => "amx-emulated",
        }
    }

    /// True if bf16 inputs are multiplied as pairs, with P and dS rounded to bf16 or, on AMX at a
    /// higher precision than [`annulus_core::Precision::Default`], to sums of two.
    pub const fn multiplies_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx | Self::AmxEmulated)
    }

    /// True if inputs but f64 are multiplied on tiles, as sums of bf16 terms.
    pub(crate) const fn has_tiles(self) -> bool {
        matches!(self, Self::Amx | Self::AmxEmulated)
    }

    /// True if this machine has the instructions, and for [`Isa::Amx`] if this process has the
    /// permission to use them.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let has = match self {
            Self::Portable => true,
            Self::Neon => false,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("fma")
            }
            Self::Avx512Bf16 => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")
            }
            Self::Amx => Self::Avx512Bf16.is_available() && tile_unit::amx() == Some(Ok(())),
            Self::AmxEmulated => true,
        };
        #[cfg(target_arch = "aarch64")]
        let has = matches!(self, Self::Portable | Self::AmxEmulated)
            || self == Self::Neon && std::arch::is_aarch64_feature_detected!("neon");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has = matches!(self, Self::Portable | Self::AmxEmulated);
        has
    }

    /// Returns the instruction set, or an error if this machine lacks it.
    pub(crate) fn require(self) -> Result<Self> {
        if self.is_available() {
            Ok(self)
        } else {
            Err(Error::unsupported(self.name(), "this processor"))
        }
    }

    /// Returns the instruction set that multiplies pairs of bf16, if that is faster than products
    /// of f32.
    ///
    /// AMX has 15 times the rate (one core of a Xeon: 3,700 against 239 GFLOP/s), so that also six
    /// products of bf16 terms for one of f32 are faster. `VDPBF16PS` has
    /// twice the rate on AMD's processors and half the rate on Intel's. The decision reads the
    /// vendor name instead of a clock, so that it is the same in every run.
    pub(crate) fn fast_pairs() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let amd = {
            let name = std::arch::x86_64::__cpuid(0);
            [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
        };
        #[cfg(not(target_arch = "x86_64"))]
        let amd = false;
        let candidates = [(Self::Amx, true), (Self::Avx512Bf16, amd)];
        candidates.into_iter().find(|&(isa, fast)| fast && isa.is_available()).map(|(isa, _)| isa)
    }

    /// Returns the instruction set that [`Isa::VARIABLE`] forces, if it is set.
    pub(crate) fn forced() -> Result<Option<Self>> {
        Self::named(
            std::env::var_os(Self::VARIABLE)
                .map(|name| name.to_string_lossy().into_owned())
                .as_deref(),
        )
    }

    /// Returns the instruction set that [`Isa::VARIABLE`] forces, else the widest available one
    /// that rounds only results.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the variable if its value is not the name of an
    /// instruction set, [`Error::Unsupported`] if the machine lacks the one that it names.
    pub fn chosen() -> Result<Self> {
        Ok(Self::forced()?.unwrap_or_else(Self::widest))
    }

    /// Returns the widest available instruction set that rounds only results, that is, none that
    /// [multiplies pairs](Isa::multiplies_pairs).
    pub(crate) fn widest() -> Self {
        let exact = Self::ALL.into_iter().rev().filter(|isa| !isa.multiplies_pairs());
        exact.into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    fn named(name: Option<&str>) -> Result<Option<Self>> {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(None) };
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name);
        let isa = isa.ok_or_else(|| {
            Error::invalid(
                Self::VARIABLE,
                name,
                "amx, amx-emulated, avx512bf16, avx512, avx2, neon or portable",
            )
        })?;
        isa.require().map(Some)
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Prefetches every cache line that holds a part of `memory` into the first-level cache.
///
/// A no-op on other architectures: stable Rust has no prefetch intrinsic for them.
#[inline(always)]
pub(crate) fn prefetch_l1<T>(memory: &[T]) {
    prefetch_l1_at(memory.as_ptr().cast(), size_of_val(memory));
}

/// As [`prefetch_l1`], of `bytes` bytes from `first` on: of memory that no slice describes, because
/// other parts of it are written meanwhile.
#[inline(always)]
pub(crate) fn prefetch_l1_at(first: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    each_line(first, bytes, |line| {
        // SAFETY: a prefetch is a hint. It is allowed for any address and changes nothing but cache
        // contents. SSE is part of every x86-64.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast())
        };
    });
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box((first, bytes));
}

/// Prefetches every cache line that holds a part of `memory` into the second-level cache, for data
/// that is read later.
#[inline(always)]
pub(crate) fn prefetch_l2<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    each_line(memory.as_ptr().cast(), size_of_val(memory), |line| {
        // SAFETY: as in `prefetch_l1_at`.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast())
        };
    });
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(memory);
}

/// Calls `prefetch` with an address in each cache line of 64 bytes that holds one of `bytes` bytes
/// from `first` on.
///
/// Rows of a caller's tensor seldom begin at a line: the allocator aligns to 16 bytes. A row of 64
/// f32 then lies in five lines.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn each_line(first: *const u8, bytes: usize, prefetch: impl Fn(*const u8)) {
    const LINE: usize = 64;
    if bytes == 0 {
        return;
    }
    let offset = first.addr() % LINE;
    for line in 0..(offset + bytes).div_ceil(LINE) {
        prefetch(first.wrapping_sub(offset).wrapping_add(line * LINE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_name_is_accepted_or_rejected() {
        assert_eq!(Isa::named(Some("portable")), Ok(Some(Isa::Portable)));
        assert_eq!(Isa::named(Some("")), Ok(None));
        assert!(Isa::widest().is_available() && !Isa::widest().multiplies_pairs());
        assert_eq!(Isa::named(Some("sse9")).unwrap_err().code(), 1);
        for isa in Isa::ALL {
            match Isa::named(Some(isa.name())) {
                Ok(named) => assert!(named == Some(isa) && isa.is_available()),
                Err(error) => assert!(error.code() == 2 && !isa.is_available()),
            }
        }
    }
}
