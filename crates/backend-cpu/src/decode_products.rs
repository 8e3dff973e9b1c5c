//! The products of a few queries with keys, and of their weights with values, in the order in which keys and values lie in memory.
//!
//! A line is one query of one query head; the lines of a key head read the same keys. [`KEYS`] keys and up to [`MOST_LINES`] lines are worked in
//! registers, so that a key is loaded once for these lines, and a sum of values once for these keys.

use std::ops::Range;

use crate::{
    geometry::Geometry,
    input::{Input, Source},
    isa::{Kernel, prefetch_far},
    lanes::unrolled,
    real::Real,
    sight::Sight,
    vector::{MOST_WIDTH, Vector},
};

/// Keys, or values, that are worked together, where a register tile has as many rows.
const KEYS: usize = 4;

/// The most lines that are worked together, where registers are many.
const MOST_LINES: usize = 4;

const TWO: usize = 2;
const ONE: usize = 1;

/// Elements of a vector of `dim` elements that is whole registers.
pub(crate) const fn pitch<A: Real>(dim: usize) -> usize {
    dim.next_multiple_of(A::WIDTH)
}

/// The lines of one key head: in blocks of those that are worked together, each a strip, `[elements of a line / lanes][lines][lanes]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lines {
    len: usize,
    together: usize,
}

impl Lines {
    /// For so many queries.
    pub(crate) const fn of_group(geometry: &Geometry, queries: usize) -> Self {
        let together = match (geometry.path.most_vectors(), geometry.lanes(1)) {
            (MOST_LINES.., MOST_WIDTH) => MOST_LINES,
            // vectors left to the compiler, which takes two registers each
            (MOST_LINES.., _) => TWO,
            _ => ONE,
        };
        Self { len: geometry.dims.group() * queries, together }
    }

    /// How many.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// The block that begins with line `first`, if there is one.
    const fn block(&self, first: usize) -> Option<Range<usize>> {
        let (left, mut count) = (self.len.saturating_sub(first), self.together);
        while count > left {
            count /= 2;
        }
        if count == 0 { None } else { Some(first..first + count) }
    }

    /// The blocks, in order: [`MOST_LINES`], two lines or one.
    fn blocks(self) -> impl Iterator<Item = Range<usize>> {
        std::iter::successors(self.block(0), move |block| self.block(block.end))
    }

    /// Where the vector of length `dim` of one line lies: ranges of a register's elements, the last padded.
    pub(crate) fn vectors<A: Real>(self, line: usize, dim: usize) -> impl Iterator<Item = Range<usize>> {
        let block = self.blocks().find(|block| block.contains(&line)).unwrap_or_default();
        let first = block.start * pitch::<A>(dim) + line.saturating_sub(block.start) * A::WIDTH;
        (0..dim.div_ceil(A::WIDTH)).map(move |vector| first + vector * block.len() * A::WIDTH).map(|first| first..first + A::WIDTH)
    }
}

/// The keys of a tile that are seen.
#[derive(Debug)]
pub(crate) struct Tile {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    /// Of a key head.
    pub(crate) lines: Lines,
    pub(crate) first_key: usize,
    /// Those between the first and the last that some query sees, counted from the first key.
    pub(crate) keys: Range<usize>,
    /// Keys for which there is room.
    pub(crate) width: usize,
}

/// Rows that are read after the tile at hand: values after their keys, keys of the next tile after those. They are asked for meanwhile, part by part, so
/// that memory never waits for arithmetic.
#[derive(Debug)]
pub(crate) struct Later<'a, 's, E> {
    pub(crate) source: &'a Source<'s, E>,
    /// Length of its vectors.
    pub(crate) dim: usize,
    /// How many rows further it begins.
    pub(crate) after: usize,
}

impl<'s, E: Input> Later<'_, 's, E> {
    /// So many rows, as far as there are any.
    #[inline(always)]
    fn rows<const ROWS: usize>(&self, batch: usize, row: usize) -> [&'s [E]; ROWS] {
        std::array::from_fn(|i| self.source.row(batch, row + self.after + i).unwrap_or_default())
    }

    /// Asks for the vectors of one head.
    #[inline(always)]
    fn ask<const ROWS: usize>(&self, rows: &[&[E]; ROWS], head: usize) {
        rows.iter().for_each(|row| prefetch_far(row.get(head * self.dim..(head + 1) * self.dim).unwrap_or_default()));
    }
}

