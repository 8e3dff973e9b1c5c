//! The graph over which control messages move: rank r and the ranks r ± 2^k (modulo the number of
//! ranks) are neighbours, a circulant graph of at most 2·⌈log₂ ranks⌉ neighbours per rank.
//!
//! | message | path |
//! |---|---|
//! | heartbeat | to all neighbours; the latest work in it travels on from neighbour to neighbour |
//! | abort | flooding: every rank forwards the first one that it receives to its neighbours |
//! | last frame of a rank that leaves | to its neighbours; flooded by ranks that wait for others |
//! | barrier before the communicators are freed | dissemination: in round k to rank r + 2^k |
//!
//! Every rank is watched by its neighbours. Let S be the silent ranks, not all: some neighbour of S
//! is alive, because the graph is connected, and reports one of them. An abort reaches all living
//! ranks, or all of those that are still connected with its origin; the others have silent
//! neighbours themselves.
//!
//! # All-gathers
//! They use the same edges, so a rank sends to O(log ranks) others besides those with which it
//! exchanges blocks: in ⌈log₂ ranks⌉ rounds one message per rank, instead of a message to every
//! rank.
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
//! Dissemination barrier: Hensgen, Finkel, Manber 1988, Two algorithms for barrier synchronization.
//! All-gather: the concatenation of Bruck et al. 1997, Efficient algorithms for all-to-all
//! communications in multiport message-passing systems.
/// Returns the distances 1, 2, 4, … < `ranks`.
fn distances(ranks: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |distance| distance.checked_mul(2))
        .take_while(move |&distance| distance < ranks)
}

/// Returns the neighbours of `rank`, ascending.
pub(super) fn neighbours(rank: usize, ranks: usize) -> Vec<usize> {
    let both = |distance| [(rank + distance) % ranks, (rank + ranks - distance) % ranks];
    let mut neighbours: Vec<usize> = distances(ranks).flat_map(both).collect();
    neighbours.sort_unstable();
    neighbours.dedup();
    neighbours
}

/// A message of a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BarrierMessage {
    pub(super) receiver: usize,
    pub(super) round: u32,
}

/// One rank of a dissemination barrier: it is complete once every rank has entered it.
#[derive(Debug)]
pub(super) struct Barrier {
    rank: usize,
    ranks: usize,
    entered: bool,
    /// Rounds whose message this rank has sent.
    sent: u32,
    /// Bit k is set if the message of round k has arrived.
    arrived: u64,
}

impl Barrier {
    pub(super) const fn new(rank: usize, ranks: usize) -> Self {
        Self { rank, ranks, entered: false, sent: 0, arrived: 0 }
    }

    /// Enters the barrier. Returns the messages to send.
    pub(super) fn enter(&mut self) -> Vec<BarrierMessage> {
        self.entered = true;
        self.advance()
    }

    /// Processes the message of `round`. Returns the messages to send, or `None` if there is no
    /// such round or its message has arrived before.
    pub(super) fn receive(&mut self, round: u64) -> Option<Vec<BarrierMessage>> {
        let round = u32::try_from(round).ok().filter(|&round| round < self.rounds())?;
        if self.has_arrived(round) {
            return None;
        }
        self.arrived |= 1 << round;
        Some(self.advance())
    }

    /// Returns true once this rank has entered.
    pub(super) const fn has_entered(&self) -> bool {
        self.entered
    }

    /// Returns true once every rank has entered.
    pub(super) fn is_complete(&self) -> bool {
        self.entered && (0..self.rounds()).all(|round| self.has_arrived(round))
    }

    fn rounds(&self) -> u32 {
        self.ranks.next_power_of_two().trailing_zeros()
    }

    const fn has_arrived(&self, round: u32) -> bool {
        self.arrived >> round & 1 == 1
    }

