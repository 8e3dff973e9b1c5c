//! Memory of CUDA or of HIP over a GPU-aware MPI: no byte is copied through host memory.
//!
//! ```text
//! compute stream ─ready─▶ [gather] ─▶ MPI_Isend ┄▶ MPI_Irecv ─▶ [scatter] ─event─▶ compute stream
//! ```
//! MPI does not order its accesses with streams. So a message is passed to it once the device has
//! written the bytes, and a receive once the device no longer uses the buffer. Both are found by
//! polling events, never by waiting for them; as long as one has not passed, this rank works, and
//! sends heartbeats that say so. What has arrived may be read by any stream. A message of several
//! byte ranges goes through a buffer on the device, because sender and receiver may divide it
//! differently.
//!
//! The messages are those of [`Mpi`], so these ranks and ranks that stage can share a ring.

use std::{collections::VecDeque, ops::Range, time::Duration};

use annulus_core::{
    Arrived, Control, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};
use annulus_device_cuda::{CudaBuffer, Device, Event, Stream};

use super::{Mpi, messages::MessageBuffer, transfers::contiguous};
use crate::{
    delegate::{forward_control, host_messages_of_inner},
    message::{self, Failure, MessageKey, ReceiveRequest, not_posted, take_ready},
    staged::{
        DeviceHeartbeat,
        cuda::{self, DeviceStaging},
    },
};

/// Interval between polls of events while no other call polls them: small beside the transfer of a
/// block, large beside the cost of a poll.
const POLL: Duration = Duration::from_micros(100);

/// Endpoint of one rank, of any space with blocks in memory of a [`Device`].
pub struct DeviceMpi {
    inner: Mpi,
    stream: Stream,
    staging: DeviceStaging,
    /// Sends whose bytes the device has not written yet.
    sends: Vec<WaitingSend>,
    /// Receives whose buffers the device may still use, in the order in which they were posted.
    waiting: VecDeque<WaitingReceive>,
    /// Receives that were passed to MPI.
    receives: Vec<DeviceReceive>,
    arrived: Vec<(MessageHeader, CudaBuffer, Event)>,
    heartbeat: DeviceHeartbeat,
    bytes_sent: u64,
    failure: Failure,
}

/// A send that starts once `ready` has passed.
struct WaitingSend {
    header: MessageHeader,
    buffer: CudaBuffer,
    ready: Event,
}

/// A receive that starts once the device no longer uses `into`.
struct WaitingReceive {
    receive: DeviceReceive,
    into: CudaBuffer,
}

/// A receive into device memory.
struct DeviceReceive {
    /// The message as the caller posted it.
    header: MessageHeader,
    /// The message as MPI receives it: one range.
    contiguous: MessageHeader,
    /// The caller's buffer, if the message arrives in a staging buffer.
    scatter_into: Option<CudaBuffer>,
    /// Event after the device's earlier use of the buffer.
    free: Event,
}

impl DeviceMpi {
    /// Sends and receives memory of `device` over `inner`, whose MPI must accept such memory.
    ///
    /// # Errors
    /// [`annulus_core::Error::Device`] if no stream can be created.
    pub fn new(inner: Mpi, device: &Device) -> Result<Self> {
        Ok(Self {
            inner,
            stream: Stream::new(device)?,
            staging: DeviceStaging::default(),
            sends: Vec::new(),
            waiting: VecDeque::new(),
            receives: Vec::new(),
            arrived: Vec::new(),
            heartbeat: DeviceHeartbeat::default(),
            bytes_sent: 0,
            failure: Failure::default(),
        })
    }

