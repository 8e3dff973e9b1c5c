//! How the ranks of a ring reach each other: transports, and wrappers of transports.
//!
//! | what | file |
//! |---|---|
//! | one rank a thread: [`threads`] | `threads/` |
//! | one rank a process, with the feature `mpi`: `mpi` | `mpi/` |
//! | CUDA memory from device to device, with the feature `nccl`: `nccl` | `nccl/` |
//! | what all ranks must know of each other: [`agree`], [`close`], [`gather`] | `agreement.rs` |
//! | one rank of a ring, the engine: [`ring`] | `ring/` |
//! | no wait without an end: [`Deadline`] | `deadline.rs` |
//! | corruption is noticed: [`Checksum`] | `checksum.rs` |
//! | what happened when, and its picture: [`Trace`] | `trace.rs` |
//! | a host transport for a device's memory: [`Staged`] | `staged.rs` |
//! | faults on purpose, and the error that each must cause: [`Fault`] | `fault.rs` |
//!
//! A wrapper is a transport around a transport. Put [`Deadline`] outermost, and [`Fault`], in tests, next to the wire:
//! `Deadline<Trace<Checksum<Fault<Threads>>>>`.
#![cfg_attr(not(any(feature = "mpi", feature = "cuda")), forbid(unsafe_code))]
#![cfg_attr(any(feature = "mpi", feature = "cuda"), deny(unsafe_code))]

pub mod agreement;
pub mod checksum;
#[cfg(any(feature = "nccl", all(feature = "mpi", feature = "cuda")))]
mod cuda_gather;
pub mod deadline;
mod delegate;
pub mod fault;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
#[allow(unsafe_code, reason = "NCCL's functions are promises that the compiler cannot check")]
pub mod nccl;
mod observed;
mod ranges;
pub mod ring;
mod span;
pub mod staged;
mod staging;
pub mod threads;
pub mod trace;

pub use agreement::{Descriptor, WIRE_VERSION, agree, barrier, close, gather};
pub use checksum::Checksum;
pub use deadline::{Deadline, Silence};
pub use fault::{Fault, Injection};
pub use staged::Staged;
pub use threads::Threads;
pub use trace::{Trace, TraceLog};
