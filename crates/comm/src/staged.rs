//! Device memory over a host transport: a wrapper that copies through host memory asynchronously.
//!
//! ```text
//! device buffer ──download──▶ staging ──inner──▶ staging ──upload──▶ device buffer
//! ```
//! No call waits for the device: [`Transport::progress`] polls the copies, and starts the next step
//! of a transfer once its copy has completed. As long as a copy waits for the kernels before it,
//! this rank works, and sends heartbeats that say so.
//!
//! `DeviceHeartbeat`: a ring does not wait for kernels: it waits for transfers, and these wait for
//! the kernels that write what is sent or read the buffer of a receive. A kernel may take longer
//! than the deadline. So a transport of device memory sends heartbeats of a rank that works as long
//! as one of its transfers waits for the device. No deadline of the ring then ends the wait for a
//! device that hangs; the bound of the device does.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Space,
    StagedSpace, Transport,
};

use crate::{
    deadline,
    delegate::{forward_control, host_messages_of_inner},
    message::{self, Failure, MessageKey, not_posted, take_ready},
};

/// Interval between polls of copies while the inner transport is idle: small beside the copy of a
/// block.
const POLL: Duration = Duration::from_micros(100);

/// A transport for the memory space `D` over the host transport `T`. See the [module](self).
pub struct Staged<T, D: StagedSpace> {
    inner: T,
    copier: D::Copier,
    staging: Staging,
    /// Sends whose copies to the host have not completed, in the order in which they were posted.
    downloads: Vec<(MessageHeader, D::Download)>,
    /// Receives that the inner transport has not completed.
    receives: Vec<StagedReceive<D>>,
    uploads: Vec<(MessageHeader, D::Upload)>,
    arrived: Vec<(MessageHeader, Arrived<D>)>,
    heartbeat: DeviceHeartbeat,
    bytes_sent: u64,
    failure: Failure,
}

impl<T: Transport<Host>, D: StagedSpace> Staged<T, D> {
    /// Sends and receives buffers of `D` over `inner`.
    pub fn new(inner: T, copier: D::Copier) -> Self {
        Self {
            inner,
            copier,
            staging: Staging::default(),
            downloads: Vec::new(),
            receives: Vec::new(),
            uploads: Vec::new(),
            arrived: Vec::new(),
            heartbeat: DeviceHeartbeat::default(),
            bytes_sent: 0,
            failure: Failure::default(),
        }
    }

    /// Takes a staging buffer that the device copies from and to.
    fn staging_buffer(&mut self, bytes: u64) -> Result<HostBuffer> {
        let copier = &mut self.copier;
        self.staging.take_or(bytes, |bytes| D::staging_buffer(copier, bytes))
    }

    /// Advances all copies without waiting: sends the messages that have been copied to the host,
    /// starts the upload of those that have arrived, and ends the receives whose uploads have
    /// completed. Returns true if there were any.
    fn pump(&mut self) -> Result<bool> {
        let Self { inner, copier, staging, heartbeat, .. } = self;
        let sent = take_ready(&mut self.downloads, |(_, copy)| D::downloaded(copier, copy))?;
        let mut moved = !sent.is_empty();
        for ((header, _), buffer) in sent {
            inner.post(&[Outgoing { header, buffer: &buffer, ready: &() }], &mut Vec::new())?;
            staging.lend(buffer);
        }
        let arrived = take_ready(&mut self.receives, |receive| inner.take(&receive.staged))?;
        moved |= !arrived.is_empty();
        for (StagedReceive { header, buffer, .. }, Arrived { buffer: staged, .. }) in arrived {
            let tick = &mut || {
                heartbeat.poll(true, inner);
                ControlFlow::Continue(())
            };
            let upload = D::upload(copier, staged, buffer, &header.ranges, tick)?;
            self.uploads.push((header, upload));
        }
        let uploaded = take_ready(&mut self.uploads, |(_, copy)| D::uploaded(copier, copy))?;
        moved |= !uploaded.is_empty();
        for ((header, _), (staged, arrived)) in uploaded {
            staging.give(staged);
            self.arrived.push((header, arrived));
        }
        Ok(moved)
    }

