//! Rings that a picture shows: of a grid those of all key columns, each of the ranks with the first
//! heads.
//!
//! ```text
//! place  number of a rank among those with the first heads: group · key columns + column
//! rank   place · parts of the heads; the ranks up to that of the next place have the same rows
//! ```

use std::{ops::Range, sync::Arc};

use annulus_core::{Batch, Result, Runs, Shard, Side, Spec};
use annulus_plan::{NeedsIndex, RingShards, Route, StrategyTraffic};

use super::{
    figures::Figures,
    limits::MOST_STEPPED_RANKS,
    step_figures::{self, StepFigures},
    strategies::{GridFigures, Strategies},
};

/// Rings over the same groups of ranks, one of each key column. A ring over all ranks has groups of
/// one rank.
pub(super) struct Rings {
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
    pub(super) fn new(
        spec: &Spec,
        batch: &Batch,
        first: &Figures,
        strategies: &Strategies,
    ) -> Result<Self> {
        let RingShards { q, kv } = &first.shards;
        let rows = |shards: &[Arc<Shard>]| shards.iter().map(|of| of.rows.clone()).collect();
        // packed documents are of as many queries as keys, which no alignment shifts
        let offset = q.iter().filter(|_| first.starts.is_none()).find_map(|shard| {
            Some(shard.positions.first()?.iter().next()? - shard.rows.iter().next()?)
        });
        let of_ring = Self {
            groups: q.len(),
            columns: 1,
            parts: 1,
            queries: rows(q),
            keys: rows(kv),
            routes: vec![first.route],
            steps: first.steps.clone(),
            busy_steps: first.busy_steps(),
            starts: first.starts.clone(),
            offset: offset.unwrap_or(0),
        };
        match strategies.grid() {
            Some((traffic, figures)) => of_ring.of_grid(spec, batch, traffic, figures),
            None => Ok(of_ring),
        }
    }

    /// Adds the rings of the further key columns of a grid to that of the first, as
    /// [`Rings::new`].
    fn of_grid(
        self,
        spec: &Spec,
        batch: &Batch,
        traffic: &StrategyTraffic,
        figures: &GridFigures,
    ) -> Result<Self> {
        let StrategyTraffic { grid, layout, .. } = traffic;
        let kv_len = spec.dims.kv_len;
        let routes = figures.routes.clone();
        let all = Self { columns: grid.columns(), parts: grid.head_parts(), routes, ..self };
        let keys = (0..all.places()).map(|place| {
            let column = layout.of_member(grid, grid.of_column(place % all.columns).start);
            column.shard(Side::Kv, kv_len, place / all.columns, all.groups)
        });
        let keys = keys.collect();
        if all.places() > MOST_STEPPED_RANKS {
            return Ok(Self { keys, steps: Vec::new(), ..all });
        }
        let mut steps: Vec<StepFigures> = Vec::new();
        for column in 0..all.columns {
            let of_column = match column {
                0 => all.steps.clone(),
                _ => steps_of_column(spec, batch, traffic, column, all.routes[column])?,
            };
            let of_column = of_column.into_iter().map(|step| all.of_places(step, column));
            for (number, step) in of_column.enumerate() {
                match steps.get_mut(number) {
                    Some(all) => all.ranks.extend(step.ranks),
                    None => steps.push(step),
                }
            }
        }
        let busy_steps = step_figures::busy_steps(&steps).unwrap_or(all.busy_steps);
        Ok(Self { keys, steps, busy_steps, ..all })
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

/// Returns the steps of the ring of a key column over the groups, with the first heads.
fn steps_of_column(
    spec: &Spec,
    batch: &Batch,
    traffic: &StrategyTraffic,
    column: usize,
    route: Route,
) -> Result<Vec<StepFigures>> {
    let StrategyTraffic { grid, layout, .. } = traffic;
    let member = grid.of_column(column).start;
    let of_member = grid.spec_of(spec, member);
    let layout = layout.of_member(grid, member);
    let shards =
        RingShards::of_batch(&of_member.dims, spec.alignment, layout, grid.groups(), batch)?;
    let (heads, batch_rows) = (of_member.dims.q_heads, of_member.dims.batch);
    let mask = of_member.mask.as_ref();
    let needs = NeedsIndex::of_queries(mask, heads, batch_rows, &shards, &mut || ());
    // steps have no gradients
    let schedule = step_figures::checked_schedule(&needs, route, false)?;
    Ok(step_figures::steps(&of_member, &schedule, &shards))
}
