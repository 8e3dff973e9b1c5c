//! The suite that every backend and transport must pass.
//!
//! A [`Subject`] is anything that computes [cases](Case) over a ring: the facade, or a backend over
//! a transport. Cases and the [judge](Judge) of their answers are in `annulus-test-cases`, a mock
//! device with memory that the host cannot access is in `annulus-mock-device`; this crate exports
//! the names of both. The files in `tests/` combine them; the first lines of each state its sample.
//!
//! | noun | file |
//! |---|---|
//! | [`Subject`], [`Setting`], [`Facade`]; one rank of it: [`PlanSubject`] | `subject.rs` |
//! | any backend × transport: [`RingSubject`] | `ring_subject.rs`, `ring_subject.rs` |
//! | invented placements of ranks on nodes: [`Placed`]; planted mistakes: [`Altered`] | `subjects.rs` |

mod ring_subject;
mod subject;
pub mod subjects;
pub mod suite;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use annulus_mock_device as device;
pub use annulus_test_cases::{
    Answer, Case, Draw, Judge, Masks, Truth, epsilon, facade::compute, golden, plain,
};
pub use ring_subject::{HostMemory, HostTensor, TensorMemory};
pub use ring_subject::{RankSetup, RingSubject};
pub use subject::{Facade, FacadeOn, PlanSubject, Setting, Subject};
pub use subjects::{Altered, Crossings, Placed};
