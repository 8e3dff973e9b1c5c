//! Split-KV decode of few queries, and the forward call that selects it.

pub(crate) mod attend;
pub(crate) mod kernels;
pub(crate) mod packed_queries;
pub(crate) mod split_kv;
