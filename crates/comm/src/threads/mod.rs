//! Ranks as threads: messages over bounded channels, in host memory.
//!
//! A send passes the receiver a co-owning reference to the sender's buffer. The receiver copies the
//! bytes directly into the buffer that it posted (one copy, no staging), releases the reference and
//! counts the message as consumed, which completes the send. So a send completes only once it was
//! received, as with `MPI_Ssend`: a schedule that finishes here needs no buffering.
//!
//! Only [`Transport::progress`] blocks: what does not fit into a peer's inbox waits in an outbox.
//!
//! # Errors
//! | cause | error |
//! |---|---|
//! | a message has another length than its posted receive | [`Error::Comm`] "… truncated: got x bytes, want y" |
//! | a message repeats a tag | [`Error::Comm`] "duplicate message …" |
//! | the tag of a receive is not above the last one's, or its buffer is co-owned | [`Error::Comm`] |
//! | a message names no rank of this ring, or bytes outside its buffer; a round or message was never started | [`Error::InvalidArgument`], without effect |
//! | the endpoint of a rank that this one waits for was dropped | [`Error::PeerLost`] |
//! | a rank called [`Control::abort`] | [`Error::Aborted`] on every other rank, its own error on itself |
//!
//! After a fatal error ([`Error::is_fatal`]) the endpoint is dead and returns the same error again.
//! [`each_rank`] runs a whole ring in one process, with one thread per rank.

mod pump;

use std::{
    collections::{BTreeMap, VecDeque},
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Space,
    Transport, memory,
};

use self::pump::{Data, Envelope, Mailboxes};
use crate::message::{self, Failure, LastTags, MessageKey, ReceiveRequest};

/// The most ranks of a ring in one process. Each is a thread, with a mailbox that has room for
/// messages of all others: O(ranks²) memory.
pub const MOST_RANKS: usize = 1024;

/// As [`ring`], of a number of ranks that a caller gives.
///
/// # Errors
/// [`Error::InvalidArgument`] naming `ranks` if it is not 1 to [`MOST_RANKS`].
pub fn checked_ring(ranks: usize) -> Result<Vec<Threads>> {
    match ranks {
        0 => Err(Error::invalid("ranks", 0, "at least 1")),
        1..=MOST_RANKS => Ok(ring(ranks)),
        _ => Err(Error::invalid("ranks", ranks, format!("at most {MOST_RANKS} in one process"))),
    }
}

/// Creates a ring of `ranks` endpoints, in the order of ranks. Each may be moved to its own thread.
///
/// # Examples
/// ```
/// use annulus_core::Control;
/// let ring = annulus_comm::threads::ring(3);
/// assert_eq!(ring.iter().map(|endpoint| endpoint.rank()).collect::<Vec<_>>(), [0, 1, 2]);
/// ```
pub fn ring(ranks: usize) -> Vec<Threads> {
    // capacity for an all-gather and for the messages of a step; more goes through the outboxes
    let (inboxes, receivers): (Vec<_>, Vec<_>) =
        (0..ranks).map(|_| sync_channel(16 + 2 * ranks)).unzip();
    let mailboxes = Arc::new(Mailboxes::new(inboxes));
    let endpoint = |(rank, inbox)| Threads {
        rank,
        mailboxes: Arc::clone(&mailboxes),
        inbox,
        outboxes: (0..ranks).map(|_| VecDeque::new()).collect(),
        receives: Vec::new(),
        early: Vec::new(),
        last_tags: LastTags::default(),
        sends: (0..ranks).map(|_| PeerSends::default()).collect(),
        all_gathers: BTreeMap::new(),
        step: 0,
        consumed: 0,
        bytes_sent: 0,
        failure: Failure::default(),
    };
    receivers.into_iter().enumerate().map(endpoint).collect()
}

