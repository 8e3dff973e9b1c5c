//! Transports for the memory of the mock device.
//!
//! [`DeviceTransport`] copies from one device to another without a host buffer. A send posts a
//! handle, the ranges and the event after which they may be read. The receiver polls that event.
//! Its own device then queues the write to the posted receive, and the event of that work is the
//! arrival's. Control messages go over a ring of threads.
//!
//! [`StagedSpace`] is for [`annulus_comm::Staged`]: copies that are started, then polled.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use annulus_comm::{Threads, forward_control, threads};
use annulus_core::{
    Arrived, Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    StagedSpace, Tick, Transport,
};

use super::{
    memory::{Device, DeviceBuffer, DeviceEvent, fault, lock},
    tensor::MockSpace,
};

/// Sender, receiver, channel and tag of a message.
type Address = (usize, usize, Channel, u64);

/// A send that its receiver has not taken.
struct PostedSend {
    buffer: DeviceBuffer,
    ranges: Arc<[Range<u64>]>,
    ready: DeviceEvent,
    taken: Arc<AtomicBool>,
}

type PostedSends = Arc<Mutex<HashMap<Address, PostedSend>>>;

/// One rank's endpoint, created by [`device_ring`].
pub struct DeviceTransport {
    device: Device,
    inner: Threads,
    posted: PostedSends,
    receives: Vec<PostedReceive>,
    sends: Vec<Arc<AtomicBool>>,
    bytes_sent: u64,
}

struct PostedReceive {
    header: MessageHeader,
    buffer: DeviceBuffer,
    arrived: Option<DeviceEvent>,
}

/// Creates a ring with one endpoint for each device.
pub fn device_ring(devices: &[Device]) -> Vec<DeviceTransport> {
    let posted = PostedSends::default();
    let endpoint = |(inner, device): (Threads, &Device)| DeviceTransport {
        device: device.clone(),
        inner,
        posted: Arc::clone(&posted),
        receives: Vec::new(),
        sends: Vec::new(),
        bytes_sent: 0,
    };
    threads::ring(devices.len()).into_iter().zip(devices).map(endpoint).collect()
}

impl DeviceTransport {
    /// Receives every message whose send is posted and ready. True if there was one.
    fn pump(&mut self) -> Result<bool> {
        let rank = self.rank();
        let mut moved = false;
        for receive in self.receives.iter_mut().filter(|receive| receive.arrived.is_none()) {
            let address = (receive.header.peer, rank, receive.header.channel, receive.header.tag);
            let Some(send) = lock(&self.posted).remove(&address) else { continue };
            if !send.ready.poll()? {
                lock(&self.posted).insert(address, send);
                continue;
            }
            let bytes = send.buffer.device().read(&send.buffer, &send.ranges)?;
            let MessageHeader { peer, step, ranges, .. } = &receive.header;
            if bytes.len() as u64 != receive.header.bytes() {
                let what =
                    format!("message of {} bytes, want {}", bytes.len(), receive.header.bytes());
                return Err(Error::Comm { peer: *peer, step: *step, what });
            }
            let slot = receive.buffer.slot();
            let ranges = Arc::clone(ranges);
            receive.arrived = Some(
                self.device
                    .enqueue(&[], &[slot], move |memory| memory.scatter(slot, &ranges, &bytes))?,
            );
            // the handle is dropped first: once `taken` is set, the sender may receive into this
            // buffer
            let PostedSend { buffer, taken, .. } = send;
            drop(buffer);
            taken.store(true, Ordering::Release);
            moved = true;
        }
        self.sends.retain(|taken| !taken.load(Ordering::Acquire));
        Ok(moved)
    }
}

