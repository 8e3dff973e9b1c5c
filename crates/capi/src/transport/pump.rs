//! Progress: finished messages are put where they belong, small messages are obeyed.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus::{Error, Result};
use annulus_core::{Channel, HostBuffer, MessageHeader, index};

use super::{
    HostTransport,
    frame::{self, Frame},
};

/// The message that a request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Label {
    /// Tensor data to `peer`.
    Sent { peer: usize, is_staged: bool },
    /// Tensor data from `peer`.
    Received { peer: usize, channel: Channel, tag: u64 },
    /// The next header from `peer`.
    Header { peer: usize },
    /// The body of the last header from `peer`.
    Body { peer: usize },
    /// A small message that nothing waits for.
    Said,
    /// A heartbeat to `peer`.
    Beat { peer: usize },
    /// This rank's part of an all-gather.
    Part { round: u64 },
}

/// A posted receive.
pub(super) struct Receive {
    pub(super) header: MessageHeader,
    /// The buffer that was posted, unless the host has it.
    pub(super) buffer: Option<HostBuffer>,
    pub(super) arrived: bool,
}

impl Receive {
    pub(super) fn is_for(&self, peer: usize, channel: Channel, tag: u64) -> bool {
        (self.header.peer, self.header.channel, self.header.tag) == (peer, channel, tag)
    }
}

/// The state of one rank.
pub(super) struct Peer {
    pub(super) heard: Instant,
    /// Number of its reports of work.
    worked: u64,
    /// Its last header, while the body is received.
    header: Option<HostBuffer>,
    /// True while a heartbeat to it is in flight.
    pub(super) beating: bool,
    /// Sends of tensor data to it in flight.
    pub(super) unsent: usize,
    /// Polls since it said goodbye.
    goodbye: Option<Grace>,
}

/// Time in which this rank has polled for messages of a rank that left. Time without polls does not
/// count, because a suspended process finds everything late.
struct Grace {
    last_poll: Instant,
    observed: Duration,
}

impl Peer {
    pub(super) fn new(now: Instant) -> Self {
        Self { heard: now, worked: 0, header: None, beating: false, unsent: 0, goodbye: None }
    }

    pub(super) const fn has_left(&self) -> bool {
        self.goodbye.is_some()
    }
}

/// Time in which messages from or to a rank that has said goodbye must complete.
const GRACE: Duration = Duration::from_millis(250);
/// Longest time between two polls that counts as observed.
const LONGEST_GAP: Duration = Duration::from_millis(50);
/// While something has moved within this time, a wait only yields the core between two polls.
const AWAKE: Duration = Duration::from_micros(200);
/// Then it sleeps, an eighth as long as nothing has moved, within these bounds.
const SLEEP: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

