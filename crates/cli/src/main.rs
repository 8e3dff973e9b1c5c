//! annulus
#![forbid(unsafe_code)]
mod failure;
mod file;
mod interrupt;
fn main() {}
