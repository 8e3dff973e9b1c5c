//! The CUDA backend on a device of fibers: the same host code and the same kernels as on a GPU.

mod borrowed;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod failures;
mod nccl;
mod overflow;
mod packing;
mod planted;
mod sizes;
mod support;
mod warpgroup;
