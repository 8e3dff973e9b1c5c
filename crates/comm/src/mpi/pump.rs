//! What an endpoint does whenever it is called: MPI moves, what is through is put where it belongs, frames are obeyed in their senders' order.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus_core::{Channel, Error, MessageHeader, Result};

use super::{
    Mpi,
    frame::Frame,
    gather::Gather,
    memory::Memory,
    peers::Goodbye,
    requests::{Landed, Trouble},
};
use crate::ranges;

/// What a message in flight is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Label {
    /// The bytes of a hop to `peer`.
    Sent { peer: usize, step: usize },
    /// The bytes of a hop from `peer`.
    Receive { peer: usize, channel: Channel, tag: u64 },
    /// Frame number `number` from `peer`.
    Heard { peer: usize, number: u64 },
    /// A frame to `peer` that nobody waits for.
    Said { peer: usize },
    /// A sign of life to `peer`.
    Beat { peer: usize },
    /// Parts of a gather to `peer`.
    Offered { peer: usize, round: u64 },
}

impl Label {
    const fn peer(&self) -> usize {
        match self {
            Self::Sent { peer, .. }
            | Self::Receive { peer, .. }
            | Self::Heard { peer, .. }
            | Self::Said { peer }
            | Self::Beat { peer }
            | Self::Offered { peer, .. } => *peer,
        }
    }

    /// Returns true for the bytes of a hop, false for a control message.
    const fn is_of_a_hop(&self) -> bool {
        matches!(self, Self::Sent { .. } | Self::Receive { .. })
    }
}

/// A posted receive.
pub(super) struct Receive {
    pub(super) hop: MessageHeader,
    /// The buffer that was posted, unless MPI has it.
    pub(super) buffer: Option<Memory>,
    pub(super) stage: Stage,
}

/// How far a receive is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its announcement has not come.
    Posted,
    /// MPI receives into its buffer.
    Direct,
    /// MPI receives into a staging buffer.
    Staged,
    /// The bytes are where they belong.
    Arrived,
}

impl Receive {
    pub(super) fn is_for(&self, peer: usize, channel: Channel, tag: u64) -> bool {
        (self.hop.peer, self.hop.channel, self.hop.tag) == (peer, channel, tag)
    }
}

/// An announcement whose receive is not posted yet, or waits its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Early {
    peer: usize,
    channel: Channel,
    tag: u64,
    step: usize,
    bytes: u64,
    piece: u64,
}

impl Early {
    fn is_for(&self, receive: &Receive) -> bool {
        receive.is_for(self.peer, self.channel, self.tag)
    }
}

