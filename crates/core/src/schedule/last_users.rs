//! Last users of all rows of a relay: which user, of those that need a row, is the last on its way.
//!
//! Ranks are numbered in the direction of the relay. For a row of owner o at position p:
//!
//! ```text
//! last user = the largest user u < o that attends to p, after P − o + u steps; if there is none,
//!             the largest user u > o that attends to p, after u − o steps
//! ```
//! The ends of all intervals that users attend to divide the positions of a segment into cells, of
//! which the users are the same. Users are painted over the cells in ascending order, so that the
//! colour of a cell is the largest user so far. Cells are the leaves of a tree for each segment, of
//! which an interval paints at most two nodes in each level. The colour of a cell is the largest on
//! its way to the root, because later users are larger.

use std::ops::Range;

use super::Route;
use crate::needs::{BatchNeeds, StridedRows, ascending, count_below};

/// Rows of one owner whose last user is the same.
pub(super) struct LastUsers {
    pub(super) owner: usize,
    /// Step in which the last user computes on the rows, at least 1.
    pub(super) step: usize,
    pub(super) rows: u64,
}

/// Cells of all segments, and those of the intervals of each user.
pub(super) struct UserCells<'a> {
    needs: &'a BatchNeeds,
    /// `edges[first[s]..first[s + 1]]` are the starts of the cells of segment s, ascending. The
    /// last is the end of the others: to the positions from there on no user attends.
    first: Vec<usize>,
    edges: Vec<i64>,
    /// Segment and cells, within the segment, of each interval of each user.
    of_users: Vec<Vec<(usize, Range<usize>)>>,
}

impl<'a> UserCells<'a> {
    pub(super) fn new(needs: &'a BatchNeeds) -> Self {
        let intervals = || needs.users.iter().flatten();
        let mut ends = vec![0; needs.segments + 1];
        intervals().for_each(|(segment, _)| ends[segment + 1] += 2);
        (0..needs.segments).for_each(|segment| ends[segment + 1] += ends[segment]);
        let mut unsorted = vec![0; ends[needs.segments]];
        // each end is that of the segment before until the edges of the segment are written
        for (segment, range) in intervals() {
            let at = &mut ends[*segment];
            unsorted[*at..*at + 2].copy_from_slice(&[range.start, range.end]);
            *at += 2;
        }
        let mut first = vec![0];
        let mut edges = Vec::new();
        let mut begin = 0;
        for &end in &ends[..needs.segments] {
            let of_segment = &mut unsorted[begin..end];
            of_segment.sort_unstable();
            edges.extend(of_segment.chunk_by(|a, b| a == b).map(|equal| equal[0]));
            first.push(edges.len());
            begin = end;
        }
        let mut cells = Self { needs, first, edges, of_users: Vec::new() };
        let cells_of = |(segment, range): &(usize, Range<i64>)| {
            let of_segment = cells.of_segment(*segment);
            let cell = |edge| of_segment.partition_point(|&start| start < edge);
            (*segment, cell(range.start)..cell(range.end))
        };
        let of_user = |intervals: &Vec<_>| intervals.iter().map(cells_of).collect();
        cells.of_users = needs.users.iter().map(of_user).collect();
        cells
    }

    /// Returns the starts of the cells of a segment.
    fn of_segment(&self, segment: usize) -> &[i64] {
        &self.edges[self.first[segment]..self.first[segment + 1]]
    }

