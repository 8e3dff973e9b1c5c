//! The backend against the oracle: every feature, every type, any split into blocks; and what must not depend on threads.

#![allow(clippy::unwrap_used, reason = "a test")]

mod accuracy;
mod calls;
mod features;
mod few;
mod forced;
mod numbers;
mod support;
mod threads;
