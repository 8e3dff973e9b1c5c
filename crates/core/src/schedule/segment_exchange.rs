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

use std::{collections::HashMap, ops::RangeInclusive};

use crate::Runs;

/// Sweeps over all chunks: later ones find little.
const SWEEPS: usize = 2;

/// Rows of segments that have rows in several chunks, by chunk and by rank.
pub(super) struct SegmentExchange<'a> {
    /// Work of each chunk.
    work: &'a [u128],
    /// Rows of each chunk.
    rows: Vec<u128>,
    /// `(segment, rows)` of each chunk.
    segments: Vec<Vec<(usize, u64)>>,
    /// Rows of each segment.
    totals: Vec<u64>,
    /// `(rank, rows)` of each segment, ascending; ranks without rows are absent.
    owned: Vec<Vec<(usize, u64)>>,
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
        let (mut segments, segment_count) = segments_of_chunks(ids, edges);
        let mut uses = vec![0usize; segment_count];
        segments.iter().flatten().for_each(|&(segment, _)| uses[segment] += 1);
        if segment_count < 2 || uses.iter().all(|&uses| uses < 2) {
            return None;
        }
        // a segment within one chunk costs nothing, wherever it is
        segments.iter_mut().for_each(|of_chunk| of_chunk.retain(|&(segment, _)| uses[segment] > 1));
        let mut exchange = Self {
            work,
            rows: edges.windows(2).map(|edge| (edge[1] - edge[0]).into()).collect(),
            segments,
            totals: vec![0; uses.len()],
            owned: vec![Vec::new(); uses.len()],
            owners: vec![0; work.len()],
        };
        for (rank, of_rank) in dealt.iter().enumerate() {
            for &chunk in of_rank {
                exchange.owners[chunk] = rank;
                for index in 0..exchange.segments[chunk].len() {
                    let (segment, rows) = exchange.segments[chunk][index];
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
                        if other == stays || !fits {
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

    /// Returns the rows of a segment in a chunk.
    fn rows_in(&self, chunk: usize, segment: usize) -> u64 {
        self.segments[chunk].iter().find(|of| of.0 == segment).map_or(0, |of| of.1)
    }

    fn share_a_segment(&self, x: usize, y: usize) -> bool {
        self.segments[x].iter().any(|of| self.rows_in(y, of.0) > 0)
    }

    /// Returns the change of the cost when the ranks of two chunks exchange them.
    fn change(&self, x: usize, y: usize) -> i128 {
        let (a, b) = (self.owners[x], self.owners[y]);
        let rows_in = |chunk, segment| self.rows_in(chunk, segment);
        let cost = |segment: usize, owned: u64| {
            if owned == 0 { 0 } else { i128::from(self.totals[segment] - owned) }
        };
        let of_x = self.segments[x].iter().map(|of| of.0);
        let of_y = self.segments[y].iter().map(|of| of.0).filter(|&of| rows_in(x, of) == 0);
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
            for index in 0..self.segments[chunk].len() {
                let (segment, rows) = self.segments[chunk][index];
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

    fn owned_by(&self, segment: usize, rank: usize) -> u64 {
        let owned = &self.owned[segment];
        owned.binary_search_by_key(&rank, |of| of.0).map_or(0, |index| owned[index].1)
    }

    fn give(&mut self, segment: usize, rank: usize, rows: u64) {
        let owned = &mut self.owned[segment];
        match owned.binary_search_by_key(&rank, |of| of.0) {
            Ok(index) => owned[index].1 += rows,
            Err(index) => owned.insert(index, (rank, rows)),
        }
    }

    fn take(&mut self, segment: usize, rank: usize, rows: u64) {
        let owned = &mut self.owned[segment];
        if let Ok(index) = owned.binary_search_by_key(&rank, |of| of.0) {
            owned[index].1 -= rows;
            if owned[index].1 == 0 {
                owned.remove(index);
            }
        }
    }
}

/// Returns the work, or the rows, of the chunks for which a rank with `from` can exchange one of
/// `moved` with a rank with `to`, such that neither has more than `most`. Neither has before.
fn partners(moved: u128, from: u128, to: u128, most: u128) -> RangeInclusive<u128> {
    (to + moved).saturating_sub(most)..=(most + moved).saturating_sub(from)
}

/// Returns `(segment, rows)` of each chunk, and the number of segments. Rows of negative ids are
/// padding, which is in no segment.
fn segments_of_chunks(ids: &Runs, edges: &[u64]) -> (Vec<Vec<(usize, u64)>>, usize) {
    let mut numbers: HashMap<i64, usize> = HashMap::new();
    let mut segments = vec![Vec::new(); edges.len().saturating_sub(1)];
    let mut add = |chunk: usize, id: i64, rows: u64| {
        if id >= 0 {
            let next = numbers.len();
            let segment = *numbers.entry(id).or_insert(next);
            segments[chunk].push((segment, rows));
        }
    };
    let mut chunk = 0;
    let mut row = 0;
    for run in ids.runs() {
        let end = row + run.count;
        let mut index = 0;
        while row < end && chunk + 1 < edges.len() {
            let next = end.min(edges[chunk + 1]);
            // a run of several numbers repeats one; other runs are rows of several segments
            if run.step == 0 {
                add(chunk, run.start, next - row);
            } else {
                (index..index + (next - row)).for_each(|index| add(chunk, run.at(index), 1));
            }
            index += next - row;
            row = next;
            chunk += usize::from(row == edges[chunk + 1]);
        }
    }
    for of_chunk in &mut segments {
        of_chunk.sort_unstable();
        of_chunk.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            kept.1 += if is_same { next.1 } else { 0 };
            is_same
        });
    }
    let count = numbers.len();
    (segments, count)
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
