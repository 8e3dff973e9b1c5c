//! Tests of the CUDA backend on the emulator: the same host code and kernels as on a GPU.

mod borrowed;
#[path = "../common/mod.rs"]
mod common;
mod compilation;
mod conformance;
mod copies;
mod decode;
mod failures;
mod fork;
mod hip;
mod matrix_backward;
mod mistakes;
mod nccl;
mod packing;
mod sizes;
mod support;
mod warpgroup;
mod warpgroup_backward;
