//! The mathematics of ring attention, without a device, a thread or a socket.
//!
//! This crate says *what* is computed and *who sends what to whom*; it computes nothing fast. Read it in this order:
//!
//! | noun | file |
//! |---|---|
//! | shapes: [`Dims`], element types: [`DType`], [`Element`] | `dims.rs`, `dtype.rs` |
//! | who sees whom: [`Mask`], [`Spans`], [`Batch`], [`Rows`], [`Visibility`], [`SeenTiles`] | `mask/`, `spans.rs`, `batch.rs`, `shard/`, `rows.rs`, `visibility.rs`, `tile_lists.rs` |
//! | what is computed: [`Spec`] | `spec.rs` |
//! | the running softmax: [`Partial`] | `partial.rs` |
//! | the ring: [`Layout`], [`Needs`], [`Schedule`], [`Record`] | `layout.rs`, `needs.rs`, `schedule/`, `record.rs` |
//! | the two seams: [`Backend`], [`Transport`], over one memory [`Space`] | `backend.rs`, `transport.rs`, `space.rs` |
//! | the truth: [`oracle`] | `oracle.rs` |
#![forbid(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("annulus indexes with 64-bit offsets and needs a 64-bit target");

mod backend;
mod batch;
mod bias;
mod coordinates;
mod dense_mask;
mod dims;
mod dropout;
mod dtype;
mod error;
mod fingerprint;
mod hulls;
mod layout;
pub mod mask;
mod needs;
pub mod oracle;
mod outline;
mod partial;
mod record;
mod row_set;
mod rows;
mod run;
mod schedule;
mod shard;
mod space;
mod spans;
mod spec;
mod tile;
mod tile_lists;
mod tile_tree;
mod transport;
mod visibility;

pub use backend::{Backend, Block, Gradients, Inputs, Local, Outputs, Saved, Tick};
pub use batch::Batch;
pub use bias::{Alibi, BiasFunction, PositionBias};
pub use coordinates::Coordinates;
pub use dense_mask::{DenseMask, MaskElement};
pub use dims::Dims;
pub use dropout::{DropoutMask, philox4x32_10};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use fingerprint::Fingerprint;
pub use hulls::Hulls;
pub use layout::{CustomLayout, Layout, Side};
pub use mask::Mask;
pub use needs::Needs;
pub use partial::Partial;
pub use record::{Field, Record};
pub use row_set::RowSet;
pub use rows::Rows;
pub use run::{Run, Runs};
pub use schedule::{Choice, Group, Message, Order, Placement, Route, Schedule, Step, Traffic, Transfer, Violation, Work};
pub use shard::Shard;
pub use space::{Host, HostBuffer, HostTensors, HostView, HostViewMut, Space};
pub use spans::Spans;
pub use spec::{Alignment, BackwardMode, BiasOrder, Dropout, Precision, SinkShape, Spec};
pub use tile::{QueryTile, TileBits, TileClass};
pub use tile_lists::{Marked, SeenTiles, TileLists, TileRun, Tiling};
pub use transport::{Arrived, Channel, Control, Hop, Incoming, Outgoing, Transport};
pub use visibility::Visibility;

/// A global number as an index. Exact: the crate refuses to build where `usize` is narrower than 64 bits.
#[expect(clippy::cast_possible_truncation, reason = "usize is 64 bits wide, see the compile_error above")]
pub const fn index(number: u64) -> usize {
    number as usize
}
