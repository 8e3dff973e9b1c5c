//! The second seam: how blocks reach peers.
//!
//! Object safe, and nothing in it blocks except [`Transport::progress`], for no longer than its patience. Deadlines, checksums, traces and faults
//! are wrappers of the same trait, never flags inside it.

use std::{ops::Range, sync::Arc, time::Duration, time::Instant};

use crate::{Error, Placement, Result, Space};

/// What a message carries. Messages of different channels never overtake each other's meaning: they are matched by channel and tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Channel {
    /// Keys and values, or the queries of the second pass of a two-pass backward.
    Kv,
    /// A partial sum of dK and dV, sent to the next rank that adds to it.
    PartialGrad,
    /// The sum of dK and dV, sent to the owner of the keys.
    FinalGrad,
}

/// One message of one call: who is at the other end, what it is, and which bytes of the local buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageHeader {
    /// The other end: the receiver of a send, the sender of a receive.
    pub peer: usize,
    /// What it carries.
    pub channel: Channel,
    /// Unique per (sender, receiver, channel) over a plan's life; both ends count alike, and it only grows.
    pub tag: u64,
    /// The ring step, for errors and traces.
    pub step: usize,
    /// Byte ranges of the local buffer, in order: they are sent (or filled) one after another.
    pub ranges: Arc<[Range<u64>]>,
}

impl MessageHeader {
    /// Bytes of the message.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

/// A send. The transport co-owns the buffer until the bytes are gone.
pub struct Outgoing<'a, S: Space> {
    /// Where to and which bytes.
    pub hop: MessageHeader,
    /// The bytes.
    pub buffer: &'a S::Buffer,
    /// After this they may be read.
    pub ready: &'a S::Event,
}

/// A receive. The transport owns the buffer until it gives it back with [`Transport::take`].
pub struct Incoming<S: Space> {
    /// Where from and which bytes.
    pub hop: MessageHeader,
    /// Where the bytes go; nobody else owns it.
    pub buffer: S::Buffer,
}

/// A finished receive.
#[derive(Debug)]
pub struct Arrived<S: Space> {
    /// The buffer that was posted.
    pub buffer: S::Buffer,
    /// After this it may be read.
    pub ready: S::Event,
}

/// Moves blocks between the ranks of one ring. It is its own [`Control`], so that a wrapper can watch (and delegate) both halves.
pub trait Transport<S: Space>: Control {
    /// Small host messages beside the blocks: `self`, as the trait object of its other half.
    fn control(&mut self) -> &mut dyn Control;

    /// Starts one group of transfers (`ncclGroup`, `MPI_Startall`). Every rank's schedule pairs each send with a receive of the same
    /// group. `receives` is drained.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::PeerLost`].
    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()>;

    /// Moves what can be moved; waits at most `patience` for something to do.
    ///
    /// # Errors
    /// Whatever killed a transfer: [`Error::Comm`], [`Error::Timeout`], [`Error::PeerLost`], [`Error::Aborted`].
    fn progress(&mut self, patience: Duration) -> Result<()>;

    /// The posted receive `hop`, if it has arrived. Each is given back once.
    ///
    /// # Errors
    /// As [`Transport::progress`].
    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<S>>>;

    /// Whether sends are still in flight. A call drains them before it returns.
    fn pending(&self) -> bool;

    /// Payload bytes of all sends posted since the ring was made.
    fn bytes_sent(&self) -> u64;
}

/// Small host messages: agreement, ids of a new batch, closing status, abort, signs of life.
pub trait Control: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// All ranks.
    fn ranks(&self) -> usize;

    /// Starts the gather number `round` (both ends count alike) with this rank's bytes. Does not block.
    ///
    /// # Errors
    /// [`Error::Comm`], [`Error::PeerLost`].
    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()>;

    /// Every rank's bytes of gather `round`, once all have offered. Does not block; [`Transport::progress`] moves it.
    ///
    /// # Errors
    /// [`Error::Aborted`], [`Error::PeerLost`].
    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>>;

    /// Ranks that have not offered to gather `round` yet.
    fn stragglers(&self, round: u64) -> Vec<usize>;

    /// Tells every rank that this one failed. Never blocks, never fails; the first abort wins and [`Transport::progress`] of every
    /// other rank then returns it.
    fn abort(&mut self, error: &Error);

    /// Says that this rank lives; with `working`, also that it has done some work (a tile, a transfer) since the last beat.
    fn heartbeat(&mut self, working: bool);

    /// Which node each rank is on, where that is known; the same on all ranks. A transport within one process has nothing to say.
    fn placement(&self) -> Option<&Placement> {
        None
    }

    /// When something was last heard of `peer`, be it a beat or data.
    fn last_heard(&self, peer: usize) -> Instant;

    /// When any rank was last known to do work. A ring in which nobody works is stuck, however alive its ranks are.
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
    fn last_heard(&self, peer: usize) -> Instant {
        (**self).last_heard(peer)
    }
    fn last_work(&self) -> Instant {
        (**self).last_work()
    }
}

/// A transport chosen at run time takes the same wrappers as one that is known when the program is compiled.
impl<S: Space, T: Transport<S> + ?Sized> Transport<S> for Box<T> {
    fn control(&mut self) -> &mut dyn Control {
        (**self).control()
    }
    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        (**self).post(sends, receives)
    }
    fn progress(&mut self, patience: Duration) -> Result<()> {
        (**self).progress(patience)
    }
    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<S>>> {
        (**self).take(hop)
    }
    fn pending(&self) -> bool {
        (**self).pending()
    }
    fn bytes_sent(&self) -> u64 {
        (**self).bytes_sent()
    }
}
