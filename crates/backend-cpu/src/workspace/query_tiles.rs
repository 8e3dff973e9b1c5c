//! Visibility of the tiles of queries, for all passes.

use annulus_core::{QueryTile, Result, Spec, TileBoundsTable, Visibility, memory};

use crate::{
    simd::dispatch::Real,
    threads::team::Team,
    tile::{aligned::list_bytes, tile_mask::TILE},
    workspace::scratch::ThreadScratch,
};

/// Minimum tiles of a thread: waking it takes as long as computing a few of them.
const TILES_PER_THREAD: usize = 16;

/// Properties of a block on which the visibility of this rank's queries depends. They are usually
/// the same for all blocks of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockKind {
    segmented: bool,
    per_batch: bool,
    per_head: bool,
}

impl BlockKind {
    fn of(visibility: &Visibility<'_>) -> Self {
        Self {
            segmented: visibility.keys.segments(0).is_some(),
            per_batch: visibility.per_batch(),
            per_head: visibility.per_head(),
        }
    }
}

/// Visibility of every tile of queries: of this rank's queries computed once per pass, of queries
/// that were received once per block.
#[derive(Debug, Default)]
pub(crate) struct QueryTileCache {
    /// Number of times that the visibility was invalidated. What a thread's scratch holds of it is
    /// valid as long as this number is the same.
    pub(crate) generation: u64,
    /// Bounds of the keys of each tile.
    pub(crate) bounds: TileBoundsTable,
    /// Blocks for which `bounds` and `tiles` are those of this rank's queries.
    kind: Option<BlockKind>,
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
    /// Invalidates the visibility at the start of a pass: masks and positions may have changed
    /// since the last one.
    pub(crate) const fn begin(&mut self) {
        self.generation += 1;
        self.kind = None;
    }

    /// Computes the visibility of this rank's queries, unless that of an earlier block holds.
    pub(crate) fn update<A: Real>(
        &mut self,
        team: &Team,
        scratch: &mut [ThreadScratch<A>],
        visibility: &Visibility<'_>,
        spec: &Spec,
    ) -> Result<()> {
        let kind = BlockKind::of(visibility);
        if self.kind != Some(kind) {
            self.refill(team, scratch, visibility, spec)?;
            self.kind = Some(kind);
        }
        Ok(())
    }

    /// Computes the visibility of each tile of queries, once for all tasks.
    pub(crate) fn refill<A: Real>(
        &mut self,
        team: &Team,
        scratch: &mut [ThreadScratch<A>],
        visibility: &Visibility<'_>,
        spec: &Spec,
    ) -> Result<()> {
        self.begin();
        self.bounds.refill(visibility, spec.dims.batch, spec.dims.q_heads, TILE)?;
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
        let threads = count.div_ceil(TILES_PER_THREAD).min(scratch.len());
        let planes = (0..self.batches).flat_map(|b| (0..self.heads).map(move |h| (b, h)));
        let rows = (0..len).step_by(TILE).map(|first| first..len.min(first + TILE));
        let all = planes.flat_map(|plane| rows.clone().map(move |rows| (plane, rows)));
        team.run(
            &mut scratch[..threads],
            all.zip(&mut self.tiles),
            None,
            |_, (((batch, head), rows), tile), _| {
                visibility.query_tile(batch, head, rows, tile);
            },
        );
        Ok(())
    }

    /// Returns the heap bytes.
    pub(crate) fn bytes(&self) -> usize {
        let tiles = self.tiles.iter().map(QueryTile::bytes).sum::<usize>();
        self.bounds.bytes() + list_bytes(&self.tiles) + tiles
    }

    /// Returns the visibility of the tile of queries that contains the query `row`.
    pub(crate) fn tile(&self, batch: usize, head: usize, row: usize) -> &QueryTile {
        let batch = if self.batches == 1 { 0 } else { batch };
        let head = if self.heads == 1 { 0 } else { head };
        &self.tiles[(batch * self.heads + head) * self.per_head + row / TILE]
    }
}
