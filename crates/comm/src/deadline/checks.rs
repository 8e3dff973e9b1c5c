//! Checks of a rank's waits against the deadlines, and the receives that they concern: when each
//! was posted, and what has arrived.
//!
//! # Entries
//! A wait at the entry of a collective call is one for ranks that have not made it. A rank that has
//! not made the call is not
//! silent: its program may compute, write a checkpoint or wait in a debugger between two calls, and
//! sends nothing meanwhile. So these waits have a deadline of their own, by default none. A rank
//! that has entered is in the call and is judged by its silence from then on.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use annulus_core::{Arrived, Error, MessageHeader, Result, Space, Transport};

use super::{Deadline, LONGEST_POLL, Silence, Wait};
use crate::{
    message::{MessageKey, take_ready},
    observed::ObservedClock,
};

/// Time after the deadline in which other ranks may report the silence of ranks that this one does
/// not watch, before it reports a lost message: several checks and the way of an abort.
const WATCHERS_MARGIN: Duration = Duration::from_millis(250);

impl<T: Transport<S>, S: Space> Deadline<T, S> {
    /// Returns all waits of this rank.
    fn waits(&self) -> Vec<Wait> {
        let receives = self.blocks.waiting().iter().chain(self.host_messages.waiting());
        let receives = receives.map(|(header, since)| Wait {
            peer: header.peer,
            step: header.step,
            since: *since,
        });
        let mut waits: Vec<Wait> = receives.chain(self.sends.values().copied()).collect();
        for (&round, &since) in &self.all_gathers {
            let mut stragglers = self.inner.stragglers(round);
            if stragglers.is_empty() {
                // all have started it and it is not complete: some rank does not receive its
                // messages
                stragglers = (0..self.inner.ranks()).collect();
            }
            let step = self.step;
            waits.extend(stragglers.into_iter().map(|peer| Wait { peer, step, since }));
        }
        waits
    }

    /// Returns the observed time without a message from `peer`, counted from `since` at the
    /// earliest.
    fn silence(&self, now: Instant, peer: usize, since: Instant) -> Duration {
        self.observed.elapsed(self.inner.last_heard(peer).max(since), now)
    }

    /// Returns the timeout once a clock has reached the deadline. Does nothing if the last check
    /// was a short time ago, because it takes O(ranks) time.
    pub(super) fn check_clocks(&mut self) -> Result<()> {
        let now = Instant::now();
        self.observed.poll(now);
        let interval = (self.deadline / 64).min(LONGEST_POLL / 4);
        if self.is_idle() || now.saturating_duration_since(self.last_check) < interval {
            return Ok(());
        }
        self.last_check = now;
        let (late, arrival_timeout) = self.judge_arrivals(now);
        let rank = self.inner.rank();
        let mut waits = self.waits();
        waits.retain(|wait| wait.peer != rank);
        let began = waits.iter().map(|wait| wait.since).chain(self.working_since).min();
        let mut judged = self.judged(&waits, began, &late);
        judged.retain(|wait| wait.peer != rank);
        let judged = self.silences(now, &judged);
        self.warn(&judged);
        if self.is_endless {
            return Ok(());
        }
        let error = self.silent_for_long(&judged).or_else(|| {
            let awaited = self.silences(now, &waits);
            self.idle(now, &awaited, began?)
        });
        let Some(error) = error else { return arrival_timeout.map_or(Ok(()), Err) };
        self.inner.abort(&error);
        self.failure.end(&error);
        Err(error)
    }

    /// Returns the ranks that have not entered the calls which this one has entered, and the
    /// timeout if that wait has reached its deadline.
    fn judge_arrivals(&mut self, now: Instant) -> (BTreeSet<usize>, Option<Error>) {
        let mut late = BTreeSet::new();
        let mut timeout = None;
        for round in self.arrivals.rounds() {
            let missing = self.inner.stragglers(round);
            let Some(&first) = missing.first() else {
                // all ranks are in the call, so what is left of the wait is one within it
                self.arrivals.complete(round);
                self.all_gathers.insert(round, now);
                continue;
            };
            self.arrivals.record(round, &missing, self.inner.ranks(), now);
            match self.arrivals.judge(round, &self.observed, now) {
                Lateness::Waits => {}
                Lateness::Warns(waited) => {
                    let (peer, step) = (self.silent_one_of(&missing, now, waited), self.step);
                    if let (Some(peer), Some(warning)) = (peer, &mut self.warning) {
                        warning(Silence { peer, step, waited });
                    }
                }
                Lateness::Ends(waited) => {
                    let peer = self.silent_one_of(&missing, now, waited).unwrap_or(first);
                    timeout.get_or_insert(Error::ArrivalTimeout { peer, waited });
                }
            }
            late.extend(missing);
        }
        (late, timeout)
    }

