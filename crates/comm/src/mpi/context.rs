//! Context: the messages of one plan over an endpoint that several plans may share.
//!
//! Blocks, all-gathers and last frames carry the number of their context, so messages of different
//! plans are never matched. Everything else belongs to the endpoint: communicators, locations,
//! heartbeats, aborts.
//!
//! Contexts are numbers, not communicators: a further plan costs no message. Ranks drop plans at
//! different times, so they could agree on a free slot of tags (`messages.rs`) only by a message.
//! Instead the number of a plan determines its slot, and a plan whose slot is taken on any rank
//! announces its messages on all. A fatal error ends all plans of an endpoint, because messages of
//! the plan that failed may still be in flight.
//!
//! # Drop
//! The drop of a handle sends the last frames of its context, and ends the endpoint with its last
//! context. See "Lifetime" in the documentation of [`super`].

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Error, Result};

use super::{
    Mpi,
    circulant::{BarrierMessage, TreeAllGather},
    communicator::MpiCommunicator,
    endpoint::{MpiEndpoint, SharedEndpoint},
    ffi::PeerStep,
    frame::{ControlFrame, Leaving},
    lifetime::{check_alive, defer, is_forked},
    messages::{Announcement, MessageKind, MpiReceive, QueuedSend, ReceiveStage},
    peers::{Departure, Departures},
};
use crate::message::{LastTags, MessageKey};

/// State of one plan's messages on this rank.
#[derive(Default)]
pub(super) struct PlanContext {
    /// False before this rank has created the context: frames of others may arrive earlier.
    pub(super) is_open: bool,
    /// True if receives with agreed lengths start when they are posted. Then the context has its
    /// slot of tags (`messages.rs`) for itself.
    pub(super) posts_ahead: bool,
    /// Sends that have not completed, with their steps, in order.
    pub(super) sends: Vec<(MessageKey, usize)>,
    /// Those of them that follow another one and have not started.
    pub(super) queued: VecDeque<QueuedSend>,
    /// Posted and not yet taken.
    pub(super) receives: Vec<MpiReceive>,
    /// Announced before their receives were posted.
    pub(super) early: Vec<Announcement>,
    pub(super) last_tags: LastTags,
    pub(super) all_gathers: BTreeMap<u64, TreeAllGather>,
    /// Number of all-gathers that this rank has started.
    pub(super) started: u64,
    /// Step of the last post.
    pub(super) step: usize,
    pub(super) bytes_sent: u64,
    /// True from a heartbeat of a working rank to the end of the next all-gather.
    pub(super) is_working: bool,
    pub(super) departures: Departures,
}

impl PlanContext {
    /// Counts a send as done.
    pub(super) fn end_send(&mut self, key: MessageKey) {
        if let Some(index) = self.sends.iter().position(|(send, _)| *send == key) {
            self.sends.remove(index);
        }
    }

