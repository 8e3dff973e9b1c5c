//! Messages of every transport: their keys, the order of their receives, and their bytes, which are
//! ranges of a buffer, one after another.

use std::{collections::HashMap, ops::Range, sync::Arc};

use annulus_core::{Channel, Error, MessageHeader, Result, index};

/// Identifies a message between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MessageKey {
    pub(crate) peer: usize,
    pub(crate) channel: Channel,
    pub(crate) tag: u64,
}

impl MessageKey {
    pub(crate) const fn of(header: &MessageHeader) -> Self {
        Self { peer: header.peer, channel: header.channel, tag: header.tag }
    }

    /// Returns true if this message is to arrive before `other`.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        (self.peer, self.channel) == (other.peer, other.channel) && self.tag < other.tag
    }
}

/// Returns the error of a receive that is taken without having been posted, or twice.
pub(crate) fn not_posted(header: &MessageHeader) -> Error {
    let got = format!("{:?} {} from rank {}", header.channel, header.tag, header.peer);
    Error::invalid("header", got, "a receive that was posted and not yet taken")
}

/// A receive that is to be posted.
pub(crate) struct ReceiveRequest<'a> {
    pub(crate) header: &'a MessageHeader,
    /// Bytes of its buffer.
    pub(crate) size: u64,
    /// True if its buffer has another owner.
    pub(crate) is_shared: bool,
}

/// Tag of the last receive that was posted, by peer and channel: tags only grow.
#[derive(Debug, Default)]
pub(crate) struct LastTags(HashMap<(usize, Channel), u64>);

impl LastTags {
    /// Checks the receives of a group, sorted by their keys.
    pub(crate) fn check<'a>(
        &self,
        ranks: usize,
        receives: impl Iterator<Item = ReceiveRequest<'a>>,
    ) -> Result<()> {
        let mut previous: Option<MessageKey> = None;
        for ReceiveRequest { header, size, is_shared } in receives {
            check(header, ranks, size)?;
            let key = MessageKey::of(header);
            let follows = previous.is_none_or(|previous| {
                (previous.peer, previous.channel) != (key.peer, key.channel)
                    || previous.is_before(&key)
            });
            let MessageHeader { peer, step, channel, tag, .. } = *header;
            let what = if !follows || self.has_passed(key) {
                format!("receive {channel:?} {tag} posted after a tag as high: tags only grow")
            } else if is_shared {
                format!("the buffer of receive {channel:?} {tag} is in use")
            } else {
                previous = Some(key);
                continue;
            };
            return Err(Error::Comm { peer, step, what });
        }
        Ok(())
    }

    /// Records that a receive is posted.
    pub(crate) fn post(&mut self, header: &MessageHeader) {
        self.0.insert((header.peer, header.channel), header.tag);
    }

    /// Returns true if the receive of this message has been posted.
    pub(crate) fn has_passed(&self, key: MessageKey) -> bool {
        self.0.get(&(key.peer, key.channel)).is_some_and(|&last| key.tag <= last)
    }
}

/// Copies the bytes of the ranges `from_ranges` of `from`, one after another, into the ranges
/// `to_ranges` of `to`.
///
/// Stops where the shorter side ends; callers have compared the lengths and the bounds.
pub(crate) fn copy(
    from: &[u8],
    from_ranges: &[Range<u64>],
    to: &mut [u8],
    to_ranges: &[Range<u64>],
) {
    let mut sources = from_ranges.iter().cloned();
    let mut targets = to_ranges.iter().cloned();
    let mut source = 0..0;
    let mut target = 0..0;
    loop {
        while source.start == source.end {
            let Some(next) = sources.next() else { return };
            source = next;
        }
        while target.start == target.end {
            let Some(next) = targets.next() else { return };
            target = next;
        }
        let bytes = (source.end - source.start).min(target.end - target.start);
        to[index(target.start)..index(target.start + bytes)]
            .copy_from_slice(&from[index(source.start)..index(source.start + bytes)]);
        source.start += bytes;
        target.start += bytes;
    }
}

/// Returns the first `longest` bytes of a text, or a few less to end with a character.
pub(crate) fn cut(text: &str, longest: usize) -> &str {
    let mut ends = (0..=text.len().min(longest)).rev();
    &text[..ends.find(|&end| text.is_char_boundary(end)).unwrap_or(0)]
}

/// Removes the items of a list for which `poll` returns a value. Returns them with it, in order.
pub(crate) fn take_ready<T, R>(
    list: &mut Vec<T>,
    mut poll: impl FnMut(&mut T) -> Result<Option<R>>,
) -> Result<Vec<(T, R)>> {
    let mut ready = Vec::new();
    let mut index = 0;
    while let Some(item) = list.get_mut(index) {
        match poll(item)? {
            Some(value) => ready.push((list.remove(index), value)),
            None => index += 1,
        }
    }
    Ok(ready)
}

/// The error that has ended an endpoint: every later call returns it.
#[derive(Debug, Default)]
pub(crate) struct Failure(Option<Error>);

impl Failure {
    /// Returns the error, if the endpoint has ended.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.clone().map_or(Ok(()), Err)
    }

    /// Records the error of a call, if it is fatal and the first.
    pub(crate) fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            if error.is_fatal() {
                self.end(error);
            }
        })
    }

    /// Ends the endpoint with an error, unless another one has.
    pub(crate) fn end(&mut self, error: &Error) {
        self.0.get_or_insert_with(|| error.clone());
    }
}

/// Returns the one range of a message of `bytes` bytes at the front of a buffer.
pub(crate) fn front(bytes: u64) -> Arc<[Range<u64>]> {
    std::iter::once(0..bytes).collect()
}

/// Checks that a message can be posted: its peer is a rank of this ring, and its ranges lie in a
/// buffer of `size` bytes.
pub(crate) fn check(header: &MessageHeader, ranks: usize, size: u64) -> Result<()> {
    if header.peer >= ranks {
        return Err(Error::invalid("header.peer", header.peer, format!("a rank below {ranks}")));
    }
    match header.ranges.iter().find(|range| range.start > range.end || range.end > size) {
        Some(range) => Err(Error::invalid(
            "header.ranges",
            format!("{range:?}"),
            format!("ascending ranges within {size} bytes"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_side_may_divide_the_bytes() {
        let from: Vec<u8> = (0..20).collect();
        let mut to = vec![0; 12];
        copy(&from, &[1..4, 4..4, 10..16], &mut to, &[0..0, 2..7, 8..12]);
        assert_eq!(to, [0, 0, 1, 2, 3, 10, 11, 0, 12, 13, 14, 15]);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(cut("éé", 4), "éé");
        assert_eq!(cut("xéé", 4), "xé");
    }

    #[test]
    fn empty_ranges_copy_nothing() {
        let mut to = [7; 2];
        copy(&[1, 2], std::slice::from_ref(&(1..1)), &mut to, &[]);
        assert_eq!(to, [7, 7]);
    }
}