    /// Returns the lowest of the `missing` ranks from which this one would have received a
    /// heartbeat in the last quarter of the deadline, had it entered. Others may be missing because
    /// their entry is forwarded by a late rank.
    fn silent_one_of(&self, missing: &[usize], now: Instant, waited: Duration) -> Option<usize> {
        let watched = self.inner.watched();
        let is_watched = |peer: &usize| watched.is_none_or(|watched| watched.contains(peer));
        let since = now.checked_sub(waited).unwrap_or(now);
        let is_silent = |peer: &usize| self.silence(now, *peer, since) >= self.deadline / 4;
        missing.iter().copied().filter(is_watched).find(is_silent)
    }

    /// Returns true if this rank judges no other one: it neither waits nor, if it watches certain
    /// ranks, computes.
    fn is_idle(&self) -> bool {
        self.blocks.waiting().is_empty()
            && self.host_messages.waiting().is_empty()
            && self.sends.is_empty()
            && self.all_gathers.is_empty()
            && self.arrivals.is_empty()
            && (self.working_since.is_none() || self.inner.watched().is_none())
    }

    /// Returns the waits for ranks whose silence this rank judges: all of its waits and the ranks
    /// that have entered a call with it, or if it watches certain ranks, one for each of those. The
    /// waits began at `began`. A rank that is `late` is in no call, so its silence is none.
    fn judged(&self, waits: &[Wait], began: Option<Instant>, late: &BTreeSet<usize>) -> Vec<Wait> {
        let step = self.step;
        let mut arrived = self.arrivals.arrived();
        let Some(watched) = self.inner.watched() else {
            let arrived = arrived.into_iter().map(|(peer, since)| Wait { peer, step, since });
            return waits.iter().copied().chain(arrived).collect();
        };
        let wait = |&peer: &usize| {
            let awaited = waits.iter().filter(|wait| wait.peer == peer);
            let awaited = awaited.min_by_key(|wait| wait.since).copied();
            awaited.or_else(|| {
                let since = arrived.remove(&peer).or(began);
                since.filter(|_| !late.contains(&peer)).map(|since| Wait { peer, step, since })
            })
        };
        watched.iter().filter_map(wait).collect()
    }

    fn silences(&self, now: Instant, waits: &[Wait]) -> Vec<Silence> {
        let silence = |&Wait { peer, step, since }: &Wait| Silence {
            peer,
            step,
            waited: self.silence(now, peer, since),
        };
        waits.iter().map(silence).collect()
    }

    /// Returns the timeout if a rank was silent for the deadline.
    fn silent_for_long(&self, judged: &[Silence]) -> Option<Error> {
        let &Silence { peer, step, waited } = worst(judged)?;
        (waited >= self.deadline).then_some(Error::Timeout { peer, step, waited })
    }

    /// Returns the timeout if no rank has worked for the deadline. The waits began at `began`.
    fn idle(&self, now: Instant, awaited: &[Silence], began: Instant) -> Option<Error> {
        let &Silence { peer, step, .. } = worst(awaited)?;
        let waited = self.observed.elapsed(self.inner.last_work().max(began), now);
        if waited < self.deadline {
            return None;
        }
        let silent_for_half = |peer: usize| {
            let silent = self.silence(now, peer, began);
            (silent >= self.deadline / 2).then_some((silent, peer))
        };
        let ranks = self.inner.ranks();
        let (silent, watches_all) = match self.inner.watched() {
            Some(watched) => (
                watched.iter().copied().filter_map(silent_for_half).max(),
                watched.len() + 1 >= ranks,
            ),
            None => {
                let others = (0..ranks).filter(|&peer| peer != self.inner.rank());
                (others.filter_map(silent_for_half).max(), true)
            }
        };
        match silent {
            Some((_, peer)) => Some(Error::Timeout { peer, step, waited }),
            None if watches_all || waited >= self.deadline + WATCHERS_MARGIN => {
                Some(Error::Timeout { peer, step, waited })
            }
            None => None,
        }
    }