impl HostTransport {
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
                thread::sleep((idle / 8).clamp(SLEEP[0], SLEEP[1]).min(left));
            }
        }
        Ok(())
    }

    /// Does everything that can be done without waiting. Returns true if anything was.
    pub(super) fn pump(&mut self) -> Result<bool> {
        self.alive()?;
        let moved = self.try_pump().inspect_err(|error| self.fail(error))?;
        if moved {
            self.idle_since = Instant::now();
        }
        Ok(moved)
    }

    fn try_pump(&mut self) -> Result<bool> {
        let (mut moved, mut from) = (false, 0);
        while let Some((label, buffer, next)) = self.requests.next_done(from)? {
            self.accept(label, buffer)?;
            from = next;
            moved = true;
        }
        for peer in self.others() {
            self.check_left(peer)?;
        }
        Ok(moved)
    }

    /// Posts the receive of the next header of `peer`.
    pub(super) fn listen(&mut self, peer: usize) -> Result<()> {
        let header = match self.peers[peer].header.take() {
            Some(header) => header,
            None => HostBuffer::zeroed(frame::HEADER)?,
        };
        let (tag, label) = (frame::HEADER_TAG, Label::Header { peer });
        self.requests.receive(peer, tag, self.step, header, 0..frame::HEADER, label)
    }

    /// Puts a finished message where it belongs.
    fn accept(&mut self, label: Label, buffer: HostBuffer) -> Result<()> {
        match label {
            Label::Sent { peer, is_staged } => {
                self.unsent -= 1;
                self.peers[peer].unsent -= 1;
                if is_staged {
                    self.staging.push(buffer);
                }
            }
            Label::Received { peer, channel, tag } => self.receive(peer, channel, tag, buffer)?,
            Label::Header { peer } => {
                let bytes = Frame::body_bytes(buffer.bytes(), peer)?;
                self.peers[peer].header = Some(buffer);
                if bytes == 0 {
                    return self.obey(peer, &[]);
                }
                let (body, label) = (HostBuffer::zeroed(bytes)?, Label::Body { peer });
                let tag = frame::BODY_TAG;
                self.requests.receive(peer, tag, self.step, body, 0..bytes, label)?;
            }
            Label::Body { peer } => self.obey(peer, buffer.bytes())?,
            Label::Said => {}
            Label::Beat { peer } => self.peers[peer].beating = false,
            Label::Part { round } => {
                if let Some(gather) = self.gathers.get_mut(&round) {
                    gather.unsent -= 1;
                }
            }
        }
        Ok(())
    }

    /// Gives the bytes of a message to its receive.
    fn receive(&mut self, peer: usize, channel: Channel, tag: u64, came: HostBuffer) -> Result<()> {
        let is_it = |receive: &&mut Receive| receive.is_for(peer, channel, tag);
        let Some(receive) = self.receives.iter_mut().find(is_it) else {
            return Err(Error::internal(format!("{channel:?} {tag} without a receive")));
        };
        receive.arrived = true;
        match &mut receive.buffer {
            // the host received into the buffer itself
            None => receive.buffer = Some(came),
            Some(buffer) => {
                let Some(into) = buffer.bytes_mut() else {
                    return Err(Error::internal("the buffer of a receive is in use"));
                };
                let mut first = 0;
                for range in receive.header.ranges.iter() {
                    let (start, end) = (index(range.start), index(range.end));
                    into[start..end].copy_from_slice(&came.bytes()[first..][..end - start]);
                    first += end - start;
                }
                self.staging.push(came);
            }
        }
        self.peers[peer].heard = Instant::now();
        self.count_work();
        Ok(())
    }

    /// Counts something done by this rank.
    pub(super) fn count_work(&mut self) {
        self.worked += 1;
        self.last_work = Instant::now();
    }

    /// Does what the last header of `peer` and its body say.
    fn obey(&mut self, peer: usize, body: &[u8]) -> Result<()> {
        let now = Instant::now();
        self.peers[peer].heard = now;
        let header = self.peers[peer].header.take();
        let frame = Frame::decode(header.as_ref().map_or(&[], HostBuffer::bytes), body, peer)?;
        self.peers[peer].header = header;
        match frame {
            Frame::Beat { worked } => {
                if worked > self.peers[peer].worked {
                    self.peers[peer].worked = worked;
                    self.last_work = now;
                }
            }
            Frame::Part { round, bytes } => {
                if !self.gather(round).put(peer, bytes) {
                    let what = format!("a second part of gather {round}");
                    return Err(Error::Comm { peer, step: self.step, what });
                }
            }
            Frame::Abort { rank, what } => {
                let rank = usize::try_from(rank).unwrap_or(usize::MAX);
                return Err(Error::Aborted { rank, what });
            }
            Frame::Goodbye => {
                let grace = Grace { last_poll: now, observed: Duration::ZERO };
                self.peers[peer].goodbye = Some(grace);
                return Ok(());
            }
        }
        self.listen(peer)
    }

    /// Fails if a rank that left still owes something.
    fn check_left(&mut self, peer: usize) -> Result<()> {
        let Some(grace) = &mut self.peers[peer].goodbye else { return Ok(()) };
        let now = Instant::now();
        grace.observed += now.saturating_duration_since(grace.last_poll).min(LONGEST_GAP);
        grace.last_poll = now;
        let is_overdue = grace.observed >= GRACE;
        let is_missed = |receive: &&Receive| receive.header.peer == peer && !receive.arrived;
        let receive = self.receives.iter().find(is_missed).map(|receive| receive.header.step);
        let send = (self.peers[peer].unsent > 0).then_some(self.step);
        // its part would have come before its goodbye
        let gather = self.gathers.values().any(|gather| gather.lacks(self.rank, peer));
        match receive.or(send).filter(|_| is_overdue).or_else(|| gather.then_some(self.step)) {
            Some(step) => Err(Error::PeerLost { peer, step }),
            None => Ok(()),
        }
    }
}
