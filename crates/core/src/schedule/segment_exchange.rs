//! Exchanges of chunks between ranks that bring the chunks of one segment together, so that fewer
//! rows are sent.
//!
//! ```text
//! cost      = sum over segments s and ranks r with rows of s: rows of s that r does not own
//! for each chunk c that shares a segment with chunk c + 1, on another rank:
//!     of the exchanges that move c to the rank of c + 1, or c + 1 to the rank of c,
//!     make the one that lowers the cost most, if no rank exceeds its limits
//! ```
//! The cost is a bound of the rows sent for any mask: that of a mask under which every row of a
//! segment needs all others.

use std::ops::{Range, RangeInclusive};

use super::tile_deal::TILE_ROWS;
use crate::{Runs, needs::IdNumbers};

/// Sweeps over all chunks: later ones find little.
const SWEEPS: usize = 2;

/// Rows of segments that have rows in several chunks, by chunk and by rank.
pub(super) struct SegmentExchange<'a> {
    /// Work of each chunk.
    work: &'a [u128],
    /// Rows of each chunk.
    rows: Vec<u128>,
    segments: ChunkSegments,
    /// Rows of each segment.
    totals: Vec<u64>,
    /// `(rank, rows)` of all segments, those of segment s from index `first[s]` on, ascending by
    /// rank: as many places as it has chunks, of which the first `owners_of[s]` are used. Ranks
    /// without rows are absent.
    owned: Vec<(usize, u64)>,
    first: Vec<usize>,
    owners_of: Vec<usize>,
    /// Rank of each chunk.
    owners: Vec<usize>,
}

impl<'a> SegmentExchange<'a> {
    /// Prepares the exchanges of chunks that begin at the rows `edges`, the last of which is the
    /// end of the rows, and are dealt as `dealt[rank]`. `ids` has the segment id of each row in the
    /// first batch row: only this one is used. `None` if there are no two segments, or none is in
    /// several chunks.
    pub(super) fn new(
        ids: &Runs,
        edges: &[u64],
        work: &'a [u128],
        dealt: &[Vec<usize>],
    ) -> Option<Self> {
        let mut segments = ChunkSegments::new(ids, edges);
        let mut uses = vec![0usize; segments.count];
        segments.entries.iter().for_each(|&(segment, _)| uses[segment] += 1);
        if segments.count < 2 || uses.iter().all(|&uses| uses < 2) {
            return None;
        }
        // a segment within one chunk costs nothing, wherever it is
        segments.retain(|segment| uses[segment] > 1);
        let first: Vec<usize> = uses
            .iter()
            .scan(0, |first, &uses| Some(std::mem::replace(first, *first + uses)))
            .collect();
        let mut exchange = Self {
            work,
            rows: edges.windows(2).map(|edge| (edge[1] - edge[0]).into()).collect(),
            totals: vec![0; uses.len()],
            owned: vec![(0, 0); uses.iter().sum()],
            first,
            owners_of: vec![0; uses.len()],
            owners: vec![0; work.len()],
            segments,
        };
        for (rank, of_rank) in dealt.iter().enumerate() {
            for &chunk in of_rank {
                exchange.owners[chunk] = rank;
                for index in exchange.segments.range(chunk) {
                    let (segment, rows) = exchange.segments.entries[index];
                    exchange.totals[segment] += rows;
                    exchange.give(segment, rank, rows);
                }
            }
        }
        Some(exchange)
    }

    /// Makes exchanges after which no rank has more than `most_work` and `most_rows`, if none has
    /// before.
    pub(super) fn run(&mut self, dealt: &mut [Vec<usize>], most_work: u128, most_rows: u128) {
        let sum = |of: &[u128], chunks: &[usize]| chunks.iter().map(|&chunk| of[chunk]).sum();
        let mut sums: Vec<[u128; 2]> =
            dealt.iter().map(|of| [sum(self.work, of), sum(&self.rows, of)]).collect();
        for _ in 0..SWEEPS {
            let mut is_changed = false;
            for chunk in 1..self.owners.len() {
                let (first, second) = (self.owners[chunk - 1], self.owners[chunk]);
                if first == second || !self.share_a_segment(chunk - 1, chunk) {
                    continue;
                }
                let mut best: Option<(i128, usize, usize)> = None;
                for (moved, stays, to) in [(chunk, chunk - 1, first), (chunk - 1, chunk, second)] {
                    let limits = [(self.work, most_work, 0), (&self.rows, most_rows, 1)];
                    let [work, rows] = limits.map(|(of, most, figure)| {
                        let [from, to] = [self.owners[moved], to].map(|rank| sums[rank][figure]);
                        partners(of[moved], from, to, most)
                    });
                    for &other in &dealt[to] {
                        let fits =
                            work.contains(&self.work[other]) && rows.contains(&self.rows[other]);
                        if other == stays || !fits || !self.fill_equal_tiles(moved, other) {
                            continue;
                        }
                        let change = self.change(moved, other);
                        if change < best.map_or(0, |(least, ..)| least) {
                            best = Some((change, moved, other));
                        }
                    }
                }
                if let Some((_, moved, other)) = best {
                    self.swap(moved, other, dealt, &mut sums);
                    is_changed = true;
                }
            }
            if !is_changed {
                break;
            }
        }
        dealt.iter_mut().for_each(|of_rank| of_rank.sort_unstable());
    }

