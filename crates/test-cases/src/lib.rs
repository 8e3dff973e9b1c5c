//! Test cases and their answers.
//!
//! A [`Case`] is one attention with all its tensors in f64. A [`Judge`] holds the
//! [oracle](annulus_core::oracle)'s answer to a case and the error that an answer in a given
//! element type may have. What computes the cases is in the crate `annulus-conformance`. The two
//! are separate crates because this one is compiled with optimisation, once, and the other without
//! it, once more for each MPI.
//!
//! | noun | file |
//! |---|---|
//! | [`Case`], [`Truth`], [`Masks`] | `case.rs`, `masks.rs` |
//! | sources of cases: random ([`Case::random`]), computed elsewhere ([`golden`]) | `random.rs`, `golden.rs`, `draw.rs` |
//! | [`Answer`], [`Judge`], and the plain computation that bounds the error: [`plain()`] | `answer.rs`, `judge.rs`, `plain.rs` |

mod answer;
mod case;
mod draw;
pub mod golden;
mod judge;
mod masks;
mod plain;
mod random;

pub use answer::Answer;
pub use case::{Case, Truth};
pub use draw::Draw;
pub use judge::{Judge, epsilon};
pub use masks::Masks;
pub use plain::plain;
