//! The forward pass of a few queries over many keys: fewer queries than half the lanes of a vector, so that reading keys and values is what takes time.
//!
//! ```text
//! for each task (batch row, range of keys), with a running softmax of its own:
//!     for each tile of 64 keys of which the queries see some:
//!         for each key, for each head:      s ← q·k                    dims in lanes, keys read in the order of memory
//!         for each head:                    (m, sum, s) ← fold
//!         for each key, for each head:      o ← o·e^{m − m'} + s·v
//! then, range after range: what the ranges hold is merged into the running softmax of the pass
//! ```
//! Where the ranges end depends on the number of keys alone, so the bits depend on no number of threads. A logit is summed in another order than
//! that of [`crate::products`], which is why a workspace that can go backward, or must find its maxima again, does without.
//!
//! # Source
//! Milakov and Gimelshein 2018 (merging); Dao et al. 2023, "Flash-Decoding" (splitting the keys).

use std::ops::Range;

use annulus_core::{Result, Spec, Tick};

use crate::{
    aligned::Aligned,
    forward::{Acc, QueryPass},
    geometry::Geometry,
    input::{Input, Source},
    isa::{Kernel, prefetch_far},
    logits::Site,
    real::Real,
    scratch::Scratch,
    sight::{Lanes, Sight, TILE},
    softmax::{Fold, Multiply},
    team::{Pulse, Team},
    vector::{MOST_WIDTH, Vector},
    workspace::{QueryBlock, Summed},
};

/// The most ranges of a block of keys.
const MOST_RANGES: usize = 64;

/// The fewest keys of a range, but for the last.
const LEAST_KEYS: usize = 512;

/// What one task finds.
#[derive(Debug)]
pub(crate) struct Part<A> {
    /// `[query heads][lanes]`
    max: Aligned<A>,
    sum: Aligned<A>,
    /// `[query heads][queries][value dim, whole vectors]`
    out: Aligned<A>,
}

/// The tasks' memory, of one workspace.
#[derive(Debug)]
pub(crate) struct Decode<A> {
    parts: Vec<Part<A>>,
}

/// What one thread works in.
#[derive(Debug)]
pub(crate) struct FewScratch<A> {
    /// `[query heads][queries][head dim, whole vectors]`
    q: Aligned<A>,
    /// `[query heads][TILE][lanes]`
    tiles: Aligned<A>,
    /// `[query heads · queries][lanes][lanes]`
    products: Aligned<A>,
}

/// Whether few queries are served this way.
pub(crate) fn wanted<A: Real>(spec: &Spec, queries: usize, backward: bool) -> bool {
    // from half a vector on, queries in lanes are faster
    !backward && spec.normalize && (1..A::WIDTH / 2).contains(&queries)
}

/// Elements of a vector of `dim` elements that is whole registers.
const fn pitch<A: Real>(dim: usize) -> usize {
    dim.next_multiple_of(A::WIDTH)
}

impl<A: Real> FewScratch<A> {
    /// For `queries` queries; none if they are not [`wanted`].
    pub(crate) fn new(geometry: &Geometry, queries: usize) -> Result<Self> {
        let heads = if queries == 0 { 0 } else { geometry.dims.q_heads };
        Ok(Self {
            q: Aligned::zeroed(heads * queries * pitch::<A>(geometry.dims.head_dim))?,
            tiles: Aligned::zeroed(heads * TILE * A::WIDTH)?,
            products: Aligned::zeroed(heads * queries * A::WIDTH * A::WIDTH)?,
        })
    }
}

/// Keys of each range of a block of `keys` keys.
fn range_keys(keys: usize) -> usize {
    keys.div_ceil(MOST_RANGES).next_multiple_of(TILE).max(LEAST_KEYS)
}

impl<A: Real> Decode<A> {
    /// For `queries` queries and blocks of up to `keys` keys.
    pub(crate) fn new(geometry: &Geometry, queries: usize, keys: usize) -> Result<Self> {
        let dims = geometry.dims;
        let ranges = keys.div_ceil(range_keys(keys));
        let lanes = dims.q_heads * A::WIDTH;
        let part = || {
            Ok(Part {
                max: Aligned::zeroed(lanes)?,
                sum: Aligned::zeroed(lanes)?,
                out: Aligned::zeroed(dims.q_heads * queries * pitch::<A>(dims.value_dim))?,
            })
        };
        Ok(Self { parts: (0..ranges * dims.batch).map(|_| part()).collect::<Result<_>>()? })
    }

