//! Which tiles see each other, as lists of runs: what a backend hands to kernels that know no mask.
//!
//! A list names the tiles of the other side that a tile sees, or is seen by, in ascending order. Neighbouring tiles of which all pairs are visible are one
//! run; a tile of which only some are is a run of its own, with a set of bits. So causal masks, windows and packed documents take a few runs a tile,
//! however long the sequence: memory, and time on the host, go with rows and not with pairs of tiles.
//!
//! ```text
//! causal, 4 × 4 tiles      by queries             by keys
//!   E . . .                0: [0 bits]            0: [0 bits] [1, 3 tiles]
//!   F E . .                1: [0] [1 bits]        1: [1 bits] [2, 2 tiles]
//!   F F E .                2: [0, 2 tiles] [2 b]  2: [2 bits] [3]
//!   F F F E                3: [0, 3 tiles] [3 b]  3: [3 bits]
//! ```
//! A mask of which kernels must be told tile by tile (dense, closures) takes a set of bits a tile that it cuts, which is what it consists of.

use std::ops::Range;

use crate::{Error, QueryTile, Result, TileBits, TileClass, Visibility, tile_tree::TileTree};

/// Neighbouring tiles of the other side, as kernels read them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileRun {
    /// The first tile.
    pub first: u32,
    /// How many, at least 1; a run with a set of bits is one tile.
    pub count: u32,
    /// Which set of bits says what is visible; [`TileRun::EVERYTHING`] if every pair is.
    pub set: u32,
}

impl TileRun {
    /// In place of a set of bits: every pair is visible.
    pub const EVERYTHING: u32 = u32::MAX;
}

/// One list of runs for each tile of one side, plane after plane.
#[derive(Debug, Clone, Default)]
pub struct CsrTiles {
    starts: Vec<u32>,
    runs: Vec<TileRun>,
}

impl CsrTiles {
    /// Where each list begins among the runs; the last number is where the last one ends.
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The runs of all lists.
    pub fn runs(&self) -> &[TileRun] {
        &self.runs
    }

