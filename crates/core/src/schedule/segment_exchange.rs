//! Exchanges of chunks between ranks that bring the chunks of one segment together, so that fewer
//! rows are sent.
//!
//! ```text
//! cost      = sum over segments: rows of the segment · (ranks with rows of it − 1)
//! for each chunk c that shares a segment with chunk c + 1, on another rank:
//!     of the exchanges that move c to the rank of c + 1, or c + 1 to the rank of c,
//!     make the one that lowers the cost most, if no rank exceeds its limits
//! ```
//! The cost is a bound of the rows sent for any mask: that of a mask under which every row of a
//! segment needs all others, so that each of its ranks needs those that it does not have.
//!
//! # Time
//! Chunk x moves from rank a to b, and chunk y from b to a. A segment of x alone costs its rows
//! more if b has no chunk of it, and less if a has only x; and so with y. So the change is that of
//! x, which is computed once for all y, and that of y, which is not negative unless a has a segment
//! of y. The change of y is computed only if it has one, or if the change of x lowers the cost more
//! than the best exchange so far. For each chunk a set of 64 bits has the ranks with one of its
//! segments, so that most chunks y cost a comparison of one bit.

use super::{
    chunk_segments::ChunkSegments,
    segment_ranks::{SegmentRanks, bit},
    tile_deal::TILE_ROWS,
};
use crate::Runs;

/// Sweeps over all chunks: later ones find little.
const SWEEPS: usize = 2;

/// Chunks of a rank of which it is checked first that one may be exchanged at all, at most.
const FEW: usize = 8;

/// Segments that have rows in several chunks, by chunk and by rank.
pub(super) struct SegmentExchange<'a> {
    /// First row of each chunk, and the end of the last.
    edges: &'a [u64],
    /// Work of each chunk.
    work: &'a [u128],
    segments: ChunkSegments,
    ranks: SegmentRanks,
    /// Bits `rank % 64` of the ranks with a segment of each chunk, and perhaps of others.
    near: Vec<u64>,
    /// All of these of the chunks that each rank has or had.
    near_ranks: Vec<u64>,
}

/// An exchange of two chunks, and the change of the cost.
struct Exchange {
    change: i64,
    chunks: [usize; 2],
}

/// A chunk that moves to another rank, and which chunks of that rank may move to its own.
struct Move {
    chunk: usize,
    to: usize,
    /// A chunk that stays on rank `to`.
    stays: usize,
    /// Least work of the chunks that may move.
    least_work: u128,
    /// Difference of their most and their least work.
    span: u128,
    /// Rows of the ranks from which and to which the chunk moves.
    sums: [u128; 2],
    most_rows: u128,
}

impl<'a> SegmentExchange<'a> {
    /// Prepares the exchanges of chunks that begin at the rows `edges`, the last of which is the
    /// end of the rows, and are dealt as `dealt[rank]`. `ids` has the segment id of each row in the
    /// first batch row: only this one is used. `None` if there are no two segments, or none is in
    /// several chunks.
    pub(super) fn new(
        ids: &Runs,
        edges: &'a [u64],
        work: &'a [u128],
        dealt: &[Vec<usize>],
    ) -> Option<Self> {
        // a segment within one chunk costs nothing, wherever it is
        let segments = ChunkSegments::new(ids, edges)?;
        let ranks = SegmentRanks::new(&segments, dealt, work.len());
        let mut exchange = Self {
            edges,
            work,
            segments,
            ranks,
            near: vec![0; work.len()],
            near_ranks: vec![0; dealt.len()],
        };
        (0..work.len()).for_each(|chunk| exchange.update_near(chunk));
        Some(exchange)
    }

    /// Computes the ranks with a segment of a chunk.
    fn update_near(&mut self, chunk: usize) {
        let mut near = 0;
        for &segment in self.segments.of(chunk) {
            let is_long = self.segments.is_long(segment);
            near |= if is_long { u64::MAX } else { self.ranks.mask(segment) };
        }
        self.near[chunk] = near;
        self.near_ranks[self.ranks.owners[chunk]] |= near;
    }

    /// Returns the rows of a chunk.
    fn rows(&self, chunk: usize) -> u64 {
        self.edges[chunk + 1] - self.edges[chunk]
    }

