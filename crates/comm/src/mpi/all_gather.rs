//! All-gathers in ⌈log₂ ranks⌉ rounds of one message per rank, instead of a message to every rank.
//!
//! ```text
//! for reach = 1, 2, 4, … < ranks:                                              (ranks mod `ranks`)
//!   once rank r has the parts of r, r + 1, …, r + reach − 1:
//!     send the first min(reach, ranks − reach) of them to rank r − reach
//! ```
//! So every part reaches every other rank exactly once. No rank waits in a round: it forwards parts
//! as they arrive. A late rank therefore delays only those that need its part, and the wait for a
//! lost rank ends at the deadline, like that for any other message.
//!
//! Ranks that agree contribute equal parts. A message contains a run of equal parts once, so an
//! agreement of thousands of ranks sends ⌈log₂ ranks⌉ messages of the length of one or two parts
//! per rank, as an all-reduce would, and a rank that differs adds its part alone.
//!
//! # Source
//! Bruck et al. 1997, Efficient algorithms for all-to-all communications in multiport
//! message-passing systems: the concatenation.

use std::sync::Arc;

use super::frame::PartRun;

/// State of one all-gather on this rank.
#[derive(Debug)]
pub(super) struct TreeAllGather {
    /// Parts that have arrived, by rank. Equal neighbours share their bytes.
    parts: Vec<Option<Arc<[u8]>>>,
    /// Number of ranks whose part has not arrived.
    missing: usize,
    /// Number of frames from this rank that are still being sent.
    pub(super) unsent: usize,
    /// Number of all-gathers that this rank had started before this one; `None` until it starts it.
    pub(super) number: Option<u64>,
    /// Distance to the receiver of the next message.
    reach: usize,
}

/// The next message of a rank in an all-gather.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GatherMessage {
    pub(super) receiver: usize,
    /// Ranks whose parts it contains.
    pub(super) ranks: Vec<usize>,
}

impl TreeAllGather {
    pub(super) fn new(ranks: usize) -> Self {
        Self { parts: vec![None; ranks], missing: ranks, unsent: 0, number: None, reach: 1 }
    }

    /// Stores the part of `rank`. Returns false if there is no such rank or its part is present.
    pub(super) fn put(&mut self, rank: usize, bytes: &[u8]) -> bool {
        self.put_run(&PartRun { first: rank as u64, ranks: 1, bytes: bytes.into() })
    }

    /// Stores the equal parts of a run of ranks. Returns false, and stores none, if there are no
    /// such ranks or a part is present.
    pub(super) fn put_run(&mut self, PartRun { first, ranks, bytes }: &PartRun) -> bool {
        let end = first.checked_add(*ranks).and_then(|end| usize::try_from(end).ok());
        let (Ok(first), Some(end)) = (usize::try_from(*first), end) else { return false };
        let Some(run) = self.parts.get(first..end).filter(|run| !run.is_empty()) else {
            return false;
        };
        if run.iter().any(Option::is_some) {
            return false;
        }
        // shared with the parts beside it, so that later runs are found by their addresses
        let beside = [first.checked_sub(1), Some(end)].into_iter().flatten();
        let mut beside = beside.filter_map(|rank| self.parts.get(rank)?.as_ref());
        let shared = beside.find(|part| ***part == **bytes).unwrap_or(bytes).clone();
        self.missing -= end - first;
        self.parts[first..end].fill(Some(shared));
        true
    }

