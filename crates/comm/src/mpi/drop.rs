//! The drop of a handle sends the last frames of its context, and ends the endpoint with its last
//! context. See "Lifetime" in the documentation of [`super`].

use std::{
    collections::BTreeSet,
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
    messages::MessageKind,
};

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

    /// Removes a context and sends its last frame. Returns what this rank leaves. The last one
    /// takes the endpoint with it, and one that is dropped within a call ends the others.
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
