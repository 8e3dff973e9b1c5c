//! Second circulation of a double backward: the tangents of dq, dk, dv and dbias of one block.
//!
//! ```text
//! for each owner of gradients, for each (batch row, KV head):                  parallel
//!     for each block of 4 tiles of keys:  pack [k, k̇] and [v, v̇]
//!         for each strip of queries of each query head of the KV head, for each tile of 64 keys:
//!             S, Ṡ, ∂s/∂x and its tangent, dP = V·dOᵀ, dṖ = V̇·dOᵀ
//!             P = e^{S − m}/ℓ        Ṗ = P∘(Ṡ − μ)
//!             dS = P∘(keep∘dP − Δ)   dṠ = Ṗ∘(keep∘dP − Δ) + P∘(keep∘dṖ − Δ̇)
//!             dX = dS∘∂s/∂x          dẊ = dṠ∘∂s/∂x + dS∘(∂s/∂x)˙
//!             dQ̇ᵀ += Kᵀ·dẊ + K̇ᵀ·dX   dK̇ += dẊ·Q + dX·Q̇   dV̇ += (keep∘Ṗ)·dO   dḂ += dṠ or dẊ
//! ```

use std::{ops::Range, sync::Mutex};

use annulus_core::{
    BiasOrder, Block, Element, Error, Host, HostBuffer, HostView, Result, RowLayout, TangentInputs,
    Tick,
};

use super::{RowsAhead, TangentBlock, coord, strip_elements};
use crate::{
    simd::{
        dispatch::{MAX_REGISTER_ROWS, Real, SimdKernel},
        element::Float,
        vector::{MAX_LANES, Vector, each_row_mut, unrolled},
    },
    threads::{
        ordered_reduction::lock,
        team::{Team, Ticker},
    },
    tile::{
        bias::{ListBiasSums, bias_column},
        gemm::{gemm_nn, gemm_rows, gemm_tn},
        geometry::{Geometry, Strip, TileCoord},
        input::{Acc, Plane, TileInput, TileSource, array, elements_mut},
        operands::Previous,
        prefetch::PrefetchRows,
        tile_mask::{TILE, TileMask},
    },
    workspace::{
        records::bytes_mut,
        state::PassState,
        tangents::{
            Chunk, GradientScratch, KEY_TILES, RowPanel, RowStatistics, TangentScratch,
            TangentTiles, row_lengths,
        },
    },
};

/// Iterates over panels of columns of rows of `len` elements: first column and columns of each.
fn column_panels(len: usize, lanes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(lanes).map(move |first| (first, lanes.min(len - first)))
}

impl<A: Real> RowPanel<A> {
    /// Packs the vectors `rows` of one head.
    fn fill<E: TileInput<Accumulator = A>>(
        &mut self,
        geometry: &Geometry,
        plane: Plane<'_, E>,
        rows: Range<usize>,
        dim: usize,
    ) {
        self.rows = rows.len();
        let lanes = geometry.strip_lanes();
        let kernel = FillRows { plane, rows, dim, lanes, into: &mut self.elements };
        self.finite = A::run_kernel(geometry.token, 1, kernel);
    }

    /// Adds Σ_i tile\[j\]\[i\]·row(i) to `into`, the sums of a tile of keys j, for the keys `rows`.
    /// Masked pairs contribute nothing, also if a row is not finite.
    fn add_product(
        &self,
        geometry: &Geometry,
        (coord, mask, rows): (&TileCoord, &TileMask, &Range<usize>),
        tile: &[A],
        len: usize,
        into: &mut [A],
    ) {
        let lanes = geometry.strip_lanes();
        for (first, columns) in column_panels(len, lanes) {
            let b = &self.elements[first * self.rows..][..self.rows * columns];
            let into = &mut into[first * TILE..][..TILE * columns];
            if !self.finite {
                for row in mask.rows().clone() {
                    for query in (0..self.rows).filter(|&query| mask.visible(row, query)) {
                        let weight = tile[row * coord.width + query];
                        let from = &b[query * columns..][..columns];
                        let into = into[row * columns..][..columns].iter_mut();
                        into.zip(from).for_each(|(into, &from)| *into += weight * from);
                    }
                }
                continue;
            }
            let strip = (geometry.token, columns / A::WIDTH);
            let a = &tile[rows.start * coord.width..];
            let into = &mut into[rows.start * columns..rows.end * columns];
            gemm_rows(strip, a, coord.width, b, into);
        }
    }
}

