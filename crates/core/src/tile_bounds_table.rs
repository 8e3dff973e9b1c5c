//! What every query tile may see, for passes that go over the keys first.

use std::ops::Range;

use crate::{Result, Rows, Visibility, memory, tile::TileBounds};

/// Bounds of what each tile of `height` queries sees: made once for a set of queries, then good for every block of keys of the same batch.
#[derive(Debug, Clone, Default)]
pub struct TileBoundsTable {
    height: usize,
    queries: usize,
    /// 1 where all heads see alike
    heads: usize,
    /// 1 where all batch rows see alike
    batches: usize,
    /// `[batches, heads, tiles]`
    hulls: Vec<TileBounds>,
}

impl TileBoundsTable {
    /// Works out the bounds for tiles of `height` queries. Keeps its memory.
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
        // a dense mask changes no bounds, so what it depends on does not matter
        self.heads = if visibility.mask.per_head() { heads } else { heads.min(1) };
        self.batches = if visibility.mask.per_batch() || visibility.queries.per_batch() {
            batches
        } else {
            batches.min(1)
        };
        self.hulls.clear();
        let tiles = self.queries.div_ceil(self.height);
        memory::reserve(
            "bounds of query tiles",
            &mut self.hulls,
            self.batches * self.heads * tiles,
        )?;
        if tiles == 0 {
            return Ok(());
        }
        for batch in 0..self.batches {
            for head in 0..self.heads {
                for first in (0..self.queries).step_by(self.height) {
                    let mut hull = TileBounds::default();
                    for q in first..self.queries.min(first + self.height) {
                        let segment = visibility.segment(batch, q);
                        if segment.is_none_or(|segment| segment >= 0) {
                            hull.add(&visibility.intervals(batch, head, q).0, segment);
                        }
                    }
                    self.hulls.push(hull);
                }
            }
        }
        Ok(())
    }

    /// The query tiles of which some row may see some of the keys `tile`, in order. Those left out are all [`crate::TileClass::Empty`].
    pub fn query_tiles<'s>(
        &'s self,
        batch: usize,
        head: usize,
        keys: &Rows,
        tile: Range<usize>,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + 's {
        let tiles = self.queries.div_ceil(self.height.max(1));
        let first = (if self.batches == 1 { 0 } else { batch * self.heads }
            + if self.heads == 1 { 0 } else { head })
            * tiles;
        let extent = (!tile.is_empty()).then(|| keys.outline(batch).extent(&tile));
        let may_see = move |hull: &TileBounds| extent.as_ref().is_some_and(|keys| hull.meets(keys));
        self.hulls[first..first + tiles]
            .iter()
            .enumerate()
            .filter(move |(_, hull)| may_see(hull))
            .map(|(index, _)| {
                let start = index * self.height;
                start..self.queries.min(start + self.height)
            })
    }
}
