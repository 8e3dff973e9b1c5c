//! Transports between the ranks of a ring, wrappers of transports, and the ring engine.
//!
//! | content | file |
//! |---|---|
//! | ranks as threads: [`threads`] | `threads/` |
//! | ranks as processes, with the feature `mpi`: `mpi` | `mpi/` |
//! | CUDA memory from device to device, with the feature `nccl`: `nccl` | `nccl/` |
//! | agreement on arguments and status: [`agree`], [`close`], [`all_gather`] | `agreement/` |
//! | entry and end of a collective call, for every engine | `calls.rs` |
//! | the engine of one rank of a ring: [`ring`] | `ring/` |
//! | grids of heads × queries × keys, and rings over groups: [`heads_ring`] | `heads_ring/` |
//! | wrapper: bounds every wait, [`Deadline`] | `deadline/` |
//! | wrapper: records times, [`Trace`] | `trace.rs` |
//! | wrapper: device memory over a host transport, [`Staged`] | `staged.rs` |
//!
//! A wrapper is a transport around a transport. Put [`Deadline`] outermost:
//! `Deadline<Trace<Threads>>`. Tests inject faults by an innermost wrapper
//! (`annulus-mock-device`).
#![cfg_attr(not(any(feature = "mpi", feature = "cuda")), forbid(unsafe_code))]
#![cfg_attr(any(feature = "mpi", feature = "cuda"), deny(unsafe_code))]

pub mod agreement;
mod calls;
pub mod deadline;
mod delegate;
mod head_statistics;
pub mod heads_ring;
pub mod kv_cache;
mod merged_softmax;
mod message;
#[cfg(feature = "mpi")]
#[cfg_attr(
    not(feature = "link-mpi"),
    allow(unused_unsafe, reason = "constants of a linked MPI are variables; the ABI's are not")
)]
pub mod mpi;
#[cfg(feature = "nccl")]
#[allow(unsafe_code, reason = "calls of the C interface of NCCL")]
pub mod nccl;
mod observed;
pub mod profiler;
pub mod ring;
pub mod staged;
pub mod threads;
pub mod trace;

/// Host memory, and the traits of a transport: of its blocks, and of its control messages.
pub use annulus_core::{Control, Host, Transport};

pub use agreement::{Descriptor, WIRE_VERSION, agree, all_gather, barrier, close};
pub use calls::{Report, caught};
pub use deadline::{Cancellation, Deadline, Silence};
pub use staged::Staged;
pub use threads::Threads;
pub use trace::{Trace, TraceLog};

/// The crate whose types [`forward_control`] and [`forward_transport`] name.
#[doc(hidden)]
pub use annulus_core as core;
pub use annulus_plan as plan;
