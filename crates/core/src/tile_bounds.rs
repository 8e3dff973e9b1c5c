//! Bounds of all query tiles, for loops over the tiles of keys.
//!
//! Bounds tree over the key tiles of a block: finds the full and the empty tiles of a query tile
//! without a test of every tile.
//!
//! A node of level l bounds 8^l neighbouring tiles. The search starts at the largest node and
//! descends only into nodes that are neither full nor empty, so it takes O(log tiles) tests per
//! interval of a query tile.

use std::ops::Range;

use crate::{
    KeyIntervals, QueryTile, Result, Rows, Run, Visibility, memory, row_bounds::Bounds,
    tile::TileBounds,
};

/// Bounds of the keys that each tile of `height` queries attends to. They are computed once for the
/// queries of a rank and hold for every KV block of the same batch.
#[derive(Debug, Clone, Default)]
pub struct TileBoundsTable {
    height: usize,
    queries: usize,
    /// 1 if the bounds of all heads are equal.
    heads: usize,
    /// 1 if the bounds of all batch rows are equal.
    batches: usize,
    /// `[batches, heads, tiles]`.
    bounds: Vec<TileBounds>,
}

impl TileBoundsTable {
    /// Returns the heap bytes.
    pub fn bytes(&self) -> usize {
        let of_intervals = self.bounds.iter().map(|bounds| bounds.intervals.bytes()).sum::<usize>();
        self.bounds.capacity() * size_of::<TileBounds>() + of_intervals
    }

    /// Computes the bounds of tiles of `height` queries. Reuses its memory.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn refill(
        &mut self,
        visibility: &Visibility<'_>,
        batches: usize,
        heads: usize,
        height: usize,
    ) -> Result<()> {
        self.height = height.max(1);
        self.queries = visibility.queries.len();
        // the bounds do not depend on a dense mask, so its batch rows and heads have no effect
        self.heads = if visibility.mask.per_head() { heads } else { heads.min(1) };
        self.batches = if visibility.mask.per_batch() || visibility.queries.per_batch() {
            batches
        } else {
            batches.min(1)
        };
        self.bounds.clear();
        let tiles = self.queries.div_ceil(self.height);
        let count = self.batches * self.heads * tiles;
        memory::reserve("bounds of query tiles", &mut self.bounds, count)?;
        if tiles == 0 {
            return Ok(());
        }
        for batch in 0..self.batches {
            for head in 0..self.heads {
                for first in (0..self.queries).step_by(self.height) {
                    let rows = first..self.queries.min(first + self.height);
                    self.bounds.push(bounds_of(visibility, batch, head, rows));
                }
            }
        }
        Ok(())
    }

    /// Sets the bounds of `into` to those of all tiles that contain one of the queries `rows`. Then
    /// `into` serves [`Visibility::key_tiles`] and [`Visibility::may_attend`] only: it lacks the
    /// intervals of the rows.
    pub fn cover(&self, batch: usize, head: usize, rows: Range<usize>, into: &mut QueryTile) {
        let first = self.first(batch, head);
        let height = self.height.max(1);
        let tiles = first + rows.start / height..first + rows.end.div_ceil(height);
        into.begin(batch, head, rows);
        self.bounds[tiles].iter().for_each(|tile| into.bounds.extend(tile));
    }

    /// Returns the number of tiles that contain one of the queries `rows` and are not certainly
    /// empty for the keys `tile`.
    pub fn count_query_tiles(
        &self,
        batch: usize,
        head: usize,
        rows: &Range<usize>,
        keys: &Rows,
        tile: &Range<usize>,
    ) -> usize {
        if tile.is_empty() {
            return 0;
        }
        let first = self.first(batch, head);
        let height = self.height.max(1);
        let tiles = first + rows.start / height..first + rows.end.div_ceil(height);
        let key_bounds = keys.row_bounds(batch).of(tile);
        self.bounds[tiles].iter().filter(|bounds| bounds.may_attend_to(&key_bounds)).count()
    }

    /// Returns the index of the first tile of a batch row and head.
    const fn first(&self, batch: usize, head: usize) -> usize {
        let batch_offset = if self.batches == 1 { 0 } else { batch * self.heads };
        let head_offset = if self.heads == 1 { 0 } else { head };
        let height = if self.height == 0 { 1 } else { self.height };
        (batch_offset + head_offset) * self.queries.div_ceil(height)
    }

    /// Returns, in ascending order, the query tiles that are not certainly empty for the keys
    /// `tile`. All omitted tiles are [`crate::TileClass::Empty`].
    pub fn query_tiles<'s>(
        &'s self,
        batch: usize,
        head: usize,
        keys: &Rows,
        tile: Range<usize>,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + 's {
        let tiles = self.queries.div_ceil(self.height.max(1));
        let first = self.first(batch, head);
        let key_bounds = (!tile.is_empty()).then(|| keys.row_bounds(batch).of(&tile));
        let may_attend = move |bounds: &TileBounds| {
            key_bounds.as_ref().is_some_and(|keys| bounds.may_attend_to(keys))
        };
        self.bounds[first..first + tiles]
            .iter()
            .enumerate()
            .filter(move |(_, bounds)| may_attend(bounds))
            .map(|(index, _)| {
                let start = index * self.height;
                start..self.queries.min(start + self.height)
            })
    }
}