    /// Makes exchanges after which no rank has more than `most_work` and `most_rows`, if none has
    /// before.
    pub(super) fn run(&mut self, dealt: &mut [Vec<usize>], most_work: u128, most_rows: u128) {
        let of_rank = |chunks: &Vec<usize>| {
            let work = chunks.iter().map(|&chunk| self.work[chunk]).sum();
            [work, chunks.iter().map(|&chunk| u128::from(self.rows(chunk))).sum()]
        };
        let mut sums: Vec<[u128; 2]> = dealt.iter().map(of_rank).collect();
        let shared = (1..self.work.len()).filter(|&next| self.segments.share_one(next - 1, next));
        let shared: Vec<usize> = shared.collect();
        for _ in 0..SWEEPS {
            let mut is_changed = false;
            for &next in &shared {
                let two = [next - 1, next];
                let owners = two.map(|chunk| self.ranks.owners[chunk]);
                if owners[0] == owners[1] {
                    continue;
                }
                let mut best = Exchange { change: 0, chunks: two };
                for side in [1, 0] {
                    let (moved, to) = (two[side], owners[1 - side]);
                    let [of_from, of_to] = [owners[side], to].map(|rank| sums[rank]);
                    // neither rank has more than the most before, nor may it after an exchange
                    let work = self.work[moved];
                    let least_work = (of_to[0] + work).saturating_sub(most_work);
                    let most = (most_work + work).saturating_sub(of_from[0]);
                    let of = Move {
                        chunk: moved,
                        to,
                        stays: two[1 - side],
                        least_work,
                        span: most.saturating_sub(least_work),
                        sums: [of_from[1], of_to[1]],
                        most_rows,
                    };
                    self.find_better(&of, &dealt[to], &mut best);
                }
                if best.change < 0 {
                    self.swap(best.chunks[0], best.chunks[1], dealt, &mut sums);
                    is_changed = true;
                }
            }
            if !is_changed {
                break;
            }
        }
        dealt.iter_mut().for_each(|of_rank| of_rank.sort_unstable());
    }

    /// Replaces `best` by the first exchange of the moved chunk with one of `others`, which are on
    /// its new rank, that lowers the cost most, if it does more than `best`.
    fn find_better(&self, of: &Move, others: &[usize], best: &mut Exchange) {
        // few chunks are compared in less time than segments
        let are_few = others.len() <= FEW;
        let allowed = if are_few { self.allowed(of, others) } else { u64::MAX };
        if allowed == 0 {
            return;
        }
        let (moved, from) = (of.chunk, self.ranks.owners[of.chunk]);
        let of_moved = self.change_of_one(moved, of.to, &[]);
        if of_moved >= best.change && self.near_ranks[of.to] & bit(from) == 0 {
            return;
        }
        for others in others.chunks(64) {
            // a bit for each, without a branch that is seldom taken
            let is_near = |other: usize| self.near[other] >> (from % 64) & 1;
            let near = (0..).zip(others).fold(0, |all, (bit, &of)| all | is_near(of) << bit);
            let mut left = allowed & if of_moved < best.change { u64::MAX } else { near };
            while let Some(&other) = others.get(left.trailing_zeros() as usize) {
                let is_near = left & near & left.wrapping_neg() != 0;
                left &= left - 1;
                if !are_few && !self.is_allowed(of, other) {
                    continue;
                }
                let change = if is_near {
                    self.change(moved, other)
                } else {
                    of_moved + self.change_of_one(other, from, &[])
                };
                if change < best.change {
                    *best = Exchange { change, chunks: [moved, other] };
                    left &= if of_moved < change { u64::MAX } else { near };
                }
            }
        }
    }

    /// Returns a bit for each of few chunks, which is 1 if it may be exchanged with a moved one.
    fn allowed(&self, of: &Move, others: &[usize]) -> u64 {
        let is_allowed = |other| u64::from(self.is_allowed(of, other));
        (0..).zip(others).fold(0, |all, (bit, &other)| all | is_allowed(other) << bit)
    }

    /// Returns true if a chunk may be exchanged with a moved one: if no rank exceeds its limits,
    /// and both keep as many rows beyond whole tiles.
    fn is_allowed(&self, of: &Move, other: usize) -> bool {
        // first what is seldom true; less work than the least becomes large
        if self.work[other].wrapping_sub(of.least_work) > of.span || other == of.stays {
            return false;
        }
        let [moved, other] = [of.chunk, other].map(|chunk| self.rows(chunk));
        let [from, to] = of.sums;
        let fits = |sum: u128, got: u64, given: u64| {
            sum + u128::from(got) <= of.most_rows + u128::from(given)
        };
        fits(from, other, moved) && fits(to, moved, other) && moved % TILE_ROWS == other % TILE_ROWS
    }