    fn try_post(
        &mut self,
        sends: &[Outgoing<'_, D>],
        receives: &mut Vec<Incoming<D>>,
    ) -> Result<()> {
        for send in sends {
            message::check(&send.header, self.inner.ranks(), D::size(send.buffer))?;
        }
        let mut staged = Vec::with_capacity(receives.len());
        for incoming in receives.iter() {
            message::check(&incoming.header, self.inner.ranks(), D::size(&incoming.buffer))?;
            staged.push(Incoming {
                header: in_front(&incoming.header),
                buffer: self.staging_buffer(incoming.header.bytes())?,
            });
        }
        let headers: Vec<MessageHeader> =
            staged.iter().map(|incoming| incoming.header.clone()).collect();
        self.inner.post(&[], &mut staged)?;
        let posted = receives.drain(..).zip(headers);
        self.receives.extend(posted.map(|(Incoming { header, buffer }, staged)| StagedReceive {
            header,
            buffer,
            staged,
        }));
        for Outgoing { header, buffer, ready } in sends {
            self.bytes_sent += header.bytes();
            let into = self.staging_buffer(header.bytes())?;
            let download = D::download(&mut self.copier, buffer, ready, &header.ranges, into)?;
            self.downloads.push((in_front(header), download));
        }
        Ok(())
    }
}

/// Returns the message `header` at the front of a staging buffer.
fn in_front(header: &MessageHeader) -> MessageHeader {
    MessageHeader { ranges: message::front(header.bytes()), ..header.clone() }
}

impl<T: Transport<Host>, D: StagedSpace> Transport<D> for Staged<T, D> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, D>], receives: &mut Vec<Incoming<D>>) -> Result<()> {
        self.failure.check()?;
        let posted = self.try_post(sends, receives);
        self.failure.remember(posted)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.failure.check()?;
        let pumped = self.pump();
        let moved = self.failure.remember(pumped)?;
        let copying = !self.downloads.is_empty() || !self.uploads.is_empty();
        self.heartbeat.poll(copying, &mut self.inner);
        let timeout = match (moved, copying) {
            (true, _) => Duration::ZERO,
            (false, true) => timeout.min(POLL),
            (false, false) => timeout,
        };
        self.inner.progress(timeout)?;
        let pumped = self.pump();
        self.failure.remember(pumped).map(drop)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<D>>> {
        self.failure.check()?;
        let key = MessageKey::of(header);
        let same = |other: &MessageHeader| MessageKey::of(other) == key;
        if let Some(position) = self.arrived.iter().position(|(other, _)| same(other)) {
            return Ok(Some(self.arrived.swap_remove(position).1));
        }
        if self.receives.iter().any(|receive| same(&receive.header))
            || self.uploads.iter().any(|(other, _)| same(other))
        {
            return Ok(None);
        }
        Err(not_posted(header))
    }

    host_messages_of_inner! { failure }

    fn pending(&self) -> bool {
        !self.downloads.is_empty() || self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        self.inner.posts_ahead()
    }

    fn runs_groups_in_order(&self) -> bool {
        self.inner.runs_groups_in_order()
    }
}

impl<T: Transport<Host>, D: StagedSpace> Control for Staged<T, D> {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
}

impl<T: std::fmt::Debug, D: StagedSpace> std::fmt::Debug for Staged<T, D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Staged").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// A receive into a buffer of the space `S` by way of a staging buffer.
pub(crate) struct StagedReceive<S: Space> {
    /// The message as the caller posted it.
    pub(crate) header: MessageHeader,
    /// The buffer that the caller posted.
    pub(crate) buffer: S::Buffer,
    /// The message as the inner transport receives it, at the front of the staging buffer.
    pub(crate) staged: MessageHeader,
}

/// Staging buffers. They are reused by later messages, so a warm plan allocates none.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    free: Vec<HostBuffer>,
    /// Buffers that may have another owner.
    lent: Vec<HostBuffer>,
}

impl Staging {
    /// Takes the smallest buffer of at least `bytes` bytes without another owner, or a new one.
    #[cfg(any(feature = "mpi", test))]
    pub(crate) fn take(&mut self, bytes: u64) -> Result<HostBuffer> {
        self.take_or(bytes, HostBuffer::zeroed)
    }

    /// Takes the smallest buffer of at least `bytes` bytes without another owner, or a new one, which
    /// `allocate` makes.
    pub(crate) fn take_or(
        &mut self,
        bytes: u64,
        allocate: impl FnOnce(u64) -> Result<HostBuffer>,
    ) -> Result<HostBuffer> {
        self.free.extend(self.lent.extract_if(.., |buffer| !buffer.is_shared()));
        let fitting =
            self.free.iter().enumerate().filter(|(_, buffer)| Host::size(buffer) >= bytes);
        match fitting.min_by_key(|(_, buffer)| Host::size(buffer)) {
            Some((index, _)) => Ok(self.free.swap_remove(index)),
            None => allocate(bytes),
        }
    }

    /// Returns a buffer without another owner.
    pub(crate) fn give(&mut self, buffer: HostBuffer) {
        self.free.push(buffer);
    }

    /// Returns a buffer that another owner may still read.
    pub(crate) fn lend(&mut self, buffer: HostBuffer) {
        self.lent.push(buffer);
    }
}

