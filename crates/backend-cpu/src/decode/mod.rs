//! Split-KV decode of few queries.

pub(crate) mod kernels;
pub(crate) mod packed_queries;
pub(crate) mod split_kv;
