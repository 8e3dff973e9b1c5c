//! Decode kernels: QKᵀ and PV for a few queries, from K and V as they lie in memory.
//!
//! ```text
//! for each group of keys (the lanes of a vector), for each KV head:
//!     for each block of up to MAX_PACKED packed rows, for each KEY_UNROLL keys of the group:
//!         KEY_UNROLL × MAX_PACKED dot products (or weighted sums) in registers
//!         with the first block: prefetch the vectors of this head that are read next
//! ```
//! All heads of a group are read before the next group, so that reads stay close together where the
//! heads of a row are contiguous, and what is prefetched is still in the second-level cache when it
//! is read.
//!
//! A packed row is one query of one query head; the packed rows of a KV head's group read the same
//! keys (GQA packing).

use std::ops::Range;

use crate::{
    simd::{
        dispatch::{Real, SimdKernel},
        element::Float,
        isa::prefetch_l2,
        vector::{MAX_LANES, Vector, unrolled},
    },
    tile::input::{Plane, TileInput, TileSource},
    workspace::decode::{MAX_PACKED, ONE, PackedQueries, TWO},
};

/// Keys or values per step, if a register tile has as many rows: 4 × 4 accumulators are 16
/// registers, and four rows keep more loads in flight than one.
const KEY_UNROLL: usize = 4;

/// Visible keys of a tile.
#[derive(Debug)]
pub(crate) struct DecodeTile {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    /// Packed rows of a KV head.
    pub(crate) packed: PackedQueries,
    pub(crate) first_key: usize,
    /// Range from the first to the last key that some query attends to, counted from `first_key`.
    pub(crate) keys: Range<usize>,
    /// Keys for which there is room.
    pub(crate) width: usize,
}

impl DecodeTile {
    /// Iterates over the parts of `keys` that lie in the same `len` keys, counted from `first_key`.
    #[inline(always)]
    fn groups(&self, len: usize) -> impl Iterator<Item = Range<usize>> {
        let keys = self.keys.clone();
        (keys.start / len..keys.end.div_ceil(len))
            .map(move |group| keys.start.max(group * len)..keys.end.min((group + 1) * len))
    }
}

/// Vectors that are read after the current tile: V after K of the same keys, K of the next tile
/// after V. They are prefetched in parts during the arithmetic, so that memory is never idle.
#[derive(Debug)]
pub(crate) struct PrefetchStream<'a, 's, E> {
    pub(crate) source: &'a TileSource<'s, E>,
    /// Distance in rows from the current row to the prefetched one.
    pub(crate) after: usize,
}

/// Vectors of one head: those that a kernel reads, and those that it prefetches.
pub(super) struct HeadVectors<'s, E> {
    vectors: Plane<'s, E>,
    prefetched: Plane<'s, E>,
    /// As in [`PrefetchStream`].
    after: usize,
}

impl<'s, E: TileInput> HeadVectors<'s, E> {
    #[inline(always)]
    pub(super) fn new(
        tile: &DecodeTile,
        kv_head: usize,
        source: &TileSource<'s, E>,
        prefetch: &PrefetchStream<'_, 's, E>,
    ) -> Self {
        Self {
            vectors: source.plane(tile.batch, kv_head),
            prefetched: prefetch.source.plane(tile.batch, kv_head),
            after: prefetch.after,
        }
    }

    /// Returns the vectors of `ROWS` rows from `row` on, if all of them exist.
    #[inline(always)]
    fn get<const ROWS: usize>(&self, row: usize) -> Option<[&'s [E]; ROWS]> {
        let mut vectors = [&[][..]; ROWS];
        unrolled!(i < ROWS, vectors[i] = self.vectors.slice(row + i)?);
        Some(vectors)
    }

    /// Prefetches the vectors that are read after those of `ROWS` rows from `row` on, if they exist
    /// and if `wanted`: with one block of packed rows, because all read the same vectors.
    #[inline(always)]
    pub(super) fn prefetch<const ROWS: usize>(&self, row: usize, wanted: bool) {
        if wanted {
            unrolled!(i < ROWS, {
                prefetch_l2(self.prefetched.slice(row + self.after + i).unwrap_or_default());
            });
        }
    }
}

