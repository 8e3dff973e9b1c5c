//! CUDA memory over an MPI that takes it: no byte goes by way of the host.
//!
//! ```text
//! compute stream ──ready──▶ [gather] ─▶ MPI_Isend ┄┄▶ MPI_Irecv ─▶ [scatter] ──event──▶ compute stream
//! ```
//! MPI knows nothing of streams. So a message is handed to it when the device has made it, a receive when the device has no more use for what its buffer
//! held, both by looking at events, never by waiting for them; and what has come is there for every stream. A hop of several byte ranges goes by way of a
//! buffer on the device, for the two sides may be cut differently.
//!
//! On the wire it is [`Mpi`] itself: ranks that use this and ranks that stage understand each other.

use std::{collections::VecDeque, ops::Range, time::Duration};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};
use annulus_device_cuda::{CudaBuffer, Device, Event, Stream};

use super::{Memory, Mpi, contiguous};
use crate::{
    cuda_gather::{self, Scratch},
    delegate::forward_control,
    ranges,
};

/// How often events are looked at while nothing else happens.
const POLL: Duration = Duration::from_micros(100);

/// One rank's endpoint, of any space whose blocks are in CUDA memory.
pub struct DeviceMpi {
    inner: Mpi,
    stream: Stream,
    /// Where messages in pieces lie in one: free, or co-owned by one that is still sent.
    scratch: Scratch,
    /// Not made yet by the device.
    sends: Vec<Sending>,
    /// Whose buffers the device may still use, in the order in which they were posted.
    waiting: VecDeque<Waiting>,
    /// With MPI.
    receives: Vec<Landing>,
    arrived: Vec<(MessageHeader, CudaBuffer, Event)>,
    bytes_sent: u64,
    failed: Option<Error>,
}

/// A message that leaves when `ready` has passed.
struct Sending {
    hop: MessageHeader,
    buffer: CudaBuffer,
    ready: Event,
}

/// A receive that begins when the device has no more use for `into`.
struct Waiting {
    landing: Landing,
    into: CudaBuffer,
}

/// A receive.
struct Landing {
    /// As it was posted.
    hop: MessageHeader,
    /// As MPI has it.
    posted: MessageHeader,
    /// Where its pieces go in the end, if it lies in pieces.
    pieces: Option<CudaBuffer>,
    /// After what the device did with its buffer before.
    free: Event,
}

impl DeviceMpi {
    /// Sends what lies in the memory of `device` over `inner`, whose MPI takes such memory.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(inner: Mpi, device: &Device) -> Result<Self> {
        Ok(Self {
            inner,
            stream: Stream::new(device)?,
            scratch: Scratch::default(),
            sends: Vec::new(),
            waiting: VecDeque::new(),
            receives: Vec::new(),
            arrived: Vec::new(),
            bytes_sent: 0,
            failed: None,
        })
    }

    fn check_alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Remembers what killed this endpoint. A bad argument does not.
    fn remember<R>(&mut self, result: Result<R>) -> Result<R> {
        result.inspect_err(|error| {
            if error.is_fatal() {
                self.failed.get_or_insert_with(|| error.clone());
            }
        })
    }

    fn try_post<S: Space<Buffer = CudaBuffer, Event = Event>>(
        &mut self,
        sends: &[Outgoing<'_, S>],
        receives: &mut Vec<Incoming<S>>,
    ) -> Result<()> {
        let outgoing = sends.iter().map(|send| (&send.hop, send.buffer));
        for (hop, buffer) in
            outgoing.chain(receives.iter().map(|receive| (&receive.hop, &receive.buffer)))
        {
            ranges::check(hop, self.inner.ranks(), buffer.len())?;
        }
        receives
            .sort_by_key(|incoming| (incoming.hop.peer, incoming.hop.channel, incoming.hop.tag));
        for Incoming { hop, buffer } in receives.drain(..) {
            // work that was queued on it earlier comes first
            buffer.wait_on(&self.stream)?;
            let whole = contiguous(&hop.ranges);
            let posted = in_one(&hop, whole.clone());
            let (into, pieces) = if whole.is_some() {
                (buffer, None)
            } else {
                (self.scratch.take(hop.bytes(), &self.stream)?, Some(buffer))
            };
            let free = self.stream.record()?;
            self.waiting
                .push_back(Waiting { landing: Landing { hop, posted, pieces, free }, into });
        }
        for Outgoing { hop, buffer, ready } in sends {
            self.bytes_sent += hop.bytes();
            let whole = contiguous(&hop.ranges);
            let posted = in_one(hop, whole.clone());
            let (buffer, ready) = if whole.is_some() {
                ((*buffer).clone(), (*ready).clone())
            } else {
                let one = self.scratch.take(hop.bytes(), &self.stream)?;
                self.stream.wait_for(ready)?;
                cuda_gather::gather(&self.stream, hop, buffer, &one)?;
                self.scratch.give(one.clone());
                (one, self.stream.record()?)
            };
            self.sends.push(Sending { hop: posted, buffer, ready });
        }
        Ok(())
    }

    /// Hands to MPI what can be handed to it, and takes from it what has come.
    fn pump(&mut self) -> Result<()> {
        // MPI asks whose memory it is
        self.stream.device().make_current()?;
        let mut place = 0;
        while let Some(send) = self.sends.get(place) {
            if send.ready.passed()? {
                let Sending { hop, buffer, .. } = self.sends.remove(place);
                self.inner.send_device(&hop, buffer)?;
            } else {
                place += 1;
            }
        }
        // in order: MPI's tags only grow
        while let Some(first) = self.waiting.front() {
            if !first.landing.free.passed()? {
                break;
            }
            if let Some(Waiting { landing, into }) = self.waiting.pop_front() {
                self.inner.receive_device(landing.posted.clone(), into)?;
                self.receives.push(landing);
            }
        }
        let mut place = 0;
        while let Some(landing) = self.receives.get(place) {
            let Some(buffer) = self.inner.take_device(&landing.posted)? else {
                place += 1;
                continue;
            };
            let Landing { hop, pieces, free, .. } = self.receives.swap_remove(place);
            match pieces {
                // nothing of the device's is between the bytes and who reads them
                None => self.arrived.push((hop, buffer, free)),
                Some(pieces) => {
                    cuda_gather::scatter(&self.stream, &hop, &pieces, &buffer)?;
                    let ready = self.stream.record()?;
                    pieces.touched_before(&ready);
                    buffer.touched_before(&ready);
                    // whoever receives into it next waits for that
                    self.scratch.give(buffer);
                    self.arrived.push((hop, pieces, ready));
                }
            }
        }
        Ok(())
    }
}

