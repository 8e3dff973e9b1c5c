//! Layouts of grids and graphs: rows that attend to each other lie on the same rank and near each
//! other in its local order.
//!
//! ```text
//! grid    boxes of P ranks: the P₀ × P₁ × P₂ = P boxes of the least surface, or, if its largest
//!         box has fewer rows or less surface, repeated bisection of the longest side
//! rows    patches of 8 × 8 or 4 × 4 × 4 points, whole ones first, so that a tile of 64 rows is one
//! graph   reverse Cuthill-McKee order, cut into parts of equal length
//! ```
//!
//! # Source
//! Berger and Bokhari 1987, A Partitioning Strategy for Nonuniform Problems on Multiprocessors
//! (recursive bisection); Cuthill and McKee 1969, Reducing the Bandwidth of Sparse Symmetric
//! Matrices; George 1971 (reversal); George and Liu 1979 (start at a node far from another).

use std::{collections::VecDeque, ops::Range, sync::Arc};

use super::{CustomLayout, Layout, check_ranks};
use annulus_core::{Error, Result, Run, Runs};

/// A box: a range of points of each axis. Grids of fewer axes have leading axes of one point.
type Box3 = [Range<u64>; 3];

impl Layout {
    /// Divides a grid of one to three axes, whose points are the rows in row-major order, into one
    /// box per rank: boxes of about equal size and least surface, so that a neighbourhood
    /// ([`annulus_core::mask::Neighborhood`]) receives the least halo. The rows of a rank are in
    /// patches of 8 × 8 or 4 × 4 × 4 points. Queries and keys have the same rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `shape` or `ranks`.
    ///
    /// # Examples
    /// ```
    /// use annulus_core::Side;
    /// use annulus_plan::Layout;
    /// let layout = Layout::boxes(&[4, 6], 6)?;
    /// let rows: Vec<i64> = layout.shard(Side::Q, 24, 1, 6).iter().collect();
    /// assert_eq!(rows, [2, 3, 8, 9]);
    /// # Ok::<(), annulus_core::Error>(())
    /// ```
    pub fn boxes(shape: &[u64], ranks: usize) -> Result<Self> {
        check_ranks(ranks)?;
        if !(1..=3).contains(&shape.len()) {
            return Err(Error::invalid("shape", shape.len(), "1 to 3 axes"));
        }
        let points = shape.iter().try_fold(1u64, |all, &len| all.checked_mul(len));
        if points.is_none_or(|points| points == 0 || points > i64::MAX.unsigned_abs() / 4) {
            let want = "at least 1 point on every axis and fewer than 2⁶¹ in all";
            return Err(Error::invalid("shape", format!("{shape:?}"), want));
        }
        let mut grid = [1; 3];
        grid[3 - shape.len()..].copy_from_slice(shape);
        let patch = match shape.len() {
            1 => grid,
            2 => [1, 8, 8],
            _ => [4, 4, 4],
        };
        let rows: Vec<Runs> =
            boxes(grid, ranks as u64).iter().map(|all| patches(grid, all, patch)).collect();
        Ok(Self::Custom(Arc::new(CustomLayout { q: rows.clone(), kv: rows })))
    }

    /// Divides the nodes of a graph, which are the rows, among ranks: in reverse Cuthill-McKee
    /// order, in which the neighbours of a node are near it, and in parts of equal length. With one
    /// rank its shard is the order of all nodes. Queries and keys have the same rows.
    ///
    /// The neighbours of node i are `indices[indptr[i]..indptr[i + 1]]` (CSR); the pattern must
    /// be symmetric for a narrow band.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `indptr`, `indices` or `ranks`.
    pub fn graph(indptr: &[i64], indices: &[i64], ranks: usize) -> Result<Self> {
        check_ranks(ranks)?;
        let nodes = indptr.len().saturating_sub(1);
        let ascending = indptr.is_sorted() && indptr.first() == Some(&0);
        if !ascending || indptr.last() != Some(&(indices.len() as i64)) {
            let want = format!("ascending numbers from 0 to {}, the indices", indices.len());
            return Err(Error::invalid("indptr", format!("{nodes} rows"), want));
        }
        if let Some(bad) = indices.iter().find(|&&to| !(0..nodes as i64).contains(&to)) {
            return Err(Error::invalid("indices", bad, format!("nodes of 0..{nodes}")));
        }
        let order = Graph { indptr, indices }.reverse_cuthill_mckee();
        let part = |rank| {
            let rows = Self::Contiguous.shard(annulus_core::Side::Q, nodes, rank, ranks);
            rows.iter().map(|row| order[row as usize] as i64).collect()
        };
        let rows: Vec<Runs> = (0..ranks).map(part).collect();
        Ok(Self::Custom(Arc::new(CustomLayout { q: rows.clone(), kv: rows })))
    }
}

