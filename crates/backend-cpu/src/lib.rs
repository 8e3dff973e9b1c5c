//! Tiled attention for host memory: the [`annulus_core::Backend`] whose device is the processor.
//!
//! Read it in this order:
//!
//! | what | file |
//! |---|---|
//! | the seam, call by call | `backend.rs` |
//! | forward: tiles, few queries over many keys, and the end of a row | `forward.rs`, `decode.rs`, `decode_products.rs`, `finish.rs` |
//! | backward: beginning and end, dq and dbias, dk and dv, all at once and by whom in turn | `backward.rs`, `backward_queries.rs`, `backward_keys.rs`, `backward_together.rs`, `backward_turns.rs`, `bias_gradient.rs` |
//! | one tile: who sees whom, logits, softmax, gradients, products | `sight.rs`, `logits.rs`, `bias.rs`, `dropout.rs`, `softmax.rs`, `gradient.rs`, `products.rs`, `whole_tile.rs`, `pairs.rs` |
//! | memory: workspace, scratch, packed tiles, records | `workspace.rs`, `statistics.rs`, `scratch.rs`, `pack.rs`, `records.rs`, `aligned.rs`, `input.rs`, `ahead.rs` |
//! | machine: instruction sets, vectors, threads, sizes | `isa.rs`, `vector.rs`, `real.rs`, `lanes.rs`, `exp.rs`, `team.rs`, `geometry.rs` |
//!
//! The design in three lines. One of queries and keys lies in the lanes of vectors and the other is broadcast, so no sum crosses lanes. A task owns
//! what it writes, or takes its turn at it, and is worked by one thread in a fixed order, so results depend on nothing but inputs, mask and instruction set. A
//! logit is one chain of multiply-adds, so backward meets the very logits of forward.

mod ahead;
mod aligned;
mod backend;
mod backward;
mod backward_keys;
mod backward_queries;
mod backward_together;
mod backward_turns;
mod bias;
mod bias_gradient;
mod decode;
mod decode_products;
mod dropout;
mod exp;
mod finish;
mod forward;
mod geometry;
mod gradient;
mod input;
mod isa;
mod lanes;
mod logits;
mod pack;
mod pairs;
mod products;
mod real;
mod records;
mod scratch;
mod sight;
mod softmax;
mod statistics;
mod team;
mod vector;
mod whole_tile;
mod workspace;

pub use backend::Cpu;
pub use isa::Isa;
pub use workspace::Workspace;
