//! The ring as data: the block that every rank computes on in every step, and every message.
//!
//! Every rank takes as many steps as there are ranks. In step 0 it computes on its own block, in
//! step t on that of rank r − t (r + t with [`Route::RelayDown`]). A step has two groups of
//! transfers, posted on every rank in the order A(0) B(0) A(1) B(1) …
//!
//! * A(t), [`Step::before`]: posted before the tiles of step t; transfers the blocks of step t + 1.
//! * B(t), [`Step::after`]: posted after them; transfers the gradients that step t computed.
//!
//! A message is in the same group of the same step on both ranks. The schedule therefore works with
//! transports without tags and with synchronous sends.
//!
//! # Example
//! Four ranks, relay up, and rank 0 owns the rows a, b and c. Rank 1 needs a and b, rank 2 nothing,
//! rank 3 b and c:
//!
//! ```text
//! group   from → to   channel       rows
//! A(0)    0 → 1       Kv            a b c
//! A(1)    1 → 2       Kv            b c      no rank after rank 1 needs a
//! B(1)    1 → 2       PartialGrad   b        created on rank 1, the first rank that needs b
//! B(1)    1 → 0       FinalGrad     a        rank 1 is the last rank that needs a
//! A(2)    2 → 3       Kv            b c
//! B(2)    2 → 3       PartialGrad   b        unchanged; c has no contribution yet
//! B(3)    3 → 0       FinalGrad     b c      b: ranks 1 and 3; c: rank 3
//! ```
//!
//! # Formulas
//! For the rows of one owner, with need(t) = the rows that the rank of step t needs, present(t) =
//! the rows that it receives, and the empty set after the last step:
//!
//! ```text
//! relay    present(t) = need(t) ∪ present(t + 1)       this rank or a later one needs them
//! direct   present(t) = need(t)
//! once per node   as on a relay while the block stays in a node, else direct
//!
//! later(t)   = present(t + 1) if that block is forwarded, empty if its owner sends it
//! partial(t) = (partial(t − 1) ∪ need(t)) ∩ later(t)   has a contribution and is needed again
//! final(t)   = need(t) \ later(t)                      the last user sends the sum to the owner
//! ```
//!
//! A rank's contribution to its own rows is never sent. A row that no other rank needs is not sent,
//! and there are no messages without rows.
//!
//! [`Schedule`] has the steps of all ranks, for figures of few ranks and for the checker. A rank of
//! a ring derives only its own steps ([`RankSchedule`]), in O(ranks + runs) instead of O(ranks²)
//! time and memory. Messages are summed over up to [`RingTraffic::MOST_RANKS`] ranks.
//!
//! A rank of a schedule is a ring index; an [`Order`] maps ring indices to ranks.
//!
//! # Source
//! The ring: Liu et al. 2023, Ring Attention with Blockwise Transformers. Balanced layouts: Brandon
//! et al. 2023, Striped Attention. Sending only needed rows, and gradients directly to the owner,
//! is annulus' own.

mod balanced;
mod check;
mod choice;
mod document_deal;
mod listed;
mod query_work;
mod rank_schedule;
mod ring_traffic;
mod route;
mod row_exchange;
#[cfg(test)]
mod tests;
mod tile_order;
mod work;

pub(crate) use balanced::BALANCED;
pub use check::{Violation, ViolationKind};
pub use choice::Choice;
pub use listed::{OwnerPairs, RankNeeds, needed_rows};
pub use rank_schedule::RankSchedule;
pub use ring_traffic::RingTraffic;
pub use ring_traffic::Traffic;
pub use route::Route;
pub use work::{Work, WorkMatrix};

use annulus_core::{Channel, RowSet};

use crate::Needs;

/// One message of the schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Ring index of the receiver of a send, or of the sender of a receive.
    pub peer: usize,
    /// Content of the message.
    pub channel: Channel,
    /// Ring index of the rank that owns the rows.
    pub owner: usize,
    /// Local rows of the owner, at least one.
    pub rows: RowSet,
}

/// Transfers that are posted together. Each send is paired with a receive of the same group on the
/// other rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Messages that this rank sends.
    pub sends: Vec<Message>,
    /// Messages that this rank receives.
    pub receives: Vec<Message>,
}

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Ring index of the owner of the step's block.
    pub owner: usize,
    /// Local rows of the owner that this rank has in this step.
    pub rows: RowSet,
    /// Posted before the tiles: blocks of the next step.
    pub before: Group,
    /// Posted after the tiles, only in a backward pass: gradients for the next rank
    /// ([`Channel::PartialGrad`]) or the owner ([`Channel::FinalGrad`]). A partial gradient
    /// received here is that of the **next** step's block; a final gradient is that of this rank's
    /// own rows.
    pub after: Group,
}

