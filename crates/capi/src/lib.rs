//! The C interface of annulus: `libannulus.so`, `libannulus.a` and `include/annulus.h`.
//!
//! ```text
//! annulus_options ─create─▶ annulus_attention ─plan_create_*─▶ annulus_plan ─▶ forward, backward
//!                                             ─cache_create_*─▶ annulus_cache ─▶ append, attend
//!                 ─endpoint_create_*─▶ annulus_endpoint, for several plans and caches
//! ```
//!
//! The doc comments of all items named `annulus_*` are the documentation of the header, which
//! cbindgen makes of them (`tests/abi.rs`). Rules of every export:
//!
//! * It returns a status, [`annulus::Error::code`] or 0, and never unwinds ([`status`]).
//! * A handle is a number that is never used twice, so a handle that is foreign or was destroyed is
//!   found in a table and never dereferenced ([`handle`]).
//! * A struct that may grow begins with its size ([`fields`]).
//! * A tensor is checked before a view of it is made ([`tensor`], [`overlap`]).
//! * It starts no thread that was not requested: a rank computes with one thread by default.
#![allow(non_camel_case_types, reason = "types of the C interface have the names of C")]

mod attention;
mod batch;
mod cache;
mod callbacks;
mod cuda;
mod endpoint;
mod fields;
mod handle;
#[rustfmt::skip]
mod option_fields;
mod options;
mod passes;
mod plan;
mod second_derivatives;
mod status;
mod tensor;

pub use attention::*;
pub use batch::*;
pub use cache::*;
pub use callbacks::*;
pub use cuda::*;
pub use endpoint::*;
pub use fields::ANNULUS_NONE;
pub use option_fields::*;
pub use options::*;
pub use passes::*;
pub use plan::*;
pub use second_derivatives::*;
pub use status::*;
pub use tensor::*;
