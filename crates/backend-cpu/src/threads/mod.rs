//! The threads of one backend and the order in which they add to shared memory.

pub(crate) mod ordered_reduction;
pub(crate) mod team;
