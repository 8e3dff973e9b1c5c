//! Decode kernels: QKᵀ and PV for a few queries, in the memory order of K and V.
//!
//! ```text
//! for each KEY_UNROLL rows of K (all KV heads of a row are contiguous):
//!     for each KV head:
//!         for each block of up to MAX_PACKED packed rows:
//!             KEY_UNROLL × MAX_PACKED dot products (or weighted sums) in registers
//!         prefetch this head's part of the rows that are read next
//! ```
//! A packed row is one query of one query head; the packed rows of a KV head's group read the same
//! keys (GQA packing).

use std::ops::Range;

use crate::{
    decode::packed_queries::{MAX_PACKED, ONE, PackedQueries, TWO},
    simd::{
        dispatch::{Kernel, Real},
        float::Float,
        hints::prefetch_l2,
        lanes::unrolled,
        vector::{MAX_LANES, Vector},
    },
    tile::{
        input::{Input, Source},
        tile_mask::TileMask,
    },
};

/// Keys or values per step, if a register tile has as many rows: 4 × 4 accumulators are 16
/// registers, and four rows keep more loads in flight than one.
const KEY_UNROLL: usize = 4;

/// Visible keys of a tile.
#[derive(Debug)]
pub(crate) struct DecodeTile {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    /// Packed rows of a KV head.
    pub(crate) packed: PackedQueries,
    pub(crate) first_key: usize,
    /// Range from the first to the last key that some query attends to, counted from `first_key`.
    pub(crate) keys: Range<usize>,
    /// Keys for which there is room.
    pub(crate) width: usize,
}

/// Rows that are read after the current tile: V after K of the same keys, K of the next tile after
/// V. They are prefetched in parts during the arithmetic, so that memory is never idle.
#[derive(Debug)]
pub(crate) struct PrefetchStream<'a, 's, E> {
    pub(crate) source: &'a Source<'s, E>,
    /// Length of the vectors.
    pub(crate) dim: usize,
    /// Distance in rows from the current row to the prefetched one.
    pub(crate) after: usize,
}

impl<'s, E: Input> PrefetchStream<'_, 's, E> {
    /// Returns the rows to prefetch; missing rows are empty.
    #[inline(always)]
    fn rows<const ROWS: usize>(&self, batch: usize, row: usize) -> [&'s [E]; ROWS] {
        std::array::from_fn(|i| self.source.row(batch, row + self.after + i).unwrap_or_default())
    }

    /// Prefetches the vectors of one head.
    #[inline(always)]
    fn issue<const ROWS: usize>(&self, rows: &[&[E]; ROWS], head: usize) {
        rows.iter().for_each(|row| {
            prefetch_l2(row.get(head * self.dim..(head + 1) * self.dim).unwrap_or_default())
        });
    }
}

/// Returns the next `ROWS` rows, if all of them exist.
#[inline(always)]
fn next_rows<'s, E: Input, const ROWS: usize>(
    source: &Source<'s, E>,
    batch: usize,
    first: usize,
) -> Option<[&'s [E]; ROWS]> {
    let mut rows = [&[][..]; ROWS];
    for (row, into) in (first..).zip(&mut rows) {
        *into = source.row(batch, row)?;
    }
    Some(rows)
}

/// Returns the vectors of one head.
#[inline(always)]
fn head_vectors<'s, E, const ROWS: usize>(
    rows: &[&'s [E]; ROWS],
    head: usize,
    dim: usize,
) -> [&'s [E]; ROWS] {
    rows.map(|row| &row[head * dim..(head + 1) * dim])
}

/// Vectors of equal length that are read in lockstep.
trait LockstepChunks<'s, E>: Sized {
    /// Iterates over full parts of `width` elements, without the remainder. One counter serves all
    /// vectors.
    fn whole_vectors(self, width: usize) -> impl Iterator<Item = Self>;
}

impl<'s, E> LockstepChunks<'s, E> for [&'s [E]; ONE] {
    #[inline(always)]
    fn whole_vectors(self, width: usize) -> impl Iterator<Item = Self> {
        self[0].chunks_exact(width).map(|part| [part])
    }
}

