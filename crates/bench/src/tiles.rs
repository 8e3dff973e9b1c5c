//! Tiles of queries and keys that contain a visible pair: what a kernel computes.

use std::collections::HashMap;

use annulus::Layout;
use annulus_core::Side;

/// Rows of a tile: those of the CPU kernels.
const ROWS: usize = 64;

/// Rows of one document in one tile.
struct Part {
    rank: usize,
    tile: usize,
    document: usize,
    first: usize,
    last: usize,
}

/// The tiles of all ranks, each of [`ROWS`] local rows.
pub(crate) struct Tiles {
    parts: Vec<Part>,
}

impl Tiles {
    /// Divides the rows of each rank, in local order, into tiles. `lens` has the lengths of the
    /// documents.
    pub(crate) fn new(lens: &[usize], layout: &Layout, ranks: usize) -> Self {
        let mut starts = vec![0];
        lens.iter().for_each(|len| starts.push(starts[starts.len() - 1] + len));
        let rows = starts[lens.len()];
        let mut parts: Vec<Part> = Vec::new();
        let mut begin = 0;
        for rank in 0..ranks {
            let shard = layout.shard(Side::Q, rows, rank, ranks);
            for (index, row) in shard.iter().enumerate() {
                let row = row.unsigned_abs() as usize;
                let document = starts.partition_point(|&start| start <= row) - 1;
                let (tile, position) = (begin + index / ROWS, row - starts[document]);
                match parts.last_mut() {
                    Some(last) if last.tile == tile && last.document == document => {
                        last.first = last.first.min(position);
                        last.last = last.last.max(position);
                    }
                    _ => parts.push(Part { rank, tile, document, first: position, last: position }),
                }
            }
            begin += (shard.len() as usize).div_ceil(ROWS);
        }
        Self { parts }
    }

    /// Counts the pairs of a tile of queries and a tile of keys with a visible pair.
    pub(crate) fn count(&self, causal: bool) -> u64 {
        self.count_by_rank(causal).iter().sum()
    }

    /// Counts the pairs of a tile of queries of each rank and a tile of keys with a visible pair.
    pub(crate) fn count_by_rank(&self, causal: bool) -> Vec<u64> {
        let mut of_documents: HashMap<usize, Vec<&Part>> = HashMap::new();
        for part in &self.parts {
            of_documents.entry(part.document).or_default().push(part);
        }
        let mut counted_for = vec![usize::MAX; self.parts.last().map_or(0, |last| last.tile + 1)];
        let mut counts = vec![0; self.parts.last().map_or(0, |last| last.rank + 1)];
        for queries in &self.parts {
            for keys in &of_documents[&queries.document] {
                let is_visible = !causal || keys.first <= queries.last;
                if is_visible && counted_for[keys.tile] != queries.tile {
                    counted_for[keys.tile] = queries.tile;
                    counts[queries.rank] += 1;
                }
            }
        }
        counts
    }
}
