//! Progress of an endpoint: advances MPI, delivers what has completed, and processes frames in the
//! order in which their sender sent them.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Error, Result};

use super::{
    endpoint::{MpiEndpoint, SharedEndpoint},
    ffi::{MpiError, PeerStep},
    frame::{ControlFrame, Leaving},
    messages::{Announcement, MessageBuffer, MessageKind, MpiReceive, ReceiveStage},
    peers::Departure,
    requests::Completed,
    transfers::WireForm,
};
use crate::message::{self, MessageKey};

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

impl SharedEndpoint {
    /// Does everything that can be done; waits at most `timeout` for something to do. The endpoint
    /// is not locked during pauses.
    ///
    /// `seen` is the number of moves that the caller has seen; it may be another thread that makes
    /// the next one.
    pub(super) fn wait(&self, timeout: Duration, seen: &mut u64) -> Result<()> {
        let started = Instant::now();
        loop {
            let (moves, idle) = {
                let mut endpoint = self.lock();
                endpoint.pump()?;
                (endpoint.moves, endpoint.idle_since.elapsed())
            };
            let left = timeout.saturating_sub(started.elapsed());
            if std::mem::replace(seen, moves) != moves || left.is_zero() {
                return Ok(());
            }
            if idle < BUSY_TIME {
                thread::yield_now();
            } else {
                thread::sleep((idle / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE).min(left));
            }
        }
    }
}

