//! CUDA memory, streams, events and compiled kernels: what a backend and a transport of one rank share.
//!
//! Libraries are found when they are asked for, never linked: everything builds without a toolkit, and a machine without a driver gets one
//! clear error. Every call goes through a table of functions ([`Symbols`], [`CompilerSymbols`]), so that the same code runs on a GPU, on a
//! device of fibers on the host (`emulator`, a feature), and on tables whose functions fail.
//!
//! | noun | file |
//! |---|---|
//! | tables of functions; with the feature `nccl` those of NCCL; how they are found | `symbols.rs`, `nccl.rs`, `library.rs` |
//! | [`Device`]: a context, its first failure | `device.rs` |
//! | [`Stream`], [`Event`] | `stream.rs` |
//! | [`CudaBuffer`], pinned host memory | `buffer.rs`, `pinned.rs` |
//! | [`CudaSpace`], [`CudaBlocks`], [`CudaTensor`] and its views | `space.rs`, `tensor.rs` |
//! | [`Compiler`], its cache on disk, [`Module`], [`Kernel`] | `compiler.rs`, `cache.rs`, `module.rs` |
//! | [`TensorMap`], what the copy engine reads | `tensor_map.rs` |

mod buffer;
mod cache;
mod compiler;
mod device;
#[cfg(feature = "emulator")]
pub mod emulator;
mod library;
mod module;
#[cfg(feature = "nccl")]
pub mod nccl;
mod pinned;
mod space;
mod stream;
mod symbols;
mod tensor;
mod tensor_map;

pub use buffer::CudaBuffer;
pub use cache::Cache;
pub use compiler::{Compiler, Image, ImageKind, Program};
pub use cudarc;
pub use device::{Architecture, Device};
pub use module::{Kernel, Module};
pub use pinned::PinnedBuffer;
pub use space::{CudaBlocks, CudaSpace};
pub use stream::{Event, Stream};
pub use symbols::{CompilerSymbols, Symbols};
pub use tensor::{CudaTensor, CudaView, CudaViewMut};
pub use tensor_map::TensorMap;
