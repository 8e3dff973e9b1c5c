//! Messages of an endpoint: kinds of messages in flight, sends in order, posted receives, and
//! announcements. The memory of a message is a host buffer, or CUDA memory for an MPI that accepts
//! it, of which only the address is used here. [`WireTags`] are MPI's tags of blocks.

use std::ops::Range;

use annulus_core::{Channel, Host, HostBuffer, MessageHeader, Space, index};

use crate::{message::MessageKey, ring::overlap};

/// Kind of a message in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    /// Bytes of a block.
    DataSend { context: u64, key: MessageKey },
    /// Bytes of a block that arrives.
    DataReceive { context: u64, key: MessageKey },
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
            Self::DataSend { key, .. } | Self::DataReceive { key, .. } => key.peer,
            Self::FrameReceive { peer, .. }
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

/// A send that starts once those before it have completed.
pub(super) struct QueuedSend {
    pub(super) header: MessageHeader,
    pub(super) from: MessageBuffer,
    pub(super) range: Range<u64>,
}

/// A receive that was posted and not yet taken.
pub(super) struct MpiReceive {
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

/// The announcement of a message. Its sender is the peer of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) key: MessageKey,
    pub(super) step: usize,
    /// Bytes of the message.
    pub(super) bytes: u64,
    /// Bytes of each of its pieces but the last.
    pub(super) piece: u64,
    /// Number among the announced messages of its sender.
    pub(super) number: u64,
}

impl Announcement {
    pub(super) fn is_for(&self, receive: &MpiReceive) -> bool {
        MessageKey::of(&receive.header) == self.key
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

/// Number of channels.
const CHANNELS: u64 = 3;

/// Least number of message tags that are distinct at a time, where MPI has enough.
const LEAST_WINDOW: u64 = 1 << 10;

/// Most contexts whose messages have tags of their own, where MPI has enough: plans of several
/// shapes, each with some of their own, and few enough that digests of lengths keep thousands of
/// values.
const MOST_CONTEXTS: u64 = 64;

/// Mapping of messages to MPI's tags.
///
/// | message | tag |
/// |---|---|
/// | received ahead | `((slot·window + tag mod window)·lengths + digest of the length)·3 + channel` |
/// | announced | `(contexts·window·lengths + number mod (window·lengths))·3 + channel` |
///
/// The slot of a context is its number modulo `contexts`. The number of an announced message counts
/// those of its sender, and is part of the announcement.
///
/// A message that is received ahead and whose length differs from that of its receive has another
/// tag as a rule, and does not match it. Lengths are compared by other means, too: this is a second
/// guard of the memory behind a receive, for which MPI may have no check of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WireTags {
    /// Number of contexts that are distinct on the wire.
    contexts: u64,
    /// Number of message tags of a context that are distinct on the wire.
    window: u64,
    /// Number of digests of a length.
    lengths: u64,
}

impl Default for WireTags {
    /// The mapping of an endpoint that sends nothing.
    fn default() -> Self {
        Self { contexts: 0, window: 1, lengths: 1 }
    }
}

impl WireTags {
    /// Divides the tags 0 to `last_tag` of MPI; `None` if a ring of `ranks` ranks needs more.
    pub(super) fn new(last_tag: u64, ranks: usize) -> Option<Self> {
        let available = (last_tag + 1) / CHANNELS;
        // tags in flight span two passes, each of up to two circulations; twice that to be safe
        let needed = 8 * overlap::tags(ranks);
        let window = needed.max(LEAST_WINDOW).min(available);
        let contexts = (available / window.max(1)).clamp(1, MOST_CONTEXTS + 1) - 1;
        (available >= needed).then(|| Self {
            contexts,
            window,
            lengths: available / ((contexts + 1) * window),
        })
    }

    /// Returns the slot of a context; `None` if MPI has too few tags for any.
    pub(super) const fn slot(&self, context: u64) -> Option<u64> {
        context.checked_rem(self.contexts)
    }