    /// Folds a block into the running softmax of `blocks`; false, and nothing is done, if its keys or values do not lie side by side in memory, if
    /// heads see differently, or if there is a bias.
    pub(crate) fn attend<E: Input<Accumulator = A>>(
        &mut self,
        pass: &QueryPass<'_, E>,
        team: &Team,
        scratch: &mut [Scratch<A>],
        blocks: &mut [QueryBlock<A>],
        tick: Tick<'_>,
    ) -> bool
    where
        A: Summed,
    {
        let dims = pass.geometry.dims;
        let len = pass.visibility.keys.len();
        if len == 0 || pass.visibility.per_head() || pass.logits.has_bias() || pass.k.row(0, 0).is_none() || pass.v.row(0, 0).is_none() {
            return false;
        }
        let step = range_keys(len);
        let ranges = len.div_ceil(step);
        let Some(parts) = self.parts.get_mut(..ranges * dims.batch) else { return false };
        team.run(scratch, parts.iter_mut().enumerate(), Some(tick), |scratch, (index, part), pulse| {
            let first = index % ranges * step;
            let task = Task { pass, batch: index / ranges, queries: 0..pass.visibility.queries.len() };
            task.fold(scratch, part, first..len.min(first + step), pulse);
        });
        for block in blocks {
            for part in &parts[block.batch * ranges..(block.batch + 1) * ranges] {
                part.merge(pass.geometry, block);
            }
        }
        true
    }
}

impl<A: Real> Part<A> {
    fn clear(&mut self) {
        self.max.fill(-A::INFINITY);
        self.sum.fill(A::ZERO);
        self.out.fill(A::ZERO);
    }

    /// Adds what the part holds for the heads of `block`.
    fn merge(&self, geometry: &Geometry, block: &mut QueryBlock<A>) {
        let queries = block.rows.len();
        let (depth, pitch) = (geometry.value_rows(), pitch::<A>(geometry.dims.value_dim));
        for (place, head) in geometry.heads(block.kv_head).enumerate() {
            for query in 0..queries {
                let (max, sum) = (self.max[head * A::WIDTH + query], self.sum[head * A::WIDTH + query]);
                let lane = block.lane(place, 0) + query;
                let (old_max, old_sum) = (block.max[lane], block.sum[lane]);
                let new = if max > old_max { max } else { old_max };
                // nothing is subtracted where nothing was seen: −∞ − −∞ would be NaN
                let base = if new == -A::INFINITY { A::ZERO } else { new };
                let (old_factor, factor) = ((old_max - base).weight::<false>(), (max - base).weight::<false>());
                block.max[lane] = new;
                // a NaN that was seen is nobody's maximum, but stays in the sum: 0·NaN is NaN
                block.sum[lane] = old_sum * old_factor + sum * factor;
                let first = block.lane(place, 0) * depth + query;
                let out = &self.out[(head * queries + query) * pitch..][..geometry.dims.value_dim];
                for (into, &out) in block.sums[first..].iter_mut().step_by(A::WIDTH).zip(out) {
                    *into = *into * old_factor + out * factor;
                }
            }
        }
    }
}

struct Task<'a, 'p, E: Input> {
    pass: &'a QueryPass<'p, E>,
    batch: usize,
    queries: Range<usize>,
}

impl<E: Input<Accumulator: Summed>> Task<'_, '_, E> {
    fn fold(&self, scratch: &mut Scratch<Acc<E>>, part: &mut Part<Acc<E>>, keys: Range<usize>, pulse: &mut Pulse<'_>) {
        let pass = self.pass;
        part.clear();
        self.take_queries(&mut scratch.few);
        pass.visibility.query_tile(self.batch, 0, self.queries.clone(), &mut scratch.whole);
        scratch.looked = None;
        for first in keys.clone().step_by(TILE) {
            if pulse.stopped() {
                return;
            }
            let keys = first..keys.end.min(first + TILE);
            let Scratch { sight, bits, whole, .. } = scratch;
            if sight.look(Lanes::Queries, &pass.visibility, whole, keys.clone(), bits) {
                self.fold_tile(scratch, part, &keys);
            }
        }
    }

    /// Widens the queries of all heads.
    fn take_queries(&self, few: &mut FewScratch<Acc<E>>) {
        let pitch = pitch::<Acc<E>>(self.pass.geometry.dims.head_dim);
        let heads = (0..self.pass.geometry.dims.q_heads).flat_map(|head| self.queries.clone().map(move |query| (head, query)));
        for (into, (head, query)) in few.q.chunks_exact_mut(pitch).zip(heads) {
            let vector = self.pass.q.vector(self.batch, query, head);
            into.iter_mut().zip(vector).for_each(|(into, &element)| *into = element.widen());
        }
    }

