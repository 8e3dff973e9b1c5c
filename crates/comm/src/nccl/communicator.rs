//! Non-blocking communicators, and calls that end at a deadline even if the library hangs.

use std::{
    ffi::c_int,
    fmt,
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use annulus_core::{Error, Process, Result};
use annulus_device_cuda::{
    Device, Stream,
    nccl::{BYTES, Config, IN_PROGRESS, NcclSymbols, RawCommunicator, SUCCESS, Status, UniqueId},
};

use super::comm;

/// Longest wait for an abort, which extends the time until a call reports its error. It ends at
/// once unless the library hangs or other processes occupy the GPU.
const ABORT: Duration = Duration::from_secs(3);
/// Longest wait for a destruction, for the same reasons. It is longer because only dropping a
/// communicator waits for it, and because a thread that is left behind in it may still run when the
/// process ends and unloads what it uses.
const DESTRUCTION: Duration = Duration::from_secs(10);
/// Interval between polls of a new communicator, whose creation takes a good part of a second.
const POLL: Duration = Duration::from_millis(1);

/// State of a communicator.
pub(super) enum NcclState {
    /// The last group was accepted.
    Good,
    /// A group is being accepted.
    Busy,
}

/// This rank and the number of ranks of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Membership {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl fmt::Display for Membership {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rank {} of {}", self.rank, self.ranks)
    }
}

/// A send or receive of contiguous device memory.
#[derive(Clone, Copy)]
pub(super) struct NcclTransfer {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) peer: usize,
}

/// Failure to launch a group.
pub(super) struct GroupError {
    /// Peer of the message that failed; `None` if the failure concerns the group.
    pub(super) peer: Option<usize>,
    pub(super) what: String,
}

/// A communicator, created here or borrowed.
pub(super) struct NcclCommunicator {
    symbols: NcclSymbols,
    device: Device,
    handle: Handle,
    /// True if it was created here, and is therefore destroyed here.
    owned: bool,
    /// True once aborted or destroyed: the handle is then invalid.
    gone: bool,
    /// Process whose communicator it is; a forked child leaks it.
    process: Process,
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

/// Starts a call on a thread of its own with the device current. Returns the receiver of its
/// result.
fn begin<R: Send + 'static>(
    device: &Device,
    call: impl FnOnce() -> R + Send + 'static,
) -> Receiver<R> {
    let (sender, receiver) = channel();
    let device = device.clone();
    std::thread::spawn(move || {
        // an error is ignored: on a failed device the call reports it, and an abort must still run
        device.make_current().unwrap_or_default();
        // the waiting thread may have given up
        sender.send(call()).unwrap_or_default();
    });
    receiver
}

/// Converts a status to NCCL's message, after the name of the function.
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

