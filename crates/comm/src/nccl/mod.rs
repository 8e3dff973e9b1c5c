//! CUDA memory from device to device: NCCL's grouped sends and receives in a stream of their own.
//!
//! ```text
//! compute stream ──ready──▶ ┊ [gather] ─▶ group of sends and receives ─▶ [scatter] ┊ ──event──▶ compute stream
//!                           ┊              communication stream                    ┊
//! ```
//! Small messages (agreement, signs of life, aborts) go over a host transport beside it, over which the ranks also find each other: rank 0's unique
//! id is gathered there. Nothing here waits for a peer: the communicator does not block, [`Transport::progress`] asks after its state, hands over the
//! next group when the one before was accepted, and looks whether groups are done. A message of several byte ranges goes by way of a buffer on the
//! device, for the two sides may be cut differently.
//!
//! A group's messages arrive together, so the parts of a block that comes in parts (`ring/parts.rs`) are groups of their own: the tiles of a part hide
//! the arrival of the next.
//!
//! # Errors
//! | what happened | error |
//! |---|---|
//! | no library, a function that it lacks, too old a version | [`Error::Unsupported`] here, [`Error::Refused`] on other ranks |
//! | a peer does not come, or the communicator is not made before the deadline | [`Error::Timeout`], [`Error::Comm`] |
//! | NCCL says that something failed, at once or later | [`Error::Comm`] with its words; the communicator is aborted |
//! | the abort itself does not return in time | the same, which says so; a thread is left behind with it |
//!
//! After any of the last two the endpoint is dead and returns the same error again. Use one transport a ring: NCCL's guide calls NCCL and a
//! GPU-aware MPI on one device at once unsafe. Bound its waits with [`Deadline`](crate::Deadline), as those of any transport.

mod communicator;
mod group;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use annulus_core::{Arrived, Control, Error, Hop, Host, Incoming, Outgoing, Result, Space, Transport};
use annulus_device_cuda::{
    CudaBuffer, CudaSpace, Device, Event, Stream,
    nccl::{NcclSymbols, RawCommunicator, UniqueId},
};

use self::{
    communicator::{Communicator, State},
    group::{Flying, Group},
};
use crate::{forward::forward_control, pieces::Scratch, ranges};

/// How often what is under way is looked after.
const POLL: Duration = Duration::from_micros(100);
/// How long one look at the host transport may take while ranks find each other.
const PATIENCE: Duration = Duration::from_millis(20);
/// Gathers by which ranks find each other; a ring's own count up from 0.
const ROUNDS: [u64; 2] = [u64::MAX, u64::MAX - 1];

/// One rank's endpoint. See the [module](self).
pub struct Nccl<T> {
    inner: T,
    communicator: Communicator,
    stream: Stream,
    scratch: Scratch,
    /// In the order in which they were posted.
    posted: VecDeque<Group>,
    /// Handed over, and not yet accepted.
    entering: Option<Flying>,
    flying: Vec<Flying>,
    arrived: Vec<(Hop, Arrived<CudaSpace>)>,
    bytes_sent: u64,
    failed: Option<Error>,
}

impl<T: Transport<Host>> Nccl<T> {
    /// Joins the ranks of `inner`, each with its own device, through this machine's NCCL.
    ///
    /// # Ordering
    /// Collective over the ranks of `inner`; waits for all of them, no longer than `deadline`.
    /// # Errors
    /// See the [module](self).
    pub fn open(inner: T, device: &Device, deadline: Duration) -> Result<Self> {
        Self::with_symbols(inner, device, NcclSymbols::system(), deadline)
    }

    /// As [`Nccl::open`], through these functions, or refusing on all ranks where one has none.
    ///
    /// # Ordering
    /// As [`Nccl::open`].
    /// # Errors
    /// As [`Nccl::open`].
    pub fn with_symbols(mut inner: T, device: &Device, symbols: Result<NcclSymbols>, deadline: Duration) -> Result<Self> {
        let until = Instant::now() + deadline;
        // rank 0's id, and whether everybody is able to go on
        let able = symbols.and_then(|symbols| {
            let id = if inner.rank() == 0 { communicator::unique_id(&symbols, device)?.0.to_vec() } else { Vec::new() };
            Ok((symbols, id, Stream::new(device)?))
        });
        let id = share(&mut inner, ROUNDS[0], able.as_ref().map(|(_, id, _)| id.as_slice()), until)?.swap_remove(0);
        let (symbols, _, stream) = able?;
        let id = <[u8; UniqueId::BYTES]>::try_from(id).map_err(|id| comm(0, 0, format!("a unique id of {} bytes", id.len())))?;
        let place = (inner.rank(), inner.ranks());
        let made = Communicator::join(symbols, device, UniqueId(id), place, until, || inner.progress(Duration::ZERO));
        // the others wait in NCCL for a rank that will not come
        let communicator = made.inspect_err(|error| inner.abort(error))?;
        share(&mut inner, ROUNDS[1], Ok(&[]), until)?;
        Ok(Self::of(inner, communicator, stream))
    }

