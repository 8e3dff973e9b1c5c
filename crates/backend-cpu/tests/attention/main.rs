//! The backend against the oracle: every feature, every type, any split into blocks, any thread
//! count.

#![allow(clippy::unwrap_used, reason = "a test")]

mod accuracy;
mod calls;
mod forward_only;
mod ranks;
mod short_calls;
mod support;
mod threads;
mod tiles;