/// Minimum time between two heartbeats: the interval of the least deadline, because a transport
/// does not know that of its ring.
const INTERVAL: Duration = match deadline::LEAST.checked_div(deadline::HEARTBEATS) {
    Some(interval) => interval,
    None => deadline::LEAST,
};

/// Heartbeats of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct DeviceHeartbeat {
    last: Option<Instant>,
}

impl DeviceHeartbeat {
    /// Sends a heartbeat of a rank that works if a transfer waits for the device, and the last one
    /// is long enough ago.
    pub(crate) fn poll(&mut self, waits: bool, control: &mut dyn Control) {
        if !waits {
            return;
        }
        let now = Instant::now();
        if self.last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL) {
            self.last = Some(now);
            control.heartbeat(true);
        }
    }
}

#[cfg(any(feature = "nccl", all(feature = "mpi", feature = "cuda")))]
pub(crate) mod cuda {
    //! Gathering and scattering on the device: messages of several byte ranges of CUDA memory are
    //! transferred in one range, because sender and receiver may divide them differently.
    #![expect(
        unsafe_code,
        reason = "copies of device memory, whose addresses the compiler cannot check"
    )]

    use annulus_core::{MessageHeader, Result};
    use annulus_device_cuda::{CudaBuffer, RangeDirection, RangeTransfer, Stream};

    /// Buffers on the device for such messages. All work on them is in one stream, but for the
    /// transfers themselves, during which they are co-owned; so they can be reused at once.
    #[derive(Default)]
    pub(crate) struct DeviceStaging(Vec<CudaBuffer>);

    impl DeviceStaging {
        /// Takes the smallest buffer of at least `bytes` bytes without another owner, or a new one.
        pub(crate) fn take(&mut self, bytes: u64, stream: &Stream) -> Result<CudaBuffer> {
            let fitting = self
                .0
                .iter()
                .enumerate()
                .filter(|(_, buffer)| buffer.len() >= bytes && !buffer.is_shared());
            match fitting.min_by_key(|(_, buffer)| buffer.len()) {
                Some((index, _)) => Ok(self.0.swap_remove(index)),
                None => CudaBuffer::new(stream.device(), bytes),
            }
        }

        /// Returns a buffer. It is not taken again while it has another owner.
        pub(crate) fn give(&mut self, buffer: CudaBuffer) {
            self.0.push(buffer);
        }
    }

    /// Returns the bytes of a staging buffer for a message: its own, then room for the list of
    /// ranges.
    pub(crate) fn staged_bytes(header: &MessageHeader) -> u64 {
        table_start(header) + RangeTransfer::table_bytes(header.ranges.len())
    }

    fn table_start(header: &MessageHeader) -> u64 {
        header.bytes().next_multiple_of(8)
    }

    /// Copies the ranges of `header` in `buffer` to the front of `staged`, in one launch.
    pub(crate) fn gather(
        stream: &Stream,
        header: &MessageHeader,
        buffer: &CudaBuffer,
        staged: &CudaBuffer,
    ) -> Result<()> {
        copy(stream, header, buffer, staged, RangeDirection::Gather)
    }

    /// Copies the front of `staged` to the ranges of `header` in `buffer`, in one launch.
    pub(crate) fn scatter(
        stream: &Stream,
        header: &MessageHeader,
        buffer: &CudaBuffer,
        staged: &CudaBuffer,
    ) -> Result<()> {
        copy(stream, header, buffer, staged, RangeDirection::Scatter)
    }

    fn copy(
        stream: &Stream,
        header: &MessageHeader,
        buffer: &CudaBuffer,
        staged: &CudaBuffer,
        direction: RangeDirection,
    ) -> Result<()> {
        let transfer = RangeTransfer {
            buffer: buffer.address(),
            ranges: &header.ranges,
            packed: staged.address(),
            table: staged.address() + table_start(header),
            direction,
        };
        // SAFETY: the ranges lie within `buffer`, as was checked when they were posted; their bytes
        // and their list lie within `staged`, which has `staged_bytes`. Both are kept until the
        // work is done, and work on `staged` is in this stream.
        unsafe { stream.copy_ranges(&transfer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_free_buffer_that_fits_is_reused() {
        let mut staging = Staging::default();
        staging.give(HostBuffer::zeroed(100).unwrap());
        staging.give(HostBuffer::zeroed(10).unwrap());
        let ten = staging.take(8).unwrap();
        assert_eq!(Host::size(&ten), 10);
        staging.lend(ten.clone());
        assert_eq!(Host::size(&staging.take(8).unwrap()), 100);
        assert_eq!(Host::size(&staging.take(8).unwrap()), 8);
        drop(ten);
        assert_eq!(Host::size(&staging.take(8).unwrap()), 10);
    }
}
