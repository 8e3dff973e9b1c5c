//! Exact attention over sequences that do not fit one device.
//!
//! Each rank keeps its queries; keys and values travel around a ring; every rank folds each arriving block into a running softmax. The
//! result equals ordinary attention, forward and backward.
//!
//! * [`Attention`] says what to compute; [`Attention::plan`] gives a [`Plan`]: a whole ring in this process.
//! * [`RankPlan`] is one rank of a ring over any transport: what a distributed program holds.
//! * [`flash_attention`] and [`ring_attention`] are one call each.
#![forbid(unsafe_code)]

mod attention;
mod one_call;
mod plan;
mod rank_plan;
mod tensors;

pub use annulus_comm::ring::{Report, Ring, RingOptions};
pub use annulus_comm::{self as comm};
pub use annulus_core::{
    Alibi, Alignment, BackwardMode, Batch, BiasFunction, BiasOrder, CustomLayout, DType, DenseMask, Dims, Dropout, Element, Error, Layout,
    Mask, Precision, Result, Route, Run, Runs, SinkShape, Spec, mask,
};
pub use annulus_cpu::Cpu;
#[cfg(feature = "cuda")]
pub use annulus_cuda as cuda;
#[cfg(feature = "wgpu")]
pub use annulus_wgpu as wgpu;
pub use attention::Attention;
pub use one_call::{Options, flash_attention, ring_attention};
pub use plan::Plan;
pub use rank_plan::RankPlan;
pub use tensors::{Backward, Forward, Tensors};
