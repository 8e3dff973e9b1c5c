//! Who sees whom, as kernels are told: for each tile of 32 queries or keys, which tiles of the other side, and bits where not all pairs are visible.
//!
//! ```text
//! words = [lists: where each list begins, and the end][entries: (tile, edge or NONE)…][bits: 32 words an edge, one a query][query rows][key rows]
//!         [biases computed from positions: 1024 an edge]
//! ```
//! Row numbers are two words each. Tiles that see nothing are in no list. All masks come this way, whatever they are: a new one is no new kernel.

use annulus_core::{QueryTile, Spec, TileBits, TileClass, Visibility, mask::Key, mask::Query};

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

const NO_EDGE: u32 = u32::MAX;

/// Lists for one part, and where they lie in `words`.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    pub(crate) words: Vec<u32>,
    pub(crate) entries: u32,
    pub(crate) bits: u32,
    pub(crate) query_rows: u32,
    pub(crate) key_rows: u32,
    /// 0 where no bias is computed from positions.
    pub(crate) function_at: u32,
    /// Lists from one batch row, or head, to the next; 0 where all see alike.
    pub(crate) plane_batch: u32,
    pub(crate) plane_head: u32,
    pub(crate) is_empty: bool,
    scratch: Scratch,
}

/// Memory between calls.
#[derive(Debug, Default)]
struct Scratch {
    tile: QueryTile,
    bits: TileBits,
    /// (list, tile of the other side, edge)
    found: Vec<(u32, u32, u32)>,
    edges: Vec<u32>,
    biases: Vec<u32>,
}

/// The most words that one tile of queries can need for each tile of keys.
pub(crate) const fn most_words_a_tile(spec: &Spec) -> usize {
    2 + TILE + if spec.bias_function.is_some() { TILE * TILE } else { 0 }
}

/// How many batch rows and heads have lists of their own in a part.
fn planes(spec: &Spec, visibility: &Visibility<'_>, part: &Part) -> (usize, usize) {
    let function = spec.bias_function.is_some();
    let of = |differ: bool, count: usize| if differ || function { count } else { 1 };
    (of(visibility.per_batch(), part.batches.1), of(visibility.per_head(), part.heads.1))
}

impl Sight {
    /// Looks at every tile of the part.
    pub(crate) fn look(&mut self, spec: &Spec, visibility: &Visibility<'_>, part: &Part, owner: Owner) {
        let (batches, heads) = planes(spec, visibility, part);
        let [query_tiles, key_tiles] = [part.queries.1, part.keys.1].map(|rows| rows.div_ceil(TILE));
        let owned = if owner == Owner::Queries { query_tiles } else { key_tiles };
        self.plane_head = if heads == 1 { 0 } else { owned as u32 };
        self.plane_batch = if batches == 1 { 0 } else { (heads * owned) as u32 };
        let Scratch { found, edges, biases, .. } = &mut self.scratch;
        found.clear();
        edges.clear();
        biases.clear();
        for batch in 0..batches {
            for head in 0..heads {
                let list = (batch * heads + head) * owned;
                for query_tile in 0..query_tiles {
                    self.scratch.look_at(spec, visibility, part, owner, (batch, head), (list, query_tile));
                }
            }
        }
        self.is_empty = self.scratch.found.is_empty();
        self.write(visibility, part, batches * heads * owned);
    }

    /// Puts what was found in order.
    fn write(&mut self, visibility: &Visibility<'_>, part: &Part, lists: usize) {
        let Self { words, scratch: Scratch { found, edges, biases, .. }, .. } = self;
        words.clear();
        words.resize(lists + 1, 0);
        found.iter().for_each(|&(list, ..)| words[list as usize + 1] += 1);
        for list in 0..lists {
            words[list + 1] += words[list];
        }
        self.entries = words.len() as u32;
        words.resize(words.len() + 2 * found.len(), 0);
        // each entry goes to the next free place of its list; then the lists begin one list further on, and are put back
        for &(list, tile, edge) in found.iter() {
            let place = self.entries as usize + 2 * words[list as usize] as usize;
            words[list as usize] += 1;
            (words[place], words[place + 1]) = (tile, edge);
        }
        words[..=lists].rotate_right(1);
        if let Some(first) = words.first_mut() {
            *first = 0;
        }
        words[lists] = found.len() as u32;
        self.bits = words.len() as u32;
        words.extend_from_slice(edges);
        let mut rows_of = |rows: &[u64], (first, count): (usize, usize)| {
            let at = words.len() as u32;
            words.extend(rows[first..first + count].iter().flat_map(|&row| [row as u32, (row >> 32) as u32]));
            at
        };
        self.query_rows = rows_of(visibility.queries.rows(), part.queries);
        self.key_rows = rows_of(visibility.keys.rows(), part.keys);
        self.function_at = if biases.is_empty() { 0 } else { words.len() as u32 };
        words.extend_from_slice(biases);
    }
}