    /// Over a caller's communicator, borrowed: it is never aborted or destroyed here. If it fails, what is under way in it is the caller's to abort.
    ///
    /// # Ordering
    /// As [`Nccl::open`].
    /// # Errors
    /// As [`Nccl::open`]; [`Error::InvalidArgument`] if its ranks are not those of `inner`.
    ///
    /// # Safety
    /// * `communicator` is a communicator of the library of `symbols` on `device`;
    /// * it outlives this, and nobody else uses it meanwhile.
    pub unsafe fn borrowed(
        mut inner: T,
        device: &Device,
        symbols: NcclSymbols,
        communicator: RawCommunicator,
        deadline: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + deadline;
        // SAFETY: as promised.
        let communicator = unsafe { Communicator::borrowed(symbols, device, communicator) };
        let fits = communicator.place().and_then(|got| {
            let want = (inner.rank(), inner.ranks());
            if got == want { Stream::new(device) } else { Err(Error::invalid("communicator", format!("{got:?}"), format!("{want:?}"))) }
        });
        share(&mut inner, ROUNDS[1], fits.as_ref().map(|_| [].as_slice()), until)?;
        Ok(Self::of(inner, communicator, fits?))
    }

    fn of(inner: T, communicator: Communicator, stream: Stream) -> Self {
        Self {
            inner,
            communicator,
            stream,
            scratch: Scratch::default(),
            posted: VecDeque::new(),
            entering: None,
            flying: Vec::new(),
            arrived: Vec::new(),
            bytes_sent: 0,
            failed: None,
        }
    }

    fn check_alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Remembers what killed this endpoint, tells everybody, and gives up what is under way. A bad argument does not kill it.
    fn remember<R>(&mut self, result: Result<R>) -> Result<R> {
        result.map_err(|error| if error.is_fatal() { self.die(error) } else { error })
    }

    fn die(&mut self, error: Error) -> Error {
        if let Some(first) = &self.failed {
            return first.clone();
        }
        self.inner.abort(&error);
        let error = match (self.communicator.abort(), error) {
            (Ok(()), error) => error,
            (Err(hung), Error::Comm { peer, step, what }) => comm(peer, step, format!("{what}; {hung}")),
            (Err(hung), error) => {
                let (peer, step) = self.waited_for();
                comm(peer, step, format!("{error}; {hung}"))
            }
        };
        self.failed = Some(error.clone());
        error
    }

    /// Whom to name where NCCL names nobody: the other end of the first message under way.
    fn waited_for(&self) -> (usize, usize) {
        let under_way = self.flying.iter().chain(&self.entering).find_map(Flying::first);
        under_way.or_else(|| self.posted.iter().find_map(Group::first)).unwrap_or((self.inner.rank(), 0))
    }

