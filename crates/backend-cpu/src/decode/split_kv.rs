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
    decode::{
        kernels::{DecodeTile, PrefetchStream, PvSums, QkDots},
        tiles,
    },
    forward::query_pass::ForwardQueryPass,
    simd::{dispatch::Real, element::Float},
    threads::team::{Team, Ticker},
    tile::{
        aligned::Aligned,
        geometry::{Geometry, TileCoord},
        input::{Acc, TileInput},
        pack::padded_dim,
        softmax::{MultiplyTile, OnlineSoftmaxRows, Partial},
        terms::RowPositions,
        tile_mask::{LaneAxis, TILE},
    },
    workspace::{
        decode::{Decode, DecodeScratch, PackedQueries, split_keys, tile_keys},
        query_block::QueryBlock,
        scratch::ThreadScratch,
    },
};

impl<A: Real> Decode<A> {
    /// Attends to a block with all queries and merges the result into `blocks`.
    ///
    /// Returns false, and does nothing, if vectors of K or V are not contiguous, or if heads have
    /// different masks.
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
                let keys = first..len.min(first + step);
                pass.attend_split(scratch, index / splits, partial, keys, ticker);
            },
        );
        for block in blocks {
            for partial in &partials[block.batch * splits..(block.batch + 1) * splits] {
                merge_split(pass.geometry, partial, block);
            }
        }
        true
    }
}

/// Merges the partial result of a split for the heads of `block` into its accumulator.
fn merge_split<A: Real>(
    geometry: &Geometry,
    split: &Partial<Aligned<A>>,
    block: &mut QueryBlock<A>,
) {
    let queries = block.rows.len();
    let dim = geometry.dims.value_dim;
    let packed = PackedQueries::of_group(geometry, queries);
    let group_start = block.kv_head * packed.len();
    let out = &split.sums[group_start * padded_dim::<A>(dim)..];
    for packed_row in 0..packed.len() {
        let index = packed_row / queries;
        let query = packed_row % queries;
        let (max, sum) = (split.max[group_start + packed_row], split.sum[group_start + packed_row]);
        let lane = block.lane(index, 0) + query;
        let old_max = block.partial.max[lane];
        let old_sum = block.partial.sum[lane];
        let new = if max > old_max { max } else { old_max };
        // subtract 0 where nothing is visible yet: −∞ − −∞ would be NaN
        let base = if new == -A::INFINITY { A::ZERO } else { new };
        let (old_factor, factor) =
            ((old_max - base).softmax_exp::<false>(), (max - base).softmax_exp::<false>());
        block.partial.max[lane] = new;
        // NaN is never a maximum, but stays in the sum: 0·NaN is NaN
        block.partial.sum[lane] = old_sum * old_factor + sum * factor;
        let first = block.lane(index, 0) * geometry.value_rows() + query;
        let out =
            packed.vectors::<A>(packed_row, dim).flat_map(|elements| &out[elements]).take(dim);
        // the accumulator is unspecified before the first visible key
        let fresh = old_max == -A::INFINITY;
        for (into, &out) in block.partial.sums[first..].iter_mut().step_by(A::WIDTH).zip(out) {
            *into = if fresh { out * factor } else { *into * old_factor + out * factor };
        }
    }
}

