//! A transport that reports an invented placement of its ranks, and records the blocks that cross
//! nodes.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Channel, Control, Error, Host, Incoming, MessageHeader, Outgoing, Placement, Result,
    Space, Transport,
};

/// The (sender, receiver) pairs on different nodes between which KV blocks were sent. Clones share
/// one set.
#[derive(Debug, Clone, Default)]
pub struct Crossings(Arc<Mutex<BTreeSet<(usize, usize)>>>);

impl Crossings {
    /// Returns the pairs recorded so far.
    pub fn pairs(&self) -> BTreeSet<(usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Reports `placement` instead of the inner transport's and forwards everything else.
#[derive(Debug)]
pub struct Placed<T> {
    inner: T,
    placement: Placement,
    crossings: Crossings,
}

impl<T> Placed<T> {
    /// Wraps `inner`; the blocks that this rank sends are recorded in `crossings`.
    pub const fn new(inner: T, placement: Placement, crossings: Crossings) -> Self {
        Self { inner, placement, crossings }
    }
}

impl<T: Control> Placed<T> {
    /// Records the blocks of `headers` that are sent to another node.
    fn record<'h>(&self, headers: impl Iterator<Item = &'h MessageHeader>) {
        let rank = self.inner.rank();
        let nodes = self.placement.nodes();
        let crosses = |header: &&MessageHeader| {
            header.channel == Channel::Kv && nodes.get(header.peer) != nodes.get(rank)
        };
        let pairs = headers.filter(crosses).map(|header| (rank, header.peer));
        self.crossings.0.lock().unwrap_or_else(PoisonError::into_inner).extend(pairs);
    }
}

impl<S: Space, T: Transport<S>> Transport<S> for Placed<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.record(sends.iter().map(|send| &send.header));
        self.inner.post(sends, receives)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.inner.progress(patience)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        self.inner.take(header)
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.record(sends.iter().map(|send| &send.header));
        self.inner.post_host(sends, receives)
    }

    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.inner.take_host(header)
    }

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }

    fn posts_ahead(&self) -> bool {
        self.inner.posts_ahead()
    }

    fn runs_groups_in_order(&self) -> bool {
        self.inner.runs_groups_in_order()
    }
}

impl<T: Control> Control for Placed<T> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.start_all_gather(round, bytes)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.inner.try_all_gather(round)
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        self.inner.stragglers(round)
    }

    fn abort(&mut self, error: &Error) {
        self.inner.abort(error);
    }

    fn heartbeat(&mut self, working: bool) {
        self.inner.heartbeat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        Some(&self.placement)
    }

    fn any_thread(&self) -> bool {
        self.inner.any_thread()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.inner.last_heard(peer)
    }

    fn watched(&self) -> Option<&[usize]> {
        self.inner.watched()
    }

    fn last_work(&self) -> Instant {
        self.inner.last_work()
    }
}