/// Vectors of equal length that are read in lockstep.
pub(crate) trait LockstepChunks<'s, E>: Sized {
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
pub(crate) struct QkDots<'a, 's, E: TileInput> {
    pub(crate) tile: &'a DecodeTile,
    pub(crate) source: &'a TileSource<'s, E>,
    pub(crate) dim: usize,
    /// Rows that are read next.
    pub(crate) prefetch: PrefetchStream<'a, 's, E>,
    pub(crate) q: &'a [E::Accumulator],
    /// `[packed rows of a block][lanes][lanes]`: products with as many keys as a vector has lanes,
    /// summed over dims but not across lanes.
    pub(crate) products: &'a mut [E::Accumulator],
    pub(crate) into: &'a mut [E::Accumulator],
}

impl<E: TileInput> SimdKernel<E::Accumulator> for QkDots<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let DecodeTile { kv_heads, packed, width, .. } = *self.tile;
        let padded_dim = self.dim.next_multiple_of(V::WIDTH);
        for keys in self.tile.groups(V::WIDTH) {
            for kv_head in 0..kv_heads {
                let head = HeadVectors::new(self.tile, kv_head, self.source, &self.prefetch);
                let mut block = 0;
                while block < packed.len() {
                    let count = packed.block_len(block);
                    let start = kv_head * packed.len() + block;
                    let q = &self.q[start * padded_dim..(start + count) * padded_dim];
                    let first = block == 0;
                    match count {
                        MAX_PACKED => self.group::<V, ROWS, MAX_PACKED>(&head, &keys, q, first),
                        TWO => self.group::<V, ROWS, TWO>(&head, &keys, q, first),
                        _ => self.group::<V, ROWS, ONE>(&head, &keys, q, first),
                    }
                    self.reduce::<V>(count, start * width + keys.start / V::WIDTH * V::WIDTH);
                    block += count;
                }
            }
        }
    }
}

impl<E: TileInput> QkDots<'_, '_, E> {
    /// Computes the products of one block of packed rows with a group of keys, except for the
    /// reduction across lanes. Meanwhile prefetches, if `prefetch`.
    #[inline(always)]
    fn group<V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
        &mut self,
        head: &HeadVectors<'_, E>,
        keys: &Range<usize>,
        q: &[E::Accumulator],
        prefetch: bool,
    ) {
        let mut key = keys.start;
        while key < keys.end {
            let row = self.tile.first_key + key;
            let into = &mut self.products[key % V::WIDTH * V::WIDTH..];
            if ROWS >= KEY_UNROLL && key + KEY_UNROLL <= keys.end {
                let Some(vectors) = head.get::<KEY_UNROLL>(row) else { return };
                dots::<E, V, KEY_UNROLL, PACKED>(vectors, q, into);
                head.prefetch::<KEY_UNROLL>(row, prefetch);
                key += KEY_UNROLL;
            } else {
                let Some(vectors) = head.get::<ONE>(row) else { return };
                dots::<E, V, ONE, PACKED>(vectors, q, into);
                head.prefetch::<ONE>(row, prefetch);
                key += ONE;
            }
        }
    }

    /// Reduces the products of the `count` packed rows of a block with a group of keys across
    /// lanes. Writes those of the first to `first ..` of the tile.
    #[inline(always)]
    fn reduce<V: Vector<E::Accumulator>>(&mut self, count: usize, first: usize) {
        let products = self.products.chunks_exact(V::WIDTH * V::WIDTH);
        let into = self.into[first..].chunks_mut(self.tile.width);
        for (products, into) in products.zip(into).take(count) {
            if let Some([into]) = V::row_mut::<1>(into) {
                totals::<E::Accumulator, V>(products).store(into);
            }
        }
    }
}

/// Computes q·k except for the reduction across lanes, for one block. q is padded with zeros to
/// whole vectors. The products of a packed row begin `lanes` vectors after those of the one before.
#[inline(always)]
pub(crate) fn dots<
    's,
    E: TileInput,
    V: Vector<E::Accumulator>,
    const ROWS: usize,
    const PACKED: usize,
>(
    keys: [&'s [E]; ROWS],
    q: &[E::Accumulator],
    into: &mut [E::Accumulator],
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
        if let Some(into) = V::row_mut::<ROWS>(&mut into[l * V::WIDTH * V::WIDTH..]) {
            unrolled!(i < ROWS, sums[l][i].store(&mut into[i]));
        }
    });
}

