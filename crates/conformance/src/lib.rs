//! The suite that every backend and transport must pass.
//!
//! A [`Case`] is one attention with all its tensors in f64. A [`Subject`] is anything that computes
//! cases over a ring: the facade, or a backend over a transport. A [`Judge`] holds the
//! [oracle](annulus_core::oracle)'s answer to a case and the error that an answer in a given
//! element type may have. The files in `tests/` combine them; the first lines of each state its
//! sample.
//!
//! | noun | file |
//! |---|---|
//! | [`Case`], [`Truth`], [`Masks`] | `case.rs`, `masks.rs` |
//! | sources of cases: random ([`Case::random`]), computed elsewhere ([`golden`]) | `random.rs`, `golden.rs`, `draw.rs` |
//! | [`Answer`], [`Judge`], and the plain computation that bounds the error: [`plain()`] | `answer.rs`, `judge.rs`, `plain.rs` |
//! | [`Subject`], [`Setting`], [`Facade`]; any backend × transport: [`RingSubject`] | `subject.rs`, `ring_subject.rs`, `memory.rs` |
//! | invented placements of ranks on nodes: [`Placed`] | `placed.rs` |
//! | a mock device with memory that the host cannot access | `device/` |

mod answer;
mod case;
pub mod device;
mod draw;
pub mod golden;
mod judge;
mod masks;
mod memory;
mod placed;
mod plain;
mod random;
mod ring_subject;
mod subject;
pub mod subjects;
pub mod suite;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use answer::Answer;
pub use case::{Case, Truth};
pub use draw::Draw;
pub use judge::{Judge, epsilon};
pub use masks::Masks;
pub use memory::{HostMemory, HostTensor, TensorMemory};
pub use placed::{Crossings, Placed};
pub use plain::plain;
pub use ring_subject::{RankSetup, RingSubject};
pub use subject::{Facade, Setting, Subject, answer, narrow, widen};
