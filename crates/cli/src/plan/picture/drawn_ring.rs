//! The ring that a picture shows: of a grid that of the first key column, of the ranks with the
//! first heads. Its ranks are groups of ranks of the plan, and are drawn as the first of each.

use annulus_core::{Batch, Runs};

use crate::plan::{
    figures::Figures,
    ring::{PlannedRing, StepFigures},
};

/// A ring over groups of ranks. A ring over all ranks has groups of one rank.
pub(in crate::plan) struct DrawnRing<'a> {
    ring: &'a PlannedRing<'a>,
    /// Ranks of a group.
    pub(super) members: usize,
    /// Steps, whose ranks are groups; none of more ranks than are written.
    pub(super) steps: &'a [StepFigures],
    /// Number of steps up to the last in which a rank computes or forwards a block; at least 1.
    pub(super) busy_steps: usize,
    /// First row of each packed document, and the end of the last.
    pub(super) starts: Option<&'a [i64]>,
    /// Position of query row 0, without documents.
    pub(super) offset: i64,
}

impl<'a> DrawnRing<'a> {
    /// Returns the ring of a plan. `batch` has all rows.
    pub(in crate::plan) fn new(
        ring: &'a PlannedRing<'a>,
        figures: &'a Figures,
        batch: &'a Batch,
    ) -> Self {
        let starts = batch.cum_seqlens_q.as_deref();
        // packed documents are of as many queries as keys, which no alignment shifts
        let offset = ring.shards.q.iter().filter(|_| starts.is_none()).find_map(|shard| {
            Some(shard.positions.first()?.iter().next()? - shard.rows.iter().next()?)
        });
        Self {
            ring,
            members: figures.ranks / ring.ranks(),
            steps: &figures.steps,
            busy_steps: figures.busy_steps(),
            starts,
            offset: offset.unwrap_or(0),
        }
    }

    /// Returns the number of groups.
    pub(super) fn groups(&self) -> usize {
        self.ring.ranks()
    }

    /// Returns the rank that is drawn for a group.
    pub(super) const fn rank(&self, group: usize) -> usize {
        group * self.members
    }

    /// Returns the group of a rank.
    pub(super) const fn group(&self, rank: usize) -> usize {
        rank / self.members
    }

    /// Iterates over the query rows of each group.
    pub(super) fn queries(&self) -> impl Iterator<Item = &Runs> {
        self.ring.shards.q.iter().map(|shard| &shard.rows)
    }

    /// Iterates over the key rows of each group.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Runs> {
        self.ring.shards.kv.iter().map(|shard| &shard.rows)
    }

    /// Returns the step in which a group computes its queries over the keys of another.
    pub(super) fn step(&self, group: usize, of_keys: usize) -> usize {
        self.ring.route.step(group, of_keys, self.groups())
    }
}