impl MpiEndpoint {
    /// Does everything that can be done without waiting.
    ///
    /// # Errors
    /// A fatal one ([`Error::is_fatal`]) ends the endpoint.
    pub(super) fn pump(&mut self) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        if self.try_pump().inspect_err(|error| self.fail(error))? {
            self.idle_since = Instant::now();
            self.moves += 1;
        }
        Ok(())
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
        match self.lost_peer() {
            Some(PeerStep { peer, step }) => Err(Error::PeerLost { peer, step }),
            None => Ok(moved),
        }
    }

    /// Returns a rank that has left a context in which this one waits for it.
    fn lost_peer(&mut self) -> Option<PeerStep> {
        if self.contexts.values().all(|context| context.departures.is_empty()) {
            return None;
        }
        let now = Instant::now();
        self.peers.poll_grace(now);
        let open = || self.contexts.values().filter(|context| context.is_open);
        let missing = open().find_map(|context| {
            context.departures.iter().find_map(|(peer, departure)| {
                let overdue = self.peers.is_overdue(departure.at, now);
                let step = context.missing_from(peer, departure, overdue)?;
                Some(PeerStep { peer, step })
            })
        });
        // after those: a rank that left within an all-gather may have done so because it lost
        // another one, which is then the one to name
        missing.or_else(|| {
            open().find_map(|context| {
                let mut left = context.departures.iter();
                let (peer, _) = left.find(|(_, departure)| context.is_unfinished_by(departure))?;
                Some(PeerStep { peer, step: context.step })
            })
        })
    }

    /// Starts receiving the next frame. Returns false if there is none.
    fn start_frame_receive(&mut self) -> Result<bool> {
        let Some(control) = &self.control else { return Ok(false) };
        let kind =
            |peer: usize| MessageKind::FrameReceive { peer, number: self.peers.all[peer].matched };
        let Some(peer) = self.requests.receive_any(control, kind)? else { return Ok(false) };
        self.peers.all[peer].matched += 1;
        Ok(true)
    }

    /// Delivers all messages that have completed. Returns true if there were any.
    fn deliver_completed(&mut self) -> Result<bool> {
        let completed = self.requests.test(PeerStep::of(self.rank))?;
        let moved = !completed.is_empty();
        for message in completed {
            self.deliver(message)?;
        }
        Ok(moved)
    }

    /// Accounts for a message that has completed, or that was lost with a rank that has left.
    pub(super) fn deliver(&mut self, completed: Completed) -> Result<()> {
        let Completed { kind, buffer, outcome } = completed;
        let peer = kind.peer();
        let context = kind.context().and_then(|context| self.contexts.get(&context));
        let step = context.map_or(0, |context| context.step);
        let delivered = outcome.is_ok();
        match outcome {
            Ok(()) => {}
            Err(MpiError::Length) => {
                let what = match kind {
                    MessageKind::DataReceive { key: MessageKey { channel, tag, .. }, .. } => {
                        format!("message {channel:?} {tag} has another length than its receive")
                    }
                    _ => "a control message has another length than MPI has reported".to_owned(),
                };
                return Err(Error::Comm { peer, step, what });
            }
            // a rank that has left needs no more frames
            Err(_) if self.needs_no_frames(&kind) => {}
            Err(error) => return Err(error.into_error(PeerStep { peer, step })),
        }
        match kind {
            MessageKind::DataSend { context, key } => return self.finish_send(context, key),
            MessageKind::DataReceive { context, key } => {
                return self.finish_receive(context, key, buffer);
            }
            MessageKind::FrameReceive { number, .. } if delivered => {
                let frame = buffer.into_host().map(|frame| (number, frame));
                self.peers.all[peer].out_of_order.extend(frame);
                return self.process_frames(peer);
            }
            MessageKind::FrameReceive { .. } | MessageKind::FrameSend { .. } => {}
            MessageKind::GatherParts { context, round, .. } => {
                let context = self.contexts.get_mut(&context);
                if let Some(gather) = context.and_then(|own| own.all_gathers.get_mut(&round)) {
                    gather.unsent -= 1;
                }
            }
        }
        Ok(())
    }

    /// Returns true for a frame from or to a rank that has left.
    fn needs_no_frames(&self, kind: &MessageKind) -> bool {
        let peer = kind.peer();
        let has_left = || {
            let mut contexts = self.contexts.values();
            contexts.any(|context| context.departures.get(peer).is_some())
        };
        let is_data =
            matches!(kind, MessageKind::DataSend { .. } | MessageKind::DataReceive { .. });
        !is_data && (self.peers.left.contains_key(&peer) || has_left())
    }

    /// Ends a posted receive, whose bytes have arrived in `arrived`.
    fn finish_receive(
        &mut self,
        context: u64,
        key: MessageKey,
        arrived: MessageBuffer,
    ) -> Result<()> {
        // not by `self.context`, which would borrow the stock of staging buffers too
        let Some(context) = self.contexts.get_mut(&context).filter(|context| context.is_open)
        else {
            // it was cancelled, or arrived while its plan was dropped
            return Ok(());
        };
        let step = context.step;
        let MessageKey { peer, channel, tag } = key;
        let mut receives = context.receives.iter_mut();
        let Some(receive) = receives.find(|receive| MessageKey::of(&receive.header) == key) else {
            let what = format!("message {channel:?} {tag} without a receive");
            return Err(Error::Comm { peer, step, what });
        };
        if receive.stage == ReceiveStage::Staged {
            if let (Some(MessageBuffer::Host(into)), MessageBuffer::Host(staged)) =
                (&mut receive.buffer, arrived)
            {
                if let Some(into) = into.bytes_mut() {
                    let from = 0..receive.header.bytes();
                    let from = std::slice::from_ref(&from);
                    message::copy(staged.bytes(), from, into, &receive.header.ranges);
                }
                self.staging.give(staged);
            }
        } else {
            receive.buffer = Some(arrived);
        }
        receive.stage = ReceiveStage::Arrived;
        self.peers.all[peer].hear();
        self.work.work(Instant::now());
        Ok(())
    }

    /// Processes the frames of `peer` that have arrived, in the order in which it sent them.
    fn process_frames(&mut self, peer: usize) -> Result<()> {
        while let Some(buffer) = {
            let next = self.peers.all[peer].processed;
            self.peers.all[peer].out_of_order.remove(&next)
        } {
            self.peers.all[peer].processed += 1;
            self.peers.all[peer].hear();
            self.process_frame(peer, ControlFrame::decode(buffer.bytes(), peer)?)?;
        }
        Ok(())
    }

    fn process_frame(&mut self, peer: usize, frame: ControlFrame) -> Result<()> {
        match frame {
            ControlFrame::Heartbeat { rank, count, age } => {
                let rank = self.check_rank(peer, rank)?;
                self.work.learn(rank, count, Duration::from_nanos(age), Instant::now());
            }
            // frames of a context that this rank has dropped concern the others only
            ControlFrame::Announce { context, .. } if self.has_dropped(context) => {
                self.has_unmatched = true;
            }
            ControlFrame::GatherParts { context, .. } if self.has_dropped(context) => {}
            ControlFrame::Announce { context, message } => {
                return self.match_announcement(context, message);
            }
            ControlFrame::GatherParts { context, round, parts } => {
                for run in parts {
                    if !self.all_gather(context, round).put_run(&run) {
                        let what = format!(
                            "parts of all-gather {round} of {} ranks from rank {} on, which have \
                             sent them or are no ranks: rounds only grow",
                            run.ranks, run.first
                        );
                        let step = self.context(context).step;
                        return Err(Error::Comm { peer, step, what });
                    }
                }
                self.forward_parts(context, round)?;
            }
            ControlFrame::Abort { rank, what } => {
                let rank = usize::try_from(rank).unwrap_or(usize::MAX);
                return Err(Error::Aborted { rank, what });
            }
            ControlFrame::Leave { context, rank, started, leaving, unfinished } => {
                let rank = self.check_rank(peer, rank)?;
                let at = Instant::now();
                let departure = Departure { at, is_forwarded: rank != peer, started, unfinished };
                // a rank that drops its plan knows that itself
                if rank != self.rank && !self.has_dropped(context) {
                    self.context(context).departures.add(rank, departure);
                }
                if leaving != Leaving::PlanContext {
                    self.leave_endpoint(peer, at, leaving == Leaving::FailedEndpoint);
                }
            }
            ControlFrame::Barrier { round } => {
                let Some(messages) = self.barrier.receive(round) else {
                    let what = format!("a second message of round {round} of a barrier");
                    return Err(Error::Comm { peer, step: 0, what });
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
            step: 0,
            what: format!("a control message about rank {rank} of {}", self.ranks),
        })
    }

    /// Forwards the last frames of ranks that have left to the neighbours, if this rank is in a
    /// call that such a rank can no longer finish: other ranks may wait for it that are not its
    /// neighbours. In a job that ends in order nothing is forwarded.
    fn forward_departures(&mut self) -> Result<()> {
        // a frame that is sent after the last one could arrive after its receiver has freed the
        // communicator
        if self.barrier.has_entered() {
            return Ok(());
        }
        let mut frames = Vec::new();
        for (&number, context) in self.contexts.iter_mut().filter(|(_, context)| context.is_open) {
            if context.departures.is_empty() {
                continue;
            }
            let mut departures = std::mem::take(&mut context.departures);
            let is_busy = context.is_busy();
            let concerned = departures.take_unforwarded(|left| is_busy || context.misses(left));
            for rank in concerned {
                let Some(Departure { started, unfinished, .. }) = departures.get(rank).cloned()
                else {
                    continue;
                };
                let leaving = Leaving::PlanContext;
                let rank = rank as u64;
                frames.push(ControlFrame::Leave {
                    context: number,
                    rank,
                    started,
                    leaving,
                    unfinished,
                });
            }
            context.departures = departures;
        }
        for frame in frames {
            self.send_to_each(self.peers.staying.clone(), &frame)?;
        }
        Ok(())
    }

    /// Starts the receive of an announced message, or keeps the announcement for later.
    ///
    /// # Errors
    /// [`Error::Comm`] if the message is a duplicate or has another length than its receive.
    fn match_announcement(&mut self, context: u64, announcement: Announcement) -> Result<()> {
        let Announcement { key, step, bytes, piece, number } = announcement;
        let MessageKey { peer, channel, tag } = key;
        let is_expected = |receive: &MpiReceive| {
            announcement.is_for(receive) && receive.stage == ReceiveStage::Posted
        };
        let own = self.context(context);
        if let Some(index) = own.receives.iter().position(is_expected) {
            let header = &own.receives[index].header;
            let want = header.bytes();
            if bytes != want {
                let what =
                    format!("message {channel:?} {tag} truncated: got {bytes} bytes, want {want}");
                return Err(Error::Comm { peer, step: header.step, what });
            }
            let tag = self.tags.announced(number, channel);
            return self.begin_receive(context, index, WireForm { tag, piece });
        }
        if own.last_tags.has_passed(key) || own.early.iter().any(|early| early.key == key) {
            let what = format!("duplicate message {channel:?} {tag}");
            return Err(Error::Comm { peer, step, what });
        }
        own.early.push(announcement);
        Ok(())
    }

    /// Matches early announcements with receives that were posted since.
    pub(super) fn match_early(&mut self, number: u64) -> Result<()> {
        let context = self.context(number);
        let mut early = std::mem::take(&mut context.early);
        early.sort_by_key(|early| early.key.tag);
        let is_posted =
            |early: &Announcement| context.receives.iter().any(|receive| early.is_for(receive));
        let (matched, rest): (Vec<_>, Vec<_>) = early.into_iter().partition(is_posted);
        context.early = rest;
        matched.into_iter().try_for_each(|early| self.match_announcement(number, early))
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::{Channel, HostBuffer};

    use super::{super::frame::PartRun, *};

    fn lost(kind: MessageKind) -> Completed {
        Completed {
            kind,
            buffer: MessageBuffer::Host(HostBuffer::zeroed(0).unwrap()),
            outcome: Err(MpiError::PeerLost),
        }
    }

    fn departure() -> Departure {
        Departure { at: Instant::now(), is_forwarded: false, started: 9, unfinished: Vec::new() }
    }

    /// Rank 0 of three, with one frame of all-gather 7 in flight to rank 1.
    fn gathering() -> MpiEndpoint {
        let mut rank = MpiEndpoint::detached(0, 3);
        assert_eq!(rank.open_context(), Ok(0));
        rank.all_gather(0, 7).unsent = 1;
        rank
    }

    #[test]
    fn a_part_of_an_all_gather_that_was_lost_with_its_receiver_counts_as_sent() {
        let parts = MessageKind::GatherParts { context: 0, peer: 1, round: 7 };
        let mut rank = gathering();
        rank.context(0).departures.add(1, departure());
        assert_eq!(rank.deliver(lost(parts)), Ok(()));
        assert_eq!(rank.all_gather(0, 7).unsent, 0);
        // the same loss to a rank that has not left is an error
        let mut rank = gathering();
        assert_eq!(rank.deliver(lost(parts)), Err(Error::PeerLost { peer: 1, step: 0 }));
    }

    #[test]
    fn a_frame_that_was_lost_with_its_sender_is_not_processed() {
        let mut rank = gathering();
        rank.leave_endpoint(1, Instant::now(), false);
        assert_eq!(rank.deliver(lost(MessageKind::FrameReceive { peer: 1, number: 0 })), Ok(()));
        assert_eq!((rank.peers.all[1].out_of_order.len(), rank.peers.all[1].processed), (0, 0));
        // a lost block is an error
        let key = MessageKey { peer: 1, channel: Channel::Kv, tag: 3 };
        rank.context(0).sends.push((key, 5));
        let error = rank.deliver(lost(MessageKind::DataSend { context: 0, key }));
        assert_eq!(error, Err(Error::PeerLost { peer: 1, step: 0 }));
    }

    #[test]
    fn frames_of_other_contexts_wait_or_are_ignored() {
        let mut rank = gathering();
        let run = PartRun { first: 1, ranks: 1, bytes: [5].into() };
        let parts =
            |context| ControlFrame::GatherParts { context, round: 2, parts: vec![run.clone()] };
        let key = MessageKey { peer: 1, channel: Channel::Kv, tag: 1 };
        let message = Announcement { key, step: 0, bytes: 8, piece: 8, number: 0 };
        let announce = |context| ControlFrame::Announce { context, message };
        // rank 1 has created context 1, this rank has not
        assert_eq!(rank.process_frame(1, parts(1)), Ok(()));
        assert_eq!(rank.process_frame(1, announce(1)), Ok(()));
        assert!(rank.all_gather(1, 2).has(1) && !rank.all_gather(0, 2).has(1));
        assert_eq!(rank.context(1).early.len(), 1);
        assert_eq!(rank.open_context(), Ok(1));
        assert!(rank.all_gather(1, 2).has(1));
        // this rank has dropped context 0
        rank.contexts.remove(&0);
        assert!(!rank.has_unmatched);
        assert_eq!(rank.process_frame(1, parts(0)), Ok(()));
        assert_eq!(rank.process_frame(1, announce(0)), Ok(()));
        assert!(rank.has_unmatched && !rank.contexts.contains_key(&0));
    }
}
