//! Transports and their wrappers, tested through the trait `Transport` alone. Every ring runs under
//! a watchdog, so no test hangs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::single_range_in_vec_init, reason = "a message of one byte range is meant")]

mod agreement;
mod common;
mod deadline;
mod faults;
mod patterns;
mod staged;
mod threads;
