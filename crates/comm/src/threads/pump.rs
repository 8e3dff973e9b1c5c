//! Progress of an endpoint: moves messages from outboxes to inboxes and from the inbox to posted
//! buffers, counts receipts, and detects failures.
//!
//! [`Mailboxes`] is the state shared by the endpoints of one ring:
//!
//! | state | written by | read by |
//! |---|---|---|
//! | `inboxes[r]`: messages to r | all ranks, without blocking | r |
//! | `status[r]`: times of r's last message and work; r sleeps; r has left | r | all ranks |
//! | `consumed[s][r]`: number of s's messages that r has copied | r | s: its sends have completed |
//! | `aborted`: the first failure | the first rank that fails | all ranks |

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
        mpsc::{SyncSender, TrySendError},
    },
    time::{Duration, Instant},
};

use annulus_core::{Error, HostBuffer, MessageHeader, Result};

use super::{GatherParts, Threads, ThreadsReceive};
use crate::message::{self, MessageKey};

impl Threads {
    /// Does everything that can be done without waiting. Returns true if there was anything to do.
    ///
    /// # Errors
    /// A fatal one ([`Error::is_fatal`]) ends the endpoint.
    pub(super) fn pump(&mut self) -> Result<bool> {
        self.failure.check()?;
        let moved = self.try_pump();
        self.failure.remember(moved)
    }

    fn try_pump(&mut self) -> Result<bool> {
        self.check_abort()?;
        let mut moved = self.flush();
        moved |= self.drain()?;
        moved |= self.count_receipts();
        let lost =
            (0..self.mailboxes.inboxes.len()).find(|&peer| self.missing_from(peer).is_some());
        if let Some(peer) = lost {
            // its last messages, its last receipts and its abort are visible by now
            self.drain()?;
            self.count_receipts();
            self.check_abort()?;
            if let Some(step) = self.missing_from(peer) {
                return Err(Error::PeerLost { peer, step });
            }
        }
        Ok(moved)
    }

