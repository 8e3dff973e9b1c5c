//! Block-sparse mask for the kernels: for each tile of 32 queries or keys, the visible tiles of the
//! other side, and tile masks of the partial ones.
//!
//! ```text
//! words = [starts: first run of each list, and the end]
//!         [runs: (first tile, number of tiles, tile mask or FULL_TILE)…]
//!         [tile masks: 32 words each, one per query]
//!         [query rows][key rows: two words per row number]
//!         [position biases: 1024 per listed tile]
//! ```
//! Empty tiles are not listed. Every mask takes this form, so a new mask needs no new kernel.

use annulus_core::{
    BitmaskPolicy, BlockSparseMask, CsrTiles, Result, Spec, Tiling, Visibility, mask::Key,
    mask::Query,
};

use crate::kernels::TILE;

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
pub(crate) enum Owner {
    Queries,
    Keys,
}

/// Block-sparse mask of one chunk, and the offsets of its parts in `words`.
#[derive(Debug, Default)]
pub(crate) struct BlockMask {
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
    /// Visible tiles of each list.
    pairs: Vec<u32>,
    block_sparse: BlockSparseMask,
    by_keys: CsrTiles,
}

/// Upper bound of the words per pair of a query tile and a key tile.
pub(crate) const fn max_words_per_tile(spec: &Spec) -> usize {
    3 + TILE + if spec.bias_function.is_some() { TILE * TILE } else { 0 }
}

/// Returns the numbers of batch rows and heads that have lists of their own.
fn planes(spec: &Spec, visibility: &Visibility<'_>, chunk: &WorkChunk) -> (usize, usize) {
    let function = spec.bias_function.is_some();
    let of = |differ: bool, count: usize| if differ || function { count } else { 1 };
    (of(visibility.per_batch(), chunk.batches.1), of(visibility.per_head(), chunk.heads.1))
}

