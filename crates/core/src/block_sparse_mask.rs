//! Block-sparse mask of a pass: the full and the partial tiles of every query tile and of every key
//! tile, for kernels that evaluate no mask.
//!
//! Each tile of one side has a list of the tiles of the other side that are not empty, in ascending
//! order. Neighbouring full tiles form one run. A partial tile is a run of its own with a bitmask.
//! A causal mask, a window or packed documents therefore take a few runs per tile, so that memory
//! and host time are O(rows) instead of O(pairs of tiles).
//!
//! ```text
//! causal, 4 × 4 tiles      by queries                    by keys
//!   P . . .                0: [0 bits]                   0: [0 bits] [1, 3 tiles]
//!   F P . .                1: [0, 1 tile]  [1 bits]      1: [1 bits] [2, 2 tiles]
//!   F F P .                2: [0, 2 tiles] [2 bits]      2: [2 bits] [3, 1 tile]
//!   F F F P                3: [0, 3 tiles] [3 bits]      3: [3 bits]
//! ```
//! A mask without intervals (dense, predicate) has a bitmask for each of its partial tiles, which
//! is as much memory as the mask itself.
//!
//! # Source
//! The lists of full and partial blocks of FlexAttention (Dong et al. 2024), with runs of full
//! tiles.

use std::ops::Range;

use crate::{
    Error, QueryTile, Result, TileBits, TileClass, Visibility,
    tile_bounds::{TileRange, TileTree},
};

/// Neighbouring tiles of the other side, in the layout that kernels read.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileRun {
    /// Index of the first tile.
    pub first: u32,
    /// Number of tiles, at least 1. A run with a bitmask is one tile.
    pub count: u32,
    /// Index of the bitmask in [`BlockSparseMask::bits`], or [`TileRun::FULL`].
    pub bitmask: u32,
}

impl TileRun {
    /// Value of [`TileRun::bitmask`] of full tiles.
    pub const FULL: u32 = u32::MAX;
}

/// Lists of runs in compressed sparse row format: one list per tile of one side, plane after plane.
#[derive(Debug, Clone, Default)]
pub struct CsrTiles {
    starts: Vec<u32>,
    runs: Vec<TileRun>,
}

impl CsrTiles {
    /// Returns the index of the first run of each list, and the number of all runs.
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// Returns the runs of all lists.
    pub fn runs(&self) -> &[TileRun] {
        &self.runs
    }

    /// Returns the runs of list `list`, in ascending order; none if there is no such list.
    pub fn list(&self, list: usize) -> &[TileRun] {
        match self.starts.get(list..).unwrap_or_default() {
            &[start, end, ..] => &self.runs[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Sorts runs by list. The sort is a counting sort and stable: runs of one list stay in order.
    fn refill(&mut self, lists: usize, found: &[ListedRun]) -> Result<()> {
        checked_index(found.len())?;
        self.starts.clear();
        self.starts.resize(lists + 1, 0);
        found.iter().for_each(|listed| self.starts[listed.list as usize] += 1);
        let mut before = 0;
        for start in &mut self.starts {
            before += std::mem::replace(start, before);
        }
        self.runs.clear();
        self.runs.resize(found.len(), TileRun { first: 0, count: 0, bitmask: 0 });
        for &ListedRun { list, run } in found {
            let next = &mut self.starts[list as usize];
            self.runs[*next as usize] = run;
            *next += 1;
        }
        // each start has advanced to the start of the next list
        self.starts.rotate_right(1);
        if let Some(first) = self.starts.first_mut() {
            *first = 0;
        }
        if let Some(last) = self.starts.last_mut() {
            *last = found.len() as u32;
        }
        Ok(())
    }
}

/// A run, and the index of its list.
#[derive(Debug, Clone, Copy)]
struct ListedRun {
    list: u32,
    run: TileRun,
}

/// Full tiles that have a bitmask all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BitmaskPolicy {
    /// No full tiles: only partial tiles have a bitmask.
    Partial,
    /// Full tiles with fewer rows or keys than [`Tiling::tile`], at the end of a side. Kernels then
    /// need no other bounds check.
    PartialOrTail,
    /// All full tiles. Each is then a run of its own.
    Always,
}

/// Division of queries and keys into tiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiling {
    /// Batch rows with lists of their own: one if the masks of all batch rows are equal.
    pub batches: Range<usize>,
    /// Query heads with lists of their own: one if the masks of all heads are equal.
    pub heads: Range<usize>,
    /// Query rows. The first tile starts at the first of them.
    pub queries: Range<usize>,
    /// Key rows. The first tile starts at the first of them.
    pub keys: Range<usize>,
    /// Queries and keys per tile, each at least 1.
    pub tile: [usize; 2],
    /// Full tiles with a bitmask.
    pub bitmasks: BitmaskPolicy,
}

impl Tiling {
    /// Returns the numbers of query tiles and of key tiles.
    pub fn tiles(&self) -> [usize; 2] {
        let [tall, wide] = self.tile;
        [self.queries.len().div_ceil(tall), self.keys.len().div_ceil(wide)]
    }

