//! Time as one rank observes it: without the time in which it did not poll.
//!
//! A process that was suspended (a gang scheduler, a virtual machine's pause, a debugger, a page-in
//! storm) cannot judge its peers by that time: their messages waited for it, or they were suspended
//! with it. So a gap between two polls counts for no more than the longest regular one:
//!
//! ```text
//!  polls    |  |  |  |                       |  |  |
//!  time     ────────────────────────────────────────▶
//!  observed ══════════                     ══════════    of the gap, `longest` at its end
//! ```
//! The counted part of each gap bounds the wait of a rank that always polls late: it ends too, only
//! later.

use std::{
    collections::VecDeque,
    ops::Range,
    time::{Duration, Instant},
};

/// Measures observed time. Every instant is an argument, so a test needs no real time.
#[derive(Debug)]
pub(crate) struct ObservedClock {
    last_poll: Instant,
    longest: Duration,
    horizon: Duration,
    /// Times without observation, ascending and disjoint.
    gaps: VecDeque<Range<Instant>>,
}

impl ObservedClock {
    /// Starts at `now`. Of a gap between two polls at most `longest` counts; times beyond `horizon`
    /// need not be exact, only no shorter than it.
    pub(crate) fn new(now: Instant, longest: Duration, horizon: Duration) -> Self {
        Self { last_poll: now, longest, horizon, gaps: VecDeque::new() }
    }

    /// Keeps times exact up to `horizon` at least.
    pub(crate) fn extend_horizon(&mut self, horizon: Duration) {
        self.horizon = self.horizon.max(horizon);
    }

    /// Records that this rank polls, at `now`.
    pub(crate) fn poll(&mut self, now: Instant) {
        let resumed = now.checked_sub(self.longest).unwrap_or(now);
        if resumed > self.last_poll {
            self.gaps.push_back(self.last_poll..resumed);
        }
        self.last_poll = now;
        // each gap is followed by `longest` of observed time: no more than horizon / longest remain
        while self.gaps.front().is_some_and(|gap| self.elapsed(gap.end, now) >= self.horizon) {
            self.gaps.pop_front();
        }
    }

    /// Returns the observed part of the time from `then` to `now`.
    pub(crate) fn elapsed(&self, then: Instant, now: Instant) -> Duration {
        let within = |gap: &Range<Instant>| {
            let start = gap.start.max(then);
            gap.end.min(now).saturating_duration_since(start)
        };
        let unobserved: Duration = self.gaps.iter().map(within).sum();
        now.saturating_duration_since(then).saturating_sub(unobserved)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONGEST: Duration = Duration::from_millis(100);
    const HORIZON: Duration = Duration::from_secs(1);

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_gap_counts_for_no_more_than_the_longest_regular_one() {
        let start = Instant::now();
        let mut clock = ObservedClock::new(start, LONGEST, HORIZON);
        for poll in [50, 150, 200] {
            clock.poll(start + ms(poll));
        }
        assert_eq!(clock.elapsed(start, start + ms(200)), ms(200));
        // ten deadlines later
        let resumed = start + ms(10_200);
        clock.poll(resumed);
        assert_eq!(clock.elapsed(start, resumed), ms(300));
        // a message from within the gap: the process may have been suspended right after it
        assert_eq!(clock.elapsed(start + ms(250), resumed), LONGEST);
        assert_eq!(clock.elapsed(resumed - ms(30), resumed), ms(30));
        clock.poll(resumed + ms(90));
        assert_eq!(clock.elapsed(start, resumed + ms(90)), ms(390));
    }

    #[test]
    fn the_wait_of_a_rank_that_always_polls_late_ends() {
        let start = Instant::now();
        let mut clock = ObservedClock::new(start, LONGEST, HORIZON);
        let polls = (1..).find(|&poll| {
            let now = start + ms(700 * poll);
            clock.poll(now);
            clock.elapsed(start, now) >= HORIZON
        });
        assert_eq!(polls, Some(10));
    }

    proptest! {
        #[test]
        fn the_clock_agrees_with_a_sum_over_all_polls(
            steps in prop::collection::vec(0u64..400, 1..80),
            from in any::<prop::sample::Index>(),
        ) {
            let start = Instant::now();
            let mut clock = ObservedClock::new(start, LONGEST, HORIZON);
            let mut polls = vec![start];
            for step in steps {
                polls.push(polls[polls.len() - 1] + ms(step));
                clock.poll(polls[polls.len() - 1]);
            }
            let (from, now) = (from.index(polls.len()), polls[polls.len() - 1]);
            let gaps = polls[from..].windows(2).map(|pair| pair[1] - pair[0]);
            let counted: Duration = gaps.map(|gap| gap.min(LONGEST)).sum();
            let elapsed = clock.elapsed(polls[from], now);
            prop_assert_eq!(elapsed.min(HORIZON), counted.min(HORIZON));
            prop_assert!(clock.gaps.len() <= 10);
        }
    }
}
