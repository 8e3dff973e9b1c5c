//! A CUDA device that is none: the driver's and the compiler's functions, done by the host.
//!
//! It exists so that the very code that drives a GPU runs on a machine without one:
//!
//! * **compiling** (`compiler.rs`): kernels are compiled by g++ with `ANNULUS_EMULATED` into a shared library, which stands for a cubin;
//! * **time** (`work.rs`): work is queued in streams and done later, a piece at each question after an event. Streams know nothing of each
//!   other but what events say, so what is not ordered by an event sooner or later runs in the wrong order;
//! * **memory** (`memory.rs`): new memory is full of NaN, and lies between guards that are looked at when it is freed;
//! * **kernels** (`modules.rs`): one fiber for each thread, see `host_twin.h` of the kernels; a block whose threads wait for each other for ever fails;
//! * **NCCL** (`nccl`, with the feature of that name, on Linux): sends and receives of threads or processes of one machine, done when both sides' streams
//!   have come there;
//! * **GPUs of compute capability 9.0** (`maps.rs`, the `hopper_` tables): tensor maps in words of the emulator's own, read by `warpgroup_twin.h` of the
//!   kernels, where copies, products and barriers that run by themselves end as late as they may;
//! * **failure** (`functions.rs`): a device that has failed says so at every later call, as CUDA does.
//!
//! It cannot show bank conflicts, races within a warp, or how long anything takes.

mod compiler;
mod functions;
mod maps;
mod memory;
mod modules;
#[cfg(all(feature = "nccl", target_os = "linux"))]
mod nccl;
mod work;

pub use compiler::{compiler_symbols, hopper_compiler_symbols};
pub use functions::{DEVICES, allocations, blocks, hopper_symbols, most_bytes, plant, set_seed, symbols};
#[cfg(all(feature = "nccl", target_os = "linux"))]
pub use nccl::nccl_symbols;
