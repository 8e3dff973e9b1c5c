//! The ring as data: who attends which block when, and who sends what to whom.
//!
//! Every rank takes as many steps as there are ranks. In step 0 it attends the block it holds; in step t the block of the rank t places
//! back on the way (of rank r − t; r + t on [`Route::RelayDown`]). A step has two groups of transfers, posted on every rank in the order
//! A(0) B(0) A(1) B(1) …: A(t), [`Step::before`], before the tiles of step t, brings the block of step t + 1; B(t), [`Step::after`],
//! after them, takes away the gradients that step t made. A message is in the same group of the same step on both ranks, so that
//! transports without tags, and synchronous sends, get through.
//!
//! One owner's rows, seen from rank 0 on the way up with four ranks; rank 2 merely passes rows on, and the rows "a" have their last user
//! in rank 1, the rows "b" in rank 3 (b: needed by 1 and 3, c: by 3 alone):
//!
//! ```text
//! step      0               1                  2                  3
//!
//! rank 0   own ──A(0)──┐                                                      home: a after B(1), b c after B(3)
//!            a b c     │    ▲
//! rank 1               └─► a b c ──A(1)──┐
//!              Block: a b c │ └──B(1)────┼──┐
//!                    Home: a┘   Block: b c  │ Travel: b, born here
//! rank 2                                 └► b c ──A(2)──┐
//!                                           └└──B(2)────┼──┐
//!                                            Block: b c │  │ Travel: b, unchanged (c has no sum yet)
//! rank 3                                                └► b c
//!                                                          └└─B(3)─► Home: b c, b = rank 1's + rank 3's, c = rank 3's
//! ```
//!
//! With present(t) = what arrives for step t, need(t) = what its rank needs of it, and the empty set after the last step:
//!
//! ```text
//! relay    present(t) = need(t) ∪ present(t + 1)            what it or a later rank on the way needs
//! direct   present(t) = need(t)
//! travel(t) = (travel(t − 1) ∪ need(t)) ∩ later(t)          already born, needed again;  later(t) = present(t + 1), empty when direct
//! home(t)   = need(t) \ later(t)                            the last user sends the sum straight to the owner
//! ```
//!
//! A rank's own contribution to its rows never travels, a row that nobody else needs is never sent, and an empty message does not exist.
//!
//! A "rank" of a schedule is a place on the ring; which process stands there is its [`Order`]'s affair.
//!
//! # Source
//! Liu et al. 2023 (ring attention); Brandon et al. 2023 (balanced layouts). The trimming and the direct homecoming are annulus' own.

mod build;
mod check;
mod choice;
mod placement;
mod route;
#[cfg(test)]
mod tests;
mod traffic;
mod violation;
mod work;

pub use choice::Choice;
pub use placement::{Order, Placement};
pub use route::Route;
pub use traffic::Traffic;
pub use violation::{Transfer, Violation};
pub use work::Work;

use crate::{Channel, RowSet};

/// One message of the schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The other end.
    pub peer: usize,
    /// What it carries.
    pub channel: Channel,
    /// Whose rows.
    pub owner: usize,
    /// Which of the owner's local rows, never none.
    pub rows: RowSet,
}

/// Transfers that are posted together. Each send is paired with a receive of the same group on the other rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// What this rank sends.
    pub sends: Vec<Message>,
    /// What this rank receives.
    pub receives: Vec<Message>,
}

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Whose block is attended.
    pub owner: usize,
    /// Which of the owner's local rows are here.
    pub rows: RowSet,
    /// Posted before the tiles: blocks of the next step.
    pub before: Group,
    /// Posted after the tiles (backward only): gradients that go on to the next rank ([`Channel::Travel`]) or home ([`Channel::Home`]).
    /// A travelling gradient received here is that of the **next** step's block; a homecoming is this rank's own.
    pub after: Group,
}

/// Every rank's steps: `ranks` of them each, step t of rank r attending the block of rank r − t (r + t for [`Route::RelayDown`]).
///
/// # Examples
/// A causal mask over four ranks that hold one run of rows each sends half of what the full ring sends:
/// ```
/// use annulus_core::{Alignment, Coordinates, Dims, Layout, Needs, Route, Schedule, Traffic, mask};
///
/// let coordinates = Coordinates::plain(&Dims::new(1, 64, 8, 128), Alignment::TopLeft, &Layout::Contiguous, 4);
/// let needs = Needs::of_queries(&mask::Causal::default(), 8, 1, &coordinates);
/// let schedule = Schedule::build(&needs, Route::RelayUp, true);
///
/// schedule.check(&needs, true)?;
/// assert_eq!(schedule.block_rows_sent() * 2, Traffic::full_ring(&needs.held, true).block_rows);
/// # Ok::<(), annulus_core::Violation>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// How blocks find their users.
    pub route: Route,
    /// `steps[rank][t]`.
    pub steps: Vec<Vec<Step>>,
}
