//! Who sees whom, as kernels are told: for each tile of 32 queries or keys, which tiles of the other side, and bits where not all pairs are visible.
//!
//! ```text
//! words = [lists: where each list begins, and the end][runs: (first tile, tiles, edge or NONE)…][bits: 32 words an edge, one a query][query rows]
//!         [key rows][biases computed from positions: 1024 an edge]
//! ```
//! Row numbers are two words each. Tiles that see nothing are in no list. All masks come this way, whatever they are: a new one is no new kernel.

use annulus_core::{Marked, Result, SeenTiles, Spec, TileLists, Tiling, Visibility, mask::Key, mask::Query};

use crate::kernels::TILE;

/// A stretch of what is worked at once: (first, count) each. Queries and keys begin at whole tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) batches: (usize, usize),
    pub(crate) heads: (usize, usize),
    pub(crate) queries: (usize, usize),
    pub(crate) keys: (usize, usize),
}

/// Whose lists are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Queries,
    Keys,
}

/// Lists for one part, and where they lie in `words`.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    pub(crate) words: Vec<u32>,
    pub(crate) runs: u32,
    pub(crate) bits: u32,
    pub(crate) query_rows: u32,
    pub(crate) key_rows: u32,
    /// 0 where no bias is computed from positions.
    pub(crate) function_at: u32,
    /// Lists from one batch row, or head, to the next; 0 where all see alike.
    pub(crate) plane_batch: u32,
    pub(crate) plane_head: u32,
    pub(crate) is_empty: bool,
    seen: SeenTiles,
    by_keys: TileLists,
}

/// The most words that one tile of queries can need for each tile of keys.
pub(crate) const fn most_words_a_tile(spec: &Spec) -> usize {
    3 + TILE + if spec.bias_function.is_some() { TILE * TILE } else { 0 }
}

/// How many batch rows and heads have lists of their own in a part.
fn planes(spec: &Spec, visibility: &Visibility<'_>, part: &Part) -> (usize, usize) {
    let function = spec.bias_function.is_some();
    let of = |differ: bool, count: usize| if differ || function { count } else { 1 };
    (of(visibility.per_batch(), part.batches.1), of(visibility.per_head(), part.heads.1))
}

impl Sight {
    /// Looks at the part.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if it has more tiles than there are numbers.
    pub(crate) fn look(&mut self, spec: &Spec, visibility: &Visibility<'_>, part: &Part, owner: Owner) -> Result<()> {
        let (batches, heads) = planes(spec, visibility, part);
        let rows = |(first, count): (usize, usize)| first..first + count;
        let tiling = Tiling {
            batches: rows((part.batches.0, batches)),
            heads: rows((part.heads.0, heads)),
            queries: rows(part.queries),
            keys: rows(part.keys),
            tile: [TILE, TILE],
            // kernels know no ends; what is computed from positions comes an edge at a time
            marked: if spec.bias_function.is_some() { Marked::All } else { Marked::Ragged },
        };
        self.seen.refill(visibility, &tiling)?;
        let lists = match owner {
            Owner::Queries => self.seen.by_queries(),
            Owner::Keys => {
                self.seen.by_keys(&mut self.by_keys)?;
                &self.by_keys
            }
        };
        let owned = tiling.tiles()[usize::from(owner == Owner::Keys)];
        self.plane_head = if heads == 1 { 0 } else { owned as u32 };
        self.plane_batch = if batches == 1 { 0 } else { (heads * owned) as u32 };
        self.is_empty = lists.runs().is_empty();

        let words = &mut self.words;
        words.clear();
        words.extend_from_slice(lists.starts());
        self.runs = words.len() as u32;
        words.extend(lists.runs().iter().flat_map(|run| [run.first, run.count, run.set]));
        self.bits = words.len() as u32;
        // a line of 32 keys is the lower half of its word
        words.extend(self.seen.bits().iter().map(|&line| line as u32));
        let mut rows_of = |rows: &[u64]| {
            let at = words.len() as u32;
            words.extend(rows.iter().flat_map(|&row| [row as u32, (row >> 32) as u32]));
            at
        };
        self.query_rows = rows_of(&visibility.queries.rows()[tiling.queries.clone()]);
        self.key_rows = rows_of(&visibility.keys.rows()[tiling.keys.clone()]);
        self.function_at = words.len() as u32;
        add_biases(words, spec, visibility, &tiling, self.seen.by_queries());
        if words.len() == self.function_at as usize {
            self.function_at = 0;
        }
        Ok(())
    }
}

