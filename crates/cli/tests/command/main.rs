//! Runs the command and checks its exit codes, files and messages.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod arguments;
mod attend;
mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod decode;
mod documents;
mod figures;
mod files;
mod forward_only;
mod interrupt;
mod launcher;
mod limits;
mod machine;
mod messages;
mod odd_files;
mod outputs;
mod readme;
mod support;
mod terminal;
mod trace;
#[cfg(feature = "wgpu")]
mod wgpu;
