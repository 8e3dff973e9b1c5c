//! How the ranks of a ring reach each other: transports, and wrappers of transports.
//!
//! | what | file |
//! |---|---|
//! | one rank a thread: [`threads`] | `threads/` |
//! | what all ranks must know of each other: [`agree`], [`close`], [`gather`] | `agreement.rs` |
#![forbid(unsafe_code)]

pub mod agreement;
mod ranges;
pub mod threads;

pub use agreement::{Descriptor, agree, barrier, close, gather};
pub use threads::Threads;
