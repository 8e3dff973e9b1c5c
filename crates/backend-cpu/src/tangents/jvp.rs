//! JVP over one block of keys: the online softmax with its tangent.
//!
//! ```text
//! for each chunk of queries of one head:                                       parallel
//!     for each tile of 64 keys that is not empty:  pack [k, k̇] and [v, v̇]
//!         for each strip of queries:
//!             S, Ṡ      (m, ℓ, P) ← online softmax of S      μ ← μ·e^{m − m'} + Σ P∘Ṡ
//!             Oᵀ ← Oᵀ·e^{m − m'} + Vᵀ·P       Ȯᵀ ← Ȯᵀ·e^{m − m'} + V̇ᵀ·P + Vᵀ·(P∘Ṡ)
//! ```
//! At the end ℓ divides all sums, and the tangent of out is Ȯ − μ∘O (`finish.rs`).

use annulus_core::{Block, Host, HostView, Result, TangentInputs, Tick};

use super::{RowsAhead, TangentBlock, coord, strip_elements};
use crate::{
    simd::{
        dispatch::{Real, SimdKernel},
        element::Float,
        vector::{Vector, each_row_mut, unrolled},
    },
    threads::team::{Team, Ticker},
    tile::{
        gemm::gemm_tn,
        geometry::{Strip, TileCoord},
        input::{Acc, TileInput},
        operands::Previous,
        prefetch::PrefetchRows,
        softmax::{MultiplyTile, OnlineSoftmax},
        tile_mask::TILE,
    },
    workspace::{
        state::PassState,
        tangents::{Chunk, TangentScratch, TangentTiles},
    },
};

/// Attends to one block with all queries.
pub(crate) fn attend<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &TangentInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    tick: Tick<'_>,
) -> Result<()> {
    state.update_query_tiles(team, block.rows)?;
    let PassState { shard, query_tiles, tangents, .. } = state;
    let Some(tangents) = tangents else { return Ok(()) };
    let (geometry, list_direction) = (tangents.geometry, &tangents.list_direction[..]);
    let pass = TangentBlock::<E>::new(geometry, shard, query_tiles, list_direction, inputs, block)?;
    let chunks = tangents.chunks.iter_mut();
    team.run(&mut tangents.scratch, chunks, Some(tick), |scratch, chunk, ticker| {
        pass.attend_chunk(scratch, chunk, ticker);
    });
    Ok(())
}

