//! Staging buffers in host memory, and receives that go through one.

use annulus_core::{Host, HostBuffer, MessageHeader, Result, Space};

/// A receive into a buffer of the space `S` by way of a staging buffer.
pub(crate) struct StagedReceive<S: Space> {
    /// The message as the caller posted it.
    pub(crate) header: MessageHeader,
    /// The buffer that the caller posted.
    pub(crate) buffer: S::Buffer,
    /// The message as the inner transport receives it, at the front of the staging buffer.
    pub(crate) staged: MessageHeader,
}

/// Returns true if both name the same message: peer, channel and tag are equal.
pub(crate) fn is_same_message(a: &MessageHeader, b: &MessageHeader) -> bool {
    (a.peer, a.channel, a.tag) == (b.peer, b.channel, b.tag)
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
    pub(crate) fn take(&mut self, bytes: u64) -> Result<HostBuffer> {
        self.take_or(bytes, HostBuffer::zeroed)
    }

    /// As [`Staging::take`]; `allocate` makes a new buffer.
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