/// Writes vectors of one head to the panels of a [`RowPanel`]. Returns true if all are finite.
struct FillRows<'a, 's, E: TileInput> {
    plane: Plane<'s, E>,
    rows: Range<usize>,
    dim: usize,
    lanes: usize,
    into: &'a mut [Acc<E>],
}

impl<E: TileInput> SimdKernel<Acc<E>> for FillRows<'_, '_, E> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector<Acc<E>>, const ROWS: usize, const VECTORS: usize>(self) -> bool {
        let Self { plane, rows, dim, lanes, into } = self;
        let zero = V::splat(Acc::<E>::ZERO);
        // Σ 0·x is NaN exactly if some x is not finite
        let mut probe = zero;
        let count = rows.len();
        for (index, row) in rows.enumerate() {
            let vector = plane.vector(row);
            for (first, columns) in column_panels(dim.next_multiple_of(V::WIDTH), lanes) {
                let into = &mut into[first * count + index * columns..][..columns];
                for (at, [into]) in V::strip_mut::<1>(into).iter_mut().enumerate() {
                    let first = first + at * V::WIDTH;
                    let elements = match vector.to_slice() {
                        Some(vector) => V::widen(&vector[first..]),
                        None => V::widen(&std::array::from_fn::<E, MAX_LANES, _>(|i| {
                            vector.get(first + i).copied().unwrap_or(E::from_f64(0.0))
                        })),
                    };
                    probe = elements.multiply_add(zero, probe);
                    elements.store(into);
                }
            }
        }
        probe.total() == Acc::<E>::ZERO
    }
}

/// Attends to one block: writes the contribution of this rank's queries to the block's tangents of
/// dk and dv into `dkv`, and adds the block's contribution to the tangents of dq and dbias.
pub(crate) fn attend_kv<E: TileInput>(
    team: &Team,
    state: &mut PassState<Acc<E>>,
    inputs: &TangentInputs<HostView<'_>>,
    block: &Block<'_, Host>,
    dkv: &mut HostBuffer,
    tick: Tick<'_>,
) -> Result<()> {
    state.update_query_tiles(team, block.rows)?;
    let PassState { shard, query_tiles, tangents, tile_list_bias, .. } = state;
    let Some(tangents) = tangents.as_mut().filter(|tangents| tangents.is_double) else {
        return Err(Error::internal("gradients of a JVP"));
    };
    let dout = inputs.dout.ok_or_else(|| Error::internal("a double backward without dout"))?;
    let record = shard.spec.gradient_row_layout();
    let records = elements_mut::<Acc<E>>(bytes_mut(dkv)?, block.rows.len(), &record)?;
    records.fill(Acc::<E>::ZERO);
    let pass = GradientBlock {
        block: TangentBlock::<E>::new(
            tangents.geometry,
            shard,
            query_tiles,
            &tangents.list_direction,
            inputs,
            block,
        )?,
        list_gradient: tile_list_bias.as_ref(),
        dout: TileSource::tensor(array("dout", dout)?),
        record,
        // tasks write disjoint elements of the same records, under a lock held once per key block
        records: Mutex::new(records),
    };
    let tasks = tangents.chunks.chunk_by_mut(|a, b| a.owner == b.owner);
    let mut dbias = tangents.dbias.chunks_mut(tangents.dbias_len.max(1));
    let tasks = tasks.map(|chunks| (chunks, dbias.next().unwrap_or_default()));
    team.run(&mut tangents.scratch, tasks, Some(tick), |scratch, (chunks, dbias), ticker| {
        let plane = |chunk: &Chunk<_>| (chunk.batch, shard.spec.dims.kv_head(chunk.head));
        for chunks in chunks.chunk_by_mut(|a, b| plane(a) == plane(b)) {
            pass.attend_plane(scratch, chunks, dbias, ticker);
        }
    });
    Ok(())
}