    /// Returns true if an exchange of two chunks leaves as many rows beyond whole tiles to each
    /// rank.
    fn fill_equal_tiles(&self, x: usize, y: usize) -> bool {
        let beyond = |chunk: usize| self.rows[chunk] % u128::from(TILE_ROWS);
        beyond(x) == beyond(y)
    }

    /// Returns the rows of a segment in a chunk.
    fn rows_in(&self, chunk: usize, segment: usize) -> u64 {
        self.segments.of(chunk).iter().find(|of| of.0 == segment).map_or(0, |of| of.1)
    }

    fn share_a_segment(&self, x: usize, y: usize) -> bool {
        self.segments.of(x).iter().any(|of| self.rows_in(y, of.0) > 0)
    }

    /// Returns the change of the cost when the ranks of two chunks exchange them.
    fn change(&self, x: usize, y: usize) -> i128 {
        let (a, b) = (self.owners[x], self.owners[y]);
        let rows_in = |chunk, segment| self.rows_in(chunk, segment);
        let cost = |segment: usize, owned: u64| {
            if owned == 0 { 0 } else { i128::from(self.totals[segment] - owned) }
        };
        let of_x = self.segments.of(x).iter().map(|of| of.0);
        let of_y = self.segments.of(y).iter().map(|of| of.0).filter(|&of| rows_in(x, of) == 0);
        let mut change = 0;
        for segment in of_x.chain(of_y) {
            let (from_x, from_y) = (rows_in(x, segment), rows_in(y, segment));
            let (of_a, of_b) = (self.owned_by(segment, a), self.owned_by(segment, b));
            change += cost(segment, of_a - from_x + from_y) - cost(segment, of_a);
            change += cost(segment, of_b - from_y + from_x) - cost(segment, of_b);
        }
        change
    }

    fn swap(&mut self, x: usize, y: usize, dealt: &mut [Vec<usize>], sums: &mut [[u128; 2]]) {
        let (a, b) = (self.owners[x], self.owners[y]);
        for (chunk, from, to) in [(x, a, b), (y, b, a)] {
            for index in self.segments.range(chunk) {
                let (segment, rows) = self.segments.entries[index];
                self.take(segment, from, rows);
                self.give(segment, to, rows);
            }
            sums[from] = [sums[from][0] - self.work[chunk], sums[from][1] - self.rows[chunk]];
            sums[to] = [sums[to][0] + self.work[chunk], sums[to][1] + self.rows[chunk]];
            dealt[from].retain(|&own| own != chunk);
            dealt[to].push(chunk);
            self.owners[chunk] = to;
        }
    }

    /// Returns the places of the owners of a segment.
    fn owners_range(&self, segment: usize) -> Range<usize> {
        self.first[segment]..self.first[segment] + self.owners_of[segment]
    }

    /// Returns the place of a rank among the owners of a segment, or else the place at which it is
    /// inserted: O(log ranks), because a long document is on all ranks.
    fn owner(&self, segment: usize, rank: usize) -> std::result::Result<usize, usize> {
        let range = self.owners_range(segment);
        let found = self.owned[range.clone()].binary_search_by_key(&rank, |of| of.0);
        found.map(|index| range.start + index).map_err(|index| range.start + index)
    }

    fn owned_by(&self, segment: usize, rank: usize) -> u64 {
        self.owner(segment, rank).map_or(0, |index| self.owned[index].1)
    }

    fn give(&mut self, segment: usize, rank: usize, rows: u64) {
        match self.owner(segment, rank) {
            Ok(index) => self.owned[index].1 += rows,
            Err(index) => {
                // there is a place: every owner has a chunk of the segment
                let end = self.owners_range(segment).end;
                self.owned.copy_within(index..end, index + 1);
                self.owned[index] = (rank, rows);
                self.owners_of[segment] += 1;
            }
        }
    }

