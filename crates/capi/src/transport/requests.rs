//! The leaf that calls the host's functions: a message in flight keeps its bytes.
//!
//! Invariants:
//!
//! * **A.** Each request of the host's reads or writes bytes within the buffer beside it, which stays
//!   there until the host said that the request is done, failed or cancelled. The bytes of a
//!   [`HostBuffer`] do not move when the handle moves.
//! * **B.** The buffer of a receive was nobody else's when it was posted, and no reference to its
//!   bytes is made until the request is done.
//! * **C.** The bytes of a send are only read: while this co-owns a [`HostBuffer`], nobody gets a
//!   mutable reference to it.

use std::{
    ffi::{c_int, c_void},
    mem,
    ops::Range,
    ptr,
};

use annulus::{Error, Result};
use annulus_core::{HostBuffer, index};

use super::{annulus_transport, pump::Label};
use crate::callbacks::Context;

type Start<Data> =
    unsafe extern "C" fn(*mut c_void, i64, i32, Data, u64, *mut *mut c_void) -> c_int;

/// The host's functions.
#[derive(Clone, Copy)]
struct Calls {
    context: Context,
    send: Start<*const c_void>,
    recv: Start<*mut c_void>,
    test: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut i32) -> c_int,
    cancel: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
}

/// A message in flight.
struct InFlight {
    request: *mut c_void,
    buffer: HostBuffer,
    label: Label,
    /// Rank at the other end and step, for errors.
    about: (usize, usize),
}

/// All messages in flight.
pub(super) struct Requests {
    calls: Calls,
    all: Vec<InFlight>,
}

// SAFETY: a request belongs to the host, which promises to be called from any thread that calls
// annulus (`annulus_transport`), one at a time: every method takes `&mut self`
unsafe impl Send for Requests {}

impl Requests {
    /// Reads the functions.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for one that is NULL.
    pub(super) fn new(calls: &annulus_transport) -> Result<Self> {
        fn given<T>(name: &str, function: Option<T>) -> Result<T> {
            let name = format!("transport.{name}");
            function.ok_or_else(|| Error::invalid(name, "NULL", "a function"))
        }
        let calls = Calls {
            context: Context::new(calls.context),
            send: given("send", calls.send)?,
            recv: given("recv", calls.recv)?,
            test: given("test", calls.test)?,
            cancel: given("cancel", calls.cancel)?,
        };
        Ok(Self { calls, all: Vec::new() })
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Labels of all messages in flight.
    pub(super) fn labels(&self) -> impl Iterator<Item = &Label> {
        self.all.iter().map(|message| &message.label)
    }

    /// Starts sending bytes of `buffer`, within which `range` lies.
    pub(super) fn send(
        &mut self,
        peer: usize,
        tag: i32,
        step: usize,
        buffer: HostBuffer,
        range: Range<u64>,
        label: Label,
    ) -> Result<()> {
        let data = buffer.bytes()[index(range.start)..index(range.end)].as_ptr().cast();
        let Calls { context, send, .. } = self.calls;
        let mut request = ptr::null_mut();
        let bytes = range.end - range.start;
        // SAFETY: the host's function; the bytes lie in `buffer`, which is kept below (A) and only
        // read (C); the request lives in a local until it is stored
        let code =
            unsafe { send(context.pointer(), peer as i64, tag, data, bytes, &raw mut request) };
        check("send", code, (peer, step))?;
        self.all.push(InFlight { request, buffer, label, about: (peer, step) });
        Ok(())
    }

    /// Starts receiving into bytes of `buffer`, which nobody else owns.
    pub(super) fn receive(
        &mut self,
        peer: usize,
        tag: i32,
        step: usize,
        mut buffer: HostBuffer,
        range: Range<u64>,
        label: Label,
    ) -> Result<()> {
        let Some(bytes) = buffer.bytes_mut() else {
            let what = "the buffer of a receive is in use".to_owned();
            return Err(Error::Comm { peer, step, what });
        };
        let data = bytes[index(range.start)..index(range.end)].as_mut_ptr().cast();
        let Calls { context, recv, .. } = self.calls;
        let mut request = ptr::null_mut();
        let bytes = range.end - range.start;
        // SAFETY: the host's function; the bytes lie in `buffer`, which is kept below (A) and not
        // touched until the request is done (B); the request lives in a local until it is stored
        let code =
            unsafe { recv(context.pointer(), peer as i64, tag, data, bytes, &raw mut request) };
        check("recv", code, (peer, step))?;
        self.all.push(InFlight { request, buffer, label, about: (peer, step) });
        Ok(())
    }

    /// Gives back the first message from index `from` on that is done, and the index at which to go
    /// on. Messages before it were tested.
    pub(super) fn next_done(
        &mut self,
        mut from: usize,
    ) -> Result<Option<(Label, HostBuffer, usize)>> {
        while let Some(message) = self.all.get(from) {
            let mut done = 0;
            // SAFETY: the host's function, for a request that it made and that is not done
            let code = unsafe {
                (self.calls.test)(self.calls.context.pointer(), message.request, &raw mut done)
            };
            let about = message.about;
            if code != 0 {
                // a request that failed does not exist any more
                self.all.swap_remove(from);
                check("test", code, about)?;
            } else if done != 0 {
                let InFlight { buffer, label, .. } = self.all.swap_remove(from);
                return Ok(Some((label, buffer, from)));
            } else {
                from += 1;
            }
        }
        Ok(None)
    }

    /// Cancels all messages in flight.
    fn cancel(&mut self) {
        for InFlight { request, buffer, .. } in self.all.drain(..) {
            // SAFETY: the host's function, for a request that it made and that is not done
            let code = unsafe { (self.calls.cancel)(self.calls.context.pointer(), request) };
            if code != 0 {
                // the host may still touch the bytes (A)
                mem::forget(buffer);
            }
        }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.cancel();
    }
}

fn check(function: &str, code: c_int, (peer, step): (usize, usize)) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let what = format!("the host's function {function} returned {code}");
    Err(Error::Comm { peer, step, what })
}