    /// Returns the messages that may be sent now: in round k, once the messages of all earlier
    /// rounds have arrived.
    fn advance(&mut self) -> Vec<BarrierMessage> {
        let mut messages = Vec::new();
        while self.entered
            && self.sent < self.rounds()
            && self.sent.checked_sub(1).is_none_or(|before| self.has_arrived(before))
        {
            let receiver = (self.rank + (1 << self.sent)) % self.ranks;
            messages.push(BarrierMessage { receiver, round: self.sent });
            self.sent += 1;
        }
        messages
    }
}

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
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Silent ranks and the graph; floods an abort as the endpoints do.
    struct Ring {
        neighbours: Vec<Vec<usize>>,
        silent: Vec<bool>,
    }

    impl Ring {
        fn new(ranks: usize, silent: impl Fn(usize) -> bool) -> Self {
            Self {
                neighbours: (0..ranks).map(|rank| neighbours(rank, ranks)).collect(),
                silent: (0..ranks).map(silent).collect(),
            }
        }

        /// Returns the silent neighbours of a living rank, which it reports at the deadline.
        fn reported_by(&self, rank: usize) -> impl Iterator<Item = usize> {
            let is_silent = |&&peer: &&usize| self.silent[peer];
            self.neighbours[rank].iter().filter(is_silent).copied()
        }

        fn living(&self) -> impl Iterator<Item = usize> {
            (0..self.silent.len()).filter(|&rank| !self.silent[rank])
        }

        /// Floods an abort from `origins`; messages of a round arrive in an order drawn from
        /// `seed`. Returns the number of messages that each rank sent and the last round in which a
        /// rank received its first abort.
        fn flood(&self, origins: &[usize], mut seed: u64) -> (Vec<usize>, usize) {
            let mut failed = vec![false; self.silent.len()];
            let mut sent = vec![0; self.silent.len()];
            let mut in_flight = Vec::new();
            let mut rounds = 0;
            let mut fail = |rank: usize, in_flight: &mut Vec<usize>| {
                if self.silent[rank] || std::mem::replace(&mut failed[rank], true) {
                    return false;
                }
                sent[rank] += self.neighbours[rank].len();
                in_flight.extend(&self.neighbours[rank]);
                true
            };
            for &origin in origins {
                fail(origin, &mut in_flight);
            }
            for round in 1.. {
                let mut arriving = std::mem::take(&mut in_flight);
                if arriving.is_empty() {
                    break;
                }
                while !arriving.is_empty() {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let next = (seed >> 33) as usize % arriving.len();
                    if fail(arriving.swap_remove(next), &mut in_flight) {
                        rounds = round;
                    }
                }
            }
            assert!(self.living().all(|rank| failed[rank]), "a living rank received no abort");
            (sent, rounds)
        }
    }

    #[test]
    fn a_rank_has_two_neighbours_per_power_of_two() {
        assert_eq!(neighbours(0, 1), [0; 0]);
        assert_eq!(neighbours(1, 2), [0]);
        assert_eq!(neighbours(1, 3), [0, 2]);
        assert_eq!(neighbours(0, 6), [1, 2, 4, 5]);
        assert_eq!(neighbours(7, 8), [0, 1, 3, 5, 6]);
        for ranks in 1..70usize {
            let limit = 2 * ranks.next_power_of_two().ilog2() as usize;
            for rank in 0..ranks {
                let mine = neighbours(rank, ranks);
                assert!(mine.len() <= limit && !mine.contains(&rank), "{rank} of {ranks}");
                assert!(mine.iter().all(|&peer| neighbours(peer, ranks).contains(&rank)));
            }
        }
    }

    /// All sets of silent ranks on rings of up to 10 ranks: each living rank ends, by a silent
    /// neighbour of its own or by the abort of a rank that has one.
    #[test]
    fn no_living_rank_of_a_small_ring_waits_for_ever() {
        for ranks in 1..=10usize {
            for set in 1..(1usize << ranks) - 1 {
                let ring = Ring::new(ranks, |rank| set >> rank & 1 == 1);
                let reporters: Vec<usize> =
                    ring.living().filter(|&rank| ring.reported_by(rank).next().is_some()).collect();
                assert!(!reporters.is_empty(), "{set:b} of {ranks}");
                // asserts that the abort of some reporter reaches every living rank
                ring.flood(&reporters, set as u64);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn thousands_of_ranks_hear_of_a_silent_one_within_14_rounds(
            silent in prop::collection::btree_set(0usize..8192, 1..=12),
            clustered in any::<bool>(),
            origin in any::<prop::sample::Index>(),
            seed in any::<u64>(),
        ) {
            const RANKS: usize = 8192;
            // of one cluster, the ranks are neighbours of each other and of rank 0
            let silent: BTreeSet<usize> = if clustered {
                neighbours(0, RANKS).into_iter().take(silent.len()).collect()
            } else {
                silent
            };
            let ring = Ring::new(RANKS, |rank| silent.contains(&rank));
            let reported: BTreeSet<usize> =
                ring.living().flat_map(|rank| ring.reported_by(rank)).collect();
            prop_assert_eq!(&reported, &silent);
            let reporters: Vec<usize> =
                ring.living().filter(|&rank| ring.reported_by(rank).next().is_some()).collect();
            let origin = reporters[origin.index(reporters.len())];
            let (sent, rounds) = ring.flood(&[origin], seed);
            prop_assert!(rounds <= 14, "{rounds} rounds");
            prop_assert!(sent.iter().all(|&sent| sent <= 26));
        }

        #[test]
        fn a_barrier_is_complete_once_all_have_entered(
            ranks in 1usize..70,
            order in prop::collection::vec(any::<prop::sample::Index>(), 1..50),
        ) {
            let mut barriers: Vec<Barrier> =
                (0..ranks).map(|rank| Barrier::new(rank, ranks)).collect();
            let mut outside: Vec<usize> = (0..ranks).collect();
            let mut in_flight = Vec::new();
            let mut sent = 0;
            for turn in 0.. {
                let pick = order[turn % order.len()].index(outside.len() + in_flight.len() + 1);
                if outside.is_empty() && in_flight.is_empty() {
                    break;
                }
                prop_assert!(outside.is_empty() || !barriers.iter().any(Barrier::is_complete));
                // ranks enter and messages arrive in any order
                let enters = pick < outside.len() || in_flight.is_empty();
                let messages = if enters && !outside.is_empty() {
                    let rank = outside.swap_remove(pick % outside.len());
                    barriers[rank].enter()
                } else {
                    let BarrierMessage { receiver, round } =
                        in_flight.swap_remove(pick % in_flight.len());
                    let messages = barriers[receiver].receive(u64::from(round));
                    prop_assert_eq!(barriers[receiver].receive(u64::from(round)), None);
                    prop_assert!(messages.is_some());
                    messages.unwrap_or_default()
                };
                sent += messages.len();
                in_flight.extend(messages);
            }
            prop_assert!(barriers.iter().all(Barrier::is_complete));
            prop_assert_eq!(sent, ranks * ranks.next_power_of_two().ilog2() as usize);
            prop_assert_eq!(barriers[0].receive(64), None);
        }
    }

    /// Runs an all-gather of `parts`, whose messages arrive in an order drawn from `pick`. Returns
    /// the parts that all ranks have, the number of messages, and the most bytes that a rank has
    /// sent, with 24 bytes for each run.
    fn gather(
        parts: &[Vec<u8>],
        mut pick: impl FnMut(usize) -> usize,
    ) -> (Vec<Vec<u8>>, usize, usize) {
        let ranks = parts.len();
        let mut gathers: Vec<TreeAllGather> =
            (0..ranks).map(|_| TreeAllGather::new(ranks)).collect();
        let mut sent = vec![0; ranks];
        let mut in_flight = Vec::new();
        let mut messages = 0;
        let mut send = |rank: usize, gather: &mut TreeAllGather, in_flight: &mut Vec<_>| {
            while let Some(GatherMessage { receiver, ranks }) = gather.next(rank) {
                let runs = gather.runs(ranks);
                sent[rank] += runs.iter().map(|run| 24 + run.bytes.len()).sum::<usize>();
                messages += 1;
                in_flight.push((receiver, runs));
            }
        };
        for (rank, gather) in gathers.iter_mut().enumerate() {
            assert!(gather.put(rank, &parts[rank]));
            gather.number = Some(0);
            send(rank, gather, &mut in_flight);
        }
        while !in_flight.is_empty() {
            let (receiver, runs) = in_flight.swap_remove(pick(in_flight.len()));
            let gather = &mut gathers[receiver];
            for run in runs {
                assert!(gather.put_run(&run) && !gather.put_run(&run));
            }
            let missing = gather.parts.iter().filter(|part| part.is_none()).count();
            assert_eq!(gather.missing, missing);
            send(receiver, gather, &mut in_flight);
        }
        assert!(gathers.iter().all(|gather| gather.is_complete() && !gather.has_messages_left()));
        let mut all = gathers.into_iter().map(TreeAllGather::into_parts);
        let first = all.next().unwrap();
        assert!(all.all(|parts| parts == first));
        (first, messages, sent.into_iter().max().unwrap())
    }

    proptest! {
        #[test]
        fn every_part_reaches_every_rank_once_in_any_order(
            parts in prop::collection::vec(0u8..3, 1..70),
            order in prop::collection::vec(any::<prop::sample::Index>(), 1..50),
        ) {
            let part = |byte: u8| vec![byte; byte.into()];
            let parts: Vec<Vec<u8>> = parts.into_iter().map(part).collect();
            let mut order = order.into_iter().cycle();
            let (gathered, messages, _) = gather(&parts, |len| order.next().unwrap().index(len));
            prop_assert_eq!(&gathered, &parts);
            let rounds = parts.len().next_power_of_two().ilog2() as usize;
            prop_assert_eq!(messages, parts.len() * rounds);
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

    #[test]
    fn an_agreement_sends_equal_parts_once_a_message() {
        for ranks in [1usize, 2, 3, 7, 64, 500] {
            let rounds = ranks.next_power_of_two().ilog2() as usize;
            let mut parts = vec![vec![7; 45]; ranks];
            let (gathered, _, most) = gather(&parts, |len| len - 1);
            assert_eq!(gathered, parts);
            // two runs where the ranks wrap around
            assert!(most <= rounds * 2 * (45 + 24), "{ranks} ranks: {most} bytes");
            // one that differs splits a run
            parts[ranks / 3] = vec![8; 45];
            let (gathered, _, most) = gather(&parts, |len| len - 1);
            assert_eq!(gathered, parts);
            assert!(most <= rounds * 4 * (45 + 24), "{ranks} ranks: {most} bytes");
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