impl Transport<MockSpace> for DeviceTransport {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, MockSpace>],
        receives: &mut Vec<Incoming<MockSpace>>,
    ) -> Result<()> {
        for Incoming { header, buffer } in receives.drain(..) {
            if buffer.is_shared() {
                return Err(Error::Comm {
                    peer: header.peer,
                    step: header.step,
                    what: "the buffer of a receive is in use".into(),
                });
            }
            self.receives.push(PostedReceive { header, buffer, arrived: None });
        }
        for Outgoing { header, buffer, ready } in sends {
            let taken = Arc::new(AtomicBool::new(false));
            let send = PostedSend {
                buffer: (*buffer).clone(),
                ranges: Arc::clone(&header.ranges),
                ready: (*ready).clone(),
                taken: Arc::clone(&taken),
            };
            let address = (self.rank(), header.peer, header.channel, header.tag);
            if lock(&self.posted).insert(address, send).is_some() {
                return Err(Error::Comm {
                    peer: header.peer,
                    step: header.step,
                    what: format!("tag {} was used twice", header.tag),
                });
            }
            self.sends.push(taken);
            self.bytes_sent += header.bytes();
        }
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        // what is sent may wait for it
        if self.device.runs_kernel() {
            self.inner.heartbeat(true);
        }
        // a posted send wakes no receiver, so the wait for control messages must be short
        let timeout =
            if self.pump()? { Duration::ZERO } else { timeout.min(Duration::from_micros(200)) };
        Transport::<Host>::progress(&mut self.inner, timeout)?;
        self.pump().map(drop)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<MockSpace>>> {
        let posted = self.receives.iter().position(|receive| receive.header == *header);
        let missing = || {
            Error::invalid(
                "header",
                format!("{header:?}"),
                "a receive that was posted and not yet taken",
            )
        };
        let found = posted.ok_or_else(missing)?;
        if self.receives[found].arrived.is_none() {
            return Ok(None);
        }
        let PostedReceive { buffer, arrived, .. } = self.receives.swap_remove(found);
        Ok(arrived.map(|ready| Arrived { buffer, ready }))
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.bytes_sent += sends.iter().map(|send| send.header.bytes()).sum::<u64>();
        self.inner.post_host(sends, receives)
    }

    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.inner.take_host(header)
    }

    fn pending(&self) -> bool {
        self.sends.iter().any(|taken| !taken.load(Ordering::Acquire))
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

impl Control for DeviceTransport {
    forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_heard
        last_work
    }
}

/// A copy to the host in progress.
pub struct Download {
    from: DeviceBuffer,
    ready: DeviceEvent,
    ranges: Vec<Range<u64>>,
    into: Option<HostBuffer>,
}

/// A copy from the host in progress.
pub struct Upload {
    done: DeviceEvent,
    sides: Option<(HostBuffer, DeviceBuffer)>,
}

impl StagedSpace for MockSpace {
    type Copier = Device;
    type Download = Download;
    type Upload = Upload;

    fn download(
        _: &mut Device,
        from: &DeviceBuffer,
        ready: &DeviceEvent,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<Download> {
        Ok(Download {
            from: from.clone(),
            ready: ready.clone(),
            ranges: ranges.to_vec(),
            into: Some(into),
        })
    }

    fn downloaded(copier: &mut Device, copy: &mut Download) -> Result<Option<HostBuffer>> {
        if !copy.ready.poll()? {
            return Ok(None);
        }
        let Some(mut into) = copy.into.take() else {
            return Err(fault("a download was polled after its end"));
        };
        let bytes = copier.read(&copy.from, &copy.ranges)?;
        let target = into.bytes_mut().and_then(|target| target.get_mut(..bytes.len()));
        target
            .ok_or_else(|| fault("a staging buffer that is shared or too small"))?
            .copy_from_slice(&bytes);
        Ok(Some(into))
    }

    fn upload(
        copier: &mut Device,
        from: HostBuffer,
        into: DeviceBuffer,
        ranges: &[Range<u64>],
        _: Tick<'_>,
    ) -> Result<Upload> {
        let slot = into.slot();
        let ranges = ranges.to_vec();
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let front = from
            .bytes()
            .get(..annulus_core::index(bytes))
            .ok_or_else(|| fault("a staging buffer that is too small"))?
            .to_vec();
        let done =
            copier.enqueue(&[], &[slot], move |memory| memory.scatter(slot, &ranges, &front))?;
        Ok(Upload { done, sides: Some((from, into)) })
    }

    fn uploaded(_: &mut Device, copy: &mut Upload) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        if !copy.done.poll()? {
            return Ok(None);
        }
        let Some((from, buffer)) = copy.sides.take() else {
            return Err(fault("an upload was polled after its end"));
        };
        Ok(Some((from, Arrived { buffer, ready: copy.done.clone() })))
    }
}
