//! The two types that sums are kept in.

use std::{
    iter::Sum,
    ops::{Add, AddAssign, Div, Mul, Neg, Sub},
};

use annulus_core::{DType, Element};
use half::{bf16, f16};

use crate::{
    exp::{exp64, tanh32, weight32},
    isa::{Job, Kernel, Path},
};

/// f32 or f64: what logits, weights and sums are made of.
pub(crate) trait Real:
    Element<Accumulator = Self>
    + Default
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Sum
{
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    /// Elements of a vector of 64 bytes.
    const WIDTH: usize;

    /// self·b + c.
    fn fused<const FUSED: bool>(self, b: Self, c: Self) -> Self;
    /// e^self for what is hardly above 0; see [`crate::exp::weight32`].
    fn weight<const FUSED: bool>(self) -> Self;
    fn tanh<const FUSED: bool>(self) -> Self;
    /// Rounds to a type that is no wider (a wider one changes nothing) and widens again.
    fn rounded(self, dtype: DType) -> Self;
    /// Runs a job on a strip of `vectors` vectors of [`Real::WIDTH`] elements.
    fn run<J: Job>(path: Path, vectors: usize, job: J) -> J::Output;
    /// Runs a kernel on a strip of `vectors` vectors of [`Real::WIDTH`] elements.
    fn run_kernel<K: Kernel<Self>>(path: Path, vectors: usize, kernel: K) -> K::Output;
    /// The same over words, pairs of bf16, where `pairs`: only on [`crate::Isa::Avx512Bf16`].
    fn run_products<K: Kernel<Self>>(path: Path, pairs: bool, vectors: usize, kernel: K) -> K::Output;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = Self::INFINITY;
    const WIDTH: usize = 16;

    #[inline(always)]
    fn fused<const FUSED: bool>(self, b: Self, c: Self) -> Self {
        if FUSED { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn weight<const FUSED: bool>(self) -> Self {
        weight32::<FUSED>(self)
    }

    #[inline(always)]
    fn tanh<const FUSED: bool>(self) -> Self {
        tanh32::<FUSED>(self)
    }

    #[inline(always)]
    fn rounded(self, dtype: DType) -> Self {
        match dtype {
            DType::F64 | DType::F32 => self,
            DType::Bf16 => bf16::from_f32(self).to_f32(),
            DType::F16 => f16::from_f32(self).to_f32(),
        }
    }

    fn run<J: Job>(path: Path, vectors: usize, job: J) -> J::Output {
        path.run::<J, 16>(vectors, job)
    }

    fn run_kernel<K: Kernel<Self>>(path: Path, vectors: usize, kernel: K) -> K::Output {
        path.run_f32(vectors, kernel)
    }

    fn run_products<K: Kernel<Self>>(path: Path, pairs: bool, vectors: usize, kernel: K) -> K::Output {
        if pairs { path.run_pairs(vectors, kernel) } else { path.run_f32(vectors, kernel) }
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = Self::INFINITY;
    const WIDTH: usize = 8;

    #[inline(always)]
    fn fused<const FUSED: bool>(self, b: Self, c: Self) -> Self {
        if FUSED { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn weight<const FUSED: bool>(self) -> Self {
        exp64::<FUSED>(self)
    }

    #[inline(always)]
    fn tanh<const FUSED: bool>(self) -> Self {
        Self::tanh(self)
    }

    #[inline(always)]
    fn rounded(self, dtype: DType) -> Self {
        dtype.round(self)
    }

    fn run<J: Job>(path: Path, vectors: usize, job: J) -> J::Output {
        path.run::<J, 8>(vectors, job)
    }

    fn run_kernel<K: Kernel<Self>>(path: Path, vectors: usize, kernel: K) -> K::Output {
        path.run_f64(vectors, kernel)
    }

    /// Sums in f64 have no bf16 inputs.
    fn run_products<K: Kernel<Self>>(path: Path, _: bool, vectors: usize, kernel: K) -> K::Output {
        path.run_f64(vectors, kernel)
    }
}
