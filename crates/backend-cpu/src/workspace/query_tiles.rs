//! Visibility of the tiles of queries, for the passes over keys.

use annulus_core::{QueryTile, Result, Spec, TileBoundsTable, Visibility, memory};

use crate::{
    simd::dispatch::Real,
    threads::team::Team,
    tile::{aligned::list_bytes, tile_mask::TILE},
    workspace::scratch::Scratch,
};

/// Visibility of every tile of queries, computed once per block for all tasks.
#[derive(Debug, Default)]
pub(crate) struct QueryTileCache {
    pub(crate) hulls: TileBoundsTable,
    /// `[batches][heads][per_head]`
    pub(crate) tiles: Vec<QueryTile>,
    /// Number of batch rows, or 1 if the mask is the same for all.
    pub(crate) batches: usize,
    /// Number of query heads, or 1 if the mask is the same for all.
    pub(crate) heads: usize,
    /// Tiles of one head.
    pub(crate) per_head: usize,
}

impl QueryTileCache {
    /// Computes the visibility of each tile of queries, once for all tasks.
    pub(crate) fn refill<A: Real>(
        &mut self,
        team: &Team,
        scratch: &mut [Scratch<A>],
        visibility: &Visibility<'_>,
        spec: &Spec,
    ) -> Result<()> {
        self.hulls.refill(visibility, spec.dims.batch, spec.dims.q_heads, TILE)?;
        self.batches = if visibility.per_batch() { spec.dims.batch } else { 1 };
        self.heads = if visibility.per_head() { spec.dims.q_heads } else { 1 };
        let len = visibility.queries.len();
        self.per_head = len.div_ceil(TILE);
        let count = self.batches * self.heads * self.per_head;
        if count == 0 {
            // no queries or no heads: the loops below would still run over every batch row and head
            return Ok(());
        }
        if self.tiles.len() < count {
            memory::reserve("query tiles", &mut self.tiles, count)?;
            self.tiles.resize_with(count, QueryTile::default);
        }
        let planes = (0..self.batches).flat_map(|b| (0..self.heads).map(move |h| (b, h)));
        let rows = (0..len).step_by(TILE).map(|first| first..len.min(first + TILE));
        let all = planes.flat_map(|plane| rows.clone().map(move |rows| (plane, rows)));
        team.run(scratch, all.zip(&mut self.tiles), None, |_, (((batch, head), rows), tile), _| {
            visibility.query_tile(batch, head, rows, tile);
        });
        Ok(())
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let tiles = self.tiles.iter().map(QueryTile::bytes).sum::<usize>();
        self.hulls.bytes() + list_bytes(&self.tiles) + tiles
    }

    /// Returns the visibility of the tile of queries that starts at `first`.
    pub(crate) fn tile(&self, batch: usize, head: usize, first: usize) -> &QueryTile {
        let batch = if self.batches == 1 { 0 } else { batch };
        let head = if self.heads == 1 { 0 } else { head };
        &self.tiles[(batch * self.heads + head) * self.per_head + first / TILE]
    }
}
