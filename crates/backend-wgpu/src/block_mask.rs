//! Block-sparse mask for the kernels: for each tile of 32 queries or keys, the visible tiles of the
//! other side, and tile masks of the partial ones.
//!
//! ```text
//! words = [starts: first run of each list, and the end]
//!         [runs: (first tile, number of tiles, tile mask or FULL_TILE)…]
//!         [tile masks: one word per query of a tile]
//!         [query rows][key rows: two words per row number]   with a bias tensor or dropout
//!         [position biases: 1024 per listed tile]
//! ```
//! Empty tiles are not listed. Neighbouring tiles with equal tile masks are one run, as full tiles
//! are, so that the few queries of a token take a few words, whatever the number of keys. The list
//! of a query tile may be divided into lists of ranges of its keys (`split_kv.rs`). Every mask
//! takes this form, so a new mask needs no new kernel.

use annulus_core::{
    BitmaskPolicy, BlockSparseMask, CsrTiles, RangeLists, Result, Spec, TileRun, Tiling,
    Visibility, mask::Key, mask::Query,
};

use crate::kernels::{TILE, TallTile};

/// Work of one submission: (first, count) of each axis. Queries and keys begin at whole tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkChunk {
    pub(crate) batches: (usize, usize),
    pub(crate) heads: (usize, usize),
    pub(crate) queries: (usize, usize),
    pub(crate) keys: (usize, usize),
}

/// Side whose tiles own the lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListOwner {
    Queries,
    Keys,
}

/// Least tiles of keys per range: 256 keys, which take 128 KiB at dim 128 and two bytes. The
/// partial result of a whole tile of queries, 17 KiB, is written and read.
const MIN_RANGE_TILES: usize = 8;

/// Form of the lists: those of [`ListForm::DEFAULT`], unless the kernel decodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ListForm {
    /// Queries per tile.
    pub(crate) queries: usize,
    /// Upper bound of the ranges of keys that a list is divided into.
    pub(crate) most_ranges: usize,
}

impl ListForm {
    /// Tiles of 32 queries, undivided lists.
    pub(crate) const DEFAULT: Self = Self { queries: TILE, most_ranges: 1 };

    /// Tall tiles, undivided lists: of a tile of 64 queries, the keys that either half attends to.
    pub(crate) const TALL: Self = Self { queries: TallTile::ROWS, most_ranges: 1 };

    /// True if tiles are tall.
    pub(crate) const fn is_tall(self) -> bool {
        self.queries == TallTile::ROWS
    }
}

/// Block-sparse mask of one chunk, and the offsets of its parts in `words`.
#[derive(Debug, Default)]
pub(crate) struct ChunkMask {
    pub(crate) words: Vec<u32>,
    pub(crate) runs: u32,
    pub(crate) bits: u32,
    pub(crate) query_rows: u32,
    pub(crate) key_rows: u32,
    /// 0 without a position bias.
    pub(crate) function_at: u32,
    /// Lists from one batch row or head to the next; 0 if all share them.
    pub(crate) plane_batch: u32,
    pub(crate) plane_head: u32,
    pub(crate) is_empty: bool,
    /// Lists per tile of the owning side.
    pub(crate) ranges: usize,
    /// True if the lists of the last tiles are longer than those of the first.
    pub(crate) is_ascending: bool,
    /// Visible tiles of each list.
    pairs: Vec<u32>,
    block_sparse: BlockSparseMask,
    by_keys: CsrTiles,
    merged: MergedRuns,
}

/// Lists of runs with the tile masks that they name.
#[derive(Debug, Default)]
struct MergedRuns {
    starts: Vec<u32>,
    runs: Vec<TileRun>,
    /// One word per query of a tile.
    bits: Vec<u32>,
}