    fn take(&mut self, segment: usize, rank: usize, rows: u64) {
        if let Ok(index) = self.owner(segment, rank) {
            self.owned[index].1 -= rows;
            if self.owned[index].1 == 0 {
                let end = self.owners_range(segment).end;
                self.owned.copy_within(index + 1..end, index);
                self.owners_of[segment] -= 1;
            }
        }
    }
}

/// Returns the work, or the rows, of the chunks for which a rank with `from` can exchange one of
/// `moved` with a rank with `to`, such that neither has more than `most`. Neither has before.
fn partners(moved: u128, from: u128, to: u128, most: u128) -> RangeInclusive<u128> {
    (to + moved).saturating_sub(most)..=(most + moved).saturating_sub(from)
}

/// Segments of chunks.
struct ChunkSegments {
    /// `(segment, rows)` of all chunks, ascending in each: those of chunk c are
    /// `first[c]..first[c + 1]`.
    entries: Vec<(usize, u64)>,
    first: Vec<usize>,
    /// Number of segments.
    count: usize,
}

impl ChunkSegments {
    /// Numbers the ids of the chunks that begin at `edges`. Rows of negative ids are padding, which
    /// is in no segment.
    fn new(ids: &Runs, edges: &[u64]) -> Self {
        let mut numbers = IdNumbers::of_lists(std::iter::once(ids));
        let mut entries: Vec<(usize, u64)> = Vec::with_capacity(ids.runs().len() + edges.len());
        let mut first = Vec::with_capacity(edges.len());
        first.push(0);
        let mut add = |entries: &mut Vec<(usize, u64)>, id: i64, rows: u64| {
            if id >= 0 {
                entries.push((numbers.number(id), rows));
            }
        };
        let mut row = 0;
        for run in ids.runs() {
            let end = row + run.count;
            let mut index = 0;
            while row < end && first.len() < edges.len() {
                let edge = edges[first.len()];
                let next = end.min(edge);
                // a run of several numbers repeats one; other runs are rows of several segments
                if run.step == 0 {
                    add(&mut entries, run.start, next - row);
                } else {
                    (index..index + (next - row))
                        .for_each(|index| add(&mut entries, run.at(index), 1));
                }
                index += next - row;
                row = next;
                if row == edge {
                    let begin = first[first.len() - 1];
                    merge_equal(&mut entries, begin);
                    first.push(entries.len());
                }
            }
        }
        // rows beyond the ids, of which there are none
        first.resize(edges.len().max(1), entries.len());
        Self { entries, first, count: numbers.len() }
    }

    /// Returns the indices of the entries of a chunk.
    fn range(&self, chunk: usize) -> Range<usize> {
        self.first[chunk]..self.first[chunk + 1]
    }

    fn of(&self, chunk: usize) -> &[(usize, u64)] {
        &self.entries[self.range(chunk)]
    }

    /// Removes the other segments.
    fn retain(&mut self, is_kept: impl Fn(usize) -> bool) {
        let mut kept = 0;
        for chunk in 1..self.first.len() {
            let range = self.first[chunk - 1]..self.first[chunk];
            self.first[chunk - 1] = kept;
            for index in range {
                if is_kept(self.entries[index].0) {
                    self.entries[kept] = self.entries[index];
                    kept += 1;
                }
            }
        }
        if let Some(last) = self.first.last_mut() {
            *last = kept;
        }
        self.entries.truncate(kept);
    }
}

