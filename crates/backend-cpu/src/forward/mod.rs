//! Forward pass, tile by tile, and its epilogue.

pub(crate) mod finish;
pub(crate) mod leaves;
pub(crate) mod outputs;
pub(crate) mod query_pass;
pub(crate) mod sink_line;
pub(crate) mod tiles;
