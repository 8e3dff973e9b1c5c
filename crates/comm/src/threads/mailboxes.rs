//! State shared by the endpoints of one ring of threads: inboxes, heartbeats, receipts, and the
//! abort.
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
        mpsc::SyncSender,
    },
    time::{Duration, Instant},
};

use annulus_core::{Channel, HostBuffer};

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
    inboxes: Vec<SyncSender<Envelope>>,
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

    pub(super) fn ranks(&self) -> usize {
        self.inboxes.len()
    }

    pub(super) fn inbox(&self, rank: usize) -> &SyncSender<Envelope> {
        &self.inboxes[rank]
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
        (0..self.ranks()).for_each(|rank| self.wake(rank));
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

    pub(super) fn aborted(&self) -> Option<&(usize, String)> {
        self.aborted.get()
    }
}