impl MergedRuns {
    /// Copies lists and tile masks of `rows` queries. With `merges`, neighbours with equal tile
    /// masks become one run, for kernels that read nothing else of a tile than its mask.
    fn refill(&mut self, lists: &CsrTiles, bits: &[u64], rows: usize, merges: bool) {
        let Self { starts, runs, bits: merged } = self;
        starts.clear();
        runs.clear();
        merged.clear();
        if !merges {
            starts.extend_from_slice(lists.starts());
            runs.extend_from_slice(lists.runs());
            merged.extend(bits.iter().map(|&line| line as u32));
            return;
        }
        starts.push(0);
        for list in 0..lists.starts().len().saturating_sub(1) {
            let first_run = runs.len();
            for run in lists.list(list) {
                if run.bitmask == TileRun::FULL {
                    runs.push(*run);
                    continue;
                }
                let from = run.bitmask as usize * rows;
                // 32 keys take the lower half of a u64
                let lines = bits[from..from + rows].iter().map(|&line| line as u32);
                match runs[first_run..].last_mut() {
                    Some(last)
                        if last.bitmask != TileRun::FULL
                            && last.first + last.count == run.first
                            && lines.clone().eq(merged[merged.len() - rows..].iter().copied()) =>
                    {
                        last.count += run.count;
                    }
                    _ => {
                        let bitmask = (merged.len() / rows) as u32;
                        runs.push(TileRun { bitmask, ..*run });
                        merged.extend(lines);
                    }
                }
            }
            starts.push(runs.len() as u32);
        }
    }
}

/// Upper bound of the words per pair of a query tile, of this many queries, and a key tile.
pub(crate) const fn max_words_per_tile(spec: &Spec, queries: usize) -> usize {
    3 + queries + if spec.bias_function.is_some() { queries * TILE } else { 0 }
}

/// Returns the numbers of batch rows and heads that have lists of their own.
fn planes(spec: &Spec, visibility: &Visibility<'_>, chunk: &WorkChunk) -> (usize, usize) {
    let function = spec.bias_function.is_some();
    let of = |differ: bool, count: usize| if differ || function { count } else { 1 };
    (of(visibility.per_batch(), chunk.batches.1), of(visibility.per_head(), chunk.heads.1))
}

impl ChunkMask {
    /// Returns the number of visible tiles of the other side, of a tile of the owning side.
    pub(crate) fn pairs(&self, batch: usize, head: usize, tile: usize) -> u64 {
        let list = batch * self.plane_batch as usize + head * self.plane_head as usize + tile;
        self.pairs.get(list).map_or(0, |&pairs| u64::from(pairs))
    }

    /// Returns the number of listed tiles of keys that only one half of a tall tile attends to.
    pub(crate) fn idle_halves(&self) -> u64 {
        let MergedRuns { runs, bits, .. } = &self.merged;
        let is_idle = |run: &&TileRun| {
            let mask = (run.bitmask != TileRun::FULL).then(|| {
                let first = run.bitmask as usize * TallTile::ROWS;
                &bits[first..first + TallTile::ROWS]
            });
            mask.is_some_and(|rows| rows.chunks(TILE).any(|half| half.iter().all(|&row| row == 0)))
        };
        runs.iter().filter(is_idle).map(|run| u64::from(run.count)).sum()
    }

    /// Returns the number of tiles of all lists.
    pub(crate) fn listed(&self) -> u64 {
        self.pairs.iter().map(|&pairs| u64::from(pairs)).sum()
    }

