//! Errors of schedules.

use super::{Message, Schedule};

/// Error that [`Schedule::check`] finds in a schedule, with ranks as ring indices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Violation {
    /// The property that does not hold.
    pub kind: ViolationKind,
    what: String,
}

impl Violation {
    pub(super) fn new(kind: ViolationKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into() }
    }
}

/// Property of a schedule that does not hold.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// Schedule and needs have the same number of ranks.
    Ranks,
    /// A rank has as many steps as there are ranks.
    Steps,
    /// A step computes on the block of the owner that the route requires.
    Owner,
    /// A message is sent to another rank of the ring, of rows that their owner has, and not of
    /// none.
    Malformed,
    /// Blocks are in the group before the tiles, gradients of a backward pass in that after them.
    Group,
    /// There are as many sends as receives of the same rows.
    Unpaired,
    /// Ranks that wait for each group to be complete before they post the next do not deadlock.
    CyclicWait,
    /// Without tags, the receiver matches each send with its own receive.
    Overtaken,
    /// Send and receive are in the same group.
    GroupMismatch,
    /// A step computes on the rows that have arrived for it.
    Present,
    /// A row arrives once, and is part of the block of the receiver's next step.
    Misdelivered,
    /// A rank sends rows that it has in that step.
    NotHeld,
    /// A rank receives all rows that it needs.
    Missing,
    /// Rows are sent that the receiver or a later rank needs.
    Needless,
    /// A gradient is sent for rows to which a rank has contributed.
    NoContribution,
    /// A contribution reaches its receiver in one message.
    CountedTwice,
    /// A rank sends the partial gradients that it has.
    Kept,
    /// The contributions to a row that reach its owner are those of all ranks that need the row.
    Contributions,
}

/// One send or receive of a schedule.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageEnd<'a> {
    pub(super) message: &'a Message,
    pub(super) is_send: bool,
    /// Rank whose list contains the message.
    pub(super) rank: usize,
    pub(super) step: usize,
}

impl<'a> MessageEnd<'a> {
    /// Returns the send of `rank` in a group of step `step`.
    pub(super) const fn sent(rank: usize, step: usize, message: &'a Message) -> Self {
        Self { message, is_send: true, rank, step }
    }

    /// Returns the receive of `rank` in a group of step `step`.
    pub(super) const fn received(rank: usize, step: usize, message: &'a Message) -> Self {
        Self { message, is_send: false, rank, step }
    }

    /// Returns the sender.
    pub(super) const fn from(&self) -> usize {
        if self.is_send { self.rank } else { self.message.peer }
    }

    /// Returns the receiver.
    pub(super) const fn to(&self) -> usize {
        if self.is_send { self.message.peer } else { self.rank }
    }

    /// Returns the violation of a property by this message, `what` it is.
    pub(super) fn violation(&self, kind: ViolationKind, what: &str) -> Violation {
        let Message { channel, owner, rows, .. } = self.message;
        let (from, to, step, rows) = (self.from(), self.to(), self.step, rows.ranges());
        let message =
            format!("{channel:?} {from} → {to} in step {step}, rows {rows:?} of rank {owner}");
        Violation::new(kind, format!("{what}: {message}"))
    }
}

impl Schedule {
    /// Returns all sends and receives, in the order A(0) B(0) A(1) … of each rank; true for those
    /// in a group before the tiles.
    pub(super) fn messages(&self) -> impl Iterator<Item = (bool, MessageEnd<'_>)> {
        self.steps.iter().enumerate().flat_map(|(rank, steps)| {
            steps.iter().enumerate().flat_map(move |(step, groups)| {
                let groups = [(true, &groups.before), (false, &groups.after)];
                groups.into_iter().flat_map(move |(before_tiles, group)| {
                    let sends = group.sends.iter();
                    let sends = sends.map(move |message| MessageEnd::sent(rank, step, message));
                    let receives = group.receives.iter();
                    let receives =
                        receives.map(move |message| MessageEnd::received(rank, step, message));
                    sends.chain(receives).map(move |end| (before_tiles, end))
                })
            })
        })
    }
}
