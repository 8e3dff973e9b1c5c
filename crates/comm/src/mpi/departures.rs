//! Ranks that have left a plan: see "Lifetime" in the documentation of [`super`].

use std::{collections::BTreeMap, time::Instant};

/// Last frame of a rank in a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Departure {
    pub(super) at: Instant,
    /// True if another rank forwarded the frame: other frames of the rank that has left may arrive
    /// after it.
    pub(super) is_forwarded: bool,
    /// Number of all-gathers that it had started.
    pub(super) started: u64,
    /// Rounds of which it had not sent all that other ranks need.
    pub(super) unfinished: Vec<u64>,
}

/// Ranks that have left a context, as far as this rank has been informed.
#[derive(Debug, Default)]
pub(super) struct Departures {
    all: BTreeMap<usize, Departure>,
    /// Those whose last frame was not forwarded, in the order in which the frames arrived.
    unforwarded: Vec<usize>,
}

impl Departures {
    /// Records that `peer` has left. Its own frame replaces a forwarded one.
    pub(super) fn add(&mut self, peer: usize, departure: Departure) {
        let known = self.all.get(&peer);
        if known.is_some_and(|known| departure.is_forwarded || !known.is_forwarded) {
            return;
        }
        if known.is_none() {
            self.unforwarded.push(peer);
        }
        self.all.insert(peer, departure);
    }

    /// Returns the last frame of a rank that has left.
    pub(super) fn get(&self, peer: usize) -> Option<&Departure> {
        self.all.get(&peer)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Iterates over the ranks that have left, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Departure)> {
        self.all.iter().map(|(&peer, departure)| (peer, departure))
    }

    /// Takes the ranks whose last frame was not forwarded and that `concerns` selects.
    pub(super) fn take_unforwarded(
        &mut self,
        mut concerns: impl FnMut(&Departure) -> bool,
    ) -> Vec<usize> {
        let all = &self.all;
        self.unforwarded.extract_if(.., |peer| all.get(peer).is_some_and(&mut concerns)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_last_frame_is_taken_once_and_a_forwarded_one_is_replaced() {
        let departure = || Departure {
            at: Instant::now(),
            is_forwarded: false,
            started: 3,
            unfinished: vec![1],
        };
        let mut departures = Departures::default();
        departures.add(3, Departure { is_forwarded: true, ..departure() });
        departures.add(1, departure());
        let is_forwarded = |departures: &Departures| departures.get(3).unwrap().is_forwarded;
        assert!(is_forwarded(&departures));
        departures.add(3, departure());
        departures.add(3, Departure { is_forwarded: true, ..departure() });
        assert!(!is_forwarded(&departures));
        // in the order in which they left
        assert_eq!(departures.take_unforwarded(|departure| departure.started > 3), [0; 0]);
        assert_eq!(departures.take_unforwarded(|_| true), [3, 1]);
        assert_eq!(departures.take_unforwarded(|_| true), [0; 0]);
        let left: Vec<usize> = departures.iter().map(|(peer, _)| peer).collect();
        assert_eq!(left, [1, 3]);
    }
}
