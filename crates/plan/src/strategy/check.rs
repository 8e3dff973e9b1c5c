//! The checker of grids. It proves, without running a pass, that exchanges and rings of a grid
//! compute every pair of a query and a key, for every head, once.
//!
//! A pair of a head is computed by the member whose group has the query, whose column has the key
//! and whose part has the head. That is one member, and it has the tensors, if
//!
//! * every query row and every key row belongs to one rank,
//! * every query head is in one part of each column, together with its KV head,
//! * each member receives the rows of all members that it shares them with, at the indices at which
//!   its ring expects these rows, and nothing else,
//! * of two members both expect a message between them, or neither does,
//! * the ring of each member is right ([`Schedule::check`]).
//!
//! Results return by the same segments of rows: those of a query by one from each column.

use super::{GroupLayout, HeadGrid, StrategyTraffic, TrafficOptions, backward_mode};
use crate::{NeedsIndex, Route, Schedule, schedule::Violation};
use annulus_core::{BackwardMode, Dims, Error, Result, RowSegment, Side, Spec};

/// Error that [`GroupLayout::check`] finds in a grid and its layouts.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GridViolation {
    /// The order of ranks is no permutation.
    #[error("ring indices have the ranks {ranks:?}, of which each must be there once")]
    Order {
        /// Rank of each ring index.
        ranks: Vec<usize>,
    },
    /// A row belongs to several ranks or to none.
    #[error("row {row} of {side:?} belongs to {owners} ranks")]
    Owners {
        /// Sequence of the row.
        side: Side,
        /// Global row.
        row: usize,
        /// Number of ranks that have it.
        owners: usize,
    },
    /// A query head is computed by several parts or by none, or apart from its KV head.
    #[error("query head {head} is in {parts} parts with its KV head")]
    Head {
        /// Query head.
        head: usize,
        /// Number of parts that have it and its KV head.
        parts: usize,
    },
    /// One of two members expects a message between them, the other does not.
    #[error("members {members:?} differ on whether they exchange rows of {side:?}")]
    Unpaired {
        /// Sequence of the rows.
        side: Side,
        /// The members.
        members: [usize; 2],
    },
    /// A row arrives at an index of the group's rows where the ring expects another one, or none.
    #[error(
        "member {member} of group {group} receives row {row} of {side:?} of member {from} at index \
         {index}, where its ring has {expected:?}"
    )]
    Misplaced {
        /// Sequence of the row.
        side: Side,
        /// The group.
        group: usize,
        /// The receiver.
        member: usize,
        /// The sender.
        from: usize,
        /// Global row.
        row: i64,
        /// Index in the group's rows.
        index: usize,
        /// Global row there, if it has not arrived before.
        expected: Option<i64>,
    },
    /// A message has another number of rows than its sender's shard.
    #[error("member {from} of group {group} sends {segments} of its {rows} rows of {side:?}")]
    Count {
        /// Sequence of the rows.
        side: Side,
        /// The group.
        group: usize,
        /// The sender.
        from: usize,
        /// Rows of the segments.
        segments: u64,
        /// Rows of its shard.
        rows: u64,
    },
    /// A row that a ring expects is in no message.
    #[error("row {row} of {side:?} never arrives at member {member} of group {group}")]
    Missing {
        /// Sequence of the row.
        side: Side,
        /// The group.
        group: usize,
        /// The member.
        member: usize,
        /// Global row.
        row: i64,
    },
}

impl StrategyTraffic {
    /// Proves that the passes of this strategy compute the attention of `spec` over all ranks: the
    /// exchanges, and the ring of every member whose ring differs. `options` are those with which
    /// the traffic was computed. Takes O(rows) time, beside that of [`Schedule::check`].
    ///
    /// # Errors
    /// [`Error::Internal`] with the first violation; as [`StrategyTraffic::of`].
    pub fn check(
        &self,
        spec: &Spec,
        options: &TrafficOptions<'_>,
        tick: &mut dyn FnMut(),
    ) -> Result<()> {
        let grid = &self.grid;
        self.layout.check(&spec.dims, grid).map_err(Error::internal)?;
        for member in grid.distinct_members(spec.mask.per_head()) {
            let spec = grid.spec_of(spec, member);
            let route = self.route(&spec, member, options, tick);
            let layout = self.layout.of_member(grid, member);
            let shards = options.shards(&spec, layout, grid.groups())?;
            let Dims { q_heads, batch, .. } = spec.dims;
            let mask = spec.mask.as_ref();
            let two_pass = options.backward && backward_mode(&spec) == BackwardMode::TwoPass;
            let gradients = options.backward && !two_pass;
            let keys = NeedsIndex::of_queries(mask, q_heads, batch, &shards, tick);
            check_ring(&keys, route, gradients).map_err(Error::internal)?;
            if two_pass {
                let queries = NeedsIndex::of_keys(mask, q_heads, batch, &shards, tick);
                let queries = match spec.leaf_rows {
                    Some(_) => queries.in_tiles(options.kv_tile),
                    None => queries,
                };
                check_ring(&queries, route.opposite(), false).map_err(Error::internal)?;
            }
        }
        Ok(())
    }
}

