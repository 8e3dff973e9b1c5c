//! A ring over functions of the host: `Transport<Host>` made of send, recv, test and cancel.
//!
//! ```text
//! tag 0   header: kind, number, bytes of the body       one receive per peer is always posted
//! tag 1   body of the header before it
//! tag 2+c bytes of messages of channel c, in the order of their tags
//! ```
//!
//! Messages of one sender and one tag are matched in order. That is enough for the bytes of messages:
//! in each channel both ends post the same messages in ascending order of their tags, with equal
//! lengths. A message whose bytes are one range of its buffer is sent from there and received there;
//! another is packed and unpacked. A message without bytes is not sent.
//!
//! Small messages (all-gathers, heartbeats, aborts, goodbyes) are headers with a body. An
//! all-gather is one message from each rank to each other rank.
//!
//! # Life and death
//! Dropping an endpoint says goodbye to all ranks. If nothing has failed it waits for theirs, for a
//! second at most; then whatever is still in flight is cancelled. A buffer whose message cannot be
//! cancelled is leaked, because the host may still write to it.

mod control;
mod drop;
mod frame;
mod pump;
mod requests;

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_void},
    ops::Range,
    time::{Duration, Instant},
};

use annulus::{Error, Result};
use annulus_core::{
    Arrived, Channel, Control, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Space,
    Transport, index,
};

use self::{
    control::Gather,
    frame::Frame,
    pump::{Label, Peer, Receive},
    requests::Requests,
};
use crate::versioned::Versioned;

/// Number of tags that [`annulus_transport`] is called with: 0 to 4.
pub const ANNULUS_TRANSPORT_TAGS: i32 = 5;

/// The host's functions that carry messages between ranks.
///
/// Every function returns 0, or another number if it failed, which ends the plan and is named in
/// its error. Messages from one rank to another with the same tag are received in the order in
/// which they were sent; a message has the length of its receive. None of the functions waits. They
/// are called on the thread that calls annulus, within that call, or on that of a pass that was
/// started; never two at once for one plan. They do not unwind and call no function of annulus.
///
/// The messages of one plan meet no others: another plan, or the host's own traffic, has another
/// context with another communicator or other tags.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_transport {
    /// sizeof(annulus_transport).
    pub struct_size: u64,
    /// Passed to every function.
    pub context: *mut c_void,
    /// This rank.
    pub rank: i64,
    /// Number of ranks.
    pub ranks: i64,
    /// Starts sending `bytes` bytes from `data` to rank `peer`, and writes a request to `*request`.
    /// The bytes stay unchanged until the request is done. If it fails there is no request.
    pub send: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            peer: i64,
            tag: i32,
            data: *const c_void,
            bytes: u64,
            request: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Starts receiving `bytes` bytes from rank `peer` into `data`, and writes a request to
    /// `*request`. Nobody else uses the bytes until the request is done. If it fails there is no
    /// request.
    pub recv: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            peer: i64,
            tag: i32,
            data: *mut c_void,
            bytes: u64,
            request: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Moves messages, and writes 1 to `*done` if the request is done, else 0. A request that is
    /// done, or failed, does not exist any more, and its bytes are not touched any more.
    pub test: Option<
        unsafe extern "C" fn(context: *mut c_void, request: *mut c_void, done: *mut i32) -> c_int,
    >,
    /// Ends a request that is not done. After it returned 0 the request does not exist any more and
    /// its bytes are not touched any more; if it fails annulus leaks the bytes.
    pub cancel: Option<unsafe extern "C" fn(context: *mut c_void, request: *mut c_void) -> c_int>,
}

// SAFETY: repr(C), begins with its size; numbers may be 0, pointers null and functions None
unsafe impl Versioned for annulus_transport {
    const NAME: &'static str = "transport";
    const FIRST_BYTES: usize = 64;
}

// fields are appended, never removed
const _: () = assert!(size_of::<annulus_transport>() >= annulus_transport::FIRST_BYTES);

