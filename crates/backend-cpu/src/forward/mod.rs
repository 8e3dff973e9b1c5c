//! Forward pass, tile by tile, and its epilogue.

pub(crate) mod finish;
pub(crate) mod leaves;
pub(crate) mod query_pass;
pub(crate) mod tiles;