/// Divides a grid into one box per rank.
fn boxes(grid: [u64; 3], ranks: u64) -> Vec<Box3> {
    let mut bisected = Vec::new();
    bisect(grid.map(|len| 0..len), ranks, &mut bisected);
    // largest number of rows and largest surface of a box
    let cost = |all: &[Box3]| {
        let of = |size: fn(&Box3, [u64; 3]) -> u64| all.iter().map(|one| size(one, grid)).max();
        (of(|one, _| volume(one)), of(surface))
    };
    let (rows, faces) = cost(&bisected);
    let mut best = None;
    for first in (1..=ranks).filter(|first| ranks.is_multiple_of(*first)) {
        let rest = ranks / first;
        for second in (1..=rest).filter(|second| rest.is_multiple_of(*second)) {
            let counts = [first, second, rest / second];
            // the largest box: no list of all boxes for every factorisation
            let sides: [u64; 3] = std::array::from_fn(|axis| grid[axis].div_ceil(counts[axis]));
            let area = |axis: usize| match counts[axis] {
                1 => 0,
                count => sides.iter().product::<u64>() / sides[axis] * (count - 1).min(2),
            };
            let cost = (sides.iter().product::<u64>(), (0..3).map(area).sum::<u64>());
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, counts));
            }
        }
    }
    match best {
        Some(((most, area), counts)) if Some(most) <= rows && Some(area) <= faces => {
            regular(grid, counts)
        }
        _ => bisected,
    }
}

/// Divides every axis into `counts` ranges, in row-major order of the boxes.
fn regular(grid: [u64; 3], counts: [u64; 3]) -> Vec<Box3> {
    let edge = |axis: usize, at: u64| {
        (u128::from(grid[axis]) * u128::from(at) / u128::from(counts[axis])) as u64
    };
    let [first, second, third] = counts;
    let at = |rank: u64| [rank / third / second, rank / third % second, rank % third];
    (0..first * second * third)
        .map(|rank| {
            std::array::from_fn(|axis| edge(axis, at(rank)[axis])..edge(axis, at(rank)[axis] + 1))
        })
        .collect()
}

/// Divides a box among ranks by bisection of its longest side, in proportion to the ranks.
fn bisect(whole: Box3, ranks: u64, into: &mut Vec<Box3>) {
    if ranks <= 1 {
        return into.push(whole);
    }
    let len = |axis: &usize| whole[*axis].end - whole[*axis].start;
    // of equal sides the first, so that boxes are divided into rows before columns
    let longest = (0..3).rev().max_by_key(len).unwrap_or(0);
    let left = ranks.div_ceil(2);
    let share =
        (u128::from(len(&longest)) * u128::from(left) + u128::from(ranks) / 2) / u128::from(ranks);
    let cut = whole[longest].start + share as u64;
    let [mut low, mut high] = [whole.clone(), whole];
    low[longest].end = cut;
    high[longest].start = cut;
    bisect(low, left, into);
    bisect(high, ranks - left, into);
}

fn volume(of: &Box3) -> u64 {
    of.iter().map(|range| range.end - range.start).product()
}

/// Returns the faces of a box, in points, that are not faces of the grid.
fn surface(of: &Box3, grid: [u64; 3]) -> u64 {
    let area = |axis: usize| {
        let faces = u64::from(of[axis].start > 0) + u64::from(of[axis].end < grid[axis]);
        faces * volume(of) / (of[axis].end - of[axis].start).max(1)
    };
    (0..3).map(area).sum()
}