    /// Returns true while any send is in flight.
    pub(super) fn has_unsent(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Returns true while any send or receive is in flight.
    fn has_transfers(&self) -> bool {
        self.has_unsent()
            || self.receives.iter().any(|receive| receive.stage != ReceiveStage::Arrived)
    }

    /// Returns true if this rank is within a call that needs other ranks.
    pub(super) fn is_busy(&self) -> bool {
        self.is_working || self.has_transfers()
    }

    /// Returns true if a rank with this last frame is missing in an all-gather of this rank.
    pub(super) fn misses(&self, departure: &Departure) -> bool {
        self.all_gathers.iter().any(|(round, gather)| {
            gather.is_incomplete()
                && (gather.number >= Some(departure.started)
                    || departure.unfinished.contains(round))
        })
    }

    /// Returns the step in which a message from or to `peer`, which has left, can no longer
    /// complete. `overdue` is true if messages in flight have had their time to.
    pub(super) fn missing_from(
        &self,
        peer: usize,
        departure: &Departure,
        overdue: bool,
    ) -> Option<usize> {
        // its own last frame comes after all its other frames, but its blocks may take a little
        // longer
        let is_final = overdue || !departure.is_forwarded;
        let is_missing = |receive: &&MpiReceive| match receive.stage {
            ReceiveStage::Posted => {
                receive.header.peer == peer
                    && is_final
                    && (overdue || !self.early.iter().any(|early| early.is_for(receive)))
            }
            ReceiveStage::Direct | ReceiveStage::Staged => receive.header.peer == peer && overdue,
            ReceiveStage::Arrived => false,
        };
        let receive = self.receives.iter().find(is_missing).map(|receive| receive.header.step);
        let oldest = || self.sends.iter().find(|(key, _)| key.peer == peer);
        let send = || oldest().filter(|_| overdue).map(|&(_, step)| step);
        // a rank that started an all-gather may leave while other ranks still forward its part
        let started = Some(departure.started);
        let gather = || {
            let misses =
                |gather: &TreeAllGather| gather.is_incomplete() && gather.number >= started;
            self.all_gathers.values().any(misses)
        };
        receive.or_else(send).or_else(|| gather().then_some(self.step))
    }

    /// Returns true if the rank of `departure` has left without forwarding all parts of an
    /// all-gather that is incomplete here.
    pub(super) fn is_unfinished_by(&self, departure: &Departure) -> bool {
        let is_incomplete =
            |round: &u64| self.all_gathers.get(round).is_some_and(TreeAllGather::is_incomplete);
        departure.unfinished.iter().any(is_incomplete)
    }
}

/// Time for which a rank that failed stays to send its last frames and to cancel its receives:
/// enough for short messages, and short beside the least deadline of 1 s.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Drop for Mpi {
    fn drop(&mut self) {
        if is_forked() {
            // the communicators and messages are those of the parent
            return mem::forget(Arc::clone(&self.shared));
        }
        drop_context(&self.shared, self.context);
    }
}

/// Drops a context, and with the last one the endpoint. On a thread that may not use the endpoint,
/// leaves that to its own thread.
fn drop_context(shared: &Arc<SharedEndpoint>, context: u64) {
    let mut endpoint = shared.lock();
    if endpoint.is_on_another_thread() {
        let shared = Arc::clone(shared);
        defer(move || drop_context(&shared, context));
        return;
    }
    if endpoint.enter().is_err() {
        return;
    }
    match endpoint.leave(context) {
        Leaving::PlanContext => {}
        Leaving::FailedEndpoint => endpoint.cancel(),
        Leaving::MpiEndpoint => {
            drop(endpoint);
            if wait_for_all_to_leave(shared) {
                let mut endpoint = shared.lock();
                let communicators = [endpoint.data.take(), endpoint.control.take()];
                communicators.into_iter().flatten().for_each(MpiCommunicator::free);
            }
        }
    }
}

/// Waits until every rank has left and nothing is in flight. Only if it returns true may the
/// communicators be freed.
fn wait_for_all_to_leave(shared: &SharedEndpoint) -> bool {
    let started = Instant::now();
    let mut seen = {
        let mut endpoint = shared.lock();
        let messages = endpoint.barrier.enter();
        if endpoint.send_barrier(messages).is_err() {
            return false;
        }
        endpoint.moves
    };
    loop {
        {
            let endpoint = shared.lock();
            // the last frames of neighbours are the only ones that may arrive after the barrier
            let is_done = endpoint.barrier.is_complete()
                && endpoint.peers.staying.is_empty()
                && endpoint.requests.is_empty()
                && endpoint.contexts.is_empty();
            if is_done {
                return !endpoint.has_unmatched;
            }
            // a rank that has failed does not enter the barrier
            if endpoint.peers.has_failed_neighbour
                || started.elapsed() >= endpoint.settings.drop_patience
            {
                return false;
            }
        }
        if shared.wait(Duration::from_millis(10), &mut seen).is_err() {
            return false;
        }
    }
}