    /// Returns the number of planes: pairs of batch row and head, heads innermost. Each plane has
    /// one list per tile.
    pub fn planes(&self) -> usize {
        self.batches.len() * self.heads.len()
    }

    /// Returns the number of 64-bit words per query row of a bitmask.
    pub const fn words(&self) -> usize {
        self.tile[1].div_ceil(64)
    }

    /// Returns the rows of query tile `tile`.
    pub fn rows_of(&self, tile: usize) -> Range<usize> {
        nth_tile(&self.queries, tile, self.tile[0])
    }

    /// Returns the rows of key tile `tile`.
    pub fn keys_of(&self, tile: usize) -> Range<usize> {
        nth_tile(&self.keys, tile, self.tile[1])
    }
}

fn nth_tile(rows: &Range<usize>, tile: usize, size: usize) -> Range<usize> {
    let first = rows.start + tile * size;
    first..rows.end.min(first + size)
}

/// Lists of the full and partial tiles of one pass, and the bitmasks of the partial tiles.
/// [`BlockSparseMask::refill`] reuses their memory.
#[derive(Debug, Clone, Default)]
pub struct BlockSparseMask {
    by_queries: CsrTiles,
    bits: Vec<u64>,
    planes: usize,
    tiles: [usize; 2],
    tree: TileTree,
    query_tile: QueryTile,
    tile_bits: TileBits,
}

impl BlockSparseMask {
    /// Classifies all tiles of `tiling` and lists those that are not empty.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if tiles, runs or bitmasks exceed 32-bit indices.
    pub fn refill(&mut self, visibility: &Visibility<'_>, tiling: &Tiling) -> Result<()> {
        self.planes = tiling.planes();
        self.tiles = tiling.tiles();
        let [query_tiles, key_tiles] = self.tiles;
        checked_index(self.planes * query_tiles.max(key_tiles))?;
        self.by_queries.runs.clear();
        self.by_queries.starts.clear();
        self.by_queries.starts.push(0);
        self.bits.clear();
        for batch in tiling.batches.clone() {
            self.tree.refill(visibility, batch, tiling.keys.clone(), tiling.tile[1]);
            for head in tiling.heads.clone() {
                for query_tile in 0..query_tiles {
                    let rows = tiling.rows_of(query_tile);
                    visibility.query_tile(batch, head, rows, &mut self.query_tile);
                    self.push_list(visibility, tiling)?;
                }
            }
        }
        Ok(())
    }

    /// Appends the list of the current query tile.
    fn push_list(&mut self, visibility: &Visibility<'_>, tiling: &Tiling) -> Result<()> {
        let Self { by_queries, bits, tree, query_tile, tile_bits, .. } = self;
        let rows = query_tile.rows().len();
        let first_run = by_queries.runs.len();
        for TileRange { tiles, is_full } in tree.ranges(visibility, query_tile) {
            let class = if is_full {
                TileClass::Full
            } else {
                visibility.classify(query_tile, tiling.keys_of(tiles.start), tile_bits)
            };
            // the tiles before `with_bitmask` are full and have no bitmask
            let with_bitmask = match (class, tiling.bitmasks) {
                (TileClass::Empty, _) => continue,
                (TileClass::Partial, _) | (TileClass::Full, BitmaskPolicy::Always) => tiles.start,
                (TileClass::Full, BitmaskPolicy::Partial) => tiles.end,
                (TileClass::Full, BitmaskPolicy::PartialOrTail) if rows < tiling.tile[0] => {
                    tiles.start
                }
                (TileClass::Full, BitmaskPolicy::PartialOrTail) => {
                    let whole = tiling.keys.len() / tiling.tile[1];
                    tiles.end.min(whole).max(tiles.start)
                }
            };
            push_full(&mut by_queries.runs, first_run, tiles.start..with_bitmask);
            for key_tile in with_bitmask..tiles.end {
                let bitmask = checked_index(bits.len() / (tiling.tile[0] * tiling.words()))?;
                match class {
                    TileClass::Partial => push_partial_bitmask(bits, tiling, tile_bits),
                    _ => push_full_bitmask(bits, tiling, rows, tiling.keys_of(key_tile).len()),
                }
                by_queries.runs.push(TileRun { first: key_tile as u32, count: 1, bitmask });
            }
        }
        by_queries.starts.push(checked_index(by_queries.runs.len())?);
        Ok(())
    }

    /// Returns the key tiles of each query tile. The list of tile t of plane p has index
    /// p · query tiles + t.
    pub const fn by_queries(&self) -> &CsrTiles {
        &self.by_queries
    }

    /// Returns the bitmasks, `[bitmasks, queries per tile, words]` with [`Tiling::words`] 64-bit
    /// words per query. The lowest bit of a query's first word is the first key of the tile. Bits
    /// of rows beyond the last query or key are 0.
    pub fn bits(&self) -> &[u64] {
        &self.bits
    }

