//! The ring as data: who attends which block when, and who sends what to whom.

use crate::{Channel, RowSet};

/// How blocks find their users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// From rank r to r + 1, onward as long as a later rank needs some of it.
    RelayUp,
    /// From rank r to r − 1, likewise.
    RelayDown,
    /// From the owner to each user.
    Direct,
}

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// How blocks find their users.
    pub route: Route,
    /// `steps[rank][t]`.
    pub steps: Vec<Vec<Step>>,
}
