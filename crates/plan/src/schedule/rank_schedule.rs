//! The steps of one rank, derived without those of the others.
//!
//! The way of a block are the steps in which it is forwarded from user to user: on a relay and on
//! rails all steps, once per node those of one node, on the direct route single steps. The sets of
//! `mod.rs` are unions over the users of a way. For the owner o of step t on rank r, with n the
//! next user of the way, p the previous one, and need(u) the rows of o that user u needs:
//!
//! ```text
//! present(t + 1) = need(n) ∪ … ∪ need(last user)                         r sends
//! present(t)     = need(r) ∪ present(t + 1)                               r receives
//! started(t)     = need(first user) ∪ … ∪ need(p)
//! partial(t − 1) = started(t) ∩ present(t)                                r receives
//! partial(t)     = (started(t) ∪ need(r)) ∩ present(t + 1)                r sends
//! ```
//! From one step of a way to the next, the place of r on the way of o moves by one user, so both
//! unions gain one: on the side of present the last user of the way, on that of started the first.
//! They are kept as positions (`UserUnion` in `needs/needs_index.rs`) and intersected with the rows
//! of o. All steps take O(ranks + runs of all shards) time, but for a logarithm.
//!
//! On rails ([`Route::RailsUp`]) the moves repeat with a period, the ranks of a node. Unions of
//! steps that are a period apart differ by as many users, so there is one for each step of a
//! period, and a user is added as often as a node has ranks.
//!
//! The owner starts each way: it sends the rows that any user of the way needs to the first one.

