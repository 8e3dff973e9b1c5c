//! The suite that every backend and transport must pass.
//!
//! | noun | file |
//! |---|---|
//! | one attention with all its tensors, and the truth about it: [`Case`], [`Truth`] | `case.rs` |
//! | cases whose answers come from elsewhere | `golden.rs` |
//! | memory that no host can reach, with a backend and a transport: [`device`] | `device/` |
//! | repeatable random numbers: [`Draw`] | `draw.rs` |

mod case;
pub mod device;
mod draw;
pub mod golden;

pub use case::{Case, Truth};
pub use draw::Draw;
