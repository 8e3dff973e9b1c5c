//! Bias of one tile: loads it from the caller's tensor into the layout of the scores.
//!
//! ```text
//! tensor:           a row of keys per query
//! queries in lanes: a row of queries per key     transposed by blocks of one vector × one vector
//! keys in lanes:    a row of keys per query      copied
//! ```
//! Vector loads serve contiguous keys and biases broadcast along keys; other tensors are copied
//! element by element.

use std::{ops::Range, sync::Mutex};

use annulus_core::{ListedKeys, Result, Rows, Spec, memory};
use ndarray::{ArrayView1, ArrayView4, s};

use crate::{
    simd::{
        dispatch::{IsaToken, Real, SimdKernel},
        vector::{MAX_LANES, Vector},
    },
    threads::ordered_reduction::lock,
    tile::{
        aligned::list_bytes,
        geometry::{QueryKeyPairs, TileCoord},
        tile_mask::{LaneAxis, TileMask},
    },
};

/// Returns the biases of one query, by key row, or one for all keys. Axes of length 1 are
/// broadcast.
fn bias_row<A>(
    bias: ArrayView4<'_, A>,
    batch: usize,
    head: usize,
    query: usize,
) -> ArrayView1<'_, A> {
    let (batches, heads, queries, _) = bias.dim();
    let at = |len: usize, index: usize| if len == 1 { 0 } else { index };
    bias.slice_move(s![at(batches, batch), at(heads, head), at(queries, query), ..])
}

/// Returns the index of key row `row` in a bias row of length `len`.
pub(crate) const fn bias_column(len: usize, row: u64) -> usize {
    if len == 1 { 0 } else { annulus_core::index(row) }
}

/// True if the rows are consecutive.
pub(crate) fn is_consecutive(rows: &[u64]) -> bool {
    rows.first().is_some_and(|&first| rows.iter().zip(first..).all(|(&row, want)| row == want))
}

/// Writes the biases of the tile's queries and of its keys `first_key ..`, whose global rows are
/// `key_rows`. Returns true if one of them is −∞.
pub(crate) fn load_bias<A: Real>(
    token: IsaToken,
    bias: ArrayView4<'_, A>,
    coord: &TileCoord,
    (first_key, key_rows): (usize, &[u64]),
    queries: Range<usize>,
    into: &mut [A],
) -> bool {
    let line = |query: usize| bias_row(bias, coord.batch, coord.head, coord.queries.start + query);
    let Some(&first_row) = key_rows.first() else { return false };
    let one_for_all = bias.dim().3 == 1;
    if one_for_all || bias.strides()[3] == 1 && is_consecutive(key_rows) {
        let (first, len) =
            if one_for_all { (0, 1) } else { (annulus_core::index(first_row), key_rows.len()) };
        let slice = |query: usize| {
            line(query).to_slice().and_then(|line| line.get(first..first + len)).unwrap_or_default()
        };
        return A::run_kernel(
            token,
            1,
            LoadBiasRows {
                coord,
                first_key,
                keys: key_rows.len(),
                one_for_all,
                queries,
                slice,
                into,
            },
        );
    }
    let mut hides = false;
    for query in queries {
        let line = line(query);
        for (key, &row) in (first_key..).zip(key_rows) {
            let bias = line[bias_column(line.len(), row)];
            into[coord.element(query, key)] = bias;
            hides |= bias == -A::INFINITY;
        }
    }
    hides
}

/// Loads rows of `keys` biases each, or of one for all keys. True if one of them is −∞.
struct LoadBiasRows<'a, A, F> {
    coord: &'a TileCoord,
    first_key: usize,
    keys: usize,
    one_for_all: bool,
    queries: Range<usize>,
    slice: F,
    into: &'a mut [A],
}

impl<'s, A: Real, F: Fn(usize) -> &'s [A]> SimdKernel<A> for LoadBiasRows<'_, A, F> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let Self { coord, first_key, keys, one_for_all, queries, slice, into } = self;
        let zero = V::splat(A::ZERO);
        // maximum of the negated biases; NaN is never larger
        let mut max_negated = zero;
        for first in queries.clone().step_by(V::WIDTH) {
            let used = V::WIDTH.min(queries.end - first);
            let lines: [&[A]; MAX_LANES] =
                std::array::from_fn(|i| if i < used { slice(first + i) } else { &[] });
            let mut ones = [zero; MAX_LANES];
            for (line, into) in lines.iter().zip(&mut ones[..used]).filter(|_| one_for_all) {
                *into = V::splat(line.first().copied().unwrap_or(A::ZERO));
                max_negated = zero.minus(*into).if_larger(max_negated);
            }
            if coord.lane_axis == LaneAxis::Queries {
                V::transpose(&mut ones);
            }
            for at in (0..keys).step_by(V::WIDTH) {
                let mut block = ones;
                for (line, into) in lines.iter().zip(&mut block[..used]).filter(|_| !one_for_all) {
                    *into = load_padded(line.get(at..).unwrap_or_default());
                    max_negated = zero.minus(*into).if_larger(max_negated);
                }
                // rows of the tile that receive this block, and their number
                let rows = into[coord.element(first, first_key + at)..].chunks_mut(coord.width);
                let count = match coord.lane_axis {
                    LaneAxis::Queries => {
                        if !one_for_all {
                            V::transpose(&mut block);
                        }
                        V::WIDTH.min(keys - at)
                    }
                    LaneAxis::Keys => used,
                };
                for (row, line) in rows.zip(&block[..count]) {
                    if let Some([into]) = V::row_mut::<1>(row) {
                        line.store(into);
                    }
                }
            }
        }
        // ∞ · 0 is NaN, which differs from 0; finite · 0 is 0
        max_negated.times(zero).total() != A::ZERO
    }
}

/// Loads the first elements of a slice, with 0 beyond its end.
#[inline(always)]
fn load_padded<A: Real, V: Vector<A>>(from: &[A]) -> V {
    if let Some([whole]) = V::row::<1>(from) {
        return V::load(whole);
    }
    let mut whole = [A::ZERO; MAX_LANES];
    whole.iter_mut().zip(from).for_each(|(into, &element)| *into = element);
    V::row::<1>(&whole).map_or(V::splat(A::ZERO), |[whole]| V::load(whole))
}

// The additive number of a listed pair in tiles, and its gradient.
//
// Tiles find the entry of a pair by its key row, in log₂ of the list's length. Gathered rows
// (`gather/`) have the entries at hand; tiles compute what these lack.

/// The numbers of a rank's key lists.
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