impl<'s, E> LockstepChunks<'s, E> for [&'s [E]; KEY_UNROLL] {
    #[inline(always)]
    fn whole_vectors(self, width: usize) -> impl Iterator<Item = Self> {
        let [a, b, c, d] = self.map(|vector| vector.chunks_exact(width));
        a.zip(b).zip(c.zip(d)).map(|((a, b), (c, d))| [a, b, c, d])
    }
}

/// Computes tile\[packed row\]\[key\] = q·k.
pub(crate) struct QkDots<'a, 's, E: Input> {
    pub(crate) tile: &'a DecodeTile,
    pub(crate) source: &'a Source<'s, E>,
    pub(crate) dim: usize,
    /// Rows that are read next.
    pub(crate) prefetch: PrefetchStream<'a, 's, E>,
    pub(crate) q: &'a [E::Accumulator],
    /// `[packed rows][lanes][lanes]`: products with as many keys as a vector has lanes, summed over
    /// dims but not across lanes.
    pub(crate) products: &'a mut [E::Accumulator],
    pub(crate) into: &'a mut [E::Accumulator],
}

impl<E: Input> Kernel<E::Accumulator> for QkDots<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let DecodeTile { batch, first_key, ref keys, width, .. } = *self.tile;
        for first in (keys.start / V::WIDTH * V::WIDTH..keys.end).step_by(V::WIDTH) {
            let used = V::WIDTH.min(keys.end - first);
            let mut index = 0;
            while index < used {
                let row = first_key + first + index;
                if ROWS >= KEY_UNROLL && index + KEY_UNROLL <= used {
                    let Some(rows) = next_rows::<E, KEY_UNROLL>(self.source, batch, row) else {
                        return;
                    };
                    self.process_keys::<V, KEY_UNROLL>(rows, row, index);
                    index += KEY_UNROLL;
                } else {
                    let Some(rows) = next_rows::<E, ONE>(self.source, batch, row) else { return };
                    self.process_keys::<V, ONE>(rows, row, index);
                    index += ONE;
                }
            }
            // reduce across lanes for all these keys at once
            for (products, into) in self
                .products
                .chunks_exact(V::WIDTH * V::WIDTH)
                .zip(self.into.chunks_exact_mut(width))
            {
                if let Some([into]) = V::row_mut::<1>(&mut into[first..]) {
                    totals::<E::Accumulator, V>(products).store(into);
                }
            }
        }
    }
}

