//! A device that is none: memory that no host slice can reach, work that happens later, and a backend and a transport for it.
//!
//! It exists to prove that nothing between the seams assumes host memory, or that work is done when a call returns:
//!
//! * **memory** (`memory.rs`): buffers are handles; their bytes are reached by the device's own copies only;
//! * **time** (`memory.rs`): work is queued and done later, in order, a piece at each poll. An event is a number in that order.
//!   Whoever reads or writes a buffer from outside before its last event has passed gets an error, never stale bytes;
//! * **tensors** (`tensor.rs`): the views at the seam are tags: a handle, a type and a shape;
//! * **backend** (`backend.rs`, `kernel.rs`): every feature, computed pair by pair in f64, slowly;
//! * **transport** (`transport.rs`): copies from one device to another; `staged.rs` lets [`annulus_comm::Staged`] go through the host.

mod backend;
mod kernel;
mod memory;
mod staged;
mod tensor;
mod transport;

pub use backend::{MockBackend, MockBackward, MockForward, MockWorkspace};
pub use memory::{Device, DeviceBuffer, DeviceEvent};
pub use staged::{Download, Upload};
pub use tensor::{DeviceTensor, DeviceView, DeviceViewMut, MockSpace};
pub use transport::{DeviceTransport, device_ring};
