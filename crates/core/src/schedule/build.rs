//! Builds the ring from who needs what: an owner at a time, along the way of its rows (the formulas are in `mod.rs`).

use super::{Group, Message, Route, Schedule, Step};
use crate::{Channel, Needs, RowSet};

impl Schedule {
    /// Lays out every transfer of one pass over the ring; with `gradients` also those of the gradients of the travelling rows.
    ///
    /// present(t) = need(t) ∪ present(t + 1); travel(t) = (travel(t − 1) ∪ need(t)) ∩ later(t); home(t) = need(t) \ later(t)
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
            let way = Way::new(needs, route, owner);
            schedule.send_blocks(&way);
            if gradients {
                schedule.send_gradients(&way);
            }
        }
        schedule
    }

    fn send_blocks(&mut self, way: &Way<'_>) {
        for t in 1..way.ranks() {
            let from = if self.route.is_relay() { way.users[t - 1] } else { way.owner };
            self.post(t - 1, from, way.users[t], Channel::Block, way.owner, &way.present[t]);
            self.steps[way.users[t]][t].rows.clone_from(&way.present[t]);
        }
    }

    fn send_gradients(&mut self, way: &Way<'_>) {
        let nobody = RowSet::new();
        let mut travelling = RowSet::new();
        for t in 1..way.ranks() {
            let later = way.present.get(t + 1).filter(|_| self.route.is_relay()).unwrap_or(&nobody);
            travelling = travelling.union(way.needed[t]).intersection(later);
            if let Some(&next) = way.users.get(t + 1) {
                self.post(t, way.users[t], next, Channel::Travel, way.owner, &travelling);
            }
            self.post(t, way.users[t], way.owner, Channel::Home, way.owner, &way.needed[t].difference(later));
        }
    }

    /// Puts a message into the same group of the same step on both ranks; an empty one does not exist.
    fn post(&mut self, step: usize, from: usize, to: usize, channel: Channel, owner: usize, rows: &RowSet) {
        if rows.is_empty() {
            return;
        }
        let message = |peer| Message { peer, channel, owner, rows: rows.clone() };
        self.steps[from][step].group_mut(channel).sends.push(message(to));
        self.steps[to][step].group_mut(channel).receives.push(message(from));
    }
}

impl Step {
    fn group_mut(&mut self, channel: Channel) -> &mut Group {
        match channel {
            Channel::Block => &mut self.before,
            Channel::Travel | Channel::Home => &mut self.after,
        }
    }
}

/// The way of one owner's rows past all ranks: entry t is about the rank that attends them in step t.
pub(super) struct Way<'a> {
    owner: usize,
    users: Vec<usize>,
    needed: Vec<&'a RowSet>,
    present: Vec<RowSet>,
}

impl<'a> Way<'a> {
    pub(super) fn new(needs: &'a Needs, route: Route, owner: usize) -> Self {
        let ranks = needs.held.len();
        let users: Vec<usize> = (0..ranks).map(|t| route.user(owner, t, ranks)).collect();
        let needed: Vec<&RowSet> = users.iter().map(|&user| needs.of(user, owner)).collect();
        let mut present: Vec<RowSet> = needed.iter().map(|&rows| rows.clone()).collect();
        if route.is_relay() {
            for t in (1..ranks.saturating_sub(1)).rev() {
                present[t] = present[t].union(&present[t + 1]);
            }
        }
        Self { owner, users, needed, present }
    }

    fn ranks(&self) -> usize {
        self.users.len()
    }

    /// Rows of blocks sent on the way.
    pub(super) fn block_rows(&self) -> u64 {
        self.present.iter().skip(1).map(RowSet::count).sum()
    }
}
