//! Transport of device memory from GPU to GPU: grouped sends and receives in a stream of their own,
//! of NCCL or, on AMD GPUs, of RCCL. Below NCCL is either.
//!
//! ```text
//! compute stream         ready ┐                                            ┌▶ event
//! communication stream         └▶ [gather] ─▶ sends, receives ─▶ [scatter] ─┘
//! ```
//! A host transport carries the control messages (agreement, heartbeats, aborts), messages in host
//! memory, and rank 0's unique id when the communicator is created. No call waits for a peer: the
//! communicator is non-blocking, and [`Transport::progress`] polls its state, launches the next
//! group once the one before was accepted, and polls finished groups. As long as a message waits
//! for kernels of this rank, it sends heartbeats of a rank that works. A message of several byte
//! ranges is gathered into a buffer on the device, because sender and receiver may divide it
//! differently.
//!
//! The messages of a group arrive together. So the parts of a block that is split
//! (`ring/overlap.rs`) are groups of their own, and computing on one part overlaps receiving
//! the next.
//!
//! # Errors
//! | cause | error |
//! |---|---|
//! | the library or a function is missing, or its version too old | [`Error::Unsupported`] here, [`Error::Refused`] on other ranks |
//! | a peer does not join, or the communicator is not ready before the deadline | [`Error::Timeout`], [`Error::Comm`] |
//! | this rank's kernels do not end within [`Device::hang_bound`] | [`Error::Device`]; the communicator is aborted |
//! | NCCL reports a failure, at once or later | [`Error::Comm`] with its message; the communicator is aborted |
//! | the abort does not return in time | the same, with a note; its thread is abandoned |
//!
//! After any of the last three the endpoint is dead and returns the same error again. Use one
//! transport per ring: NCCL's guide calls NCCL and a GPU-aware MPI on one device at the same time
//! unsafe. Bound its waits with [`Deadline`](crate::Deadline), as those of any transport.

mod communicator;
mod group;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};
use annulus_device_cuda::{
    CudaBuffer, CudaSpace, Device, Event, Stream,
    nccl::{NcclSymbols, RawCommunicator, UniqueId},
};

use self::{
    communicator::{Membership, NcclCommunicator, NcclState},
    group::{GroupInFlight, NcclGroup},
};
use crate::{
    delegate::{forward_control, host_messages_of_inner},
    message::{self, MessageKey, not_posted, take_ready},
    staged::{DeviceHeartbeat, cuda::DeviceStaging},
};

/// Time for NCCL's start, beside the deadline of silence: NCCL reports no progress meanwhile, and
/// on thousands of GPUs takes minutes. It is the default timeout of PyTorch's groups of NCCL.
pub const STARTUP_DEADLINE: Duration = Duration::from_secs(600);
/// Interval between polls of groups in flight: small beside the transfer of a block.
const POLL: Duration = Duration::from_micros(100);
/// Longest wait in one poll of the host transport while the communicator is created, after which
/// the deadline is checked again.
const PATIENCE: Duration = Duration::from_millis(20);
/// Rounds of the all-gathers that create the communicator; those of a ring count up from 0.
const ROUNDS: [u64; 2] = [u64::MAX, u64::MAX - 1];

/// Endpoint of one rank. See the [module](self).
pub struct Nccl<T> {
    inner: T,
    communicator: NcclCommunicator,
    stream: Stream,
    staging: DeviceStaging,
    /// Groups that wait for NCCL to accept the one before, in the order of their posts.
    posted: VecDeque<NcclGroup>,
    /// Group that is launched and not yet accepted by NCCL.
    entering: Option<GroupInFlight>,
    in_flight: Vec<GroupInFlight>,
    /// Events after this rank's kernels that posted messages wait for, unless they have passed.
    kernels: Vec<Event>,
    arrived: Vec<(MessageHeader, Arrived<CudaSpace>)>,
    heartbeat: DeviceHeartbeat,
    bytes_sent: u64,
    failed: Option<Error>,
}

impl<T: Transport<Host>> Nccl<T> {
    /// Creates a communicator of the ranks of `inner`, each with its own device, by this machine's
    /// NCCL.
    ///
    /// # Ordering
    /// Collective over the ranks of `inner`; waits for all of them, no longer than `deadline`
    /// ([`STARTUP_DEADLINE`], unless there is a reason).
    /// # Errors
    /// See the [module](self).
    pub fn open(inner: T, device: &Device, deadline: Duration) -> Result<Self> {
        Self::with_symbols(inner, device, NcclSymbols::system(device.api()), deadline)
    }

