//! Tiled attention for host memory: the [`annulus_core::Backend`] whose device is the processor.
//!
//! Folders from the top down; each imports only from those below it:
//!
//! | folder | role |
//! |---|---|
//! | `backend.rs`, `pass.rs` | [`annulus_core::Backend`], its passes, fingerprint of the arithmetic |
//! | `backward/` | prologue, dq pass, dkv pass, fused pass, epilogue |
//! | `decode/` | split-KV decode of few queries |
//! | `forward/` | forward pass tile by tile, epilogue |
//! | `tangents/` | JVP and double backward |
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
mod pass;

mod backward {
    pub(crate) mod begin;
    pub(crate) mod calls;
    pub(crate) mod dkv;
    pub(crate) mod dq;
    pub(crate) mod ds;
    pub(crate) mod finish;
    pub(crate) mod fused;
    pub(crate) mod leaf_sums;
    pub(crate) mod reduction;
}

mod decode {
    pub(crate) mod kernels;
    pub(crate) mod split_kv;
    pub(crate) mod tiles;
}

mod forward {
    pub(crate) mod outputs;
    pub(crate) mod query_pass;
    pub(crate) mod tiles;
}

mod gather {
    pub(crate) mod backward;
    pub(crate) mod block;
    pub(crate) mod forward;
    pub(crate) mod operands;
    pub(crate) mod rows;
}

mod tangents;

mod workspace {
    pub(crate) mod bias_gradient;
    pub(crate) mod decode;
    pub(crate) mod leaves;
    pub(crate) mod query_block;
    pub(crate) mod query_tiles;
    pub(crate) mod records;
    pub(crate) mod scratch;
    pub(crate) mod state;
    pub(crate) mod tangents;
}

mod tile {
    pub(crate) mod aligned;
    pub(crate) mod bf16_pairs;
    pub(crate) mod bias;
    pub(crate) mod bias_table;
    pub(crate) mod dropout;
    pub(crate) mod ds_tile;
    pub(crate) mod gemm;
    pub(crate) mod geometry;
    pub(crate) mod input;
    pub(crate) mod operands;
    pub(crate) mod pack;
    pub(crate) mod pack_terms;
    pub(crate) mod prefetch;
    pub(crate) mod scores;
    pub(crate) mod softmax;
    pub(crate) mod terms;
    pub(crate) mod tile_mask;
    pub(crate) mod tile_products;
}

mod threads {
    pub(crate) mod ordered_reduction;
    pub(crate) mod team;
}

mod simd {
    pub(crate) mod amx;
    pub(crate) mod dispatch;
    pub(crate) mod element;
    pub(crate) mod exp;
    pub(crate) mod isa;
    pub(crate) mod tile_unit;
    pub(crate) mod vector;

    #[cfg(target_arch = "x86_64")]
    mod avx2;
    #[cfg(target_arch = "x86_64")]
    mod avx512;
    #[cfg(target_arch = "aarch64")]
    mod neon;
}

pub use backend::Cpu;
pub use backend::id as numerics_id;
pub use pass::{CpuBackward, CpuForward};
pub use simd::isa::Isa;
pub use simd::tile_unit::amx;
pub use tile::aligned::prefer_large_pages;
pub use workspace::state::CpuWorkspace;
