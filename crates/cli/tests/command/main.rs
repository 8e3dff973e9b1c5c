//! The command as a user has it: its exit codes, its files, its words.

#![allow(clippy::unwrap_used, reason = "what a test cannot do fails the test")]

mod abuse;
mod arguments;
mod attend;
mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod figures;
mod files;
mod interrupt;
mod launcher;
mod limits;
mod malformed;
mod messages;
mod odd_files;
mod outputs;
mod readme;
mod support;
mod terminal;
mod trace;
#[cfg(feature = "wgpu")]
mod wgpu;