    fn check_abort(&self) -> Result<()> {
        match self.mailboxes.aborted.get() {
            Some((rank, what)) if *rank != self.rank => {
                Err(Error::Aborted { rank: *rank, what: what.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Sends an envelope to a peer, after those that wait in its outbox.
    pub(super) fn dispatch(&mut self, peer: usize, envelope: Envelope) {
        self.outboxes[peer].push_back(envelope);
        self.flush_to(peer);
    }

    /// Moves envelopes from all outboxes to inboxes. Returns true if there were any.
    fn flush(&mut self) -> bool {
        let mut moved = false;
        for peer in 0..self.outboxes.len() {
            moved |= self.flush_to(peer);
        }
        moved
    }

    fn flush_to(&mut self, peer: usize) -> bool {
        let mut moved = false;
        while let Some(envelope) = self.outboxes[peer].pop_front() {
            match self.mailboxes.inboxes[peer].try_send(envelope) {
                Ok(()) => moved = true,
                Err(TrySendError::Full(envelope)) => {
                    self.outboxes[peer].push_front(envelope);
                    break;
                }
                // the peer has left; `missing_from` decides if that is an error
                Err(TrySendError::Disconnected(_)) => self.outboxes[peer].clear(),
            }
        }
        if moved {
            self.mailboxes.heartbeat(self.rank, false);
        }
        moved
    }

    /// Receives all messages of the inbox, and delivers early ones whose receives were posted
    /// since. Returns true if there were any.
    fn drain(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut index = 0;
        while let Some(data) = self.early.get(index) {
            let key = data.key;
            match self.receives.iter().position(|of| MessageKey::of(&of.header) == key) {
                Some(receive) => {
                    let data = self.early.remove(index);
                    self.deliver(receive, data)?;
                    moved = true;
                }
                None => index += 1,
            }
        }
        while let Ok(envelope) = self.inbox.try_recv() {
            self.accept(envelope)?;
            moved = true;
        }
        Ok(moved)
    }

    /// Processes one envelope.
    pub(super) fn accept(&mut self, envelope: Envelope) -> Result<()> {
        match envelope {
            Envelope::Wake => Ok(()),
            Envelope::GatherPart { from, round, bytes } => {
                self.all_gather(round)[from] = Some(bytes);
                Ok(())
            }
            Envelope::Data(data) => {
                let key = data.key;
                let is_posted = |receive: &ThreadsReceive| {
                    MessageKey::of(&receive.header) == key && !receive.arrived
                };
                if let Some(receive) = self.receives.iter().position(is_posted) {
                    return self.deliver(receive, data);
                }
                if self.last_tags.has_passed(key) || self.early.iter().any(|of| of.key == key) {
                    let MessageKey { peer, channel, tag } = key;
                    let what = format!("duplicate message {channel:?} {tag}");
                    return Err(Error::Comm { peer, step: data.step, what });
                }
                self.early.push(data);
                Ok(())
            }
        }
    }

    /// Copies a message to the buffer of receive number `receive`, and releases the sender's
    /// buffer.
    fn deliver(&mut self, receive: usize, data: Data) -> Result<()> {
        let ThreadsReceive { header, buffer, arrived } = &mut self.receives[receive];
        let MessageHeader { peer, step, .. } = *header;
        let got = data.bytes();
        let want = header.bytes();
        if got != want {
            let what = format!(
                "message {:?} {} truncated: got {got} bytes, want {want}",
                header.channel, header.tag
            );
            return Err(Error::Comm { peer, step, what });
        }
        let Some(bytes) = buffer.bytes_mut() else {
            return Err(Error::Comm {
                peer,
                step,
                what: "the buffer of a posted receive is in use".to_owned(),
            });
        };
        message::copy(data.buffer.bytes(), &data.ranges, bytes, &header.ranges);
        *arrived = true;
        drop(data);
        self.mailboxes.count_consumed(peer, self.rank);
        self.mailboxes.heartbeat(self.rank, true);
        Ok(())
    }

    /// Removes sends that were consumed. Returns true if there were any.
    fn count_receipts(&mut self) -> bool {
        let mut total = 0;
        for (peer, sends) in self.sends.iter_mut().enumerate() {
            let consumed = self.mailboxes.consumed(self.rank, peer);
            total += consumed;
            while sends.steps.len() as u64 > sends.posted - consumed {
                sends.steps.pop_front();
            }
        }
        std::mem::replace(&mut self.consumed, total) != total
    }

    /// Returns the step of a message from or to `peer` that can no longer complete, because `peer`
    /// has left.
    fn missing_from(&self, peer: usize) -> Option<usize> {
        if !self.mailboxes.has_left(peer) {
            return None;
        }
        let receive =
            self.receives.iter().find(|receive| receive.header.peer == peer && !receive.arrived);
        let receive = receive.map(|receive| receive.header.step);
        let send = || self.sends[peer].steps.front().copied();
        let misses = |parts: &GatherParts| parts[self.rank].is_some() && parts[peer].is_none();
        let all_gather = || self.all_gathers.values().any(misses).then_some(self.step);
        receive.or_else(send).or_else(all_gather)
    }

    /// Returns the state of all-gather `round`, created by its first use.
    pub(super) fn all_gather(&mut self, round: u64) -> &mut GatherParts {
        let ranks = self.mailboxes.inboxes.len();
        self.all_gathers.entry(round).or_insert_with(|| vec![None; ranks])
    }
}

/// A message to one rank.
pub(super) enum Envelope {
    /// Bytes of a block.
    Data(Data),
    /// A rank's part of an all-gather.
    GatherPart { from: usize, round: u64, bytes: Arc<[u8]> },
    /// No content: state that the sleeping receiver reads besides its inbox has changed.
    Wake,
}

/// Bytes of a block in the sender's buffer, which the message co-owns until the receiver has copied
/// them.
pub(super) struct Data {
    /// Names the sender as the peer.
    pub(super) key: MessageKey,
    pub(super) step: usize,
    pub(super) ranges: Arc<[Range<u64>]>,
    pub(super) buffer: HostBuffer,
}

impl Data {
    pub(super) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

/// Status of one rank. Times are nanoseconds since the ring was created.
#[derive(Default)]
struct RankStatus {
    last_heard: AtomicU64,
    last_work: AtomicU64,
    asleep: AtomicBool,
    left: AtomicBool,
}

/// The shared state of a ring.
pub(super) struct Mailboxes {
    created: Instant,
    pub(super) inboxes: Vec<SyncSender<Envelope>>,
    status: Vec<RankStatus>,
    consumed: Vec<Vec<AtomicU64>>,
    aborted: OnceLock<(usize, String)>,
}

impl Mailboxes {
    pub(super) fn new(inboxes: Vec<SyncSender<Envelope>>) -> Self {
        let ranks = inboxes.len();
        Self {
            created: Instant::now(),
            inboxes,
            status: (0..ranks).map(|_| RankStatus::default()).collect(),
            consumed: (0..ranks).map(|_| (0..ranks).map(|_| AtomicU64::new(0)).collect()).collect(),
            aborted: OnceLock::new(),
        }
    }

    /// Counts a message of `sender` that `receiver` has copied. The receiver must have released the
    /// sender's buffer.
    pub(super) fn count_consumed(&self, sender: usize, receiver: usize) {
        self.consumed[sender][receiver].fetch_add(1, Ordering::Release);
        self.wake(sender);
    }

    pub(super) fn consumed(&self, sender: usize, receiver: usize) -> u64 {
        self.consumed[sender][receiver].load(Ordering::Acquire)
    }

    pub(super) fn heartbeat(&self, rank: usize, working: bool) {
        let now = u64::try_from(self.created.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.status[rank].last_heard.store(now, Ordering::Relaxed);
        if working {
            self.status[rank].last_work.store(now, Ordering::Relaxed);
        }
    }

    pub(super) fn last_heard(&self, rank: usize) -> Instant {
        self.created + Duration::from_nanos(self.status[rank].last_heard.load(Ordering::Relaxed))
    }

    pub(super) fn last_work(&self) -> Instant {
        let latest = self
            .status
            .iter()
            .map(|status| status.last_work.load(Ordering::Relaxed))
            .max()
            .unwrap_or(0);
        self.created + Duration::from_nanos(latest)
    }

    /// Marks `rank` as asleep. It must poll once more before it sleeps on its inbox.
    pub(super) fn mark_asleep(&self, rank: usize) {
        self.status[rank].asleep.store(true, Ordering::SeqCst);
        // pairs with the fence in `wake`: either the waking rank reads this mark, or the poll that
        // follows reads what the waking rank wrote
        fence(Ordering::SeqCst);
    }

    pub(super) fn mark_awake(&self, rank: usize) {
        self.status[rank].asleep.store(false, Ordering::Relaxed);
    }

    /// Wakes `rank` if it sleeps. If its inbox is full it wakes anyway, and a dropped inbox has no
    /// receiver to wake.
    fn wake(&self, rank: usize) {
        fence(Ordering::SeqCst);
        if self.status[rank].asleep.load(Ordering::SeqCst) {
            drop(self.inboxes[rank].try_send(Envelope::Wake));
        }
    }

    fn wake_all(&self) {
        (0..self.inboxes.len()).for_each(|rank| self.wake(rank));
    }

    /// Marks `rank` as left. All its earlier messages are in the inboxes by now.
    pub(super) fn leave(&self, rank: usize) {
        self.status[rank].left.store(true, Ordering::Release);
        self.wake_all();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.status[rank].left.load(Ordering::Acquire)
    }

    /// Records that `rank` failed, unless another rank has failed before, and wakes all ranks.
    pub(super) fn abort(&self, rank: usize, what: String) {
        self.aborted.get_or_init(|| (rank, what));
        self.wake_all();
    }
}