/// Endpoint of one rank of a ring of threads, created by [`ring`].
pub struct Threads {
    rank: usize,
    mailboxes: Arc<Mailboxes>,
    inbox: Receiver<Envelope>,
    /// Messages that did not fit into each peer's inbox.
    outboxes: Vec<VecDeque<Envelope>>,
    /// Receives that were posted and not yet taken.
    receives: Vec<ThreadsReceive>,
    /// Messages that arrived before their receives were posted.
    early: Vec<Data>,
    last_tags: LastTags,
    /// Sends to each peer.
    sends: Vec<PeerSends>,
    all_gathers: BTreeMap<u64, GatherParts>,
    /// Step of the last post.
    step: usize,
    /// Number of messages of this rank that had been consumed at the last poll.
    consumed: u64,
    bytes_sent: u64,
    failure: Failure,
}

struct ThreadsReceive {
    header: MessageHeader,
    buffer: HostBuffer,
    arrived: bool,
}

/// Sends to one peer.
#[derive(Default)]
struct PeerSends {
    /// Number of all sends so far.
    posted: u64,
    /// Steps of those that were not consumed at the last poll.
    steps: VecDeque<usize>,
}

/// Parts of one all-gather that have arrived, by rank.
type GatherParts = Vec<Option<Arc<[u8]>>>;

impl std::fmt::Debug for Threads {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Threads")
            .field("rank", &self.rank)
            .field("ranks", &self.mailboxes.inboxes.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.mailboxes.leave(self.rank);
    }
}

