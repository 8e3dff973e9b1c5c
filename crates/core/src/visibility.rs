//! Tiles as kernels see them: their exact class and, where a tile is cut by the mask, a bit a pair.

use std::ops::Range;

use crate::{
    DenseMask, Mask, Rows, Spans,
    mask::{Key, Query},
};

/// What a mask does to a rectangle of (query, key) pairs. Exact: no `Empty` tile has a visible pair, no `Full` tile a hidden one, every `Edge`
/// tile has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileClass {
    /// No pair is visible: it costs nothing.
    Empty,
    /// Every pair is visible: no mask code runs.
    Full,
    /// Some are: the bits say which.
    Edge,
}

/// One bit a pair of a tile: `words` 64-bit words a query row, lowest bit = first key of the tile.
#[derive(Debug, Clone, Default)]
pub struct TileBits {
    words: usize,
    bits: Vec<u64>,
}

impl TileBits {
    /// The bits of query `row` of the tile.
    pub fn line(&self, row: usize) -> &[u64] {
        &self.bits[row * self.words..][..self.words]
    }

    /// Whether query `row` of the tile sees key `key` of the tile.
    pub fn visible(&self, row: usize, key: usize) -> bool {
        self.line(row)[key / 64] >> (key % 64) & 1 != 0
    }

    fn reset(&mut self, rows: usize, keys: usize) {
        self.words = keys.div_ceil(64);
        self.bits.clear();
        self.bits.resize(rows * self.words, 0);
    }
}

/// What a tile of queries sees, worked out once and then asked of many key tiles.
#[derive(Debug, Clone, Default)]
pub struct QueryTile {
    batch: usize,
    head: usize,
    rows: Range<usize>,
    /// of each row; `None`: ask `visible`
    spans: Vec<Option<Spans>>,
}

/// The whole mask between the queries of one rank and the keys of one block.
#[derive(Debug, Clone, Copy)]
pub struct Visibility<'a> {
    /// The spec's mask.
    pub mask: &'a dyn Mask,
    /// The batch's dense mask: its query rows are the local ones, its key rows the global ones.
    pub attention_mask: Option<&'a DenseMask>,
    /// The query rows.
    pub queries: &'a Rows,
    /// The key rows.
    pub keys: &'a Rows,
}

impl Visibility<'_> {
    /// Whether local query row `q` sees key `k` of the block.
    pub fn pair(&self, batch: usize, head: usize, q: usize, k: usize) -> bool {
        let query = self.query(batch, head, q);
        let key = Key { row: self.keys.rows()[k], position: self.keys.positions(batch)[k] };
        self.mask.visible(&query, &key) && self.besides_mask(&query, q, k, key.row)
    }

    /// Whether heads see differently.
    pub fn per_head(&self) -> bool {
        self.mask.per_head() || self.attention_mask.is_some_and(|mask| mask.shape()[1] > 1)
    }

    /// Works out what the queries `rows` see.
    pub fn query_tile(&self, batch: usize, head: usize, rows: Range<usize>, into: &mut QueryTile) {
        into.batch = batch;
        into.head = head;
        into.rows = rows.clone();
        into.spans.clear();
        into.spans.extend(rows.map(|q| self.mask.spans(&self.query(batch, head, q))));
    }

    /// The class of `tile` × `keys`; `bits` are set if it is [`TileClass::Edge`] and mean nothing otherwise.
    pub fn classify(&self, tile: &QueryTile, keys: Range<usize>, bits: &mut TileBits) -> TileClass {
        bits.reset(tile.rows.len(), keys.len());
        let mut seen = 0;
        for (row, q) in tile.rows.clone().enumerate() {
            for (place, k) in keys.clone().enumerate() {
                if self.pair(tile.batch, tile.head, q, k) {
                    bits.bits[row * bits.words + place / 64] |= 1 << (place % 64);
                    seen += 1;
                }
            }
        }
        match seen {
            0 => TileClass::Empty,
            _ if seen == tile.rows.len() * keys.len() => TileClass::Full,
            _ => TileClass::Edge,
        }
    }

    fn query(&self, batch: usize, head: usize, q: usize) -> Query {
        Query { batch, head, row: self.queries.rows()[q], position: self.queries.positions(batch)[q] }
    }

    fn besides_mask(&self, query: &Query, q: usize, k: usize, key_row: u64) -> bool {
        let same_segment = match (self.queries.segments(query.batch), self.keys.segments(query.batch)) {
            (Some(of_query), Some(of_key)) => of_query[q] >= 0 && of_query[q] == of_key[k],
            _ => true,
        };
        same_segment && self.attention_mask.is_none_or(|mask| mask.visible(query.batch, query.head, q, crate::index(key_row)))
    }
}
