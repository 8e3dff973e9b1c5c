//! The leaf that calls MPI about messages: whoever is in flight keeps its bytes.
//!
//! [`Requests`] owns (or, of a send, co-owns) the buffer of every message until all of its pieces are complete, and only then gives it back.
//! A transfer that never completes keeps its buffer for ever: dropping a [`Requests`] with messages in flight **leaks** their buffers and
//! requests, because an MPI that was given up may still write to them.
//!
//! Invariants, besides the rules of [`super::ffi`]:
//!
//! * **A.** Each request in `requests` reads or writes bytes within the buffer of `messages[owners[i]]`, which stays there until `left` is 0,
//!   i.e. until all requests of that owner are complete. A [`Memory`]'s bytes do not move when the handle moves.
//! * **B.** The buffer of a receive was nobody else's when it was posted, and no reference to its bytes is made until it is given back.
//! * **C.** The bytes of a send are only read: a [`HostBuffer`] that is co-owned (by `messages`) gives no mutable reference to anybody; who writes to
//!   device memory by a kernel has seen the transfer end.
//! * **D.** No message is longer than the receive that it meets, piece by piece: either MPI has told its length ([`Requests::receive_any`]), or the
//!   sender, which runs this code too, has announced it and how it cuts it ([`Requests::receive`]). Some MPIs write past the end otherwise.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{collections::HashMap, ffi::c_int, mem, ops::Range};

use annulus_core::{Error, HostBuffer, Result, index};
use mpi::ffi;

use super::{
    ffi::{About, Communicator, Fault, check, count, is_in_statuses},
    memory::Memory,
};

/// MPI-3 counts in C ints: longer messages go in pieces of this many bytes.
pub(super) const LONGEST_PIECE: u64 = 1 << 30;

/// How sends complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// When the bytes have left (`MPI_Isend`).
    Standard,
    /// When they are being received (`MPI_Issend`).
    Synchronous,
}

/// The other end of a message and its envelope.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    pub(super) peer: usize,
    pub(super) tag: u64,
    /// For errors.
    pub(super) step: usize,
    /// Bytes of a piece, at most [`LONGEST_PIECE`].
    pub(super) piece: u64,
}

struct Message<L> {
    label: L,
    buffer: Memory,
    /// Requests that are not complete.
    left: usize,
    /// The first thing that went wrong with one of them.
    outcome: Result<(), Trouble>,
}

/// What went wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It has not the length of its receive.
    Length,
    /// MPI says so.
    Fault(Fault),
}

/// A message that is through.
pub(super) struct Landed<L> {
    pub(super) label: L,
    pub(super) buffer: Memory,
    pub(super) outcome: Result<(), Trouble>,
}

/// Messages in flight, each with a label of the caller's.
pub(super) struct Requests<L> {
    requests: Vec<ffi::MPI_Request>,
    /// The message of each request, and the bytes that it receives (`None` of a send).
    owners: Vec<(u64, Option<c_int>)>,
    messages: HashMap<u64, Message<L>>,
    next: u64,
    /// Room for what `MPI_Testsome` says.
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

// SAFETY: requests are numbers or pointers to memory of MPI's, which belongs to no thread; which thread may call MPI is checked by
// `Communicator::enter` (rule 2). The buffers are `Send`.
unsafe impl<L: Send> Send for Requests<L> {}

impl<L> Requests<L> {
    pub(super) fn new() -> Self {
        Self {
            requests: Vec::new(),
            owners: Vec::new(),
            messages: HashMap::new(),
            next: 0,
            indices: Vec::new(),
            statuses: Vec::new(),
        }
    }

