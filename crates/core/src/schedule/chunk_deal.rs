//! Chunks of rows dealt to ranks, as many to each, and exchanges of whole chunks.
//!
//! ```text
//! deal       in rounds of one chunk per rank, most pairs first:
//!                the chunk with the most pairs to the rank with the fewest so far
//! exchange   while the rank with the most pairs has more than the target:
//!                exchange one of its chunks with one of a rank with few pairs, such that the
//!                larger of the two becomes least
//! ```
//! The larger of two ranks becomes least if the exchange moves half of their difference. In lists
//! of chunks by their pairs, the chunk of the rank with few pairs that fits best advances with the
//! other rank's chunk, so that two lists are compared in linear time.

use std::{cmp::Reverse, ops::Range};

use crate::index;

/// Pairs of chunks of the ranks that are compared for one exchange, about: with many chunks per
/// rank few ranks suffice, because their chunks differ more.
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

/// An exchange of chunks between the rank with the most pairs and another rank.
struct Exchange {
    light: usize,
    found: Found,
}

/// Indices of a chunk of the rank with the most pairs and of one of another rank, in their lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// Pairs of the rank with more of them after the exchange.
    larger: u128,
    chunks: [usize; 2],
    /// Pairs that it moves.
    moved: u128,
}

impl ChunkDeal {
    /// Deals chunks with `work` pairs each to ranks that have `sums` pairs already.
    pub(super) fn new(work: &[u128], sums: Vec<u128>) -> Self {
        let ranks = sums.len().max(1);
        let order = most_first(work);
        let per_rank = work.len().div_ceil(ranks);
        let lists = (0..sums.len()).map(|_| Vec::with_capacity(per_rank)).collect();
        let mut deal = Self { ranks: lists, sums };
        // the mean of all ranks is some of these units
        let unit = (deal.sums.iter().chain(work).sum::<u128>() / (UNITS * ranks as u128)).max(1);
        // ranks in the order in which those of the same pairs take their chunks
        let mut ties: Vec<usize> = (0..deal.sums.len()).collect();
        for (number, round) in order.chunks(ranks).enumerate() {
            let by_work: Vec<usize> = if number == 0 {
                let mut by_sum = ties.clone();
                by_sum.sort_unstable_by_key(|&rank| (deal.sums[rank], rank));
                by_sum
            } else {
                if number == 1 {
                    ties.sort_unstable_by_key(|&rank| scattered(rank));
                }
                // fewer than 2⁶⁴: all pairs are about as many units as 64 times the ranks
                let units = ties.iter().map(|&rank| divided(deal.sums[rank], unit) as u64);
                sorted_indices(units).iter().map(|&place| ties[place]).collect()
            };
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
        let mut sorted = SortedChunks { of_rank: vec![Vec::new(); self.sums.len()] };
        // each exchange lowers the sum of squares; few are needed after the rounds
        for _ in 0..4 * self.sums.len() {
            let Some(&heavy) = by_work.last() else { break };
            if self.sums[heavy] <= limits.target {
                break;
            }
            let Some(exchange) = self.find(work, heavy, &by_work, limits, &mut sorted) else {
                break;
            };
            let Exchange { light, found: Found { chunks: [i, j], moved, .. } } = exchange;
            let (a, b) = (self.ranks[heavy][i], self.ranks[light][j]);
            self.ranks[heavy][i] = b;
            self.ranks[light][j] = a;
            self.sums[heavy] -= moved;
            self.sums[light] += moved;
            by_work.retain(|&rank| rank != heavy && rank != light);
            for rank in [heavy, light] {
                sorted.of_rank[rank].clear();
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
        sorted: &mut SortedChunks,
    ) -> Option<Exchange> {
        let most = self.sums[heavy];
        let per_rank = self.ranks[heavy].len().max(1);
        let lights = COMPARED.div_ceil(per_rank.saturating_mul(per_rank));
        let mut best: Option<Exchange> = None;
        let mut least = most;
        sorted.sort(heavy, &self.ranks[heavy], work);
        for &light in by_work.iter().take(lights) {
            let fewest = self.sums[light];
            // no exchange is better than one after which both have the same
            if fewest >= limits.mean
                || least <= limits.target
                || (most + fewest).div_ceil(2) >= least
            {
                break;
            }
            sorted.sort(light, &self.ranks[light], work);
            let [of_heavy, of_light] = [heavy, light].map(|rank| &sorted.of_rank[rank][..]);
            let found = best_exchange(of_heavy, of_light, [most, fewest]);
            if let Some(found) = found.filter(|found| found.larger < least) {
                least = found.larger;
                best = Some(Exchange { light, found });
            }
        }
        best
    }
}

/// Chunks of ranks by their pairs.
struct SortedChunks {
    /// Pairs and index of the chunks of each rank, ascending: of equal ones the first. Empty until
    /// they are sorted.
    of_rank: Vec<Vec<(u128, usize)>>,
}

impl SortedChunks {
    /// Sorts the chunks of a rank, if they are not.
    fn sort(&mut self, rank: usize, chunks: &[usize], work: &[u128]) {
        let sorted = &mut self.of_rank[rank];
        if sorted.is_empty() {
            sorted.extend(chunks.iter().enumerate().map(|(index, &chunk)| (work[chunk], index)));
            sorted.sort_unstable();
            sorted.dedup_by_key(|of| of.0);
        }
    }
}

/// Returns the exchange of a chunk of `heavy` with one of `light` that has no more pairs, after
/// which the larger of both ranks is least; of equal ones that of the first chunks. `heavy` and
/// `light` are sorted, and the ranks have `sums` pairs, the first more than the second.
fn best_exchange(
    heavy: &[(u128, usize)],
    light: &[(u128, usize)],
    sums: [u128; 2],
) -> Option<Found> {
    let [most, fewest] = sums;
    let half = most.saturating_sub(fewest) / 2;
    let mut best: Option<Found> = None;
    // the first chunk of `light` with which at most half of the difference is moved
    let mut next = 0;
    for &(of_heavy, i) in heavy {
        while next < light.len() && light[next].0 + half < of_heavy {
            next += 1;
        }
        for &(of_light, j) in &light[next.saturating_sub(1)..light.len().min(next + 1)] {
            let Some(moved) = of_heavy.checked_sub(of_light) else { continue };
            let larger = (most - moved).max(fewest + moved);
            let is_better = |than: &Found| (larger, [i, j]) < (than.larger, than.chunks);
            if best.as_ref().is_none_or(is_better) {
                best = Some(Found { larger, chunks: [i, j], moved });
            }
        }
    }
    best
}

/// Returns the indices of `work`, those with the most first, of equal ones the first.
pub(super) fn most_first(work: &[u128]) -> Vec<usize> {
    let most = u128::from(u64::MAX);
    if work.iter().any(|&of| of > most) {
        let mut order: Vec<usize> = (0..work.len()).collect();
        order.sort_unstable_by_key(|&index| (Reverse(work[index]), index));
        return order;
    }
    let most = work.iter().copied().max().unwrap_or(0);
    sorted_indices(work.iter().map(|&of| (most - of) as u64))
}

/// Returns the indices of keys in the order of the keys, of equal ones the first.
pub(super) fn sorted_indices(keys: impl ExactSizeIterator<Item = u64> + Clone) -> Vec<usize> {
    // one number for key and index, because it is compared in less time than two
    let bits = usize::BITS - keys.len().leading_zeros();
    if keys.clone().fold(0, |all, key| all | key).leading_zeros() >= bits {
        let mut order: Vec<u64> = (0..).zip(keys).map(|(index, key)| key << bits | index).collect();
        order.sort_unstable();
        return order.iter().map(|&both| index(both & ((1 << bits) - 1))).collect();
    }
    let both = |(index, key): (u128, u64)| u128::from(key) << 64 | index;
    let mut order: Vec<u128> = (0..).zip(keys).map(both).collect();
    order.sort_unstable();
    order.iter().map(|&both| index(both as u64)).collect()
}

/// Returns `sum / unit`, rounded down.
pub(super) fn divided(sum: u128, unit: u128) -> u128 {
    // a division of 128 bits takes much longer than one of 64 bits
    match (u64::try_from(sum), u64::try_from(unit)) {
        (Ok(sum), Ok(unit)) => (sum / unit).into(),
        _ => sum / unit,
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
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn the_best_exchange_is_that_of_a_comparison_of_all_chunks(
            heavy in prop::collection::vec(0u128..12, 1..9),
            light in prop::collection::vec(0u128..12, 0..9),
            more in 0u128..30,
        ) {
            let sums = [20 + heavy.iter().sum::<u128>() + more, heavy.iter().sum()];
            let mut want: Option<Found> = None;
            for (i, a) in heavy.iter().enumerate() {
                for (j, b) in light.iter().enumerate() {
                    let Some(moved) = a.checked_sub(*b) else { continue };
                    let larger = (sums[0] - moved).max(sums[1] + moved);
                    if want.is_none_or(|want| larger < want.larger) {
                        want = Some(Found { larger, chunks: [i, j], moved });
                    }
                }
            }
            let mut sorted = SortedChunks { of_rank: vec![Vec::new(); 2] };
            for (rank, work) in [&heavy, &light].into_iter().enumerate() {
                sorted.sort(rank, &(0..work.len()).collect::<Vec<_>>(), work);
            }
            let found = best_exchange(&sorted.of_rank[0], &sorted.of_rank[1], sums);
            prop_assert_eq!(found, want);
        }
    }

    proptest! {
        #[test]
        fn indices_are_in_the_order_of_keys(
            keys in prop::collection::vec(0u64..9, 0..40),
            shift in prop::sample::select(&[0, 30, 58, 60][..]),
        ) {
            // the largest keys leave no bits for an index
            let keys: Vec<u64> = keys.iter().map(|key| key << shift).collect();
            let mut want: Vec<usize> = (0..keys.len()).collect();
            want.sort_by_key(|&index| keys[index]);
            prop_assert_eq!(sorted_indices(keys.iter().copied()), want);
            let work: Vec<u128> = keys.iter().map(|&key| u128::from(key) << shift).collect();
            let mut want: Vec<usize> = (0..work.len()).collect();
            want.sort_by_key(|&index| Reverse(work[index]));
            prop_assert_eq!(most_first(&work), want);
        }
    }

    #[test]
    fn ranks_with_pairs_of_their_own_get_fewer() {
        let work = [50, 40, 30, 20];
        let deal = ChunkDeal::new(&work, vec![40, 0]);
        assert_eq!((deal.ranks, deal.sums), (vec![vec![1, 3], vec![0, 2]], vec![100, 80]));
    }
}