    fn try_post<S: Space<Buffer = CudaBuffer, Event = Event>>(
        &mut self,
        sends: &[Outgoing<'_, S>],
        receives: &mut Vec<Incoming<S>>,
    ) -> Result<()> {
        let outgoing = sends.iter().map(|send| (&send.header, send.buffer));
        for (header, buffer) in
            outgoing.chain(receives.iter().map(|receive| (&receive.header, &receive.buffer)))
        {
            message::check(header, self.inner.ranks(), buffer.len())?;
        }
        receives.sort_by_key(|incoming| MessageKey::of(&incoming.header));
        for Incoming { header, buffer } in receives.drain(..) {
            // work that was enqueued on the buffer earlier comes first
            buffer.wait_on(&self.stream)?;
            let range = contiguous(&header.ranges);
            let is_contiguous = range.is_some();
            let contiguous = with_range(&header, range.unwrap_or(0..header.bytes()));
            let (into, scatter_into) = if is_contiguous {
                (buffer, None)
            } else {
                (self.staging.take(cuda::staged_bytes(&header), &self.stream)?, Some(buffer))
            };
            let free = self.stream.record()?;
            let receive = DeviceReceive { header, contiguous, scatter_into, free };
            self.waiting.push_back(WaitingReceive { receive, into });
        }
        for Outgoing { header, buffer, ready } in sends {
            self.bytes_sent += header.bytes();
            if let Some(range) = contiguous(&header.ranges) {
                let header = with_range(header, range);
                let buffer = (*buffer).clone();
                self.sends.push(WaitingSend { header, buffer, ready: (*ready).clone() });
                continue;
            }
            let staged = self.staging.take(cuda::staged_bytes(header), &self.stream)?;
            self.stream.wait_for(ready)?;
            cuda::gather(&self.stream, header, buffer, &staged)?;
            self.staging.give(staged.clone());
            let ready = self.stream.record()?;
            let header = with_range(header, 0..header.bytes());
            self.sends.push(WaitingSend { header, buffer: staged, ready });
        }
        Ok(())
    }

    /// Passes ready transfers to MPI, and takes what it has received.
    fn pump(&mut self) -> Result<()> {
        // MPI inquires about pointers in the current context
        self.stream.device().make_current()?;
        let is_ready = |send: &mut WaitingSend| Ok(send.ready.passed_in_time()?.then_some(()));
        for (WaitingSend { header, buffer, .. }, ()) in take_ready(&mut self.sends, is_ready)? {
            self.inner.send_device(&header, buffer)?;
        }
        // in order, because tags of receives only grow
        while let Some(first) = self.waiting.front() {
            if !first.receive.free.passed_in_time()? {
                break;
            }
            if let Some(WaitingReceive { receive, into }) = self.waiting.pop_front() {
                self.inner.receive_device(receive.contiguous.clone(), into)?;
                self.receives.push(receive);
            }
        }
        let inner = &mut self.inner;
        let arrived =
            take_ready(&mut self.receives, |receive| inner.take_device(&receive.contiguous))?;
        for (DeviceReceive { header, scatter_into, free, .. }, buffer) in arrived {
            match scatter_into {
                // MPI has written the bytes: no work of the device is left to wait for
                None => self.arrived.push((header, buffer, free)),
                Some(into) => {
                    cuda::scatter(&self.stream, &header, &into, &buffer)?;
                    let ready = self.stream.record()?;
                    into.touched_before(&ready);
                    buffer.touched_before(&ready);
                    // the next receive into it waits for the scatter
                    self.staging.give(buffer);
                    self.arrived.push((header, into, ready));
                }
            }
        }
        Ok(())
    }
}

/// Returns the message `header` with the one byte range `range`.
fn with_range(header: &MessageHeader, range: Range<u64>) -> MessageHeader {
    MessageHeader { ranges: std::iter::once(range).collect(), ..header.clone() }
}

impl Mpi {
    /// Sends a message of one range from device memory that the device has written.
    fn send_device(&mut self, header: &MessageHeader, buffer: CudaBuffer) -> Result<()> {
        let mut endpoint = self.shared.lock();
        endpoint.check_alive()?;
        endpoint.enter()?;
        let range = contiguous(&header.ranges).unwrap_or(0..0);
        let buffer = MessageBuffer::Device(buffer);
        endpoint
            .start_contiguous_send(self.context, header, buffer, range)
            .inspect_err(|error| endpoint.fail(error))
    }

    /// Receives a message of one range into device memory that the device does not use.
    fn receive_device(&mut self, header: MessageHeader, buffer: CudaBuffer) -> Result<()> {
        let mut endpoint = self.shared.lock();
        endpoint.check_alive()?;
        endpoint.enter()?;
        let request =
            ReceiveRequest { header: &header, size: buffer.len(), is_shared: buffer.is_shared() };
        endpoint.check_receives(self.context, std::iter::once(request))?;
        endpoint
            .start(self.context, &[], vec![(header, MessageBuffer::Device(buffer))])
            .inspect_err(|error| endpoint.fail(error))
    }

    fn take_device(&mut self, header: &MessageHeader) -> Result<Option<CudaBuffer>> {
        Ok(match self.shared.lock().take_buffer(self.context, header)? {
            Some(MessageBuffer::Device(buffer)) => Some(buffer),
            _ => None,
        })
    }
}

impl<S: Space<Buffer = CudaBuffer, Event = Event>> Transport<S> for DeviceMpi {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        self.failure.check()?;
        let posted = self.try_post(sends, receives).and_then(|()| self.pump());
        self.failure.remember(posted)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.failure.check()?;
        let pumped = self.pump();
        self.failure.remember(pumped)?;
        let waits = !self.sends.is_empty() || !self.waiting.is_empty();
        self.heartbeat.poll(waits, &mut self.inner);
        let timeout = if waits { timeout.min(POLL) } else { timeout };
        let moved =
            Transport::<Host>::progress(&mut self.inner, timeout).and_then(|()| self.pump());
        self.failure.remember(moved)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        self.failure.check()?;
        let key = MessageKey::of(header);
        let same = |other: &MessageHeader| MessageKey::of(other) == key;
        if let Some(index) = self.arrived.iter().position(|(other, ..)| same(other)) {
            let (_, buffer, ready) = self.arrived.swap_remove(index);
            return Ok(Some(Arrived { buffer, ready }));
        }
        let posted = self.waiting.iter().map(|waiting| &waiting.receive).chain(&self.receives);
        if posted.map(|receive| &receive.header).any(same) {
            return Ok(None);
        }
        Err(not_posted(header))
    }

    host_messages_of_inner! { failure }

    fn pending(&self) -> bool {
        !self.sends.is_empty() || Transport::<Host>::pending(&self.inner)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        Transport::<Host>::posts_ahead(&self.inner)
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl Control for DeviceMpi {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
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
