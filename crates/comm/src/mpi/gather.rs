//! How the parts of a gather come to all ranks: in ⌈log₂ ranks⌉ rounds of one message a rank, instead of a message from each to each.
//!
//! ```text
//! reach = 1, 2, 4, … < ranks:  once rank r has the parts of r, r + 1, …, r + reach − 1,
//!                              it sends the first min(reach, ranks − reach) of them to rank r − reach            (all mod ranks)
//! ```
//! So every part comes to every other rank exactly once. Nobody waits in a round: what is there is sent on when it comes, so that a rank that
//! is late holds up those that need its part, and a rank that is lost can be waited for up to a deadline, like any other message.
//!
//! # Source
//! Bruck et al. 1997 (all-to-all communications in multiport systems), the concatenation.

use super::{Mpi, frame::Frame, pump::Label};
use annulus_core::Result;

/// One gather, as one rank sees it.
#[derive(Debug)]
pub(super) struct Gather {
    /// By rank, what has come.
    parts: Vec<Option<Vec<u8>>>,
    /// Ranks whose part has not come.
    lacking: usize,
    /// Frames of this rank's that have not left.
    pub(super) unsent: usize,
    /// How many gathers this rank had begun before, once it has begun this one.
    pub(super) number: Option<u64>,
    /// The next message goes this far.
    reach: usize,
}

impl Gather {
    pub(super) fn new(ranks: usize) -> Self {
        Self { parts: vec![None; ranks], lacking: ranks, unsent: 0, number: None, reach: 1 }
    }

    /// Stores the part of `rank`; false if there is no such rank, or its part is here already.
    pub(super) fn put(&mut self, rank: usize, part: Vec<u8>) -> bool {
        let Some(place) = self.parts.get_mut(rank).filter(|place| place.is_none()) else {
            return false;
        };
        *place = Some(part);
        self.lacking -= 1;
        true
    }

    /// Returns true if the part of `rank` is here.
    pub(super) fn has(&self, rank: usize) -> bool {
        self.parts.get(rank).is_some_and(Option::is_some)
    }

    /// All parts that are here, in the order of ranks.
    pub(super) fn into_parts(self) -> Vec<Vec<u8>> {
        self.parts.into_iter().flatten().collect()
    }

    /// Whether this rank has begun it and has every part.
    pub(super) const fn is_whole(&self) -> bool {
        self.number.is_some() && self.lacking == 0
    }

    /// Whether this rank has begun it and lacks a part.
    pub(super) const fn is_waited_for(&self) -> bool {
        self.number.is_some() && !self.is_whole()
    }

    /// Whether others still need this rank for it.
    pub(super) fn owes(&self) -> bool {
        self.number.is_some() && self.reach < self.parts.len()
    }

    /// The next message of `rank`, once it can be sent: to whom, and whose parts.
    pub(super) fn next(&mut self, rank: usize) -> Option<(usize, Vec<usize>)> {
        let (ranks, reach) = (self.parts.len(), self.reach);
        let of = |places: usize| (0..places).map(|place| (rank + place) % ranks);
        if reach >= ranks || of(reach).any(|rank| self.parts[rank].is_none()) {
            return None;
        }
        self.reach *= 2;
        Some(((rank + ranks - reach) % ranks, of(reach.min(ranks - reach)).collect()))
    }
}

/// Parts share a frame up to about this many bytes.
const FRAME_BYTES: usize = 1 << 20;

impl Mpi {
    /// Sends on what has come of a gather that this rank has begun, and whose turn it is.
    pub(super) fn spread(&mut self, round: u64) -> Result<()> {
        let rank = self.rank;
        while let Some((peer, of)) = self.gather(round).next(rank) {
            // whoever has left needs nothing any more
            if self.peers.has_left(peer) {
                continue;
            }
            let mut of = of.into_iter().peekable();
            while of.peek().is_some() {
                let (mut parts, mut bytes) = (Vec::new(), 0);
                while let Some(rank) = of.next_if(|_| bytes < FRAME_BYTES) {
                    let part = self.gather(round).parts[rank].clone().unwrap_or_default();
                    bytes += part.len();
                    parts.push((rank as u64, part));
                }
                self.gather(round).unsent += 1;
                self.say(
                    peer,
                    &Frame::Offer { round, parts }.encode()?,
                    Label::Offered { peer, round },
                )?;
            }
        }
        Ok(())
    }

    /// The gather of this number.
    pub(super) fn gather(&mut self, round: u64) -> &mut Gather {
        let ranks = self.ranks;
        self.gathers.entry(round).or_insert_with(|| Gather::new(ranks))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_part_comes_to_every_rank_once(ranks in 1usize..70, order in prop::collection::vec(any::<prop::sample::Index>(), 1..50)) {
            let mut gathers: Vec<Gather> = (0..ranks).map(|_| Gather::new(ranks)).collect();
            let (mut sent, mut late, mut turn) = (0, Vec::new(), 0);
            for (rank, gather) in gathers.iter_mut().enumerate() {
                prop_assert!(gather.put(rank, vec![rank as u8]));
                gather.number = Some(0);
                while let Some(message) = gather.next(rank) {
                    late.push(message);
                }
            }
            // in any order
            while !late.is_empty() {
                let (to, of) = late.swap_remove(order[turn % order.len()].index(late.len()));
                (turn, sent) = (turn + 1, sent + 1);
                for from in of {
                    prop_assert!(gathers[to].put(from, vec![from as u8]));
                    prop_assert!(!gathers[to].put(from, Vec::new()));
                }
                let lacking = gathers[to].parts.iter().filter(|part| part.is_none()).count();
                prop_assert_eq!(gathers[to].lacking, lacking);
                while let Some(message) = gathers[to].next(to) {
                    late.push(message);
                }
            }
            prop_assert!(gathers.iter().all(|gather| gather.is_whole() && !gather.owes()));
            prop_assert!(!gathers[0].put(ranks, Vec::new()));
            prop_assert_eq!(sent, ranks * ranks.next_power_of_two().ilog2() as usize);
        }
    }

    #[test]
    fn a_rank_that_has_not_begun_sends_nothing() {
        let mut gather = Gather::new(4);
        assert!(gather.put(2, Vec::new()));
        assert_eq!(gather.next(1), None);
        assert!(!gather.owes() && !gather.is_whole() && !gather.is_waited_for());
        assert!(gather.put(1, Vec::new()));
        gather.number = Some(3);
        assert!(gather.owes());
        assert_eq!(
            [gather.next(1), gather.next(1), gather.next(1)],
            [Some((0, vec![1])), Some((3, vec![1, 2])), None]
        );
        assert!(!gather.owes() && !gather.is_whole() && gather.is_waited_for());
    }
}
