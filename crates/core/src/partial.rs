//! placeholder
/// Placeholder.
#[derive(Debug)]
pub struct Partial;