    /// Returns the change of the cost when the ranks of two chunks exchange them.
    fn change(&self, x: usize, y: usize) -> i64 {
        let [of_x, of_y] = [x, y].map(|chunk| self.segments.of(chunk));
        let [from_x, from_y] = [x, y].map(|chunk| self.ranks.owners[chunk]);
        // both ranks keep a segment that both chunks have
        self.change_of_one(x, from_y, of_y) + self.change_of_one(y, from_x, of_x)
    }

    /// Returns the change of the cost of the segments of a chunk, without `except`, when it moves
    /// to rank `to`.
    fn change_of_one(&self, chunk: usize, to: usize, except: &[usize]) -> i64 {
        let from = self.ranks.owners[chunk];
        let mut change = 0;
        for &segment in self.segments.of(chunk) {
            let [of_from, of_to] = self.ranks.chunks(segment, [from, to]);
            let (is_new, was_last) = (of_to == 0, of_from == 1);
            if is_new != was_last && !except.contains(&segment) {
                // all rows are fewer than 2⁵⁹
                let rows = self.segments.segments[segment].rows.cast_signed();
                change += if is_new { rows } else { -rows };
            }
        }
        change
    }

    fn swap(&mut self, x: usize, y: usize, dealt: &mut [Vec<usize>], sums: &mut [[u128; 2]]) {
        let (a, b) = (self.ranks.owners[x], self.ranks.owners[y]);
        for (chunk, from, to) in [(x, a, b), (y, b, a)] {
            self.ranks.move_to(to, chunk, self.segments.of(chunk));
            let own = [self.work[chunk], self.rows(chunk).into()];
            for (of, own) in own.into_iter().enumerate() {
                sums[from][of] -= own;
                sums[to][of] += own;
            }
        }
        // first the removals, so that no list gets longer
        dealt[a].retain(|&own| own != x);
        dealt[b].retain(|&own| own != y);
        dealt[b].push(x);
        dealt[a].push(y);
        for chunk in [x, y] {
            // the chunk is between those of each of its segments, so that these are consecutive
            let segments = self.segments.of(chunk).iter();
            let near = segments.filter(|&&segment| !self.segments.is_long(segment));
            let near = near.map(|&segment| &self.segments.segments[segment].chunks);
            let all =
                near.fold(chunk..chunk, |all, of| all.start.min(of.start)..all.end.max(of.end));
            all.for_each(|chunk| self.update_near(chunk));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

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

    /// Returns the cost as it is defined.
    fn cost(chunks: &[Vec<(i64, u64)>], owners: &[usize]) -> i64 {
        let of_segment = |segment: i64| {
            let own = chunks.iter().zip(owners).flat_map(|(chunk, &owner)| {
                chunk.iter().filter(|of| of.0 == segment).map(move |of| (owner, of.1))
            });
            let rows: u64 = own.clone().map(|of| of.1).sum();
            let ranks: BTreeSet<usize> = own.map(|of| of.0).collect();
            rows as i64 * (ranks.len() as i64 - 1).max(0)
        };
        (0..8).map(of_segment).sum()
    }

    /// Makes the exchanges as they are defined, without any shortcut.
    fn plain_exchanges(
        chunks: &[Vec<(i64, u64)>],
        work: &[u128],
        dealt: &mut [Vec<usize>],
        most_work: u128,
    ) {
        let sum = |of: &[usize]| of.iter().map(|&chunk| work[chunk]).sum::<u128>();
        let mut owners = vec![0; chunks.len()];
        for (rank, of_rank) in dealt.iter().enumerate() {
            of_rank.iter().for_each(|&chunk| owners[chunk] = rank);
        }
        for next in (0..SWEEPS).flat_map(|_| 1..chunks.len()) {
            let share = |of: &(i64, u64)| chunks[next].iter().any(|other| other.0 == of.0);
            if owners[next - 1] == owners[next] || !chunks[next - 1].iter().any(share) {
                continue;
            }
            let mut best = (cost(chunks, &owners), None);
            for (moved, stays) in [(next, next - 1), (next - 1, next)] {
                for &other in dealt[owners[stays]].iter().filter(|&&other| other != stays) {
                    let mut changed = owners.clone();
                    changed.swap(moved, other);
                    let of_rank = |rank| {
                        let own = (0..chunks.len()).filter(|&chunk| changed[chunk] == rank);
                        sum(&own.collect::<Vec<_>>())
                    };
                    let fits = [moved, other].iter().all(|&of| of_rank(owners[of]) <= most_work);
                    let after = cost(chunks, &changed);
                    if fits && after < best.0 {
                        best = (after, Some([moved, other]));
                    }
                }
            }
            if let Some([x, y]) = best.1 {
                for (chunk, from, to) in [(x, owners[x], owners[y]), (y, owners[y], owners[x])] {
                    dealt[from].retain(|&own| own != chunk);
                    dealt[to].push(chunk);
                }
                owners.swap(x, y);
            }
        }
        dealt.iter_mut().for_each(|of_rank| of_rank.sort_unstable());
    }

    proptest! {
        #[test]
        fn exchanges_are_those_of_the_definition(
            of_rows in prop::collection::vec(0i64..4, 300),
            are_sorted in any::<bool>(),
            period in prop::sample::select(&[80, 300][..]),
            work in prop::collection::vec(1u128..9, 30),
            order in Just((0..30usize).collect::<Vec<_>>()).prop_shuffle(),
            ranks in 2usize..8,
            more in 0u128..9,
        ) {
            // in order, or with rows of few or of all chunks
            let mut of_rows: Vec<i64> =
                (0..).zip(of_rows).map(|(row, id): (i64, i64)| id + row / period).collect();
            if are_sorted {
                of_rows.sort_unstable();
            }
            let chunks: Vec<Vec<(i64, u64)>> = of_rows
                .chunks(10)
                .map(|ids| ids.chunk_by(|a, b| a == b).map(|of| (of[0], of.len() as u64)).collect())
                .collect();
            let dealt: Vec<Vec<usize>> =
                (0..ranks).map(|rank| order.iter().copied().skip(rank).step_by(ranks).collect())
                    .collect();
            let sum = |of: &Vec<usize>| of.iter().map(|&chunk| work[chunk]).sum::<u128>();
            let most = dealt.iter().map(sum).max().unwrap() + more;
            let mut want = dealt.clone();
            plain_exchanges(&chunks, &work, &mut want, most);
            let mut found = dealt.clone();
            let ids = ids(&chunks.iter().map(Vec::as_slice).collect::<Vec<_>>());
            if let Some(mut exchange) = SegmentExchange::new(&ids, &edges(30), &work, &dealt) {
                exchange.run(&mut found, most, 300);
            }
            prop_assert_eq!(found, want);
        }
    }

    /// The numbers of chunks of each rank, against a count over the chunks.
    #[test]
    fn ranks_of_a_segment_have_their_chunks() {
        // one document over 12 chunks, and another over the last 4 of them
        let mut chunks = vec![vec![(0, 10)]; 8];
        chunks.extend((0..4).map(|rows| vec![(0, 9 - rows), (1, 1 + rows)]));
        let ids = ids(&chunks.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let work = [1u128; 12];
        let mut dealt = vec![vec![3, 11], vec![2, 7], vec![0, 10], vec![4, 6], vec![1, 8, 5, 9]];
        let edges = edges(12);
        let mut exchange = SegmentExchange::new(&ids, &edges, &work, &dealt).unwrap();
        let mut sums = vec![[10; 2]; 5];
        let has = |chunk: usize, segment| chunks[chunk].iter().any(|of| of.0 == segment);
        for (x, y) in [(11, 0), (9, 11), (8, 3), (0, 9), (10, 2), (2, 11), (8, 10)] {
            exchange.swap(x, y, &mut dealt, &mut sums);
            for segment in 0..2 {
                let mut mask = 0;
                for (rank, of_rank) in dealt.iter().enumerate() {
                    let own = of_rank.iter().filter(|&&chunk| has(chunk, segment as i64)).count();
                    assert_eq!(exchange.ranks.chunks(segment, [rank, 0])[0], own, "{dealt:?}");
                    mask |= if own > 0 { bit(rank) } else { 0 };
                }
                assert_eq!(exchange.ranks.mask(segment), mask);
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
