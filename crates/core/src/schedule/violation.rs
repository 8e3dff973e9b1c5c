//! What can be wrong with a schedule.

use super::{Message, Schedule};
use crate::{Channel, RowSet};

/// One transfer of a schedule, for the reader of a [`Violation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Who sends.
    pub from: usize,
    /// Who receives.
    pub to: usize,
    /// The step of the rank whose list it stands in.
    pub step: usize,
    /// What it carries.
    pub channel: Channel,
    /// Whose rows.
    pub owner: usize,
    /// Which.
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
        Self { from: 0, to: 0, step, channel: message.channel, owner: message.owner, rows: message.rows.clone() }
    }
}

impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { from, to, step, channel, owner, rows } = self;
        write!(f, "{channel:?} {from} → {to} in step {step}, rows {:?} of rank {owner}", rows.ranges())
    }
}

/// Why [`Schedule::check`] refuses a schedule.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The needs are of another number of ranks.
    #[error("a schedule of {schedule} ranks for the needs of {needs}")]
    Ranks {
        /// Ranks that have steps.
        schedule: usize,
        /// Ranks that have needs.
        needs: usize,
    },
    /// A rank does not have as many steps as there are ranks.
    #[error("{steps} steps for rank {rank}, want {ranks}")]
    Steps {
        /// The rank.
        rank: usize,
        /// How many it has.
        steps: usize,
        /// How many there are ranks.
        ranks: usize,
    },
    /// A step attends another block than its route says.
    #[error("rank {rank} attends the block of rank {owner} in step {step}, want that of rank {want}")]
    Owner {
        /// The rank.
        rank: usize,
        /// Its step.
        step: usize,
        /// Whose block it attends.
        owner: usize,
        /// Whose it should.
        want: usize,
    },
    /// A message to itself, to no rank, of no rank's rows, of rows that the owner does not have, or of none.
    #[error("a message that means nothing: {0}")]
    Meaningless(Transfer),
    /// A message that its group is not for, or a gradient in a pass without any.
    #[error("a message in the wrong group: {0}")]
    Group(Transfer),
    /// A send without a receive of the same rows, a receive without a send, or one of them twice.
    #[error("a message without its other end: {0}")]
    Unpaired(Transfer),
    /// Where every rank waits for a group to be done before it posts the next, no rank can go on.
    #[error("rank {rank} waits for ever in step {step}: it and its peers wait for each other")]
    CyclicWait {
        /// The lowest rank that waits.
        rank: usize,
        /// The step in which it waits.
        step: usize,
    },
    /// Without tags, the peer takes this send for another message.
    #[error("messages overtake each other: {0}")]
    Overtaken(Transfer),
    /// The two ends are in different steps.
    #[error("the ends of a message are in different groups: {0}")]
    Apart(Transfer),
    /// The rows that a step attends are not those that arrived for it.
    #[error("rank {rank} attends rows {attended:?} in step {step}, but has {arrived:?}")]
    Present {
        /// The rank.
        rank: usize,
        /// Its step.
        step: usize,
        /// The rows it attends.
        attended: RowSet,
        /// The rows it has.
        arrived: RowSet,
    },
    /// A row arrives that the step's block does not have, or arrives twice.
    #[error("a message that the next step has no place for: {0}")]
    Misdelivered(Transfer),
    /// Somebody sends rows that it does not have then.
    #[error("sent without being there: {0}")]
    NotHeld(Transfer),
    /// A rank never has rows that it needs.
    #[error("rank {user} never attends rows {missing:?} of rank {owner}")]
    Missing {
        /// Who needs them.
        user: usize,
        /// Who owns them.
        owner: usize,
        /// Which.
        missing: RowSet,
    },
    /// Rows are sent that neither the receiver nor a later rank needs.
    #[error("sent for nothing: {0}")]
    Needless(Transfer),
    /// A gradient is sent for rows to which nobody has contributed yet.
    #[error("a gradient of nothing: {0}")]
    Unborn(Transfer),
    /// A message carries contributions that are already where it goes.
    #[error("contributions that arrive twice: {0}")]
    CountedTwice(Transfer),
    /// A rank is sent a sum that it neither adds to nor passes on.
    #[error("rank {rank} keeps gradients of rank {owner}'s row {row} in step {step}")]
    Kept {
        /// Who keeps them.
        rank: usize,
        /// In which step.
        step: usize,
        /// Whose row.
        owner: usize,
        /// The first such row.
        row: u64,
    },
    /// A rank's contribution to a row never comes home.
    #[error("row {row} of rank {owner} gets {got} contributions, want {want}")]
    Contributions {
        /// Whose row.
        owner: usize,
        /// Which row.
        row: u64,
        /// Distinct contributions that come home.
        got: usize,
        /// Ranks that need the row.
        want: usize,
    },
}

impl Schedule {
    /// Every send (`true`) and receive with its rank, step, and place in the order A(0) B(0) A(1) …
    pub(super) fn messages(&self) -> impl Iterator<Item = (bool, usize, usize, usize, &Message)> {
        self.steps.iter().enumerate().flat_map(|(rank, steps)| {
            steps.iter().enumerate().flat_map(move |(t, step)| {
                [(2 * t, &step.before), (2 * t + 1, &step.after)].into_iter().flat_map(move |(place, group)| {
                    let sends = group.sends.iter().map(move |message| (true, rank, t, place, message));
                    sends.chain(group.receives.iter().map(move |message| (false, rank, t, place, message)))
                })
            })
        })
    }
}