    /// As [`Nccl::open`], with these functions; an error on all ranks if one rank has none.
    ///
    /// # Ordering
    /// As [`Nccl::open`].
    /// # Errors
    /// As [`Nccl::open`].
    pub fn with_symbols(
        mut inner: T,
        device: &Device,
        symbols: Result<NcclSymbols>,
        deadline: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + deadline;
        // rank 0's id, and the status of every rank
        let able = symbols.and_then(|symbols| symbols.serving(device.api())).and_then(|symbols| {
            let id = if inner.rank() == 0 {
                communicator::unique_id(&symbols, device)?.0.to_vec()
            } else {
                Vec::new()
            };
            Ok((symbols, id, Stream::new(device)?))
        });
        let id =
            share(&mut inner, ROUNDS[0], able.as_ref().map(|(_, id, _)| id.as_slice()), until)?
                .swap_remove(0);
        let (symbols, _, stream) = able?;
        let id = <[u8; UniqueId::BYTES]>::try_from(id)
            .map_err(|id| comm(0, 0, format!("a unique id of {} bytes", id.len())))?;
        let membership = Membership { rank: inner.rank(), ranks: inner.ranks() };
        let joined =
            NcclCommunicator::join(symbols, device, UniqueId(id), membership, until, || {
                inner.progress(Duration::ZERO)
            });
        // the other ranks wait in NCCL for this one, and do so until they are aborted
        let communicator = joined.inspect_err(|error| inner.abort(error))?;
        share(&mut inner, ROUNDS[1], Ok(&[]), until)?;
        Ok(Self::of(inner, communicator, stream))
    }

    /// Borrows a communicator of the caller's, which is never aborted or destroyed here: after a
    /// failure, aborting its work is up to the caller.
    ///
    /// # Ordering
    /// As [`Nccl::open`].
    /// # Errors
    /// As [`Nccl::open`]; [`Error::InvalidArgument`] if its ranks are not those of `inner`.
    ///
    /// # Safety
    /// * `communicator` is a communicator of the library of `symbols` on `device`;
    /// * it outlives this, and no other code uses it meanwhile.
    pub unsafe fn borrowed(
        mut inner: T,
        device: &Device,
        symbols: NcclSymbols,
        communicator: RawCommunicator,
        deadline: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + deadline;
        // SAFETY: as promised.
        let communicator = unsafe { NcclCommunicator::borrowed(symbols, device, communicator) };
        let serving = symbols.serving(device.api());
        let fits = serving.and_then(|_| communicator.membership()).and_then(|got| {
            let want = Membership { rank: inner.rank(), ranks: inner.ranks() };
            if got == want {
                Stream::new(device)
            } else {
                Err(Error::invalid("communicator", got, want))
            }
        });
        share(&mut inner, ROUNDS[1], fits.as_ref().map(|_| [].as_slice()), until)?;
        Ok(Self::of(inner, communicator, fits?))
    }

    fn of(inner: T, communicator: NcclCommunicator, stream: Stream) -> Self {
        Self {
            inner,
            communicator,
            stream,
            staging: DeviceStaging::default(),
            posted: VecDeque::new(),
            entering: None,
            in_flight: Vec::new(),
            kernels: Vec::new(),
            arrived: Vec::new(),
            heartbeat: DeviceHeartbeat::default(),
            bytes_sent: 0,
            failed: None,
        }
    }

    fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Records a fatal error, aborts all ranks, and abandons the groups in flight. An invalid
    /// argument is not fatal.
    fn remember<R>(&mut self, result: Result<R>) -> Result<R> {
        result.map_err(|error| if error.is_fatal() { self.die(error) } else { error })
    }

    /// Ends the endpoint with `error`, or returns the error that has ended it before.
    fn die(&mut self, error: Error) -> Error {
        if let Some(first) = &self.failed {
            return first.clone();
        }
        self.inner.abort(&error);
        let error = match (self.communicator.abort(), error) {
            (Ok(()), error) => error,
            (Err(hung), Error::Comm { peer, step, what }) => {
                comm(peer, step, format!("{what}; {hung}"))
            }
            (Err(hung), error) => {
                let (peer, step) = self.waited_for();
                comm(peer, step, format!("{error}; {hung}"))
            }
        };
        self.failed = Some(error.clone());
        error
    }

    /// Peer and step for an error of NCCL's that names no peer: those of the first message in
    /// flight.
    fn waited_for(&self) -> (usize, usize) {
        self.groups().find_map(NcclGroup::first).unwrap_or((self.inner.rank(), 0))
    }

    /// Returns the groups that are launched, then those that are posted.
    fn groups(&self) -> impl Iterator<Item = &NcclGroup> {
        let launched = self.in_flight.iter().chain(&self.entering).map(|launched| &launched.group);
        launched.chain(&self.posted)
    }

