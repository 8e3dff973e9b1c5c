//! Waits at the entry of a collective call, for ranks that have not made it.
//!
//! A rank that has not made the call is not silent: its program may compute, write a checkpoint or
//! wait in a debugger between two calls, and sends nothing meanwhile. So these waits have a
//! deadline of their own, by default none. A rank that has entered is in the call and is judged by
//! its silence from then on.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::observed::ObservedClock;

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