/// The hop of the same message in one piece: that one, or the front of a buffer of its own.
fn in_one(hop: &MessageHeader, whole: Option<Range<u64>>) -> MessageHeader {
    let range = whole.unwrap_or(0..hop.bytes());
    MessageHeader { ranges: std::iter::once(range).collect(), ..hop.clone() }
}

impl Mpi {
    /// Sends a hop of one range from device memory, which the device has written.
    fn send_device(&mut self, hop: &MessageHeader, buffer: CudaBuffer) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        let range = contiguous(&hop.ranges).unwrap_or(0..0);
        self.start_send_of(hop, Memory::Device(buffer), range).inspect_err(|error| self.fail(error))
    }

    /// Receives a hop of one range into device memory, which the device does not use.
    fn receive_device(&mut self, hop: MessageHeader, buffer: CudaBuffer) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        self.check_receives(std::iter::once((&hop, buffer.len(), buffer.is_shared())))?;
        self.start(&[], vec![(hop, Memory::Device(buffer))]).inspect_err(|error| self.fail(error))
    }

    fn take_device(&mut self, hop: &MessageHeader) -> Result<Option<CudaBuffer>> {
        Ok(match self.take_memory(hop)? {
            Some(Memory::Device(buffer)) => Some(buffer),
            _ => None,
        })
    }
}

impl<S: Space<Buffer = CudaBuffer, Event = Event>> Transport<S> for DeviceMpi {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.check_alive()?;
        let posted = self.try_post(sends, receives).and_then(|()| self.pump());
        self.remember(posted)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.check_alive()?;
        let pumped = self.pump();
        self.remember(pumped)?;
        let patience = if self.sends.is_empty() && self.waiting.is_empty() {
            patience
        } else {
            patience.min(POLL)
        };
        let moved =
            Transport::<Host>::progress(&mut self.inner, patience).and_then(|()| self.pump());
        self.remember(moved)
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<S>>> {
        self.check_alive()?;
        let same = |other: &MessageHeader| {
            (other.peer, other.channel, other.tag) == (hop.peer, hop.channel, hop.tag)
        };
        if let Some(place) = self.arrived.iter().position(|(other, ..)| same(other)) {
            let (_, buffer, ready) = self.arrived.swap_remove(place);
            return Ok(Some(Arrived { buffer, ready }));
        }
        let posted = self.waiting.iter().map(|waiting| &waiting.landing).chain(&self.receives);
        if posted.map(|landing| &landing.hop).any(same) {
            return Ok(None);
        }
        let got = format!("{:?} {} from rank {}", hop.channel, hop.tag, hop.peer);
        Err(Error::invalid("hop", got, "a receive that was posted and not yet taken"))
    }

    fn pending(&self) -> bool {
        !self.sends.is_empty() || Transport::<Host>::pending(&self.inner)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

impl Control for DeviceMpi {
    forward_control! { rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard last_work }
}

impl std::fmt::Debug for DeviceMpi {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("DeviceMpi")
            .field("inner", &self.inner)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
