//! Exact attention, forward and backward, over sequences that do not fit one device.
//!
//! The ranks of a ring keep their queries. Keys and values travel around the ring as blocks, and
//! each rank merges every arriving block into an online softmax:
//!
//! ```text
//! for each block of keys and values:
//!     m' = max(m, rowmax S)     acc = acc·e^(m − m') + e^(S − m')·V     l likewise     m = m'
//! out = acc / l                 lse = m + ln l
//! ```
//!
//! The result equals ordinary attention up to the order of rounding.
//!
//! Three values make a plan ([`Setup`]), two of them optional:
//!
//! * [`Attention`], the mathematics: masks, scale, bias, sinks, dropout, precision;
//! * [`Division`] among ranks: layout, route, strategy;
//! * [`Runtime`]: backend, threads, deadlines, hooks.
//!
//! Four types compute:
//!
//! * [`LocalRing`] is a whole ring in this process; [`Plan`] is one rank over any transport, which
//!   is what an MPI process holds.
//! * [`LocalCache`] is a whole KV cache for decoding in this process; [`Cache`] is one rank.
//!
//! [`overlapped`] runs passes while the program computes. [`flash_attention`]
//! and [`ring_attention`] plan and compute in one call.
//!
//! # Shapes
//! Tensors are ndarray views, `[batch, seq, heads, dim]`; lse is `[batch, heads, seq]`.
//!
//! # Errors
//! Every fallible function returns [`Error`]. Codes 1 to 19 are the caller's fault and leave the
//! plan usable, 20 to 39 are missing resources or ranks, and from 40 on the plan is dead
//! ([`Error::is_fatal`]).
//!
//! # Source
//! Liu et al. 2023, Ring Attention with Blockwise Transformers; Dao et al. 2022, FlashAttention.
#![forbid(unsafe_code)]

mod attention;
pub mod backend;
mod cache;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod devices;
mod division;
mod engine;
mod local_cache;
mod local_ring;
mod one_call;
pub mod overlapped;
mod plan;
mod rank_tensors;
mod runtime;
mod second_derivatives;
mod setup;
mod tensors;

/// Transports, their wrappers, the ring engine and its events.
pub use annulus_comm as comm;
pub use annulus_comm::ring::Report;
pub use annulus_core::{
    Alignment, BackwardMode, Batch, BiasOrder, DType, Dims, Element, Error, Precision, Result,
    SinkShape, Spec,
};
pub use annulus_plan::{Layout, Route, Strategy};
pub use attention::Attention;
pub use cache::{Cache, CacheShape};
pub use division::{Division, RankRows};
pub use local_cache::LocalCache;
pub use local_ring::LocalRing;
pub use one_call::{Options, flash_attention, ring_attention};
pub use plan::Plan;
pub use runtime::Runtime;
pub use second_derivatives::{DoubleBackward, Jvp};
pub use setup::Setup;
pub use tensors::{Backward, BackwardViewMut, Forward, ForwardView, ForwardViewMut, Tensors};
/// Crates whose types are in this interface.
pub use {half, ndarray};

/// Masks of the program's own, and what they are made of.
pub mod mask {
    pub use annulus_core::{DenseMask, Fingerprint, KeyIntervals, KeyLists, mask::*};
}

/// Biases that are computed from positions, or learned by relative positions.
pub mod bias {
    pub use annulus_core::{Alibi, BiasFunction, BiasTable};
}

/// Rows of ranks, machines, bytes and predicted times.
pub mod planning {
    pub use annulus_core::{LEAF_ROWS, Run, Runs};
    pub use annulus_plan::*;
}

/// Examples of the README and of the pages in `docs`, run as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/first-ring.md")]
    struct FirstRing;
    #[doc = include_str!("../../../docs/rust.md")]
    struct Rust;
}