/// The next `ROWS` rows.
#[inline(always)]
fn next_rows<'s, E: Input, const ROWS: usize>(source: &Source<'s, E>, batch: usize, first: usize) -> Option<[&'s [E]; ROWS]> {
    let mut rows = [&[][..]; ROWS];
    for (row, into) in (first..).zip(&mut rows) {
        *into = source.row(batch, row)?;
    }
    Some(rows)
}

/// The vectors of one head.
#[inline(always)]
fn of_head<'s, E, const ROWS: usize>(rows: &[&'s [E]; ROWS], head: usize, dim: usize) -> [&'s [E]; ROWS] {
    rows.map(|row| &row[head * dim..(head + 1) * dim])
}

/// Vectors of equal length that are worked together.
trait Together<'s, E>: Sized {
    /// Their parts of `width` elements, without a rest: so that one counter serves all.
    fn whole(self, width: usize) -> impl Iterator<Item = Self>;
}

impl<'s, E> Together<'s, E> for [&'s [E]; ONE] {
    #[inline(always)]
    fn whole(self, width: usize) -> impl Iterator<Item = Self> {
        self[0].chunks_exact(width).map(|part| [part])
    }
}

impl<'s, E> Together<'s, E> for [&'s [E]; KEYS] {
    #[inline(always)]
    fn whole(self, width: usize) -> impl Iterator<Item = Self> {
        let [a, b, c, d] = self.map(|vector| vector.chunks_exact(width));
        a.zip(b).zip(c.zip(d)).map(|((a, b), (c, d))| [a, b, c, d])
    }
}

/// tile\[line\]\[key\] = q·k.
pub(crate) struct Dots<'a, 's, E: Input> {
    pub(crate) tile: &'a Tile,
    pub(crate) source: &'a Source<'s, E>,
    pub(crate) dim: usize,
    /// What is read next.
    pub(crate) later: Later<'a, 's, E>,
    pub(crate) q: &'a [E::Accumulator],
    /// `[lines][lanes][lanes]`: of as many keys as a vector has lanes, summed along the dims, but not across lanes.
    pub(crate) products: &'a mut [E::Accumulator],
    pub(crate) into: &'a mut [E::Accumulator],
}

impl<E: Input> Kernel<E::Accumulator> for Dots<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let Tile { batch, first_key, ref keys, width, .. } = *self.tile;
        for first in (keys.start / V::WIDTH * V::WIDTH..keys.end).step_by(V::WIDTH) {
            let used = V::WIDTH.min(keys.end - first);
            let mut place = 0;
            while place < used {
                let row = first_key + first + place;
                if ROWS >= KEYS && place + KEYS <= used {
                    let Some(rows) = next_rows::<E, KEYS>(self.source, batch, row) else { return };
                    self.of_keys::<V, KEYS>(rows, row, place);
                    place += KEYS;
                } else {
                    let Some(rows) = next_rows::<E, ONE>(self.source, batch, row) else { return };
                    self.of_keys::<V, ONE>(rows, row, place);
                    place += ONE;
                }
            }
            // sums across lanes of all these keys
            for (of_line, into) in self.products.chunks_exact(V::WIDTH * V::WIDTH).zip(self.into.chunks_exact_mut(width)) {
                if let Some([into]) = V::row_mut::<1>(&mut into[first..]) {
                    totals::<E::Accumulator, V>(of_line).store(into);
                }
            }
        }
    }
}

impl<E: Input> Dots<'_, '_, E> {
    /// The products of all heads with a few keys, of which `row` is the first, at `place ..` of the keys whose products are summed together.
    #[inline(always)]
    fn of_keys<'r, V: Vector<E::Accumulator>, const ROWS: usize>(&mut self, rows: [&'r [E]; ROWS], row: usize, place: usize)
    where
        [&'r [E]; ROWS]: Together<'r, E>,
    {
        let Tile { batch, lines, .. } = *self.tile;
        let (pitch, square) = (self.dim.next_multiple_of(V::WIDTH), V::WIDTH * V::WIDTH);
        let later = self.later.rows::<ROWS>(batch, row);
        for kv_head in 0..rows[0].len() / self.dim {
            let keys = of_head(&rows, kv_head, self.dim);
            for block in lines.blocks() {
                let lines = kv_head * lines.len + block.start..kv_head * lines.len + block.end;
                let q = &self.q[lines.start * pitch..lines.end * pitch];
                let into = &mut self.products[lines.start * square..lines.end * square];
                match lines.len() {
                    MOST_LINES => dots::<E, V, ROWS, MOST_LINES>(keys, q, into, place),
                    TWO => dots::<E, V, ROWS, TWO>(keys, q, into, place),
                    _ => dots::<E, V, ROWS, ONE>(keys, q, into, place),
                }
            }
            self.later.ask(&later, kv_head);
        }
    }
}

