//! A non-blocking communicator, and calls that end at a deadline even if the library hangs.

use std::{
    ffi::c_int,
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use annulus_core::{Error, Result};
use annulus_device_cuda::{
    Device, Stream,
    nccl::{BYTES, Config, IN_PROGRESS, NcclSymbols, RawCommunicator, SUCCESS, Status, UniqueId},
};

use super::comm;

/// Longest wait for an abort.
const GIVE_UP: Duration = Duration::from_secs(1);
/// Interval between polls of a new communicator.
const POLL: Duration = Duration::from_millis(1);

/// State of a communicator.
pub(super) enum State {
    /// The last group was accepted.
    Good,
    /// A group is being accepted.
    Busy,
}

pub(super) struct Communicator {
    symbols: NcclSymbols,
    device: Device,
    handle: Handle,
    owned: bool,
    /// True once aborted or destroyed: the handle is then invalid.
    gone: bool,
}

#[derive(Clone, Copy)]
struct Handle(RawCommunicator);

// SAFETY: a communicator is a handle that any thread may use, one at a time.
unsafe impl Send for Handle {}

impl Handle {
    /// Returns the handle as a whole: a closure that used its field would capture a pointer.
    const fn raw(self) -> RawCommunicator {
        self.0
    }
}

/// Runs a call on a thread of its own with the device current. Returns `None` if it does not return
/// in time; the thread is then abandoned.
fn within<R: Send + 'static>(
    deadline: Duration,
    device: &Device,
    call: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    begin(device, call).recv_timeout(deadline).ok()
}

/// Starts a call on a thread of its own with the device current. Returns the receiver of its result.
fn begin<R: Send + 'static>(
    device: &Device,
    call: impl FnOnce() -> R + Send + 'static,
) -> Receiver<R> {
    let (sender, receiver) = channel();
    let device = device.clone();
    std::thread::spawn(move || {
        // on a failed device the call reports that itself; an abort is due all the same
        device.make_current().unwrap_or_default();
        // the waiting thread may have given up
        sender.send(call()).unwrap_or_default();
    });
    receiver
}

fn check(symbols: &NcclSymbols, name: &str, status: Status) -> Result<(), String> {
    if status == SUCCESS || status == IN_PROGRESS {
        Ok(())
    } else {
        Err(format!("{name}: {}", symbols.words(status)))
    }
}

/// Creates a unique id.
pub(super) fn unique_id(symbols: &NcclSymbols, device: &Device) -> Result<UniqueId> {
    device.make_current()?;
    let mut id = UniqueId([0; UniqueId::BYTES]);
    // SAFETY: a pointer to a local.
    let status = unsafe { (symbols.unique_id)(&raw mut id) };
    check(symbols, "ncclGetUniqueId", status).map_err(|what| comm(0, 0, what))?;
    Ok(id)
}

impl Communicator {
    /// Creates a communicator of all ranks that have this id. `look` is polled meanwhile; its error (a
    /// rank that has failed) ends the wait.
    pub(super) fn join(
        symbols: NcclSymbols,
        device: &Device,
        id: UniqueId,
        (rank, ranks): (usize, usize),
        until: Instant,
        mut look: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let left = || until.saturating_duration_since(Instant::now());
        let number = |value: usize| {
            c_int::try_from(value)
                .map_err(|_| Error::unsupported(format!("a ring of {ranks} ranks"), "NCCL"))
        };
        let (own, all) = (number(rank)?, number(ranks)?);
        let late =
            || comm(rank, 0, "ncclCommInitRankConfig did not end before the deadline".into());
        let call = move || {
            let mut handle: RawCommunicator = std::ptr::null_mut();
            let mut config = Config::NON_BLOCKING;
            // SAFETY: pointers to locals, of which NCCL keeps none.
            let status =
                unsafe { (symbols.init_rank)(&raw mut handle, all, id, own, &raw mut config) };
            (Handle(handle), status)
        };
        let begun = begin(device, call);
        let (handle, status) = loop {
            match begun.recv_timeout(POLL) {
                Ok(made) => break made,
                Err(RecvTimeoutError::Timeout) if !left().is_zero() => look()?,
                Err(_) => return Err(late()),
            }
        };
        let mut made =
            Self { symbols, device: device.clone(), handle, owned: true, gone: handle.0.is_null() };
        let mut said =
            check(&symbols, "ncclCommInitRankConfig", status).map_err(|what| comm(rank, 0, what));
        while said.is_ok() {
            match made.state() {
                Ok(State::Good) => return Ok(made),
                Ok(State::Busy) if left().is_zero() => said = Err(late()),
                Ok(State::Busy) => {
                    said = look();
                    std::thread::sleep(POLL);
                }
                Err(what) => said = Err(comm(rank, 0, what)),
            }
        }
        match (said, made.abort()) {
            (Err(Error::Comm { peer, step, what }), Err(hung)) => {
                Err(comm(peer, step, format!("{what}; {hung}")))
            }
            (Err(error), _) => Err(error),
            (Ok(()), _) => Ok(made),
        }
    }

