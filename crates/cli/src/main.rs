//! The `annulus` command.
fn main() {}