    /// The labels of what is in flight.
    pub(super) fn labels(&self) -> impl Iterator<Item = &L> {
        self.messages.values().map(|message| &message.label)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Starts sending bytes of `buffer`. The caller has entered `communicator`.
    pub(super) fn send(
        &mut self,
        communicator: &Communicator,
        mode: Mode,
        to: Address,
        buffer: Memory,
        range: Range<u64>,
        label: L,
    ) -> Result<()> {
        let Some(start) = buffer.start(&range) else {
            return Err(Error::Comm {
                peer: to.peer,
                step: to.step,
                what: format!("bytes {range:?} of a buffer of {}", buffer.size()),
            });
        };
        let pieces: Vec<(*const u8, c_int)> = pieces(range.end - range.start, to.piece)
            .map(|piece| (start.wrapping_add(index(piece.start)), length(&piece)))
            .collect();
        let number = self.begin(label, buffer, pieces.len());
        for (start, length) in pieces {
            let start_send = match mode {
                Mode::Standard => ffi::MPI_Isend,
                Mode::Synchronous => ffi::MPI_Issend,
            };
            let [peer, tag] = envelope(to)?;
            // SAFETY: rules 1 and 2 (the caller has entered); `length` bytes from `start` lie in `buffer`, which is in `messages` by now
            // (invariant A) and is only read (C); the request lives in a local until it is stored
            self.begin_request(number, None, (to.peer, to.step), |request| unsafe {
                start_send(
                    start.cast(),
                    length,
                    ffi::RSMPI_UINT8_T,
                    peer,
                    tag,
                    communicator.raw(),
                    request,
                )
            })?;
        }
        Ok(())
    }

    /// Starts receiving into bytes of `buffer`, which nobody else owns, a message that was announced to be as long. The caller has entered
    /// `communicator`.
    pub(super) fn receive(
        &mut self,
        communicator: &Communicator,
        from: Address,
        mut buffer: Memory,
        range: Range<u64>,
        label: L,
    ) -> Result<()> {
        // one pointer for all pieces, so that none of them makes another one stale
        let Some(start) = buffer.start_mut(&range) else {
            return Err(Error::Comm {
                peer: from.peer,
                step: from.step,
                what: "the buffer of a receive is in use".to_owned(),
            });
        };
        let pieces: Vec<Range<u64>> = pieces(range.end - range.start, from.piece).collect();
        let number = self.begin(label, buffer, pieces.len());
        for piece in pieces {
            let (length, [peer, tag]) = (length(&piece), envelope(from)?);
            // SAFETY: rules 1 and 2 (the caller has entered); the piece lies within the bytes behind `start`, which are of the buffer that is
            // in `messages` by now (A) and that nobody reads or writes until it is given back (B); what comes is no longer (D)
            self.begin_request(number, Some(length), (from.peer, from.step), |request| unsafe {
                let start = start.add(index(piece.start)).cast();
                ffi::MPI_Irecv(
                    start,
                    length,
                    ffi::RSMPI_UINT8_T,
                    peer,
                    tag,
                    communicator.raw(),
                    request,
                )
            })?;
        }
        Ok(())
    }

    /// Starts receiving the next message on `communicator`, whoever sent it, whatever its length, if there is one. Says who sent it.
    /// The caller has entered `communicator`.
    pub(super) fn receive_any(
        &mut self,
        communicator: &Communicator,
        label: impl FnOnce(usize) -> L,
    ) -> Result<Option<usize>> {
        let about = (communicator.rank(), 0);
        let mut found = 0;
        // SAFETY: a status is made of integers, for which zero is a value; MPI overwrites it
        let mut status: ffi::MPI_Status = unsafe { mem::zeroed() };
        let mut message = mem::MaybeUninit::uninit();
        // SAFETY: rules 1 and 2 (the caller has entered); everything that MPI writes to lives through the call
        let code = unsafe {
            let (any, every) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            ffi::MPI_Improbe(
                any,
                every,
                communicator.raw(),
                &raw mut found,
                message.as_mut_ptr(),
                &raw mut status,
            )
        };
        check(code, about)?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: `found`, so that MPI has written the message
        let mut message = unsafe { message.assume_init() };
        let (peer, length) = (count(status.MPI_SOURCE), received(&status)?);
        let mut buffer = HostBuffer::zeroed(count(length) as u64)?;
        let start = buffer.bytes_mut().map_or(std::ptr::null_mut(), <[u8]>::as_mut_ptr);
        let number = self.begin(label(peer), Memory::Host(buffer), 1);
        // SAFETY: rules 1 and 2; `start` has room for `length` bytes of a buffer that was made a moment ago, is in `messages` by now (A) and is
        // untouched until it is given back (B); the message was matched above and is received once
        self.begin_request(number, Some(length), (peer, 0), |request| unsafe {
            ffi::MPI_Imrecv(start.cast(), length, ffi::RSMPI_UINT8_T, &raw mut message, request)
        })?;
        Ok(Some(peer))
    }

    /// Lets MPI move, and gives back what is through. The caller has entered the communicators of all messages.
    pub(super) fn test(&mut self, about: About) -> Result<Vec<Landed<L>>> {
        if self.requests.is_empty() {
            return Ok(Vec::new());
        }
        let all = c_int::try_from(self.requests.len()).unwrap_or(c_int::MAX);
        self.indices.resize(self.requests.len(), 0);
        // SAFETY: a status is made of integers, for which zero is a value
        self.statuses.resize(self.requests.len(), unsafe { mem::zeroed() });
        let mut done = 0;
        // SAFETY: rules 1 and 2 (the caller has entered); the three arrays have room for `all` entries; every request is ours and active
        let code = unsafe {
            let (requests, indices, statuses) =
                (self.requests.as_mut_ptr(), self.indices.as_mut_ptr(), self.statuses.as_mut_ptr());
            ffi::MPI_Testsome(all, requests, &raw mut done, indices, statuses)
        };
        // with this code, and with this code only, each status says how its own request fared
        let in_status = is_in_statuses(code);
        if !in_status {
            check(code, about)?;
        }
        if done == ffi::MPI_UNDEFINED as c_int {
            return Ok(Vec::new());
        }
        let mut complete: Vec<usize> = Vec::with_capacity(count(done));
        for entry in 0..count(done) {
            let (place, status) = (count(self.indices[entry]), self.statuses[entry]);
            let (owner, wanted) = self.owners[place];
            let fault = if in_status { Fault::of(status.MPI_ERROR) } else { Ok(()) };
            let outcome = match (fault, wanted) {
                (Err(Fault::Long), _) => Err(Trouble::Length),
                (Err(fault), _) => Err(Trouble::Fault(fault)),
                (Ok(()), Some(wanted)) if received(&status)? != wanted => Err(Trouble::Length),
                (Ok(()), _) => Ok(()),
            };
            if let Some(message) = self.messages.get_mut(&owner) {
                message.left -= 1;
                message.outcome = mem::replace(&mut message.outcome, Ok(())).and(outcome);
            }
            complete.push(place);
        }
        complete.sort_unstable_by(|a, b| b.cmp(a));
        let mut landed = Vec::new();
        for place in complete {
            self.requests.swap_remove(place);
            let (owner, _) = self.owners.swap_remove(place);
            if self.messages.get(&owner).is_some_and(|message| message.left == 0)
                && let Some(Message { label, buffer, outcome, .. }) = self.messages.remove(&owner)
            {
                landed.push(Landed { label, buffer, outcome });
            }
        }
        Ok(landed)
    }

    /// Takes a message in, before its requests begin (invariant A).
    fn begin(&mut self, label: L, buffer: Memory, left: usize) -> u64 {
        self.next += 1;
        self.messages.insert(self.next, Message { label, buffer, left, outcome: Ok(()) });
        self.next
    }

    fn begin_request(
        &mut self,
        owner: u64,
        wanted: Option<c_int>,
        about: About,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<()> {
        // SAFETY: a constant of the linked MPI
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        check(start(&raw mut request), about)?;
        self.requests.push(request);
        self.owners.push((owner, wanted));
        Ok(())
    }
}

impl<L> Drop for Requests<L> {
    fn drop(&mut self) {
        // MPI may still read and write: see the first lines
        self.messages.drain().for_each(|(_, message)| mem::forget(message.buffer));
    }
}

/// The pieces of a message, at least one.
fn pieces(bytes: u64, piece: u64) -> impl Iterator<Item = Range<u64>> {
    let piece = piece.clamp(1, LONGEST_PIECE);
    (0..bytes.div_ceil(piece).max(1))
        .map(move |number| number * piece..bytes.min((number + 1) * piece))
}

/// The length of a piece, which is at most [`LONGEST_PIECE`].
fn length(piece: &Range<u64>) -> c_int {
    c_int::try_from(piece.end - piece.start).unwrap_or(c_int::MAX)
}

/// Peer and tag as MPI wants them.
fn envelope(address: Address) -> Result<[c_int; 2]> {
    let peer = c_int::try_from(address.peer)
        .map_err(|_| Error::invalid("peer", address.peer, "a rank"))?;
    let tag = c_int::try_from(address.tag)
        .map_err(|_| Error::invalid("tag", address.tag, "a tag of this MPI"))?;
    Ok([peer, tag])
}

/// The bytes that a receive got.
fn received(status: &ffi::MPI_Status) -> Result<c_int> {
    let mut bytes = 0;
    // SAFETY: rules 1 and 2 (every caller has entered); MPI wrote the status, and the number lives through the call
    let code =
        unsafe { ffi::MPI_Get_count(&raw const *status, ffi::RSMPI_UINT8_T, &raw mut bytes) };
    check(code, (0, 0))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_message_and_none_is_too_long_for_an_int() {
        let ends = |bytes, piece| {
            pieces(bytes, piece).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>()
        };
        assert_eq!(ends(0, 5), [(0, 0)]);
        assert_eq!(ends(5, 5), [(0, 5)]);
        assert_eq!(ends(11, 5), [(0, 5), (5, 10), (10, 11)]);
        let long = (1 << 32) + 7;
        let all: Vec<_> = pieces(long, u64::MAX).collect();
        assert!(
            all.len() == 5
                && all.iter().all(|piece| c_int::try_from(piece.end - piece.start).is_ok())
        );
        assert_eq!(all.last().map(|piece| piece.end), Some(long));
    }
}
