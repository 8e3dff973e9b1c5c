//! A transport that reports an invented placement of its ranks, and records the blocks that cross
//! nodes.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use annulus_core::{
    Channel, Control, Host, Incoming, MessageHeader, Outgoing, Placement, Result, Space, Transport,
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
    annulus_comm::forward_transport! {
        of S: progress take take_host pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.record(sends.iter().map(|send| &send.header));
        self.inner.post(sends, receives)
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.record(sends.iter().map(|send| &send.header));
        self.inner.post_host(sends, receives)
    }
}

impl<T: Control> Control for Placed<T> {
    annulus_comm::forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }

    fn placement(&self) -> Option<&Placement> {
        Some(&self.placement)
    }

    fn any_thread(&self) -> bool {
        self.inner.any_thread()
    }
}
