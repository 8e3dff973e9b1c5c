//! GPU memory, streams, events and compiled kernels, by CUDA or by HIP ([`Api`]): shared by the
//! backend and the transports of one rank.
//!
//! The libraries are loaded at run time, never linked: the crate builds without a toolkit, and a
//! machine without a driver gets one clear error. Every call goes through a table of functions
//! ([`Symbols`], [`CompilerSymbols`]), so the same code runs on a GPU, on the tables of
//! `annulus-cuda-emulator`, and on tables whose functions fail.
//!
//! | type | file |
//! |---|---|
//! | function tables (feature `nccl`: NCCL's), loading | `symbols.rs`, `nccl.rs` |
//! | HIP's functions in CUDA's tables | `hip.rs` |
//! | [`Device`]: a context and its first failure | `device.rs` |
//! | what the devices of a context share; deferred frees | `context.rs` |
//! | [`Stream`], [`Event`] | `stream.rs` |
//! | [`CudaBuffer`], pinned host memory | `buffer.rs` |
//! | [`CudaSpace`]; [`CudaTensor`], views, also of shared host memory; [`TensorMap`] | `tensor.rs` |
//! | [`CudaCopier`]: blocks staged through host memory; copies of byte ranges in one launch | `staged.rs` |
//! | [`Compiler`], disk cache, [`Module`], [`Kernel`] | `compiler.rs`, `cache.rs`, `module.rs` |

mod buffer;
mod cache;
mod compiler;
mod context;
mod device;
mod hip;
mod module;
#[cfg(feature = "nccl")]
pub mod nccl;
mod staged;
mod stream;
mod symbols;
mod tensor;

pub use buffer::CudaBuffer;
pub use buffer::PinnedBuffer;
pub use cache::{Image, ImageCache, ImageKind};
pub use compiler::{Compiler, KernelProgram};
pub use cudarc;
pub use device::{Architecture, Device, Gpu};
pub use module::{Kernel, Module};
pub use staged::{CudaCopier, CudaDownload, CudaUpload};
pub use staged::{RangeDirection, RangeTransfer};
pub use stream::{Event, Stream};
pub use symbols::{Api, ArchitectureName, CompilerStatus, CompilerSymbols, Status, Symbols};
pub use tensor::{CudaSpace, CudaTensor, CudaView, CudaViewMut, TensorMap};