/// While something has moved within this time, a wait only yields the core between two looks.
const AWAKE: Duration = Duration::from_micros(200);
/// Then it sleeps, an eighth as long as nothing has moved, within these bounds.
const NAP: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];
/// Frames received between two tests of what is in flight.
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
            if idle < AWAKE {
                thread::yield_now();
            } else {
                thread::sleep((idle / 8).clamp(NAP[0], NAP[1]).min(left));
            }
        }
        Ok(())
    }

    /// Does everything that can be done without waiting; whether anything was. An error is for good, unless it is the caller's.
    pub(super) fn pump(&mut self) -> Result<bool> {
        self.check_alive()?;
        self.enter()?;
        let moved = self.try_pump().inspect_err(|error| self.fail(error))?;
        if moved {
            self.idle_since = Instant::now();
        }
        Ok(moved)
    }

    /// Remembers what killed this endpoint. A bad argument does not.
    pub(super) fn fail(&mut self, error: &Error) {
        if error.is_fatal() {
            self.failed.get_or_insert_with(|| error.clone());
        }
    }

    fn try_pump(&mut self) -> Result<bool> {
        let mut moved = self.land()?;
        // until a miss: whoever judges peers by what they sent must have received all of it
        loop {
            let mut heard = 0;
            while heard < MOST_FRAMES && self.listen()? {
                heard += 1;
            }
            if heard > 0 {
                self.land()?;
                moved = true;
            }
            if heard < MOST_FRAMES {
                break;
            }
        }
        let left = self.peers.poll_left();
        let missed = left.iter().find_map(|&peer| self.missed(peer));
        // one that left in the middle of a gather may have done so because of another that never came to it
        match missed.or_else(|| left.iter().find_map(|&peer| self.owes(peer))) {
            Some((peer, step)) => Err(Error::PeerLost { peer, step }),
            None => Ok(moved),
        }
    }

    /// Starts receiving the next frame, if there is one.
    fn listen(&mut self) -> Result<bool> {
        let Some(control) = &self.control else { return Ok(false) };
        let label = |peer: usize| Label::Heard { peer, number: self.peers[peer].matched };
        let Some(peer) = self.requests.receive_any(control, label)? else { return Ok(false) };
        self.peers[peer].matched += 1;
        Ok(true)
    }

    /// Puts what is through where it belongs; whether anything was.
    fn land(&mut self) -> Result<bool> {
        let landed = self.requests.test((self.rank, self.step))?;
        let moved = !landed.is_empty();
        for message in landed {
            self.accept(message)?;
        }
        Ok(moved)
    }

    /// Accounts for a message that is through, be it delivered or lost with a rank that has left.
    pub(super) fn accept(&mut self, landed: Landed<Label>) -> Result<()> {
        let Landed { label, buffer, outcome } = landed;
        let peer = label.peer();
        let delivered = outcome.is_ok();
        match outcome {
            Ok(()) => {}
            Err(Trouble::Length) => {
                return Err(Error::Comm {
                    peer,
                    step: self.step,
                    what: "a message has not the length that was announced".to_owned(),
                });
            }
            // a rank that has left needs no more frames
            Err(Trouble::Fault(_)) if self.peers.has_left(peer) && !label.is_of_a_hop() => {}
            Err(Trouble::Fault(fault)) => return Err(fault.into_error((peer, self.step))),
        }
        match label {
            Label::Sent { step, .. } => self.peers.end_send(peer, step),
            Label::Receive { channel, tag, .. } => return self.receive(peer, channel, tag, buffer),
            Label::Heard { number, .. } if delivered => {
                self.peers[peer].ahead.extend(buffer.into_host().map(|frame| (number, frame)));
                return self.obey_all(peer);
            }
            Label::Heard { .. } | Label::Said { .. } => {}
            Label::Beat { .. } => self.peers[peer].beating = false,
            Label::Offered { round, .. } => {
                if let Some(gather) = self.gathers.get_mut(&round) {
                    gather.unsent -= 1;
                }
            }
        }
        Ok(())
    }

    /// The bytes of a posted receive are here.
    fn receive(&mut self, peer: usize, channel: Channel, tag: u64, landed: Memory) -> Result<()> {
        let Some(receive) =
            self.receives.iter_mut().find(|receive| receive.is_for(peer, channel, tag))
        else {
            return Err(Error::Comm {
                peer,
                step: self.step,
                what: format!("message {channel:?} {tag} without a receive"),
            });
        };
        if receive.stage == Stage::Staged {
            if let (Some(Memory::Host(into)), Memory::Host(landed)) = (&mut receive.buffer, landed)
            {
                if let Some(into) = into.bytes_mut() {
                    ranges::copy(
                        landed.bytes(),
                        std::slice::from_ref(&(0..receive.hop.bytes())),
                        into,
                        &receive.hop.ranges,
                    );
                }
                self.staging.give(landed);
            }
        } else {
            receive.buffer = Some(landed);
        }
        receive.stage = Stage::Arrived;
        self.peers[peer].heard = Instant::now();
        self.count_work();
        self.match_early()
    }

    /// Counts something done by this rank.
    pub(super) fn count_work(&mut self) {
        self.worked += 1;
        self.last_work = Instant::now();
    }

    /// Obeys the frames of `peer` in the order in which it sent them.
    fn obey_all(&mut self, peer: usize) -> Result<()> {
        while let Some(buffer) = {
            let next = self.peers[peer].obeyed;
            self.peers[peer].ahead.remove(&next)
        } {
            self.peers[peer].obeyed += 1;
            self.peers[peer].heard = Instant::now();
            self.obey(peer, Frame::decode(buffer.bytes(), peer)?)?;
        }
        Ok(())
    }

    fn obey(&mut self, peer: usize, frame: Frame) -> Result<()> {
        match frame {
            Frame::Beat { worked } => {
                if worked > self.peers[peer].worked {
                    self.peers[peer].worked = worked;
                    self.last_work = Instant::now();
                }
            }
            Frame::Announce { channel, tag, step, bytes, piece } => {
                let step = usize::try_from(step).unwrap_or(usize::MAX);
                return self.hear_of(Early { peer, channel, tag, step, bytes, piece });
            }
            Frame::Offer { round, parts } => {
                let step = self.step;
                for (of, part) in parts {
                    let fresh =
                        usize::try_from(of).is_ok_and(|of| self.gather(round).put(of, part));
                    if !fresh {
                        let what = format!(
                            "a part of gather {round} of rank {of}, which is no rank or had one: rounds only grow"
                        );
                        return Err(Error::Comm { peer, step, what });
                    }
                }
                self.spread(round)?;
            }
            Frame::Abort { rank, what } => {
                return Err(Error::Aborted {
                    rank: usize::try_from(rank).unwrap_or(usize::MAX),
                    what,
                });
            }
            Frame::Goodbye { begun, owed } => {
                self.peers.leave(peer, Goodbye { at: Instant::now(), begun, owed });
            }
        }
        Ok(())
    }

    /// A message is on its way: the one that is waited for, an early one, or one too many.
    fn hear_of(&mut self, message: Early) -> Result<()> {
        let Early { peer, channel, tag, step, bytes, piece } = message;
        let waiting = |receive: &Receive| {
            receive.is_for(peer, channel, tag) && receive.stage == Stage::Posted
        };
        if let Some(place) = self.receives.iter().position(waiting) {
            if self.waits_its_turn(peer, channel, tag) {
                self.early.push(message);
                return Ok(());
            }
            let MessageHeader { step, .. } = self.receives[place].hop;
            let want = self.receives[place].hop.bytes();
            if bytes != want {
                let what =
                    format!("message {channel:?} {tag} truncated: got {bytes} bytes, want {want}");
                return Err(Error::Comm { peer, step, what });
            }
            return self.begin_receive(place, piece);
        }
        let late = self.last_tags.get(&(peer, channel)).is_some_and(|&last| tag <= last);
        let twice = self
            .early
            .iter()
            .any(|early| (early.peer, early.channel, early.tag) == (peer, channel, tag));
        if late || twice {
            return Err(Error::Comm {
                peer,
                step,
                what: format!("duplicate message {channel:?} {tag}"),
            });
        }
        self.early.push(message);
        Ok(())
    }

    /// Whether a message of the same peer and channel that was sent before this one is still to arrive. Each has the connection to itself: else
    /// all parts of a block would arrive at the end.
    fn waits_its_turn(&self, peer: usize, channel: Channel, tag: u64) -> bool {
        let before =
            |hop: &MessageHeader| (hop.peer, hop.channel) == (peer, channel) && hop.tag < tag;
        self.receives.iter().any(|receive| before(&receive.hop) && receive.stage != Stage::Arrived)
    }

    /// Matches early messages with the receives that were posted since, or whose turn has come.
    pub(super) fn match_early(&mut self) -> Result<()> {
        let mut early = std::mem::take(&mut self.early);
        early.sort_by_key(|early| early.tag);
        let posted = |early: &Early| self.receives.iter().any(|receive| early.is_for(receive));
        let (matched, rest): (Vec<Early>, Vec<Early>) = early.into_iter().partition(posted);
        self.early = rest;
        matched.into_iter().try_for_each(|early| self.hear_of(early))
    }

    /// The peer and the step in which it is missed, if this peer left although something is still wanted of it.
    fn missed(&self, peer: usize) -> Option<(usize, usize)> {
        let goodbye = self.peers[peer].goodbye()?;
        // everything that it said is known by now, but what it sent may take a little longer
        let overdue = self.peers.is_overdue(goodbye);
        let wanted = |receive: &&Receive| match receive.stage {
            Stage::Posted => {
                receive.hop.peer == peer
                    && (overdue || !self.early.iter().any(|early| early.is_for(receive)))
            }
            Stage::Direct | Stage::Staged => receive.hop.peer == peer && overdue,
            Stage::Arrived => false,
        };
        let receive = self.receives.iter().find(wanted).map(|receive| receive.hop.step);
        let send = || self.peers[peer].oldest_send().filter(|_| overdue);
        // a rank that has done its part may leave while the part is still on its way through others
        let begun = Some(goodbye.begun);
        let gather =
            || self.gathers.values().any(|gather| gather.is_waited_for() && gather.number >= begun);
        let step = receive.or_else(send).or_else(|| gather().then_some(self.step))?;
        Some((peer, step))
    }

    /// Alike, if this peer left without sending on all that it should have of a gather that is still waited for.
    fn owes(&self, peer: usize) -> Option<(usize, usize)> {
        let goodbye = self.peers[peer].goodbye()?;
        let waits = |round: &u64| self.gathers.get(round).is_some_and(Gather::is_waited_for);
        goodbye.owed.iter().any(waits).then_some((peer, self.step))
    }
}

