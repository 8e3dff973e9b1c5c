//! Interface of a transport, which moves blocks between the ranks of a ring.
//!
//! Both traits are object safe. Only [`Transport::progress`] blocks, for at most its `timeout`.
//! Deadlines, traces and fault injection are wrappers of the same trait instead of
//! options of each transport, so that each is implemented once.

use std::{ops::Range, sync::Arc, time::Duration, time::Instant};

use crate::{Arrived, Error, Host, Placement, Result, Space};

/// Content of a message. Sends are matched with receives by channel and tag, so messages of
/// different channels may overtake each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Channel {
    /// A KV block, or a query block in the second pass of a two-pass backward.
    Kv,
    /// A partial sum of dK and dV, sent to the next rank that adds to it.
    PartialGrad,
    /// The sum of dK and dV, sent to the owner of the keys.
    FinalGrad,
}

/// One message of one call: peer, content and bytes of the local buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageHeader {
    /// Receiver of a send, or sender of a receive.
    pub peer: usize,
    /// Content of the message.
    pub channel: Channel,
    /// Sequence number per sender, receiver and channel. It increases over the lifetime of a plan,
    /// and both ranks compute the same number.
    pub tag: u64,
    /// Ring step, for errors and traces.
    pub step: usize,
    /// Byte ranges of the local buffer, sent or filled one after another.
    pub ranges: Arc<[Range<u64>]>,
    /// Proof that both ends have the same length, if all ranks agreed on it and every transport
    /// [posts ahead](Transport::posts_ahead). Both ends have it, or neither.
    pub agreed: Option<AgreedLengths>,
}

impl MessageHeader {
    /// Returns the number of bytes of the message.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

/// Proof that every rank's messages of a plan have a send and a receive of the same length, with
/// which a transport may receive a message before it has learnt the message's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedLengths(());

impl AgreedLengths {
    /// Returns the proof if the [`MessageBalance::sum`](crate::MessageBalance::sum)s of all ranks
    /// add up to `total` = 0.
    /// `total` must come from an all-gather: a transport may write past a buffer where a message is
    /// longer than its receive.
    pub fn of_total(total: u64) -> Option<Self> {
        (total == 0).then_some(Self(()))
    }
}

/// A send. The transport co-owns the buffer until the bytes are sent.
pub struct Outgoing<'a, S: Space> {
    /// Receiver and byte ranges.
    pub header: MessageHeader,
    /// Buffer that holds the bytes.
    pub buffer: &'a S::Buffer,
    /// Event after which the buffer may be read.
    pub ready: &'a S::Event,
}

/// A receive. The transport owns the buffer until [`Transport::take`] returns it.
pub struct Incoming<S: Space> {
    /// Sender and byte ranges.
    pub header: MessageHeader,
    /// Buffer to be filled, without other owners.
    pub buffer: S::Buffer,
}

/// Moves blocks between the ranks of one ring. [`Control`] is a supertrait, so that one wrapper
/// covers blocks and control messages.
pub trait Transport<S: Space>: Control {
    /// Returns `self` as the trait object for control messages.
    fn control(&mut self) -> &mut dyn Control;

    /// Starts one group of transfers, as `ncclGroupEnd` or `MPI_Startall`, and drains `receives`.
    ///
    /// Does not block. The schedule pairs each send with a receive of the same group on the peer,
    /// so a transport may use synchronous sends.
    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()>;

    /// Advances the posted transfers. Waits at most `timeout` if none can be advanced.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::Timeout`], [`Error::PeerLost`] of a failed transfer;
    /// [`Error::Aborted`] if another rank failed.
    fn progress(&mut self, timeout: Duration) -> Result<()>;

    /// Returns the buffer of a posted receive once it has arrived, and only once. `None` before
    /// that. Does not block.
    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>>;

    /// As [`Transport::post`], for messages in host memory, whatever the memory of blocks. A
    /// transport of host memory moves both alike
    /// ([`messages_are_blocks`](crate::messages_are_blocks)).
    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()>;

    /// As [`Transport::take`], of a receive of [`Transport::post_host`].
    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>>;

    /// Returns true if a send is in flight. The ring waits for all sends before a call returns.
    fn pending(&self) -> bool;

    /// Returns the payload bytes of all sends posted since the transport was created.
    fn bytes_sent(&self) -> u64;

    /// Returns true if a receive with [agreed lengths](MessageHeader::agreed) starts when it is
    /// posted, without a control message of the sender. A wrapper that changes messages returns
    /// false, any other one the value of its inner transport. If it is false on any rank, no
    /// message of the ring has agreed lengths.
    fn posts_ahead(&self) -> bool;

    /// Returns true if groups are executed one after another, so that a send and its receive must
    /// be posted in the same group, and the groups in the order of the schedule. A wrapper returns
    /// the value of its inner transport. If it is false, receives may be posted in groups of their
    /// own, and groups of different channels in any order.
    fn runs_groups_in_order(&self) -> bool;
}

