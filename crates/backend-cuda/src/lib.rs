//! Tiled attention for NVIDIA GPUs: the [`annulus_core::Backend`] whose device is a CUDA device.
//!
//! Kernels are CUDA C++ in `kernels/`, compiled when they are first needed by NVRTC for the GPU at hand and remembered on disk. They reach the
//! hardware through one header, `primitives.cuh`, which has a twin for the host: the same files run there, one fiber for each thread
//! ([`annulus_device_cuda`], feature `emulator`), and so does all of this crate.
//!
//! | what | file |
//! |---|---|
//! | the seam, call by call; for tensors in host memory | `backend.rs`, `hosted.rs` |
//! | forward: tiles, on warpgroups, and the end of a row | `forward.rs`, `forward_warpgroup.rs`, `finish.rs` |
//! | backward: beginning and end, dq, dk and dv, dbias | `backward.rs`, `backward_queries.rs`, `backward_keys.rs`, `bias_gradient.rs` |
//! | who sees whom, by tiles | `sight.rs` |
//! | memory: workspace, records, what kernels are given | `workspace.rs`, `records.rs`, `arguments.rs` |
//! | which kernels there are, and how they are compiled | `kernels.rs`, `level.rs` |
//!
//! Level 0, products in the sums' own type on any architecture, serves f64, f32, the gradient of a bias, and outputs that are not normalised. Forward
//! and backward of 16-bit elements run on matrix units (`mma.sync`), with sums in f32: operands are streamed through shared memory by `cp.async`, the
//! backward pass is two kernels without atomics, and neither logits nor their gradients reach memory. No claim of speed is made: none was measured.
//!
//! At [`Level::Warpgroup`], compute capability 9.0 alone, the forward pass of 16-bit elements is done by warpgroups: two multiply (`wgmma`, weights from
//! registers), one has the copy engine bring tiles of keys and values into a ring of stages. Its order of barriers, descriptors and swizzles is shown on
//! the twin, and that it compiles without spills; it has not run on a GPU, and is taken only where it is asked for ([`Level::VARIABLE`],
//! [`Cuda::at_level`]).
//!
//! Blocks and accumulators stay on the device across the ring; what crosses from the host in a warm pass is nothing but launches, as who sees
//! whom is remembered block by block. All work of one backend is in one stream.

mod arguments;
mod backend;
mod backward;
mod backward_keys;
mod backward_queries;
mod bias_gradient;
mod finish;
mod forward;
mod forward_warpgroup;
mod hosted;
mod kernels;
mod level;
mod packing;
mod records;
mod sight;
mod workspace;

pub use annulus_device_cuda as device;
pub use backend::Cuda;
pub use hosted::{Hosted, HostedWorkspace};
pub use kernels::{Family, Variant, compile};
pub use level::Level;
pub use workspace::Workspace;
