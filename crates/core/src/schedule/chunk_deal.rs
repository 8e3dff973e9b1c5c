//! Chunks of rows dealt to ranks, as many to each, and exchanges of whole chunks.
//!
//! ```text
//! deal       in rounds of one chunk per rank, most pairs first:
//!                the chunk with the most pairs to the rank with the fewest so far
//! exchange   while the rank with the most pairs has more than the target:
//!                exchange one of its chunks with one of a rank with few pairs, such that the
//!                larger of the two becomes least
//! ```

use std::{cmp::Reverse, ops::Range};

/// Pairs of chunks that are compared for one exchange, about: it bounds the time with many chunks
/// per rank, where few ranks suffice because their chunks differ more.
const COMPARED: usize = 4096;

/// Units of the mean in which the pairs of ranks are compared from the second round on. Ranks of
/// about the same pairs take their chunks in a scattered order: in an ascending one, chunks of a
/// long document would be distributed so regularly that no exchange of two of them fits.
const UNITS: u128 = 64;

/// Consecutive rows of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) rows: Range<u64>,
    /// Visible pairs of the queries.
    pub(super) work: u128,
}

/// Pairs of a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Pairs above which a rank gives rows away.
    pub(super) balanced: u128,
    /// Pairs that a rank has at most when it has received rows.
    pub(super) target: u128,
    pub(super) mean: u128,
}

/// Chunks of each rank, and their pairs.
pub(super) struct ChunkDeal {
    /// Indices of the chunks.
    pub(super) ranks: Vec<Vec<usize>>,
    /// Pairs of each rank.
    pub(super) sums: Vec<u128>,
}

/// Indices of a chunk of the rank with the most pairs and of one of another rank, in their lists.
struct Exchange {
    light: usize,
    chunks: [usize; 2],
    /// Pairs that it moves.
    moved: u128,
}

impl ChunkDeal {
    /// Deals chunks with `work` pairs each to ranks that have `sums` pairs already.
    pub(super) fn new(work: &[u128], sums: Vec<u128>) -> Self {
        let ranks = sums.len().max(1);
        let mut order: Vec<usize> = (0..work.len()).collect();
        order.sort_unstable_by_key(|&chunk| (Reverse(work[chunk]), chunk));
        let per_rank = work.len().div_ceil(ranks);
        let lists = (0..sums.len()).map(|_| Vec::with_capacity(per_rank)).collect();
        let mut deal = Self { ranks: lists, sums };
        let mut by_work: Vec<usize> = (0..deal.sums.len()).collect();
        // the mean of all ranks is some of these units
        let unit = (deal.sums.iter().chain(work).sum::<u128>() / (UNITS * ranks as u128)).max(1);
        for (number, round) in order.chunks(ranks).enumerate() {
            if number == 0 {
                by_work.sort_unstable_by_key(|&rank| (deal.sums[rank], rank));
            } else {
                by_work.sort_unstable_by_key(|&rank| (deal.sums[rank] / unit, scattered(rank)));
            }
            for (&rank, &chunk) in by_work.iter().zip(round) {
                deal.ranks[rank].push(chunk);
                deal.sums[rank] += work[chunk];
            }
        }
        deal
    }

    /// Exchanges chunks until no rank has more than the target, or no exchange helps the rank with
    /// the most.
    pub(super) fn exchange(&mut self, work: &[u128], limits: Limits) {
        let mut by_work: Vec<usize> = (0..self.sums.len()).collect();
        by_work.sort_unstable_by_key(|&rank| (self.sums[rank], rank));
        // each exchange lowers the sum of squares; few are needed after the rounds
        for _ in 0..4 * self.sums.len() {
            let Some(&heavy) = by_work.last() else { break };
            if self.sums[heavy] <= limits.target {
                break;
            }
            let Some(exchange) = self.find(work, heavy, &by_work, limits) else { break };
            let Exchange { light, chunks: [i, j], moved } = exchange;
            let (a, b) = (self.ranks[heavy][i], self.ranks[light][j]);
            self.ranks[heavy][i] = b;
            self.ranks[light][j] = a;
            self.sums[heavy] -= moved;
            self.sums[light] += moved;
            by_work.retain(|&rank| rank != heavy && rank != light);
            for rank in [heavy, light] {
                let key = (self.sums[rank], rank);
                let index = by_work.partition_point(|&other| (self.sums[other], other) < key);
                by_work.insert(index, rank);
            }
        }
    }

    /// Finds the exchange after which the larger of both ranks is least: of the first ranks of
    /// `by_work` that suffice for the target, else of all that are compared.
    fn find(
        &self,
        work: &[u128],
        heavy: usize,
        by_work: &[usize],
        limits: Limits,
    ) -> Option<Exchange> {
        let most = self.sums[heavy];
        let per_rank = self.ranks[heavy].len().max(1);
        let lights = COMPARED.div_ceil(per_rank.saturating_mul(per_rank));
        let mut best = None;
        let mut least = most;
        for &light in by_work.iter().take(lights) {
            let fewest = self.sums[light];
            if fewest >= limits.mean || least <= limits.target {
                break;
            }
            for (i, &a) in self.ranks[heavy].iter().enumerate() {
                for (j, &b) in self.ranks[light].iter().enumerate() {
                    let Some(moved) = work[a].checked_sub(work[b]) else { continue };
                    let larger = (most - moved).max(fewest + moved);
                    if larger < least {
                        least = larger;
                        best = Some(Exchange { light, chunks: [i, j], moved });
                    }
                }
            }
        }
        best
    }
}

/// Returns a key by which ranks are in an order without regularity; no two have the same.
const fn scattered(rank: usize) -> u64 {
    // an odd factor: the golden ratio, whose multiples are spread evenly (Fibonacci hashing,
    // Knuth, The Art of Computer Programming, volume 3, section 6.4)
    (rank as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(work: &[u128], ranks: u128) -> Limits {
        let mean = work.iter().sum::<u128>() / ranks;
        Limits { balanced: mean * 102 / 100, target: mean * 101 / 100, mean }
    }

    #[test]
    fn chunks_are_exchanged_until_the_work_is_balanced() {
        // rounds alone give 90 and 70: 50 + 26 + 14 + 0 and 30 + 25 + 15 + 0
        let work = [50, 30, 26, 25, 15, 14, 0, 0];
        let mut deal = ChunkDeal::new(&work, vec![0; 2]);
        assert!(deal.sums.iter().max() > Some(&82), "{:?}", deal.ranks);
        deal.exchange(&work, limits(&work, 2));
        assert!(deal.sums.iter().max() <= Some(&81), "{:?} {:?}", deal.ranks, deal.sums);
        for (chunks, &sum) in deal.ranks.iter().zip(&deal.sums) {
            assert_eq!(chunks.len(), 4);
            assert_eq!(chunks.iter().map(|&chunk| work[chunk]).sum::<u128>(), sum);
        }
    }

    #[test]
    fn ranks_with_pairs_of_their_own_get_fewer() {
        let work = [50, 40, 30, 20];
        let deal = ChunkDeal::new(&work, vec![40, 0]);
        assert_eq!((deal.ranks, deal.sums), (vec![vec![1, 3], vec![0, 2]], vec![100, 80]));
    }
}
