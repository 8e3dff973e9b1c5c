//! Bounds tree over the key tiles of a block: finds the full and the empty tiles of a query tile
//! without a test of every tile.
//!
//! A node of level l bounds 8^l neighbouring tiles. The search starts at the largest node and
//! descends only into nodes that are neither full nor empty, so it takes O(log tiles) tests per
//! interval of a query tile.

use std::ops::Range;

use crate::{QueryTile, Visibility, row_bounds::Bounds};

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
        // with a dense mask, bounds never prove that a tile is full
        let without_dense = visibility.attention_mask.is_none();
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
                    let is_full = may_be_visible && without_dense && tile.attends_to_all(bounds);
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