impl<E: Input> QkDots<'_, '_, E> {
    /// Computes the products of all heads with a few keys. `row` is the first of them, and its
    /// products go to `index ..` of those that are reduced together.
    #[inline(always)]
    fn process_keys<'r, V: Vector<E::Accumulator>, const ROWS: usize>(
        &mut self,
        rows: [&'r [E]; ROWS],
        row: usize,
        index: usize,
    ) where
        [&'r [E]; ROWS]: LockstepChunks<'r, E>,
    {
        let DecodeTile { batch, packed, .. } = *self.tile;
        let padded_dim = self.dim.next_multiple_of(V::WIDTH);
        let square = V::WIDTH * V::WIDTH;
        let prefetch = self.prefetch.rows::<ROWS>(batch, row);
        for kv_head in 0..rows[0].len() / self.dim {
            let keys = head_vectors(&rows, kv_head, self.dim);
            for block in packed.blocks() {
                let packed =
                    kv_head * packed.len() + block.start..kv_head * packed.len() + block.end;
                let q = &self.q[packed.start * padded_dim..packed.end * padded_dim];
                let into = &mut self.products[packed.start * square..packed.end * square];
                match packed.len() {
                    MAX_PACKED => dots::<E, V, ROWS, MAX_PACKED>(keys, q, into, index),
                    TWO => dots::<E, V, ROWS, TWO>(keys, q, into, index),
                    _ => dots::<E, V, ROWS, ONE>(keys, q, into, index),
                }
            }
            self.prefetch.issue(&prefetch, kv_head);
        }
    }
}

/// Computes q·k except for the reduction across lanes, for one block. q is padded with zeros to
/// whole vectors.
#[inline(always)]
fn dots<'s, E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
    keys: [&'s [E]; ROWS],
    q: &[E::Accumulator],
    into: &mut [E::Accumulator],
    index: usize,
) where
    [&'s [E]; ROWS]: LockstepChunks<'s, E>,
{
    let mut sums = [[V::splat(E::Accumulator::ZERO); ROWS]; PACKED];
    let q = V::strip::<PACKED>(q);
    for (q, keys) in q.iter().zip(keys.whole_vectors(V::WIDTH)) {
        add_products::<E, V, ROWS, PACKED>(&mut sums, q, keys);
    }
    let rest = keys.map(|key| key.chunks_exact(V::WIDTH).remainder());
    if let (Some(q), false) = (q.last(), rest[0].is_empty()) {
        add_products::<E, V, ROWS, PACKED>(&mut sums, q, rest);
    }
    unrolled!(l < PACKED, {
        if let Some(into) =
            V::row_mut::<ROWS>(&mut into[l * V::WIDTH * V::WIDTH + index * V::WIDTH..])
        {
            unrolled!(i < ROWS, sums[l][i].store(&mut into[i]));
        }
    });
}

/// Adds the products of one vector.
#[inline(always)]
fn add_products<E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
    sums: &mut [[V; ROWS]; PACKED],
    q: &[V::Memory; PACKED],
    keys: [&[E]; ROWS],
) {
    // no closure: closures are not compiled for the instruction set of their caller
    let mut key = [V::splat(E::Accumulator::ZERO); ROWS];
    unrolled!(i < ROWS, key[i] = V::widen(keys[i]));
    unrolled!(l < PACKED, {
        let q = V::load(&q[l]);
        unrolled!(i < ROWS, sums[l][i] = q.multiply_add(key[i], sums[l][i]));
    });
}

/// Reduces as many vectors as one has lanes, each to one lane: a transposition, then pairwise
/// vector sums.
#[inline(always)]
fn totals<A: Real, V: Vector<A>>(vectors: &[A]) -> V {
    let mut sums = [V::splat(A::ZERO); MAX_LANES];
    for (sum, [vector]) in sums.iter_mut().zip(V::strip::<1>(vectors)) {
        *sum = V::load(vector);
    }
    V::transpose(&mut sums);
    let mut half = V::WIDTH / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] = sums[i].plus(sums[i + half]);
        }
        half /= 2;
    }
    sums[0]
}

/// Computes out\[packed row\] += Σ_key probs\[packed row\]\[key\]·v over the visible pairs.
pub(crate) struct PvSums<'a, 's, E: Input> {
    pub(crate) tile: &'a DecodeTile,
    pub(crate) source: &'a Source<'s, E>,
    pub(crate) dim: usize,
    /// Rows that are read next.
    pub(crate) prefetch: PrefetchStream<'a, 's, E>,
    pub(crate) probs: &'a [E::Accumulator],
    pub(crate) out: &'a mut [E::Accumulator],
    pub(crate) tile_mask: &'a TileMask,
    /// Keys that all queries attend to.
    pub(crate) all: u64,
}

impl<E: Input> Kernel<E::Accumulator> for PvSums<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let DecodeTile { batch, first_key, ref keys, .. } = *self.tile;
        let mut key = keys.start;
        while key < keys.end {
            let row = first_key + key;
            if ROWS >= KEY_UNROLL
                && self.all >> key & ((1 << KEY_UNROLL) - 1) == (1 << KEY_UNROLL) - 1
            {
                let Some(rows) = next_rows::<E, KEY_UNROLL>(self.source, batch, row) else {
                    return;
                };
                self.process_keys::<V, KEY_UNROLL>(rows, row, key);
                key += KEY_UNROLL;
            } else {
                let Some(rows) = next_rows::<E, ONE>(self.source, batch, row) else { return };
                self.process_keys::<V, ONE>(rows, row, key);
                key += ONE;
            }
        }
    }
}

