//! Biases of one tile from a table, and the sums of score gradients that share an entry.
//!
//! ```text
//! differences, consecutive positions:   a tile has as many entries as diagonals
//!     line[t] = table[entry of diagonal t]             row r of the tile = line[rows − 1 − r ..]
//!     sums[rows − 1 − r ..] += row r of dS             then one sum for each diagonal
//! else:                                 the entry of each pair
//! ```

use std::ops::Range;

use annulus_core::{BiasTable, Rows};
use ndarray::{ArrayView1, ArrayView4, s};

use crate::{
    simd::{
        dispatch::{IsaToken, Real, SimdKernel},
        vector::{MAX_LANES, Vector, each_row, unrolled},
    },
    tile::{
        geometry::{QueryKeyPairs, TileCoord},
        tile_mask::{LaneAxis, TILE},
    },
};

/// A table, and the positions of the queries and keys in the rows of a tile.
pub(crate) struct TableTile<'a> {
    pub(crate) table: &'a BiasTable,
    pub(crate) coord: &'a TileCoord,
    /// Visible rows of the tile.
    pub(crate) rows: &'a Range<usize>,
    queries: &'a [i64],
    keys: &'a [i64],
}

impl<'a> TableTile<'a> {
    pub(crate) fn new(
        table: &'a BiasTable,
        (queries, keys): (&'a Rows, &'a Rows),
        coord: &'a TileCoord,
        rows: &'a Range<usize>,
    ) -> Self {
        let pairs = coord.pairs(rows);
        let queries = &queries.positions(coord.batch)[coord.queries.clone()][pairs.queries];
        let keys = &keys.positions(coord.batch)[coord.keys.clone()][pairs.keys];
        Self { table, coord, rows, queries, keys }
    }

    /// Returns the diagonals, if entries are those of differences and positions are consecutive on
    /// both sides.
    pub(crate) fn diagonals(&self) -> Option<Diagonals> {
        let (&i, &j) = (self.queries.first()?, self.keys.first()?);
        let is_consecutive = counts_from(self.queries, i) && counts_from(self.keys, j);
        if !self.table.is_of_differences() || !is_consecutive {
            return None;
        }
        let from_first = j.checked_sub(i)?;
        let (rows, lanes, step) = match self.coord.lane_axis {
            LaneAxis::Keys => (self.queries.len(), self.keys.len(), 1),
            LaneAxis::Queries => (self.keys.len(), self.queries.len(), -1),
        };
        // row r and lane l are on the diagonal t = l − r + rows − 1
        Some(Diagonals { first: from_first - step * (rows as i64 - 1), step, rows, lanes })
    }

    /// Calls `found` with the element of each pair of the tile, and its entry.
    pub(crate) fn each_pair(&self, mut found: impl FnMut(usize, usize)) {
        let QueryKeyPairs { queries, keys } = self.coord.pairs(self.rows);
        for (query, &i) in queries.zip(self.queries) {
            for (key, &j) in keys.clone().zip(self.keys) {
                found(self.coord.element(query, key), self.table.index(i, j));
            }
        }
    }

    /// Returns the row of the table `bias`, `[1, heads|1, 1, entries]`, of the tile's head.
    fn values<'b, A>(&self, bias: ArrayView4<'b, A>) -> ArrayView1<'b, A> {
        let head = if bias.dim().1 == 1 { 0 } else { self.coord.head };
        bias.slice_move(s![0, head, 0, ..])
    }

    /// Writes the bias of each diagonal to `line`, and returns their number; `None` if the tile has
    /// no [`TableTile::diagonals`], or one of the biases is −∞.
    pub(crate) fn fill_diagonals<A: Real>(
        &self,
        bias: ArrayView4<'_, A>,
        line: &mut [A; MOST_DIAGONALS],
    ) -> Option<Diagonals> {
        let diagonals = self.diagonals()?;
        let values = self.values(bias);
        let is_finite = |value: A| value != -A::INFINITY;
        if let Some(entry) = diagonals.only_entry(self.table) {
            line.fill(values[entry]);
            return is_finite(values[entry]).then_some(diagonals);
        }
        for (t, into) in line[..diagonals.len()].iter_mut().enumerate() {
            *into = values[diagonals.entry(self.table, t)];
        }
        let line = &line[..diagonals.len()];
        line.iter().fold(true, |all, &value| all & is_finite(value)).then_some(diagonals)
    }

    /// Writes the bias of each pair, and 0 in the lanes that are not used. Returns true if one of
    /// the biases is −∞. `bias` is `[1, heads|1, 1, entries]`.
    pub(crate) fn fill<A: Real>(&self, bias: ArrayView4<'_, A>, into: &mut [A]) -> bool {
        let values = self.values(bias);
        let mut hides = false;
        let lines = into[self.coord.span(self.rows)].chunks_exact_mut(self.coord.width);
        lines.for_each(|line| line.fill(A::ZERO));
        self.each_pair(|element, entry| {
            into[element] = values[entry];
            hides |= values[entry] == -A::INFINITY;
        });
        hides
    }
}