impl<E: TileInput> ForwardQueryPass<'_, E> {
    /// Attends to the keys of one split with all queries of a batch row.
    fn attend_split(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        batch: usize,
        partial: &mut Partial<Aligned<Acc<E>>>,
        keys: Range<usize>,
        ticker: &mut Ticker<'_>,
    ) {
        partial.reset();
        partial.sums.fill(Acc::<E>::ZERO);
        self.pack_queries(batch, &mut scratch.decode);
        let tile = self.query_tiles.tile(batch, 0, 0);
        let step = tile_keys(self.geometry);
        for first in keys.clone().step_by(step) {
            if ticker.should_stop() {
                return;
            }
            let keys = first..keys.end.min(first + step);
            let ThreadScratch { tile_mask, bits, .. } = scratch;
            if tile_mask.classify(LaneAxis::Keys, &self.visibility, tile, keys.clone(), bits) {
                self.attend_split_tile(scratch, batch, partial, &keys);
            }
        }
    }

    /// Widens the queries of all heads into packed rows.
    fn pack_queries(&self, batch: usize, decode: &mut DecodeScratch<Acc<E>>) {
        let dims = self.geometry.dims;
        let queries = self.visibility.queries.len();
        if let Some(tiles) = &mut decode.tiles {
            let token = self.geometry.token;
            for head in 0..dims.q_heads {
                let plane = self.q.plane(batch, head);
                let first = head % dims.group() * queries;
                let positions = RowPositions::default();
                let panel = &mut tiles.q[head / dims.group()];
                panel.fill_terms(token, plane, 0..queries, positions, first);
            }
            return;
        }
        let packed = PackedQueries::of_group(self.geometry, queries);
        let group_len = packed.len() * padded_dim::<Acc<E>>(dims.head_dim);
        for (kv_head, into) in decode.q.chunks_exact_mut(group_len).enumerate() {
            for packed_row in 0..packed.len() {
                let head = kv_head * dims.group() + packed_row / queries;
                let vector = self.q.vector(batch, packed_row % queries, head);
                let elements = packed.vectors::<Acc<E>>(packed_row, dims.head_dim).flatten();
                elements.zip(vector).for_each(|(index, &element)| into[index] = element.widen());
            }
        }
    }

    fn attend_split_tile(
        &self,
        scratch: &mut ThreadScratch<Acc<E>>,
        batch: usize,
        partial: &mut Partial<Aligned<Acc<E>>>,
        keys: &Range<usize>,
    ) {
        let token = self.geometry.token;
        let dims = self.geometry.dims;
        let ThreadScratch { decode, tiles, tile_mask, head_mask, .. } = scratch;
        let queries = self.visibility.queries.len();
        let packed = PackedQueries::of_group(self.geometry, queries);
        let some = tile_mask.visible_lanes(queries, keys.len());
        let visible_keys = some.trailing_zeros() as usize..TILE - some.leading_zeros() as usize;
        let width = tile_keys(self.geometry);
        let tile = DecodeTile {
            batch,
            kv_heads: dims.kv_heads,
            packed,
            first_key: keys.start,
            keys: visible_keys,
            width,
        };
        let values_dim = dims.value_dim;
        let prefetch = PrefetchStream { source: &self.v, after: 0 };
        let (source, into) = (&self.k, &mut decode.tile);
        let whole = (&tile, keys.len());
        if let Some(operands) = &mut decode.tiles {
            tiles::dots(self.geometry, operands, whole, source, &prefetch, into);
        } else {
            let (q, products) = (&decode.q, &mut decode.products);
            let dim = dims.head_dim;
            let dots = QkDots { tile: &tile, source, dim, prefetch, q, products, into };
            Acc::<E>::run_kernel(token, 1, dots);
        }
        let heads = decode.tile.chunks_exact_mut(queries * width).take(dims.q_heads);
        for (head, scores) in heads.enumerate() {
            let head_start = head * queries;
            let vectors = width / Acc::<E>::WIDTH;
            let used = keys.len();
            let coord = TileCoord {
                batch,
                head,
                queries: 0..queries,
                keys: keys.clone(),
                lane_axis: LaneAxis::Keys,
                strip: 0,
                vectors,
                width,
            };
            // a bias of −∞ hides pairs of one head
            let head_mask = if self.scores.has_bias() {
                head_mask.clone_from(tile_mask);
                &mut *head_mask
            } else {
                &mut *tile_mask
            };
            self.scores.finish(&coord, head_mask, scores, None, &mut tiles.extra);
            for (query, visible) in decode.visible[head_start..][..queries].iter_mut().enumerate() {
                *visible = head_mask.lane_word(query);
            }
            let rows = head_mask.rows().clone();
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
                scale: self.scores.deferred_scale(),
                max,
                sum,
                rescale,
            };
            if Acc::<E>::run_kernel(token, 1, online_softmax) {
                for packed_row in head_rows {
                    let factor = decode.rescale[packed_row];
                    rescale_out(&mut partial.sums, packed, packed_row, values_dim, factor);
                }
            }
            if self.scores.fill_keep(&coord, &rows, &mut tiles.extra) {
                Acc::<E>::run_kernel(
                    token,
                    vectors,
                    MultiplyTile { tile: probs, by: &tiles.extra[coord.span(&rows)] },
                );
            }
        }
        let prefetch = PrefetchStream { source: &self.k, after: width };
        let (source, out) = (&self.v, &mut partial.sums);
        let (probs, visible) = (&decode.tile[..], &decode.visible[..]);
        if let Some(operands) = &mut decode.tiles {
            let probs = (probs, visible);
            tiles::add_values(self.geometry, operands, whole, source, &prefetch, probs, out);
        } else {
            let sums =
                PvSums { tile: &tile, source, dim: values_dim, prefetch, probs, out, visible };
            Acc::<E>::run_kernel(token, 1, sums);
        }
    }
}

/// Rescales the accumulator of one packed row, counted from the first KV head's.
fn rescale_out<A: Real>(
    out: &mut [A],
    packed: PackedQueries,
    packed_row: usize,
    dim: usize,
    factor: A,
) {
    let group_start = packed_row / packed.len() * packed.len() * padded_dim::<A>(dim);
    for elements in packed.vectors::<A>(packed_row % packed.len(), dim) {
        out[group_start..][elements].iter_mut().for_each(|out| *out = *out * factor);
    }
}