impl NcclCommunicator {
    /// Creates a communicator of all ranks that have this id. `poll` is called meanwhile; its
    /// error, such as the failure of another rank, ends the wait.
    pub(super) fn join(
        symbols: NcclSymbols,
        device: &Device,
        id: UniqueId,
        Membership { rank, ranks }: Membership,
        until: Instant,
        mut poll: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let left = || until.saturating_duration_since(Instant::now());
        let number = |value: usize| {
            c_int::try_from(value)
                .map_err(|_| Error::unsupported(format!("a ring of {ranks} ranks"), symbols.name()))
        };
        let own = number(rank)?;
        let all = number(ranks)?;
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
        let result = begin(device, call);
        let (handle, status) = loop {
            match result.recv_timeout(POLL) {
                Ok(returned) => break returned,
                Err(RecvTimeoutError::Timeout) if !left().is_zero() => poll()?,
                Err(_) => return Err(late()),
            }
        };
        let mut communicator = Self {
            symbols,
            device: device.clone(),
            handle,
            owned: true,
            gone: handle.0.is_null(),
            process: Process::current(),
        };
        let mut outcome =
            check(&symbols, "ncclCommInitRankConfig", status).map_err(|what| comm(rank, 0, what));
        while outcome.is_ok() {
            match communicator.state() {
                Ok(NcclState::Good) => return Ok(communicator),
                Ok(NcclState::Busy) if left().is_zero() => outcome = Err(late()),
                Ok(NcclState::Busy) => {
                    outcome = poll();
                    std::thread::sleep(POLL);
                }
                Err(what) => outcome = Err(comm(rank, 0, what)),
            }
        }
        match (outcome, communicator.abort()) {
            (Err(Error::Comm { peer, step, what }), Err(hung)) => {
                Err(comm(peer, step, format!("{what}; {hung}")))
            }
            (Err(error), _) => Err(error),
            (Ok(()), _) => Ok(communicator),
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
        Self {
            symbols,
            device: device.clone(),
            handle: Handle(handle),
            owned: false,
            gone: false,
            process: Process::current(),
        }
    }

    /// Returns this rank and the number of ranks.
    pub(super) fn membership(&self) -> Result<Membership> {
        let mut rank = 0;
        // SAFETY: the communicator is alive, and the pointer is to a local.
        let status = unsafe { (self.symbols.user_rank)(self.handle.0, &raw mut rank) };
        check(&self.symbols, "ncclCommUserRank", status).map_err(|what| comm(0, 0, what))?;
        let mut ranks = 0;
        // SAFETY: the communicator is alive, and the pointer is to a local.
        let status = unsafe { (self.symbols.count)(self.handle.0, &raw mut ranks) };
        check(&self.symbols, "ncclCommCount", status).map_err(|what| comm(0, 0, what))?;
        let rank = rank.unsigned_abs() as usize;
        let ranks = ranks.unsigned_abs() as usize;
        Ok(Membership { rank, ranks })
    }

    /// Returns its state, or its error.
    pub(super) fn state(&self) -> Result<NcclState, String> {
        if self.gone {
            return Err("the communicator is gone".into());
        }
        self.device.make_current().map_err(|error| error.to_string())?;
        let mut status = SUCCESS;
        // SAFETY: the communicator is alive, and the pointer is to a local.
        let inquiry = unsafe { (self.symbols.async_error)(self.handle.0, &raw mut status) };
        check(&self.symbols, "ncclCommGetAsyncError", inquiry)?;
        check(&self.symbols, self.symbols.name(), status)?;
        Ok(if status == IN_PROGRESS { NcclState::Busy } else { NcclState::Good })
    }

    /// Launches a group of transfers, in an order that both sides of a pair derive alike.
    ///
    /// # Errors
    /// The failure, with the peer if it concerns one message.
    ///
    /// # Safety
    /// Every address is that of as many bytes of the device's memory, which stay allocated until
    /// the stream's work is done.
    pub(super) unsafe fn group(
        &self,
        sends: &[NcclTransfer],
        receives: &[NcclTransfer],
        stream: &Stream,
    ) -> Result<(), GroupError> {
        let symbols = &self.symbols;
        let without_peer = |what: String| GroupError { peer: None, what };
        self.device.make_current().map_err(|error| without_peer(error.to_string()))?;
        // SAFETY: no arguments.
        let started = unsafe { (symbols.group_start)() };
        check(symbols, "ncclGroupStart", started).map_err(without_peer)?;
        let enqueue_all = || {
            for send in sends {
                // SAFETY: as the caller promises.
                unsafe { self.enqueue(true, send, stream) }?;
            }
            for receive in receives {
                // SAFETY: as the caller promises.
                unsafe { self.enqueue(false, receive, stream) }?;
            }
            Ok(())
        };
        let enqueued = enqueue_all();
        // SAFETY: no arguments. A group that was started is ended, also after an error.
        let ended = unsafe { (symbols.group_end)() };
        enqueued.and(check(symbols, "ncclGroupEnd", ended).map_err(without_peer))
    }

    /// Adds a send or a receive to the current group.
    ///
    /// # Safety
    /// As [`NcclCommunicator::group`].
    unsafe fn enqueue(
        &self,
        is_send: bool,
        &NcclTransfer { address, bytes, peer }: &NcclTransfer,
        stream: &Stream,
    ) -> Result<(), GroupError> {
        let with_peer = |what: String| GroupError { peer: Some(peer), what };
        let (Ok(bytes), Ok(number)) = (usize::try_from(bytes), c_int::try_from(peer)) else {
            return Err(with_peer(format!("a message of {bytes} bytes")));
        };
        let symbols = &self.symbols;
        let communicator = self.handle.0;
        let stream = stream.handle();
        if is_send {
            let from = address as *const _;
            // SAFETY: as the caller promises; the communicator is alive.
            let status =
                unsafe { (symbols.send)(from, bytes, BYTES, number, communicator, stream) };
            check(symbols, "ncclSend", status).map_err(with_peer)
        } else {
            let into = address as *mut _;
            // SAFETY: as the caller promises; the communicator is alive.
            let status =
                unsafe { (symbols.receive)(into, bytes, BYTES, number, communicator, stream) };
            check(symbols, "ncclRecv", status).map_err(with_peer)
        }
    }

    /// Returns true, once, if the communicator is to be ended by this.
    fn ends_here(&mut self) -> bool {
        self.owned && self.process.is_current() && !std::mem::replace(&mut self.gone, true)
    }

    /// Aborts the communicator and its work.
    ///
    /// # Errors
    /// A description, if the abort does not return in time.
    pub(super) fn abort(&mut self) -> Result<(), String> {
        if !self.ends_here() {
            return Ok(());
        }
        let symbols = self.symbols;
        let handle = self.handle;
        // SAFETY: alive, and not touched after this.
        let returned =
            within(ABORT, &self.device, move || unsafe { (symbols.abort)(handle.raw()) });
        returned.map(drop).ok_or_else(|| {
            // its kernels may wait for other ranks for ever
            self.device.suspect_hang();
            format!("ncclCommAbort did not return within {:.1} s", ABORT.as_secs_f64())
        })
    }

    /// Destroys the communicator, or aborts it if it has work in flight.
    pub(super) fn leave(&mut self, under_way: bool) {
        if under_way {
            // a drop has no caller to report a hang to
            self.abort().unwrap_or_default();
        } else if self.ends_here() {
            let symbols = self.symbols;
            let handle = self.handle;
            // SAFETY: alive, and not touched after this.
            let destroyed = within(DESTRUCTION, &self.device, move || unsafe {
                (symbols.destroy)(handle.raw())
            });
            if destroyed.is_none() {
                self.device.suspect_hang();
            }
        }
    }
}
