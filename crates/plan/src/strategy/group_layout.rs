//! Rows of a group: the union of the shards of its members, of keys of those in one column.

use std::{borrow::Cow, ops::Range, sync::Arc};

use super::HeadGrid;
use crate::{Choice, CustomLayout, Layout};
use annulus_core::{Dims, Order, Placement, RowSegment, Run, Runs, Side, Spec, index};

/// Rows of ranks and of groups.
///
/// A group's rows are the runs of its members' shards in ascending order of their first rows. Of
/// contiguous and zigzag shards these are again contiguous and zigzag. Its key rows in a column are
/// those of the members in this column; of a single member in the order of its shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLayout {
    /// Layout of all ranks, by ring index.
    pub of_ranks: Layout,
    /// Layout of the groups in each key column.
    pub of_columns: Vec<Layout>,
    /// Rank of each ring index.
    pub order: Order,
}

impl GroupLayout {
    /// Chooses the layouts of `grid`: those of a fixed `layout` of the ranks, or else the layout
    /// that a ring over the groups × key columns has. `spec` is that of one member. Leaves are not
    /// divided.
    pub fn choose(
        spec: &Spec,
        grid: &HeadGrid,
        layout: Option<&Layout>,
        placement: Option<&Placement>,
        tick: &mut dyn FnMut(),
    ) -> Self {
        let ranks = grid.groups() * grid.members();
        let placed =
            placement.filter(|placement| layout.is_none() && placement.nodes().len() == ranks);
        let order = placed.map_or_else(|| Order::ascending(ranks), Placement::order);
        let chosen = match layout {
            Some(layout) => layout.clone(),
            None => Choice::auto(spec, grid.groups() * grid.columns(), None, None, tick).layout,
        };
        let of_ranks = spec.leaf_rows.map_or(chosen.clone(), |rows| chosen.at_leaves(rows));
        let columns = 0..grid.columns();
        let of_columns = columns.map(|column| of_column(&spec.dims, grid, &of_ranks, column));
        Self { of_columns: of_columns.collect(), of_ranks, order }
    }

    /// Returns the layout of the ring of a member of each group, over the groups.
    pub fn of_member(&self, grid: &HeadGrid, member: usize) -> &Layout {
        // a member of no column has no rows
        self.of_columns.get(grid.column(member)).unwrap_or(&self.of_ranks)
    }

    /// Returns the rows of one side of the rank at `ring_index` as segments of its group's rows, of
    /// keys of those in its column, in local order.
    pub fn segments(
        &self,
        grid: &HeadGrid,
        side: Side,
        len: usize,
        ring_index: usize,
    ) -> Vec<RowSegment> {
        let group = grid.group(ring_index);
        let own_member = grid.member(ring_index);
        let members = members(grid, side, grid.column(own_member));
        let runs = sorted_runs(grid, &self.of_ranks, side, len, group, members);
        let mut first = 0;
        let mut own = Vec::new();
        for (member, place, run) in runs {
            let count = index(run.count);
            if member == own_member {
                own.push((place, RowSegment { first, count }));
            }
            first += count;
        }
        own.sort_unstable_by_key(|&(place, _)| place);
        own.into_iter().map(|(_, segment)| segment).collect()
    }
}

/// Returns a layout with the same rows of each rank, for sums that do not depend on their order, in
/// which `sequences` packed sequences divide the rows into fewer runs.
///
/// Groups of neighbours on a striped layout have one strided run for each member. A sequence
/// divides all of them, but only one run of consecutive rows.
pub(super) fn in_few_runs(layout: &Layout, sequences: usize) -> Cow<'_, Layout> {
    let Layout::Custom(custom) = layout else { return Cow::Borrowed(layout) };
    let in_blocks = |rows: &Runs| {
        let blocks = rows.in_blocks()?;
        let count = |rows: &Runs| rows.runs().len();
        let of_sequences = sequences.min(rows.runs().first().map_or(0, |run| index(run.count)));
        (count(&blocks) + sequences < count(rows) * of_sequences).then_some(blocks)
    };
    let all = |ranks: &[Runs]| -> (bool, Vec<Runs>) {
        let found: Vec<Option<Runs>> = ranks.iter().map(in_blocks).collect();
        let is_any = found.iter().any(Option::is_some);
        let rows = found.into_iter().zip(ranks);
        (is_any, rows.map(|(blocks, rows)| blocks.unwrap_or_else(|| rows.clone())).collect())
    };
    let ((q_differs, q), (kv_differs, kv)) = (all(&custom.q), all(&custom.kv));
    if q_differs || kv_differs {
        Cow::Owned(Layout::Custom(Arc::new(CustomLayout { q, kv })))
    } else {
        Cow::Borrowed(layout)
    }
}

/// Returns the layout of the groups in a key column.
fn of_column(dims: &Dims, grid: &HeadGrid, of_ranks: &Layout, column: usize) -> Layout {
    let chunks = matches!(of_ranks.without_leaves(), Layout::Contiguous | Layout::Zigzag);
    if grid.members() == 1 || chunks && grid.columns() == 1 {
        // chunks start at ⌊len·i/chunks⌋, so those of a group are one chunk of fewer
        return of_ranks.clone();
    }
    let groups = grid.groups();
    let shards = |side, len| {
        let group = |group| {
            if chunks && side == Side::Q {
                return of_ranks.shard(side, len, group, groups);
            }
            let mut rows = Runs::new();
            let members = members(grid, side, column);
            for (_, _, run) in sorted_runs(grid, of_ranks, side, len, group, members) {
                rows.push_run(run);
            }
            rows
        };
        (0..groups).map(group).collect()
    };
    let q = shards(Side::Q, dims.q_len);
    let kv = shards(Side::Kv, dims.kv_len);
    Layout::Custom(Arc::new(CustomLayout { q, kv }))
}

/// Returns the members of a group that exchange rows of `side` with those of a key column.
const fn members(grid: &HeadGrid, side: Side, column: usize) -> Range<usize> {
    match side {
        Side::Q => 0..grid.members(),
        Side::Kv => grid.of_column(column),
    }
}

/// Returns the runs of some members of a group, ascending by their first rows, each with its member
/// and its place among the runs of that member. Those of a single member stay in its order.
fn sorted_runs(
    grid: &HeadGrid,
    of_ranks: &Layout,
    side: Side,
    len: usize,
    group: usize,
    members: Range<usize>,
) -> Vec<(usize, usize, Run)> {
    let ranks = grid.groups() * grid.members();
    let is_sorted = members.len() > 1;
    let mut all = Vec::new();
    for member in members {
        let rows = of_ranks.shard(side, len, grid.ring_index(group, member), ranks);
        all.extend(rows.runs().iter().enumerate().map(|(place, &run)| (member, place, run)));
    }
    all.retain(|(_, _, run)| run.count > 0);
    if is_sorted {
        all.sort_by_key(|(_, _, run)| run.start);
    }
    all
}