    /// Calls `found` for all rows that are sent on the relay `route`, in groups of rows with the
    /// same owner and last user, until it returns false. Calls `tick` after each owner.
    pub(super) fn for_each_last_user(
        &self,
        route: Route,
        tick: &mut dyn FnMut(),
        mut found: impl FnMut(LastUsers) -> bool,
    ) {
        let ranks = self.of_users.len();
        let is_down = route == Route::RelayDown;
        // ring index of the rank with this number in the direction of the relay
        let index = |number: usize| if is_down { ranks - 1 - number } else { number };
        let mut all = Painting::new(self);
        (0..ranks).for_each(|user| all.paint(user, &self.of_users[index(user)]));
        let all = all.of_leaves();
        let mut before = Painting::new(self);
        for owner in 0..ranks {
            tick();
            let mut goes_on = true;
            for rows in &self.needs.owners[index(owner)] {
                self.for_each_cell(rows, |cell, count| {
                    let in_all = all[self.first[rows.segment] + cell];
                    // `all` contains the users before the owner too
                    let after = in_all.filter(|&user| user > owner);
                    if let Some(user) = before.at(rows.segment, cell).or(after) {
                        let step = (user + ranks - owner) % ranks;
                        let last = LastUsers { owner: index(owner), step, rows: count };
                        goes_on = goes_on && found(last);
                    }
                });
            }
            if !goes_on {
                return;
            }
            before.paint(owner, &self.of_users[index(owner)]);
        }
    }

    /// Calls `found` with every cell of the segment of `rows` in which some of them are, and their
    /// number.
    fn for_each_cell(&self, rows: &StridedRows, mut found: impl FnMut(usize, u64)) {
        let run = ascending(&rows.positions);
        let edges = self.of_segment(rows.segment);
        let mut index = edges.first().map_or(run.count, |&first| count_below(&run, first));
        // number of edges up to the position at the index
        let mut passed = 0;
        while index < run.count {
            let position = run.at(index);
            if edges.get(passed).is_some_and(|&edge| edge <= position) {
                passed += 1 + edges[passed + 1..].partition_point(|&edge| edge <= position);
            }
            let Some(&end) = edges.get(passed) else { return };
            let next = count_below(&run, end);
            found(passed - 1, next - index);
            index = next;
        }
    }
}

/// The latest users that attend to each cell.
struct Painting<'a> {
    cells: &'a UserCells<'a>,
    /// `nodes[2 * first[s]..2 * first[s + 1]]` is the tree of segment s with n cells: the children
    /// of node i are 2i and 2i + 1, and cell i is node n + i.
    nodes: Vec<Option<usize>>,
}

impl<'a> Painting<'a> {
    fn new(cells: &'a UserCells<'a>) -> Self {
        Self { cells, nodes: vec![None; 2 * cells.edges.len()] }
    }

    /// Paints the intervals of `user`, which is larger than all users so far.
    fn paint(&mut self, user: usize, intervals: &[(usize, Range<usize>)]) {
        for (segment, range) in intervals {
            let first = self.cells.first[*segment];
            let count = self.cells.first[segment + 1] - first;
            let nodes = &mut self.nodes[2 * first..];
            let mut begin = count + range.start;
            let mut end = count + range.end;
            while begin < end {
                if begin % 2 == 1 {
                    nodes[begin] = Some(user);
                    begin += 1;
                }
                if end % 2 == 1 {
                    end -= 1;
                    nodes[end] = Some(user);
                }
                begin /= 2;
                end /= 2;
            }
        }
    }

    /// Returns the latest user of a cell.
    fn at(&self, segment: usize, cell: usize) -> Option<usize> {
        let first = self.cells.first[segment];
        let nodes = &self.nodes[2 * first..];
        let mut node = self.cells.first[segment + 1] - first + cell;
        let mut latest = None;
        while node > 0 {
            latest = latest.max(nodes[node]);
            node /= 2;
        }
        latest
    }

    /// Returns the latest users of all cells.
    fn of_leaves(mut self) -> Vec<Option<usize>> {
        let mut of_leaves = Vec::with_capacity(self.cells.edges.len());
        for segment in self.cells.first.windows(2) {
            let count = segment[1] - segment[0];
            let nodes = &mut self.nodes[2 * segment[0]..2 * segment[1]];
            for node in 2..nodes.len() {
                nodes[node] = nodes[node].max(nodes[node / 2]);
            }
            of_leaves.extend_from_slice(&nodes[count..]);
        }
        of_leaves
    }
}