    /// Returns the parts of `ranks`, which are present, as runs of equal parts.
    pub(super) fn runs(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<PartRun> {
        let mut runs: Vec<PartRun> = Vec::new();
        for rank in ranks {
            let Some(Some(part)) = self.parts.get(rank) else { continue };
            let continues = |run: &PartRun| {
                run.first + run.ranks == rank as u64
                    && (Arc::ptr_eq(&run.bytes, part) || run.bytes == *part)
            };
            match runs.last_mut().filter(|run| continues(run)) {
                Some(run) => run.ranks += 1,
                None => {
                    runs.push(PartRun { first: rank as u64, ranks: 1, bytes: Arc::clone(part) });
                }
            }
        }
        runs
    }

    /// Returns true if the part of `rank` is present.
    pub(super) fn has(&self, rank: usize) -> bool {
        self.parts.get(rank).is_some_and(Option::is_some)
    }

    /// Returns all parts that are present, in the order of ranks.
    pub(super) fn into_parts(self) -> Vec<Vec<u8>> {
        self.parts.into_iter().flatten().map(|part| part.to_vec()).collect()
    }

    /// Returns true if this rank has started it and all parts are present.
    pub(super) const fn is_complete(&self) -> bool {
        self.number.is_some() && self.missing == 0
    }

    /// Returns true if this rank has started it and a part is missing.
    pub(super) const fn is_incomplete(&self) -> bool {
        self.number.is_some() && self.missing > 0
    }

    /// Returns true if this rank has started it and has messages left to send.
    pub(super) fn has_messages_left(&self) -> bool {
        self.number.is_some() && self.reach < self.parts.len()
    }

    /// Returns the next message of `rank`, once all of its parts are present.
    pub(super) fn next(&mut self, rank: usize) -> Option<GatherMessage> {
        let ranks = self.parts.len();
        let reach = self.reach;
        let first = |count: usize| (0..count).map(|distance| (rank + distance) % ranks);
        if reach >= ranks || first(reach).any(|rank| self.parts[rank].is_none()) {
            return None;
        }
        self.reach *= 2;
        Some(GatherMessage {
            receiver: (rank + ranks - reach) % ranks,
            ranks: first(reach.min(ranks - reach)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_part_reaches_every_rank_once(
            ranks in 1usize..70,
            order in prop::collection::vec(any::<prop::sample::Index>(), 1..50),
        ) {
            let mut gathers: Vec<TreeAllGather> = (0..ranks).map(|_| TreeAllGather::new(ranks)).collect();
            let mut in_flight = Vec::new();
            for (rank, gather) in gathers.iter_mut().enumerate() {
                prop_assert!(gather.put(rank, &[rank as u8]));
                gather.number = Some(0);
                while let Some(message) = gather.next(rank) {
                    in_flight.push(message);
                }
            }
            // messages arrive in any order
            let mut arrived = 0;
            while !in_flight.is_empty() {
                let index = order[arrived % order.len()].index(in_flight.len());
                let GatherMessage { receiver, ranks: parts } = in_flight.swap_remove(index);
                arrived += 1;
                let gather = &mut gathers[receiver];
                for from in parts {
                    prop_assert!(gather.put(from, &[from as u8]));
                    prop_assert!(!gather.put(from, &[]));
                }
                let missing = gather.parts.iter().filter(|part| part.is_none()).count();
                prop_assert_eq!(gather.missing, missing);
                while let Some(message) = gather.next(receiver) {
                    in_flight.push(message);
                }
            }
            prop_assert!(gathers.iter().all(|gather| gather.is_complete() && !gather.has_messages_left()));
            prop_assert!(!gathers[0].put(ranks, &[]));
            prop_assert_eq!(arrived, ranks * ranks.next_power_of_two().ilog2() as usize);
        }
    }

    #[test]
    fn a_rank_that_has_not_started_sends_nothing() {
        let message =
            |receiver, ranks: &[usize]| Some(GatherMessage { receiver, ranks: ranks.to_vec() });
        let mut gather = TreeAllGather::new(4);
        assert!(gather.put(2, &[]));
        assert_eq!(gather.next(1), None);
        assert!(!gather.has_messages_left() && !gather.is_complete() && !gather.is_incomplete());
        assert!(gather.put(1, &[]));
        gather.number = Some(3);
        assert!(gather.has_messages_left());
        let next = [gather.next(1), gather.next(1), gather.next(1)];
        assert_eq!(next, [message(0, &[1]), message(3, &[1, 2]), None]);
        assert!(!gather.has_messages_left() && !gather.is_complete() && gather.is_incomplete());
    }

    /// Runs an all-gather of `parts` and returns the parts that all ranks have, and the most bytes
    /// that a rank has sent, with 24 bytes for each run.
    fn gather(parts: &[Vec<u8>]) -> (Vec<Vec<u8>>, usize) {
        let ranks = parts.len();
        let mut gathers: Vec<TreeAllGather> =
            (0..ranks).map(|_| TreeAllGather::new(ranks)).collect();
        let mut sent = vec![0; ranks];
        let mut in_flight = Vec::new();
        let mut send = |rank: usize, gather: &mut TreeAllGather, in_flight: &mut Vec<_>| {
            while let Some(GatherMessage { receiver, ranks }) = gather.next(rank) {
                let runs = gather.runs(ranks);
                sent[rank] += runs.iter().map(|run| 24 + run.bytes.len()).sum::<usize>();
                in_flight.push((receiver, runs));
            }
        };
        for (rank, gather) in gathers.iter_mut().enumerate() {
            assert!(gather.put(rank, &parts[rank]));
            gather.number = Some(0);
            send(rank, gather, &mut in_flight);
        }
        while let Some((receiver, runs)) = in_flight.pop() {
            let gather = &mut gathers[receiver];
            for run in runs {
                assert!(gather.put_run(&run) && !gather.put_run(&run));
            }
            send(receiver, gather, &mut in_flight);
        }
        let mut all = gathers.into_iter().map(TreeAllGather::into_parts);
        let first = all.next().unwrap();
        assert!(all.all(|parts| parts == first));
        (first, sent.into_iter().max().unwrap())
    }

    #[test]
    fn an_agreement_sends_equal_parts_once_a_message() {
        for ranks in [1usize, 2, 3, 7, 64, 500] {
            let rounds = ranks.next_power_of_two().ilog2() as usize;
            let mut parts = vec![vec![7; 45]; ranks];
            let (gathered, most) = gather(&parts);
            assert_eq!(gathered, parts);
            // two runs where the ranks wrap around
            assert!(most <= rounds * 2 * (45 + 24), "{ranks} ranks: {most} bytes");
            // one that differs splits a run
            parts[ranks / 3] = vec![8; 45];
            let (gathered, most) = gather(&parts);
            assert_eq!(gathered, parts);
            assert!(most <= rounds * 4 * (45 + 24), "{ranks} ranks: {most} bytes");
            // all of them
            let parts: Vec<Vec<u8>> = (0..ranks).map(|rank| vec![rank as u8; rank % 5]).collect();
            assert_eq!(gather(&parts).0, parts);
        }
    }

    #[test]
    fn runs_outside_of_the_ranks_are_refused() {
        let run = |first, ranks| PartRun { first, ranks, bytes: [1].into() };
        let mut gather = TreeAllGather::new(4);
        for (first, ranks) in [(0, 0), (0, 5), (4, 1), (3, 2), (u64::MAX, 2), (2, u64::MAX)] {
            assert!(!gather.put_run(&run(first, ranks)), "{first} {ranks}");
        }
        assert!(gather.put_run(&run(1, 2)) && !gather.put_run(&run(2, 2)));
        assert!(gather.has(2) && !gather.has(3));
        assert!(gather.put_run(&run(3, 1)) && gather.put_run(&run(0, 1)));
        assert_eq!(gather.missing, 0);
    }
}
