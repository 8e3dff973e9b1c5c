//! Tiles that ranks compute and rows that they exchange, if a query attends to all earlier keys of
//! its document, as under a causal mask.
//!
//! ```text
//! a tile of 64 local queries    for each of its documents: the tiles of keys up to its last query
//! a rank with its last query of a document before row e
//!     needs the keys of the document before e, and receives those that it does not have
//! the owner of keys a..b sends   sum over the other ranks of min(e, b) − min(e, a)
//! ```
//! Layouts of the same documents are compared by these figures, which take
//! O((tiles + runs) log documents) time, where the traffic of any mask takes longer.

use std::ops::Range;

use super::tile_deal::TILE_ROWS;
use crate::Runs;

/// Documents of a batch.
pub(super) struct DocumentCost<'a> {
    /// First row of each document, ascending; that of the first is 0.
    pub(super) begins: &'a [u64],
}

impl DocumentCost<'_> {
    /// Returns the number of tiles of keys of all tiles of queries of a rank. `rows` are its rows
    /// in local order, in runs of consecutive ones.
    pub(super) fn tiles(&self, rows: &Runs) -> u64 {
        let mut tiles = 0;
        let mut index = 0;
        // document of the last rows of the tile, and the tiles of keys that they attend to
        let mut last = None;
        for run in rows.runs() {
            let start = run.start.cast_unsigned();
            for (document, rows) in self.by_document(start..start + run.count) {
                let mut start = rows.start;
                while start < rows.end {
                    let stop = rows.end.min(start + TILE_ROWS - index % TILE_ROWS);
                    let keys = (stop - self.begins[document]).div_ceil(TILE_ROWS);
                    let counted = match last {
                        Some((of, counted)) if of == document => counted,
                        _ => 0,
                    };
                    tiles += keys.saturating_sub(counted);
                    index += stop - start;
                    last = (index % TILE_ROWS > 0).then_some((document, keys.max(counted)));
                    start = stop;
                }
            }
        }
        tiles
    }

    /// Returns the number of rows that each rank sends and receives on the direct route. `ranks`
    /// has the rows of each rank, in ascending order.
    pub(super) fn rows_exchanged(&self, ranks: &[Vec<Range<u64>>]) -> Vec<u64> {
        let shares: Vec<Vec<Share>> = ranks.iter().map(|rows| self.shares(rows)).collect();
        let ends = shares.iter().flatten().map(|share| (share.document, share.end())).collect();
        let needed = NeededKeys::new(self.begins, ends);
        let of_share = |share: &Share| {
            let of_range = |rows: &Range<u64>| {
                needed.before(share.document, rows.end) - needed.before(share.document, rows.start)
            };
            let needed: u64 = share.rows.iter().map(of_range).sum();
            let own: u64 = share.rows.iter().map(|rows| rows.end - rows.start).sum();
            // the rank itself needs its rows too
            let sent = needed - own;
            let received = share.end() - self.begins[share.document] - own;
            sent + received
        };
        shares.iter().map(|of_rank| of_rank.iter().map(of_share).sum()).collect()
    }

    /// Divides the rows of a rank by document.
    fn shares(&self, rows: &[Range<u64>]) -> Vec<Share> {
        let mut shares: Vec<Share> = Vec::new();
        for (document, rows) in rows.iter().flat_map(|rows| self.by_document(rows.clone())) {
            match shares.last_mut() {
                Some(last) if last.document == document => last.rows.push(rows),
                _ => shares.push(Share { document, rows: vec![rows] }),
            }
        }
        shares
    }

    /// Divides consecutive rows by document.
    fn by_document(&self, rows: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> {
        let mut start = rows.start;
        let mut next = self.begins.partition_point(|&begin| begin <= start);
        std::iter::from_fn(move || {
            if start >= rows.end {
                return None;
            }
            let stop = self.begins.get(next).map_or(rows.end, |&begin| begin.min(rows.end));
            let of_document = (next - 1, start..stop);
            start = stop;
            next += 1;
            Some(of_document)
        })
        .filter(|(_, rows)| !rows.is_empty())
    }
}

/// Rows that a rank has of a document.
struct Share {
    document: usize,
    /// Ascending, at least one.
    rows: Vec<Range<u64>>,
}

impl Share {
    /// Returns the end of the last rows.
    fn end(&self) -> u64 {
        self.rows.last().map_or(0, |rows| rows.end)
    }
}

/// Keys that the ranks of each document need.
struct NeededKeys<'a> {
    begins: &'a [u64],
    /// Document, and end of the keys that a rank needs of it, ascending.
    ends: Vec<(usize, u64)>,
    /// Sums of the ends before each one, and of all.
    sums: Vec<u64>,
}

impl<'a> NeededKeys<'a> {
    fn new(begins: &'a [u64], mut ends: Vec<(usize, u64)>) -> Self {
        ends.sort_unstable();
        let sums = std::iter::once(0).chain(ends.iter().scan(0, |sum, (_, end)| {
            *sum += end;
            Some(*sum)
        }));
        Self { begins, sums: sums.collect(), ends }
    }

    /// Returns the number of keys of a document before `row`, summed over the ranks that need them.
    fn before(&self, document: usize, row: u64) -> u64 {
        let count = |below: (usize, u64)| self.ends.partition_point(|end| *end < below);
        let [first, after, last] = [(document, 0), (document, row), (document + 1, 0)].map(count);
        let ends_before_row = self.sums[after] - self.sums[first];
        let begin = self.begins[document];
        ends_before_row + row * (last - after) as u64 - begin * (last - first) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Run;

    #[test]
    fn tiles_attend_to_the_keys_of_their_documents() {
        let cost = DocumentCost { begins: &[0, 100] };
        let tiles = |runs: &[(i64, u64)]| {
            let mut rows = Runs::new();
            runs.iter().for_each(|&(start, count)| rows.push_run(Run { start, step: 1, count }));
            cost.tiles(&rows)
        };
        // 64 rows; 36 rows that end at 100 and 28 of the next document; then 92, 156 and 200
        assert_eq!(tiles(&[(0, 300)]), 1 + (2 + 1) + 2 + 3 + 4);
        // two parts of one document in a tile count once
        assert_eq!(tiles(&[(164, 32), (228, 32)]), 3);
        assert_eq!(tiles(&[(228, 32), (164, 32)]), 3);
    }

    proptest! {
        #[test]
        fn keys_are_sent_to_the_ranks_with_a_later_query(
            lens in prop::collection::vec(0u64..30, 1..8),
            owners in prop::collection::vec(0usize..4, 240),
        ) {
            let mut begins = Vec::new();
            let mut want = vec![0; 4];
            let mut begin = 0;
            for &len in &lens {
                begins.push(begin);
                let document = &owners[begin as usize..(begin + len) as usize];
                for (key, &from) in document.iter().enumerate() {
                    for to in (0..4).filter(|&to| to != from && document[key..].contains(&to)) {
                        want[from] += 1;
                        want[to] += 1;
                    }
                }
                begin += len;
            }
            let mut ranks: Vec<Vec<Range<u64>>> = vec![Vec::new(); 4];
            for (row, &rank) in (0..begin).zip(&owners) {
                match ranks[rank].last_mut() {
                    Some(last) if last.end == row => last.end += 1,
                    _ => ranks[rank].push(row..row + 1),
                }
            }
            prop_assert_eq!(DocumentCost { begins: &begins }.rows_exchanged(&ranks), want);
        }
    }
}
