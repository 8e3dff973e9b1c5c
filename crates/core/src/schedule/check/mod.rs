//! Proves a schedule right without running it: the order of messages, what is where when, and whose gradients come home.
//!
//! Nothing here knows how schedules are built; only [`Route`] is shared, which says who attends whose block in which step.
//!
//! [`Route`]: super::Route

mod gradients;
mod order;

use super::{Schedule, Step, violation::Transfer, violation::Violation};
use crate::{Channel, Needs, RowSet};

impl Schedule {
    /// Proves that every rank attends all that it needs exactly once, that every message has its two ends and gets through even if
    /// sends are synchronous and tags do not exist, that only rows travel which are there and which somebody needs, and (with
    /// `gradients`) that every needing rank's contribution to every row comes home exactly once.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn check(&self, needs: &Needs, gradients: bool) -> Result<(), Violation> {
        self.check_shape(needs)?;
        self.check_messages(needs, gradients)?;
        order::check(self)?;
        for rank in 0..self.steps.len() {
            self.check_blocks(needs, rank)?;
        }
        if gradients {
            for owner in 0..self.steps.len() {
                gradients::check(self, needs, owner)?;
            }
        }
        Ok(())
    }

    fn check_shape(&self, needs: &Needs) -> Result<(), Violation> {
        let ranks = needs.held.len();
        if self.steps.len() != ranks {
            return Err(Violation::Ranks { schedule: self.steps.len(), needs: ranks });
        }
        for (rank, steps) in self.steps.iter().enumerate() {
            if steps.len() != ranks {
                return Err(Violation::Steps { rank, steps: steps.len(), ranks });
            }
            for (step, &Step { owner, .. }) in steps.iter().enumerate() {
                let want = self.route.owner(rank, step, ranks);
                if owner != want {
                    return Err(Violation::Owner { rank, step, owner, want });
                }
            }
        }
        Ok(())
    }

    /// Every message by itself: does it mean something, and is it in a group that it belongs to?
    fn check_messages(&self, needs: &Needs, gradients: bool) -> Result<(), Violation> {
        for (is_send, rank, step, place, message) in self.messages() {
            let transfer = || if is_send { Transfer::sent(rank, step, message) } else { Transfer::received(rank, step, message) };
            let held = needs.held.get(message.owner).copied().unwrap_or(0);
            let beyond = message.rows.ranges().last().is_none_or(|last| last.end > held);
            if message.peer == rank || message.peer >= self.steps.len() || beyond {
                return Err(Violation::Meaningless(transfer()));
            }
            let before_the_tiles = place % 2 == 0;
            if before_the_tiles != (message.channel == Channel::Block) || !(gradients || before_the_tiles) {
                return Err(Violation::Group(transfer()));
            }
        }
        Ok(())
    }

    /// One rank's blocks: attended as they arrived, each needed row once, and nothing passed on that is not there or that nobody needs.
    fn check_blocks(&self, needs: &Needs, rank: usize) -> Result<(), Violation> {
        let steps = &self.steps[rank];
        let nothing = RowSet::new();
        let mut attended = vec![&nothing; steps.len()];
        for (t, step) in steps.iter().enumerate() {
            let mut arrived = if t == 0 { RowSet::all(needs.held[rank]) } else { RowSet::new() };
            for message in t.checked_sub(1).into_iter().flat_map(|t| &steps[t].before.receives) {
                let transfer = || Transfer::received(rank, t - 1, message);
                if message.owner != step.owner || !message.rows.intersection(&arrived).is_empty() {
                    return Err(Violation::Misdelivered(transfer()));
                }
                let passed_on = step.before.sends.iter().filter(|sent| sent.owner == message.owner);
                let useful = passed_on.fold(needs.of(rank, message.owner).clone(), |useful, sent| useful.union(&sent.rows));
                if !useful.contains_all(&message.rows) {
                    return Err(Violation::Needless(transfer()));
                }
                arrived = arrived.union(&message.rows);
            }
            if step.rows != arrived {
                return Err(Violation::Present { rank, step: t, attended: step.rows.clone(), arrived });
            }
            attended[step.owner] = &step.rows;
            for message in &step.before.sends {
                let own = RowSet::all(needs.held[rank]);
                let here = [(rank, &own), (step.owner, &step.rows)].into_iter().find(|&(owner, _)| owner == message.owner);
                if !here.map_or(&nothing, |(_, rows)| rows).contains_all(&message.rows) {
                    return Err(Violation::NotHeld(Transfer::sent(rank, t, message)));
                }
            }
        }
        if let Some(message) = steps.last().and_then(|step| step.before.receives.first()) {
            return Err(Violation::Misdelivered(Transfer::received(rank, steps.len() - 1, message)));
        }
        for (owner, attended) in attended.iter().enumerate() {
            let missing = needs.of(rank, owner).difference(attended);
            if !missing.is_empty() {
                return Err(Violation::Missing { user: rank, owner, missing });
            }
        }
        Ok(())
    }
}
