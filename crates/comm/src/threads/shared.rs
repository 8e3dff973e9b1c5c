//! What the endpoints of one ring of threads share: inboxes, signs of life, receipts, and the abort.
//!
//! | fact | written by | read by |
//! |---|---|---|
//! | `inboxes[r]`: messages to r | everybody, without ever blocking | r |
//! | `pulses[r]`: r lives, r works, r sleeps, r left | r | everybody |
//! | `consumed[s][r]`: how many of s's messages r has copied out | r | s: its sends are done |
//! | `aborted`: the first failure | the first rank that fails | everybody |

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
        mpsc::SyncSender,
    },
    time::{Duration, Instant},
};

use annulus_core::{Channel, HostBuffer};

/// A message to one rank.
pub(super) enum Envelope {
    /// Bytes of a block.
    Data(Data),
    /// A rank's part of a gather.
    Offer { from: usize, round: u64, bytes: Arc<[u8]> },
    /// Nothing: something that the sleeper looks at besides its inbox has changed.
    Wake,
}

/// Bytes of a block, still in the sender's buffer, which the message co-owns until the receiver has copied them.
pub(super) struct Data {
    pub(super) from: usize,
    pub(super) channel: Channel,
    pub(super) tag: u64,
    pub(super) step: usize,
    pub(super) ranges: Arc<[Range<u64>]>,
    pub(super) buffer: HostBuffer,
}

impl Data {
    pub(super) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

/// What everybody may know of one rank. Times are nanoseconds since the ring was made.
#[derive(Default)]
struct Pulse {
    heard: AtomicU64,
    worked: AtomicU64,
    asleep: AtomicBool,
    left: AtomicBool,
}

pub(super) struct Shared {
    made: Instant,
    inboxes: Vec<SyncSender<Envelope>>,
    pulses: Vec<Pulse>,
    consumed: Vec<Vec<AtomicU64>>,
    aborted: OnceLock<(usize, String)>,
}

impl Shared {
    pub(super) fn new(inboxes: Vec<SyncSender<Envelope>>) -> Self {
        let ranks = inboxes.len();
        Self {
            made: Instant::now(),
            inboxes,
            pulses: (0..ranks).map(|_| Pulse::default()).collect(),
            consumed: (0..ranks).map(|_| (0..ranks).map(|_| AtomicU64::new(0)).collect()).collect(),
            aborted: OnceLock::new(),
        }
    }

    pub(super) fn ranks(&self) -> usize {
        self.inboxes.len()
    }

    pub(super) fn inbox(&self, rank: usize) -> &SyncSender<Envelope> {
        &self.inboxes[rank]
    }

    /// Counts one message of `sender` as copied out by `receiver`. The receiver no longer co-owns the sender's buffer.
    pub(super) fn count_consumed(&self, sender: usize, receiver: usize) {
        self.consumed[sender][receiver].fetch_add(1, Ordering::Release);
        self.wake(sender);
    }

    pub(super) fn consumed(&self, sender: usize, receiver: usize) -> u64 {
        self.consumed[sender][receiver].load(Ordering::Acquire)
    }

    pub(super) fn heartbeat(&self, rank: usize, working: bool) {
        let now = u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.pulses[rank].heard.store(now, Ordering::Relaxed);
        if working {
            self.pulses[rank].worked.store(now, Ordering::Relaxed);
        }
    }

    pub(super) fn last_heard(&self, rank: usize) -> Instant {
        self.made + Duration::from_nanos(self.pulses[rank].heard.load(Ordering::Relaxed))
    }

    pub(super) fn last_work(&self) -> Instant {
        let latest =
            self.pulses.iter().map(|pulse| pulse.worked.load(Ordering::Relaxed)).max().unwrap_or(0);
        self.made + Duration::from_nanos(latest)
    }

    /// Announces that `rank` will look at everything once more and then sleep on its inbox.
    pub(super) fn fall_asleep(&self, rank: usize) {
        self.pulses[rank].asleep.store(true, Ordering::SeqCst);
        // pairs with the fence in `wake`: either the waker sees the sleeper, or the sleeper sees what the waker wrote
        fence(Ordering::SeqCst);
    }

    pub(super) fn awake(&self, rank: usize) {
        self.pulses[rank].asleep.store(false, Ordering::Relaxed);
    }

    /// Wakes `rank` if it sleeps. A full inbox wakes it as well, and one that is gone needs no waking.
    fn wake(&self, rank: usize) {
        fence(Ordering::SeqCst);
        if self.pulses[rank].asleep.load(Ordering::SeqCst) {
            drop(self.inboxes[rank].try_send(Envelope::Wake));
        }
    }

    fn wake_all(&self) {
        (0..self.ranks()).for_each(|rank| self.wake(rank));
    }

    /// Marks `rank` as gone. What it sent before is in the inboxes by now.
    pub(super) fn leave(&self, rank: usize) {
        self.pulses[rank].left.store(true, Ordering::Release);
        self.wake_all();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.pulses[rank].left.load(Ordering::Acquire)
    }

    /// The first abort wins.
    pub(super) fn abort(&self, rank: usize, what: String) {
        self.aborted.get_or_init(|| (rank, what));
        self.wake_all();
    }

    pub(super) fn aborted(&self) -> Option<&(usize, String)> {
        self.aborted.get()
    }
}
