//! The suite that every backend and transport must pass.
//!
//! A [`Case`] is one attention with all its tensors in f64. A [`Subject`] is anything that computes cases over a ring: the facade, or a backend over a
//! transport. A [`Judge`] knows what the [oracle](annulus_core::oracle) says of a case and how far an answer in a given element type may be
//! off. The files in `tests/` put them together; each says in its first lines what it samples.
//!
//! | noun | file |
//! |---|---|
//! | [`Case`], [`Truth`]; who sees whom in it: [`Masks`] | `case.rs`, `masks.rs` |
//! | where cases come from: chance ([`Case::random`]), elsewhere ([`golden`]) | `random.rs`, `golden.rs`, `draw.rs` |
//! | [`Answer`], [`Judge`], and the plain computation that it measures by: [`plain()`] | `answer.rs`, `judge.rs`, `plain.rs` |
//! | [`Subject`], [`Setting`], [`Facade`]; any backend × transport: [`RingSubject`] | `subject.rs`, `ring_subject.rs`, `memory.rs` |
//! | ranks on nodes that are made up: [`Placed`] | `placed.rs` |
//! | a device that no host can look into | `device/` |

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
pub use memory::{HostMemory, HostTensor, Memory};
pub use placed::{Crossings, Placed};
pub use plain::plain;
pub use ring_subject::{RingSubject, Station};
pub use subject::{Facade, Setting, Subject, answer, narrow, widen};