    /// Rebuilds the mask for a chunk.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if there are more tiles than u32 can count.
    pub(crate) fn rebuild(
        &mut self,
        spec: &Spec,
        visibility: &Visibility<'_>,
        chunk: &WorkChunk,
        owner: ListOwner,
        form: ListForm,
    ) -> Result<()> {
        let (batches, heads) = planes(spec, visibility, chunk);
        let rows = |(first, count): (usize, usize)| first..first + count;
        let tiling = Tiling {
            batches: rows((chunk.batches.0, batches)),
            heads: rows((chunk.heads.0, heads)),
            queries: rows(chunk.queries),
            keys: rows(chunk.keys),
            tile: [form.queries, TILE],
            // kernels do not check the ends of the sequence; position biases are stored per tile
            // mask
            bitmasks: if spec.bias_function.is_some() {
                BitmaskPolicy::Always
            } else {
                BitmaskPolicy::PartialOrTail
            },
        };
        self.block_sparse.refill(visibility, &tiling)?;
        let lists = match owner {
            ListOwner::Queries => self.block_sparse.by_queries(),
            ListOwner::Keys => {
                self.block_sparse.by_keys(&mut self.by_keys)?;
                &self.by_keys
            }
        };
        // position biases are stored per tile mask
        self.merged.refill(
            lists,
            self.block_sparse.bits(),
            form.queries,
            spec.bias_function.is_none(),
        );
        let lists = &self.merged;
        let owned = tiling.tiles()[usize::from(owner == ListOwner::Keys)];
        self.is_empty = lists.runs.is_empty();
        count_pairs(&mut self.pairs, &lists.starts, &lists.runs);
        self.is_ascending = is_ascending(&self.pairs, owned);
        let longest = self.pairs.iter().max().map_or(0, |&pairs| pairs as usize);
        self.ranges = (longest / MIN_RANGE_TILES).min(form.most_ranges).max(1);
        let divided;
        let (starts, runs) = if self.ranges > 1 {
            let list = |ends: &[u32]| &lists.runs[ends[0] as usize..ends[1] as usize];
            divided = RangeLists::of(lists.starts.windows(2).map(list), self.ranges);
            count_pairs(&mut self.pairs, &divided.starts, &divided.runs);
            (&*divided.starts, &*divided.runs)
        } else {
            (&*lists.starts, &*lists.runs)
        };
        let of_plane = owned * self.ranges;
        self.plane_head = if heads == 1 { 0 } else { of_plane as u32 };
        self.plane_batch = if batches == 1 { 0 } else { (heads * of_plane) as u32 };

        let words = &mut self.words;
        words.clear();
        words.extend_from_slice(starts);
        self.runs = words.len() as u32;
        words.extend(runs.iter().flat_map(|run| [run.first, run.count, run.bitmask]));
        self.bits = words.len() as u32;
        words.extend_from_slice(&self.merged.bits);
        // a list of all rows would be as long for a token as for the whole sequence
        let has_row_numbers = spec.bias.is_some() || spec.dropout.is_some();
        let mut rows_of = |rows: &[u64]| {
            let at = words.len() as u32;
            let rows = if has_row_numbers { rows } else { &[] };
            words.extend(rows.iter().flat_map(|&row| [row as u32, (row >> 32) as u32]));
            at
        };
        self.query_rows = rows_of(&visibility.queries.rows()[tiling.queries.clone()]);
        self.key_rows = rows_of(&visibility.keys.rows()[tiling.keys.clone()]);
        self.function_at = words.len() as u32;
        add_biases(words, spec, visibility, &tiling, self.block_sparse.by_queries());
        if words.len() == self.function_at as usize {
            self.function_at = 0;
        }
        Ok(())
    }
}

/// Counts the visible tiles of each list.
fn count_pairs(pairs: &mut Vec<u32>, starts: &[u32], runs: &[TileRun]) {
    let count = |ends: &[u32]| {
        let runs = &runs[ends[0] as usize..ends[1] as usize];
        runs.iter().map(|run| run.count).sum::<u32>()
    };
    pairs.clear();
    pairs.extend(starts.windows(2).map(count));
}

/// True if the second half of the lists of each plane has more tiles than the first.
fn is_ascending(pairs: &[u32], lists_per_plane: usize) -> bool {
    let total = |lists: &[u32]| lists.iter().map(|&pairs| u64::from(pairs)).sum::<u64>();
    let halves = pairs.chunks(lists_per_plane.max(1)).map(|plane| {
        let half = plane.len() / 2;
        [total(&plane[..half]), total(&plane[plane.len() - half..])]
    });
    let [first, last] = halves.fold([0, 0], |[a, b], [first, last]| [a + first, b + last]);
    last > first
}