    /// Calls the warning for every peer whose silence has reached a quarter of the deadline.
    fn warn(&mut self, silences: &[Silence]) {
        let Some(warning) = &mut self.warning else { return };
        for &silence in silences {
            let late = silence.waited >= self.deadline / 4;
            if late && !self.warned[silence.peer] {
                warning(silence);
            }
            self.warned[silence.peer] = late;
        }
    }
}

/// Returns the longest silence; of equals that of the lowest rank, so that a stuck ring reports the
/// same on all ranks.
fn worst(silences: &[Silence]) -> Option<&Silence> {
    silences.iter().min_by_key(|silence| (std::cmp::Reverse(silence.waited), silence.peer))
}

/// Receives that were posted and not yet taken by the caller.
pub(super) struct Receives<S: Space> {
    /// Those that had not arrived at the last poll, with the times of their posts.
    posted: Vec<(MessageHeader, Instant)>,
    arrived: Vec<(MessageHeader, Arrived<S>)>,
}

impl<S: Space> Default for Receives<S> {
    fn default() -> Self {
        Self { posted: Vec::new(), arrived: Vec::new() }
    }
}

impl<S: Space> Receives<S> {
    /// Adds receives that are posted now.
    pub(super) fn post(&mut self, headers: Vec<MessageHeader>, now: Instant) {
        self.posted.extend(headers.into_iter().map(|header| (header, now)));
    }

    /// Takes all receives that have arrived from the inner transport, by `take`.
    pub(super) fn collect(
        &mut self,
        mut take: impl FnMut(&MessageHeader) -> Result<Option<Arrived<S>>>,
    ) -> Result<()> {
        let arrived = take_ready(&mut self.posted, |(header, _)| take(header))?;
        self.arrived.extend(arrived.into_iter().map(|((header, _), arrived)| (header, arrived)));
        Ok(())
    }

    /// Returns a receive that has arrived, by the last poll or now, by `take`.
    pub(super) fn take(
        &mut self,
        header: &MessageHeader,
        take: impl FnOnce(&MessageHeader) -> Result<Option<Arrived<S>>>,
    ) -> Result<Option<Arrived<S>>> {
        let key = MessageKey::of(header);
        let same = |other: &MessageHeader| MessageKey::of(other) == key;
        if let Some(position) = self.arrived.iter().position(|(other, _)| same(other)) {
            return Ok(Some(self.arrived.swap_remove(position).1));
        }
        let taken = take(header)?;
        if taken.is_some() {
            self.posted.retain(|(other, _)| !same(other));
        }
        Ok(taken)
    }

    /// Returns the receives that had not arrived at the last poll, with the times of their posts.
    pub(super) fn waiting(&self) -> &[(MessageHeader, Instant)] {
        &self.posted
    }
}

/// Entries of one rank that other ranks have not made yet.
#[derive(Debug)]
pub(crate) struct EntryArrivals {
    deadline: Option<Duration>,
    warning_interval: Duration,
    /// By round of the all-gather.
    entries: BTreeMap<u64, AwaitedEntry>,
}

/// One entry.
#[derive(Debug)]
struct AwaitedEntry {
    /// Start of the wait.
    since: Instant,
    /// Time of the last warning, or start of the wait.
    warned: Instant,
    /// Ranks that have entered, with the times at which this rank noticed it.
    arrived: BTreeMap<usize, Instant>,
}

/// State of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lateness {
    /// Nothing is due.
    Waits,
    /// A warning is due after this wait.
    Warns(Duration),
    /// The wait has reached its deadline.
    Ends(Duration),
}

impl EntryArrivals {
    /// Creates it without entries and without a deadline.
    pub(crate) fn new(warning_interval: Duration) -> Self {
        Self { deadline: None, warning_interval, entries: BTreeMap::new() }
    }