/// Returns the rows of a box, in patches of these sides: first those that are whole.
fn patches(grid: [u64; 3], of: &Box3, sides: [u64; 3]) -> Runs {
    let mut runs = Runs::new();
    let starts = |axis: usize| {
        let Range { start, end } = of[axis];
        let side = sides[axis];
        (start..end).step_by(annulus_core::index(side)).map(move |at| at..end.min(at + side))
    };
    for want_whole in [true, false] {
        for x in starts(0) {
            for y in starts(1) {
                for z in starts(2) {
                    let patch = [x.clone(), y.clone(), z];
                    let is_whole = patch
                        .iter()
                        .zip(sides)
                        .all(|(range, side)| range.end - range.start == side);
                    if is_whole == want_whole {
                        push_patch(grid, &patch, &mut runs);
                    }
                }
            }
        }
    }
    runs
}

/// Appends the rows of one patch in row-major order.
fn push_patch(grid: [u64; 3], [x, y, z]: &Box3, runs: &mut Runs) {
    for plane in x.clone() {
        for line in y.clone() {
            let start = ((plane * grid[1] + line) * grid[2] + z.start).cast_signed();
            runs.push_run(Run { start, step: 1, count: z.end - z.start });
        }
    }
}

/// A graph in CSR form.
struct Graph<'a> {
    indptr: &'a [i64],
    indices: &'a [i64],
}