/// Returns the bounds of the queries `rows`: with a [`Band`](crate::mask::Band) those of a whole
/// run of positions at once, else query by query.
fn bounds_of(
    visibility: &Visibility<'_>,
    batch: usize,
    head: usize,
    rows: Range<usize>,
) -> TileBounds {
    let mut bounds = TileBounds::default();
    let Some(band) = visibility.mask.band(batch, head) else {
        for q in rows {
            let segment = visibility.segment(batch, q);
            if segment.is_none_or(|segment| segment >= 0) {
                bounds.add(&visibility.intervals(batch, head, q).0, segment);
            }
        }
        return bounds;
    };
    let are_segmented = visibility.segment(batch, rows.start).is_some();
    for (part, run) in visibility.queries.row_bounds(batch).strided_runs(rows) {
        if are_segmented && run.segment < 0 {
            continue;
        }
        let segment = are_segmented.then_some(run.segment);
        let run = Run { start: run.position, step: run.step, count: part.len() as u64 };
        band.cover(&run, |range| {
            bounds.add(&KeyIntervals::one(range.start, range.end), segment);
        });
    }
    bounds
}

/// Binary logarithm of the fan-out: a node has 8 children.
const BITS: u32 = 3;

/// Bounds of the positions and segment ids of key tiles `0, 1, …`, level by level.
#[derive(Debug, Clone, Default)]
pub(crate) struct TileTree {
    tiles: usize,
    /// Tiles, nodes of 8 tiles, nodes of 64 tiles, …, the root.
    levels: Vec<Vec<Bounds>>,
}

/// Neighbouring key tiles, as found by [`TileTree::ranges`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TileRange {
    pub(crate) tiles: Range<usize>,
    /// True if all tiles are full. Otherwise there is one tile, whose class is not yet known.
    pub(crate) is_full: bool,
}

impl TileTree {
    /// Computes the bounds of tiles of `width` of the keys `keys` in batch row `batch`. Reuses its
    /// memory.
    pub(crate) fn refill(
        &mut self,
        visibility: &Visibility<'_>,
        batch: usize,
        keys: Range<usize>,
        width: usize,
    ) {
        self.tiles = keys.len().div_ceil(width);
        let mut height = 0;
        loop {
            if self.levels.len() == height {
                self.levels.push(Vec::new());
            }
            let (below, above) = self.levels.split_at_mut(height);
            let level = &mut above[0];
            level.clear();
            match below.last() {
                Some(below) => level.extend(
                    below
                        .chunks(1 << BITS)
                        .map(|tiles| tiles.iter().fold(Bounds::NONE, |all, &one| all.union(one))),
                ),
                None => {
                    let starts = keys.clone().step_by(width);
                    level.extend(starts.map(|first| {
                        let tile = first..keys.end.min(first + width);
                        visibility.keys.row_bounds(batch).of(&tile)
                    }));
                }
            }
            height += 1;
            if level.len() <= 1 {
                break;
            }
        }
        self.levels.truncate(height);
    }

    /// Returns, in ascending order, the key tiles that are not certainly empty for `tile`. All
    /// omitted tiles are [`crate::TileClass::Empty`].
    pub(crate) fn ranges<'s>(
        &'s self,
        visibility: &Visibility<'_>,
        tile: &'s QueryTile,
    ) -> impl Iterator<Item = TileRange> + 's {
        // with a dense mask or key lists, bounds never prove that a tile is full
        let only_intervals = visibility.has_only_intervals();
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.tiles {
                // the largest node that starts at this tile; its ancestors have been descended into
                let top = self.levels.len() - 1;
                let mut level =
                    if at == 0 { top } else { top.min((at.trailing_zeros() / BITS) as usize) };
                loop {
                    let shift = BITS as usize * level;
                    let end = self.tiles.min(((at >> shift) + 1) << shift);
                    let bounds = &self.levels[level][at >> shift];
                    let may_be_visible = tile.bounds.may_attend_to(bounds);
                    let is_full = may_be_visible && only_intervals && tile.attends_to_all(bounds);
                    if may_be_visible && !is_full && level > 0 {
                        level -= 1;
                        continue;
                    }
                    let tiles = at..end;
                    at = end;
                    if may_be_visible {
                        return Some(TileRange { tiles, is_full });
                    }
                    break;
                }
            }
            None
        })
    }
}