/// Inputs and gradients of a block.
struct GradientBlock<'a, 'r, E: TileInput> {
    block: TangentBlock<'a, E>,
    dout: TileSource<'a, E>,
    list_gradient: Option<&'a ListBiasSums<Acc<E>>>,
    record: RowLayout,
    records: Mutex<&'r mut [Acc<E>]>,
}

impl<E: TileInput> GradientBlock<'_, '_, E> {
    /// Computes the gradients of one KV head of a batch row, with all queries that read it.
    fn attend_plane(
        &self,
        scratch: &mut TangentScratch<Acc<E>>,
        chunks: &mut [Chunk<Acc<E>>],
        dbias: &mut [Acc<E>],
        ticker: &mut Ticker<'_>,
    ) {
        let Some(Chunk { batch, head, .. }) = chunks.first() else { return };
        let batch = *batch;
        let kv_head = self.block.geometry.dims.kv_head(*head);
        let len = self.block.visibility.keys.len();
        for first in (0..len).step_by(KEY_TILES * TILE) {
            let keys = first..len.min(first + KEY_TILES * TILE);
            let token = self.block.geometry.token;
            scratch.keys.fill(token, &self.block.keys, batch, kv_head, keys.clone());
            scratch.values.fill(token, &self.block.values, batch, kv_head, keys.clone());
            scratch.gradients.dk.fill(Acc::<E>::ZERO);
            scratch.gradients.dv.fill(Acc::<E>::ZERO);
            let geometry = self.block.geometry;
            for index in 0..chunks.len() {
                for strip in geometry.strips(chunks[index].rows.len()) {
                    if ticker.should_stop() {
                        return;
                    }
                    let next = self.next_strip(chunks, index, &strip);
                    let mut ahead = RowsAhead::new([next, Default::default()]);
                    let chunk = &mut chunks[index];
                    self.attend_strip(scratch, chunk, &strip, &keys, (dbias, &mut ahead));
                }
            }
            self.write(scratch, batch, kv_head, &keys);
        }
    }

    /// Returns the rows of the strip after one of chunk number `index`: of that chunk, of the next
    /// one or, for the next block of keys, of the first.
    fn next_strip(
        &self,
        chunks: &[Chunk<Acc<E>>],
        index: usize,
        strip: &Strip,
    ) -> ([PrefetchRows; 3], Range<usize>) {
        let Self { block, dout, .. } = self;
        let chunk = &chunks[index];
        let (chunk, first) = match strip.rows.end < chunk.rows.len() {
            true => (chunk, strip.rows.end),
            false => (&chunks[(index + 1) % chunks.len()], 0),
        };
        let first = chunk.rows.start + first;
        let rows = first..chunk.rows.end.min(first + block.geometry.strip_lanes());
        let [q, q_tangent] = block.query_rows(chunk.batch, chunk.head);
        let dout = PrefetchRows::of(dout.plane(chunk.batch, chunk.head));
        ([q, q_tangent, dout], rows)
    }

    fn attend_strip(
        &self,
        scratch: &mut TangentScratch<Acc<E>>,
        chunk: &mut Chunk<Acc<E>>,
        strip: &Strip,
        block_keys: &Range<usize>,
        (dbias, ahead): (&mut [Acc<E>], &mut RowsAhead),
    ) {
        let Self { block, .. } = self;
        let (batch, head) = (chunk.batch, chunk.head);
        let rows = strip.rows_from(chunk.rows.start);
        let mut is_packed = false;
        for first in block_keys.clone().step_by(TILE) {
            let keys = first..block_keys.end.min(first + TILE);
            let TangentScratch { whole_mask, tile_mask, bits, .. } = scratch;
            let has_pairs = block.classify(batch, head, rows.start, &keys, (whole_mask, bits));
            if !has_pairs || !whole_mask.strip(&rows, Acc::<E>::WIDTH, tile_mask) {
                continue;
            }
            if !std::mem::replace(&mut is_packed, true) {
                self.pack_strip(scratch, batch, head, &rows, strip.width);
            }
            let coord = coord(chunk, strip, &keys);
            let tile = (first - block_keys.start) / TILE;
            self.attend_tile(scratch, chunk, strip, (&coord, tile), (&mut *dbias, &mut *ahead));
        }
    }

