//! Checks of a rank's waits against the deadlines, and the receives that they concern: when each
//! was posted, and what has arrived.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use annulus_core::{Arrived, Error, MessageHeader, Result, Space, Transport};

use super::{Deadline, LONGEST_POLL, Silence, Wait, arrivals::Lateness};
use crate::message::MessageKey;

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
        self.failed = Some(error.clone());
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
        let mut position = 0;
        while let Some((header, _)) = self.posted.get(position) {
            match take(header)? {
                Some(arrived) => {
                    let (header, _) = self.posted.swap_remove(position);
                    self.arrived.push((header, arrived));
                }
                None => position += 1,
            }
        }
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
