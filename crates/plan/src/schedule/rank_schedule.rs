//! The steps of one rank, derived without those of the others.
//!
//! The sets of `mod.rs` are unions over users that are neighbours on the ring. For the owner o of
//! step t on rank r, with n the next rank on the relay, p the previous one, and need(u) the rows of
//! o that user u needs:
//!
//! ```text
//! present(t + 1) = need(n) ∪ … ∪ need(last user)                         r sends
//! present(t)     = need(r) ∪ present(t + 1)                               r receives
//! started(t)     = need(first user) ∪ … ∪ need(p)
//! partial(t − 1) = started(t) ∩ present(t)                                r receives
//! partial(t)     = (started(t) ∪ need(r)) ∩ present(t + 1)                r sends
//! ```
//! The first user of o is the rank after o, the last user the rank before it. From one step to the
//! next, o moves by one rank, so both unions gain one user: they are kept as positions
//! (`UserUnion` in `needs/needs_index.rs`) and intersected with the rows of o. All steps take
//! O(ranks + runs of all shards) time, but for a logarithm.
//!
//! On rails ([`Route::RailsUp`]) the moves repeat with a period, the ranks of a node. Unions of
//! steps that are a period apart differ by as many users, so there is one for each step of a
//! period, and a user is added as often as a node has ranks. [`Route::OncePerNode`] has its own
//! derivation (`rank_schedule/once_per_node.rs`).

mod once_per_node;

use super::{Group, Message, Route, Schedule, Step};
use crate::{NeedsIndex, needs::UserUnion};
use annulus_core::{Channel, RowSet};

/// The steps of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSchedule {
    /// Path of blocks from their owner to the ranks that need them.
    pub route: Route,
    /// Steps of the rank, as many as there are ranks.
    pub steps: Vec<Step>,
    /// `sends_last_block[t]`: the block sent in step t is the last one that its receiver gets, and
    /// the receiver does not forward it.
    pub sends_last_block: Vec<bool>,
}

impl RankSchedule {
    /// Derives the steps of `rank`, equal to those of [`Schedule::build`]; with `gradients` also
    /// the transfers of the dK/dV accumulators. Calls `tick` after each owner.
    ///
    /// A rank outside the ring has no steps.
    pub fn derive(
        needs: &NeedsIndex<'_>,
        route: Route,
        gradients: bool,
        rank: usize,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let ranks = needs.ranks();
        if rank >= ranks {
            return Self { route, steps: Vec::new(), sends_last_block: Vec::new() };
        }
        let step = |step| Step {
            owner: route.owner(rank, step, ranks),
            rows: if step == 0 { RowSet::all(needs.held()[rank]) } else { RowSet::new() },
            before: Group::default(),
            after: Group::default(),
        };
        let steps = (0..ranks).map(step).collect();
        let mut builder = Builder { needs, route, rank, ranks, steps, tick };
        match route {
            Route::Direct => builder.direct_blocks(),
            Route::OncePerNode { .. } => builder.node_blocks(),
            _ => builder.relay_blocks(),
        }
        if gradients {
            builder.gradients();
        }
        let sends_last_block = builder.sends_last_block();
        Self { route, steps: builder.steps, sends_last_block }
    }

    /// Returns the step in which the rank attends to the last block that it receives, if it does
    /// not forward that block.
    pub fn last_block(&self) -> Option<usize> {
        last_block(&self.steps)
    }

    /// Returns the last step in which the rank computes, sends or receives.
    pub fn last_step(&self) -> Option<usize> {
        let idle = |group: &Group| group.sends.is_empty() && group.receives.is_empty();
        self.steps
            .iter()
            .rposition(|step| !(step.rows.is_empty() && idle(&step.before) && idle(&step.after)))
    }
}

impl Schedule {
    /// Returns the steps of one rank; none if it is outside the ring.
    pub fn of_rank(&self, rank: usize) -> RankSchedule {
        let steps = |rank: usize| self.steps.get(rank).map(Vec::as_slice).unwrap_or_default();
        let is_last = |(number, step): (usize, &Step)| {
            let mut receivers = step.before.sends.iter().map(|message| message.peer);
            receivers.any(|peer| last_block(steps(peer)) == Some(number + 1))
        };
        RankSchedule {
            route: self.route,
            steps: steps(rank).to_vec(),
            sends_last_block: steps(rank).iter().enumerate().map(is_last).collect(),
        }
    }
}

