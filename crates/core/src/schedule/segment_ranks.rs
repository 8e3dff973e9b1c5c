//! Ranks that have chunks of a segment, and how many each has, while chunks are exchanged.

/// Ranks of a segment that are compared one by one rather than by a binary search.
const FEW: usize = 8;

/// Numbers of chunks of each segment that each rank has.
pub(super) struct SegmentRanks {
    segments: Vec<RanksOfSegment>,
    /// `(rank, chunks)` of all segments, in as many places for each as it has chunks.
    places: Vec<(usize, usize)>,
}

/// Ranks of a segment.
#[derive(Clone)]
struct RanksOfSegment {
    /// First place.
    first: usize,
    /// Number of ranks, whose places ascend by rank. Ranks without chunks are absent.
    count: usize,
    /// Bits `rank % 64` of the ranks.
    mask: u64,
}

impl SegmentRanks {
    /// Prepares segments of as many chunks each, which no rank has.
    pub(super) fn new(chunks: &[usize]) -> Self {
        let first = chunks.iter().scan(0, |first, &of| Some(std::mem::replace(first, *first + of)));
        Self {
            segments: first.map(|first| RanksOfSegment { first, count: 0, mask: 0 }).collect(),
            places: vec![(0, 0); chunks.iter().sum()],
        }
    }

    /// Returns the ranks of a segment, and the number of chunks of each.
    pub(super) fn of(&self, segment: usize) -> &[(usize, usize)] {
        let RanksOfSegment { first, count, .. } = self.segments[segment];
        &self.places[first..first + count]
    }

    /// Returns the bits `rank % 64` of the ranks of a segment.
    pub(super) fn mask(&self, segment: usize) -> u64 {
        self.segments[segment].mask
    }

    /// Returns the number of chunks of a segment that a rank has: O(log ranks), because a long
    /// document is on all ranks.
    pub(super) fn chunks(&self, segment: usize, rank: usize) -> usize {
        if self.segments[segment].mask & bit(rank) == 0 {
            return 0;
        }
        let ranks = self.of(segment);
        if ranks.len() <= FEW {
            return ranks.iter().find(|of| of.0 == rank).map_or(0, |of| of.1);
        }
        ranks.binary_search_by_key(&rank, |of| of.0).map_or(0, |index| ranks[index].1)
    }

    pub(super) fn add(&mut self, segment: usize, rank: usize) {
        let found = self.of(segment).binary_search_by_key(&rank, |of| of.0);
        let of = &mut self.segments[segment];
        match found {
            Ok(index) => self.places[of.first + index].1 += 1,
            Err(index) => {
                // there is a place: every rank has a chunk of the segment
                let [place, end] = [index, of.count].map(|index| of.first + index);
                self.places.copy_within(place..end, place + 1);
                self.places[place] = (rank, 1);
                of.count += 1;
                of.mask |= bit(rank);
            }
        }
    }

    pub(super) fn remove(&mut self, segment: usize, rank: usize) {
        let found = self.of(segment).binary_search_by_key(&rank, |of| of.0);
        let Ok(index) = found else { return };
        let of = &mut self.segments[segment];
        let [place, end] = [index, of.count].map(|index| of.first + index);
        self.places[place].1 -= 1;
        if self.places[place].1 == 0 {
            self.places.copy_within(place + 1..end, place);
            of.count -= 1;
            let ranks = &self.places[of.first..end - 1];
            of.mask = ranks.iter().fold(0, |mask, of| mask | bit(of.0));
        }
    }
}

/// Returns the bit of a rank in a mask.
pub(super) const fn bit(rank: usize) -> u64 {
    1 << (rank % 64)
}
