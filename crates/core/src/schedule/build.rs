//! Builds a schedule from the needs of all ranks, one owner after another, by the formulas of
//! `mod.rs`.

use super::{Group, Message, Route, Schedule, Step};
use crate::{Channel, Needs, RowSet};

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
            let path = BlockPath::new(needs, route, owner);
            schedule.send_blocks(&path);
            if gradients {
                schedule.send_gradients(&path);
            }
        }
        schedule
    }

    fn send_blocks(&mut self, path: &BlockPath<'_>) {
        for t in 1..path.ranks() {
            let forwarded = self.route.forwards(t, path.ranks());
            let from = if forwarded { path.users[t - 1] } else { path.owner };
            self.post(t - 1, from, path.users[t], Channel::Kv, path.owner, &path.present[t]);
            self.steps[path.users[t]][t].rows.clone_from(&path.present[t]);
        }
    }

    fn send_gradients(&mut self, path: &BlockPath<'_>) {
        let no_rows = RowSet::new();
        let mut partial = RowSet::new();
        for t in 1..path.ranks() {
            let forwarded = self.route.forwards(t + 1, path.ranks());
            let later = path.present.get(t + 1).filter(|_| forwarded).unwrap_or(&no_rows);
            partial = partial.union(path.needed[t]).intersection(later);
            if let Some(&next) = path.users.get(t + 1) {
                self.post(t, path.users[t], next, Channel::PartialGrad, path.owner, &partial);
            }
            self.post(
                t,
                path.users[t],
                path.owner,
                Channel::FinalGrad,
                path.owner,
                &path.needed[t].difference(later),
            );
        }
    }

    /// Adds a message to the same group of the same step on both ranks, unless it has no rows.
    fn post(
        &mut self,
        step: usize,
        from: usize,
        to: usize,
        channel: Channel,
        owner: usize,
        rows: &RowSet,
    ) {
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
            Channel::Kv => &mut self.before,
            Channel::PartialGrad | Channel::FinalGrad => &mut self.after,
        }
    }
}

/// Path of one owner's rows over all ranks. Entry t of each list belongs to the rank that computes
/// on them in step t.
struct BlockPath<'a> {
    owner: usize,
    users: Vec<usize>,
    needed: Vec<&'a RowSet>,
    present: Vec<RowSet>,
}

impl<'a> BlockPath<'a> {
    fn new(needs: &'a Needs, route: Route, owner: usize) -> Self {
        let ranks = needs.held.len();
        let users: Vec<usize> = (0..ranks).map(|t| route.user(owner, t, ranks)).collect();
        let needed: Vec<&RowSet> = users.iter().map(|&user| needs.of(user, owner)).collect();
        let mut present: Vec<RowSet> = needed.iter().map(|&rows| rows.clone()).collect();
        for t in (1..ranks.saturating_sub(1)).rev() {
            if route.forwards(t + 1, ranks) {
                present[t] = present[t].union(&present[t + 1]);
            }
        }
        Self { owner, users, needed, present }
    }

    fn ranks(&self) -> usize {
        self.users.len()
    }
}