#[cfg(test)]
mod tests {
    use annulus_core::HostBuffer;

    use super::{super::ffi::Fault, *};

    fn landed(label: Label, outcome: Result<(), Trouble>) -> Landed<Label> {
        Landed { label, buffer: Memory::Host(HostBuffer::zeroed(0).unwrap()), outcome }
    }

    /// Rank 0 of three, with one frame of gather 7 on its way to rank 1.
    fn offering() -> Mpi {
        let mut rank = Mpi::detached(0, 3);
        rank.gather(7).unsent = 1;
        rank
    }

    #[test]
    fn a_lost_part_of_a_gather_to_a_rank_that_has_left_is_no_longer_awaited() {
        let lost =
            || landed(Label::Offered { peer: 1, round: 7 }, Err(Trouble::Fault(Fault::Lost)));
        let mut rank = offering();
        rank.peers.leave(1, Goodbye { at: Instant::now(), begun: 9, owed: Vec::new() });
        assert_eq!(rank.accept(lost()), Ok(()));
        assert_eq!(rank.gather(7).unsent, 0);
        // to a rank that is there, the same loss is an error
        let mut rank = offering();
        assert_eq!(rank.accept(lost()), Err(Error::PeerLost { peer: 1, step: 0 }));
    }

    #[test]
    fn a_frame_lost_with_a_rank_that_has_left_is_not_obeyed() {
        let mut rank = offering();
        rank.peers.leave(1, Goodbye { at: Instant::now(), begun: 9, owed: Vec::new() });
        let heard = Label::Heard { peer: 1, number: 0 };
        assert_eq!(rank.accept(landed(heard, Err(Trouble::Fault(Fault::Lost)))), Ok(()));
        assert_eq!((rank.peers[1].ahead.len(), rank.peers[1].obeyed), (0, 0));
        // its data were promised
        rank.peers.begin_send(1, 5);
        let sent = Label::Sent { peer: 1, step: 5 };
        let error = rank.accept(landed(sent, Err(Trouble::Fault(Fault::Lost))));
        assert_eq!(error, Err(Error::PeerLost { peer: 1, step: 0 }));
    }
}
