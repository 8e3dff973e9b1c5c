//! Messages in flight: nonblocking sends and receives of MPI, which own their buffers.
//!
//! [`Requests`] owns (or, of a send, co-owns) the buffer of every message until all of its pieces
//! are complete, and only then returns it. A transfer that never completes keeps its buffer for
//! ever: dropping a [`Requests`] with messages in flight **leaks** their buffers and requests,
//! because MPI may still write to them.
//!
//! Invariants, besides the rules of [`super::ffi`]:
//!
//! * **A.** Each request in `requests` reads or writes bytes within the buffer of
//!   `messages[owners[i]]`, which stays there until `incomplete` is 0, i.e. until all requests of
//!   that message are complete. The bytes of a [`MessageBuffer`] do not move when the value moves.
//! * **B.** The buffer of a receive had no other owner when it was posted, and no reference to its
//!   bytes is created until it is returned.
//! * **C.** The bytes of a send are only read. A [`HostBuffer`] that is co-owned (by `messages`)
//!   yields no mutable reference; a kernel that writes to device memory is enqueued only after the
//!   transfer has completed.
//! * **D.** No message is longer than the receive that it matches, piece by piece. Either MPI has
//!   reported its length ([`Requests::receive_any`]), or the sender, which runs this code too, has
//!   announced the length of message and pieces, or all ranks have agreed on both
//!   ([`Requests::receive`]). Otherwise some MPIs write past the end of the buffer.
#![expect(unsafe_code, reason = "calls of the C interface of MPI")]

use std::{collections::HashMap, ffi::c_int, mem, ops::Range};

use annulus_core::{Error, HostBuffer, Result, index};
use annulus_mpi::ffi;

use super::{
    communicator::MpiCommunicator,
    ffi::{MpiError, PeerStep, check, count, is_error_in_status},
    messages::{MessageBuffer, MessageKind},
};

/// Longest piece of a message, in bytes. MPI 3 counts in C ints, and 2³⁰ is the largest power of
/// two among them.
pub(super) const LONGEST_PIECE: u64 = 1 << 30;

/// Envelope of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    pub(super) peer: usize,
    pub(super) tag: u64,
    /// Ring step, for errors.
    pub(super) step: usize,
    /// Bytes of a piece, at most [`LONGEST_PIECE`].
    pub(super) piece: u64,
}

struct InFlightRequests {
    kind: MessageKind,
    buffer: MessageBuffer,
    /// Requests that are not complete.
    incomplete: usize,
    /// First failure of one of them.
    outcome: Result<(), MpiError>,
}

/// A message that has completed.
pub(super) struct Completed {
    pub(super) kind: MessageKind,
    pub(super) buffer: MessageBuffer,
    pub(super) outcome: Result<(), MpiError>,
}

/// Message of a request.
#[derive(Clone, Copy)]
struct RequestOwner {
    message: u64,
    /// Bytes that the request receives; `None` of a send.
    want: Option<c_int>,
}

