//! RingShards of a tile: its queries, keys and strip, and where a pair lies in it.

use std::ops::Range;

use crate::tile::tile_mask::LaneAxis;

/// RingShards of a tile within a task.
#[derive(Debug, Clone)]
pub(crate) struct TileCoord {
    pub(crate) batch: usize,
    /// Query head.
    pub(crate) head: usize,
    /// Local query rows.
    pub(crate) queries: Range<usize>,
    /// Key rows, as indices into the block.
    pub(crate) keys: Range<usize>,
    pub(crate) lane_axis: LaneAxis,
    /// Index of the strip among all strips of the task.
    pub(crate) strip: usize,
    /// Vectors of the strip.
    pub(crate) vectors: usize,
    /// Elements of a row of the tile.
    pub(crate) width: usize,
}

/// Pairs of each of some queries with each of some keys of a tile, both counted from its first.
#[derive(Debug, Clone)]
pub(crate) struct Pairs {
    pub(crate) queries: Range<usize>,
    pub(crate) keys: Range<usize>,
}

impl TileCoord {
    /// Returns the queries and keys in the rows `rows` of the tile.
    pub(crate) fn pairs(&self, rows: &Range<usize>) -> Pairs {
        match self.lane_axis {
            LaneAxis::Queries => Pairs { queries: 0..self.queries.len(), keys: rows.clone() },
            LaneAxis::Keys => Pairs { queries: rows.clone(), keys: 0..self.keys.len() },
        }
    }

    /// Returns row and lane of a (query, key) pair.
    pub(crate) const fn row_and_lane(&self, query: usize, key: usize) -> (usize, usize) {
        match self.lane_axis {
            LaneAxis::Queries => (key, query),
            LaneAxis::Keys => (query, key),
        }
    }

    /// Returns the range of elements of the rows `rows`.
    pub(crate) const fn span(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.width..rows.end * self.width
    }

    /// Returns the element index of a (query, key) pair.
    pub(crate) const fn element(&self, query: usize, key: usize) -> usize {
        let (row, lane) = self.row_and_lane(query, key);
        row * self.width + lane
    }
}
