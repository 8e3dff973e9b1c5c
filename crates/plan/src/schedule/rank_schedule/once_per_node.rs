//! The steps of one rank of a route on which blocks enter each node once.
//!
//! Rank r has place p in its node of L ranks. In step t = k·L + j its block is that of the rank of
//! place p − j in the node k before, and has passed the places p − j … p − 1. With the formulas of
//! `rank_schedule.rs`, whose unions end at the node:
//!
//! ```text
//! later users of the node     places p + 1 … p + L − 1 − j
//! earlier users of the node   places p − j … p − 1, but for the owner if it is of the node (k = 0)
//! rank r sends in step k·L − 1 the rows that any rank needs of the node k after
//! ```
//! Both unions depend on j alone, so steps with the same j are derived together.

use super::{Builder, push};
use annulus_core::Channel;

impl Builder<'_> {
    /// Returns the ranks of a node.
    fn node_ranks(&self) -> usize {
        self.route.period(self.ranks)
    }

    /// Returns the rank that is `places` after `rank` in its node, in a circle.
    fn in_node(&self, rank: usize, places: usize) -> usize {
        let size = self.node_ranks();
        rank / size * size + (rank + places) % size
    }

    /// Derives the blocks.
    pub(super) fn node_blocks(&mut self) {
        let size = self.node_ranks();
        let mut later_users = self.needs.no_users();
        for place in (0..size).rev() {
            if place + 1 < size {
                let user = self.in_node(self.rank, size - 1 - place);
                self.needs.add_user(&mut later_users, user);
            }
            for step in (place..self.ranks).step_by(size) {
                let owner = self.owner(step);
                let sent = self.needs.rows_of_union(&later_users, owner);
                if step > 0 {
                    let rows = self.needs.rows(self.rank, owner).union(&sent);
                    let from = if place > 0 { self.holder(owner, step - 1) } else { owner };
                    let receives = &mut self.steps[step - 1].before.receives;
                    push(receives, from, Channel::Kv, owner, rows.clone());
                    self.steps[step].rows = rows;
                }
                if place + 1 < size {
                    let next = self.holder(owner, step + 1);
                    push(&mut self.steps[step].before.sends, next, Channel::Kv, owner, sent);
                }
                (self.tick)();
            }
        }
        self.blocks_to_nodes();
    }

    /// Derives the blocks that this rank sends to other nodes: the rows that any rank of a node
    /// needs, to the first one that uses them there.
    fn blocks_to_nodes(&mut self) {
        let size = self.node_ranks();
        for step in (size..self.ranks).step_by(size) {
            let first = self.user(step);
            let mut users = self.needs.no_users();
            (0..size).for_each(|place| self.needs.add_user(&mut users, self.in_node(first, place)));
            let rows = self.needs.rows_of_union(&users, self.rank);
            push(&mut self.steps[step - 1].before.sends, first, Channel::Kv, self.rank, rows);
            (self.tick)();
        }
    }

    /// Derives the partial gradients, and the final gradients that this rank sends.
    pub(super) fn node_gradients(&mut self) {
        let size = self.node_ranks();
        // of blocks of the own node, and of other nodes, where the owner's place counts
        let mut of_own_node = self.needs.no_users();
        let mut of_others = self.needs.no_users();
        for place in 0..size {
            if place > 1 {
                let user = self.in_node(self.rank, size + 1 - place);
                self.needs.add_user(&mut of_own_node, user);
            }
            if place > 0 {
                let user = self.in_node(self.rank, size - place);
                self.needs.add_user(&mut of_others, user);
            }
            for step in (place..self.ranks).step_by(size).filter(|&step| step > 0) {
                let owner = self.owner(step);
                let needed = self.needs.rows(self.rank, owner);
                let earlier_users = if step < size { &of_own_node } else { &of_others };
                let started = self.needs.rows_of_union(earlier_users, owner);
                let current = &self.steps[step];
                let received = started.intersection(&current.rows);
                let forwarded = current.before.sends.iter().find(|sent| sent.owner == owner);
                let later = forwarded.map(|sent| sent.rows.clone()).unwrap_or_default();
                let partial = started.union(&needed).intersection(&later);
                if place > 0 {
                    let previous = self.holder(owner, step - 1);
                    let receives = &mut self.steps[step - 1].after.receives;
                    push(receives, previous, Channel::PartialGrad, owner, received);
                }
                let next = self.holder(owner, step + 1);
                let sends = &mut self.steps[step].after.sends;
                push(sends, next, Channel::PartialGrad, owner, partial);
                push(sends, owner, Channel::FinalGrad, owner, needed.difference(&later));
                (self.tick)();
            }
        }
    }

    /// Marks the steps in which this rank sends the last block of a receiver: of the next rank of
    /// the node, and of the first user of each other node.
    pub(super) fn mark_last_blocks_of_nodes(&mut self, is_last: &mut [bool]) {
        let size = self.node_ranks();
        let next = self.in_node(self.rank, 1);
        if next != self.rank
            && let Some(step) = self.last_block_in_node(next)
        {
            is_last[step - 1] |= !step.is_multiple_of(size);
        }
        for step in (size..self.ranks).step_by(size) {
            let sends = !self.steps[step - 1].before.sends.is_empty();
            is_last[step - 1] |= sends && self.last_block_in_node(self.user(step)) == Some(step);
        }
    }

    /// Returns the step in which `rank` has its last block, if it does not forward it.
    fn last_block_in_node(&mut self, rank: usize) -> Option<usize> {
        let size = self.node_ranks();
        let mut later_users = self.needs.no_users();
        for step in (1..self.ranks).rev() {
            let place = step % size;
            if place + 1 == size {
                later_users = self.needs.no_users();
            } else {
                let user = self.in_node(rank, size - 1 - place);
                self.needs.add_user(&mut later_users, user);
            }
            let owner = self.route.owner(rank, step, self.ranks);
            let sends = !self.needs.rows_of_union(&later_users, owner).is_empty();
            if sends || !self.needs.rows(rank, owner).is_empty() {
                return (!sends).then_some(step);
            }
            (self.tick)();
        }
        None
    }
}
