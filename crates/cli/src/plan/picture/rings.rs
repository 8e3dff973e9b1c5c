//! Rings that a picture shows: of a grid those of all key columns, each of the ranks with the first
//! heads.
//!
//! ```text
//! place  number of a rank among those with the first heads: group · key columns + column
//! rank   place · parts of the heads; the ranks up to that of the next place have the same rows
//! ```

use std::ops::Range;

use annulus_core::{Batch, Result, Runs, Side, Spec};
use annulus_plan::{Route, StrategyTraffic};

use crate::plan::{
    figures::Figures,
    ring::{MOST_STEPPED_RANKS, PlannedRing, StepFigures, busy_steps},
    strategies::Strategies,
};

/// Rings over the same groups of ranks, one of each key column. A ring over all ranks has groups of
/// one rank.
pub(in crate::plan) struct Rings {
    groups: usize,
    columns: usize,
    /// Parts of the heads.
    pub(super) parts: usize,
    /// Query rows of each group.
    pub(super) queries: Vec<Runs>,
    /// Key rows of each place.
    pub(super) keys: Vec<Runs>,
    /// Route of each column.
    routes: Vec<Route>,
    /// Steps of all rings, whose ranks are those of places; none for more than
    /// [`MOST_STEPPED_RANKS`] places.
    pub(super) steps: Vec<StepFigures>,
    /// Number of steps up to the last in which a rank computes or forwards a block; at least 1.
    pub(super) busy_steps: usize,
    /// First row of each packed document, and the end of the last.
    pub(super) starts: Option<Vec<i64>>,
    /// Position of query row 0, without documents.
    pub(super) offset: i64,
}

impl Rings {
    /// Returns the rings of a plan. `first` is that of the first key column, `batch` that of all
    /// rows.
    pub(in crate::plan) fn new(
        spec: &Spec,
        batch: &Batch,
        strategies: &Strategies,
        first: &PlannedRing<'_>,
        figures: &Figures,
    ) -> Result<Self> {
        let StrategyTraffic { grid, layout, .. } = strategies.planned();
        let starts = batch.cum_seqlens_q.clone();
        // packed documents are of as many queries as keys, which no alignment shifts
        let offset = first.shards.q.iter().filter(|_| starts.is_none()).find_map(|shard| {
            Some(shard.positions.first()?.iter().next()? - shard.rows.iter().next()?)
        });
        let mut rings = Self {
            groups: grid.groups(),
            columns: grid.columns(),
            parts: grid.head_parts(),
            queries: first.shards.q.iter().map(|shard| shard.rows.clone()).collect(),
            keys: Vec::new(),
            routes: strategies.routes.clone(),
            steps: Vec::new(),
            busy_steps: figures.busy_steps(),
            starts,
            offset: offset.unwrap_or(0),
        };
        let member_of = |column: usize| grid.of_column(column).start;
        let keys = (0..rings.places()).map(|place| {
            let column = layout.of_member(grid, member_of(place % rings.columns));
            column.shard(Side::Kv, spec.dims.kv_len, place / rings.columns, rings.groups)
        });
        rings.keys = keys.collect();
        if rings.places() > MOST_STEPPED_RANKS {
            return Ok(rings);
        }
        let mut steps: Vec<StepFigures> = Vec::new();
        for column in 0..rings.columns {
            let of_column = if column == 0 {
                figures.steps.clone()
            } else {
                let of_member = grid.spec_of(spec, member_of(column));
                let layout = layout.of_member(grid, member_of(column));
                // steps have no gradients
                let route = rings.routes[column];
                let ring = PlannedRing::new(&of_member, layout, rings.groups, route, batch, false)?;
                ring.schedule()?.map_or_else(Vec::new, |schedule| ring.steps(&schedule))
            };
            let of_column = of_column.into_iter().map(|step| rings.of_places(step, column));
            for (number, step) in of_column.enumerate() {
                match steps.get_mut(number) {
                    Some(all) => all.ranks.extend(step.ranks),
                    None => steps.push(step),
                }
            }
        }
        rings.busy_steps = busy_steps(&steps).unwrap_or(rings.busy_steps);
        rings.steps = steps;
        Ok(rings)
    }

    /// Returns a step of the ring of a column with the ranks of places in place of groups.
    fn of_places(&self, mut step: StepFigures, column: usize) -> StepFigures {
        let rank = |group: usize| self.rank(group * self.columns + column);
        for of_rank in &mut step.ranks {
            (of_rank.rank, of_rank.owner) = (rank(of_rank.rank), rank(of_rank.owner));
            for send in &mut of_rank.sends {
                (send.to, send.owner) = (rank(send.to), rank(send.owner));
            }
        }
        step
    }

    /// Returns the number of places.
    pub(super) const fn places(&self) -> usize {
        self.groups * self.columns
    }

    /// Returns the rank of a place.
    pub(super) const fn rank(&self, place: usize) -> usize {
        place * self.parts
    }

    /// Returns the place of a rank.
    pub(super) const fn place(&self, rank: usize) -> usize {
        rank / self.parts
    }

    /// Returns the ranks that have the queries of a group.
    pub(super) const fn ranks_of_group(&self, group: usize) -> Range<usize> {
        let members = self.columns * self.parts;
        group * members..(group + 1) * members
    }

    /// Returns the ranks that have the keys of a place.
    pub(super) const fn ranks_of_place(&self, place: usize) -> Range<usize> {
        self.rank(place)..self.rank(place + 1)
    }

    /// Returns the place that computes the queries of a group over the keys of a place, and the
    /// step in which it does.
    pub(super) fn computed(&self, group: usize, of_keys: usize) -> (usize, usize) {
        let (owner, column) = (of_keys / self.columns, of_keys % self.columns);
        let step = self.routes[column].step(group, owner, self.groups);
        (group * self.columns + column, step)
    }
}