/// Sorts the entries from `begin` on, and merges those of the same segment.
fn merge_equal(entries: &mut Vec<(usize, u64)>, begin: usize) {
    entries[begin..].sort_unstable();
    let mut kept = begin;
    for index in begin..entries.len() {
        let (segment, rows) = entries[index];
        if kept > begin && entries[kept - 1].0 == segment {
            entries[kept - 1].1 += rows;
        } else {
            entries[kept] = (segment, rows);
            kept += 1;
        }
    }
    entries.truncate(kept);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Run;

    /// Ids of chunks of 10 rows, of which each list has the `(segment, rows)` of one.
    fn ids(segments: &[&[(i64, u64)]]) -> Runs {
        let mut ids = Runs::new();
        for &(id, count) in segments.iter().copied().flatten() {
            ids.push_run(Run { start: id, step: 0, count });
        }
        ids
    }

    /// Edges of chunks of 10 rows.
    fn edges(chunks: u64) -> Vec<u64> {
        (0..=chunks).map(|chunk| 10 * chunk).collect()
    }

    #[test]
    fn documents_are_brought_together() {
        // documents 0 to 3 fill two chunks each, which are dealt to different ranks
        let all: Vec<[(i64, u64); 1]> = (0..8).map(|chunk| [(chunk / 2, 10)]).collect();
        let ids = ids(&all.iter().map(<[_; 1]>::as_slice).collect::<Vec<_>>());
        let work = [5u128; 8];
        let mut dealt = vec![vec![0, 2, 4, 6], vec![1, 3, 5, 7]];
        let edges = edges(8);
        let exchange = SegmentExchange::new(&ids, &edges, &work, &dealt);
        exchange.unwrap().run(&mut dealt, 20, 40);
        for of_rank in &dealt {
            let documents: Vec<usize> = of_rank.iter().map(|chunk| chunk / 2).collect();
            assert_eq!((documents[0], documents[2]), (documents[1], documents[3]), "{dealt:?}");
        }
    }

    #[test]
    fn exchanges_respect_the_limits_and_lower_the_cost() {
        // chunk 1 has the work of rank 1 almost alone, so that it cannot move to rank 0
        let ids = ids(&[&[(0, 10)], &[(0, 4), (1, 6)], &[(1, 2), (2, 8)], &[(2, 10)]]);
        let work = [5, 9, 4, 1];
        let edges = edges(4);
        let exchanged = |most_work| {
            let mut dealt = vec![vec![0, 2], vec![1, 3]];
            let mut exchange = SegmentExchange::new(&ids, &edges, &work, &dealt).unwrap();
            exchange.run(&mut dealt, most_work, 20);
            dealt
        };
        assert_eq!(exchanged(10), [[0, 2], [1, 3]]);
        // all rows of documents 0 to 2 that a rank lacks: 10 + 4 + 2 + 6 + 8 + 10 before, and with
        // chunks 2 and 3 together 2 + 6 after
        assert_eq!(exchanged(14), [[0, 1], [2, 3]]);
    }

    /// The rows that `owned` has of each rank, against a count over the chunks.
    #[test]
    fn owners_stay_ascending_and_have_the_rows_of_their_chunks() {
        // one document over 12 chunks, and another over the last 4 of them
        let mut chunks = vec![vec![(0, 10)]; 8];
        chunks.extend((0..4).map(|rows| vec![(0, 9 - rows), (1, 1 + rows)]));
        let ids = ids(&chunks.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let work = [1u128; 12];
        let mut dealt = vec![vec![3, 11], vec![2, 7], vec![0, 10], vec![4, 6], vec![1, 8, 5, 9]];
        let mut exchange = SegmentExchange::new(&ids, &edges(12), &work, &dealt).unwrap();
        let mut sums = vec![[10; 2]; 5];
        let of_chunk = |chunk: usize, segment| {
            let all = chunks[chunk].iter().filter(|of: &&(i64, u64)| of.0 == segment);
            all.map(|of| of.1).sum::<u64>()
        };
        for (x, y) in [(11, 0), (9, 11), (8, 3), (0, 9), (10, 2), (2, 11), (8, 10)] {
            exchange.swap(x, y, &mut dealt, &mut sums);
            for segment in 0..2 {
                let owners = &exchange.owned[exchange.owners_range(segment)];
                assert!(owners.is_sorted_by(|a, b| a.0 < b.0), "{owners:?}");
                for (rank, chunks) in dealt.iter().enumerate() {
                    let rows = chunks.iter().map(|&chunk| of_chunk(chunk, segment as i64)).sum();
                    assert_eq!(exchange.owned_by(segment, rank), rows, "{dealt:?}");
                    assert_eq!(owners.iter().any(|of| of.0 == rank), rows > 0);
                }
            }
        }
    }

    #[test]
    fn without_divided_segments_there_is_nothing_to_exchange() {
        let work = [1u128; 2];
        let dealt = [vec![0], vec![1]];
        let is_none = |segments: &[&[(i64, u64)]]| {
            SegmentExchange::new(&ids(segments), &edges(2), &work, &dealt).is_none()
        };
        assert!(is_none(&[&[(0, 10)], &[(0, 10)]]));
        assert!(is_none(&[&[(0, 10)], &[(1, 10)]]));
        assert!(!is_none(&[&[(0, 9), (1, 1)], &[(1, 10)]]));
        // padding is no segment
        assert!(is_none(&[&[(0, 5), (-1, 5)], &[(-1, 5), (1, 5)]]));
    }
}
