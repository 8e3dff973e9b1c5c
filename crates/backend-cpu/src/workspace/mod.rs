//! Memory that is kept across calls: state of a plan, scratch of a thread, blocks in wire order.

pub(crate) mod bias_gradient;
pub(crate) mod bytes;
pub(crate) mod decode;
pub(crate) mod leaves;
pub(crate) mod query_block;
pub(crate) mod query_tiles;
pub(crate) mod records;
pub(crate) mod scratch;
pub(crate) mod state;
