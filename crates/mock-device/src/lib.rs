//! The smallest complete backend, [`Pairwise`] (`pairwise.rs`, `kernel.rs`), and a mock device that
//! computes with it: its memory is inaccessible to the host, and its work is asynchronous. And for
//! tests of transports faults of messages (`fault.rs`) and random patterns (`patterns.rs`).
//!
//! It proves that no code between the backend and transport traits assumes host memory, or that
//! work is done when a call returns:
//!
//! * **memory** (`memory.rs`): buffers are handles; only the device's own copies reach their bytes;
//! * **time** (`memory.rs`): work is queued and executed later, in order, one item at each poll. An
//!   event is a number in that order. Reading or writing a buffer from outside before its last
//!   event has passed is an error and never gives stale bytes;
//! * **tensors** (`tensor.rs`): the views of a pass are tags: a handle, a type and a shape;
//! * **backend** (`backend.rs`): every call queues work of [`Pairwise`]'s arithmetic;
//! * **copies** (`staged.rs`) of [`annulus_comm::Staged`] through host memory.

mod backend;
mod fault;
mod kernel;
mod memory;
mod pairwise;
pub mod patterns;
mod staged;
mod tensor;

pub use backend::{MockBackend, MockPass, MockWorkspace};
pub use fault::{Fault, Injection};
pub use kernel::{decode, encode};
pub use memory::{Device, DeviceBuffer, DeviceEvent};
pub use pairwise::{Pairwise, PairwisePass, PairwiseWorkspace};
pub use staged::{Download, Upload};
pub use tensor::{DeviceTensor, DeviceView, DeviceViewMut, MockSpace};