impl MpiEndpoint {
    /// Returns true on a thread that may not use this endpoint, while MPI is alive.
    pub(super) fn is_on_another_thread(&self) -> bool {
        let data = self.data.as_ref();
        data.is_some_and(MpiCommunicator::is_on_another_thread) && check_alive().is_ok()
    }

    /// Removes a context and sends its last frame. Returns what this rank leaves. The last one takes the endpoint with it, and one
    /// that is dropped within a call ends the others.
    fn leave(&mut self, number: u64) -> Leaving {
        let Some(context) = self.contexts.get_mut(&number) else { return Leaving::PlanContext };
        context.is_open = false;
        let is_within_a_call = !context.receives.is_empty() || thread::panicking();
        self.has_unmatched |= !context.early.is_empty();
        let waiting_for_this: BTreeSet<usize> = context
            .receives
            .iter()
            .map(|receive| receive.header.peer)
            .chain(context.sends.iter().map(|(key, _)| key.peer))
            .collect();
        let has_messages_left = |(_, gather): &(&u64, &TreeAllGather)| gather.has_messages_left();
        let unfinished = context.all_gathers.iter().filter(has_messages_left);
        let unfinished = unfinished.map(|(&round, _)| round).collect();
        let (started, step) = (context.started, context.step);
        if context.has_unsent() {
            // what a send needs to complete
            context.receives.clear();
            context.early.clear();
        } else {
            self.contexts.remove(&number);
        }
        let is_last = !self.contexts.values().any(|context| context.is_open);
        let is_healthy = self.failed.is_none() && !is_within_a_call;
        let leaving = match (is_last, is_healthy) {
            (false, _) => Leaving::PlanContext,
            (true, true) => Leaving::MpiEndpoint,
            (true, false) => Leaving::FailedEndpoint,
        };
        // the last frame also to neighbours that have left: they may be waiting for it in their
        // drop
        let neighbours = if is_last { &self.peers.neighbours } else { &self.peers.staying };
        let mut peers: BTreeSet<usize> = neighbours.iter().copied().collect();
        if !is_healthy {
            peers.extend(waiting_for_this);
            peers.remove(&self.rank);
        }
        let rank = self.rank as u64;
        let frame = ControlFrame::Leave { context: number, rank, started, leaving, unfinished };
        for peer in peers {
            // a rank that does not get it fails at its deadline
            drop(self.send_to_each([peer], &frame));
        }
        if is_last {
            // frames of contexts that this rank has not created concern the others only
            self.has_unmatched |= self.contexts.values().any(|context| !context.early.is_empty());
            self.contexts.retain(|_, context| context.has_unsent());
            self.next_context = u64::MAX;
        } else if is_within_a_call && self.failed.is_none() {
            let what = "a plan that shares this endpoint was dropped within a call".to_owned();
            self.abort(&Error::Comm { peer: self.rank, step, what });
        }
        leaving
    }

    /// Sends messages of the barrier.
    pub(super) fn send_barrier(&mut self, messages: Vec<BarrierMessage>) -> Result<()> {
        for BarrierMessage { receiver, round } in messages {
            self.send_to_each([receiver], &ControlFrame::Barrier { round: u64::from(round) })?;
        }
        Ok(())
    }

    /// Cancels the receives of blocks, and advances MPI until they have ended and this rank's
    /// frames have left. Receives that can no longer be cancelled are leaked with their buffers.
    fn cancel(&mut self) {
        let started = Instant::now();
        let is_receive = |kind: &MessageKind| matches!(kind, MessageKind::DataReceive { .. });
        let is_awaited =
            |kind: &MessageKind| is_receive(kind) || matches!(kind, MessageKind::FrameSend { .. });
        if self.requests.cancel_receives(is_receive).is_err() {
            return;
        }
        let at = PeerStep::of(self.rank);
        while self.requests.kinds().any(is_awaited) && started.elapsed() < LAST_FRAMES {
            if self.requests.test(at).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
