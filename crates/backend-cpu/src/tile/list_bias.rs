//! The additive number of a listed pair in tiles, and its gradient.
//!
//! Tiles find the entry of a pair by its key row, in log₂ of the list's length. Gathered rows
//! (`gather/`) have the entries at hand; tiles compute what these lack.

use std::sync::Mutex;

use annulus_core::{ListedKeys, Result, Rows, Spec, memory};

use crate::{
    simd::dispatch::Real,
    threads::ordered_reduction::lock,
    tile::{
        aligned::list_bytes,
        geometry::{QueryKeyPairs, TileCoord},
        tile_mask::TileMask,
    },
};

/// Numbers of a rank's key lists: their bias, or its direction.
#[derive(Clone, Copy)]
pub(crate) struct ListBias<'a> {
    listed: ListedKeys<'a>,
    bias: &'a [f64],
}

impl<'a> ListBias<'a> {
    /// Returns the numbers of `listed`, if it has some.
    pub(crate) fn of(listed: Option<ListedKeys<'a>>) -> Option<Self> {
        let listed = listed?;
        Some(Self { listed, bias: listed.lists.bias()? })
    }

    /// Returns other numbers of the same lists.
    pub(crate) fn with(self, numbers: &'a [f64]) -> Self {
        Self { bias: numbers, ..self }
    }

    /// Calls `each` with the element of each visible pair of a tile and its entry in the lists.
    fn each_pair(
        &self,
        coord: &TileCoord,
        tile_mask: &TileMask,
        keys: &Rows,
        mut each: impl FnMut(usize, usize),
    ) {
        let QueryKeyPairs { queries, keys: tile_keys } = coord.pairs(tile_mask.rows());
        let rows = &keys.rows()[coord.keys.clone()];
        for query in queries {
            let q = coord.queries.start + query;
            let entries = self.listed.entries(coord.batch, coord.head, q);
            let list = &self.listed.lists.keys()[entries.clone()];
            for key in tile_keys.clone() {
                let (row, lane) = coord.row_and_lane(query, key);
                if !tile_mask.visible(row, lane) {
                    continue;
                }
                let found = u32::try_from(rows[key]).map(|row| list.binary_search(&row));
                if let Ok(Ok(at)) = found {
                    each(coord.element(query, key), entries.start + at);
                }
            }
        }
    }

    /// Adds the numbers of the visible pairs of a tile.
    pub(crate) fn add<A: Real>(
        &self,
        coord: &TileCoord,
        tile_mask: &TileMask,
        keys: &Rows,
        into: &mut [A],
    ) {
        self.each_pair(coord, tile_mask, keys, |element, entry| {
            into[element] += A::from_f64(self.bias[entry]);
        });
    }
}

/// Gradient of the numbers by tiles: ∂L/∂s of each listed pair of each batch row and head.
///
/// A pair has one writer, so that the sums over heads and batch rows depend neither on threads nor
/// on the division of the keys among ranks.
#[derive(Debug)]
pub(crate) struct ListBiasSums<A> {
    /// `[batch rows][q heads]` lists of the entries of the head's group, after its first entry.
    planes: Vec<Mutex<(usize, Vec<A>)>>,
    q_heads: usize,
}

impl<A: Real> ListBiasSums<A> {
    /// Allocates zeros.
    pub(crate) fn new(listed: ListedKeys<'_>, spec: &Spec) -> Result<Self> {
        let q_heads = spec.dims.q_heads;
        let mut planes = memory::list(WHAT, spec.dims.batch * q_heads)?;
        for batch in 0..spec.dims.batch {
            for head in 0..q_heads {
                let entries = listed.lists.plane(batch, listed.group(head));
                let zeros = memory::filled(WHAT, entries.len(), A::ZERO)?;
                planes.push(Mutex::new((entries.start, zeros)));
            }
        }
        Ok(Self { planes, q_heads })
    }

    /// Writes the visible pairs of a dS tile.
    pub(crate) fn add(
        &self,
        bias: &ListBias<'_>,
        coord: &TileCoord,
        tile_mask: &TileMask,
        keys: &Rows,
        ds: &[A],
    ) {
        let mut plane = lock(&self.planes[coord.batch * self.q_heads + coord.head]);
        let (first, sums) = &mut *plane;
        bias.each_pair(coord, tile_mask, keys, |element, entry| {
            sums[entry - *first] += ds[element];
        });
    }

    /// Adds the sums over heads and batch rows to `into`, by entry of the lists.
    pub(crate) fn add_to(&self, into: &mut [f64]) {
        for plane in &self.planes {
            let plane = lock(plane);
            let (first, sums) = &*plane;
            into[*first..].iter_mut().zip(sums).for_each(|(into, sum)| *into += sum.to_f64());
        }
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let lists = self.planes.iter().map(|plane| list_bytes(&lock(plane).1));
        list_bytes(&self.planes) + lists.sum::<usize>()
    }
}

const WHAT: &str = "the gradient of key_list_bias";