    fn fold_tile(&self, scratch: &mut Scratch<Acc<E>>, part: &mut Part<Acc<E>>, keys: &Range<usize>) {
        let pass = self.pass;
        let (path, width, dims) = (pass.geometry.path, Acc::<E>::WIDTH, pass.geometry.dims);
        let Scratch { few, tiles, rescale, sight, sight_of_head, .. } = scratch;
        let queries = self.queries.len();
        let rows = sight.rows().clone();
        let tile = Tile { batch: self.batch, queries, group: dims.group(), first_key: keys.start, rows: rows.clone() };
        let (keys_dim, values_dim) = (dims.head_dim, dims.value_dim);
        let dots = Dots {
            tile: &tile,
            source: &pass.k,
            dim: keys_dim,
            later: (&pass.v, values_dim, 0),
            q: &few.q,
            products: &mut few.products,
            into: &mut few.tiles,
        };
        Acc::<E>::run_kernel(path, 1, dots);
        let out_len = queries * pitch::<Acc<E>>(dims.value_dim);
        for (head, logits) in few.tiles.chunks_exact_mut(TILE * width).enumerate() {
            let (queries, keys) = (self.queries.clone(), keys.clone());
            let site = Site { batch: self.batch, head, queries, keys, lanes: Lanes::Queries, strip: 0, vectors: 1, width };
            sight_of_head.clone_from(sight);
            pass.logits.finish(&site, sight_of_head, logits, None, &mut tiles.extra);
            let weights = &mut logits[site.span(&rows)];
            let lanes = head * width..(head + 1) * width;
            let (max, sum, rescale) = (&mut part.max[lanes.clone()], &mut part.sum[lanes], &mut rescale[..width]);
            let fold = Fold { tile: weights, unit: pass.logits.unit(), largest: None, max, sum, ties: None, rescale };
            if Acc::<E>::run_kernel(path, 1, fold) {
                let out = &mut part.out[head * out_len..(head + 1) * out_len];
                for (out, &factor) in out.chunks_exact_mut(pitch::<Acc<E>>(dims.value_dim)).zip(&*rescale) {
                    out.iter_mut().for_each(|out| *out = *out * factor);
                }
            }
            if pass.logits.fill_keep(&site, &rows, &mut tiles.extra) {
                Acc::<E>::run(path, 1, Multiply { tile: weights, by: &tiles.extra[site.span(&rows)] });
            }
        }
        let (weights, out, later) = (&few.tiles[..], &mut part.out[..], (&pass.k, keys_dim, TILE));
        let sums = WeightedSums { tile: &tile, source: &pass.v, dim: values_dim, later, weights, out, sight };
        Acc::<E>::run_kernel(path, 1, sums);
    }
}

/// The visible rows of a tile of keys.
struct Tile {
    batch: usize,
    queries: usize,
    /// Query heads of a key head.
    group: usize,
    first_key: usize,
    /// Counted from the first key.
    rows: Range<usize>,
}

/// tile\[head\]\[key\]\[query\] = q·k, keys in the order of memory.
struct Dots<'a, 's, E: Input> {
    tile: &'a Tile,
    source: &'a Source<'s, E>,
    dim: usize,
    /// What is read next, the length of its vectors, and how many rows further it begins.
    later: (&'a Source<'s, E>, usize, usize),
    q: &'a [E::Accumulator],
    /// `[heads · queries][lanes][lanes]`: products of as many keys as a vector has lanes, summed along the dims, but not across lanes.
    products: &'a mut [E::Accumulator],
    into: &'a mut [E::Accumulator],
}

impl<E: Input> Kernel<E::Accumulator> for Dots<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) {
        let Tile { batch, queries, group, first_key, ref rows } = *self.tile;
        let pitch = self.dim.next_multiple_of(V::WIDTH);
        let square = V::WIDTH * V::WIDTH;
        for first in rows.clone().step_by(V::WIDTH) {
            let used = V::WIDTH.min(rows.end - first);
            for (place, row) in (first_key + first..first_key + first + used).enumerate() {
                let Some(keys) = self.source.row(batch, row) else { return };
                let mut later = Later::of(&self.later, batch, row);
                for (kv_head, key) in keys.chunks_exact(self.dim).enumerate() {
                    later.ask();
                    let vectors = kv_head * group * queries..(kv_head + 1) * group * queries;
                    let of_head = &mut self.products[vectors.start * square..vectors.end * square];
                    let q = &self.q[vectors.start * pitch..vectors.end * pitch];
                    for (q, into) in q.chunks_exact(pitch).zip(of_head.chunks_exact_mut(square)) {
                        if let Some([into]) = V::row_mut::<1>(&mut into[place * V::WIDTH..]) {
                            products::<E, V>(q, key).store(into);
                        }
                    }
                }
            }
            // sums across lanes of all these keys: one transposition, then sums of vectors
            for (line, of_line) in self.products.chunks_exact(square).enumerate() {
                let mut logits = [E::Accumulator::ZERO; MOST_WIDTH];
                if let Some([logits]) = V::row_mut::<1>(&mut logits) {
                    totals::<E::Accumulator, V>(of_line).store(logits);
                }
                let (head, query) = (line / queries, line % queries);
                let into = self.into[(head * TILE + first) * V::WIDTH + query..].iter_mut().step_by(V::WIDTH);
                into.zip(&logits).take(used).for_each(|(into, &logit)| *into = logit);
            }
        }
    }
}