    /// Packs a strip of queries, as lanes and as rows.
    fn pack_strip(
        &self,
        scratch: &mut TangentScratch<Acc<E>>,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
        width: usize,
    ) {
        let Self { block, dout, .. } = self;
        let dims = block.geometry.dims;
        let into = &mut scratch.q_lanes[..2 * dims.head_dim * width];
        block.pack_queries(batch, head, rows.clone(), width, into);
        let lanes = &mut scratch.dout_lanes[..dims.value_dim * width];
        let dout = dout.plane(batch, head);
        block.geometry.pack_strip(dout, rows.clone(), width, lanes);
        let sources = [
            (block.q.plane(batch, head), dims.head_dim),
            (block.q_tangent.plane(batch, head), dims.head_dim),
            (dout, dims.value_dim),
        ];
        for (panel, (plane, dim)) in scratch.gradients.rows.iter_mut().zip(sources) {
            panel.fill(&block.geometry, plane, rows.clone(), dim);
        }
    }

    fn attend_tile(
        &self,
        scratch: &mut TangentScratch<Acc<E>>,
        chunk: &mut Chunk<Acc<E>>,
        strip: &Strip,
        (coord, tile): (&TileCoord, usize),
        (dbias, ahead): (&mut [Acc<E>], &mut RowsAhead),
    ) {
        let Self { block, .. } = self;
        let geometry = &block.geometry;
        let dims = geometry.dims;
        let size = (geometry.token, coord.vectors);
        let TangentScratch {
            keys, values, q_lanes, dout_lanes, tiles, tile_mask, gradients, ..
        } = scratch;
        let at = |stride: usize| tile * TILE * stride;
        let k = keys.view().starting_at(at(keys.stride));
        let v = values.view().starting_at(at(values.stride));
        let k_tangent = k.starting_at(dims.head_dim);
        let v_tangent = v.starting_at(dims.value_dim);
        let q_lanes = &q_lanes[..2 * dims.head_dim * coord.width];
        block.scores(coord, tile_mask, k, q_lanes, tiles, (None, ahead));
        let TangentTiles { s, s_tangent, dp, dp_tangent, slope, slope_tangent, extra, .. } = tiles;
        let dout_lanes = &dout_lanes[..dims.value_dim * coord.width];
        gemm_nn(size, tile_mask, v, dout_lanes, dp, None, ahead);
        gemm_nn(size, tile_mask, v_tangent, dout_lanes, dp_tangent, None, ahead);
        let has_keep = block.scores.fill_keep(coord, tile_mask.rows(), extra);
        let span = coord.span(tile_mask.rows());
        let lanes = strip.rows.start..strip.rows.start + strip.width;
        let RowStatistics { max, sum, mean, delta, delta_tangent } = &chunk.row;
        let spec = block.scores.spec;
        let has_cap = block.scores.has_soft_cap_slope();
        let kernel = ScoreGradientTangents {
            s: &mut s[span.clone()],
            s_tangent: &mut s_tangent[span.clone()],
            dp: &mut dp[span.clone()],
            dp_tangent: &mut dp_tangent[span.clone()],
            keep: has_keep.then(|| &extra[span.clone()]),
            slopes: has_cap.then(|| [&slope[span.clone()], &slope_tangent[span.clone()]]),
            rows: [max, sum, mean, delta, delta_tangent].map(|list| &list[lanes.clone()]),
            scale: block.scores.deferred_scale(),
            bias_first: spec.bias_order == BiasOrder::BeforeSoftCap,
            words: tile_mask.words(),
        };
        Acc::<E>::run_kernel(geometry.token, coord.vectors, kernel);
        if let (Some(gradient), Some(bias)) = (self.list_gradient, &block.scores.list_bias) {
            gradient.add(bias, coord, tile_mask, block.scores.keys, dp_tangent);
        }
        if !dbias.is_empty() {
            self.add_bias(coord, tile_mask, dp_tangent, dbias);
        }
        let dq = &mut chunk.dq[strip_elements(strip, geometry.head_rows())];
        let (ds_tangent, ds) = (&s_tangent[span.clone()], &s[span]);
        gemm_tn(size, tile_mask, k, ds_tangent.into(), dq, Previous::Add, ahead);
        gemm_tn(size, tile_mask, k_tangent, ds.into(), dq, Previous::Add, ahead);

        // whole register tiles of keys, of which those around the visible ones have no gradient
        let visible = tile_mask.rows();
        let rows = visible.start / MAX_REGISTER_ROWS * MAX_REGISTER_ROWS
            ..visible.end.next_multiple_of(MAX_REGISTER_ROWS);
        let [head_len, value_len] = row_lengths::<Acc<E>>(geometry);
        let GradientScratch { rows: [q, q_tangent, dout], dk, dv } = gradients;
        let dk = &mut dk[tile * TILE * head_len..][..TILE * head_len];
        let dv = &mut dv[tile * TILE * value_len..][..TILE * value_len];
        for tile in [&mut *s, s_tangent, dp] {
            for around in [rows.start..visible.start, visible.end..rows.end] {
                tile[coord.span(&around)].fill(Acc::<E>::ZERO);
            }
        }
        let at = (coord, &*tile_mask, &rows);
        q.add_product(geometry, at, s_tangent, head_len, dk);
        q_tangent.add_product(geometry, at, s, head_len, dk);
        dout.add_product(geometry, at, dp, value_len, dv);
    }

