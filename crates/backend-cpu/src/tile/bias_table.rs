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
    simd::dispatch::Real,
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

    /// Writes the biases, and 0 in the lanes that are not used. Returns true if one of the biases is
    /// −∞. `bias` is `[1, heads|1, 1, entries]`.
    pub(crate) fn fill<A: Real>(&self, bias: ArrayView4<'_, A>, into: &mut [A]) -> bool {
        let head = if bias.dim().1 == 1 { 0 } else { self.coord.head };
        let values: ArrayView1<'_, A> = bias.slice_move(s![0, head, 0, ..]);
        let mut hides = false;
        let lines = into[self.coord.span(self.rows)].chunks_exact_mut(self.coord.width);
        if let Some(diagonals) = self.diagonals() {
            let mut line = [A::ZERO; MOST_DIAGONALS];
            for (t, into) in line[..diagonals.len()].iter_mut().enumerate() {
                *into = values[diagonals.entry(self.table, t)];
                hides |= *into == -A::INFINITY;
            }
            for (into, of_row) in lines.zip(diagonals.rows()) {
                let (used, unused) = into.split_at_mut(of_row.len());
                used.copy_from_slice(&line[of_row]);
                unused.fill(A::ZERO);
            }
            return hides;
        }
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

    /// Iterates over the rows of the tile: the range of diagonals of its lanes.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let lanes = self.lanes;
        (0..self.rows).rev().map(move |first| first..first + lanes)
    }
}

fn counts_from(positions: &[i64], first: i64) -> bool {
    positions.iter().zip(first..).all(|(&position, want)| position == want)
}
