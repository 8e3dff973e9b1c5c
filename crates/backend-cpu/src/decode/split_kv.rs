//! Split-KV decode: the forward pass of a few queries over many keys, bound by reading K and V.
//!
//! ```text
//! for each task (batch row, split of the keys), with softmax statistics of its own:     parallel
//!     for each tile of keys that is not empty:
//!         for each group of keys, for each KV head:   s ← q·k         dims in lanes
//!         for each packed row (query head, query):    (m, ℓ, p) ← online softmax of s
//!                                                     o ← o·e^{m − m'}
//!         for each group of keys, for each KV head:   o ← o + p·v
//! split after split:  merge (m, ℓ, o) into the accumulator of the pass
//! ```
//! Four keys and up to four packed rows that read them are held in registers: a key is loaded once
//! for these rows, and an accumulator once for these keys.
//!
//! Split boundaries depend on the number of keys alone, so that the bits do not depend on the
//! thread count. Scores are summed in another order than in [`crate::tile::gemm`]. Workspaces that
//! can go backward, or whose output is not normalised and compares scores with the maximum,
//! therefore do not use this path.
//!
//! # Source
//! Dao et al. 2023, "Flash-Decoding" (splitting the keys); Milakov and Gimelshein 2018 (merging
//! statistics).

use std::ops::Range;

use annulus_core::Tick;

use crate::{
    decode::kernels::{DecodeTile, PrefetchStream, PvSums, QkDots},
    forward::query_pass::ForwardQueryPass,
    simd::{dispatch::Real, element::Float},
    threads::team::{Team, Ticker},
    tile::{
        geometry::{Geometry, TileCoord},
        input::{Acc, TileInput},
        pack::padded_dim,
        softmax::{MultiplyTile, OnlineSoftmaxRows},
        tile_mask::{LaneAxis, TILE},
    },
    workspace::{
        decode::{Decode, DecodeScratch, PackedQueries, SplitPartial, split_keys, tile_keys},
        query_block::QueryBlock,
        scratch::ThreadScratch,
    },
};

impl<A: Real> Decode<A> {
    /// Attends to a block with all queries and merges the result into `blocks`.
    ///
    /// Returns false, and does nothing, if vectors of K or V are not contiguous, if heads have
    /// different masks, or if there is a bias.
    pub(crate) fn attend<E: TileInput<Accumulator = A>>(
        &mut self,
        pass: &ForwardQueryPass<'_, E>,
        team: &Team,
        scratch: &mut [ThreadScratch<A>],
        blocks: &mut [QueryBlock<A>],
        tick: Tick<'_>,
    ) -> bool {
        let dims = pass.geometry.dims;
        let len = pass.visibility.keys.len();
        if len == 0
            || pass.visibility.per_head()
            || pass.scores.has_bias()
            || pass.k.plane(0, 0).slice(0).is_none()
            || pass.v.plane(0, 0).slice(0).is_none()
        {
            return false;
        }
        let step = split_keys(len);
        let splits = len.div_ceil(step);
        let Some(partials) = self.partials.get_mut(..splits * dims.batch) else { return false };
        team.run(
            scratch,
            partials.iter_mut().enumerate(),
            Some(tick),
            |scratch, (index, partial), ticker| {
                let first = index % splits * step;
                let task = SplitTask {
                    pass,
                    batch: index / splits,
                    queries: 0..pass.visibility.queries.len(),
                };
                task.attend_split(scratch, partial, first..len.min(first + step), ticker);
            },
        );
        for block in blocks {
            for partial in &partials[block.batch * splits..(block.batch + 1) * splits] {
                partial.merge(pass.geometry, block);
            }
        }
        true
    }
}

impl<A: Real> SplitPartial<A> {
    fn clear(&mut self) {
        self.max.fill(-A::INFINITY);
        self.sum.fill(A::ZERO);
        self.out.fill(A::ZERO);
    }

    /// Merges the partial result for the heads of `block` into its accumulator.
    fn merge(&self, geometry: &Geometry, block: &mut QueryBlock<A>) {
        let queries = block.rows.len();
        let dim = geometry.dims.value_dim;
        let packed = PackedQueries::of_group(geometry, queries);
        let group_start = block.kv_head * packed.len();
        let out = &self.out[group_start * padded_dim::<A>(dim)..];
        for packed_row in 0..packed.len() {
            let index = packed_row / queries;
            let query = packed_row % queries;
            let (max, sum) =
                (self.max[group_start + packed_row], self.sum[group_start + packed_row]);
            let lane = block.lane(index, 0) + query;
            let old_max = block.max[lane];
            let old_sum = block.sum[lane];
            let new = if max > old_max { max } else { old_max };
            // subtract 0 where nothing is visible yet: −∞ − −∞ would be NaN
            let base = if new == -A::INFINITY { A::ZERO } else { new };
            let (old_factor, factor) =
                ((old_max - base).softmax_exp::<false>(), (max - base).softmax_exp::<false>());
            block.max[lane] = new;
            // NaN is never a maximum, but stays in the sum: 0·NaN is NaN
            block.sum[lane] = old_sum * old_factor + sum * factor;
            let first = block.lane(index, 0) * geometry.value_rows() + query;
            let out =
                packed.vectors::<A>(packed_row, dim).flat_map(|elements| &out[elements]).take(dim);
            // the accumulator is unspecified before the first visible key
            let fresh = old_max == -A::INFINITY;
            for (into, &out) in block.sums[first..].iter_mut().step_by(A::WIDTH).zip(out) {
                *into = if fresh { out * factor } else { *into * old_factor + out * factor };
            }
        }
    }
}

/// Task of one split.
struct SplitTask<'a, 'p, E: TileInput> {
    pass: &'a ForwardQueryPass<'p, E>,
    batch: usize,
    queries: Range<usize>,
}

