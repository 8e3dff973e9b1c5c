//! Gradient of a bias that is a table: Σ ∂L/∂s over all pairs of an entry.
//!
//! The sums are exact ([`ExactSum`]), so that they depend neither on the order in which threads add
//! nor on their number. Terms are sums over the diagonals of a tile, in the accumulator's type. In
//! the reproducible order a tile may hold other queries on another number of ranks, so terms are
//! single elements.

use std::{ops::Range, sync::Mutex};

use annulus_core::{BiasTable, ExactSum, Result, Spec, memory};
use ndarray::ArrayViewMut4;

use crate::{
    simd::dispatch::Real,
    threads::ordered_reduction::{get_mut, lock},
    tile::{aligned::list_bytes, bias_table::TableTile, geometry::TileCoord, scores::Scores},
};

/// Gradient of this rank's table.
#[derive(Debug)]
pub(crate) struct TableGradient {
    table: BiasTable,
    /// True if the terms are single elements.
    by_element: bool,
    /// Sums of each head with a row of its own.
    heads: Vec<Mutex<Vec<ExactSum>>>,
}

impl TableGradient {
    /// Allocates the sums; `None` if the bias is not a table.
    pub(crate) fn new(spec: &Spec) -> Result<Option<Self>> {
        let Some(table) = spec.bias_table.clone() else { return Ok(None) };
        let [_, heads, _, entries] = table.shape(spec.dims.q_heads);
        let sums = || memory::filled("sums of dbias", entries, ExactSum::ZERO).map(Mutex::new);
        let heads = (0..heads).map(|_| sums()).collect::<Result<_>>()?;
        Ok(Some(Self { table, by_element: spec.leaf_rows.is_some(), heads }))
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let sums = self.heads.iter().map(|sums| list_bytes(&lock(sums)));
        list_bytes(&self.heads) + sums.sum::<usize>()
    }

    /// Zeroes all sums.
    pub(crate) fn clear(&mut self) {
        self.heads.iter_mut().for_each(|sums| get_mut(sums).fill(ExactSum::ZERO));
    }

    /// Adds the rows `rows` of a dS tile, which is 0 for masked pairs.
    pub(crate) fn add<A: Real>(
        &self,
        scores: &Scores<'_, A>,
        coord: &TileCoord,
        rows: &Range<usize>,
        ds: &[A],
    ) {
        let table = &self.table;
        let head = if self.heads.len() == 1 { 0 } else { coord.head };
        let of_tile = TableTile::new(table, (scores.queries, scores.keys), coord, rows);
        let Some(diagonals) = of_tile.diagonals().filter(|_| !self.by_element) else {
            let mut sums = lock(&self.heads[head]);
            of_tile.each_pair(|element, entry| sums[entry].add(ds[element].to_f64()));
            return;
        };
        let line = diagonals.sums((scores.token, coord.vectors), &ds[coord.span(rows)]);
        let mut sums = lock(&self.heads[head]);
        if let Some(entry) = diagonals.only_entry(table) {
            sums[entry].add(line.iter().map(|sum| sum.to_f64()).sum());
            return;
        }
        // neighbours that share an entry are one term
        let mut open = (diagonals.entry(table, 0), 0.0);
        for (t, &sum) in line[..diagonals.len()].iter().enumerate() {
            let entry = diagonals.entry(table, t);
            if entry != open.0 {
                sums[open.0].add(open.1);
                open = (entry, 0.0);
            }
            open.1 += sum.to_f64();
        }
        sums[open.0].add(open.1);
    }

    /// Writes dbias `[1, heads|1, 1, entries]`.
    pub(crate) fn write<A: Real>(&mut self, mut into: ArrayViewMut4<'_, A>) {
        let sums = self.heads.iter_mut().flat_map(|sums| get_mut(sums).iter());
        into.iter_mut().zip(sums).for_each(|(into, sum)| *into = A::from_f64(sum.total()));
    }

    /// Appends the numbers of the sums, in the order of dbias.
    pub(crate) fn add_terms(&mut self, into: &mut Vec<f64>) -> Result<()> {
        for sums in &mut self.heads {
            let sums = get_mut(sums);
            memory::reserve("the sums of dbias", into, sums.len() * ExactSum::NUMBERS)?;
            into.extend(sums.iter().flat_map(ExactSum::numbers));
        }
        Ok(())
    }
}
