//! Progress of an endpoint: advances MPI, delivers what has completed, and processes frames in the
//! order in which their sender sent them.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Channel, Error, MessageHeader, Result};

use super::{
    Mpi,
    all_gather::AllGather,
    ffi::PeerStep,
    frame::Frame,
    message_buffer::MessageBuffer,
    messages::{Announcement, MessageKind, PostedReceive, ReceiveStage},
    peers::Departure,
    requests::{Completed, MessageError},
};
use crate::ranges;

/// Time after the last progress for which a wait only yields the core between two polls: several
/// times the latency of a short message, which a pause would prolong.
const BUSY_TIME: Duration = Duration::from_micros(200);
/// Shortest and longest pause between two polls of a longer wait. Within them a pause lasts an
/// eighth of the idle time, so that it prolongs a wait by little, and by 1 ms at most.
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// Largest number of frames received between two tests of what is in flight, which bounds the
/// memory of frames that have not completed.
const MOST_FRAMES: usize = 256;

impl Mpi {
    /// Does everything that can be done; waits at most `patience` for something to do.
    pub(super) fn wait(&mut self, patience: Duration) -> Result<()> {
        let started = Instant::now();
        while !self.pump()? {
            let left = patience.saturating_sub(started.elapsed());
            if left.is_zero() {
                break;
            }
            let idle = self.idle_since.elapsed();
            if idle < BUSY_TIME {
                thread::yield_now();
            } else {
                thread::sleep((idle / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE).min(left));
            }
        }
        Ok(())
    }

    /// Does everything that can be done without waiting. Returns true if there was anything to do.
    ///
    /// # Errors
    /// A fatal one ([`Error::is_fatal`]) ends the endpoint.
    pub(super) fn pump(&mut self) -> Result<bool> {
        self.check_alive()?;
        self.enter()?;
        let moved = self.try_pump().inspect_err(|error| self.fail(error))?;
        if moved {
            self.idle_since = Instant::now();
        }
        Ok(moved)
    }

    /// Records the error that ends this endpoint, if it is fatal, and forwards an abort.
    pub(super) fn fail(&mut self, error: &Error) {
        if error.is_fatal() && self.failed.is_none() {
            self.failed = Some(error.clone());
            if matches!(error, Error::Aborted { .. }) {
                self.flood_abort(error);
            }
        }
    }

    fn try_pump(&mut self) -> Result<bool> {
        let mut moved = self.deliver_completed()?;
        // until no frame is left: `missing_from` judges peers by what they sent, so all of it must
        // have been received
        loop {
            let mut frames = 0;
            while frames < MOST_FRAMES && self.start_frame_receive()? {
                frames += 1;
            }
            if frames > 0 {
                self.deliver_completed()?;
                moved = true;
            }
            if frames < MOST_FRAMES {
                break;
            }
        }
        self.forward_departures()?;
        let left = self.peers.poll_left();
        let missing = left.iter().find_map(|&peer| self.missing_from(peer));
        // after those: a rank that left within an all-gather may have done so because it lost
        // another one, which is then the one to name
        match missing.or_else(|| left.iter().find_map(|&peer| self.unfinished_by(peer))) {
            Some(PeerStep { peer, step }) => Err(Error::PeerLost { peer, step }),
            None => Ok(moved),
        }
    }

    /// Starts receiving the next frame. Returns false if there is none.
    fn start_frame_receive(&mut self) -> Result<bool> {
        let Some(control) = &self.control else { return Ok(false) };
        let kind =
            |peer: usize| MessageKind::FrameReceive { peer, number: self.peers[peer].matched };
        let Some(peer) = self.requests.receive_any(control, kind)? else { return Ok(false) };
        self.peers[peer].matched += 1;
        Ok(true)
    }

    /// Delivers all messages that have completed. Returns true if there were any.
    fn deliver_completed(&mut self) -> Result<bool> {
        let completed = self.requests.test(PeerStep { peer: self.rank, step: self.step })?;
        let moved = !completed.is_empty();
        for message in completed {
            self.deliver(message)?;
        }
        Ok(moved)
    }

