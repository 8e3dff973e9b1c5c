//! Builds a schedule from the needs of all ranks, one owner after another, by the formulas of
//! `mod.rs`.

use super::{Group, Message, Route, Schedule, Step};
use crate::Needs;
use annulus_core::{Channel, RowSet};

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