    /// Advances all groups as far as possible without waiting.
    fn pump(&mut self) -> Result<()> {
        let (peer, step) = self.waited_for();
        loop {
            match self.communicator.state().map_err(|what| comm(peer, step, what))? {
                NcclState::Busy => break,
                NcclState::Good => {}
            }
            if let Some(mut accepted) = self.entering.take() {
                accepted.mark(&self.stream, &mut self.staging)?;
                self.in_flight.push(accepted);
            }
            let Some(group) = self.posted.pop_front() else { break };
            self.entering =
                Some(group.hand_over(&self.communicator, &self.stream, &mut self.staging)?);
        }
        take_ready(&mut self.kernels, |kernel| Ok(kernel.passed_in_time()?.then_some(())))?;
        for (_, arrived) in take_ready(&mut self.in_flight, GroupInFlight::take_completed)? {
            self.arrived.extend(arrived);
        }
        Ok(())
    }
}

/// Gathers the values of all ranks. Returns this rank's error, or that of the lowest rank with one.
fn share<T: Transport<Host>>(
    inner: &mut T,
    round: u64,
    mine: Result<&[u8], &Error>,
    until: Instant,
) -> Result<Vec<Vec<u8>>> {
    let began = Instant::now();
    let message = match mine {
        Ok(bytes) => [&[0], bytes].concat(),
        Err(error) => [&[1], error.to_string().as_bytes()].concat(),
    };
    inner.start_all_gather(round, &message)?;
    let parts = loop {
        if let Some(parts) = inner.try_all_gather(round)? {
            break parts;
        }
        if Instant::now() > until {
            let peer = inner.stragglers(round).first().copied().unwrap_or(0);
            let error = Error::Timeout { peer, step: 0, waited: began.elapsed() };
            inner.abort(&error);
            return Err(mine.err().cloned().unwrap_or(error));
        }
        inner.progress(PATIENCE)?;
    };
    if let Err(own) = mine {
        return Err(own.clone());
    }
    let mut values = Vec::with_capacity(parts.len());
    for (rank, part) in parts.into_iter().enumerate() {
        match part.split_first() {
            Some((0, bytes)) => values.push(bytes.to_vec()),
            _ => {
                return Err(Error::Refused {
                    rank,
                    what: String::from_utf8_lossy(part.get(1..).unwrap_or_default()).into_owned(),
                });
            }
        }
    }
    Ok(values)
}

/// Creates an [`Error::Comm`].
fn comm(peer: usize, step: usize, what: String) -> Error {
    Error::Comm { peer, step, what }
}

/// Serves any space with blocks in CUDA memory, wherever the caller's tensors are.
impl<T: Transport<Host>, S: Space<Buffer = CudaBuffer, Event = Event>> Transport<S> for Nccl<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.check()?;
        let headers = sends
            .iter()
            .map(|send| (&send.header, send.buffer))
            .chain(receives.iter().map(|receive| (&receive.header, &receive.buffer)));
        for (header, buffer) in headers {
            message::check(header, self.inner.ranks(), buffer.len())?;
            if header.peer == self.inner.rank() {
                return Err(Error::invalid("header.peer", header.peer, "another rank"));
            }
        }
        self.bytes_sent += sends.iter().map(|send| send.header.bytes()).sum::<u64>();
        self.kernels.extend(group::kernels_before(sends, receives));
        self.posted.extend(group::groups(sends, receives));
        let pumped = self.pump();
        self.remember(pumped)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.check()?;
        let pumped = self.pump();
        self.remember(pumped)?;
        self.heartbeat.poll(!self.kernels.is_empty(), &mut self.inner);
        let is_busy = self.groups().next().is_some();
        let timeout = if is_busy { timeout.min(POLL) } else { timeout };
        let progressed = self.inner.progress(timeout);
        self.remember(progressed)?;
        let pumped = self.pump();
        self.remember(pumped)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        self.check()?;
        let key = MessageKey::of(header);
        let same = |other: &MessageHeader| MessageKey::of(other) == key;
        if let Some(index) = self.arrived.iter().position(|(other, _)| same(other)) {
            let (_, Arrived { buffer, ready }) = self.arrived.swap_remove(index);
            return Ok(Some(Arrived { buffer, ready }));
        }
        if self.groups().flat_map(NcclGroup::receives).any(same) {
            return Ok(None);
        }
        Err(not_posted(header))
    }

    // by the host transport
    host_messages_of_inner! {}

    fn pending(&self) -> bool {
        self.inner.pending() || self.groups().any(NcclGroup::sends)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        false
    }

    fn runs_groups_in_order(&self) -> bool {
        true
    }
}

impl<T: Transport<Host>> Control for Nccl<T> {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers heartbeat last_heard
        last_work
    }

    fn abort(&mut self, error: &Error) {
        self.die(error.clone());
    }
}

impl<T> Drop for Nccl<T> {
    fn drop(&mut self) {
        // aborted if work is in flight, because freeing its memory would wait for that work
        let under_way = self.entering.is_some() || !self.in_flight.is_empty();
        self.communicator.leave(under_way);
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Nccl<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Nccl")
            .field("inner", &self.inner)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
