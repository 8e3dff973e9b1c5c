//! One tile: packing, micro-kernels, scores and their epilogue, online softmax, tile mask.

pub(crate) mod aligned;
pub(crate) mod bf16_pairs;
pub(crate) mod bias;
pub(crate) mod dropout;
pub(crate) mod ds_tile;
pub(crate) mod gemm;
pub(crate) mod geometry;
pub(crate) mod input;
pub(crate) mod pack;
pub(crate) mod prefetch;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod tile_mask;