/// q·k but for the sum across lanes, of a block of lines, where q goes on with zeros to whole vectors.
#[inline(always)]
fn dots<'s, E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const LINES: usize>(
    keys: [&'s [E]; ROWS],
    q: &[E::Accumulator],
    into: &mut [E::Accumulator],
    place: usize,
) where
    [&'s [E]; ROWS]: Together<'s, E>,
{
    let mut sums = [[V::splat(E::Accumulator::ZERO); ROWS]; LINES];
    let q = V::strip::<LINES>(q);
    for (q, keys) in q.iter().zip(keys.whole(V::WIDTH)) {
        add_products::<E, V, ROWS, LINES>(&mut sums, q, keys);
    }
    let rest = keys.map(|key| key.chunks_exact(V::WIDTH).remainder());
    if let (Some(q), false) = (q.last(), rest[0].is_empty()) {
        add_products::<E, V, ROWS, LINES>(&mut sums, q, rest);
    }
    unrolled!(l < LINES, {
        if let Some(into) = V::row_mut::<ROWS>(&mut into[l * V::WIDTH * V::WIDTH + place * V::WIDTH..]) {
            unrolled!(i < ROWS, sums[l][i].store(&mut into[i]));
        }
    });
}

/// The part of one vector.
#[inline(always)]
fn add_products<E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const LINES: usize>(
    sums: &mut [[V; ROWS]; LINES],
    q: &[V::Memory; LINES],
    keys: [&[E]; ROWS],
) {
    // no closure: it would not be compiled for the instruction set of its caller
    let mut key = [V::splat(E::Accumulator::ZERO); ROWS];
    unrolled!(i < ROWS, key[i] = V::widen(keys[i]));
    unrolled!(l < LINES, {
        let q = V::load(&q[l]);
        unrolled!(i < ROWS, sums[l][i] = q.multiply_add(key[i], sums[l][i]));
    });
}

/// The sums of as many vectors as one has lanes, one a lane.
#[inline(always)]
fn totals<A: Real, V: Vector<A>>(vectors: &[A]) -> V {
    let mut sums = [V::splat(A::ZERO); MOST_WIDTH];
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

/// out\[line\] += Σ_key weights\[line\]\[key\]·v over the visible pairs.
pub(crate) struct WeightedSums<'a, 's, E: Input> {
    pub(crate) tile: &'a Tile,
    pub(crate) source: &'a Source<'s, E>,
    pub(crate) dim: usize,
    /// What is read next.
    pub(crate) later: Later<'a, 's, E>,
    pub(crate) weights: &'a [E::Accumulator],
    pub(crate) out: &'a mut [E::Accumulator],
    pub(crate) sight: &'a Sight,
    /// Keys that all queries see.
    pub(crate) all: u64,
}

impl<E: Input> Kernel<E::Accumulator> for WeightedSums<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(mut self) {
        let Tile { batch, first_key, ref keys, .. } = *self.tile;
        let mut key = keys.start;
        while key < keys.end {
            let row = first_key + key;
            if ROWS >= KEYS && self.all >> key & ((1 << KEYS) - 1) == (1 << KEYS) - 1 {
                let Some(rows) = next_rows::<E, KEYS>(self.source, batch, row) else { return };
                self.of_keys::<V, KEYS>(rows, row, key);
                key += KEYS;
            } else {
                let Some(rows) = next_rows::<E, ONE>(self.source, batch, row) else { return };
                self.of_keys::<V, ONE>(rows, row, key);
                key += ONE;
            }
        }
    }
}

impl<E: Input> WeightedSums<'_, '_, E> {
    /// Adds the values of a few keys, of which `row`, the tile's key `key`, is the first: one of them, or all are seen by all.
    #[inline(always)]
    fn of_keys<'r, V: Vector<E::Accumulator>, const ROWS: usize>(&mut self, rows: [&'r [E]; ROWS], row: usize, key: usize)
    where
        [&'r [E]; ROWS]: Together<'r, E>,
    {
        let Tile { batch, lines, width, queries, .. } = *self.tile;
        let pitch = self.dim.next_multiple_of(V::WIDTH);
        let later = self.later.rows::<ROWS>(batch, row);
        for kv_head in 0..rows[0].len() / self.dim {
            let values = of_head(&rows, kv_head, self.dim);
            for block in lines.blocks() {
                let lines = kv_head * lines.len + block.start..kv_head * lines.len + block.end;
                let weights = &self.weights[lines.start * width + key..];
                let out = &mut self.out[lines.start * pitch..lines.end * pitch];
                let mut seen = [true; MOST_LINES];
                if self.all >> key & 1 == 0 {
                    // a hidden value may be NaN, and 0·NaN is not 0
                    seen.iter_mut().zip(block).for_each(|(seen, line)| *seen = self.sight.visible(line % queries, key));
                }
                match lines.len() {
                    MOST_LINES => add::<E, V, ROWS, MOST_LINES>(out, (weights, width), values, seen),
                    TWO => add::<E, V, ROWS, TWO>(out, (weights, width), values, seen),
                    _ => add::<E, V, ROWS, ONE>(out, (weights, width), values, seen),
                }
            }
            self.later.ask(&later, kv_head);
        }
    }
}