impl<E: TileInput> TangentBlock<'_, E> {
    fn attend_chunk(
        &self,
        scratch: &mut TangentScratch<Acc<E>>,
        chunk: &mut Chunk<Acc<E>>,
        ticker: &mut Ticker<'_>,
    ) {
        let (batch, head) = (chunk.batch, chunk.head);
        let kv_head = self.geometry.dims.kv_head(head);
        let lanes = 2 * self.geometry.dims.head_dim;
        let strips = || self.geometry.strips(chunk.rows.len());
        for strip in strips() {
            let into = &mut scratch.q_lanes[strip_elements(&strip, lanes)];
            let rows = strip.rows_from(chunk.rows.start);
            self.pack_queries(batch, head, rows, strip.width, into);
        }
        let mut chunk_tile = std::mem::take(&mut scratch.chunk_tile);
        let plane = [
            if self.visibility.per_batch() { batch } else { 0 },
            if self.visibility.per_head() { head } else { 0 },
        ];
        let bounds = &self.query_tiles.bounds;
        bounds.cover(plane[0], plane[1], chunk.rows.clone(), &mut chunk_tile);
        let strips: Vec<Strip> = strips().collect();
        let [keys, values] =
            [&self.keys, &self.values].map(|source| PrefetchRows::of(source.plane(batch, kv_head)));
        let panels = [keys, values, PrefetchRows::default()];
        // usually the next chunk of this thread
        let rows_of = |head| {
            let [q, q_tangent] = self.query_rows(batch, head);
            [q, q_tangent, PrefetchRows::default()]
        };
        let rows = chunk.rows.end..chunk.rows.end + chunk.rows.len();
        let mut queries = match self.visibility.queries.len() {
            len if rows.start < len => (rows_of(head), rows),
            _ if head + 1 < self.geometry.dims.q_heads => (rows_of(head + 1), 0..rows.len()),
            _ => Default::default(),
        };
        let mut tiles = self.visibility.key_tiles(&chunk_tile, TILE).peekable();
        while let Some(keys) = tiles.next() {
            if ticker.should_stop() {
                break;
            }
            let next = tiles.peek().cloned().unwrap_or_default();
            let mut ahead = RowsAhead::new([(panels, next), std::mem::take(&mut queries)]);
            let mut packed = false;
            let mut has_pairs = false;
            for strip in &strips {
                let row = chunk.rows.start + strip.rows.start;
                if strip.rows.start.is_multiple_of(TILE) {
                    let into = (&mut scratch.whole_mask, &mut scratch.bits);
                    has_pairs = self.classify(batch, head, row, &keys, into);
                }
                let lanes = strip.rows_from(chunk.rows.start);
                let TangentScratch { whole_mask, tile_mask, .. } = scratch;
                if !has_pairs || !whole_mask.strip(&lanes, Acc::<E>::WIDTH, tile_mask) {
                    continue;
                }
                if !std::mem::replace(&mut packed, true) {
                    let token = self.geometry.token;
                    scratch.keys.fill(token, &self.keys, batch, kv_head, keys.clone());
                    scratch.values.fill(token, &self.values, batch, kv_head, keys.clone());
                }
                let coord = coord(chunk, strip, &keys);
                self.attend_tile(scratch, chunk, strip, &coord, &mut ahead);
            }
            let [_, rest] = ahead.lists;
            queries = rest;
        }
        drop(tiles);
        scratch.chunk_tile = chunk_tile;
    }

    fn attend_tile(
        &self,
        scratch: &mut TangentScratch<Acc<E>>,
        chunk: &mut Chunk<Acc<E>>,
        strip: &Strip,
        coord: &TileCoord,
        ahead: &mut RowsAhead,
    ) {
        let dims = self.geometry.dims;
        let token = self.geometry.token;
        let size = (token, coord.vectors);
        let TangentScratch { keys, values, q_lanes, tiles, tile_max, rescale, tile_mask, .. } =
            scratch;
        let q_lanes = &q_lanes[strip_elements(strip, 2 * dims.head_dim)];
        let tile_max = &mut tile_max[..coord.width];
        let wanted = Some(&mut *tile_max);
        let products = self.scores(coord, tile_mask, keys.view(), q_lanes, tiles, (wanted, ahead));
        let scale = self.scores.deferred_scale();
        let TangentTiles { s, s_tangent, extra, .. } = tiles;
        let span = coord.span(tile_mask.rows());
        let lanes = strip.rows.start..strip.rows.start + strip.width;
        let rescale = &mut rescale[..coord.width];
        let max_changed = Acc::<E>::run_kernel(
            token,
            coord.vectors,
            OnlineSoftmax {
                tile: &mut s[span.clone()],
                scale,
                tile_max: products.max_known.then_some(&*tile_max),
                max: &mut chunk.row.max[lanes.clone()],
                sum: &mut chunk.row.sum[lanes.clone()],
                ties: None,
                row_ranges: products.row_ranges.filter(|_| products.masked),
                rescale,
            },
        );
        let weigh = WeighTangents {
            probs: &s[span.clone()],
            tangents: &mut s_tangent[span.clone()],
            scale,
            words: tile_mask.words(),
            mean: &mut chunk.row.mean[lanes],
            rescale,
        };
        Acc::<E>::run_kernel(token, coord.vectors, weigh);
        if self.scores.fill_keep(coord, tile_mask.rows(), extra) {
            for tile in [&mut *s, &mut *s_tangent] {
                let by = &extra[span.clone()];
                let kernel = MultiplyTile { tile: &mut tile[span.clone()], by };
                Acc::<E>::run_kernel(token, coord.vectors, kernel);
            }
        }
        let previous = if max_changed { Previous::Rescale(rescale) } else { Previous::Add };
        let v = values.view();
        let v_tangent = v.starting_at(dims.value_dim);
        let probs = &s[span.clone()];
        let range = strip_elements(strip, self.geometry.value_rows());
        let out = &mut chunk.out[range.clone()];
        gemm_tn(size, tile_mask, v, probs.into(), out, previous, ahead);
        let out_tangent = &mut chunk.out_tangent[range];
        gemm_tn(size, tile_mask, v_tangent, probs.into(), out_tangent, previous, ahead);
        let weights = &s_tangent[span];
        gemm_tn(size, tile_mask, v, weights.into(), out_tangent, Previous::Add, ahead);
    }
}

/// Ṡ ← P∘Ṡ, 0 for masked pairs, and its sum over keys: mean ← mean·rescale + Σ P∘Ṡ.
struct WeighTangents<'a, A> {
    probs: &'a [A],
    /// In: Ṡ / scale.
    tangents: &'a mut [A],
    scale: A,
    words: Option<&'a [u64]>,
    mean: &'a mut [A],
    rescale: &'a [A],
}

impl<A: Real> SimdKernel<A> for WeighTangents<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let (Some(mean), Some(rescale)) =
            (V::row_mut::<VECTORS>(self.mean), V::row::<VECTORS>(self.rescale))
        else {
            return;
        };
        let mut sum = [V::splat(A::ZERO); VECTORS];
        let (scale, zero) = (V::splat(self.scale), V::splat(A::ZERO));
        let rows = each_row_mut::<A, V, _>(V::strip_mut::<VECTORS>(self.tangents));
        for (index, (row, probs)) in rows.zip(V::strip::<VECTORS>(self.probs)).enumerate() {
            let word = self.words.map_or(!0, |words| words[index]);
            unrolled!(v < VECTORS, {
                let product = V::load(&row[v]).times(scale).times(V::load(&probs[v]));
                let product = product.select(word >> (v * V::WIDTH), zero);
                sum[v] = sum[v].plus(product);
                product.store(&mut row[v]);
            });
        }
        unrolled!(v < VECTORS, {
            V::load(&mean[v]).multiply_add(V::load(&rescale[v]), sum[v]).store(&mut mean[v]);
        });
    }
}
