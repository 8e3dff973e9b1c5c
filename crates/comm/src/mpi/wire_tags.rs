//! MPI's tags of blocks.

use annulus_core::{Channel, MessageHeader};

use crate::ring::block_parts;

/// Number of channels.
const CHANNELS: u64 = 3;

/// Least number of message tags that are distinct at a time, where MPI has enough.
const LEAST_WINDOW: u64 = 1 << 10;

/// Mapping of messages to MPI's tags: `((tag mod window)·lengths + digest of the length)·3 +
/// channel`.
///
/// A message whose length differs from that of its receive has another tag as a rule, and does not
/// match it. Lengths are compared by other means, too: this is a second guard of the memory behind
/// a receive, for which MPI may have no check of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WireTags {
    /// Number of message tags that are distinct on the wire.
    window: u64,
    /// Number of digests of a length.
    lengths: u64,
}

impl Default for WireTags {
    /// The mapping of an endpoint that sends nothing.
    fn default() -> Self {
        Self { window: 1, lengths: 1 }
    }
}

impl WireTags {
    /// Divides the tags 0 to `last_tag` of MPI; `None` if a ring of `ranks` ranks needs more.
    pub(super) fn new(last_tag: u64, ranks: usize) -> Option<Self> {
        let available = (last_tag + 1) / CHANNELS;
        // tags in flight span two passes, each of up to two circulations; twice that to be safe
        let needed = 8 * block_parts::tags(ranks);
        let window = needed.max(LEAST_WINDOW).min(available);
        (available >= needed).then(|| Self { window, lengths: available / window })
    }

    /// Returns MPI's tag of a message.
    pub(super) const fn of(&self, message: &MessageHeader, bytes: u64) -> u64 {
        let digest = (bytes.wrapping_mul(MULTIPLIER) >> 32) % self.lengths;
        (message.tag % self.window * self.lengths + digest) * CHANNELS + number(message.channel)
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
            for tag in u64::MAX - 8 * block_parts::tags(ranks)..u64::MAX {
                for channel in [Channel::Kv, Channel::PartialGrad, Channel::FinalGrad] {
                    let ranges = Arc::from([]);
                    let header =
                        MessageHeader { peer: 0, channel, tag, step: 0, ranges, agreed: None };
                    let tag = tags.of(&header, tag.wrapping_mul(977));
                    assert!(tag <= last_tag && seen.insert(tag), "{last_tag} {ranks} {tag}");
                }
            }
        }
        assert_eq!(WireTags::new(32_767, 1_362), None);
    }

    #[test]
    fn other_lengths_have_other_tags() {
        // the tags of Open MPI
        let tags = WireTags::new(i32::MAX as u64, 16).unwrap();
        let ranges = Arc::from([]);
        let header =
            MessageHeader { peer: 0, channel: Channel::Kv, tag: 5, step: 0, ranges, agreed: None };
        let of = |bytes: u64| tags.of(&header, bytes);
        let lengths = [0, 8, 16, 1000, 1024, 70_000, 1 << 20, 1 << 30, 1 << 40];
        let distinct: BTreeSet<u64> = lengths.map(of).into();
        assert_eq!(distinct.len(), lengths.len());
        let equal = (1..100_000).filter(|bytes| of(*bytes) == of(0)).count();
        assert!(equal < 5, "{equal}");
    }
}