    /// Does everything that can be done without waiting.
    fn pump(&mut self) -> Result<()> {
        let (peer, step) = self.waited_for();
        loop {
            match self.communicator.state().map_err(|what| comm(peer, step, what))? {
                State::Busy => break,
                State::Good => {}
            }
            if let Some(mut accepted) = self.entering.take() {
                accepted.mark(&self.stream, &mut self.scratch)?;
                self.flying.push(accepted);
            }
            let Some(group) = self.posted.pop_front() else { break };
            self.entering = Some(group.hand_over(&self.communicator, &self.stream, &mut self.scratch)?);
        }
        let mut place = 0;
        while let Some(flying) = self.flying.get_mut(place) {
            match flying.landed()? {
                Some(arrived) => {
                    self.arrived.extend(arrived);
                    self.flying.remove(place);
                }
                None => place += 1,
            }
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        !self.posted.is_empty() || self.entering.is_some() || !self.flying.is_empty()
    }
}

/// Gives every rank what every rank has, or its own error, or that of the lowest rank that has one.
fn share<T: Transport<Host>>(inner: &mut T, round: u64, mine: Result<&[u8], &Error>, until: Instant) -> Result<Vec<Vec<u8>>> {
    let began = Instant::now();
    let message = match mine {
        Ok(bytes) => [&[0], bytes].concat(),
        Err(error) => [&[1], error.to_string().as_bytes()].concat(),
    };
    inner.offer(round, &message)?;
    let parts = loop {
        if let Some(parts) = inner.collect(round)? {
            break parts;
        }
        if Instant::now() > until {
            let peer = inner.missing(round).first().copied().unwrap_or(0);
            let error = Error::Timeout { peer, step: 0, waited: began.elapsed() };
            inner.abort(&error);
            return Err(mine.err().cloned().unwrap_or(error));
        }
        inner.progress(PATIENCE)?;
    };
    if let Err(own) = mine {
        return Err(own.clone());
    }
    let mut whole = Vec::with_capacity(parts.len());
    for (rank, part) in parts.into_iter().enumerate() {
        match part.split_first() {
            Some((0, bytes)) => whole.push(bytes.to_vec()),
            _ => return Err(Error::Refused { rank, what: String::from_utf8_lossy(part.get(1..).unwrap_or_default()).into_owned() }),
        }
    }
    Ok(whole)
}

pub(crate) fn comm(peer: usize, step: usize, what: String) -> Error {
    Error::Comm { peer, step, what }
}

/// Of any space whose blocks are in CUDA memory, wherever a caller's tensors are.
impl<T: Transport<Host>, S: Space<Buffer = CudaBuffer, Event = Event>> Transport<S> for Nccl<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.check_alive()?;
        let hops = sends.iter().map(|send| (&send.hop, send.buffer)).chain(receives.iter().map(|receive| (&receive.hop, &receive.buffer)));
        for (hop, buffer) in hops {
            ranges::check(hop, self.inner.ranks(), buffer.len())?;
            if hop.peer == self.inner.rank() {
                return Err(Error::invalid("hop.peer", hop.peer, "another rank"));
            }
        }
        self.bytes_sent += sends.iter().map(|send| send.hop.bytes()).sum::<u64>();
        self.posted.extend(group::groups(sends, receives));
        let pumped = self.pump();
        self.remember(pumped)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.check_alive()?;
        let pumped = self.pump();
        self.remember(pumped)?;
        let patience = if self.is_busy() { patience.min(POLL) } else { patience };
        let heard = self.inner.progress(patience);
        self.remember(heard)?;
        let pumped = self.pump();
        self.remember(pumped)
    }

    fn take(&mut self, hop: &Hop) -> Result<Option<Arrived<S>>> {
        self.check_alive()?;
        let same = |other: &Hop| (other.peer, other.channel, other.tag) == (hop.peer, hop.channel, hop.tag);
        if let Some(place) = self.arrived.iter().position(|(other, _)| same(other)) {
            let (_, Arrived { buffer, ready }) = self.arrived.swap_remove(place);
            return Ok(Some(Arrived { buffer, ready }));
        }
        let posted = self.posted.iter().flat_map(Group::receives);
        if posted.chain(self.flying.iter().chain(&self.entering).flat_map(Flying::receives)).any(same) {
            return Ok(None);
        }
        let got = format!("{:?} {} from rank {}", hop.channel, hop.tag, hop.peer);
        Err(Error::invalid("hop", got, "a receive that was posted and not yet taken"))
    }

    fn pending(&self) -> bool {
        self.posted.iter().any(Group::sends) || self.flying.iter().chain(&self.entering).any(Flying::sends)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

impl<T: Transport<Host>> Control for Nccl<T> {
    forward_control! { rank ranks placement offer collect missing beat last_heard last_work }

    fn abort(&mut self, error: &Error) {
        self.die(error.clone());
    }
}

impl<T> Drop for Nccl<T> {
    fn drop(&mut self) {
        // work that is under way would hold up everything that is freed after it
        let under_way = self.entering.is_some() || !self.flying.is_empty();
        self.communicator.leave(under_way);
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Nccl<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nccl").field("inner", &self.inner).field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// What a message lies in: its buffer, or one that is as long as the message.
type Side = (Hop, CudaBuffer);
