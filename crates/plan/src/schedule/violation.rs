//! Errors of schedules.

use super::{Message, Schedule};
use annulus_core::{Channel, RowSet};

/// One transfer of a schedule, as a [`Violation`] reports it. Ranks are ring indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// Step of the rank whose list contains the message.
    pub step: usize,
    /// Content of the message.
    pub channel: Channel,
    /// Owner of the rows.
    pub owner: usize,
    /// Local rows of the owner.
    pub rows: RowSet,
}

impl Transfer {
    pub(super) fn sent(rank: usize, step: usize, message: &Message) -> Self {
        Self { from: rank, to: message.peer, ..Self::of(step, message) }
    }

    pub(super) fn received(rank: usize, step: usize, message: &Message) -> Self {
        Self { from: message.peer, to: rank, ..Self::of(step, message) }
    }

    fn of(step: usize, message: &Message) -> Self {
        Self {
            from: 0,
            to: 0,
            step,
            channel: message.channel,
            owner: message.owner,
            rows: message.rows.clone(),
        }
    }
}

impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { from, to, step, channel, owner, rows } = self;
        write!(
            f,
            "{channel:?} {from} → {to} in step {step}, rows {:?} of rank {owner}",
            rows.ranges()
        )
    }
}

/// Error that [`Schedule::check`] finds in a schedule. Ranks are ring indices.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Schedule and needs have different numbers of ranks.
    #[error("the schedule has {schedule} ranks, the needs have {needs}")]
    Ranks {
        /// Ranks of the schedule.
        schedule: usize,
        /// Ranks of the needs.
        needs: usize,
    },
    /// A rank does not have as many steps as there are ranks.
    #[error("rank {rank} has {steps} steps, expected {ranks}")]
    Steps {
        /// The rank.
        rank: usize,
        /// Number of its steps.
        steps: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A step computes on the block of another owner than the route requires.
    #[error(
        "rank {rank} computes on the block of rank {owner} in step {step}, \
         expected that of rank {want}"
    )]
    Owner {
        /// The rank.
        rank: usize,
        /// Its step.
        step: usize,
        /// Owner of the step's block.
        owner: usize,
        /// Owner by the route.
        want: usize,
    },
    /// A message to the sender itself, with a peer or an owner outside the ring, of rows that the
    /// owner does not have, or of no rows.
    #[error("malformed message: {0}")]
    Malformed(Transfer),
    /// A block in the group after the tiles, a gradient in the group before them, or a gradient in
    /// a forward pass.
    #[error("message in the wrong group: {0}")]
    Group(Transfer),
    /// The numbers of sends and receives of the same rows differ.
    #[error("message without its send or receive: {0}")]
    Unpaired(Transfer),
    /// Deadlock: if each rank waits for a group to be complete before it posts the next, no rank
    /// can continue.
    #[error("deadlock: rank {rank} and its peers wait for each other in step {step}")]
    CyclicWait {
        /// The lowest rank that waits.
        rank: usize,
        /// The step in which it waits.
        step: usize,
    },
    /// Without tags, the receiver matches this send with the receive of another message.
    #[error("messages are matched in the wrong order: {0}")]
    Overtaken(Transfer),
    /// Send and receive are in different groups.
    #[error("send and receive are in different groups: {0}")]
    GroupMismatch(Transfer),
    /// The rows on which a step computes are not those that have arrived for it.
    #[error("rank {rank} computes on rows {attended:?} in step {step}, but {arrived:?} arrived")]
    Present {
        /// The rank.
        rank: usize,
        /// Its step.
        step: usize,
        /// Rows on which it computes.
        attended: RowSet,
        /// Rows that have arrived.
        arrived: RowSet,
    },
    /// A row arrives twice, or is not part of the block of the receiver's next step.
    #[error("message that the next step does not use: {0}")]
    Misdelivered(Transfer),
    /// A rank sends rows that it does not have in that step.
    #[error("rows sent by a rank that does not have them: {0}")]
    NotHeld(Transfer),
    /// A rank never receives rows that it needs.
    #[error("rank {user} never receives rows {missing:?} of rank {owner}, which it needs")]
    Missing {
        /// The rank that needs the rows.
        user: usize,
        /// Owner of the rows.
        owner: usize,
        /// The missing rows.
        missing: RowSet,
    },
    /// Rows are sent that neither the receiver nor a later rank needs.
    #[error("rows sent that no rank needs: {0}")]
    Needless(Transfer),
    /// A gradient is sent for rows to which no rank has contributed yet.
    #[error("gradient without contributions: {0}")]
    NoContribution(Transfer),
    /// A message carries a contribution that its receiver gets in another message too.
    #[error("contribution sent twice: {0}")]
    CountedTwice(Transfer),
    /// A rank has a partial gradient that it does not send on.
    #[error("rank {rank} does not send the gradient of rank {owner}'s row {row} in step {step}")]
    Kept {
        /// The rank that has the partial gradient.
        rank: usize,
        /// Its step.
        step: usize,
        /// Owner of the row.
        owner: usize,
        /// The first such row.
        row: u64,
    },
    /// The contributions to a row that reach its owner are not those of all ranks that need the
    /// row.
    #[error("the owner of row {row}, rank {owner}, receives {got} contributions, expected {want}")]
    Contributions {
        /// Owner of the row.
        owner: usize,
        /// The row.
        row: u64,
        /// Distinct contributions that reach the owner.
        got: usize,
        /// Ranks that need the row.
        want: usize,
    },
}

/// One send or receive of a schedule.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageEnd<'a> {
    pub(super) message: &'a Message,
    pub(super) is_send: bool,
    /// Rank whose list contains the message.
    pub(super) rank: usize,
    pub(super) step: usize,
    /// True for the group before the tiles, false for the group after them.
    pub(super) before_tiles: bool,
}

impl MessageEnd<'_> {
    /// Returns the sender.
    pub(super) const fn from(&self) -> usize {
        if self.is_send { self.rank } else { self.message.peer }
    }

    /// Returns the receiver.
    pub(super) const fn to(&self) -> usize {
        if self.is_send { self.message.peer } else { self.rank }
    }

    /// Describes the message in an error.
    pub(super) fn transfer(&self) -> Transfer {
        if self.is_send {
            Transfer::sent(self.rank, self.step, self.message)
        } else {
            Transfer::received(self.rank, self.step, self.message)
        }
    }
}

impl Schedule {
    /// Returns all sends and receives, in the order A(0) B(0) A(1) … of each rank.
    pub(super) fn messages(&self) -> impl Iterator<Item = MessageEnd<'_>> {
        self.steps.iter().enumerate().flat_map(|(rank, steps)| {
            steps.iter().enumerate().flat_map(move |(step, groups)| {
                let groups = [(true, &groups.before), (false, &groups.after)];
                groups.into_iter().flat_map(move |(before_tiles, group)| {
                    let end = move |is_send, message| MessageEnd {
                        message,
                        is_send,
                        rank,
                        step,
                        before_tiles,
                    };
                    let sends = group.sends.iter().map(move |message| end(true, message));
                    sends.chain(group.receives.iter().map(move |message| end(false, message)))
                })
            })
        })
    }
}
