//! Decode on the tiles of [`crate::simd::amx`]: QKᵀ and PV of the packed rows of a KV head.
//!
//! ```text
//! for each tile of 64 keys, for each KV head:
//!     S = Q·Kᵀ     A = packed rows, pairs along the dims     B = keys in lanes
//!     O += P·V     A = P, pairs along the keys               B = values, a line per two keys
//! ```
//! The online softmax between both is that of the vector kernels. Packing K and V, which vectors
//! read in place, decides from how many packed rows on tiles are faster. Cycles of 64 keys of dim
//! 128: packing measured on Zen 4, products by the throughput of the instructions (16 cycles for 16
//! packed rows), vectors at 41 % of two multiply-adds a cycle, which is their share on Zen 4, and
//! memory at 13 GB/s and 3.5 GHz.
//!
//! | | bf16 | f16 | f32 |
//! |---|---|---|---|
//! | packing | 11,800 | 23,400 | 34,000 |
//! | products of 16 packed rows, with splitting P | 1,400 | 2,400 | 4,100 |
//! | products of one packed row on vectors | 1,170 | 1,170 | 1,170 |
//! | reading K and V from memory | 8,800 | 8,800 | 17,600 |
//! | packed rows from which tiles are faster | 12 | 25 | 40 |
//!
//! Eight packed rows of bf16, and 15 of f32, are read from memory as fast as vectors multiply them.

use crate::{
    decode::kernels::{DecodeTile, HeadVectors, PrefetchStream},
    simd::element::Float,
    tile::{
        ds_tile::DqUpdate,
        gemm::gemm_nn,
        geometry::Geometry,
        input::{Acc, TileInput, TileSource},
        pack::padded_dim,
        tile_mask::{TILE, TileMask},
    },
    workspace::decode::{ONE, TileOperands},
};

/// Computes tile\[packed row\]\[key\] = q·k for `keys` keys of a tile of 64. The rows after the last
/// packed row, up to a whole tile, are unspecified.
pub(super) fn dots<'s, E: TileInput>(
    geometry: &Geometry,
    operands: &mut TileOperands<Acc<E>>,
    (tile, keys): (&DecodeTile, usize),
    source: &TileSource<'s, E>,
    prefetch: &PrefetchStream<'_, 's, E>,
    into: &mut [Acc<E>],
) {
    let packed = tile.packed.len();
    let vectors = TILE / Acc::<E>::WIDTH;
    let TileOperands { q, k, .. } = operands;
    for (kv_head, q) in q.iter().enumerate() {
        prefetch_head(tile, kv_head, source, prefetch);
        let rows = tile.first_key..tile.first_key + keys;
        geometry.pack_strip(source.plane(tile.batch, kv_head), rows, TILE, k);
        // the next head overwrites rows after the last packed row
        let into = &mut into[kv_head * packed * TILE..];
        let token = (geometry.token, vectors);
        let mask = TileMask::full(packed);
        gemm_nn(token, &mask, q.view().of_queries(), k, into, None, &mut ());
    }
}

/// Computes out\[packed row\] += Σ_key probs\[packed row\]\[key\]·v over the visible pairs.
pub(super) fn add_values<'s, E: TileInput>(
    geometry: &Geometry,
    operands: &mut TileOperands<Acc<E>>,
    (tile, keys): (&DecodeTile, usize),
    source: &TileSource<'s, E>,
    prefetch: &PrefetchStream<'_, 's, E>,
    (probs, visible): (&[Acc<E>], &[u64]),
    out: &mut [Acc<E>],
) {
    let packed = tile.packed.len();
    let width = padded_dim::<Acc<E>>(geometry.dims.value_dim);
    let heads = probs.chunks_exact(packed * TILE).zip(visible.chunks_exact(packed));
    let heads = heads.zip(out.chunks_exact_mut(packed * width));
    for (kv_head, ((probs, visible), out)) in heads.enumerate() {
        prefetch_head(tile, kv_head, source, prefetch);
        let rows = tile.first_key..tile.first_key + keys;
        operands.v.fill(geometry.token, source, tile.batch, kv_head, rows);
        let blocks = probs.chunks(TILE * TILE).zip(visible.chunks(TILE));
        for ((probs, visible), into) in blocks.zip(out.chunks_mut(TILE * width)) {
            operands.probs.replace(geometry.token, probs, visible);
            let panel = operands.v.view();
            let update = DqUpdate { first_row: 0, panel, keys: 0..keys, into, width };
            operands.probs.accumulate_dq(geometry.token, update);
        }
    }
}

/// Prefetches the vectors that are read after those of a tile.
fn prefetch_head<'s, E: TileInput>(
    tile: &DecodeTile,
    kv_head: usize,
    source: &TileSource<'s, E>,
    prefetch: &PrefetchStream<'_, 's, E>,
) {
    let head = HeadVectors::new(tile, kv_head, source, prefetch);
    for key in tile.keys.clone() {
        head.prefetch::<ONE>(tile.first_key + key, true);
    }
}