/// Appends what the bias function says of every listed pair of tiles, in the order of their sets of bits.
fn add_biases(words: &mut Vec<u32>, spec: &Spec, visibility: &Visibility<'_>, tiling: &Tiling, lists: &TileLists) {
    let Some(function) = &spec.bias_function else { return };
    let tiles = tiling.tiles()[0];
    for list in 0..tiling.planes() * tiles {
        let (plane, rows) = (list / tiles, tiling.rows_of(list % tiles));
        let (batch, head) = (tiling.batches.start + plane / tiling.heads.len(), tiling.heads.start + plane % tiling.heads.len());
        for run in lists.list(list) {
            let keys = tiling.keys_of(run.first as usize);
            for q in rows.start..rows.start + TILE {
                for k in keys.start..keys.start + TILE {
                    let value = if q < rows.end && k < keys.end {
                        let (of_queries, of_keys) = (visibility.queries, visibility.keys);
                        let query = Query { batch, head, row: of_queries.rows()[q], position: of_queries.positions(batch)[q] };
                        function.bias(&query, &Key { row: of_keys.rows()[k], position: of_keys.positions(batch)[k] })
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
        let (queries, keys) = (Rows::counting(70, 5), Rows::counting(100, 0));
        let mask = Causal { offset: 0 };
        let visibility = Visibility { mask: &mask, attention_mask: None, queries: &queries, keys: &keys };
        let spec = Spec::new(Dims::new(1, 100, 1, 8), DType::F32);
        let part = Part { batches: (0, 1), heads: (0, 1), queries: (0, 70), keys: (0, 100) };
        for owner in [Owner::Queries, Owner::Keys] {
            let mut sight = Sight::default();
            sight.look(&spec, &visibility, &part, owner).unwrap();
            let owned = if owner == Owner::Queries { 3 } else { 4 };
            let mut seen = vec![vec![false; 100]; 70];
            for own in 0..owned {
                for run in sight.words[own]..sight.words[own + 1] {
                    let at = (sight.runs + 3 * run) as usize;
                    let (first, count, edge) = (sight.words[at], sight.words[at + 1], sight.words[at + 2]);
                    for other in (first..first + count).map(|tile| tile as usize) {
                        let (q, k) = if owner == Owner::Queries { (own, other) } else { (other, own) };
                        for row in 0..TILE {
                            let bits = sight.bits as usize + row;
                            let word = if edge == TileRun::EVERYTHING { u32::MAX } else { sight.words[bits + TILE * edge as usize] };
                            for key in (0..TILE).filter(|key| word >> key & 1 != 0) {
                                assert!(!seen[q * TILE + row][k * TILE + key]);
                                seen[q * TILE + row][k * TILE + key] = true;
                            }
                        }
                    }
                }
            }
            for (q, line) in seen.iter().enumerate() {
                for (k, &seen) in line.iter().enumerate() {
                    assert_eq!(seen, visibility.pair(0, 0, q, k), "{owner:?}: {q} {k}");
                }
            }
        }
    }

    #[test]
    fn lists_are_as_long_as_rows() {
        let words = |rows: usize, owner: Owner| {
            let all = Rows::counting(rows as u64, 0);
            let mask = Causal { offset: 0 };
            let visibility = Visibility { mask: &mask, attention_mask: None, queries: &all, keys: &all };
            let spec = Spec::new(Dims::new(1, rows, 1, 8), DType::F32);
            let part = Part { batches: (0, 1), heads: (0, 1), queries: (0, rows), keys: (0, rows) };
            let mut sight = Sight::default();
            sight.look(&spec, &visibility, &part, owner).unwrap();
            sight.words.len()
        };
        for owner in [Owner::Queries, Owner::Keys] {
            let [small, large] = [4096, 8192].map(|rows| words(rows, owner));
            let grows_with_rows = |small: usize, large: usize| 10 * large <= 21 * small;
            assert!(grows_with_rows(small, large), "{owner:?}: {small} words, then {large}");
            // two words for every two tiles that see each other would show
            let [few, many] = [4096, 8192].map(|rows: usize| (rows / 32).pow(2));
            assert!(!grows_with_rows(small + few, large + many), "{owner:?}: {small} words, then {large}: too many to tell");
        }
    }
}
