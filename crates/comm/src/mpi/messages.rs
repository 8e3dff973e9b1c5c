//! Messages of an endpoint: kinds of messages in flight, sends in order, posted receives, and
//! announcements. The memory of a message is a host buffer, or CUDA memory for an MPI that accepts
//! it, of which only the address is used here.

use std::ops::Range;

use annulus_core::{Channel, Host, HostBuffer, MessageHeader, Space, index};

/// Kind of a message in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    /// Bytes of a block.
    DataSend { context: u64, key: SendKey, step: usize },
    /// Bytes of a block from `peer`.
    DataReceive { context: u64, peer: usize, channel: Channel, tag: u64 },
    /// Frame number `number` from `peer`.
    FrameReceive { peer: usize, number: u64 },
    /// A frame to `peer` whose completion nothing depends on.
    FrameSend { peer: usize },
    /// Parts of all-gather `round` to `peer`.
    GatherParts { context: u64, peer: usize, round: u64 },
}

impl MessageKind {
    /// Returns the other end.
    pub(super) const fn peer(&self) -> usize {
        match self {
            Self::DataSend { key, .. } => key.peer,
            Self::DataReceive { peer, .. }
            | Self::FrameReceive { peer, .. }
            | Self::FrameSend { peer }
            | Self::GatherParts { peer, .. } => *peer,
        }
    }

    /// Returns the context that it belongs to; `None` for a frame of the endpoint.
    pub(super) const fn context(&self) -> Option<u64> {
        match self {
            Self::DataSend { context, .. }
            | Self::DataReceive { context, .. }
            | Self::GatherParts { context, .. } => Some(*context),
            Self::FrameReceive { .. } | Self::FrameSend { .. } => None,
        }
    }
}

/// Receiver, channel and tag of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SendKey {
    pub(super) peer: usize,
    pub(super) channel: Channel,
    pub(super) tag: u64,
}

impl SendKey {
    pub(super) const fn of(header: &MessageHeader) -> Self {
        Self { peer: header.peer, channel: header.channel, tag: header.tag }
    }

    /// Returns true if this message is to arrive before `other`.
    pub(super) fn is_before(&self, other: &Self) -> bool {
        (self.peer, self.channel) == (other.peer, other.channel) && self.tag < other.tag
    }
}

/// A send that starts once those before it have completed.
pub(super) struct QueuedSend {
    pub(super) header: MessageHeader,
    pub(super) from: MessageBuffer,
    pub(super) range: Range<u64>,
}

/// A receive that was posted and not yet taken.
pub(super) struct PostedReceive {
    pub(super) header: MessageHeader,
    /// The buffer that was posted; `None` while MPI writes to it.
    pub(super) buffer: Option<MessageBuffer>,
    pub(super) stage: ReceiveStage,
}

/// Progress of a receive. One with agreed lengths is `Direct` or `Staged` from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceiveStage {
    /// MPI does not receive it: its announcement has not arrived.
    Posted,
    /// MPI receives into the posted buffer.
    Direct,
    /// MPI receives into a staging buffer.
    Staged,
    /// The posted buffer holds the bytes.
    Arrived,
}

impl PostedReceive {
    pub(super) fn is_for(&self, peer: usize, channel: Channel, tag: u64) -> bool {
        (self.header.peer, self.header.channel, self.header.tag) == (peer, channel, tag)
    }
}

/// The announcement of a message whose receive is not posted yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) peer: usize,
    pub(super) channel: Channel,
    pub(super) tag: u64,
    pub(super) step: usize,
    /// Bytes of the message.
    pub(super) bytes: u64,
    /// Bytes of each of its pieces but the last.
    pub(super) piece: u64,
    /// Number among the announced messages of its sender.
    pub(super) number: u64,
}

impl Announcement {
    pub(super) fn is_for(&self, receive: &PostedReceive) -> bool {
        receive.is_for(self.peer, self.channel, self.tag)
    }

    /// Returns true if both announce the same message.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.peer, self.channel, self.tag) == (other.peer, other.channel, other.tag)
    }
}

#[cfg(feature = "cuda")]
use annulus_device_cuda::CudaBuffer;

/// Bytes that MPI reads or writes, owned or co-owned. They stay in place when this value moves.
pub(super) enum MessageBuffer {
    Host(HostBuffer),
    #[cfg(feature = "cuda")]
    Device(CudaBuffer),
}

impl MessageBuffer {
    /// Returns its size in bytes.
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Host(buffer) => Host::size(buffer),
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// Returns the address of these bytes, for MPI to read; `None` if they exceed the buffer.
    pub(super) fn start(&self, bytes: &Range<u64>) -> Option<*const u8> {
        match self {
            Self::Host(buffer) => {
                buffer.bytes().get(index(bytes.start)..index(bytes.end)).map(<[u8]>::as_ptr)
            }
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => address(buffer, bytes).map(<*mut u8>::cast_const),
        }
    }

    /// As [`MessageBuffer::start`], for MPI to write; `None` also while the buffer is co-owned.
    pub(super) fn start_mut(&mut self, bytes: &Range<u64>) -> Option<*mut u8> {
        match self {
            Self::Host(buffer) => buffer
                .bytes_mut()?
                .get_mut(index(bytes.start)..index(bytes.end))
                .map(<[u8]>::as_mut_ptr),
            #[cfg(feature = "cuda")]
            Self::Device(buffer) => address(buffer, bytes).filter(|_| !buffer.is_shared()),
        }
    }

    /// Returns the host buffer; `None` for device memory.
    pub(super) fn into_host(self) -> Option<HostBuffer> {
        match self {
            Self::Host(buffer) => Some(buffer),
            #[cfg(feature = "cuda")]
            Self::Device(_) => None,
        }
    }
}

#[cfg(feature = "cuda")]
fn address(buffer: &CudaBuffer, bytes: &Range<u64>) -> Option<*mut u8> {
    (bytes.start <= bytes.end && bytes.end <= buffer.len())
        .then(|| std::ptr::with_exposed_provenance_mut(index(buffer.address() + bytes.start)))
}