impl Transport<Host> for Threads {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.failure.check()?;
        for send in sends {
            message::check(&send.header, self.mailboxes.inboxes.len(), Host::size(send.buffer))?;
        }
        // the caller may list the receives of a group in any order
        receives.sort_by_key(|incoming| MessageKey::of(&incoming.header));
        let requests = receives.iter().map(|Incoming { header, buffer }| ReceiveRequest {
            header,
            size: Host::size(buffer),
            is_shared: buffer.is_shared(),
        });
        let checked = self.last_tags.check(self.mailboxes.inboxes.len(), requests);
        self.failure.remember(checked)?;
        for Incoming { header, buffer } in receives.drain(..) {
            self.step = header.step;
            self.last_tags.post(&header);
            self.receives.push(ThreadsReceive { header, buffer, arrived: false });
        }
        for Outgoing { header, buffer, .. } in sends {
            self.step = header.step;
            self.bytes_sent += header.bytes();
            self.sends[header.peer].posted += 1;
            self.sends[header.peer].steps.push_back(header.step);
            let data = Data {
                key: MessageKey { peer: self.rank, ..MessageKey::of(header) },
                step: header.step,
                ranges: Arc::clone(&header.ranges),
                buffer: (*buffer).clone(),
            };
            self.dispatch(header.peer, Envelope::Data(data));
        }
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        if self.pump()? || timeout.is_zero() {
            return Ok(());
        }
        // no message tells when a full inbox has space again, so an outbox is polled
        let blocked = self.outboxes.iter().any(|outbox| !outbox.is_empty());
        let timeout = if blocked { timeout.min(Duration::from_millis(1)) } else { timeout };
        self.mailboxes.mark_asleep(self.rank);
        let moved = self.pump();
        let envelope =
            if let Ok(false) = moved { self.inbox.recv_timeout(timeout).ok() } else { None };
        self.mailboxes.mark_awake(self.rank);
        moved?;
        if let Some(envelope) = envelope {
            let accepted = self.accept(envelope);
            self.failure.remember(accepted)?;
        }
        self.pump().map(drop)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.failure.check()?;
        let key = MessageKey::of(header);
        let is_it = |receive: &ThreadsReceive| MessageKey::of(&receive.header) == key;
        let index =
            self.receives.iter().position(is_it).ok_or_else(|| message::not_posted(header))?;
        if !self.receives[index].arrived {
            return Ok(None);
        }
        let ThreadsReceive { buffer, .. } = self.receives.swap_remove(index);
        Ok(Some(Arrived { buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        self.sends
            .iter()
            .enumerate()
            .any(|(peer, sends)| sends.posted > self.mailboxes.consumed(self.rank, peer))
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        false
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl Control for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.mailboxes.inboxes.len()
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.failure.check()?;
        let from = self.rank;
        let bytes = Arc::<[u8]>::from(bytes);
        let own = &mut self.all_gather(round)[from];
        if own.is_some() {
            return Err(Error::invalid(
                "round",
                round,
                "an all-gather that this rank has not started",
            ));
        }
        *own = Some(Arc::clone(&bytes));
        for peer in (0..self.ranks()).filter(|&peer| peer != from) {
            let bytes = Arc::clone(&bytes);
            self.dispatch(peer, Envelope::GatherPart { from, round, bytes });
        }
        Ok(())
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.pump()?;
        let is_started = |parts: &&GatherParts| parts[self.rank].is_some();
        let Some(parts) = self.all_gathers.get(&round).filter(is_started) else {
            return Err(Error::invalid(
                "round",
                round,
                "an all-gather that this rank has started and not collected",
            ));
        };
        // a rank that has collected may leave, so its own part must have been sent before
        let is_unsent = |envelope: &Envelope| match envelope {
            Envelope::GatherPart { round: unsent, .. } => *unsent == round,
            _ => false,
        };
        if parts.iter().any(Option::is_none) || self.outboxes.iter().flatten().any(is_unsent) {
            return Ok(None);
        }
        let parts = parts.iter().flatten().map(|part| part.to_vec()).collect();
        self.all_gathers.remove(&round);
        Ok(Some(parts))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        let missing =
            |rank: &usize| self.all_gathers.get(&round).is_none_or(|parts| parts[*rank].is_none());
        (0..self.ranks()).filter(missing).collect()
    }

    fn abort(&mut self, error: &Error) {
        self.failure.end(error);
        self.mailboxes.abort(self.rank, error.to_string());
    }

    fn heartbeat(&mut self, working: bool) {
        self.mailboxes.heartbeat(self.rank, working);
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.mailboxes.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.mailboxes.last_work()
    }
}

/// Runs `work(rank, item)` for every item, each on its own thread, or on the calling one if there
/// is only one item. Returns all results, or the most informative error.
///
/// An error that a rank detected itself takes precedence over one that only repeats another rank's
/// ([`Error::Refused`], [`Error::Aborted`], [`Error::PeerLost`]).
///
/// # Ordering
/// Local. Returns when every thread has ended, so `work` may borrow.
///
/// # Errors
/// Those of `work`; [`Error::Device`] if a thread did not start, before `work` has begun on any;
/// [`Error::Internal`] if one panicked.
///
/// # Examples
/// ```
/// use annulus_comm::threads::{each_rank, ring};
/// use annulus_core::Control;
///
/// let ranks = each_rank(ring(3), |_, endpoint| Ok(endpoint.rank()))?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), annulus_core::Error>(())
/// ```
pub fn each_rank<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    work: impl Fn(usize, I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    // The threads are started and joined by code that is compiled once, not for every type of item
    // and result: callers instantiate this function for each backend and element type.
    let slots: Vec<_> = items.into_iter().map(|item| Mutex::new((Some(item), None::<T>))).collect();
    let has_memory = |_| memory::check_mapping("the thread of a rank", STACK + START);
    each_thread(slots.len(), &has_memory, &|rank| {
        let slot = &slots[rank];
        let item = slot.lock().unwrap_or_else(PoisonError::into_inner).0.take();
        let value = work(rank, item.ok_or_else(|| Error::internal("a rank began twice"))?)?;
        slot.lock().unwrap_or_else(PoisonError::into_inner).1 = Some(value);
        Ok(())
    })?;
    let values = slots.into_iter().map(|slot| {
        let (_, value) = slot.into_inner().unwrap_or_else(PoisonError::into_inner);
        value.ok_or_else(|| Error::internal("a rank ended without a result"))
    });
    values.collect()
}

/// Runs `work(rank)` for `0..ranks` as [`each_rank`] describes. `may_start` is called before the
/// thread of each rank.
///
/// A rank whose thread did not start sends nothing, and the others would wait for it until their
/// deadline. So each thread waits for a signal, which is sent once all have started.
fn each_thread(
    ranks: usize,
    may_start: &dyn Fn(usize) -> Result<()>,
    work: &(dyn Fn(usize) -> Result<()> + Sync),
) -> Result<()> {
    let panicked = || Err(Error::internal("the thread of a rank panicked"));
    if ranks == 1 {
        return panic::catch_unwind(AssertUnwindSafe(|| work(0))).unwrap_or_else(|_| panicked());
    }
    let (arrive, arrivals) = channel();
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let start = |rank| {
            // A thread that starts with the last free memory would end the process, so the size of
            // its mappings is tried first. Threads start one after another, because the trial, or
            // the heap of a thread, would take the memory of another one.
            may_start(rank)?;
            let (begin, begins) = channel::<()>();
            let arrive = arrive.clone();
            let body = move || {
                arrive.send(()).unwrap_or_default();
                begins.recv().is_ok().then(|| work(rank))
            };
            let thread = thread::Builder::new().name(format!("rank {rank}"));
            let thread = thread.spawn_scoped(scope, body).map_err(|error| Error::Device {
                what: format!("the thread of rank {rank} did not start: {error}"),
            })?;
            arrivals.recv().unwrap_or_default();
            Ok((begin, thread))
        };
        let started: Vec<Result<_>> = (0..ranks).map(start).collect();
        let all_started = started.iter().all(Result::is_ok);
        // without the signal, the drop of its sender ends a thread
        let signal = |(begin, thread): (Sender<()>, _)| {
            if all_started {
                begin.send(()).unwrap_or_default();
            }
            thread
        };
        // collected, so that all threads begin before the first is joined
        let threads: Vec<Result<thread::ScopedJoinHandle<'_, Option<Result<()>>>>> =
            started.into_iter().map(|thread| thread.map(signal)).collect();
        let join = |thread: Result<thread::ScopedJoinHandle<'_, _>>| {
            let result = thread.map(|thread| thread.join().unwrap_or_else(|_| Some(panicked())));
            result.transpose()
        };
        threads.into_iter().filter_map(join).map(Result::flatten).collect()
    });
    // the first that a rank detected itself, or else the first
    let failed = results.into_iter().filter_map(Result::err).min_by_key(is_echo);
    failed.map_or(Ok(()), Err)
}