    /// Accounts for a message that has completed, or that was lost with a rank that has left.
    pub(super) fn deliver(&mut self, completed: Completed<MessageKind>) -> Result<()> {
        let Completed { kind, buffer, outcome } = completed;
        let peer = kind.peer();
        let delivered = outcome.is_ok();
        match outcome {
            Ok(()) => {}
            Err(MessageError::Length) => {
                let what = match kind {
                    MessageKind::DataReceive { channel, tag, .. } => {
                        format!("message {channel:?} {tag} has another length than its receive")
                    }
                    _ => "a control message has another length than MPI has reported".to_owned(),
                };
                return Err(Error::Comm { peer, step: self.step, what });
            }
            // a rank that has left needs no more frames
            Err(MessageError::Mpi(_)) if self.peers.has_left(peer) && !kind.is_data() => {}
            Err(MessageError::Mpi(error)) => {
                return Err(error.into_error(PeerStep { peer, step: self.step }));
            }
        }
        match kind {
            MessageKind::DataSend { key, step } => return self.finish_send(key, step),
            MessageKind::DataReceive { channel, tag, .. } => {
                return self.finish_receive(peer, channel, tag, buffer);
            }
            MessageKind::FrameReceive { number, .. } if delivered => {
                let frame = buffer.into_host().map(|frame| (number, frame));
                self.peers[peer].out_of_order.extend(frame);
                return self.process_frames(peer);
            }
            MessageKind::FrameReceive { .. } | MessageKind::FrameSend { .. } => {}
            MessageKind::GatherParts { round, .. } => {
                if let Some(all_gather) = self.all_gathers.get_mut(&round) {
                    all_gather.unsent -= 1;
                }
            }
        }
        Ok(())
    }

    /// Ends a posted receive, whose bytes have arrived in `arrived`.
    fn finish_receive(
        &mut self,
        peer: usize,
        channel: Channel,
        tag: u64,
        arrived: MessageBuffer,
    ) -> Result<()> {
        let Some(receive) =
            self.receives.iter_mut().find(|receive| receive.is_for(peer, channel, tag))
        else {
            return Err(Error::Comm {
                peer,
                step: self.step,
                what: format!("message {channel:?} {tag} without a receive"),
            });
        };
        if receive.stage == ReceiveStage::Staged {
            if let (Some(MessageBuffer::Host(into)), MessageBuffer::Host(staged)) =
                (&mut receive.buffer, arrived)
            {
                if let Some(into) = into.bytes_mut() {
                    let from = 0..receive.header.bytes();
                    let from = std::slice::from_ref(&from);
                    ranges::copy(staged.bytes(), from, into, &receive.header.ranges);
                }
                self.staging.give(staged);
            }
        } else {
            receive.buffer = Some(arrived);
        }
        receive.stage = ReceiveStage::Arrived;
        self.peers[peer].hear();
        self.work.work(Instant::now());
        Ok(())
    }

    /// Processes the frames of `peer` that have arrived, in the order in which it sent them.
    fn process_frames(&mut self, peer: usize) -> Result<()> {
        while let Some(buffer) = {
            let next = self.peers[peer].processed;
            self.peers[peer].out_of_order.remove(&next)
        } {
            self.peers[peer].processed += 1;
            self.peers[peer].hear();
            self.process_frame(peer, Frame::decode(buffer.bytes(), peer)?)?;
        }
        Ok(())
    }

    fn process_frame(&mut self, peer: usize, frame: Frame) -> Result<()> {
        match frame {
            Frame::Heartbeat { rank, count, age } => {
                let rank = self.check_rank(peer, rank)?;
                self.work.learn(rank, count, Duration::from_nanos(age), Instant::now());
            }
            Frame::Announce { channel, tag, step, bytes, piece } => {
                let step = usize::try_from(step).unwrap_or(usize::MAX);
                let announcement = Announcement { peer, channel, tag, step, bytes, piece };
                return self.match_announcement(announcement);
            }
            Frame::GatherParts { round, parts } => {
                for (rank, part) in parts {
                    let is_new = usize::try_from(rank)
                        .is_ok_and(|rank| self.all_gather(round).put(rank, part));
                    if !is_new {
                        let what = format!(
                            "a part of all-gather {round} of rank {rank}, which has sent one or is \
                             no rank: rounds only grow"
                        );
                        return Err(Error::Comm { peer, step: self.step, what });
                    }
                }
                self.forward_parts(round)?;
            }
            Frame::Abort { rank, what } => {
                let rank = usize::try_from(rank).unwrap_or(usize::MAX);
                return Err(Error::Aborted { rank, what });
            }
            Frame::Leave { rank, started, has_failed, unfinished } => {
                let rank = self.check_rank(peer, rank)?;
                let at = Instant::now();
                let is_forwarded = rank != peer;
                let departure = Departure { at, is_forwarded, has_failed, started, unfinished };
                // a rank that drops its endpoint knows that itself
                if rank != self.rank {
                    self.peers.leave(rank, departure);
                }
            }
            Frame::Barrier { round } => {
                let Some(messages) = self.barrier.receive(round) else {
                    let what = format!("a second message of round {round} of a barrier");
                    return Err(Error::Comm { peer, step: self.step, what });
                };
                self.send_barrier(messages)?;
            }
        }
        Ok(())
    }