    pub(crate) fn set_deadline(&mut self, deadline: Option<Duration>) {
        self.deadline = deadline;
    }

    /// Records that this rank has entered a call, with all-gather `round`.
    pub(crate) fn enter(&mut self, round: u64, now: Instant) {
        let entry = AwaitedEntry { since: now, warned: now, arrived: BTreeMap::new() };
        self.entries.insert(round, entry);
    }

    /// Records that all ranks have entered.
    pub(crate) fn complete(&mut self, round: u64) {
        self.entries.remove(&round);
    }

    /// Records that of `ranks` ranks those in `missing` have not entered.
    pub(crate) fn record(&mut self, round: u64, missing: &[usize], ranks: usize, now: Instant) {
        let Some(entry) = self.entries.get_mut(&round) else { return };
        for rank in (0..ranks).filter(|rank| !missing.contains(rank)) {
            entry.arrived.entry(rank).or_insert(now);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the rounds of all entries, ascending.
    pub(crate) fn rounds(&self) -> Vec<u64> {
        self.entries.keys().copied().collect()
    }

    /// Returns the ranks that have entered a call which others have not, with the times at which
    /// this rank noticed it.
    pub(crate) fn arrived(&self) -> BTreeMap<usize, Instant> {
        self.entries.values().flat_map(|entry| &entry.arrived).map(|(&r, &at)| (r, at)).collect()
    }

    /// Judges the wait of an entry that some rank has not made. At the deadline the wait starts
    /// again, because the caller may continue it.
    pub(crate) fn judge(&mut self, round: u64, clock: &ObservedClock, now: Instant) -> Lateness {
        let Some(entry) = self.entries.get_mut(&round) else { return Lateness::Waits };
        let waited = clock.elapsed(entry.since, now);
        if self.deadline.is_some_and(|deadline| waited >= deadline) {
            entry.since = now;
            entry.warned = now;
            return Lateness::Ends(waited);
        }
        if clock.elapsed(entry.warned, now) >= self.warning_interval {
            entry.warned = now;
            return Lateness::Warns(waited);
        }
        Lateness::Waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_warns_at_intervals_and_ends_only_at_a_deadline() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let horizon = Duration::from_secs(500);
        let mut clock = ObservedClock::new(start, Duration::from_secs(10), horizon);
        let mut arrivals = EntryArrivals::new(Duration::from_secs(30));
        arrivals.enter(2, start);
        let mut judge = |arrivals: &mut EntryArrivals, seconds| {
            clock.poll(after(seconds));
            arrivals.judge(2, &clock, after(seconds))
        };
        let mut warned = Vec::new();
        for second in (0..=100).step_by(5) {
            match judge(&mut arrivals, second) {
                Lateness::Waits => {}
                Lateness::Warns(waited) => warned.push(waited.as_secs()),
                Lateness::Ends(waited) => panic!("ends after {waited:?}"),
            }
        }
        assert_eq!(warned, [30, 60, 90]);
        arrivals.set_deadline(Some(Duration::from_secs(105)));
        assert_eq!(judge(&mut arrivals, 105), Lateness::Ends(Duration::from_secs(105)));
        // a wait that is continued starts again
        assert_eq!(judge(&mut arrivals, 110), Lateness::Waits);
        // of 1,000 s without a poll, 10 s count
        assert_eq!(judge(&mut arrivals, 1110), Lateness::Waits);
        arrivals.complete(2);
        assert!(arrivals.is_empty());
        assert_eq!(judge(&mut arrivals, 1115), Lateness::Waits);
    }

    #[test]
    fn ranks_are_in_the_call_from_the_time_at_which_their_entry_was_noticed() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let mut arrivals = EntryArrivals::new(Duration::from_secs(30));
        arrivals.enter(7, start);
        arrivals.record(7, &[1, 2], 4, start);
        arrivals.record(7, &[2], 4, later);
        assert_eq!(arrivals.arrived(), BTreeMap::from([(0, start), (1, later), (3, start)]));
        assert_eq!(arrivals.rounds(), [7]);
    }
}
