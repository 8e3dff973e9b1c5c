//! Transports and their wrappers, tested through the seam alone. No test can hang: every ring runs under a watchdog.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::single_range_in_vec_init, reason = "a hop of one range is meant")]

mod agreement;
mod common;
mod deadline;
mod faults;
mod patterns;
mod staged;
mod threads;
mod wrappers;
