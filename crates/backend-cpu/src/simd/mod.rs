//! The machine: instruction sets, SIMD vectors, dispatch of kernels, e^x and tanh.

pub(crate) mod dispatch;
pub(crate) mod element;
pub(crate) mod exp;
pub(crate) mod isa;
pub(crate) mod lanes;
pub(crate) mod vector;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
