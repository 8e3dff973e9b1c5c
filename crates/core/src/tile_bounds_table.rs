//! Bounds of all query tiles, for loops over the tiles of keys.

use std::ops::Range;

use crate::{KeyIntervals, QueryTile, Result, Rows, Run, Visibility, memory, tile::TileBounds};

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
    pub const fn bytes(&self) -> usize {
        self.bounds.capacity() * size_of::<TileBounds>()
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
