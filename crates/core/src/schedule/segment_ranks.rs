//! Ranks that have chunks of a segment, and how many each has, while chunks are exchanged.
//!
//! Of a segment of few consecutive chunks, the ranks of these chunks are read. Of the others the
//! number of chunks of each rank is kept.

use std::ops::Range;

use super::chunk_segments::{ChunkSegments, Segment};

/// Chunks of a segment whose ranks are read, and ranks of a segment that are compared one by one
/// rather than by a binary search, at most.
const FEW: usize = 8;

/// Ranks of chunks, and numbers of chunks of each segment that each rank has.
pub(super) struct SegmentRanks {
    /// Rank of each chunk.
    pub(super) owners: Vec<usize>,
    segments: Vec<RanksOfSegment>,
    /// `(rank, chunks)` of all segments of many chunks, in as many places for each as it has
    /// chunks.
    places: Vec<(usize, usize)>,
}

/// Ranks of a segment.
enum RanksOfSegment {
    /// Those of these chunks.
    Few(Range<usize>),
    /// Those in these places.
    Many(Places),
}

/// Ranks of a segment of many chunks.
struct Places {
    /// First place.
    first: usize,
    /// Number of ranks, whose places ascend by rank. Ranks without chunks are absent.
    count: usize,
    /// Bits `rank % 64` of the ranks.
    mask: u64,
}

impl SegmentRanks {
    /// Counts the chunks of the ranks that have `dealt[rank]`, which are `chunks` together.
    pub(super) fn new(segments: &ChunkSegments, dealt: &[Vec<usize>], chunks: usize) -> Self {
        let mut places = 0;
        let ranks_of = |segment: &Segment| {
            if segment.uses <= FEW && segment.uses == segment.chunks.len() {
                return RanksOfSegment::Few(segment.chunks.clone());
            }
            let first = places;
            places += segment.uses;
            RanksOfSegment::Many(Places { first, count: 0, mask: 0 })
        };
        let of_segments: Vec<RanksOfSegment> = segments.segments.iter().map(ranks_of).collect();
        let mut ranks =
            Self { owners: vec![0; chunks], segments: of_segments, places: vec![(0, 0); places] };
        for (rank, of_rank) in dealt.iter().enumerate() {
            for &chunk in of_rank {
                ranks.owners[chunk] = rank;
                segments.of(chunk).iter().for_each(|&segment| ranks.add(segment, rank));
            }
        }
        ranks
    }

    /// Returns the bits `rank % 64` of the ranks of a segment.
    pub(super) fn mask(&self, segment: usize) -> u64 {
        match &self.segments[segment] {
            RanksOfSegment::Few(chunks) => match self.owners[chunks.clone()] {
                // the common case
                [first, second] => bit(first) | bit(second),
                ref all => all.iter().fold(0, |mask, &rank| mask | bit(rank)),
            },
            RanksOfSegment::Many(of) => of.mask,
        }
    }

    /// Returns the numbers of chunks of a segment that two ranks have: O(log ranks), because a long
    /// document is on all ranks.
    pub(super) fn chunks(&self, segment: usize, ranks: [usize; 2]) -> [usize; 2] {
        match &self.segments[segment] {
            RanksOfSegment::Few(chunks) => {
                self.owners[chunks.clone()].iter().fold([0; 2], |[first, second], &owner| {
                    let is = |rank| usize::from(owner == rank);
                    [first + is(ranks[0]), second + is(ranks[1])]
                })
            }
            RanksOfSegment::Many(of) => ranks.map(|rank| self.counted(of, rank)),
        }
    }

    /// Returns the number of chunks of a rank among these places.
    fn counted(&self, of: &Places, rank: usize) -> usize {
        if of.mask & bit(rank) == 0 {
            return 0;
        }
        let ranks = &self.places[of.first..of.first + of.count];
        if ranks.len() <= FEW {
            return ranks.iter().find(|of| of.0 == rank).map_or(0, |of| of.1);
        }
        ranks.binary_search_by_key(&rank, |of| of.0).map_or(0, |index| ranks[index].1)
    }

    /// Moves a chunk with these segments to another rank.
    pub(super) fn move_to(&mut self, rank: usize, chunk: usize, segments: &[usize]) {
        let from = std::mem::replace(&mut self.owners[chunk], rank);
        for &segment in segments {
            self.remove(segment, from);
            self.add(segment, rank);
        }
    }

    /// Counts one more chunk of a segment of many chunks.
    fn add(&mut self, segment: usize, rank: usize) {
        let RanksOfSegment::Many(of) = &mut self.segments[segment] else { return };
        let end = of.first + of.count;
        let ranks = &mut self.places[of.first..end];
        match ranks.binary_search_by_key(&rank, |of| of.0) {
            Ok(index) => ranks[index].1 += 1,
            Err(index) => {
                // there is a place: every rank has a chunk of the segment
                let place = of.first + index;
                self.places.copy_within(place..end, place + 1);
                self.places[place] = (rank, 1);
                of.count += 1;
                of.mask |= bit(rank);
            }
        }
    }

    /// Counts one chunk less of a segment of many chunks.
    fn remove(&mut self, segment: usize, rank: usize) {
        let RanksOfSegment::Many(of) = &mut self.segments[segment] else { return };
        let end = of.first + of.count;
        let found = self.places[of.first..end].binary_search_by_key(&rank, |of| of.0);
        let Ok(index) = found else { return };
        let place = of.first + index;
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