    /// Returns MPI's tag of a message of `context` that is received ahead. The context has a slot.
    pub(super) const fn ahead(&self, context: u64, message: &MessageHeader, bytes: u64) -> u64 {
        let slot = match self.slot(context) {
            Some(slot) => slot,
            None => 0,
        };
        let digest = (bytes.wrapping_mul(MULTIPLIER) >> 32) % self.lengths;
        let tag = slot * self.window + message.tag % self.window;
        (tag * self.lengths + digest) * CHANNELS + number(message.channel)
    }

    /// Returns MPI's tag of announced message number `announced` of its sender.
    pub(super) const fn announced(&self, announced: u64, channel: Channel) -> u64 {
        let numbers = self.window * self.lengths;
        (self.contexts * numbers + announced % numbers) * CHANNELS + number(channel)
    }
}

/// 2⁶⁴ divided by the golden ratio, rounded to odd: its products with small numbers differ in their
/// high bits.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the number of a channel on the wire.
pub(super) const fn number(channel: Channel) -> u64 {
    match channel {
        Channel::Kv => 0,
        Channel::PartialGrad => 1,
        Channel::FinalGrad => 2,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Arc};

    use super::*;

    #[test]
    fn messages_of_a_window_have_distinct_tags_that_mpi_has() {
        for (last_tag, ranks) in
            [(32_767, 1_361), (32_767, 2), (1 << 23, 8_000), (i32::MAX as u64, 3)]
        {
            let tags = WireTags::new(last_tag, ranks).unwrap();
            let mut seen = BTreeSet::new();
            let window = 8 * overlap::tags(ranks);
            let slots = tags.contexts;
            // contexts of distinct slots, around the end of a period of numbers
            let contexts = [0, slots / 2, slots.saturating_sub(1)].map(|number| number + 7);
            let contexts = BTreeSet::from(contexts);
            for &context in contexts.iter().filter(|&&context| tags.slot(context).is_some()) {
                for tag in u64::MAX - window..u64::MAX {
                    for channel in [Channel::Kv, Channel::PartialGrad, Channel::FinalGrad] {
                        let ranges = Arc::from([]);
                        let header =
                            MessageHeader { peer: 0, channel, tag, step: 0, ranges, agreed: None };
                        let tag = tags.ahead(context, &header, tag.wrapping_mul(977));
                        assert!(tag <= last_tag && seen.insert(tag), "{last_tag} {ranks} {tag}");
                    }
                }
            }
            for number in u64::MAX - window..u64::MAX {
                let tag = tags.announced(number, Channel::Kv);
                assert!(tag <= last_tag && seen.insert(tag), "{last_tag} {ranks} {tag}");
            }
        }
        let contexts = |last_tag, ranks| WireTags::new(last_tag, ranks).unwrap().contexts;
        assert_eq!(contexts(i32::MAX as u64, 8_000), MOST_CONTEXTS);
        assert_eq!(contexts(32_767, 2), 9);
        assert_eq!(contexts(32_767, 1_361), 0);
        assert_eq!(WireTags::new(32_767, 1_362), None);
    }

    #[test]
    fn other_lengths_have_other_tags() {
        // the tags of Open MPI
        let tags = WireTags::new(i32::MAX as u64, 16).unwrap();
        let ranges = Arc::from([]);
        let header =
            MessageHeader { peer: 0, channel: Channel::Kv, tag: 5, step: 0, ranges, agreed: None };
        let of = |bytes: u64| tags.ahead(0, &header, bytes);
        let lengths = [0, 8, 16, 1000, 1024, 70_000, 1 << 20, 1 << 30, 1 << 40];
        let distinct: BTreeSet<u64> = lengths.map(of).into();
        assert_eq!(distinct.len(), lengths.len());
        let equal = (1..100_000).filter(|bytes| of(*bytes) == of(0)).count();
        assert!(equal < 20, "{equal}");
    }
}
