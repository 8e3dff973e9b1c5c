//! Specs, masks, layouts, schedules and the seams of ring attention, as traits and data.
//!
//! This crate defines which rows a rank owns, which keys each query attends to, and which messages
//! the ranks exchange. It contains no device code, no thread and no network; backend crates compute
//! the tiles and the comm crate moves the blocks. An order to read it in:
//!
//! | concept | items | files |
//! |---|---|---|
//! | shapes and element types | [`Dims`], [`DType`], [`Element`] | `dims.rs`, `dtype.rs` |
//! | what is computed | [`Spec`] | `spec.rs` |
//! | visible pairs of query and key | [`Mask`], [`KeyIntervals`], [`Batch`], [`Visibility`], [`BlockSparseMask`] | `mask/`, `key_intervals.rs`, `batch.rs`, `visibility.rs`, `block_sparse_mask.rs` |
//! | rows of a rank | [`Layout`], [`Rows`], [`Shard`] | `layout.rs`, `rows.rs`, `shard/` |
//! | merge of partial results | [`SoftmaxEnd`] | `softmax_end.rs` |
//! | division among ranks | [`Strategy`], [`HeadGrid`], [`StrategyTraffic`] | `strategy/` |
//! | predicted time on a machine | [`Machine`], [`Prediction`] | `machine/` |
//! | messages of the ring | [`Needs`], [`Schedule`], [`RowLayout`] | `needs/`, `schedule/`, `row_layout.rs` |
//! | the two seams, over one memory [`Space`] | [`Backend`], [`Transport`] | `backend.rs`, `pass.rs`, `transport.rs`, `message_balance.rs`, `space.rs` |
//! | allocation of lists that grow with the sequence | [`memory`] | `memory.rs` |
//! | the f64 reference | [`oracle`] | `oracle/` |
#![forbid(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("annulus indexes with 64-bit offsets and needs a 64-bit target");

mod backend;
mod batch;
mod bias;
mod block_buffers;
mod block_sparse_mask;
mod dense_mask;
mod device_space;
mod dims;
mod dropout;
mod dtype;
mod error;
mod fingerprint;
mod gpu_tiles;
mod head_shard;
mod host_rows;
mod key_intervals;
mod layout;
mod leaf_sums;
mod leaf_tree;
mod machine;
pub mod mask;
pub mod memory;
mod message_balance;
mod needs;
mod on_host;
pub mod oracle;
mod pass;
mod placement;
mod process;
mod ring_shards;
mod row_bounds;
mod row_layout;
mod row_set;
mod rows;
mod run;
mod schedule;
mod shard;
mod softmax_end;
mod space;
mod spec;
mod strategy;
mod tile;
mod tile_bounds_table;
mod tile_tree;
mod transport;
mod visibility;

pub use backend::{
    Backend, BackwardPass, Capabilities, ForwardPass, Passes, RangePairs, Reduction, Tick,
    Workspace,
};
pub use batch::Batch;
pub use bias::{Alibi, BiasFunction, PositionBias};
pub use block_buffers::{GRADIENT_BUFFERS, block_buffers, gradient_buffers};
pub use block_sparse_mask::{BitmaskPolicy, BlockSparseMask, CsrTiles, TileRun, Tiling};
pub use dense_mask::{DenseMask, MaskElement};
pub use device_space::{DeviceSpace, StagedSpace};
pub use dims::{Dims, Side};
pub use dropout::{DropoutMask, philox4x32_10};
pub use dtype::{DType, Element, HostView, HostViewMut};
pub use error::{Error, Result};
pub use fingerprint::Fingerprint;
pub use gpu_tiles::{GqaPacking, RangeLists};
pub use host_rows::RowSegment;
pub use key_intervals::KeyIntervals;
pub use layout::{CustomLayout, Layout, LeafLayout, MOST_RANKS};
pub use leaf_sums::{AbsentLeaves, LeafNode, LeafSums, complete_nodes, merge_nodes};
pub use leaf_tree::{LEAF_ROWS, LeafMerge, LeafMerges, LeafStep, RankLeaves, leaves_of};
pub use machine::{
    CacheShards, ComputeRate, Link, Machine, Prediction, TokenPrediction, TokenRate, TokenTraffic,
};
pub use mask::Mask;
pub use message_balance::{MessageBalance, unmatched_pair};
pub use needs::{Needs, NeedsIndex};
pub use on_host::{HostViews, OnHost, OnHostBackward, OnHostForward, OnHostWorkspace};
pub use pass::{
    BackwardInputs, Block, Gradients, Inputs, Outputs, RankShard, View, ViewMut, max_and_sum,
};
pub use placement::{Order, Placement};
pub use process::{HomeProcess, Process, ProcessOwned};
pub use ring_shards::RingShards;
pub use row_layout::{RowField, RowLayout};
pub use row_set::RowSet;
pub use rows::Rows;
pub use run::{Run, Runs};
pub use schedule::{
    Choice, Group, Message, RankSchedule, RingTraffic, Route, Schedule, Step, Traffic, Transfer,
    Violation, Work, WorkMatrix,
};
pub use shard::Shard;
pub use softmax_end::SoftmaxEnd;
pub use space::{Host, HostBuffer, HostMemory, HostTensors, Space};
pub use spec::{
    Alignment, BackwardMode, BiasOrder, Dropout, HeadShard, Precision, SinkShape, Spec,
};
pub use strategy::{
    ExchangeFields, GridViolation, GroupLayout, HeadAxis, HeadField, HeadGrid, RingRows, Strategy,
    StrategyBalance, StrategyTraffic, TrafficOptions,
};
pub use tile::{QueryTile, TileBits, TileClass};
pub use tile_bounds_table::TileBoundsTable;
pub use transport::{
    AgreedLengths, Arrived, Channel, Control, Incoming, MessageHeader, Outgoing, Transport,
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
