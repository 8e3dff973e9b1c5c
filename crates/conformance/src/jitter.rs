//! A transport whose messages take their time: random delays that must not change a bit.

use std::time::{Duration, Instant};

use annulus_core::{Arrived, Control, Error, Hop, Incoming, Outgoing, Result, Space, Transport};

use crate::Draw;

/// Holds back what has arrived, each message for a random time.
pub struct Jitter<T> {
    inner: T,
    draw: Draw,
    most: Duration,
    /// Asked for, and not to be given before this.
    held: Vec<(Hop, Instant)>,
}

impl<T> Jitter<T> {
    /// Delays each message of `inner` by up to `most`.
    pub const fn new(inner: T, most: Duration, seed: u64) -> Self {
        Self { inner, draw: Draw::new(seed), most, held: Vec::new() }
    }
}

impl<S: Space, T: Transport<S>> Transport<S> for Jitter<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        for receive in receives.iter() {
            let wait = self.most.mul_f64(self.draw.uniform());
            self.held.push((receive.hop.clone(), Instant::now() + wait));
        }
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.inner.progress(patience.min(self.most))
    }

    fn take(&mut self, hop: &Hop) -> Result<Option<Arrived<S>>> {
        if self.held.iter().any(|(held, until)| held == hop && Instant::now() < *until) {
            return Ok(None);
        }
        let taken = self.inner.take(hop)?;
        if taken.is_some() {
            self.held.retain(|(held, _)| held != hop);
        }
        Ok(taken)
    }

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

impl<T: Control> Control for Jitter<T> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn offer(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.offer(round, bytes)
    }

    fn collect(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.inner.collect(round)
    }

    fn missing(&self, round: u64) -> Vec<usize> {
        self.inner.missing(round)
    }

    fn abort(&mut self, error: &Error) {
        self.inner.abort(error);
    }

    fn beat(&mut self, working: bool) {
        self.inner.beat(working);
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.inner.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.inner.last_work()
    }
}