/// Appends the bias function's values for every listed tile, in the order of the tile masks: 32
/// keys for each query of a tile, or for as many rows as there are queries. A token has one.
fn add_biases(
    words: &mut Vec<u32>,
    spec: &Spec,
    visibility: &Visibility<'_>,
    tiling: &Tiling,
    lists: &CsrTiles,
) {
    let Some(function) = &spec.bias_function else { return };
    let tiles = tiling.tiles()[0];
    let rows_each = tiling.queries.len().min(tiling.tile[0].max(TILE));
    for list in 0..tiling.planes() * tiles {
        let plane = list / tiles;
        let rows = tiling.rows_of(list % tiles);
        let batch = tiling.batches.start + plane / tiling.heads.len();
        let head = tiling.heads.start + plane % tiling.heads.len();
        for run in lists.list(list) {
            let keys = tiling.keys_of(run.first as usize);
            for q in rows.start..rows.start + rows_each {
                for k in keys.start..keys.start + TILE {
                    let value = if q < rows.end && k < keys.end {
                        let of_queries = visibility.queries;
                        let of_keys = visibility.keys;
                        let query = Query {
                            batch,
                            head,
                            row: of_queries.rows()[q],
                            position: of_queries.positions(batch)[q],
                        };
                        function.bias(
                            &query,
                            &Key { row: of_keys.rows()[k], position: of_keys.positions(batch)[k] },
                        )
                    } else {
                        0.0
                    };
                    words.push((value as f32).to_bits());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::{DType, Dims, Rows, mask::Causal};

    /// The mask of the last `queries` of a causal sequence of `keys` rows.
    fn of_last(queries: usize, keys: usize, owner: ListOwner, form: ListForm) -> ChunkMask {
        let first = (keys - queries) as i64;
        let queries_of = Rows::counting(queries as u64, first).unwrap();
        let keys_of = Rows::counting(keys as u64, 0).unwrap();
        let causal = Causal { offset: 0 };
        let visibility = Visibility {
            mask: &causal,
            attention_mask: None,
            key_lists: None,
            queries: &queries_of,
            keys: &keys_of,
        };
        let spec = Spec::new(Dims::new(1, keys, 1, 8), DType::F32);
        let chunk =
            WorkChunk { batches: (0, 1), heads: (0, 1), queries: (0, queries), keys: (0, keys) };
        let mut mask = ChunkMask::default();
        mask.rebuild(&spec, &visibility, &chunk, owner, form).unwrap();
        mask
    }

    #[test]
    fn tall_tiles_list_the_keys_of_both_halves() {
        let mask = of_last(300, 300, ListOwner::Queries, ListForm::TALL);
        for tile in 0..5 {
            assert_eq!(mask.pairs(0, 0, tile), (2 * tile as u64 + 2).min(10));
        }
        // of each tile of queries the last keys are visible to the upper half only; of the last
        // one, of 44 queries, too
        assert_eq!((mask.idle_halves(), mask.listed()), (5, 30));
    }

    #[test]
    fn a_token_takes_as_many_words_for_any_number_of_keys() {
        // a tile of one query is partial everywhere, because it has fewer queries than a tile
        let form = ListForm { queries: 16, most_ranges: 4 };
        // the last keys have a tile mask of their own
        let [few, many] = [1001, 64_001].map(|keys| of_last(1, keys, ListOwner::Queries, form));
        assert_eq!(few.words.len(), many.words.len());
        assert_eq!(few.pairs.iter().sum::<u32>(), 32);
        assert_eq!(many.pairs.iter().sum::<u32>(), 2001);
        // starts of four ranges, five runs, two masks
        assert_eq!(few.words.len(), 5 + 3 * 5 + 2 * 16);
    }
}
