//! Rows of a group: the union of the shards of its members.

use std::sync::Arc;

use super::HeadGrid;
use crate::{Choice, CustomLayout, Dims, Layout, Order, Placement, Run, Runs, Side, Spec, index};

/// Rows of ranks and of groups.
///
/// A group's rows are the runs of its members' shards in ascending order of their first rows. Of
/// contiguous and zigzag shards these are again contiguous and zigzag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLayout {
    /// Layout of all ranks, by ring index.
    pub of_ranks: Layout,
    /// Layout of the groups.
    pub of_groups: Layout,
    /// Rank of each ring index.
    pub order: Order,
}

/// Consecutive local rows of a rank that are consecutive in its group's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSegment {
    /// Index of the first row in the group's rows.
    pub first: usize,
    /// Number of rows.
    pub count: usize,
}

impl GroupLayout {
    /// Chooses the layouts of `grid`: those of a fixed `layout` of the ranks, or else the layout
    /// that a ring over the groups has. `spec` is that of one member. Leaves are not divided.
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
            None => Choice::auto(spec, grid.groups(), None, None, tick).layout,
        };
        let of_ranks = spec.leaf_rows.map_or(chosen.clone(), |rows| chosen.at_leaves(rows));
        let of_groups = of_groups(&spec.dims, grid, &of_ranks);
        Self { of_ranks, of_groups, order }
    }

    /// Returns the rows of one side of the rank at `ring_index` as segments of its group's rows, in
    /// local order.
    pub fn segments(
        &self,
        grid: &HeadGrid,
        side: Side,
        len: usize,
        ring_index: usize,
    ) -> Vec<RowSegment> {
        let group = grid.group(ring_index);
        let runs = sorted_runs(grid, &self.of_ranks, side, len, group);
        let mut first = 0;
        let mut own = Vec::new();
        for (member, place, run) in runs {
            let count = index(run.count);
            if member == grid.member(ring_index) {
                own.push((place, RowSegment { first, count }));
            }
            first += count;
        }
        own.sort_unstable_by_key(|&(place, _)| place);
        own.into_iter().map(|(_, segment)| segment).collect()
    }
}

/// Returns the layout of the groups.
fn of_groups(dims: &Dims, grid: &HeadGrid, of_ranks: &Layout) -> Layout {
    if grid.members() == 1
        || matches!(of_ranks.without_leaves(), Layout::Contiguous | Layout::Zigzag)
    {
        // chunks start at ⌊len·i/chunks⌋, so those of a group are one chunk of fewer
        return of_ranks.clone();
    }
    let shards = |side, len| {
        let group = |group| {
            let mut rows = Runs::new();
            for (_, _, run) in sorted_runs(grid, of_ranks, side, len, group) {
                rows.push_run(run);
            }
            rows
        };
        (0..grid.groups()).map(group).collect()
    };
    let q = shards(Side::Q, dims.q_len);
    let kv = shards(Side::Kv, dims.kv_len);
    Layout::Custom(Arc::new(CustomLayout { q, kv }))
}

/// Returns the runs of a group's rows, ascending by their first rows, each with its member and its
/// place among the runs of that member.
fn sorted_runs(
    grid: &HeadGrid,
    of_ranks: &Layout,
    side: Side,
    len: usize,
    group: usize,
) -> Vec<(usize, usize, Run)> {
    let ranks = grid.groups() * grid.members();
    let mut all = Vec::new();
    for member in 0..grid.members() {
        let rows = of_ranks.shard(side, len, grid.ring_index(group, member), ranks);
        all.extend(rows.runs().iter().enumerate().map(|(place, &run)| (member, place, run)));
    }
    all.retain(|(_, _, run)| run.count > 0);
    all.sort_by_key(|(_, _, run)| run.start);
    all
}
