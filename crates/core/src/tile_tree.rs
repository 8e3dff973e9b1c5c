//! What tiles of keys look like from afar: bounds of one tile, of 8, of 64, and so on, so that what a tile of queries sees alike is told at once.

use std::ops::Range;

use crate::{QueryTile, Visibility, row_bounds::Bounds};

/// Each level bounds 2³ times as many tiles as the one below.
const BITS: u32 = 3;

/// Bounds of positions and segment ids of tiles `0, 1, …` of some keys, level by level.
#[derive(Debug, Clone, Default)]
pub(crate) struct TileTree {
    tiles: usize,
    /// tiles, eights of tiles, …, everything
    levels: Vec<Vec<Bounds>>,
}

impl TileTree {
    /// Bounds tiles of `width` of the keys `keys`, as batch row `batch` has them. Keeps its memory.
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
                        .map(|tiles| tiles.iter().fold(Bounds::NONE, |all, &one| all.with(one))),
                ),
                None => {
                    let starts = keys.clone().step_by(width);
                    level.extend(starts.map(|first| {
                        visibility.keys.outline(batch).extent(&(first..keys.end.min(first + width)))
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

    /// The tiles of which `tile` may see some, in order, as ranges: `true`, and it sees all of all of them; or `false`, and one tile that must be
    /// looked at. Those left out are all [`crate::TileClass::Empty`].
    pub(crate) fn ranges<'s>(
        &'s self,
        visibility: &Visibility<'_>,
        tile: &'s QueryTile,
    ) -> impl Iterator<Item = (Range<usize>, bool)> + 's {
        let is_decided_by_spans = visibility.attention_mask.is_none();
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.tiles {
                // the largest stretch that begins here: what contains it has been looked into
                let top = self.levels.len() - 1;
                let mut level =
                    if at == 0 { top } else { top.min((at.trailing_zeros() / BITS) as usize) };
                loop {
                    let shift = BITS as usize * level;
                    let end = self.tiles.min(((at >> shift) + 1) << shift);
                    let extent = &self.levels[level][at >> shift];
                    let meets = tile.hull.meets(extent);
                    let is_full = meets && is_decided_by_spans && tile.sees_all(extent);
                    if meets && !is_full && level > 0 {
                        level -= 1;
                        continue;
                    }
                    let range = at..end;
                    at = end;
                    if meets {
                        return Some((range, is_full));
                    }
                    break;
                }
            }
            None
        })
    }
}
