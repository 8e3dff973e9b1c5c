//! Backward: prologue, the dq pass, the dkv pass, the fused pass, epilogue.

pub(crate) mod begin;
pub(crate) mod calls;
pub(crate) mod dkv;
pub(crate) mod dq;
pub(crate) mod ds;
pub(crate) mod finish;
pub(crate) mod fused;
pub(crate) mod kv_split;
pub(crate) mod leaf_sums;
pub(crate) mod reduction;
pub(crate) mod sinks;