impl<E: Input> PvSums<'_, '_, E> {
    /// Adds the values of a few keys. `row`, the tile's key `key`, is the first. Several keys at
    /// once require that all queries attend to all of them.
    #[inline(always)]
    fn process_keys<'r, V: Vector<E::Accumulator>, const ROWS: usize>(
        &mut self,
        rows: [&'r [E]; ROWS],
        row: usize,
        key: usize,
    ) where
        [&'r [E]; ROWS]: LockstepChunks<'r, E>,
    {
        let DecodeTile { batch, packed, width, queries, .. } = *self.tile;
        let padded_dim = self.dim.next_multiple_of(V::WIDTH);
        let prefetch = self.prefetch.rows::<ROWS>(batch, row);
        for kv_head in 0..rows[0].len() / self.dim {
            let values = head_vectors(&rows, kv_head, self.dim);
            for block in packed.blocks() {
                let packed =
                    kv_head * packed.len() + block.start..kv_head * packed.len() + block.end;
                let probs = &self.probs[packed.start * width + key..];
                let out = &mut self.out[packed.start * padded_dim..packed.end * padded_dim];
                let mut visible = [true; MAX_PACKED];
                if self.all >> key & 1 == 0 {
                    // a masked value may be NaN, and 0·NaN is NaN
                    visible.iter_mut().zip(block).for_each(|(visible, packed_row)| {
                        *visible = self.tile_mask.visible(packed_row % queries, key)
                    });
                }
                match packed.len() {
                    MAX_PACKED => {
                        add_values::<E, V, ROWS, MAX_PACKED>(out, (probs, width), values, visible)
                    }
                    TWO => add_values::<E, V, ROWS, TWO>(out, (probs, width), values, visible),
                    _ => add_values::<E, V, ROWS, ONE>(out, (probs, width), values, visible),
                }
            }
            self.prefetch.issue(&prefetch, kv_head);
        }
    }
}

/// Computes out += prob·value for the packed rows of a block that attend to the values. out is
/// padded to whole vectors; the probabilities of a packed row are contiguous.
#[inline(always)]
fn add_values<'s, E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
    out: &mut [E::Accumulator],
    (probs, width): (&[E::Accumulator], usize),
    values: [&'s [E]; ROWS],
    visible: [bool; MAX_PACKED],
) where
    [&'s [E]; ROWS]: LockstepChunks<'s, E>,
{
    let mut factors = [[V::splat(E::Accumulator::ZERO); ROWS]; PACKED];
    unrolled!(l < PACKED, unrolled!(i < ROWS, factors[l][i] = V::splat(probs[l * width + i])));
    let out = V::strip_mut::<PACKED>(out);
    for (out, values) in out.iter_mut().zip(values.whole_vectors(V::WIDTH)) {
        add_weighted::<E, V, ROWS, PACKED>(out, &factors, values, visible);
    }
    let rest = values.map(|value| value.chunks_exact(V::WIDTH).remainder());
    if let (Some(out), false) = (out.last_mut(), rest[0].is_empty()) {
        add_weighted::<E, V, ROWS, PACKED>(out, &factors, rest, visible);
    }
}

/// Adds the products of one vector.
#[inline(always)]
fn add_weighted<E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
    out: &mut [V::Memory; PACKED],
    factors: &[[V; ROWS]; PACKED],
    values: [&[E]; ROWS],
    visible: [bool; MAX_PACKED],
) {
    let mut value = [V::splat(E::Accumulator::ZERO); ROWS];
    unrolled!(i < ROWS, value[i] = V::widen(values[i]));
    unrolled!(l < PACKED, {
        // several rows at once are visible to all queries
        if ROWS > 1 || visible[l] {
            let mut sum = V::load(&out[l]);
            unrolled!(i < ROWS, sum = factors[l][i].multiply_add(value[i], sum));
            sum.store(&mut out[l]);
        }
    });
}