use std::{collections::BTreeMap, ops::Range};

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
        builder.blocks();
        builder.own_blocks();
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

    /// Returns one empty union for each step of a period of rails.
    fn no_users(&self) -> Vec<UserUnion> {
        let period = if self.route.is_relay() { self.route.period(self.ranks) } else { 1 };
        (0..period).map(|_| self.needs.no_users()).collect()
    }

    /// Turns a union of the users after a later step of the way into that of the users after step
    /// `step`, of the block of `rank`.
    fn add_later_users(&self, unions: &mut [UserUnion], rank: usize, step: usize) {
        let way = self.route.way(step, self.ranks);
        let last = way.end.saturating_sub(unions.len());
        let is_first = step >= last;
        self.add_users(unions, rank, step, last.max(step + 1)..way.end, is_first);
    }

    /// Turns a union of the users before an earlier step of the way into that of the users before
    /// step `step`, of the block of this rank.
    fn add_earlier_users(&self, unions: &mut [UserUnion], step: usize) {
        let way = self.route.way(step, self.ranks);
        let first = way.start + unions.len();
        self.add_users(unions, self.rank, step, way.start..first.min(step), step < first);
    }

    /// Adds the users of the steps `added` of the block that `rank` has in step `step`, to no users
    /// if `is_first`.
    fn add_users(
        &self,
        unions: &mut [UserUnion],
        rank: usize,
        step: usize,
        added: Range<usize>,
        is_first: bool,
    ) {
        let owner = self.route.owner(rank, step, self.ranks);
        let index = step % unions.len();
        if is_first {
            unions[index].clear();
        }
        for step in added {
            let user = self.route.user(owner, step, self.ranks);
            self.needs.add_user(&mut unions[index], user);
        }
    }

    /// Returns the rows of `owner` that users after step `step` need, of the unions of that step.
    fn later_rows(&self, unions: &[UserUnion], owner: usize, step: usize) -> RowSet {
        if self.route.forwards(step + 1, self.ranks) {
            self.needs.rows_of_union(&unions[step % unions.len()], owner)
        } else {
            RowSet::new()
        }
    }

    /// Derives the blocks that are received and forwarded, from the last step to the first.
    fn blocks(&mut self) {
        let mut later_users = self.no_users();
        for step in (0..self.ranks).rev() {
            let owner = self.owner(step);
            self.add_later_users(&mut later_users, self.rank, step);
            let sent = self.later_rows(&later_users, owner, step);
            if step > 0 {
                let rows = self.needs.rows(self.rank, owner).union(&sent);
                let is_forwarded = self.route.forwards(step, self.ranks);
                let from = if is_forwarded { self.holder(owner, step - 1) } else { owner };
                let receives = &mut self.steps[step - 1].before.receives;
                push(receives, from, Channel::Kv, owner, rows.clone());
                self.steps[step].rows = rows;
            }
            let next = self.holder(owner, step + 1);
            push(&mut self.steps[step].before.sends, next, Channel::Kv, owner, sent);
            (self.tick)();
        }
    }

    /// Derives the blocks of this rank's rows that start a way after step 0.
    fn own_blocks(&mut self) {
        for step in (1..self.ranks).filter(|&step| !self.route.forwards(step, self.ranks)) {
            let first = self.user(step);
            let way = self.route.way(step, self.ranks);
            let rows = if way.len() == 1 {
                self.needs.rows(first, self.rank)
            } else {
                let mut users = self.needs.no_users();
                way.for_each(|step| self.needs.add_user(&mut users, self.user(step)));
                self.needs.rows_of_union(&users, self.rank)
            };
            push(&mut self.steps[step - 1].before.sends, first, Channel::Kv, self.rank, rows);
            (self.tick)();
        }
    }

    /// Derives the gradients from the blocks.
    fn gradients(&mut self) {
        self.sent_gradients();
        self.received_final_gradients();
        // as the builder of all ranks: messages of lower owners come first
        for step in &mut self.steps {
            step.after.receives.sort_by_key(|message| message.owner);
        }
    }

    /// Derives the partial gradients, and the final gradients that this rank sends.
    fn sent_gradients(&mut self) {
        let mut earlier_users = self.no_users();
        for step in 1..self.ranks {
            let owner = self.owner(step);
            let needed = self.needs.rows(self.rank, owner);
            self.add_earlier_users(&mut earlier_users, step);
            let mut started = RowSet::new();
            if self.route.forwards(step, self.ranks) {
                let users = &earlier_users[step % earlier_users.len()];
                started = self.needs.rows_of_union(users, owner);
            }
            let current = &self.steps[step];
            let received = started.intersection(&current.rows);
            let forwarded = current.before.sends.iter().find(|sent| sent.owner == owner);
            let later = forwarded.map(|sent| sent.rows.clone()).unwrap_or_default();
            let partial = started.union(&needed).intersection(&later);
            let previous = self.holder(owner, step - 1);
            let receives = &mut self.steps[step - 1].after.receives;
            push(receives, previous, Channel::PartialGrad, owner, received);
            let next = self.holder(owner, step + 1);
            let sends = &mut self.steps[step].after.sends;
            push(sends, next, Channel::PartialGrad, owner, partial);
            push(sends, owner, Channel::FinalGrad, owner, needed.difference(&later));
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
                later_users.clear();
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
        let mut last_blocks: BTreeMap<usize, Option<usize>> = BTreeMap::new();
        let mut is_last = vec![false; self.ranks];
        for (step, is_last) in is_last.iter_mut().enumerate() {
            // a rank sends at most one block in a step
            let Some(sent) = self.steps[step].before.sends.first() else { continue };
            let receiver = sent.peer;
            let last = last_blocks.entry(receiver).or_insert_with(|| self.last_block_of(receiver));
            *is_last = *last == Some(step + 1);
        }
        is_last
    }

    /// Returns the step in which `rank` has its last block, if it does not forward it.
    fn last_block_of(&mut self, rank: usize) -> Option<usize> {
        let mut later_users = self.no_users();
        for step in (1..self.ranks).rev() {
            let owner = self.route.owner(rank, step, self.ranks);
            self.add_later_users(&mut later_users, rank, step);
            let forwards = !self.later_rows(&later_users, owner, step).is_empty();
            if forwards || !self.needs.rows(rank, owner).is_empty() {
                return (!forwards).then_some(step);
            }
            (self.tick)();
        }
        None
    }
}

/// Appends a message, unless it has no rows.
fn push(messages: &mut Vec<Message>, peer: usize, channel: Channel, owner: usize, rows: RowSet) {
    if !rows.is_empty() {
        messages.push(Message { peer, channel, owner, rows });
    }
}