/// One rank's endpoint over the host's functions.
pub(crate) struct HostTransport {
    rank: usize,
    requests: Requests,
    peers: Vec<Peer>,
    /// Posted and not yet taken.
    receives: Vec<Receive>,
    /// Last tag that was posted, by direction (true: a send), peer and channel.
    last_tags: HashMap<(bool, usize, Channel), u64>,
    /// Staging bytes of messages of several ranges, reused.
    staging: Vec<HostBuffer>,
    gathers: BTreeMap<u64, Gather>,
    /// Sends of tensor data in flight.
    unsent: usize,
    /// Step that was posted last.
    step: usize,
    bytes_sent: u64,
    /// Number of this rank's reports of work.
    worked: u64,
    last_work: Instant,
    /// Since when nothing has moved.
    idle_since: Instant,
    failed: Option<Error>,
}

impl HostTransport {
    /// Makes the endpoint, and posts the receive of the first header of every peer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the field; [`Error::Comm`] if a function of the host
    /// fails.
    pub(crate) fn new(calls: annulus_transport) -> Result<Self> {
        let ranks = usize::try_from(calls.ranks).ok().filter(|&ranks| ranks > 0);
        let Some(ranks) = ranks else {
            return Err(Error::invalid("transport.ranks", calls.ranks, "at least 1"));
        };
        let rank = usize::try_from(calls.rank).ok().filter(|&rank| rank < ranks);
        let Some(rank) = rank else {
            let want = format!("a rank from 0 to {}", ranks - 1);
            return Err(Error::invalid("transport.rank", calls.rank, want));
        };
        let now = Instant::now();
        let mut made = Self {
            rank,
            requests: Requests::new(&calls)?,
            peers: (0..ranks).map(|_| Peer::new(now)).collect(),
            receives: Vec::new(),
            last_tags: HashMap::new(),
            staging: Vec::new(),
            gathers: BTreeMap::new(),
            unsent: 0,
            step: 0,
            bytes_sent: 0,
            worked: 0,
            last_work: now,
            idle_since: now,
            failed: None,
        };
        for peer in made.others() {
            // what fails here drops the endpoint, which cancels what was posted
            made.listen(peer).inspect_err(|error| made.fail(error))?;
        }
        Ok(made)
    }

    /// All ranks but this one.
    fn others(&self) -> Vec<usize> {
        (0..self.peers.len()).filter(|&peer| peer != self.rank).collect()
    }

    /// Sends a small message.
    fn say(&mut self, peer: usize, frame: &Frame, label: Label) -> Result<()> {
        let [header, body] = frame.encode()?;
        let last = if Host::size(&body) == 0 { label } else { Label::Said };
        self.requests.send(peer, frame::HEADER_TAG, self.step, header, 0..frame::HEADER, last)?;
        match Host::size(&body) {
            0 => Ok(()),
            bytes => self.requests.send(peer, frame::BODY_TAG, self.step, body, 0..bytes, label),
        }
    }

    /// Checks a message that is to be posted: a rank of this ring, ranges within its buffer, a tag
    /// above the last one of its channel.
    fn check_header(&mut self, is_send: bool, header: &MessageHeader, size: u64) -> Result<()> {
        if header.peer >= self.peers.len() || header.peer == self.rank {
            return Err(Error::invalid("header.peer", header.peer, "another rank of this ring"));
        }
        if header.ranges.iter().any(|range| range.start > range.end || range.end > size) {
            let want = format!("ranges within {size} bytes");
            return Err(Error::invalid("header.ranges", format!("{:?}", header.ranges), want));
        }
        let key = (is_send, header.peer, header.channel);
        if self.last_tags.get(&key).is_some_and(|&last| header.tag <= last) {
            let (peer, step) = (header.peer, header.step);
            let what = format!("{:?} {} posted after a tag as high", header.channel, header.tag);
            return Err(Error::Comm { peer, step, what });
        }
        self.last_tags.insert(key, header.tag);
        self.step = header.step;
        Ok(())
    }

