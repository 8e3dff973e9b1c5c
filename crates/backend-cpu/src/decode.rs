//! The forward pass of a few queries over many keys: fewer queries than a vector has lanes, so that reading keys and values is what takes time.
//!
//! ```text
//! for each task (batch row, range of keys), with a running softmax of its own:
//!     for each tile of keys of which the queries see some:
//!         for each four keys, for each key head:      s ← q·k           dims in lanes, keys read in the order of memory
//!         for each query head and query, a line:      (m, sum, s) ← fold, o ← o·e^{m − m'}       keys in lanes
//!         for each four keys, for each key head:      o ← o + s·v
//! then, range after range: what the ranges hold is merged into the running softmax of the pass
//! ```
//! Four keys and up to four of the lines that read them are worked in registers: a key is loaded once for its lines, a sum once for its keys.
//!
//! Where the ranges end depends on the number of keys alone, so the bits depend on no number of threads. A logit is summed in another order than
//! that of [`crate::products`], which is why a workspace that can go backward, or must find its maxima again, does without.
//!
//! # Source
//! Milakov and Gimelshein 2018 (merging); Dao et al. 2023, "Flash-Decoding" (splitting the keys).

use std::ops::Range;

use annulus_core::{Result, Spec, Tick};

use crate::{
    aligned::Aligned,
    decode_products::{Dots, Later, Lines, Tile, WeightedSums, pitch},
    forward::{Acc, QueryPass},
    geometry::Geometry,
    input::Input,
    isa::Path,
    logits::Site,
    real::Real,
    scratch::Scratch,
    sight::{Lanes, TILE},
    softmax::{FoldLines, Multiply},
    team::{Pulse, Team},
    workspace::{QueryBlock, Summed},
};

/// The most ranges of a block of keys.
const MOST_RANGES: usize = 64;

/// The fewest keys of a range, but for the last.
const LEAST_KEYS: usize = 512;

/// What one task finds.
#[derive(Debug)]
pub(crate) struct Part<A> {
    /// `[lines]`: query heads, and the queries of each.
    max: Aligned<A>,
    sum: Aligned<A>,
    /// `[key heads]` of [`Lines`] of vectors of length value_dim.
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
    /// `[key heads]` of [`Lines`] of vectors of length head_dim.
    q: Aligned<A>,
    /// Logits, then weights: `[lines][keys of a tile]`.
    tile: Aligned<A>,
    /// `[lines][lanes][lanes]`: products of as many keys as a vector has lanes, summed along the dims, but not across lanes.
    products: Aligned<A>,
    /// `[lines]`: by which what was summed before is multiplied.
    rescale: Aligned<A>,
}

/// Whether few queries are served this way.
pub(crate) fn wanted<A: Real>(path: Path, spec: &Spec, queries: usize, backward: bool) -> bool {
    // queries in lanes are faster for whole vectors of them; where registers are few, from half a vector on
    let enough = if path.most_vectors() > 1 { A::WIDTH } else { A::WIDTH / 2 };
    !backward && spec.normalize && (1..enough).contains(&queries)
}

/// Keys of a tile: as many as the lanes of a strip.
const fn tile_keys(geometry: &Geometry) -> usize {
    geometry.of_whole_tiles().strip_lanes()
}

