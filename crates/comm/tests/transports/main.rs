//! Transports and their wrappers, tested through the seam alone. No test can hang: every ring runs under a watchdog.

mod common;
mod patterns;
mod threads;
