//! Tiled exact attention on any GPU with Vulkan, Metal or DX12: an [`annulus_core::Backend`] on a
//! [`wgpu::Device`].
//!
//! | role | file |
//! |---|---|
//! | [`annulus_core::Backend`], [`annulus_core::Workspace`] | `backend.rs` |
//! | state of a rank and of a pass; accumulators in several buffers | `pass_context.rs` |
//! | wire records; forward: tiles; backward: prologue; dQ and dbias; dK and dV | `passes.rs` |
//! | epilogues of both | `finish.rs` |
//! | tile kernels: launch, chunks, block-sparse mask | `tiles.rs`, `chunks.rs`, `block_mask.rs` |
//! | few queries: packed heads, ranges of keys | `split_kv.rs` |
//! | operands, strided copies | `operands.rs`, `copy.rs` |
//! | device memory: [`annulus_core::DeviceSpace`] | `memory.rs` |
//! | copies from and to the host: [`annulus_core::StagedSpace`] | `staged.rs`, `staging.rs` |
//! | adapters and limits, device, pipelines | `adapter.rs`, `device.rs`, `pipelines.rs` |
//! | devices open and close one at a time; locks | `adapter.rs` |
//! | command batches, timing | `launch.rs` |
//! | order of batches, proof that they ran, idle staging buffers | `pacing.rs` |
//! | waits for batches | `queue.rs` |
//! | work per submission | `chunks.rs`, `pacing.rs` |
//! | errors | `errors.rs` |
//! | levels; register and query tiles, and the default of all | `choice.rs` |
//! | checks of subgroups, matrices and conversions | `probe.rs` |
//! | kernels in WGSL | `kernels/` |
//!
//! # Design
//! * Blocks, accumulators, softmax statistics and dQ stay in device memory across the ring; only
//!   what the ring sends leaves it, for tensors in host memory ([`Wgpu::on_host`]), too.
//! * The host evaluates the mask per tile of 32 × 32 pairs and passes a block-sparse mask to the
//!   kernels, so kernels contain no mask logic.
//! * A workgroup owns its outputs: no atomic additions, so results are bitwise reproducible.
//!   Backward is two kernels, one owning query tiles and one owning key tiles. A score is the same
//!   chain of multiply-adds in all kernels.
//! * Shaders may assume that no number is infinite. So whether a row has attended to any key is a
//!   flag beside its maximum, not a maximum of −∞. For the same reason a NaN of a visible pair
//!   reaches its row on the devices tried, but no device guarantees it. A masked NaN is never
//!   multiplied, with cooperative matrices either.
//!
//! All work goes to one queue, in order, so an event carries no state ([`Queued`]).

mod adapter;
mod backend;
mod block_mask;
mod choice;
mod chunks;
mod copy;
mod device;
mod errors;
mod finish;
mod kernels;
mod launch;
mod memory;
mod memory_model;
mod operands;
mod pacing;
mod pass_context;
mod passes;
mod pipelines;
mod probe;
mod queue;
mod split_kv;
mod staged;
mod staging;
mod tiles;

pub use adapter::{Adapter, NO_ADAPTER};
pub use backend::{Wgpu, WgpuWorkspace};
pub use choice::Level;
pub use choice::QueryTileSize;
pub use choice::RegisterTile;
pub use device::{Gpu, Options, PATIENCE};
pub use kernels::offline::KernelText;
pub use launch::Stopwatch;
pub use memory::{GpuBuffer, Queued, Tensor, WgpuSpace};
#[doc(hidden)]
pub use memory_model::Translation;
pub use passes::{WgpuBackward, WgpuForward};
pub use pipelines::{KernelEdit, Translate, runtime_checks};
pub use staged::{Copier, Download, Upload};
pub use staging::TransferredBytes;
pub use wgpu;