/// Default stack of a Rust thread, in bytes.
const STACK: usize = 2 << 20;

/// Bytes for the signal stack of a thread and its first allocations, which take some tens of KiB.
const START: usize = 1 << 18;

/// Returns true if an error only repeats what another rank detected.
const fn is_echo(error: &Error) -> bool {
    matches!(error, Error::Refused { .. } | Error::Aborted { .. } | Error::PeerLost { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_the_rank_that_failed_takes_precedence() {
        let work = |rank, ()| match rank {
            1 => Err(Error::PeerLost { peer: 2, step: 0 }),
            2 => Err(Error::invalid("bias", 1, 2)),
            _ => Ok(rank),
        };
        assert_eq!(each_rank([(); 4], work), Err(Error::invalid("bias", 1, 2)));
        assert_eq!(each_rank([3, 4], |rank, item| Ok(rank + item)), Ok(vec![3, 5]));
    }

    #[test]
    fn no_rank_begins_if_the_thread_of_one_does_not_start() {
        let begun = Mutex::new(Vec::new());
        let may_start = |rank| if rank == 2 { Err(Error::internal("full")) } else { Ok(()) };
        let work = |rank| {
            begun.lock().unwrap_or_else(PoisonError::into_inner).push(rank);
            Ok(())
        };
        assert_eq!(each_thread(4, &may_start, &work), Err(Error::internal("full")));
        assert!(begun.into_inner().is_ok_and(|begun| begun.is_empty()));
    }

    #[test]
    fn a_panic_is_an_error() {
        let result = each_rank([0, 1], |_, item| {
            if item == 1 { std::panic::resume_unwind(Box::new("a panic")) } else { Ok(()) }
        });
        assert!(matches!(result, Err(Error::Internal { .. })));
        // also of a single rank, which runs on the calling thread
        let result: Result<Vec<()>> =
            each_rank([0], |_, _| std::panic::resume_unwind(Box::new("a panic")));
        assert!(matches!(result, Err(Error::Internal { .. })));
    }
}