    /// Returns the rank that a frame of `peer` names.
    fn check_rank(&self, peer: usize, rank: u64) -> Result<usize> {
        let known = usize::try_from(rank).ok().filter(|&rank| rank < self.ranks);
        known.ok_or_else(|| Error::Comm {
            peer,
            step: self.step,
            what: format!("a control message about rank {rank} of {}", self.ranks),
        })
    }

    /// Forwards the last frames of ranks that have left to the neighbours, if this rank is in a
    /// call that such a rank can no longer finish: other ranks may wait for it that are not its
    /// neighbours. In a job that ends in order nothing is forwarded.
    fn forward_departures(&mut self) -> Result<()> {
        // a frame that is sent after the last one could arrive after its receiver has freed the
        // communicator
        if !self.peers.has_unforwarded() || self.barrier.has_entered() {
            return Ok(());
        }
        let is_busy = self.is_working
            || self.peers.has_unsent()
            || self.receives.iter().any(|receive| receive.stage != ReceiveStage::Arrived);
        let all_gathers = &self.all_gathers;
        let needs = |departure: &Departure| {
            let is_missing = |(round, gather): (&u64, &AllGather)| {
                gather.is_incomplete()
                    && (gather.number >= Some(departure.started)
                        || departure.unfinished.contains(round))
            };
            is_busy || all_gathers.iter().any(is_missing)
        };
        for rank in self.peers.take_unforwarded(needs) {
            let Some(Departure { started, has_failed, unfinished, .. }) =
                self.peers[rank].departure().cloned()
            else {
                continue;
            };
            let frame = Frame::Leave { rank: rank as u64, started, has_failed, unfinished };
            self.send_to_each(self.peers.staying().to_vec(), &frame)?;
        }
        Ok(())
    }

    /// Starts the receive of an announced message, or keeps the announcement for later.
    ///
    /// # Errors
    /// [`Error::Comm`] if the message is a duplicate or has another length than its receive.
    fn match_announcement(&mut self, announcement: Announcement) -> Result<()> {
        let Announcement { peer, channel, tag, step, bytes, piece } = announcement;
        let is_expected = |receive: &PostedReceive| {
            announcement.is_for(receive) && receive.stage == ReceiveStage::Posted
        };
        if let Some(index) = self.receives.iter().position(is_expected) {
            let MessageHeader { step, .. } = self.receives[index].header;
            let want = self.receives[index].header.bytes();
            if bytes != want {
                let what =
                    format!("message {channel:?} {tag} truncated: got {bytes} bytes, want {want}");
                return Err(Error::Comm { peer, step, what });
            }
            return self.begin_receive(index, piece);
        }
        let is_late = self.last_tags.get(&(peer, channel)).is_some_and(|&last| tag <= last);
        if is_late || self.early.iter().any(|early| early.is_same(&announcement)) {
            return Err(Error::Comm {
                peer,
                step,
                what: format!("duplicate message {channel:?} {tag}"),
            });
        }
        self.early.push(announcement);
        Ok(())
    }

    /// Matches early announcements with receives that were posted since.
    pub(super) fn match_early(&mut self) -> Result<()> {
        let mut early = std::mem::take(&mut self.early);
        early.sort_by_key(|early| early.tag);
        let is_posted =
            |early: &Announcement| self.receives.iter().any(|receive| early.is_for(receive));
        let (matched, rest): (Vec<_>, Vec<_>) = early.into_iter().partition(is_posted);
        self.early = rest;
        matched.into_iter().try_for_each(|early| self.match_announcement(early))
    }