impl Scratch {
    /// One tile of queries, with all tiles of keys.
    fn look_at(
        &mut self,
        spec: &Spec,
        visibility: &Visibility<'_>,
        part: &Part,
        owner: Owner,
        (batch, head): (usize, usize),
        (list, query_tile): (usize, usize),
    ) {
        let Self { tile, bits, found, edges, biases } = self;
        let first = part.queries.0 + query_tile * TILE;
        let rows = first..(first + TILE).min(part.queries.0 + part.queries.1);
        let (batch, head) = (part.batches.0 + batch, part.heads.0 + head);
        visibility.query_tile(batch, head, rows.clone(), tile);
        let end = part.keys.0 + part.keys.1;
        let within = visibility.key_tiles(tile, TILE).skip_while(|keys| keys.start < part.keys.0).take_while(|keys| keys.start < end);
        for keys in within {
            let class = visibility.classify(tile, keys.clone(), bits);
            let whole = rows.len() == TILE && keys.len() == TILE;
            let edge = match class {
                TileClass::Empty => continue,
                TileClass::Full if whole && spec.bias_function.is_none() => NO_EDGE,
                TileClass::Full | TileClass::Edge => {
                    let edge = (edges.len() / TILE) as u32;
                    let all = u32::MAX >> (TILE - keys.len());
                    let word = |row: usize| if class == TileClass::Full { all } else { bits.line(row)[0] as u32 };
                    edges.extend((0..TILE).map(|row| if row < rows.len() { word(row) } else { 0 }));
                    edge
                }
            };
            if let Some(function) = &spec.bias_function {
                let (of_queries, of_keys) = (visibility.queries, visibility.keys);
                for row in 0..TILE {
                    for key in 0..TILE {
                        let there = row < rows.len() && key < keys.len();
                        let value = if there {
                            let (q, k) = (rows.start + row, keys.start + key);
                            let query = Query { batch, head, row: of_queries.rows()[q], position: of_queries.positions(batch)[q] };
                            function.bias(&query, &Key { row: of_keys.rows()[k], position: of_keys.positions(batch)[k] })
                        } else {
                            0.0
                        };
                        biases.push((value as f32).to_bits());
                    }
                }
            }
            let key_tile = (keys.start - part.keys.0) / TILE;
            let (own, other) = if owner == Owner::Queries { (query_tile, key_tile) } else { (key_tile, query_tile) };
            found.push(((list + own) as u32, other as u32, edge));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use annulus_core::{DType, Dims, Rows, mask::Causal};

    #[test]
    fn lists_of_both_sides_have_the_same_pairs() {
        let (queries, keys) = (Rows::counting(70, 5), Rows::counting(100, 0));
        let mask = Causal { offset: 0 };
        let visibility = Visibility { mask: &mask, attention_mask: None, queries: &queries, keys: &keys };
        let spec = Spec::new(Dims::new(1, 100, 1, 8), DType::F32);
        let part = Part { batches: (0, 1), heads: (0, 1), queries: (0, 70), keys: (0, 100) };
        for owner in [Owner::Queries, Owner::Keys] {
            let mut sight = Sight::default();
            sight.look(&spec, &visibility, &part, owner);
            let owned = if owner == Owner::Queries { 3 } else { 4 };
            let mut seen = vec![vec![false; 100]; 70];
            for own in 0..owned {
                for entry in sight.words[own]..sight.words[own + 1] {
                    let at = (sight.entries + 2 * entry) as usize;
                    let (other, edge) = (sight.words[at] as usize, sight.words[at + 1]);
                    let (q, k) = if owner == Owner::Queries { (own, other) } else { (other, own) };
                    for row in 0..TILE {
                        let word = if edge == NO_EDGE { u32::MAX } else { sight.words[sight.bits as usize + TILE * edge as usize + row] };
                        for key in (0..TILE).filter(|key| word >> key & 1 != 0) {
                            assert!(!seen[q * TILE + row][k * TILE + key]);
                            seen[q * TILE + row][k * TILE + key] = true;
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
}
