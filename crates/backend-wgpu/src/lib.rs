//! Tiled attention for any GPU that Vulkan, Metal or DX12 reaches: the [`annulus_core::Backend`] whose device is a [`wgpu::Device`].
//!
//! Read it in this order:
//!
//! | what | file |
//! |---|---|
//! | the seam, call by call | `backend.rs` |
//! | forward: tiles, and the end of a row | `forward.rs`, `finish.rs` |
//! | backward: beginning and end, dq and dbias, dk and dv | `backward.rs`, `backward_queries.rs`, `backward_keys.rs` |
//! | tiles of any pass: cut into parts, told who sees whom, queued | `tiles.rs`, `parts.rs`, `sight.rs` |
//! | memory: workspace, records, copies between layouts, tensors | `workspace.rs`, `records.rs`, `copy.rs`, `memory.rs` |
//! | the same for tensors and blocks in host memory | `hosted.rs`, `rooms.rs` |
//! | to and from the host, for [`annulus_comm::Staged`] | `staged.rs`, `staging.rs` |
//! | machine: adapters, device, queue, errors, time | `adapter.rs`, `device.rs`, `launch.rs`, `fault.rs`, `stopwatch.rs` |
//! | how much of it is used: levels, which is chosen, whether matrices are multiplied rightly | `level.rs`, `choice.rs`, `probe.rs` |
//! | the kernels themselves, in WGSL | `kernels/` |
//!
//! The design in five lines. Everything but what travels stays in device memory from the first block to the last. The host looks at the mask, a
//! tile of 32 × 32 pairs at a time, and tells the kernels which tiles there are and, where not all pairs of one are visible, which; so a kernel knows no
//! mask. A workgroup owns what it writes, so no number is added up by atomics and the bits repeat. Backward is two kernels, one owning
//! queries and one owning keys; logits are one chain of multiply-adds in all of them. Whether a row has seen anything is a number beside its
//! running maximum, never a special maximum: shaders may assume that no number is infinite. For the same reason a NaN that is *seen* shows in its
//! row on the devices that were tried, but no device promises it; one that is *hidden* is never multiplied, on cooperative matrices no more than elsewhere.
//!
//! All work goes to one queue in order, so an event is nothing but the promise of having been queued ([`Queued`]).

mod adapter;
mod backend;
mod backward;
mod backward_keys;
mod backward_queries;
mod choice;
mod copy;
mod device;
mod fault;
mod finish;
mod forward;
mod hosted;
mod kernels;
mod launch;
mod level;
mod memory;
mod parts;
mod probe;
mod records;
mod rooms;
mod sight;
mod staged;
mod staging;
mod stopwatch;
mod tiles;
mod workspace;

pub use adapter::Adapter;
pub use backend::Wgpu;
pub use device::{Gpu, Options, PATIENCE};
pub use hosted::{Hosted, HostedWorkspace};
pub use level::Level;
pub use memory::{GpuBuffer, Queued, Tensor, WgpuSpace};
pub use staged::{Copier, Download, Upload};
pub use stopwatch::Stopwatch;
pub use wgpu;
pub use workspace::Workspace;