/// Diagonals of a tile of consecutive positions. Diagonal t of the tile has the difference
/// `first` + `step`·t.
pub(crate) struct Diagonals {
    first: i64,
    step: i64,
    /// Rows and lanes of the tile that are used.
    rows: usize,
    lanes: usize,
}

/// Most diagonals of a tile.
pub(crate) const MOST_DIAGONALS: usize = 2 * TILE;

impl Diagonals {
    /// Returns the number of diagonals.
    pub(crate) const fn len(&self) -> usize {
        self.rows + self.lanes - 1
    }

    /// Returns the entry of diagonal `t`.
    pub(crate) fn entry(&self, table: &BiasTable, t: usize) -> usize {
        let difference = self.first.saturating_add(self.step * t as i64);
        table.of_difference(difference).unwrap_or(0)
    }

    /// Returns the entry of all diagonals, if they lie beyond one end of the table.
    pub(crate) fn only_entry(&self, table: &BiasTable) -> Option<usize> {
        let last = self.first.saturating_add(self.step * (self.len() as i64 - 1));
        table.beyond_an_end(self.first, last)
    }

    /// Returns the number of rows: lane l of row r is on diagonal l − r + rows − 1.
    pub(crate) const fn rows(&self) -> usize {
        self.rows
    }

    /// Sums the rows of a tile along its diagonals; 0 of diagonals that it does not have.
    pub(crate) fn sums<A: Real>(
        &self,
        (token, vectors): (IsaToken, usize),
        tile: &[A],
    ) -> [A; MOST_DIAGONALS] {
        let used = u64::MAX >> (u64::BITS as usize - self.lanes);
        A::run_kernel(token, vectors, DiagonalSums { tile, rows: self.rows, used })
    }
}

/// Sums of a tile along its diagonals.
///
/// ```text
/// rows whose shift rows − 1 − r is b modulo the width of a vector:  lines[b] += whole vectors
/// diagonal t = Σ_b lines[b][t − b]
/// ```
/// Rows that are added to one line would each wait for the row before, because a load that overlaps
/// two recent stores waits for both.
struct DiagonalSums<'a, A> {
    tile: &'a [A],
    rows: usize,
    /// Lanes that are used.
    used: u64,
}

impl<A: Real> SimdKernel<A> for DiagonalSums<'_, A> {
    type Output = [A; MOST_DIAGONALS];

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> Self::Output {
        // the first MAX_LANES elements of a line stay 0
        let mut lines = [[A::ZERO; MAX_LANES + MOST_DIAGONALS]; MAX_LANES];
        let zero = V::splat(A::ZERO);
        let shifts = (0..self.rows).rev();
        for (shift, row) in shifts.zip(each_row::<A, V, _>(V::strip::<VECTORS>(self.tile))) {
            let first = MAX_LANES + shift / V::WIDTH * V::WIDTH;
            let line = &mut lines[shift % V::WIDTH][first..];
            let Some(line) = V::row_mut::<VECTORS>(line) else { continue };
            unrolled!(v < VECTORS, {
                let terms = V::load(&row[v]).select(self.used >> (v * V::WIDTH), zero);
                V::load(&line[v]).plus(terms).store(&mut line[v]);
            });
        }
        let mut sums = [A::ZERO; MOST_DIAGONALS];
        for (index, [sum]) in V::strip_mut::<1>(&mut sums).iter_mut().enumerate() {
            let mut total = zero;
            for (b, line) in lines[..V::WIDTH].iter().enumerate() {
                let from = &line[MAX_LANES + index * V::WIDTH - b..];
                if let Some([from]) = V::row::<1>(from) {
                    total = total.plus(V::load(from));
                }
            }
            total.store(sum);
        }
        sums
    }
}

fn counts_from(positions: &[i64], first: i64) -> bool {
    // by `and`, which the compiler vectorises
    positions.iter().zip(first..).fold(true, |all, (&position, want)| all & (position == want))
}
