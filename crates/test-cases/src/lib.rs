//! Test cases and their answers.
//!
//! A [`Case`] is one attention with all its tensors in f64. A [`Judge`] holds the
//! [oracle](annulus_core::oracle)'s answer to a case and the error that an answer in a given
//! element type may have. The suite that runs cases on backends and transports is in the crate
//! `annulus-conformance`, which is compiled without optimisation. `annulus check` uses this crate
//! too.
//!
//! | noun | file |
//! |---|---|
//! | a case computed by the facade: [`facade`] | `facade.rs` |
//! | [`Case`], [`Truth`], [`Masks`] | `case.rs`, `masks.rs` |
//! | sources of cases: random ([`Case::random`]), computed elsewhere ([`golden`]) | `random.rs`, `golden.rs`, `draw.rs` |
//! | [`Answer`], [`Judge`], and the plain computation that bounds the error: [`plain()`] | `answer.rs`, `judge.rs`, `plain.rs` |

mod answer;
mod case;
mod draw;
pub mod facade;
pub mod golden;
mod judge;
mod masks;
mod plain;
mod random;

pub use answer::Answer;
pub use case::{Case, Truth};
pub use draw::Draw;
pub use facade::RankAnswer;
pub use judge::{Judge, epsilon};
pub use masks::Masks;
pub use plain::plain;
