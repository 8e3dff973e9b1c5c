//! How an endpoint is dropped: see "Life and death" of the [module](super).

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{Mpi, frame::Frame, pump::Label, requests::Mode};

/// How long a rank that failed stays to get its last words out.
const LAST_WORDS: Duration = Duration::from_millis(100);

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let healthy = self.failed.is_none() && self.receives.is_empty() && !thread::panicking();
        let owed = self
            .gathers
            .iter()
            .filter(|(_, gather)| gather.owes())
            .map(|(&round, _)| round)
            .collect();
        let Ok(goodbye) = (Frame::Goodbye { begun: self.begun, owed }).encode() else { return };
        // those that have left as well: they may be waiting for it
        let rank = self.rank;
        for peer in (0..self.ranks).filter(|&peer| peer != rank) {
            // whoever is not told finds out by the silence
            drop(self.say_as(Mode::Standard, peer, &goodbye, Label::Said { peer }));
        }
        if healthy {
            if self.part() {
                [self.data.take(), self.control.take()]
                    .into_iter()
                    .flatten()
                    .for_each(super::Communicator::free);
            }
        } else {
            self.flush();
        }
    }
}

impl Mpi {
    /// Waits until every rank has said goodbye and nothing is in flight: then, and only then, can the communicators be freed.
    fn part(&mut self) -> bool {
        let started = Instant::now();
        loop {
            let alone = self.peers.all_have_left(self.rank)
                && self.requests.is_empty()
                && self.early.is_empty();
            if alone || started.elapsed() >= self.settings.farewell {
                return alone;
            }
            if self.wait(Duration::from_millis(10)).is_err() {
                return false;
            }
        }
    }

    /// Lets MPI move until this rank's last words are out.
    fn flush(&mut self) {
        let started = Instant::now();
        let speaking = |label: &Label| matches!(label, Label::Said { .. });
        while self.requests.labels().any(speaking) && started.elapsed() < LAST_WORDS {
            if self.requests.test((self.rank, self.step)).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
