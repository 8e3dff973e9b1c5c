//! Specs, masks, the seams of ring attention and the f64 oracle, as traits and data.
//!
//! This crate defines which keys each query attends to. It contains no device code, no thread and
//! no network; `annulus-plan` divides the rows among ranks, backend crates compute the tiles and
//! the comm crate moves the blocks. An order to read it in:
//!
//! | concept | items | files |
//! |---|---|---|
//! | shapes and element types | [`Dims`], [`DType`], [`Element`] | `dims.rs`, `dtype.rs` |
//! | what is computed | [`Spec`] | `spec.rs` |
//! | visible pairs of query and key | [`Mask`], [`KeyIntervals`], [`Batch`], [`Visibility`], [`BlockSparseMask`] | `mask/`, `key_intervals.rs`, `batch.rs`, `visibility.rs`, `block_sparse_mask.rs` |
//! | rows of a tensor | [`Rows`], [`Shard`] | `rows.rs`, `shard/` |
//! | merge of partial results | [`SoftmaxEnd`] | `softmax_end.rs` |
//! | rows in a message | [`RowLayout`] | `row_layout.rs` |
//! | the two seams, over one memory [`Space`] | [`Backend`], [`Transport`] | `backend.rs`, `pass.rs`, `transport.rs`, `message_balance.rs`, `space.rs` |
//! | allocation of lists that grow with the sequence | [`memory`] | `memory.rs` |
//! | the f64 reference | [`oracle`] | `oracle/` |
#![forbid(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("annulus indexes with 64-bit offsets and needs a 64-bit target");

mod backend;
mod batch;
mod bias;
mod bias_table;
mod block_sparse_mask;
mod dense_mask;
mod dims;
mod dropout;
mod dtype;
mod error;
mod exact_sum;
mod fingerprint;
mod gpu_tiles;
mod host_rows;
mod key_intervals;
mod key_lists;
mod leaf_sums;
mod leaf_tree;
mod listed_pairs;
pub mod mask;
pub mod memory;
mod message_balance;
mod on_host;
pub mod oracle;
mod pass;
mod placement;
mod process;
mod row_bounds;
mod row_layout;
mod row_set;
mod rows;
mod run;
mod shard;
mod softmax_end;
mod space;
mod spec;
mod tile;
mod tile_bounds;
mod transport;
mod visibility;

pub use backend::{
    Backend, BackwardPass, Capabilities, ForwardPass, Passes, RangePairs, Reduction, TangentPass,
    Workspace,
};
pub use batch::Batch;
pub use bias::{Alibi, BiasFunction, PositionBias};
pub use bias_table::BiasTable;
pub use block_sparse_mask::{BitmaskPolicy, BlockSparseMask, CsrTiles, TileRun, Tiling};
pub use dense_mask::{DenseMask, MaskElement};
pub use dims::{Dims, Side};
pub use dropout::{DropoutMask, philox4x32_10};
pub use dtype::{DType, Element, HostView, HostViewMut};
pub use error::{Error, Result};
pub use exact_sum::ExactSum;
pub use fingerprint::Fingerprint;
pub use gpu_tiles::{GqaPacking, RangeLists};
pub use host_rows::RowSegment;
pub use key_intervals::KeyIntervals;
pub use key_lists::{KeyLists, ListedKeys, ReceivedLists};
pub use leaf_sums::{AbsentLeaves, LeafNode, LeafSums, complete_nodes, merge_nodes};
pub use leaf_tree::{LEAF_ROWS, LeafMerge, LeafMerges, LeafStep, RankLeaves, leaves_of};
pub use listed_pairs::{ListedPairs, TransposedPairs};
pub use mask::Mask;
pub use message_balance::{MessageBalance, unmatched_pair};
pub use on_host::{HostViews, OnHost, OnHostBackward, OnHostForward, OnHostWorkspace};
pub use pass::{
    BackwardInputs, Block, Gradients, Inputs, Outputs, RankShard, TangentInputs, TangentOutputs,
    View, ViewMut, max_and_sum,
};
pub use placement::{Order, Placement};
pub use process::{HomeProcess, Process, ProcessOwned};
pub use row_layout::{RowField, RowLayout};
pub use row_set::RowSet;
pub use rows::Rows;
pub use run::{Run, Runs};
pub use shard::Shard;
pub use softmax_end::{SoftmaxEnd, rebased_score_sum};
pub use space::{
    Arrived, DeviceSpace, Host, HostBuffer, HostMemory, HostTensors, Space, StagedSpace, Tick,
};
pub use spec::{
    Alignment, BackwardMode, BiasOrder, Dropout, HeadShard, Precision, SinkShape, Spec,
};
pub use tile::{QueryTile, TileBits, TileClass};
pub use tile_bounds::TileBoundsTable;
pub use transport::{
    AgreedLengths, Channel, Control, Incoming, MessageHeader, Outgoing, Transport,
};
pub use visibility::Visibility;

/// Converts a 64-bit number to an index. The conversion is exact, because the crate compiles only
/// for targets with a `usize` of 64 bits.
#[expect(
    clippy::cast_possible_truncation,
    reason = "usize is 64 bits wide, see the compile_error above"
)]
pub const fn index(number: u64) -> usize {
    number as usize
}