fn check_ring(
    needs: &NeedsIndex<'_>,
    route: Route,
    gradients: bool,
) -> std::result::Result<(), Violation> {
    let needs = needs.to_needs();
    Schedule::build(&needs, route, gradients).check(&needs, gradients)
}

impl GroupLayout {
    /// Proves that the exchanges of `grid` with these layouts give each member the rows of its
    /// ring, and that heads, queries and keys are divided without a rest.
    ///
    /// # Errors
    /// The first [`GridViolation`] found.
    pub fn check(&self, dims: &Dims, grid: &HeadGrid) -> std::result::Result<(), GridViolation> {
        let mut ranks = self.order.ranks().to_vec();
        ranks.sort_unstable();
        if !ranks.into_iter().eq(0..grid.groups() * grid.members()) {
            return Err(GridViolation::Order { ranks: self.order.ranks().to_vec() });
        }
        check_heads(dims, grid)?;
        for (side, len) in [(Side::Q, dims.q_len), (Side::Kv, dims.kv_len)] {
            self.check_owners(grid, side, len)?;
            check_pairs(side, grid.members(), &|a, b| grid.shares(side, a, b))?;
            let segments = |ring_index| self.segments(grid, side, len, ring_index);
            for group in 0..grid.groups() {
                // the members of a column have the same rows, and mostly all columns have the same
                // queries
                let rows = |column: usize| {
                    let layout = self.of_member(grid, grid.of_column(column).start);
                    layout.shard(side, len, group, grid.groups())
                };
                for column in 0..grid.columns() {
                    if side == Side::Kv || column == 0 || rows(column) != rows(0) {
                        self.check_arrivals(grid, (side, len), group, column, &segments)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that each row belongs to one rank.
    fn check_owners(
        &self,
        grid: &HeadGrid,
        side: Side,
        len: usize,
    ) -> std::result::Result<(), GridViolation> {
        let ranks = grid.groups() * grid.members();
        let mut owners = vec![0; len];
        for rank in 0..ranks {
            for row in self.of_ranks.shard(side, len, rank, ranks).iter() {
                if let Some(owners) = usize::try_from(row).ok().and_then(|row| owners.get_mut(row))
                {
                    *owners += 1;
                }
            }
        }
        match owners.iter().position(|&owners| owners != 1) {
            Some(row) => Err(GridViolation::Owners { side, row, owners: owners[row] }),
            None => Ok(()),
        }
    }

    /// Checks the rows that the first member of a column receives: those of the `segments` of each
    /// ring index.
    fn check_arrivals(
        &self,
        grid: &HeadGrid,
        (side, len): (Side, usize),
        group: usize,
        column: usize,
        segments: &dyn Fn(usize) -> Vec<RowSegment>,
    ) -> std::result::Result<(), GridViolation> {
        let ranks = grid.groups() * grid.members();
        let member = grid.of_column(column).start;
        let of_ring = self.of_member(grid, member).shard(side, len, group, grid.groups());
        let mut expected: Vec<Option<i64>> = of_ring.iter().map(Some).collect();
        for from in (0..grid.members()).filter(|&from| grid.shares(side, member, from)) {
            let ring_index = grid.ring_index(group, from);
            let shard = self.of_ranks.shard(side, len, ring_index, ranks);
            let segments = segments(ring_index);
            let count = segments.iter().map(|segment| segment.count as u64).sum();
            if count != shard.len() {
                let rows = shard.len();
                return Err(GridViolation::Count { side, group, from, segments: count, rows });
            }
            let indices =
                segments.iter().flat_map(|of| of.first..of.first.saturating_add(of.count));
            for (row, index) in shard.iter().zip(indices) {
                let here = expected.get_mut(index).and_then(Option::take);
                if here != Some(row) {
                    let expected = here;
                    return Err(GridViolation::Misplaced {
                        side,
                        group,
                        member,
                        from,
                        row,
                        index,
                        expected,
                    });
                }
            }
        }
        match expected.into_iter().flatten().next() {
            Some(row) => Err(GridViolation::Missing { side, group, member, row }),
            None => Ok(()),
        }
    }
}

/// Checks that each query head is in one part of each column, where its KV head is that of the
/// same local number.
fn check_heads(dims: &Dims, grid: &HeadGrid) -> std::result::Result<(), GridViolation> {
    let per_kv_head = dims.q_heads / dims.kv_heads.max(1);
    for column in 0..grid.columns() {
        let mut parts = vec![0; dims.q_heads];
        for member in grid.of_column(column) {
            let (queries, keys) = (grid.q_heads(member), grid.kv_heads(member));
            let of_local = queries.len() / keys.len().max(1);
            for (number, head) in queries.enumerate() {
                let kv_head = keys.start + number / of_local.max(1);
                if let Some(parts) = parts.get_mut(head)
                    && keys.contains(&kv_head)
                    && kv_head == head / per_kv_head.max(1)
                {
                    *parts += 1;
                }
            }
        }
        if let Some(head) = parts.iter().position(|&parts| parts != 1) {
            return Err(GridViolation::Head { head, parts: parts[head] });
        }
    }
    Ok(())
}

/// Checks that two members agree on the messages between them. `shares(a, b)` is true if `a`
/// expects one from `b`.
fn check_pairs(
    side: Side,
    members: usize,
    shares: &dyn Fn(usize, usize) -> bool,
) -> std::result::Result<(), GridViolation> {
    for member in 0..members {
        for other in 0..member {
            if shares(member, other) != shares(other, member) {
                return Err(GridViolation::Unpaired { side, members: [other, member] });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{CustomLayout, Layout};
    use annulus_core::{Batch, DType, Order, Runs, mask};

    fn options(batch: Option<&Batch>) -> TrafficOptions<'_> {
        TrafficOptions { backward: true, kv_tile: 16, batch, ..TrafficOptions::FORWARD }
    }

    fn spec(len: usize, causal: bool) -> Spec {
        let mut spec = Spec::new(Dims::new(1, len, 12, 4).kv_heads(3), DType::F32);
        if causal {
            spec.mask = Arc::new(mask::Causal::default());
        }
        spec
    }

    /// Shards of 12 ranks: chunks of uneven lengths, dealt out of order.
    fn uneven(len: i64) -> Layout {
        let shards: Vec<Runs> = (0..12)
            .map(|rank| {
                let chunk = |i: i64| len * i / 24..len * (i + 1) / 24;
                [(7 * rank + 5) % 24, (7 * rank + 5 + 84) % 24].map(chunk).into_iter().flatten()
            })
            .map(Iterator::collect)
            .collect();
        Layout::Custom(Arc::new(CustomLayout { q: shards.clone(), kv: shards }))
    }

    #[test]
    fn every_strategy_of_every_layout_is_right() {
        let lens: Vec<i64> = vec![0, 30, 31, 190, 240];
        let documents = Batch {
            cum_seqlens_q: Some(lens.clone()),
            cum_seqlens_k: Some(lens),
            ..Batch::default()
        };
        let mut checked = 0;
        for (causal, batch) in [(false, None), (true, None), (true, Some(&documents))] {
            for mode in [BackwardMode::OnePass, BackwardMode::TwoPass] {
                let spec = Spec { backward: mode, ..spec(240, causal) };
                let balanced = Layout::balanced(&spec, &documents, 12).unwrap();
                let given = [Layout::Contiguous, Layout::Zigzag, Layout::Striped, uneven(240)];
                for layout in given.into_iter().chain([balanced]) {
                    let options = TrafficOptions { layout: Some(&layout), ..options(batch) };
                    for grid in HeadGrid::candidates(&spec, 12, true) {
                        let of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
                        of.check(&spec, &options, &mut || ()).unwrap();
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked > 300, "{checked}");
        // fewer rows than ranks, and layouts that are cut at leaves
        for len in [0, 1, 5, 53, 600] {
            let spec = spec(len, false);
            let leaves = [Layout::Striped, Layout::Zigzag].map(|layout| layout.at_leaves(16));
            let whole = [Layout::Contiguous, Layout::Zigzag, Layout::Striped, uneven(len as i64)];
            for layout in whole.into_iter().chain(leaves) {
                let options = TrafficOptions { layout: Some(&layout), ..options(None) };
                for grid in HeadGrid::candidates(&spec, 12, true) {
                    let of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
                    of.check(&spec, &options, &mut || ()).unwrap();
                }
            }
        }
    }

    #[test]
    fn reproducible_rings_of_members_are_right() {
        let spec = Spec { leaf_rows: Some(16), ..spec(240, true) };
        let options = options(None);
        for grid in HeadGrid::candidates(&spec, 12, true) {
            let of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
            of.check(&spec, &options, &mut || ()).unwrap();
        }
    }

    /// Returns the violation of a change to the layouts of a grid of 2 groups of 3 heads × 2
    /// columns.
    fn violation(dims: &Dims, change: impl FnOnce(&mut GroupLayout)) -> GridViolation {
        let spec = spec(240, true);
        let grid = HeadGrid::with_columns(&spec.dims, 12, 3, 2).unwrap();
        let layout = uneven(240);
        let options = TrafficOptions { layout: Some(&layout), ..options(None) };
        let mut of = StrategyTraffic::of(&spec, grid, &options, &mut || ()).unwrap();
        of.layout.check(&spec.dims, &grid).unwrap();
        change(&mut of.layout);
        of.layout.check(dims, &grid).unwrap_err()
    }

    /// Changes the shards of a custom layout.
    fn edit(layout: &mut Layout, side: Side, change: impl FnOnce(&mut Vec<Runs>)) {
        let Layout::Custom(custom) = &*layout else { panic!("{layout:?}") };
        let mut custom = CustomLayout::clone(custom);
        change(if side == Side::Q { &mut custom.q } else { &mut custom.kv });
        *layout = Layout::Custom(Arc::new(custom));
    }

    #[test]
    fn wrong_layouts_are_found() {
        let dims = spec(240, true).dims;
        for side in [Side::Q, Side::Kv] {
            // the ring of a column has the rows of the groups the other way round
            let found = violation(&dims, |layout| {
                edit(&mut layout.of_columns[1], side, |shards| shards.swap(0, 1));
            });
            assert!(matches!(found, GridViolation::Misplaced { side: of, .. } if of == side));
            // rows of a group in another order than those that arrive
            let found = violation(&dims, |layout| {
                edit(&mut layout.of_columns[0], side, |shards| {
                    let mut rows: Vec<i64> = shards[1].iter().collect();
                    rows.swap(0, 17);
                    shards[1] = rows.into_iter().collect();
                });
            });
            assert!(matches!(found, GridViolation::Misplaced { group: 1, .. }), "{found}");
            // a row that no member has
            let found = violation(&dims, |layout| {
                edit(&mut layout.of_columns[0], side, |shards| {
                    shards[0] = shards[0].iter().chain([3]).collect();
                });
            });
            assert!(matches!(found, GridViolation::Missing { group: 0, row: 3, .. }), "{found}");
            // fewer ranks than the grid has
            let found = violation(&dims, |layout| layout.order = Order::ascending(6));
            assert_eq!(found, GridViolation::Order { ranks: (0..6).collect() });
            // the rows of a rank twice, and those of another one never
            let found = violation(&dims, |layout| {
                edit(&mut layout.of_ranks, side, |shards| shards[4] = shards[3].clone());
            });
            assert!(matches!(found, GridViolation::Owners { side: of, .. } if of == side));
        }
    }

    #[test]
    fn wrong_heads_are_found() {
        let more = Dims::new(1, 240, 24, 4).kv_heads(3);
        let found = violation(&more, |_| ());
        assert!(matches!(found, GridViolation::Head { head: 4, parts: 0 }), "{found}");
        // KV heads of other groups of query heads
        let other = Dims::new(1, 240, 12, 4).kv_heads(6);
        let found = violation(&other, |_| ());
        assert!(matches!(found, GridViolation::Head { .. }), "{found}");
    }

    /// No layout causes these violations: both would be errors of [`GroupLayout::segments`] and
    /// [`HeadGrid::shares`], which the checks read.
    #[test]
    fn wrong_messages_are_found() {
        let spec = spec(240, true);
        let grid = HeadGrid::with_columns(&spec.dims, 12, 3, 2).unwrap();
        let layout = GroupLayout::choose(&spec, &grid, Some(&uneven(240)), None, &mut || ());
        for side in [Side::Q, Side::Kv] {
            // a message of member 2 has a row more, or lacks a segment
            let found = |change: &dyn Fn(&mut Vec<RowSegment>)| {
                let segments = |ring_index| {
                    let mut segments = layout.segments(&grid, side, 240, ring_index);
                    if ring_index == grid.ring_index(1, 2) {
                        change(&mut segments);
                    }
                    segments
                };
                layout.check_arrivals(&grid, (side, 240), 1, 0, &segments)
            };
            found(&|_| ()).unwrap();
            let longer = found(&|segments| segments[1].count += 1).unwrap_err();
            let count =
                |segments| GridViolation::Count { side, group: 1, from: 2, segments, rows: 20 };
            assert_eq!(longer, count(21));
            assert_eq!(found(&|segments| segments.truncate(1)).unwrap_err(), count(10));
            // one of two members of a column does not expect the rows of the other
            let shares = |a, b| grid.shares(side, a, b);
            check_pairs(side, grid.members(), &shares).unwrap();
            let one_way = |a, b| shares(a, b) && (a, b) != (2, 1);
            let violation = check_pairs(side, grid.members(), &one_way).unwrap_err();
            assert_eq!(violation, GridViolation::Unpaired { side, members: [1, 2] });
        }
    }
}
