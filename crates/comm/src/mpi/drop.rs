//! Dropping an endpoint: see "Lifetime" in the documentation of [`super`].

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{Mpi, ffi::PeerStep, frame::Frame, messages::MessageKind, requests::Mode};

/// Time for which a rank that failed stays to send its last frames: enough for short messages, and
/// short beside the least deadline of 1 s.
const LAST_FRAMES: Duration = Duration::from_millis(100);

impl Drop for Mpi {
    fn drop(&mut self) {
        if self.enter().is_err() {
            return;
        }
        let is_healthy = self.failed.is_none() && self.receives.is_empty() && !thread::panicking();
        let unfinished = self.all_gathers.iter().filter(|(_, gather)| gather.has_messages_left());
        let unfinished = unfinished.map(|(&round, _)| round).collect();
        let Ok(frame) = (Frame::Leave { started: self.started, unfinished }).encode() else {
            return;
        };
        // also to ranks that have left: they may be waiting for it in their drop
        let rank = self.rank;
        for peer in (0..self.ranks).filter(|&peer| peer != rank) {
            let kind = MessageKind::FrameSend { peer };
            // a rank that does not get it fails at its deadline
            drop(self.send_frame_as(Mode::Standard, peer, &frame, kind));
        }
        if !is_healthy {
            self.flush();
        } else if self.wait_for_all_to_leave() {
            let communicators = [self.data.take(), self.control.take()];
            communicators.into_iter().flatten().for_each(super::Communicator::free);
        }
    }
}

impl Mpi {
    /// Waits until every rank has left and nothing is in flight. Only if it returns true may the
    /// communicators be freed.
    fn wait_for_all_to_leave(&mut self) -> bool {
        let started = Instant::now();
        loop {
            let is_done = self.peers.all_have_left(self.rank)
                && self.requests.is_empty()
                && self.early.is_empty();
            if is_done || started.elapsed() >= self.settings.drop_patience {
                return is_done;
            }
            if self.wait(Duration::from_millis(10)).is_err() {
                return false;
            }
        }
    }

    /// Advances MPI until this rank's frames have left.
    fn flush(&mut self) {
        let started = Instant::now();
        let is_frame = |kind: &MessageKind| matches!(kind, MessageKind::FrameSend { .. });
        let at = PeerStep { peer: self.rank, step: self.step };
        while self.requests.kinds().any(is_frame) && started.elapsed() < LAST_FRAMES {
            if self.requests.test(at).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}