    /// Returns the step in which a message from or to `peer`, which has left, can no longer
    /// complete.
    fn missing_from(&self, peer: usize) -> Option<PeerStep> {
        let departure = self.peers[peer].departure()?;
        // its own last frame comes after all its other frames, but its blocks may take a little
        // longer
        let overdue = self.peers.is_overdue(departure);
        let is_final = overdue || !departure.is_forwarded;
        let is_missing = |receive: &&PostedReceive| match receive.stage {
            ReceiveStage::Posted => {
                receive.header.peer == peer
                    && is_final
                    && (overdue || !self.early.iter().any(|early| early.is_for(receive)))
            }
            ReceiveStage::Direct | ReceiveStage::Staged => receive.header.peer == peer && overdue,
            ReceiveStage::Arrived => false,
        };
        let receive = self.receives.iter().find(is_missing).map(|receive| receive.header.step);
        let send = || self.peers[peer].oldest_send().filter(|_| overdue);
        // a rank that started an all-gather may leave while other ranks still forward its part
        let started = Some(departure.started);
        let gather = || {
            let misses = |gather: &AllGather| gather.is_incomplete() && gather.number >= started;
            self.all_gathers.values().any(misses)
        };
        let step = receive.or_else(send).or_else(|| gather().then_some(self.step))?;
        Some(PeerStep { peer, step })
    }

    /// Returns the current step if `peer` has left without forwarding all parts of an all-gather
    /// that is incomplete here.
    fn unfinished_by(&self, peer: usize) -> Option<PeerStep> {
        let departure = self.peers[peer].departure()?;
        let is_incomplete =
            |round: &u64| self.all_gathers.get(round).is_some_and(AllGather::is_incomplete);
        let is_unfinished = departure.unfinished.iter().any(is_incomplete);
        is_unfinished.then_some(PeerStep { peer, step: self.step })
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::HostBuffer;

    use super::{
        super::{ffi::MpiError, messages::SendKey},
        *,
    };

    fn lost(kind: MessageKind) -> Completed<MessageKind> {
        Completed {
            kind,
            buffer: MessageBuffer::Host(HostBuffer::zeroed(0).unwrap()),
            outcome: Err(MessageError::Mpi(MpiError::PeerLost)),
        }
    }

    fn departure() -> Departure {
        Departure {
            at: Instant::now(),
            is_forwarded: false,
            has_failed: false,
            started: 9,
            unfinished: Vec::new(),
        }
    }

    /// Rank 0 of three, with one frame of all-gather 7 in flight to rank 1.
    fn gathering() -> Mpi {
        let mut rank = Mpi::detached(0, 3);
        rank.all_gather(7).unsent = 1;
        rank
    }

    #[test]
    fn a_part_of_an_all_gather_that_was_lost_with_its_receiver_counts_as_sent() {
        let parts = MessageKind::GatherParts { peer: 1, round: 7 };
        let mut rank = gathering();
        rank.peers.leave(1, departure());
        assert_eq!(rank.deliver(lost(parts)), Ok(()));
        assert_eq!(rank.all_gather(7).unsent, 0);
        // the same loss to a rank that has not left is an error
        let mut rank = gathering();
        assert_eq!(rank.deliver(lost(parts)), Err(Error::PeerLost { peer: 1, step: 0 }));
    }

    #[test]
    fn a_frame_that_was_lost_with_its_sender_is_not_processed() {
        let mut rank = gathering();
        rank.peers.leave(1, departure());
        assert_eq!(rank.deliver(lost(MessageKind::FrameReceive { peer: 1, number: 0 })), Ok(()));
        assert_eq!((rank.peers[1].out_of_order.len(), rank.peers[1].processed), (0, 0));
        // a lost block is an error
        rank.peers.begin_send(1, 5);
        let key = SendKey { peer: 1, channel: Channel::Kv, tag: 3 };
        let error = rank.deliver(lost(MessageKind::DataSend { key, step: 5 }));
        assert_eq!(error, Err(Error::PeerLost { peer: 1, step: 0 }));
    }
}