    /// Adds the tangent of dS, which `tile` holds, to that of dbias.
    fn add_bias(&self, coord: &TileCoord, mask: &TileMask, tile: &[Acc<E>], dbias: &mut [Acc<E>]) {
        let Self { block, .. } = self;
        let Some([_, heads, queries, keys]) = block.scores.spec.bias else { return };
        let group = block.geometry.dims.group();
        let q_rows = if queries == 1 { 1 } else { block.visibility.queries.len() };
        let head = if heads == 1 { 0 } else { coord.head % group };
        let scores = &block.scores;
        let key_rows = &scores.keys.rows()[coord.keys.clone()];
        let positions = (scores.queries.positions(coord.batch), scores.keys.positions(coord.batch));
        for key in mask.rows().clone() {
            for query in (0..coord.queries.len()).filter(|&query| mask.visible(key, query)) {
                let row = if queries == 1 { 0 } else { coord.queries.start + query };
                let column = match &scores.spec.bias_table {
                    Some(table) => table.index(
                        positions.0[coord.queries.start + query],
                        positions.1[coord.keys.start + key],
                    ),
                    None => bias_column(keys, key_rows[key]),
                };
                dbias[(head * q_rows + row) * keys + column] += tile[key * coord.width + query];
            }
        }
    }

    /// Writes the gradients of a block of keys to its records.
    fn write(
        &self,
        scratch: &TangentScratch<Acc<E>>,
        batch: usize,
        kv_head: usize,
        keys: &Range<usize>,
    ) {
        let Self { block, record, records, .. } = self;
        let geometry = &block.geometry;
        let lanes = geometry.strip_lanes();
        let size = size_of::<Acc<E>>() as u64;
        let at = |field| annulus_core::index(record.offset(field, batch, kv_head) / size);
        let stride = annulus_core::index(record.bytes() / size);
        let [head_len, value_len] = row_lengths::<Acc<E>>(geometry);
        let dims = geometry.dims;
        let scale = Acc::<E>::from_f64(block.scores.spec.scale);
        let GradientScratch { dk, dv, .. } = &scratch.gradients;
        let mut records = lock(records);
        for (field, sums, dim, len, factor) in [
            (0, dk, dims.head_dim, head_len, scale),
            (1, dv, dims.value_dim, value_len, Acc::<E>::ONE),
        ] {
            for (index, key) in keys.clone().enumerate() {
                let sums = &sums[index / TILE * TILE * len..];
                let row = index % TILE;
                let into = &mut records[key * stride + at(field)..][..dim];
                for (first, columns) in column_panels(len, lanes) {
                    let from = &sums[first * TILE + row * columns..][..columns.min(dim - first)];
                    let into = into[first..].iter_mut();
                    into.zip(from).for_each(|(into, &sum)| *into = factor * sum);
                }
            }
        }
    }
}