/// out += weight·value for the lines of a block that see the values, where out goes on to whole vectors. Weights of a line lie side by side.
#[inline(always)]
fn add<'s, E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const LINES: usize>(
    out: &mut [E::Accumulator],
    (weights, width): (&[E::Accumulator], usize),
    values: [&'s [E]; ROWS],
    seen: [bool; MOST_LINES],
) where
    [&'s [E]; ROWS]: Together<'s, E>,
{
    let mut factors = [[V::splat(E::Accumulator::ZERO); ROWS]; LINES];
    unrolled!(l < LINES, unrolled!(i < ROWS, factors[l][i] = V::splat(weights[l * width + i])));
    let out = V::strip_mut::<LINES>(out);
    for (out, values) in out.iter_mut().zip(values.whole(V::WIDTH)) {
        add_weighted::<E, V, ROWS, LINES>(out, &factors, values, seen);
    }
    let rest = values.map(|value| value.chunks_exact(V::WIDTH).remainder());
    if let (Some(out), false) = (out.last_mut(), rest[0].is_empty()) {
        add_weighted::<E, V, ROWS, LINES>(out, &factors, rest, seen);
    }
}

/// The part of one vector.
#[inline(always)]
fn add_weighted<E: Input, V: Vector<E::Accumulator>, const ROWS: usize, const LINES: usize>(
    out: &mut [V::Memory; LINES],
    factors: &[[V; ROWS]; LINES],
    values: [&[E]; ROWS],
    seen: [bool; MOST_LINES],
) {
    let mut value = [V::splat(E::Accumulator::ZERO); ROWS];
    unrolled!(i < ROWS, value[i] = V::widen(values[i]));
    unrolled!(l < LINES, {
        // several rows are seen by all
        if ROWS > 1 || seen[l] {
            let mut sum = V::load(&out[l]);
            unrolled!(i < ROWS, sum = factors[l][i].multiply_add(value[i], sum));
            sum.store(&mut out[l]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_lines_cover_all_and_their_vectors_fill_them() {
        for (len, together, want) in
            [(1, 4, vec![1]), (3, 4, vec![2, 1]), (7, 4, vec![4, 2, 1]), (12, 4, vec![4, 4, 4]), (3, 1, vec![1, 1, 1])]
        {
            let lines = Lines { len, together };
            assert_eq!(lines.blocks().map(|block| block.len()).collect::<Vec<_>>(), want);
            let mut places: Vec<usize> = (0..len).flat_map(|line| lines.vectors::<f32>(line, 40).flatten()).collect();
            places.sort_unstable();
            assert!(places.iter().copied().eq(0..len * pitch::<f32>(40)));
        }
        // of four lines, the second registers of the first three are apart by the fourth
        let of_line = |line| Lines { len: 7, together: 4 }.vectors::<f32>(line, 32).collect::<Vec<_>>();
        assert_eq!(of_line(3), [48..64, 112..128]);
        assert_eq!(of_line(6), [192..208, 208..224]);
    }
}