/// Adds the products of one vector.
#[inline(always)]
fn add_products<E: TileInput, V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
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
pub(crate) fn totals<A: Real, V: Vector<A>>(vectors: &[A]) -> V {
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
pub(crate) struct PvSums<'a, 's, E: TileInput> {
    pub(crate) tile: &'a DecodeTile,
    pub(crate) source: &'a TileSource<'s, E>,
    pub(crate) dim: usize,
    /// Rows that are read next.
    pub(crate) prefetch: PrefetchStream<'a, 's, E>,
    pub(crate) probs: &'a [E::Accumulator],
    pub(crate) out: &'a mut [E::Accumulator],
    /// `[packed rows]`: bits of the keys that are visible.
    pub(crate) visible: &'a [u64],
}

impl<E: TileInput> SimdKernel<E::Accumulator> for PvSums<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let DecodeTile { kv_heads, packed, .. } = *self.tile;
        for keys in self.tile.groups(V::WIDTH) {
            for kv_head in 0..kv_heads {
                let head = HeadVectors::new(self.tile, kv_head, self.source, &self.prefetch);
                let start = kv_head * packed.len();
                let mut block = 0;
                while block < packed.len() {
                    let count = packed.block_len(block);
                    let block_at = (start, block);
                    match count {
                        MAX_PACKED => self.group::<V, ROWS, MAX_PACKED>(&head, &keys, block_at),
                        TWO => self.group::<V, ROWS, TWO>(&head, &keys, block_at),
                        _ => self.group::<V, ROWS, ONE>(&head, &keys, block_at),
                    }
                    block += count;
                }
            }
        }
    }
}

impl<E: TileInput> PvSums<'_, '_, E> {
    /// Adds the values of a group of keys to one block of packed rows: that which begins `block`
    /// packed rows after `start`, the first of its KV head.
    #[inline(always)]
    fn group<V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
        &mut self,
        head: &HeadVectors<'_, E>,
        keys: &Range<usize>,
        (start, block): (usize, usize),
    ) {
        let DecodeTile { first_key, width, .. } = *self.tile;
        let padded_dim = self.dim.next_multiple_of(V::WIDTH);
        let packed = start + block..start + block + PACKED;
        let probs = &self.probs[packed.start * width..packed.end * width];
        let out = &mut self.out[packed.start * padded_dim..packed.end * padded_dim];
        let words = &self.visible[packed];
        let all = words.iter().fold(!0, |all, word| all & word);
        let mut key = keys.start;
        while key < keys.end {
            let row = first_key + key;
            let probs = (&probs[key..], width);
            // several keys at once require that all packed rows attend to all of them
            if ROWS >= KEY_UNROLL
                && key + KEY_UNROLL <= keys.end
                && all >> key & ((1 << KEY_UNROLL) - 1) == (1 << KEY_UNROLL) - 1
            {
                let Some(values) = head.get::<KEY_UNROLL>(row) else { return };
                add_values::<E, V, KEY_UNROLL, PACKED>(out, probs, values, [true; PACKED]);
                head.prefetch::<KEY_UNROLL>(row, block == 0);
                key += KEY_UNROLL;
            } else {
                let mut visible = [true; PACKED];
                // a masked value may be NaN, and 0·NaN is NaN
                for (visible, word) in visible.iter_mut().zip(words) {
                    *visible = word >> key & 1 != 0;
                }
                let Some(values) = head.get::<ONE>(row) else { return };
                add_values::<E, V, ONE, PACKED>(out, probs, values, visible);
                head.prefetch::<ONE>(row, block == 0);
                key += ONE;
            }
        }
    }
}

/// Computes out += prob·value for the packed rows of a block that attend to the values. out is
/// padded to whole vectors; the probabilities of a packed row are contiguous.
#[inline(always)]
pub(crate) fn add_values<
    's,
    E: TileInput,
    V: Vector<E::Accumulator>,
    const ROWS: usize,
    const PACKED: usize,
>(
    out: &mut [E::Accumulator],
    (probs, width): (&[E::Accumulator], usize),
    values: [&'s [E]; ROWS],
    visible: [bool; PACKED],
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
fn add_weighted<E: TileInput, V: Vector<E::Accumulator>, const ROWS: usize, const PACKED: usize>(
    out: &mut [V::Memory; PACKED],
    factors: &[[V; ROWS]; PACKED],
    values: [&[E]; ROWS],
    visible: [bool; PACKED],
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
