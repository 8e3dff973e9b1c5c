//! Emulated CUDA device: the driver, NVRTC and NCCL implemented on the host, so that the code that
//! drives a GPU is tested without one.
//!
//! * **Compiler** (`compiler.rs`): g++ compiles the kernels with `ANNULUS_EMULATED` into a shared
//!   library, which stands for a cubin.
//! * **Streams** (`work.rs`): work is queued and runs one item per query of an event. Streams are
//!   ordered by events only, so a missing event soon shows as a wrong order.
//! * **Memory** (`memory.rs`): new memory is NaN and lies between guards that are checked when it
//!   is freed.
//! * **Kernels** (`modules.rs`): one fiber per thread, and three thread blocks at a time, see
//!   `primitives_host.h` of the kernels. A launch in which every thread waits for another fails
//!   ([`deadlocks`]).
//! * **NCCL** (`nccl`, on Linux): sends and receives between threads or
//!   processes of one machine; a message moves when both streams have reached it.
//! * **Compute capability 9.0** (`memory.rs`, the `hopper_` tables): tensor maps in the emulator's
//!   own layout, decoded by `warpgroup_host.h` of the kernels, where TMA, wgmma and mbarriers
//!   complete as late as the rules allow.
//! * **HIP** (the `hip_` tables): the same device, whose kernels are compiled with `ANNULUS_AMD` and
//!   the macro of their target; waves of 64 threads run together, MFMA has the layouts and roundings
//!   of the target, and shared memory is that of a compute unit.
//! * **Failure** (`context.rs`): a failed device returns its error from every later call, like
//!   CUDA.
//!
//! Not emulated: bank conflicts, races within a warp, timing.

mod compiler;
mod context;
mod functions;
mod memory;
mod modules;
#[cfg(target_os = "linux")]
mod nccl;
mod work;

pub use compiler::{compiler_symbols, hip_compiler_symbols, hopper_compiler_symbols};
pub use context::{
    DEFAULT_SEED, DEVICES, EARLY_COPIES, WHOLE_WAVES, allocations, blocks, bytes_to_device,
    bytes_to_host, clear_counts, deadlocks, device_copies, most_bytes, plant, queued, set_seed,
};
pub use functions::{apu_symbols, hip_symbols, hopper_symbols, symbols};
#[cfg(target_os = "linux")]
pub use nccl::{nccl_symbols, rccl_symbols};