    fn post_receive(&mut self, incoming: Incoming<Host>) -> Result<()> {
        let Incoming { header, buffer } = incoming;
        self.check_header(false, &header, Host::size(&buffer))?;
        let (bytes, tag) = (header.bytes(), frame::hop_tag(header.channel));
        let label = Label::Received { peer: header.peer, channel: header.channel, tag: header.tag };
        let (peer, step) = (header.peer, header.step);
        if bytes == 0 {
            self.receives.push(Receive { header, buffer: Some(buffer), arrived: true });
            return Ok(());
        }
        let (kept, into, range) = match contiguous(&header.ranges) {
            Some(range) => (None, buffer, range),
            None => (Some(buffer), self.take_staging(bytes)?, 0..bytes),
        };
        self.receives.push(Receive { header, buffer: kept, arrived: false });
        self.requests.receive(peer, tag, step, into, range, label)
    }

    fn post_send(&mut self, outgoing: &Outgoing<'_, Host>) -> Result<()> {
        let Outgoing { header, buffer, .. } = outgoing;
        self.check_header(true, header, Host::size(buffer))?;
        let bytes = header.bytes();
        self.bytes_sent += bytes;
        if bytes == 0 {
            return Ok(());
        }
        let (from, range, is_staged) = match contiguous(&header.ranges) {
            Some(range) => ((*buffer).clone(), range, false),
            None => (self.pack(buffer, &header.ranges, bytes)?, 0..bytes, true),
        };
        self.unsent += 1;
        self.peers[header.peer].unsent += 1;
        let label = Label::Sent { peer: header.peer, is_staged };
        self.requests.send(
            header.peer,
            frame::hop_tag(header.channel),
            header.step,
            from,
            range,
            label,
        )
    }

    /// A buffer of at least `bytes` bytes that nobody else owns.
    fn take_staging(&mut self, bytes: u64) -> Result<HostBuffer> {
        let fitting = self.staging.iter().position(|buffer| Host::size(buffer) >= bytes);
        fitting
            .map_or_else(|| HostBuffer::zeroed(bytes), |index| Ok(self.staging.swap_remove(index)))
    }

    /// The bytes of a message of several ranges, packed.
    fn pack(&mut self, from: &HostBuffer, ranges: &[Range<u64>], all: u64) -> Result<HostBuffer> {
        let mut packed = self.take_staging(all)?;
        let mut rest = packed.bytes_mut().unwrap_or_default();
        for range in ranges {
            let source = &from.bytes()[index(range.start)..index(range.end)];
            let (target, after) = rest.split_at_mut(source.len());
            target.copy_from_slice(source);
            rest = after;
        }
        Ok(packed)
    }

    fn alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Keeps what ended this endpoint. A bad argument does not.
    fn fail(&mut self, error: &Error) {
        if error.is_fatal() {
            self.failed.get_or_insert_with(|| error.clone());
        }
    }
}

/// The one range that these ranges are, if they are one.
fn contiguous(ranges: &[Range<u64>]) -> Option<Range<u64>> {
    let mut filled = ranges.iter().filter(|range| range.start < range.end);
    let first = filled.next().cloned().unwrap_or(0..0);
    filled.try_fold(first, |whole, range| {
        (whole.end == range.start).then_some(whole.start..range.end)
    })
}

impl Transport<Host> for HostTransport {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.alive()?;
        self.idle_since = Instant::now();
        // within a group the order means nothing; on the wire it is that of the tags
        let key = |header: &MessageHeader| (header.peer, header.channel, header.tag);
        receives.sort_by_key(|incoming| key(&incoming.header));
        let mut order: Vec<&Outgoing<'_, Host>> = sends.iter().collect();
        order.sort_by_key(|outgoing| key(&outgoing.header));
        let posted = receives
            .drain(..)
            .try_for_each(|incoming| self.post_receive(incoming))
            .and_then(|()| order.into_iter().try_for_each(|outgoing| self.post_send(outgoing)));
        posted.inspect_err(|error| self.fail(error))
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.wait(patience)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.alive()?;
        let is_it = |receive: &Receive| receive.is_for(header.peer, header.channel, header.tag);
        let Some(place) = self.receives.iter().position(is_it) else {
            let got = format!("{:?} {} from rank {}", header.channel, header.tag, header.peer);
            return Err(Error::invalid(
                "header",
                got,
                "a receive that was posted and not yet taken",
            ));
        };
        if !self.receives[place].arrived {
            return Ok(None);
        }
        let buffer = self.receives.swap_remove(place).buffer;
        Ok(buffer.map(|buffer| Arrived { buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        self.unsent > 0
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