/// The steps of every rank. Each rank has as many steps as there are ranks; in step t, rank r
/// computes on the block of rank r − t (r + t with [`Route::RelayDown`]).
///
/// # Examples
/// With a causal mask and a contiguous layout, four ranks send half as many rows as on the full
/// ring:
/// ```
/// use annulus_core::{Alignment, Dims, mask};
/// use annulus_plan::{Layout, Needs, RingShards, Route, Schedule, Traffic};
///
/// let dims = Dims::new(1, 64, 8, 128);
/// let shards = RingShards::plain(&dims, Alignment::TopLeft, &Layout::Contiguous, 4);
/// let needs = Needs::of_queries(&mask::Causal::default(), 8, 1, &shards);
/// let schedule = Schedule::build(&needs, Route::RelayUp, true);
///
/// schedule.check(&needs, true)?;
/// let full_ring = Traffic::full_ring(&needs.held, true);
/// assert_eq!(schedule.sent().block_rows * 2, full_ring.block_rows);
/// # Ok::<(), annulus_plan::Violation>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Path of blocks from their owner to the ranks that need them.
    pub route: Route,
    /// `steps[rank][t]`.
    pub steps: Vec<Vec<Step>>,
}

impl Schedule {
    /// Computes every transfer of one pass; with `gradients` also those of the dK/dV accumulators.
    ///
    /// later(t) = present(t + 1) if the block of step t + 1 is forwarded, else empty;
    /// present(t) = need(t) ∪ later(t), partial(t) = (partial(t − 1) ∪ need(t)) ∩ later(t),
    /// final(t) = need(t) \ later(t)
    pub fn build(needs: &Needs, route: Route, gradients: bool) -> Self {
        let ranks = needs.held.len();
        let step = |rank, step| Step {
            owner: route.owner(rank, step, ranks),
            rows: if step == 0 { RowSet::all(needs.held[rank]) } else { RowSet::new() },
            before: Group::default(),
            after: Group::default(),
        };
        let steps = (0..ranks).map(|rank| (0..ranks).map(|t| step(rank, t)).collect()).collect();
        let mut schedule = Self { route, steps };
        for owner in 0..ranks {
            let path = BlockPath::new(ranks, route, owner, |user| needs.of(user, owner).clone());
            for step in 1..ranks {
                schedule.steps[path.users[step]][step].rows.clone_from(&path.present[step]);
            }
            path.for_each_message(gradients, |sent| schedule.post(&sent));
        }
        schedule
    }

    /// Adds a message to the same group of the same step on both ranks.
    fn post(&mut self, sent: &Sent<'_>) {
        let Sent { step, from, to, channel, owner, rows } = *sent;
        let message = |peer| Message { peer, channel, owner, rows: rows.clone() };
        self.steps[from][step].group_mut(channel).sends.push(message(to));
        self.steps[to][step].group_mut(channel).receives.push(message(from));
    }
}

impl Step {
    fn group_mut(&mut self, channel: Channel) -> &mut Group {
        match channel {
            Channel::Kv => &mut self.before,
            Channel::PartialGrad | Channel::FinalGrad => &mut self.after,
        }
    }
}

/// A message between two ranks.
pub(crate) struct Sent<'a> {
    pub(crate) step: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) channel: Channel,
    pub(crate) owner: usize,
    /// At least one.
    pub(crate) rows: &'a RowSet,
}

/// Path of one owner's rows over all ranks. Entry t of each list belongs to the rank that computes
/// on them in step t.
pub(super) struct BlockPath {
    route: Route,
    owner: usize,
    users: Vec<usize>,
    needed: Vec<RowSet>,
    present: Vec<RowSet>,
}

impl BlockPath {
    /// Derives the path. `needed(user)` are the rows of the owner that a rank needs.
    pub(super) fn new(
        ranks: usize,
        route: Route,
        owner: usize,
        needed: impl FnMut(usize) -> RowSet,
    ) -> Self {
        let users: Vec<usize> = (0..ranks).map(|t| route.user(owner, t, ranks)).collect();
        let needed: Vec<RowSet> = users.iter().copied().map(needed).collect();
        let mut present = needed.clone();
        for t in (1..ranks.saturating_sub(1)).rev() {
            if route.forwards(t + 1, ranks) {
                let (before, after) = present.split_at_mut(t + 1);
                before[t].unite(&after[0]);
            }
        }
        Self { route, owner, users, needed, present }
    }

    /// Calls `found` with every message: blocks, then with `gradients` those of each step.
    pub(super) fn for_each_message(&self, gradients: bool, mut found: impl FnMut(Sent<'_>)) {
        let Self { route, owner, ref users, .. } = *self;
        let ranks = users.len();
        let mut post = |step, from, to, channel, rows: &RowSet| {
            if !rows.is_empty() {
                found(Sent { step, from, to, channel, owner, rows });
            }
        };
        for t in 1..ranks {
            let from = if route.forwards(t, ranks) { users[t - 1] } else { owner };
            post(t - 1, from, users[t], Channel::Kv, &self.present[t]);
        }
        if !gradients {
            return;
        }
        let no_rows = RowSet::new();
        let mut partial = RowSet::new();
        for t in 1..ranks {
            let needed = &self.needed[t];
            let later = self.present.get(t + 1).filter(|_| route.forwards(t + 1, ranks));
            let later = later.unwrap_or(&no_rows);
            partial.unite(needed);
            partial.intersect(later);
            if let Some(&next) = users.get(t + 1) {
                post(t, users[t], next, Channel::PartialGrad, &partial);
            }
            if !later.contains_all(needed) {
                post(t, users[t], owner, Channel::FinalGrad, &needed.difference(later));
            }
        }
    }
}