    /// Borrows a communicator of the caller's.
    ///
    /// # Safety
    /// It is a communicator of this library on this device, and outlives this.
    pub(super) unsafe fn borrowed(
        symbols: NcclSymbols,
        device: &Device,
        handle: RawCommunicator,
    ) -> Self {
        Self { symbols, device: device.clone(), handle: Handle(handle), owned: false, gone: false }
    }

    /// Returns this rank and the number of ranks.
    pub(super) fn place(&self) -> Result<(usize, usize)> {
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: the communicator is alive, and both point to locals.
        let (one, other) = unsafe {
            (
                (self.symbols.user_rank)(self.handle.0, &raw mut rank),
                (self.symbols.count)(self.handle.0, &raw mut ranks),
            )
        };
        check(&self.symbols, "ncclCommUserRank", one).map_err(|what| comm(0, 0, what))?;
        check(&self.symbols, "ncclCommCount", other).map_err(|what| comm(0, 0, what))?;
        Ok((rank.unsigned_abs() as usize, ranks.unsigned_abs() as usize))
    }

    /// Returns its state, or its error.
    pub(super) fn state(&self) -> Result<State, String> {
        if self.gone {
            return Err("the communicator is gone".into());
        }
        self.device.make_current().map_err(|error| error.to_string())?;
        let mut status = SUCCESS;
        // SAFETY: the communicator is alive, and the pointer is to a local.
        let asked = unsafe { (self.symbols.async_error)(self.handle.0, &raw mut status) };
        check(&self.symbols, "ncclCommGetAsyncError", asked)?;
        check(&self.symbols, "NCCL", status)?;
        Ok(if status == IN_PROGRESS { State::Busy } else { State::Good })
    }

    /// Launches a group: address, bytes and peer of each message, in an order that both sides of a
    /// pair derive alike.
    ///
    /// # Errors
    /// The failure, with the peer if it concerns one message.
    ///
    /// # Safety
    /// Every address is that of as many bytes of the device's memory, which stay allocated until the
    /// stream's work is done.
    pub(super) unsafe fn group(
        &self,
        sends: &[(u64, u64, usize)],
        receives: &[(u64, u64, usize)],
        stream: &Stream,
    ) -> Result<(), (Option<usize>, String)> {
        let symbols = &self.symbols;
        let nobody = |what: String| (None, what);
        self.device.make_current().map_err(|error| nobody(error.to_string()))?;
        // SAFETY: no arguments.
        check(symbols, "ncclGroupStart", unsafe { (symbols.group_start)() }).map_err(nobody)?;
        let mut queued = Ok(());
        for (send, &(at, bytes, peer)) in
            sends.iter().map(|side| (true, side)).chain(receives.iter().map(|side| (false, side)))
        {
            let (Ok(bytes), Ok(number)) = (usize::try_from(bytes), c_int::try_from(peer)) else {
                queued = Err((Some(peer), format!("a message of {bytes} bytes")));
                break;
            };
            // SAFETY: as promised; the communicator is alive.
            let (name, status) = unsafe {
                if send {
                    (
                        "ncclSend",
                        (symbols.send)(
                            at as *const _,
                            bytes,
                            BYTES,
                            number,
                            self.handle.0,
                            stream.handle(),
                        ),
                    )
                } else {
                    (
                        "ncclRecv",
                        (symbols.receive)(
                            at as *mut _,
                            bytes,
                            BYTES,
                            number,
                            self.handle.0,
                            stream.handle(),
                        ),
                    )
                }
            };
            if let Err(what) = check(symbols, name, status) {
                queued = Err((Some(peer), what));
                break;
            }
        }
        // SAFETY: no arguments. A group that was started is ended, also after an error.
        let ended =
            check(symbols, "ncclGroupEnd", unsafe { (symbols.group_end)() }).map_err(nobody);
        queued.and(ended)
    }

    /// Aborts the communicator and its work.
    ///
    /// # Errors
    /// A description, if the abort does not return in time.
    pub(super) fn abort(&mut self) -> Result<(), String> {
        if !self.owned || std::mem::replace(&mut self.gone, true) {
            return Ok(());
        }
        let (symbols, handle) = (self.symbols, self.handle);
        // SAFETY: alive, and not touched after this.
        let returned =
            within(GIVE_UP, &self.device, move || unsafe { (symbols.abort)(handle.raw()) });
        returned.map(drop).ok_or_else(|| {
            format!("ncclCommAbort did not return within {:.1} s", GIVE_UP.as_secs_f64())
        })
    }

    /// Destroys the communicator, or aborts it if it has work in flight.
    pub(super) fn leave(&mut self, under_way: bool) {
        if under_way {
            // a drop has no caller to report a hang to
            self.abort().unwrap_or_default();
        } else if self.owned && !std::mem::replace(&mut self.gone, true) {
            let (symbols, handle) = (self.symbols, self.handle);
            // SAFETY: alive, and not touched after this.
            within(GIVE_UP, &self.device, move || unsafe { (symbols.destroy)(handle.raw()) });
        }
    }
}
