//! Runs the command and checks its exit codes, files and messages.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod arguments;
mod attend;
mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod documents;
mod figures;
mod limits;
mod machine;
mod odd_files;
mod outputs;
mod readme;
mod running;
mod support;
#[cfg(feature = "wgpu")]
mod wgpu;