impl<E: TileInput> SplitTask<'_, '_, E> {
    fn attend_split(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        partial: &mut SplitPartial<Acc<E>>,
        keys: Range<usize>,
        ticker: &mut Ticker<'_>,
    ) {
        let pass = self.pass;
        partial.clear();
        self.pack_queries(&mut scratch.decode);
        let tile = pass.query_tiles.tile(self.batch, 0, self.queries.start);
        let step = tile_keys(pass.geometry);
        for first in keys.clone().step_by(step) {
            if ticker.should_stop() {
                return;
            }
            let keys = first..keys.end.min(first + step);
            let ThreadScratch { tile_mask, bits, .. } = scratch;
            if tile_mask.classify(LaneAxis::Keys, &pass.visibility, tile, keys.clone(), bits) {
                self.attend_tile(scratch, partial, &keys);
            }
        }
    }

    /// Widens the queries of all heads into packed rows.
    fn pack_queries(&self, decode: &mut DecodeScratch<Acc<E>>) {
        let dims = self.pass.geometry.dims;
        let queries = self.queries.len();
        let packed = PackedQueries::of_group(self.pass.geometry, queries);
        let group_len = packed.len() * padded_dim::<Acc<E>>(dims.head_dim);
        for (kv_head, into) in decode.q.chunks_exact_mut(group_len).enumerate() {
            for packed_row in 0..packed.len() {
                let vector = self.pass.q.vector(
                    self.batch,
                    self.queries.start + packed_row % queries,
                    kv_head * dims.group() + packed_row / queries,
                );
                let elements = packed.vectors::<Acc<E>>(packed_row, dims.head_dim).flatten();
                elements.zip(vector).for_each(|(index, &element)| into[index] = element.widen());
            }
        }
    }

    fn attend_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        partial: &mut SplitPartial<Acc<E>>,
        keys: &Range<usize>,
    ) {
        let pass = self.pass;
        let token = pass.geometry.token;
        let dims = pass.geometry.dims;
        let ThreadScratch { decode, tiles, tile_mask, .. } = scratch;
        let queries = self.queries.len();
        let packed = PackedQueries::of_group(pass.geometry, queries);
        let (some, all) = tile_mask.visible_lanes(queries, keys.len());
        let visible_keys = some.trailing_zeros() as usize..TILE - some.leading_zeros() as usize;
        let width = tile_keys(pass.geometry);
        let tile = DecodeTile {
            batch: self.batch,
            kv_heads: dims.kv_heads,
            queries,
            packed,
            first_key: keys.start,
            keys: visible_keys,
            width,
        };
        let keys_dim = dims.head_dim;
        let values_dim = dims.value_dim;
        let dots = QkDots {
            tile: &tile,
            source: &pass.k,
            dim: keys_dim,
            prefetch: PrefetchStream { source: &pass.v, after: 0 },
            q: &decode.q,
            products: &mut decode.products,
            into: &mut decode.tile,
        };
        Acc::<E>::run_kernel(token, 1, dots);
        for (head, scores) in decode.tile.chunks_exact_mut(queries * width).enumerate() {
            let queries = self.queries.clone();
            let keys = keys.clone();
            let head_start = head * queries.len();
            let vectors = width / Acc::<E>::WIDTH;
            let used = keys.len();
            let coord = TileCoord {
                batch: self.batch,
                head,
                queries,
                keys,
                lane_axis: LaneAxis::Keys,
                strip: 0,
                vectors,
                width,
            };
            // decode runs without a bias, so the mask does not change
            pass.scores.finish(&coord, tile_mask, scores, None, &mut tiles.extra);
            let rows = tile_mask.rows().clone();
            let probs = &mut scores[coord.span(&rows)];
            probs
                .chunks_exact_mut(width)
                .for_each(|packed_row| packed_row[used..].fill(-Acc::<E>::INFINITY));
            let head_rows = head_start + rows.start..head_start + rows.end;
            let (max, sum) =
                (&mut partial.max[head_rows.clone()], &mut partial.sum[head_rows.clone()]);
            let rescale = &mut decode.rescale[head_rows.clone()];
            let online_softmax = OnlineSoftmaxRows {
                tile: probs,
                width,
                scale: pass.scores.deferred_scale(),
                max,
                sum,
                rescale,
            };
            if Acc::<E>::run_kernel(token, 1, online_softmax) {
                for packed_row in head_rows {
                    partial.rescale_out(
                        &packed,
                        packed_row,
                        values_dim,
                        decode.rescale[packed_row],
                    );
                }
            }
            if pass.scores.fill_keep(&coord, &rows, &mut tiles.extra) {
                Acc::<E>::run_kernel(
                    token,
                    vectors,
                    MultiplyTile { tile: probs, by: &tiles.extra[coord.span(&rows)] },
                );
            }
        }
        let prefetch = PrefetchStream { source: &pass.k, after: width };
        let probs = &decode.tile[..];
        let out = &mut partial.out[..];
        let sums = PvSums {
            tile: &tile,
            source: &pass.v,
            dim: values_dim,
            prefetch,
            probs,
            out,
            tile_mask,
            all,
        };
        Acc::<E>::run_kernel(token, 1, sums);
    }
}

impl<A: Real> SplitPartial<A> {
    /// Rescales the accumulator of one packed row, counted from the first KV head's.
    fn rescale_out(&mut self, packed: &PackedQueries, packed_row: usize, dim: usize, factor: A) {
        let group_start = packed_row / packed.len() * packed.len() * padded_dim::<A>(dim);
        for elements in packed.vectors::<A>(packed_row % packed.len(), dim) {
            self.out[group_start..][elements].iter_mut().for_each(|out| *out = *out * factor);
        }
    }
}
