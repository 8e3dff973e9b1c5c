//! The bias of one tile: from the caller's tensor to where its logits lie.
//!
//! ```text
//! the tensor: a line of keys a query        a tile with queries in lanes: a row of queries a key        with keys in lanes: a row of keys a query
//! ```
//! Lines in which the tile's keys lie side by side are moved by vectors, transposed in blocks where queries are in lanes.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayView4, s};

use crate::{
    isa::{Kernel, Path},
    logits::Site,
    real::Real,
    sight::Lanes,
    vector::{MOST_WIDTH, Vector},
};

/// The biases of one query, by key row (or one for all keys). Axes of length 1 stand for every index.
fn bias_line<A>(bias: ArrayView4<'_, A>, batch: usize, head: usize, query: usize) -> ArrayView1<'_, A> {
    let (batches, heads, queries, _) = bias.dim();
    let at = |len: usize, index: usize| if len == 1 { 0 } else { index };
    bias.slice_move(s![at(batches, batch), at(heads, head), at(queries, query), ..])
}

/// Where the bias of key row `row` stands in a line of `len`.
pub(crate) const fn bias_column(len: usize, row: u64) -> usize {
    if len == 1 { 0 } else { annulus_core::index(row) }
}

/// Writes the biases of the tile's queries and of its keys `first_key ..`, of numbers `key_rows`; true if one of them is −∞.
pub(crate) fn fill_bias<A: Real>(
    path: Path,
    bias: ArrayView4<'_, A>,
    site: &Site,
    (first_key, key_rows): (usize, &[u64]),
    queries: Range<usize>,
    into: &mut [A],
) -> bool {
    let line = |query: usize| bias_line(bias, site.batch, site.head, site.queries.start + query);
    let Some(&first_row) = key_rows.first() else { return false };
    let one_for_all = bias.dim().3 == 1;
    let counts_up = || key_rows.iter().zip(first_row..).all(|(&row, want)| row == want);
    if one_for_all || bias.strides()[3] == 1 && counts_up() {
        let (first, len) = if one_for_all { (0, 1) } else { (annulus_core::index(first_row), key_rows.len()) };
        let slice = |query: usize| line(query).to_slice().and_then(|line| line.get(first..first + len)).unwrap_or_default();
        return A::run_kernel(path, 1, FillLines { site, first_key, keys: key_rows.len(), one_for_all, queries, slice, into });
    }
    let mut hides = false;
    for query in queries {
        let line = line(query);
        for (key, &row) in (first_key..).zip(key_rows) {
            let bias = line[bias_column(line.len(), row)];
            into[site.element(query, key)] = bias;
            hides |= bias == -A::INFINITY;
        }
    }
    hides
}

/// Moves lines of `keys` biases each, or of one for all keys; true if one of them is −∞.
struct FillLines<'a, A, F> {
    site: &'a Site,
    first_key: usize,
    keys: usize,
    one_for_all: bool,
    queries: Range<usize>,
    slice: F,
    into: &'a mut [A],
}

impl<'s, A: Real, F: Fn(usize) -> &'s [A]> Kernel<A> for FillLines<'_, A, F> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let Self { site, first_key, keys, one_for_all, queries, slice, into } = self;
        let zero = V::splat(A::ZERO);
        // the largest of what is taken away: NaN is never larger
        let mut most = zero;
        for first in queries.clone().step_by(V::WIDTH) {
            let used = V::WIDTH.min(queries.end - first);
            let lines: [&[A]; MOST_WIDTH] = std::array::from_fn(|i| if i < used { slice(first + i) } else { &[] });
            let mut ones = [zero; MOST_WIDTH];
            for (line, into) in lines.iter().zip(&mut ones[..used]).filter(|_| one_for_all) {
                *into = V::splat(line.first().copied().unwrap_or(A::ZERO));
                most = zero.minus(*into).if_larger(most);
            }
            if site.lanes == Lanes::Queries {
                V::transpose(&mut ones);
            }
            for at in (0..keys).step_by(V::WIDTH) {
                let mut block = ones;
                for (line, into) in lines.iter().zip(&mut block[..used]).filter(|_| !one_for_all) {
                    *into = some(line.get(at..).unwrap_or_default());
                    most = zero.minus(*into).if_larger(most);
                }
                // rows of the tile from here on, and how many
                let rows = into[site.element(first, first_key + at)..].chunks_mut(site.width);
                let count = match site.lanes {
                    Lanes::Queries => {
                        if !one_for_all {
                            V::transpose(&mut block);
                        }
                        V::WIDTH.min(keys - at)
                    }
                    Lanes::Keys => used,
                };
                for (row, line) in rows.zip(&block[..count]) {
                    if let Some([into]) = V::row_mut::<1>(row) {
                        line.store(into);
                    }
                }
            }
        }
        // ∞ · 0 is NaN
        most.times(zero).total() != A::ZERO
    }
}

/// The first elements of a list; 0 beyond its end.
#[inline(always)]
fn some<A: Real, V: Vector<A>>(from: &[A]) -> V {
    if let Some([whole]) = V::row::<1>(from) {
        return V::load(whole);
    }
    let mut whole = [A::ZERO; MOST_WIDTH];
    whole.iter_mut().zip(from).for_each(|(into, &element)| *into = element);
    V::row::<1>(&whole).map_or(V::splat(A::ZERO), |[whole]| V::load(whole))
}