/// As [`RankSchedule::last_block`].
fn last_block(steps: &[Step]) -> Option<usize> {
    let last = steps.iter().rposition(|step| !step.rows.is_empty()).filter(|&step| step > 0);
    // sends of own rows do not count
    last.filter(|&step| {
        let Step { owner, before, .. } = &steps[step];
        before.sends.iter().all(|sent| sent.owner != *owner)
    })
}

/// Steps of one rank while they are derived.
struct Builder<'a> {
    needs: &'a NeedsIndex<'a>,
    route: Route,
    rank: usize,
    ranks: usize,
    steps: Vec<Step>,
    tick: &'a mut dyn FnMut(),
}

impl Builder<'_> {
    fn owner(&self, step: usize) -> usize {
        self.route.owner(self.rank, step, self.ranks)
    }

    /// Returns the rank that computes on this rank's rows in step `step`.
    fn user(&self, step: usize) -> usize {
        self.route.user(self.rank, step, self.ranks)
    }

    /// Returns the rank that has the block of `owner` in step `step` of a relay.
    fn holder(&self, owner: usize, step: usize) -> usize {
        self.route.user(owner, step % self.ranks, self.ranks)
    }

    /// Returns one empty union for each step of a period.
    fn no_users(&self) -> Vec<UserUnion> {
        (0..self.route.period(self.ranks)).map(|_| self.needs.no_users()).collect()
    }

    /// Adds the users after step `step` of the block of `owner`, the one of that step on some rank,
    /// to the union of those after step `step` + period.
    fn add_later_users(&self, unions: &mut [UserUnion], owner: usize, step: usize) {
        let period = self.route.period(self.ranks);
        for later in (step + 1).max(self.ranks.saturating_sub(period))..self.ranks {
            let user = self.route.user(owner, later, self.ranks);
            self.needs.add_user(&mut unions[step % period], user);
        }
    }

    /// Derives the blocks of a relay, from the last step to the first.
    fn relay_blocks(&mut self) {
        let period = self.route.period(self.ranks);
        let mut later_users = self.no_users();
        for step in (0..self.ranks).rev() {
            let owner = self.owner(step);
            self.add_later_users(&mut later_users, owner, step);
            let sent = self.needs.rows_of_union(&later_users[step % period], owner);
            if step > 0 {
                let rows = self.needs.rows(self.rank, owner).union(&sent);
                let previous = self.holder(owner, step - 1);
                let receives = &mut self.steps[step - 1].before.receives;
                push(receives, previous, Channel::Kv, owner, rows.clone());
                self.steps[step].rows = rows;
            }
            let next = self.holder(owner, step + 1);
            push(&mut self.steps[step].before.sends, next, Channel::Kv, owner, sent);
            (self.tick)();
        }
    }

    /// Derives the blocks of the direct route.
    fn direct_blocks(&mut self) {
        for step in 1..self.ranks {
            let owner = self.owner(step);
            let user = self.user(step);
            let rows = self.needs.rows(self.rank, owner);
            let before = &mut self.steps[step - 1].before;
            push(&mut before.receives, owner, Channel::Kv, owner, rows.clone());
            let sent = self.needs.rows(user, self.rank);
            push(&mut before.sends, user, Channel::Kv, self.rank, sent);
            self.steps[step].rows = rows;
            (self.tick)();
        }
    }

    /// Derives the gradients from the blocks.
    fn gradients(&mut self) {
        match self.route {
            Route::OncePerNode { .. } => self.node_gradients(),
            _ => self.sent_gradients(),
        }
        self.received_final_gradients();
        // as the builder of all ranks: messages of lower owners come first
        for step in &mut self.steps {
            step.after.receives.sort_by_key(|message| message.owner);
        }
    }

    /// Derives the partial gradients, and the final gradients that this rank sends.
    fn sent_gradients(&mut self) {
        let period = self.route.period(self.ranks);
        let mut earlier_users = self.no_users();
        for step in 1..self.ranks {
            let owner = self.owner(step);
            let needed = self.needs.rows(self.rank, owner);
            let mut later = RowSet::new();
            if self.route.is_relay() {
                let earlier_users = &mut earlier_users[step % period];
                for earlier in 1..step.min(period + 1) {
                    let user = self.route.user(owner, earlier, self.ranks);
                    self.needs.add_user(earlier_users, user);
                }
                let started = self.needs.rows_of_union(earlier_users, owner);
                let previous = self.holder(owner, step - 1);
                let next = self.holder(owner, step + 1);
                let received = started.intersection(&self.steps[step].rows);
                let receives = &mut self.steps[step - 1].after.receives;
                push(receives, previous, Channel::PartialGrad, owner, received);
                if let Some(sent) = self.steps[step].before.sends.first() {
                    later.clone_from(&sent.rows);
                }
                let partial = started.union(&needed).intersection(&later);
                let sends = &mut self.steps[step].after.sends;
                push(sends, next, Channel::PartialGrad, owner, partial);
            }
            let last = needed.difference(&later);
            push(&mut self.steps[step].after.sends, owner, Channel::FinalGrad, owner, last);
            (self.tick)();
        }
    }

    /// Derives the final gradients of this rank's rows.
    fn received_final_gradients(&mut self) {
        let mut later_users = self.needs.no_users();
        for step in (1..self.ranks).rev() {
            let user = self.user(step);
            let mut rows = self.needs.rows(user, self.rank);
            if !self.route.forwards(step + 1, self.ranks) {
                later_users = self.needs.no_users();
            }
            if self.route != Route::Direct {
                if !rows.is_empty() {
                    rows = rows.difference(&self.needs.rows_of_union(&later_users, self.rank));
                }
                self.needs.add_user(&mut later_users, user);
            }
            let receives = &mut self.steps[step].after.receives;
            push(receives, user, Channel::FinalGrad, self.rank, rows);
            (self.tick)();
        }
    }

    /// Returns, for every step, true if its block is the last of its receiver and is not forwarded.
    fn sends_last_block(&mut self) -> Vec<bool> {
        let mut is_last = vec![false; self.ranks];
        let sends = |step: &Step| !step.before.sends.is_empty();
        if let Route::OncePerNode { .. } = self.route {
            self.mark_last_blocks_of_nodes(&mut is_last);
        } else if !self.route.is_relay() {
            for step in (0..self.ranks).filter(|&step| sends(&self.steps[step])) {
                is_last[step] = self.is_last_of_user(step + 1);
                (self.tick)();
            }
        } else if self.route.period(self.ranks) > 1 {
            self.mark_last_blocks(&mut is_last);
        } else if let Some(step) = self.steps.iter().rposition(sends) {
            // all blocks of the next rank come from this one
            let owner = self.owner(step);
            let mut users = self.needs.no_users();
            for later in step + 2..self.ranks {
                self.needs.add_user(&mut users, self.route.user(owner, later, self.ranks));
            }
            is_last[step] = self.needs.rows_of_union(&users, owner).is_empty();
        }
        is_last
    }

    /// Marks the steps in which this rank sends the last block of a receiver on rails: of the next
    /// rank in the node, and of the one on the next node.
    fn mark_last_blocks(&mut self, is_last: &mut [bool]) {
        let mut receivers: Vec<usize> = [0, self.route.period(self.ranks) - 1]
            .into_iter()
            .filter(|&step| step + 1 < self.ranks)
            .map(|step| self.holder(self.owner(step), step + 1))
            .collect();
        receivers.dedup();
        for receiver in receivers {
            let Some(step) = self.last_block_of(receiver) else { continue };
            let owner = self.route.owner(receiver, step, self.ranks);
            is_last[step - 1] |= self.holder(owner, step - 1) == self.rank;
        }
    }

    /// Returns the step in which `rank` has its last block on a relay, if it does not forward it.
    fn last_block_of(&mut self, rank: usize) -> Option<usize> {
        let period = self.route.period(self.ranks);
        let mut later_users = self.no_users();
        for step in (1..self.ranks).rev() {
            let owner = self.route.owner(rank, step, self.ranks);
            self.add_later_users(&mut later_users, owner, step);
            let sends = !self.needs.rows_of_union(&later_users[step % period], owner).is_empty();
            if sends || !self.needs.rows(rank, owner).is_empty() {
                return (!sends).then_some(step);
            }
            (self.tick)();
        }
        None
    }

    /// Returns true if the user of this rank's rows in step `step` needs no rows of the owners of
    /// its later steps, on the direct route.
    fn is_last_of_user(&self, step: usize) -> bool {
        let user = self.user(step);
        let mut later = (step + 1..self.ranks).rev();
        later.all(|later| {
            self.needs.rows(user, self.route.owner(user, later, self.ranks)).is_empty()
        })
    }
}

/// Appends a message, unless it has no rows.
fn push(messages: &mut Vec<Message>, peer: usize, channel: Channel, owner: usize, rows: RowSet) {
    if !rows.is_empty() {
        messages.push(Message { peer, channel, owner, rows });
    }
}