    /// The runs of list `list`, in ascending order; none where there is no such list.
    pub fn list(&self, list: usize) -> &[TileRun] {
        match self.starts.get(list..).unwrap_or_default() {
            &[start, end, ..] => &self.runs[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Sorts runs by their lists; what is of one list stays in order.
    fn refill(&mut self, lists: usize, found: &[(u32, TileRun)]) -> Result<()> {
        narrow(found.len())?;
        self.starts.clear();
        self.starts.resize(lists + 1, 0);
        found.iter().for_each(|&(list, _)| self.starts[list as usize] += 1);
        let mut before = 0;
        for start in &mut self.starts {
            before += std::mem::replace(start, before);
        }
        self.runs.clear();
        self.runs.resize(found.len(), TileRun { first: 0, count: 0, set: 0 });
        for &(list, run) in found {
            let next = &mut self.starts[list as usize];
            self.runs[*next as usize] = run;
            *next += 1;
        }
        // each start has gone to where the next list begins
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

/// Which tiles have bits even though every pair in them is visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BitmaskPolicy {
    /// None.
    Partial,
    /// Those that are cut short by the last query or key.
    PartialOrTail,
    /// All, so that each is a run of its own.
    Always,
}

/// What is cut into tiles, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiling {
    /// Batch rows with lists of their own: one where all see alike.
    pub batches: Range<usize>,
    /// Query heads with lists of their own: one where all see alike.
    pub heads: Range<usize>,
    /// Query rows; the first tile begins with the first of them.
    pub queries: Range<usize>,
    /// Keys likewise.
    pub keys: Range<usize>,
    /// Queries and keys a tile, at least 1.
    pub tile: [usize; 2],
    /// What has bits.
    pub bitmasks: BitmaskPolicy,
}

impl Tiling {
    /// Tiles of queries and of keys.
    pub fn tiles(&self) -> [usize; 2] {
        let [tall, wide] = self.tile;
        [self.queries.len().div_ceil(tall), self.keys.len().div_ceil(wide)]
    }

    /// Planes: a list for each tile in each of them, batch rows outermost.
    pub fn planes(&self) -> usize {
        self.batches.len() * self.heads.len()
    }

    /// 64-bit words of a query's line in a set of bits.
    pub const fn words(&self) -> usize {
        self.tile[1].div_ceil(64)
    }

    /// The rows of query tile `tile`.
    pub fn rows_of(&self, tile: usize) -> Range<usize> {
        cut(&self.queries, tile, self.tile[0])
    }

    /// The keys of key tile `tile`.
    pub fn keys_of(&self, tile: usize) -> Range<usize> {
        cut(&self.keys, tile, self.tile[1])
    }
}

fn cut(rows: &Range<usize>, tile: usize, size: usize) -> Range<usize> {
    let first = rows.start + tile * size;
    first..rows.end.min(first + size)
}

/// Who sees whom, tile by tile. Keeps its memory from one filling to the next.
#[derive(Debug, Clone, Default)]
pub struct BlockSparseMask {
    by_queries: CsrTiles,
    bits: Vec<u64>,
    planes: usize,
    tiles: [usize; 2],
    scratch: Scratch,
}

#[derive(Debug, Clone, Default)]
struct Scratch {
    tree: TileTree,
    tile: QueryTile,
    bits: TileBits,
}

impl BlockSparseMask {
    /// Looks at everything in `tiling`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are too many tiles to be numbered with 32 bits.
    pub fn refill(&mut self, visibility: &Visibility<'_>, tiling: &Tiling) -> Result<()> {
        let Self { by_queries, bits, planes, tiles, scratch } = self;
        (*planes, *tiles) = (tiling.planes(), tiling.tiles());
        narrow(*planes * tiles[0].max(tiles[1]))?;
        by_queries.runs.clear();
        by_queries.starts.clear();
        by_queries.starts.push(0);
        bits.clear();
        let Scratch { tree, tile, bits: edge } = scratch;
        for batch in tiling.batches.clone() {
            tree.refill(visibility, batch, tiling.keys.clone(), tiling.tile[1]);
            for head in tiling.heads.clone() {
                for query_tile in 0..tiles[0] {
                    let rows = tiling.rows_of(query_tile);
                    visibility.query_tile(batch, head, rows.clone(), tile);
                    let first_run = by_queries.runs.len();
                    for (seen, is_full) in tree.ranges(visibility, tile) {
                        let class = if is_full {
                            TileClass::Full
                        } else {
                            visibility.classify(tile, tiling.keys_of(seen.start), edge)
                        };
                        let without_bits = match (class, tiling.bitmasks) {
                            (TileClass::Empty, _) => continue,
                            (TileClass::Partial, _) | (TileClass::Full, BitmaskPolicy::Always) => {
                                seen.start
                            }
                            (TileClass::Full, BitmaskPolicy::Partial) => seen.end,
                            (TileClass::Full, BitmaskPolicy::PartialOrTail)
                                if rows.len() < tiling.tile[0] =>
                            {
                                seen.start
                            }
                            (TileClass::Full, BitmaskPolicy::PartialOrTail) => {
                                seen.end.min(tiling.keys.len() / tiling.tile[1]).max(seen.start)
                            }
                        };
                        push_full(&mut by_queries.runs, first_run, seen.start..without_bits);
                        for key_tile in without_bits..seen.end {
                            let set = narrow(bits.len() / (tiling.tile[0] * tiling.words()))?;
                            let marks = (class == TileClass::Partial).then_some(&*edge);
                            push_set(
                                bits,
                                tiling,
                                rows.len(),
                                tiling.keys_of(key_tile).len(),
                                marks,
                            );
                            by_queries.runs.push(TileRun { first: key_tile as u32, count: 1, set });
                        }
                    }
                    by_queries.starts.push(narrow(by_queries.runs.len())?);
                }
            }
        }
        Ok(())
    }

    /// What each tile of queries sees: list `plane · tiles + tile`.
    pub const fn by_queries(&self) -> &CsrTiles {
        &self.by_queries
    }

    /// Sets of bits: `tall` lines each, a line [`Tiling::words`] words, its lowest bit the first key of the tile. Rows beyond the last query, and keys
    /// beyond the last, have none.
    pub fn bits(&self) -> &[u64] {
        &self.bits
    }

    /// Who sees each tile of keys: list `plane · tiles + tile`, the same runs turned about.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are too many runs to be numbered with 32 bits.
    pub fn by_keys(&self, into: &mut CsrTiles) -> Result<()> {
        let [query_tiles, key_tiles] = self.tiles;
        // a tile of keys has a run from the query tile `open` on that has not ended
        let mut open = vec![0u32; key_tiles];
        // runs as they end: those of one list in order, for a tile is seen whole, cut or not at all
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
                each_outside(before, here, |ended| {
                    found.extend(ended.map(|key_tile| {
                        let first = open[key_tile as usize];
                        (
                            list_of(key_tile),
                            TileRun { first, count: now - first, set: TileRun::EVERYTHING },
                        )
                    }));
                });
                each_outside(here, before, |begun| {
                    open[begun.start as usize..begun.end as usize].fill(now)
                });
                let cut = here.iter().filter(|run| run.set != TileRun::EVERYTHING);
                found.extend(cut.map(|run| {
                    (list_of(run.first), TileRun { first: now, count: 1, set: run.set })
                }));
                before = here;
            }
        }
        into.refill(self.planes * key_tiles, &found)
    }
}

/// Appends tiles seen whole to the list that begins at `first_run`, to its last run where they go on from it.
fn push_full(runs: &mut Vec<TileRun>, first_run: usize, tiles: Range<usize>) {
    if tiles.is_empty() {
        return;
    }
    let (first, count) = (tiles.start as u32, tiles.len() as u32);
    match runs[first_run..].last_mut() {
        Some(last) if last.set == TileRun::EVERYTHING && last.first + last.count == first => {
            last.count += count
        }
        _ => runs.push(TileRun { first, count, set: TileRun::EVERYTHING }),
    }
}

/// Appends a set of bits: those of `marks`, or all of so many rows and keys.
fn push_set(
    bits: &mut Vec<u64>,
    tiling: &Tiling,
    rows: usize,
    keys: usize,
    marks: Option<&TileBits>,
) {
    let (start, words) = (bits.len(), tiling.words());
    for row in 0..rows {
        match marks {
            Some(marks) => bits.extend_from_slice(marks.line(row)),
            None => bits.extend(
                (0..keys.div_ceil(64)).map(|word| u64::MAX >> (64 - (keys - 64 * word).min(64))),
            ),
        }
        // the last tile may be narrower
        bits.resize(start + (row + 1) * words, 0);
    }
    bits.resize(start + tiling.tile[0] * words, 0);
}

/// Calls with the tiles, range by range, that `of` has whole and `other` has not.
fn each_outside(of: &[TileRun], other: &[TileRun], mut call: impl FnMut(Range<u32>)) {
    fn whole(runs: &[TileRun]) -> impl Iterator<Item = Range<u32>> {
        runs.iter()
            .filter(|run| run.set == TileRun::EVERYTHING)
            .map(|run| run.first..run.first + run.count)
    }
    let mut others = whole(other).peekable();
    for run in whole(of) {
        let mut from = run.start;
        while let Some(next) = others.peek().cloned().filter(|next| next.start < run.end) {
            if from < next.start {
                call(from..next.start);
            }
            from = from.max(next.end);
            // what reaches further may cover some of the next run
            if next.end > run.end {
                break;
            }
            others.next();
        }
        if from < run.end {
            call(from..run.end);
        }
    }
}

/// A count as lists have it; the last number means "everything".
fn narrow(count: usize) -> Result<u32> {
    let narrowed = u32::try_from(count).ok().filter(|&count| count < TileRun::EVERYTHING);
    narrowed.ok_or_else(|| {
        Error::unsupported(format!("a list of {count} tiles on one rank"), "kernels over tiles")
    })
}

#[cfg(test)]
mod tests;