impl Graph<'_> {
    fn neighbours(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        let range = self.indptr[node] as usize..self.indptr[node + 1] as usize;
        self.indices[range].iter().map(|&to| to as usize)
    }

    fn degree(&self, node: usize) -> i64 {
        self.indptr[node + 1] - self.indptr[node]
    }

    /// Returns the nodes in reverse Cuthill-McKee order: breadth-first from a node far from
    /// another, neighbours by ascending degree, all reversed. O(edges · log of the largest degree).
    fn reverse_cuthill_mckee(&self) -> Vec<usize> {
        let nodes = self.indptr.len().saturating_sub(1);
        let mut by_degree: Vec<usize> = (0..nodes).collect();
        by_degree.sort_by_key(|&node| self.degree(node));
        let mut level = vec![usize::MAX; nodes];
        let mut order = Vec::with_capacity(nodes);
        for node in by_degree {
            if level[node] != usize::MAX {
                continue;
            }
            // move the start to a node of least degree in the last level while that is farther
            let mut start = node;
            let mut depth = 0;
            loop {
                let begin = order.len();
                self.search(start, &mut level, &mut order);
                let component = &order[begin..];
                let farthest = component.last().map_or(0, |&last| level[last]);
                let in_last = component.iter().filter(|&&node| level[node] == farthest);
                let next = in_last.copied().min_by_key(|&node| self.degree(node));
                match next {
                    Some(next) if farthest > depth => {
                        component.iter().for_each(|&node| level[node] = usize::MAX);
                        order.truncate(begin);
                        (start, depth) = (next, farthest);
                    }
                    _ => break,
                }
            }
        }
        order.reverse();
        order
    }

    /// Appends the component of `start` in breadth-first order and sets the levels of its nodes.
    fn search(&self, start: usize, level: &mut [usize], order: &mut Vec<usize>) {
        let mut queue = VecDeque::from([start]);
        let mut next = Vec::new();
        level[start] = 0;
        while let Some(node) = queue.pop_front() {
            order.push(node);
            for to in self.neighbours(node) {
                if level[to] == usize::MAX {
                    level[to] = level[node] + 1;
                    next.push(to);
                }
            }
            next.sort_by_key(|&to| self.degree(to));
            queue.extend(next.drain(..));
        }
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::Side;

    use super::*;

    #[test]
    fn boxes_divide_the_grid_with_little_surface() {
        for (shape, ranks, most_rows, most_surface) in [
            (&[128, 128][..], 16, 32 * 32, 4 * 32),
            (&[128, 128], 5, 77 * 43, 77 * 2 + 43),
            (&[128, 128], 12, 43 * 32, 2 * (43 + 32)),
            (&[32, 32, 32], 8, 16 * 16 * 16, 3 * 256),
            (&[7, 9, 5], 3, 120, 70),
            (&[100], 3, 34, 2),
            (&[2, 2], 7, 1, 2),
            (&[6, 4], 1, 24, 0),
        ] {
            let layout = Layout::boxes(shape, ranks).unwrap();
            let points: u64 = shape.iter().product();
            let len = points as usize;
            layout.validate(len, len, ranks).unwrap();
            let mut grid = [1; 3];
            grid[3 - shape.len()..].copy_from_slice(shape);
            let all = boxes(grid, ranks as u64);
            let rows = all.iter().map(volume).max().unwrap();
            let area = all.iter().map(|one| surface(one, grid)).max().unwrap();
            assert!(rows <= most_rows, "{shape:?} {ranks}: {rows} rows");
            assert!(area <= most_surface, "{shape:?} {ranks}: surface {area}");
        }
        for (shape, ranks, argument) in [
            (&[][..], 1, "shape"),
            (&[2, 2, 2, 2], 1, "shape"),
            (&[4, 0], 1, "shape"),
            (&[u64::MAX, 2], 1, "shape"),
            (&[4], 0, "ranks"),
        ] {
            let error = Layout::boxes(shape, ranks).unwrap_err();
            assert!(error.to_string().contains(argument), "{error}");
        }
    }

    #[test]
    fn whole_patches_come_first() {
        let layout = Layout::boxes(&[20, 17], 1).unwrap();
        let rows: Vec<i64> = layout.shard(Side::Kv, 340, 0, 1).iter().collect();
        let patch = |row: i64, column: i64| -> Vec<i64> {
            (0..64).map(|at| (row + at / 8) * 17 + column + at % 8).collect()
        };
        let whole = [patch(0, 0), patch(0, 8), patch(8, 0), patch(8, 8)].concat();
        assert_eq!(rows[..256], whole);
        // then the last column, from its top, and the last rows
        assert_eq!(rows[256..258], [16, 33]);
    }

    #[test]
    fn the_order_of_a_shuffled_path_and_grid_is_a_narrow_band() {
        // nodes of a 6 × 40 grid under a permutation, and two nodes without neighbours
        let (rows, columns) = (6, 40);
        let shuffled = |at: usize| at * 97 % 240;
        let mut neighbours = vec![Vec::new(); 242];
        for at in 0..rows * columns {
            let (row, column) = (at / columns, at % columns);
            let mut add = |to: usize| neighbours[shuffled(at)].push(shuffled(to) as i64);
            if row > 0 {
                add(at - columns)
            }
            if row + 1 < rows {
                add(at + columns)
            }
            if column > 0 {
                add(at - 1)
            }
            if column + 1 < columns {
                add(at + 1)
            }
        }
        let mut indptr = vec![0];
        let mut indices: Vec<i64> = Vec::new();
        for list in &neighbours {
            indices.extend(list);
            indptr.push(indices.len() as i64);
        }
        let layout = Layout::graph(&indptr, &indices, 4).unwrap();
        layout.validate(242, 242, 4).unwrap();
        let order: Vec<i64> = (0..4)
            .flat_map(|rank| layout.shard(Side::Q, 242, rank, 4).iter().collect::<Vec<_>>())
            .collect();
        let mut place = vec![0i64; 242];
        order.iter().enumerate().for_each(|(at, &node)| place[node as usize] = at as i64);
        let edges = neighbours
            .iter()
            .enumerate()
            .flat_map(|(from, list)| list.iter().map(move |&to| (from, to as usize)));
        let band = edges.map(|(from, to)| (place[from] - place[to]).abs()).max();
        assert!(band <= Some(rows as i64 + 1), "{band:?}");
        for (indptr, indices, argument) in [
            (&[0, 2][..], &[0][..], "indptr"),
            (&[1, 1], &[0], "indptr"),
            (&[0, 1], &[1], "indices"),
            (&[0, 1], &[-1], "indices"),
            (&[], &[], "indptr"),
        ] {
            let error = Layout::graph(indptr, indices, 2).unwrap_err();
            assert!(error.to_string().contains(argument), "{error}");
        }
    }
}