/// Expands, inside `impl Transport<Host> for …`, to [`Transport::post_host`] and
/// [`Transport::take_host`], which call `post` and `take`.
#[macro_export]
macro_rules! messages_are_blocks {
    () => {
        fn post_host(
            &mut self,
            sends: &[$crate::Outgoing<'_, $crate::Host>],
            receives: &mut Vec<$crate::Incoming<$crate::Host>>,
        ) -> $crate::Result<()> {
            $crate::Transport::<$crate::Host>::post(self, sends, receives)
        }

        fn take_host(
            &mut self,
            header: &$crate::MessageHeader,
        ) -> $crate::Result<Option<$crate::Arrived<$crate::Host>>> {
            $crate::Transport::<$crate::Host>::take(self, header)
        }
    };
}

/// Small host messages: agreement on arguments, shards of a new batch, closing status, abort,
/// heartbeats.
pub trait Control: Send {
    /// Returns this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn ranks(&self) -> usize;

    /// Starts all-gather number `round` with this rank's bytes. Does not block.
    ///
    /// Collective: all ranks start the same rounds in ascending order.
    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()>;

    /// Starts all-gather `round` as the entry of a collective call, which some ranks may make much
    /// later than others. Default: [`Control::start_all_gather`].
    fn start_entry(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.start_all_gather(round, bytes)
    }

    /// Returns the bytes of every rank, by rank, once all-gather `round` is complete; `None` before
    /// that. Does not block; [`Transport::progress`] advances it.
    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>>;

    /// Returns the ranks whose bytes of all-gather `round` have not arrived.
    fn stragglers(&self, round: u64) -> Vec<usize>;

    /// Sends `error` to every rank as the end of the call. Neither blocks nor fails.
    ///
    /// The first abort has priority: [`Transport::progress`] of every other rank returns it.
    fn abort(&mut self, error: &Error);

    /// Sends a heartbeat. `working` states that this rank has computed a tile or finished a
    /// transfer since its last heartbeat, or that its device computes what a transfer waits for.
    fn heartbeat(&mut self, working: bool);

    /// Returns the node of each rank, equal on all ranks. `None` if unknown or if all ranks are in
    /// one process.
    fn placement(&self) -> Option<&Placement> {
        None
    }

    /// Returns true if another thread than the one that made the transport may use it. Default:
    /// true.
    fn any_thread(&self) -> bool {
        true
    }

    /// Returns the time at which the last heartbeat or data of `peer` arrived.
    fn last_heard(&self, peer: usize) -> Instant;

    /// Returns the ranks whose heartbeats this rank receives, ascending and without itself; `None`
    /// if it receives those of all ranks. A rank reports the silence of the ranks that it watches,
    /// whether it waits for them or not; every rank is watched by some others.
    fn watched(&self) -> Option<&[usize]> {
        None
    }

    /// Returns the last time at which any rank is known to have worked. If all ranks send
    /// heartbeats but none works, the ring is deadlocked.
    fn last_work(&self) -> Instant;
}

impl<T: Control + ?Sized> Control for Box<T> {
    fn rank(&self) -> usize {
        (**self).rank()
    }
    fn ranks(&self) -> usize {
        (**self).ranks()
    }
    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        (**self).start_all_gather(round, bytes)
    }
    fn start_entry(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        (**self).start_entry(round, bytes)
    }
    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        (**self).try_all_gather(round)
    }
    fn stragglers(&self, round: u64) -> Vec<usize> {
        (**self).stragglers(round)
    }
    fn abort(&mut self, error: &Error) {
        (**self).abort(error);
    }
    fn heartbeat(&mut self, working: bool) {
        (**self).heartbeat(working);
    }
    fn placement(&self) -> Option<&Placement> {
        (**self).placement()
    }
    fn any_thread(&self) -> bool {
        (**self).any_thread()
    }
    fn last_heard(&self, peer: usize) -> Instant {
        (**self).last_heard(peer)
    }
    fn watched(&self) -> Option<&[usize]> {
        (**self).watched()
    }
    fn last_work(&self) -> Instant {
        (**self).last_work()
    }
}

/// Allows wrapping a transport that is chosen at run time.
impl<S: Space, T: Transport<S> + ?Sized> Transport<S> for Box<T> {
    fn control(&mut self) -> &mut dyn Control {
        (**self).control()
    }
    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        (**self).post(sends, receives)
    }
    fn progress(&mut self, timeout: Duration) -> Result<()> {
        (**self).progress(timeout)
    }
    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        (**self).take(header)
    }
    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        (**self).post_host(sends, receives)
    }
    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        (**self).take_host(header)
    }
    fn pending(&self) -> bool {
        (**self).pending()
    }
    fn bytes_sent(&self) -> u64 {
        (**self).bytes_sent()
    }
    fn posts_ahead(&self) -> bool {
        (**self).posts_ahead()
    }
    fn runs_groups_in_order(&self) -> bool {
        (**self).runs_groups_in_order()
    }
}