impl BlockMask {
    /// Returns the number of visible tiles of the other side, of a tile of the owning side.
    pub(crate) fn pairs(&self, batch: usize, head: usize, tile: usize) -> u64 {
        let list = batch * self.plane_batch as usize + head * self.plane_head as usize + tile;
        self.pairs.get(list).map_or(0, |&pairs| u64::from(pairs))
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
        owner: Owner,
    ) -> Result<()> {
        let (batches, heads) = planes(spec, visibility, chunk);
        let rows = |(first, count): (usize, usize)| first..first + count;
        let tiling = Tiling {
            batches: rows((chunk.batches.0, batches)),
            heads: rows((chunk.heads.0, heads)),
            queries: rows(chunk.queries),
            keys: rows(chunk.keys),
            tile: [TILE, TILE],
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
            Owner::Queries => self.block_sparse.by_queries(),
            Owner::Keys => {
                self.block_sparse.by_keys(&mut self.by_keys)?;
                &self.by_keys
            }
        };
        let owned = tiling.tiles()[usize::from(owner == Owner::Keys)];
        self.plane_head = if heads == 1 { 0 } else { owned as u32 };
        self.plane_batch = if batches == 1 { 0 } else { (heads * owned) as u32 };
        self.is_empty = lists.runs().is_empty();
        count_pairs(&mut self.pairs, lists);

        let words = &mut self.words;
        words.clear();
        words.extend_from_slice(lists.starts());
        self.runs = words.len() as u32;
        words.extend(lists.runs().iter().flat_map(|run| [run.first, run.count, run.bitmask]));
        self.bits = words.len() as u32;
        // 32 keys take the lower half of a u64
        words.extend(self.block_sparse.bits().iter().map(|&line| line as u32));
        let mut rows_of = |rows: &[u64]| {
            let at = words.len() as u32;
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
fn count_pairs(pairs: &mut Vec<u32>, lists: &CsrTiles) {
    let count = |ends: &[u32]| {
        let runs = &lists.runs()[ends[0] as usize..ends[1] as usize];
        runs.iter().map(|run| run.count).sum::<u32>()
    };
    pairs.clear();
    pairs.extend(lists.starts().windows(2).map(count));
}

/// Appends the bias function's values for every listed tile, in the order of the tile masks.
fn add_biases(
    words: &mut Vec<u32>,
    spec: &Spec,
    visibility: &Visibility<'_>,
    tiling: &Tiling,
    lists: &CsrTiles,
) {
    let Some(function) = &spec.bias_function else { return };
    let tiles = tiling.tiles()[0];
    for list in 0..tiling.planes() * tiles {
        let plane = list / tiles;
        let rows = tiling.rows_of(list % tiles);
        let batch = tiling.batches.start + plane / tiling.heads.len();
        let head = tiling.heads.start + plane % tiling.heads.len();
        for run in lists.list(list) {
            let keys = tiling.keys_of(run.first as usize);
            for q in rows.start..rows.start + TILE {
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
    use annulus_core::{DType, Dims, Rows, TileRun, mask::Causal};

    #[test]
    fn lists_of_both_sides_have_the_same_pairs() {
        let queries = Rows::counting(70, 5).unwrap();
        let keys = Rows::counting(100, 0).unwrap();
        let mask = Causal { offset: 0 };
        let visibility =
            Visibility { mask: &mask, attention_mask: None, queries: &queries, keys: &keys };
        let spec = Spec::new(Dims::new(1, 100, 1, 8), DType::F32);
        let chunk = WorkChunk { batches: (0, 1), heads: (0, 1), queries: (0, 70), keys: (0, 100) };
        for owner in [Owner::Queries, Owner::Keys] {
            let mut block_mask = BlockMask::default();
            block_mask.rebuild(&spec, &visibility, &chunk, owner).unwrap();
            let owned = if owner == Owner::Queries { 3 } else { 4 };
            let mut block_sparse = vec![vec![false; 100]; 70];
            for own in 0..owned {
                for run in block_mask.words[own]..block_mask.words[own + 1] {
                    let at = (block_mask.runs + 3 * run) as usize;
                    let (first, count, edge) =
                        (block_mask.words[at], block_mask.words[at + 1], block_mask.words[at + 2]);
                    for other in (first..first + count).map(|tile| tile as usize) {
                        let (q, k) =
                            if owner == Owner::Queries { (own, other) } else { (other, own) };
                        for row in 0..TILE {
                            let bits = block_mask.bits as usize + row;
                            let word = if edge == TileRun::FULL {
                                u32::MAX
                            } else {
                                block_mask.words[bits + TILE * edge as usize]
                            };
                            for key in (0..TILE).filter(|key| word >> key & 1 != 0) {
                                assert!(!block_sparse[q * TILE + row][k * TILE + key]);
                                block_sparse[q * TILE + row][k * TILE + key] = true;
                            }
                        }
                    }
                }
            }
            for (q, line) in block_sparse.iter().enumerate() {
                for (k, &block_sparse) in line.iter().enumerate() {
                    assert_eq!(block_sparse, visibility.pair(0, 0, q, k), "{owner:?}: {q} {k}");
                }
            }
        }
    }

    #[test]
    fn lists_grow_with_rows() {
        let words = |rows: usize, owner: Owner| {
            let all = Rows::counting(rows as u64, 0).unwrap();
            let mask = Causal { offset: 0 };
            let visibility =
                Visibility { mask: &mask, attention_mask: None, queries: &all, keys: &all };
            let spec = Spec::new(Dims::new(1, rows, 1, 8), DType::F32);
            let chunk =
                WorkChunk { batches: (0, 1), heads: (0, 1), queries: (0, rows), keys: (0, rows) };
            let mut block_mask = BlockMask::default();
            block_mask.rebuild(&spec, &visibility, &chunk, owner).unwrap();
            block_mask.words.len()
        };
        for owner in [Owner::Queries, Owner::Keys] {
            let [small, large] = [4096, 8192].map(|rows| words(rows, owner));
            let grows_with_rows = |small: usize, large: usize| 10 * large <= 21 * small;
            assert!(grows_with_rows(small, large), "{owner:?}: {small} words, then {large}");
            // two words per pair of visible tiles would exceed the bound
            let [few, many] = [4096, 8192].map(|rows: usize| (rows / 32).pow(2));
            assert!(
                !grows_with_rows(small + few, large + many),
                "{owner:?}: {small} words, then {large}: too many to tell"
            );
        }
    }
}