/// q·k but for the sum across lanes, where q goes on with zeros to whole vectors.
#[inline(always)]
fn products<E: Input, V: Vector<E::Accumulator>>(q: &[E::Accumulator], key: &[E]) -> V {
    let mut sum = V::splat(E::Accumulator::ZERO);
    let mut lines = V::strip::<1>(q).iter();
    let mut keys = key.chunks_exact(V::WIDTH);
    for (key, [line]) in keys.by_ref().zip(lines.by_ref()) {
        sum = V::load(line).multiply_add(V::widen(key), sum);
    }
    match (keys.remainder(), lines.next()) {
        ([], _) | (_, None) => sum,
        (rest, Some([line])) => V::load(line).multiply_add(V::widen(rest), sum),
    }
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

/// out\[head\]\[query\] += Σ_key weights\[head\]\[key\]\[query\]·v over the visible pairs, values in the order of memory.
struct WeightedSums<'a, 's, E: Input> {
    tile: &'a Tile,
    source: &'a Source<'s, E>,
    dim: usize,
    /// What is read next, the length of its vectors, and how many rows further it begins.
    later: (&'a Source<'s, E>, usize, usize),
    weights: &'a [E::Accumulator],
    out: &'a mut [E::Accumulator],
    sight: &'a Sight,
}

impl<E: Input> Kernel<E::Accumulator> for WeightedSums<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<E::Accumulator>, const ROWS: usize, const VECTORS: usize>(self) {
        let Tile { batch, queries, group, first_key, ref rows } = *self.tile;
        let pitch = self.dim.next_multiple_of(V::WIDTH);
        for row in rows.clone() {
            let Some(values) = self.source.row(batch, first_key + row) else { return };
            let mut later = Later::of(&self.later, batch, first_key + row);
            for (kv_head, value) in values.chunks_exact(self.dim).enumerate() {
                later.ask();
                for head in kv_head * group..(kv_head + 1) * group {
                    let weights = &self.weights[(head * TILE + row) * V::WIDTH..][..queries];
                    let of_head = &mut self.out[head * queries * pitch..(head + 1) * queries * pitch];
                    for ((query, &weight), out) in weights.iter().enumerate().zip(of_head.chunks_exact_mut(pitch)) {
                        // a hidden value may be NaN, and 0·NaN is not 0
                        if self.sight.visible(row, query) {
                            add::<E, V>(out, weight, value);
                        }
                    }
                }
            }
        }
    }
}

/// out += weight·value, where out goes on to whole vectors.
#[inline(always)]
fn add<E: Input, V: Vector<E::Accumulator>>(out: &mut [E::Accumulator], weight: E::Accumulator, value: &[E]) {
    let weight = V::splat(weight);
    let mut out = V::strip_mut::<1>(out).iter_mut();
    let mut values = value.chunks_exact(V::WIDTH);
    for (value, [out]) in values.by_ref().zip(out.by_ref()) {
        weight.multiply_add(V::widen(value), V::load(out)).store(out);
    }
    if let (rest @ [_, ..], Some([out])) = (values.remainder(), out.next()) {
        weight.multiply_add(V::widen(rest), V::load(out)).store(out);
    }
}

/// Rows that are read after the tile at hand: values after their keys, keys of the next tile after those. They are asked for meanwhile, part by part, so
/// that memory never waits for arithmetic.
struct Later<'a, E> {
    line: std::slice::Chunks<'a, E>,
}

impl<'a, E: Input> Later<'a, E> {
    /// The row so many rows after `row`, if there is one.
    #[inline(always)]
    fn of((source, dim, after): &(&Source<'a, E>, usize, usize), batch: usize, row: usize) -> Self {
        Self { line: source.row(batch, row + after).unwrap_or_default().chunks(*dim) }
    }

    /// Asks for the vector of one more head.
    #[inline(always)]
    fn ask(&mut self) {
        prefetch_far(self.line.next().unwrap_or_default());
    }
}
