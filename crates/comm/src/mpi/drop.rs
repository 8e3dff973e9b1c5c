//! Dropping an endpoint: see "Lifetime" in the documentation of [`super`].

use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

use annulus_core::Result;

use super::{
    Mpi, circulant::BarrierMessage, communicator::Communicator, ffi::PeerStep, frame::Frame,
    lifetime::check_alive, messages::MessageKind, parked,
};

/// Time for which a rank that failed stays to send its last frames and to cancel its receives:
/// enough for short messages, and short beside the least deadline of 1 s.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.is_on_another_thread() {
            let detached = Self::detached(self.rank, self.ranks);
            parked::park(std::mem::replace(self, detached));
            return;
        }
        if self.enter().is_err() {
            return;
        }
        let is_healthy = self.failed.is_none() && self.receives.is_empty() && !thread::panicking();
        let unfinished = self.all_gathers.iter().filter(|(_, gather)| gather.has_messages_left());
        let unfinished = unfinished.map(|(&round, _)| round).collect();
        let frame = Frame::Leave {
            rank: self.rank as u64,
            started: self.started,
            has_failed: !is_healthy,
            unfinished,
        };
        // also to neighbours that have left: they may be waiting for it in their drop
        let mut peers: BTreeSet<usize> = self.peers.neighbours().iter().copied().collect();
        if !is_healthy {
            // these wait for this rank
            peers.extend(self.receives.iter().map(|receive| receive.header.peer));
            peers.extend(self.peers.receivers());
            peers.remove(&self.rank);
        }
        for peer in peers {
            // a rank that does not get it fails at its deadline
            drop(self.send_to_each([peer], &frame));
        }
        if !is_healthy {
            self.cancel();
        } else if self.wait_for_all_to_leave() {
            let communicators = [self.data.take(), self.control.take()];
            communicators.into_iter().flatten().for_each(Communicator::free);
        }
    }
}

impl Mpi {
    /// Returns true on a thread that may not use this endpoint, while MPI is alive.
    pub(super) fn is_on_another_thread(&self) -> bool {
        let data = self.data.as_ref();
        data.is_some_and(Communicator::is_on_another_thread) && check_alive().is_ok()
    }

    /// Waits until every rank has left and nothing is in flight. Only if it returns true may the
    /// communicators be freed.
    fn wait_for_all_to_leave(&mut self) -> bool {
        let started = Instant::now();
        let messages = self.barrier.enter();
        if self.send_barrier(messages).is_err() {
            return false;
        }
        loop {
            // the last frames of neighbours are the only ones that may arrive after the barrier
            let is_done = self.barrier.is_complete()
                && self.peers.staying().is_empty()
                && self.requests.is_empty()
                && self.queued.is_empty()
                && self.early.is_empty();
            if is_done {
                return true;
            }
            // a rank that has failed does not enter the barrier
            if self.peers.has_failed_neighbour() || started.elapsed() >= self.settings.drop_patience
            {
                return false;
            }
            if self.wait(Duration::from_millis(10)).is_err() {
                return false;
            }
        }
    }

    /// Sends messages of the barrier.
    pub(super) fn send_barrier(&mut self, messages: Vec<BarrierMessage>) -> Result<()> {
        for BarrierMessage { receiver, round } in messages {
            self.send_to_each([receiver], &Frame::Barrier { round: u64::from(round) })?;
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
        let at = PeerStep { peer: self.rank, step: self.step };
        while self.requests.kinds().any(is_awaited) && started.elapsed() < LAST_FRAMES {
            if self.requests.test(at).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