/// Computes dẊ in `s_tangent`, dX in `s`, keep∘Ṗ in `dp` and the tangent of the gradient of the
/// bias in `dp_tangent`. All are 0 for masked pairs.
struct ScoreGradientTangents<'a, A> {
    /// In: S and Ṡ, divided by `scale`.
    s: &'a mut [A],
    s_tangent: &'a mut [A],
    scale: A,
    dp: &'a mut [A],
    dp_tangent: &'a mut [A],
    keep: Option<&'a [A]>,
    slopes: Option<[&'a [A]; 2]>,
    /// max, 1/ℓ, μ, Δ and its tangent of each lane.
    rows: [&'a [A]; 5],
    bias_first: bool,
    words: Option<&'a [u64]>,
}

impl<A: Real> SimdKernel<A> for ScoreGradientTangents<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<A>, const ROWS: usize, const VECTORS: usize>(self) {
        let (scale, zero) = (V::splat(self.scale), V::splat(A::ZERO));
        let mut of_rows = [[zero; VECTORS]; 5];
        for (into, list) in of_rows.iter_mut().zip(self.rows) {
            let Some(list) = V::row::<VECTORS>(list) else { return };
            unrolled!(v < VECTORS, into[v] = V::load(&list[v]));
        }
        let [max, inverse_sum, mean, delta, delta_tangent] = of_rows;
        let keep = self.keep.map(V::strip::<VECTORS>);
        let slopes = self.slopes.map(|slopes| slopes.map(V::strip::<VECTORS>));
        let rows = each_row_mut::<A, V, _>(V::strip_mut::<VECTORS>(self.s))
            .zip(V::strip_mut::<VECTORS>(self.s_tangent))
            .zip(V::strip_mut::<VECTORS>(self.dp))
            .zip(V::strip_mut::<VECTORS>(self.dp_tangent));
        for (row, (((s, s_tangent), dp), dp_tangent)) in rows.enumerate() {
            let word = self.words.map_or(!0, |words| words[row]);
            unrolled!(v < VECTORS, {
                let score = V::load(&s[v]).times(scale);
                let prob = score.minus(max[v]).softmax_exp().times(inverse_sum[v]);
                let tangent = V::load(&s_tangent[v]).times(scale);
                let mut prob_tangent = prob.times(tangent.minus(mean[v]));
                let mut of_dp = V::load(&dp[v]);
                let mut of_tangent = V::load(&dp_tangent[v]);
                let mut kept = prob_tangent;
                if let Some(keep) = keep {
                    let keep = V::load(&keep[row][v]);
                    of_dp = of_dp.times(keep);
                    of_tangent = of_tangent.times(keep);
                    kept = kept.times(keep);
                }
                let centred = of_dp.minus(delta[v]);
                let ds = prob.times(centred);
                prob_tangent = prob_tangent.times(centred);
                let ds_tangent =
                    prob.multiply_add(of_tangent.minus(delta_tangent[v]), prob_tangent);
                let mut dx = ds;
                let mut dx_tangent = ds_tangent;
                if let Some([slope, slope_tangent]) = slopes {
                    let slope = V::load(&slope[row][v]);
                    dx = ds.times(slope);
                    let of_slope = ds.times(V::load(&slope_tangent[row][v]));
                    dx_tangent = ds_tangent.multiply_add(slope, of_slope);
                }
                let of_bias = if self.bias_first { dx_tangent } else { ds_tangent };
                let lanes = word >> (v * V::WIDTH);
                dx.select(lanes, zero).store(&mut s[v]);
                dx_tangent.select(lanes, zero).store(&mut s_tangent[v]);
                kept.select(lanes, zero).store(&mut dp[v]);
                of_bias.select(lanes, zero).store(&mut dp_tangent[v]);
            });
        }
    }
}