/// Messages in flight.
#[derive(Default)]
pub(super) struct Requests {
    requests: Vec<ffi::MPI_Request>,
    /// The owner of each request.
    owners: Vec<RequestOwner>,
    messages: HashMap<u64, InFlightRequests>,
    /// Number of the message that was added last.
    last: u64,
    /// Output of `MPI_Testsome`, reused by every call.
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

// SAFETY: requests are numbers or pointers to memory of MPI's, which belongs to no thread; that the
// thread may call MPI is checked by `Communicator::enter` (rule 2). The buffers are `Send`.
unsafe impl Send for Requests {}

impl Requests {
    /// Iterates over the kinds of all messages in flight.
    pub(super) fn kinds(&self) -> impl Iterator<Item = &MessageKind> {
        self.messages.values().map(|message| &message.kind)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Starts sending the bytes `range` of `buffer`. The send completes when the buffer may be
    /// reused and, if it is `synchronous`, the receive has started. The caller has entered
    /// `communicator`.
    pub(super) fn send(
        &mut self,
        communicator: &MpiCommunicator,
        synchronous: bool,
        to: Address,
        buffer: MessageBuffer,
        range: Range<u64>,
        kind: MessageKind,
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
        let number = self.begin(kind, buffer, pieces.len());
        for (start, length) in pieces {
            let start_send = if synchronous { ffi::MPI_Issend } else { ffi::MPI_Isend };
            let [peer, tag] = envelope(to)?;
            let at = PeerStep { peer: to.peer, step: to.step };
            // SAFETY: rules 1 and 2 (the caller has entered); `length` bytes from `start` lie in
            // `buffer`, which is in `messages` by now (invariant A) and is only read (C); the
            // request lives in a local until it is stored
            self.begin_request(number, None, at, |request| unsafe {
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

    /// Starts receiving a message that was announced with the length of `range`, or whose length is
    /// agreed, into these bytes of `buffer`, which has no other owner. The caller has entered
    /// `communicator`.
    pub(super) fn receive(
        &mut self,
        communicator: &MpiCommunicator,
        from: Address,
        mut buffer: MessageBuffer,
        range: Range<u64>,
        kind: MessageKind,
    ) -> Result<()> {
        // one pointer for all pieces: a further mutable reference would invalidate it
        let Some(start) = buffer.start_mut(&range) else {
            return Err(Error::Comm {
                peer: from.peer,
                step: from.step,
                what: "the buffer of a receive is in use".to_owned(),
            });
        };
        let pieces: Vec<Range<u64>> = pieces(range.end - range.start, from.piece).collect();
        let number = self.begin(kind, buffer, pieces.len());
        for piece in pieces {
            let length = length(&piece);
            let [peer, tag] = envelope(from)?;
            let at = PeerStep { peer: from.peer, step: from.step };
            // SAFETY: rules 1 and 2 (the caller has entered); the piece lies within the bytes from
            // `start`, which belong to the buffer that is in `messages` by now (A) and that is not
            // read or written until it is returned (B); the message is not longer (D)
            self.begin_request(number, Some(length), at, |request| unsafe {
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

    /// Starts receiving the next message on `communicator`, from any rank and of any length, if
    /// there is one. Returns its sender. The caller has entered `communicator`.
    pub(super) fn receive_any(
        &mut self,
        communicator: &MpiCommunicator,
        kind: impl FnOnce(usize) -> MessageKind,
    ) -> Result<Option<usize>> {
        let mut found = 0;
        // SAFETY: a status is made of integers, for which zero is a value; MPI overwrites it
        let mut status: ffi::MPI_Status = unsafe { mem::zeroed() };
        let mut message = mem::MaybeUninit::uninit();
        // SAFETY: rules 1 and 2 (the caller has entered); all that MPI writes to lives through the
        // call
        let code = unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                ffi::RSMPI_ANY_TAG,
                communicator.raw(),
                &raw mut found,
                message.as_mut_ptr(),
                &raw mut status,
            )
        };
        check(code, PeerStep::of(communicator.rank))?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: a message was found, so MPI has written its handle
        let mut message = unsafe { message.assume_init() };
        let peer = count(status.MPI_SOURCE);
        let length = received(&status)?;
        let mut buffer = HostBuffer::zeroed(count(length) as u64)?;
        let start = buffer.bytes_mut().map_or(std::ptr::null_mut(), <[u8]>::as_mut_ptr);
        let number = self.begin(kind(peer), MessageBuffer::Host(buffer), 1);
        // SAFETY: rules 1 and 2; `start` points to `length` bytes of a buffer that was allocated
        // above, is in `messages` by now (A) and is untouched until it is returned (B); the message
        // was matched above and is received once
        self.begin_request(number, Some(length), PeerStep::of(peer), |request| unsafe {
            ffi::MPI_Imrecv(start.cast(), length, ffi::RSMPI_UINT8_T, &raw mut message, request)
        })?;
        Ok(Some(peer))
    }

    /// Advances MPI and returns the messages that have completed. `at` is reported with an error
    /// that concerns no single message. The caller has entered the communicators of all messages.
    pub(super) fn test(&mut self, at: PeerStep) -> Result<Vec<Completed>> {
        if self.requests.is_empty() {
            return Ok(Vec::new());
        }
        let all = c_int::try_from(self.requests.len()).unwrap_or(c_int::MAX);
        self.indices.resize(self.requests.len(), 0);
        // SAFETY: a status is made of integers, for which zero is a value
        self.statuses.resize(self.requests.len(), unsafe { mem::zeroed() });
        let mut done = 0;
        // SAFETY: rules 1 and 2 (the caller has entered); the three arrays have `all` entries;
        // every request was started here and is active
        let code = unsafe {
            ffi::MPI_Testsome(
                all,
                self.requests.as_mut_ptr(),
                &raw mut done,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        // with this code, and with this code only, each status holds its own request's code
        let in_status = is_error_in_status(code);
        if !in_status {
            check(code, at)?;
        }
        if done == ffi::MPI_UNDEFINED as c_int {
            return Ok(Vec::new());
        }
        let mut complete: Vec<usize> = Vec::with_capacity(count(done));
        for (&request, status) in self.indices.iter().zip(&self.statuses).take(count(done)) {
            let request = count(request);
            let RequestOwner { message, want } = self.owners[request];
            let code = if in_status { status.MPI_ERROR } else { ffi::MPI_SUCCESS as c_int };
            let outcome = outcome(code, status, want)?;
            if let Some(message) = self.messages.get_mut(&message) {
                message.incomplete -= 1;
                message.outcome = mem::replace(&mut message.outcome, Ok(())).and(outcome);
            }
            complete.push(request);
        }
        Ok(self.remove(complete))
    }

    /// Cancels the receives of the messages that `is_unwanted` selects. Those whose messages have
    /// not begun to arrive complete within the next tests, and so give back their buffers. The
    /// caller has entered the communicators of all messages.
    pub(super) fn cancel_receives(
        &mut self,
        is_unwanted: impl Fn(&MessageKind) -> bool,
    ) -> Result<()> {
        for (request, owner) in self.requests.iter_mut().zip(&self.owners) {
            let is_receive = owner.want.is_some();
            let message = self.messages.get(&owner.message);
            if is_receive && message.is_some_and(|message| is_unwanted(&message.kind)) {
                // SAFETY: rules 1 and 2 (the caller has entered); the request was started here and
                // is active; it stays in `requests` until it is complete (A)
                let code = unsafe { ffi::MPI_Cancel(request) };
                check(code, PeerStep::of(0))?;
            }
        }
        Ok(())
    }

    /// Removes requests that are complete. Returns the messages without any other request.
    fn remove(&mut self, mut complete: Vec<usize>) -> Vec<Completed> {
        // descending, because `swap_remove` moves only requests with higher indices
        complete.sort_unstable_by(|a, b| b.cmp(a));
        let mut completed = Vec::new();
        for request in complete {
            self.requests.swap_remove(request);
            let number = self.owners.swap_remove(request).message;
            if self.messages.get(&number).is_some_and(|message| message.incomplete == 0)
                && let Some(InFlightRequests { kind, buffer, outcome, .. }) =
                    self.messages.remove(&number)
            {
                completed.push(Completed { kind, buffer, outcome });
            }
        }
        completed
    }

    /// Adds a message of `requests` requests, before they start (invariant A). Returns its number.
    fn begin(&mut self, kind: MessageKind, buffer: MessageBuffer, requests: usize) -> u64 {
        self.last += 1;
        let message = InFlightRequests { kind, buffer, incomplete: requests, outcome: Ok(()) };
        self.messages.insert(self.last, message);
        self.last
    }

    fn begin_request(
        &mut self,
        message: u64,
        want: Option<c_int>,
        at: PeerStep,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<()> {
        // SAFETY: a constant of the linked MPI
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        check(start(&raw mut request), at)?;
        self.requests.push(request);
        self.owners.push(RequestOwner { message, want });
        Ok(())
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // leaked, because MPI may still read and write them
        self.messages.drain().for_each(|(_, message)| mem::forget(message.buffer));
    }
}

/// Returns the outcome of a request with this return code, which is to receive `want` bytes.
fn outcome(
    code: c_int,
    status: &ffi::MPI_Status,
    want: Option<c_int>,
) -> Result<Result<(), MpiError>> {
    let outcome = MpiError::check(code);
    match want {
        Some(want) if outcome.is_ok() && received(status)? != want => Ok(Err(MpiError::Length)),
        _ => Ok(outcome),
    }
}

/// Divides a message into pieces, at least one.
fn pieces(bytes: u64, piece: u64) -> impl Iterator<Item = Range<u64>> {
    let piece = piece.clamp(1, LONGEST_PIECE);
    (0..bytes.div_ceil(piece).max(1))
        .map(move |number| number * piece..bytes.min((number + 1) * piece))
}

/// Returns the length of a piece, which is at most [`LONGEST_PIECE`].
fn length(piece: &Range<u64>) -> c_int {
    c_int::try_from(piece.end - piece.start).unwrap_or(c_int::MAX)
}

/// Converts peer and tag to C ints.
fn envelope(address: Address) -> Result<[c_int; 2]> {
    let peer = c_int::try_from(address.peer)
        .map_err(|_| Error::invalid("peer", address.peer, "a rank"))?;
    let tag = c_int::try_from(address.tag)
        .map_err(|_| Error::invalid("tag", address.tag, "a tag of this MPI"))?;
    Ok([peer, tag])
}

/// Returns the number of bytes that a receive got.
fn received(status: &ffi::MPI_Status) -> Result<c_int> {
    let mut bytes = 0;
    // SAFETY: rules 1 and 2 (every caller has entered); MPI wrote the status, and the number lives
    // through the call
    let code =
        unsafe { ffi::MPI_Get_count(&raw const *status, ffi::RSMPI_UINT8_T, &raw mut bytes) };
    check(code, PeerStep::of(0))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_message_and_each_length_fits_an_int() {
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
