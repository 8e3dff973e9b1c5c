//! How the ranks of a ring reach each other: transports, and wrappers of transports.
//!
//! | what | file |
//! |---|---|
//! | one rank a thread: [`threads`] | `threads/` |
#![forbid(unsafe_code)]

mod ranges;
pub mod threads;

pub use threads::Threads;
