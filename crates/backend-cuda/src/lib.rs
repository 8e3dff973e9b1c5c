//! Tiled exact attention on NVIDIA GPUs: an [`annulus_core::Backend`] on a CUDA device.
//!
//! The kernels are CUDA C++ in `kernels/`. NVRTC compiles a variant for the GPU when it is first
//! needed; the image is cached on disk. Kernels use CUDA through one header, `primitives.cuh`,
//! which has a host twin: the emulator (`annulus-cuda-emulator`) runs the same files
//! with one fiber per thread, and with them all of this crate.
//!
//! | role | file |
//! |---|---|
//! | [`annulus_core::Backend`], [`annulus_core::Workspace`]; memory | `backend.rs`; `state.rs` |
//! | [`annulus_core::ForwardPass`]: tiles, row epilogue | `forward.rs` |
//! | forward: choice of tiles, GQA packing, ranges of keys | `forward_tiles.rs` |
//! | [`annulus_core::BackwardPass`]: prologue, dQ, dbias, dK and dV, end | `backward.rs` |
//! | backward on warpgroups: statistics, kernels | `backward_warpgroup.rs` |
//! | stream, kernels and masks of both passes | `pass_context.rs` |
//! | block-sparse mask, numbers of keys | `block_mask.rs` |
//! | passes on host tensors in memory that the device shares | `settled.rs` |
//! | wire records; kernel arguments, tensor maps for TMA | `records.rs`; `arguments.rs` |
//! | levels and variants; compilation, loading | `variant.rs`; `kernels.rs` |
//!
//! Level `plain` computes with scalar multiply-adds on any architecture. It serves f64, f32, the
//! bias gradient and unnormalized outputs. Forward and backward of 16-bit elements use tensor cores
//! (`mma.sync`) with f32 accumulators: operands are streamed through shared memory by `cp.async`,
//! the backward pass is two kernels without atomics, and neither scores nor their gradients are
//! written to memory.
//!
//! [`Level::Warpgroup`] (compute capability 9.0 only) runs forward and, up to 128 dims, backward of
//! 16-bit elements on warpgroups: two or three consumers compute with `wgmma`, one producer loads
//! tiles by TMA into a multi-stage pipeline. Barriers, descriptors and swizzles are tested on the
//! emulator, and every variant compiles without spills. It is the default where GPU, driver and
//! compiler support it; [`Level::variable`] and [`Cuda::at_level`] choose another level.
//!
//! Blocks and accumulators stay on the device across the ring. A warm pass sends only kernel
//! launches from the host, because the block-sparse mask of every block is cached on the device.
//! One backend issues all of its work to one stream. [`Cuda::on_host`] wraps it for tensors in host
//! memory.

mod arguments;
mod backend;
mod backward;
mod backward_warpgroup;
mod block_mask;
mod forward;
mod forward_tiles;
mod kernels;
mod pass_context;
mod records;
mod settled;
mod state;
mod variant;

pub use annulus_device_cuda as device;
pub use backend::{Cuda, CudaWorkspace};
pub use backward::CudaBackward;
pub use forward::CudaForward;
pub use kernels::{SourceEdit, compile};
pub use settled::Settled;
pub use variant::Level;
pub use variant::{Family, Variant};
