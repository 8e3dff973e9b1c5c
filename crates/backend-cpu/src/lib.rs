//! Tiled attention for host memory: the [`annulus_core::Backend`] whose device is the processor.
//!
//! Folders from the top down; each imports only from those below it:
//!
//! | folder | role |
//! |---|---|
//! | `backend.rs`, `pass.rs` | the seam: [`annulus_core::Backend`], its passes, fingerprint of the arithmetic |
//! | `backward/` | prologue, dq pass, dkv pass, fused pass, epilogue |
//! | `decode/` | split-KV decode of few queries |
//! | `forward/` | forward pass tile by tile, epilogue |
//! | `workspace/` | state of a plan, scratch of a thread, blocks in wire order |
//! | `tile/` | packing, micro-kernels, scores, online softmax, tile mask |
//! | `threads/` | thread team, ordered reduction |
//! | `simd/` | instruction sets, vectors, kernel dispatch, e^x and tanh x |
//!
//! Design:
//!
//! * Either queries or keys lie in the lanes of vectors, and the other side is broadcast, so that
//!   no sum crosses lanes (except in decode).
//! * One thread works a task in a fixed order. It owns the memory that it writes, or adds to shared
//!   memory in task order. Results depend only on inputs, mask and instruction set.
//! * A score is one chain of multiply-adds. Backward therefore recomputes exactly the scores of
//!   forward.

mod backend;
mod backward;
mod decode;
mod forward;
mod pass;
mod simd;
mod threads;
mod tile;
mod workspace;

pub use backend::Cpu;
pub use backend::id as numerics_id;
pub use pass::{CpuBackward, CpuForward};
pub use simd::isa::Isa;
pub use workspace::state::CpuWorkspace;
