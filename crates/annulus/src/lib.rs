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
mod tensors;

use std::borrow::Borrow;

use annulus_comm::ring::RingOptions;

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

/// What is computed, how the ranks divide it, and how they run.
///
/// Constructors of plans take whatever converts to it: `&attention`, `(&attention, &division)` or
/// `(&attention, &division, &runtime)`, by value or by reference. What is left out has its default.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    /// The mathematics.
    pub attention: Attention,
    /// The division among ranks.
    pub division: Division,
    /// Backend, threads, deadlines and hooks.
    pub runtime: Runtime,
}

impl Setup {
    /// Changes the mathematics.
    #[must_use]
    pub fn map_attention(self, change: impl FnOnce(Attention) -> Attention) -> Self {
        Self { attention: change(self.attention), ..self }
    }

    /// Changes the division among ranks.
    #[must_use]
    pub fn map_division(self, change: impl FnOnce(Division) -> Division) -> Self {
        Self { division: change(self.division), ..self }
    }

    /// Changes the runtime.
    #[must_use]
    pub fn map_runtime(self, change: impl FnOnce(Runtime) -> Runtime) -> Self {
        Self { runtime: change(self.runtime), ..self }
    }

    /// Returns the checked definition for tensors of these lengths, after checking all parameters.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`], which names the parameter.
    pub fn spec(&self, dims: Dims) -> Result<Spec> {
        let spec = self.attention.spec(dims)?;
        self.division.check(&spec)?;
        self.runtime.check()?;
        Ok(spec)
    }

    /// Returns the options of the ring engine, for a [`Ring`](comm::ring::Ring) made by
    /// hand.
    pub fn ring_options(&self) -> RingOptions {
        RingOptions {
            backward: !self.attention.forward_only,
            second_derivatives: self.attention.second_derivatives,
            local_gradients: self.attention.local_gradients,
            ..self.division.ring_options()
        }
    }
}

impl From<Attention> for Setup {
    fn from(attention: Attention) -> Self {
        Self { attention, ..Self::default() }
    }
}

impl From<&Attention> for Setup {
    fn from(attention: &Attention) -> Self {
        attention.clone().into()
    }
}

impl From<&Setup> for Setup {
    fn from(setup: &Setup) -> Self {
        setup.clone()
    }
}

impl<A: Borrow<Attention>, D: Borrow<Division>> From<(A, D)> for Setup {
    fn from((attention, division): (A, D)) -> Self {
        Self {
            attention: attention.borrow().clone(),
            division: division.borrow().clone(),
            ..Self::default()
        }
    }
}

impl<A, D, R> From<(A, D, R)> for Setup
where
    A: Borrow<Attention>,
    D: Borrow<Division>,
    R: Borrow<Runtime>,
{
    fn from((attention, division, runtime): (A, D, R)) -> Self {
        Self {
            attention: attention.borrow().clone(),
            division: division.borrow().clone(),
            runtime: runtime.borrow().clone(),
        }
    }
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