impl<A: Real> FewScratch<A> {
    /// For `queries` queries; none if they are not [`wanted`].
    pub(crate) fn new(geometry: &Geometry, queries: usize) -> Result<Self> {
        let lines = geometry.dims.q_heads * queries;
        Ok(Self {
            q: Aligned::zeroed(lines * pitch::<A>(geometry.dims.head_dim))?,
            tile: Aligned::zeroed(lines * tile_keys(geometry))?,
            products: Aligned::zeroed(lines * A::WIDTH * A::WIDTH)?,
            rescale: Aligned::zeroed(lines)?,
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
        let lines = dims.q_heads * queries;
        let part = || {
            let out = Aligned::zeroed(lines * pitch::<A>(dims.value_dim))?;
            Ok(Part { max: Aligned::zeroed(lines)?, sum: Aligned::zeroed(lines)?, out })
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
        let (queries, dim) = (block.rows.len(), geometry.dims.value_dim);
        let lines = Lines::of_group(geometry, queries);
        let of_group = block.kv_head * lines.len();
        let out = &self.out[of_group * pitch::<A>(dim)..];
        for line in 0..lines.len() {
            let (place, query) = (line / queries, line % queries);
            let (max, sum) = (self.max[of_group + line], self.sum[of_group + line]);
            let lane = block.lane(place, 0) + query;
            let (old_max, old_sum) = (block.max[lane], block.sum[lane]);
            let new = if max > old_max { max } else { old_max };
            // nothing is subtracted where nothing was seen: −∞ − −∞ would be NaN
            let base = if new == -A::INFINITY { A::ZERO } else { new };
            let (old_factor, factor) = ((old_max - base).weight::<false>(), (max - base).weight::<false>());
            block.max[lane] = new;
            // a NaN that was seen is nobody's maximum, but stays in the sum: 0·NaN is NaN
            block.sum[lane] = old_sum * old_factor + sum * factor;
            let first = block.lane(place, 0) * geometry.value_rows() + query;
            let out = lines.vectors::<A>(line, dim).flat_map(|elements| &out[elements]).take(dim);
            // before anything is seen, what is there means nothing
            let fresh = old_max == -A::INFINITY;
            for (into, &out) in block.sums[first..].iter_mut().step_by(A::WIDTH).zip(out) {
                *into = if fresh { out * factor } else { *into * old_factor + out * factor };
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
        let step = tile_keys(pass.geometry);
        for first in keys.clone().step_by(step) {
            if pulse.stopped() {
                return;
            }
            let keys = first..keys.end.min(first + step);
            let Scratch { sight, bits, whole, .. } = scratch;
            if sight.look(Lanes::Keys, &pass.visibility, whole, keys.clone(), bits) {
                self.fold_tile(scratch, part, &keys);
            }
        }
    }

    /// Widens the queries of all heads.
    fn take_queries(&self, few: &mut FewScratch<Acc<E>>) {
        let (dims, queries) = (self.pass.geometry.dims, self.queries.len());
        let lines = Lines::of_group(self.pass.geometry, queries);
        let of_group = lines.len() * pitch::<Acc<E>>(dims.head_dim);
        for (kv_head, into) in few.q.chunks_exact_mut(of_group).enumerate() {
            for line in 0..lines.len() {
                let vector = self.pass.q.vector(self.batch, self.queries.start + line % queries, kv_head * dims.group() + line / queries);
                let places = lines.vectors::<Acc<E>>(line, dims.head_dim).flatten();
                places.zip(vector).for_each(|(place, &element)| into[place] = element.widen());
            }
        }
    }

    fn fold_tile(&self, scratch: &mut Scratch<Acc<E>>, part: &mut Part<Acc<E>>, keys: &Range<usize>) {
        let pass = self.pass;
        let (path, dims) = (pass.geometry.path, pass.geometry.dims);
        let Scratch { few, tiles, sight, .. } = scratch;
        let queries = self.queries.len();
        let lines = Lines::of_group(pass.geometry, queries);
        let (some, all) = sight.seen_by_rows(queries, keys.len());
        let seen = some.trailing_zeros() as usize..TILE - some.leading_zeros() as usize;
        let width = tile_keys(pass.geometry);
        let tile = Tile { batch: self.batch, queries, lines, first_key: keys.start, keys: seen, width };
        let (keys_dim, values_dim) = (dims.head_dim, dims.value_dim);
        let dots = Dots {
            tile: &tile,
            source: &pass.k,
            dim: keys_dim,
            later: Later { source: &pass.v, dim: values_dim, after: 0 },
            q: &few.q,
            products: &mut few.products,
            into: &mut few.tile,
        };
        Acc::<E>::run_kernel(path, 1, dots);
        for (head, logits) in few.tile.chunks_exact_mut(queries * width).enumerate() {
            let (queries, keys) = (self.queries.clone(), keys.clone());
            let of_head = head * queries.len();
            let vectors = width / Acc::<E>::WIDTH;
            let used = keys.len();
            let site = Site { batch: self.batch, head, queries, keys, lanes: Lanes::Keys, strip: 0, vectors, width };
            // there is no bias that would hide more
            pass.logits.finish(&site, sight, logits, None, &mut tiles.extra);
            let rows = sight.rows().clone();
            let weights = &mut logits[site.span(&rows)];
            weights.chunks_exact_mut(width).for_each(|line| line[used..].fill(-Acc::<E>::INFINITY));
            let lines_of_head = of_head + rows.start..of_head + rows.end;
            let (max, sum) = (&mut part.max[lines_of_head.clone()], &mut part.sum[lines_of_head.clone()]);
            let rescale = &mut few.rescale[lines_of_head.clone()];
            let fold = FoldLines { tile: weights, width, unit: pass.logits.unit(), max, sum, rescale };
            if Acc::<E>::run_kernel(path, 1, fold) {
                for line in lines_of_head {
                    part.rescale_out(&lines, line, values_dim, few.rescale[line]);
                }
            }
            if pass.logits.fill_keep(&site, &rows, &mut tiles.extra) {
                Acc::<E>::run(path, vectors, Multiply { tile: weights, by: &tiles.extra[site.span(&rows)] });
            }
        }
        let later = Later { source: &pass.k, dim: keys_dim, after: width };
        let (weights, out) = (&few.tile[..], &mut part.out[..]);
        let sums = WeightedSums { tile: &tile, source: &pass.v, dim: values_dim, later, weights, out, sight, all };
        Acc::<E>::run_kernel(path, 1, sums);
    }
}

impl<A: Real> Part<A> {
    /// Multiplies the sums of one line, counted from the first of all key heads.
    fn rescale_out(&mut self, lines: &Lines, line: usize, dim: usize, factor: A) {
        let of_group = line / lines.len() * lines.len() * pitch::<A>(dim);
        for elements in lines.vectors::<A>(line % lines.len(), dim) {
            self.out[of_group..][elements].iter_mut().for_each(|out| *out = *out * factor);
        }
    }
}