    /// Writes the query tiles of each key tile to `into`: the transpose of
    /// [`BlockSparseMask::by_queries`], with the same bitmasks. The list of tile t of plane p has
    /// index p · key tiles + t.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the runs exceed 32-bit indices.
    pub fn by_keys(&self, into: &mut CsrTiles) -> Result<()> {
        let [query_tiles, key_tiles] = self.tiles;
        // a scan over the query tiles: `open[k]` is the first query tile of the run of full tiles
        // of key tile k that has not ended
        let mut open = vec![0u32; key_tiles];
        // runs in the order of their ends, which is ascending within each list
        let mut found = Vec::new();
        for plane in 0..self.planes {
            let list_of = |key_tile: u32| (plane * key_tiles) as u32 + key_tile;
            let mut before: &[TileRun] = &[];
            for query_tile in 0..=query_tiles {
                let here = if query_tile < query_tiles {
                    self.by_queries.list(plane * query_tiles + query_tile)
                } else {
                    &[]
                };
                let now = query_tile as u32;
                for_each_difference(before, here, |ended| {
                    found.extend(ended.map(|key_tile| {
                        let first = open[key_tile as usize];
                        let run = TileRun { first, count: now - first, bitmask: TileRun::FULL };
                        ListedRun { list: list_of(key_tile), run }
                    }));
                });
                for_each_difference(here, before, |started| {
                    open[started.start as usize..started.end as usize].fill(now)
                });
                let with_bitmask = here.iter().filter(|run| run.bitmask != TileRun::FULL);
                found.extend(with_bitmask.map(|run| ListedRun {
                    list: list_of(run.first),
                    run: TileRun { first: now, count: 1, bitmask: run.bitmask },
                }));
                before = here;
            }
        }
        into.refill(self.planes * key_tiles, &found)
    }
}

/// Appends full tiles to the list that starts at `first_run`. Extends its last run if they follow
/// it.
fn push_full(runs: &mut Vec<TileRun>, first_run: usize, tiles: Range<usize>) {
    if tiles.is_empty() {
        return;
    }
    let first = tiles.start as u32;
    let count = tiles.len() as u32;
    match runs[first_run..].last_mut() {
        Some(last) if last.bitmask == TileRun::FULL && last.first + last.count == first => {
            last.count += count
        }
        _ => runs.push(TileRun { first, count, bitmask: TileRun::FULL }),
    }
}

/// Appends the bitmask of a partial tile, padded to the size of a tile.
fn push_partial_bitmask(bits: &mut Vec<u64>, tiling: &Tiling, tile_bits: &TileBits) {
    let start = bits.len();
    let words = tiling.words();
    for (row, line) in tile_bits.lines().chunks(tile_bits.words()).enumerate() {
        bits.extend_from_slice(line);
        // the last key tile may have fewer words
        bits.resize(start + (row + 1) * words, 0);
    }
    bits.resize(start + tiling.tile[0] * words, 0);
}

/// Appends the bitmask of a full tile of `rows` × `keys`, padded to the size of a tile.
fn push_full_bitmask(bits: &mut Vec<u64>, tiling: &Tiling, rows: usize, keys: usize) {
    let start = bits.len();
    let words = tiling.words();
    for row in 0..rows {
        let line = (0..keys.div_ceil(64)).map(|word| u64::MAX >> (64 - (keys - 64 * word).min(64)));
        bits.extend(line);
        bits.resize(start + (row + 1) * words, 0);
    }
    bits.resize(start + tiling.tile[0] * words, 0);
}

/// Calls `found` with each range of tiles that are full tiles of `list` and not of `other`.
fn for_each_difference(list: &[TileRun], other: &[TileRun], mut found: impl FnMut(Range<u32>)) {
    fn full(runs: &[TileRun]) -> impl Iterator<Item = Range<u32>> {
        runs.iter()
            .filter(|run| run.bitmask == TileRun::FULL)
            .map(|run| run.first..run.first + run.count)
    }
    let mut others = full(other).peekable();
    for run in full(list) {
        let mut from = run.start;
        while let Some(next) = others.peek().cloned().filter(|next| next.start < run.end) {
            if from < next.start {
                found(from..next.start);
            }
            from = from.max(next.end);
            // a range that ends later may overlap with the next run too
            if next.end > run.end {
                break;
            }
            others.next();
        }
        if from < run.end {
            found(from..run.end);
        }
    }
}

/// Converts an index or count to u32, except [`TileRun::FULL`].
fn checked_index(count: usize) -> Result<u32> {
    let checked = u32::try_from(count).ok().filter(|&count| count < TileRun::FULL);
    checked.ok_or_else(|| {
        Error::unsupported(
            format!("a block-sparse mask of {count} tiles or runs on one rank"),
            "kernels with 32-bit tile indices",
        )
    })
}

#[cfg(test)]
mod tests;
