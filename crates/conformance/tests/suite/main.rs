//! Results of every backend, transport and strategy, and what is refused.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bad_input;
mod bias_table;
mod cpu;
mod facade;
mod key_lists;
mod mock;
mod neighborhood;
mod reproducible;
mod reproducible_cache;
mod statistics;
mod strategies;
