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
//! | [`Case`], [`Masks`]; the oracle's results: [`Truth`]; those of a subject: [`Answer`] | `case.rs` |
//! | random cases: [`Case::random`], [`mask_object`], [`set_of_batch`] | `random.rs` |
//! | cases computed elsewhere: [`golden`] | `golden.rs`, `judge.rs` |
//! | [`Judge`], and the plain computation that bounds the error: [`plain()`] | `judge.rs`, `plain.rs` |

mod case;
pub mod facade;
pub mod golden;
mod judge;
mod plain;
mod random;

pub use case::Draw;
pub use case::{Answer, Case, Masks, Truth};
pub use facade::RankAnswer;
pub use judge::{Expected, WrongArray};
pub use judge::{Judge, epsilon};
pub use plain::plain;
pub use random::{mask_object, set_of_batch};
