//! Host buffers between the caller's and the wire, used again and again.

use annulus_core::{Host, HostBuffer, Result, Space};

/// Buffers that a wrapper owns. On a warm plan none is allocated: each serves the next message that fits.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    free: Vec<HostBuffer>,
    /// Somebody else may still co-own these.
    lent: Vec<HostBuffer>,
}

impl Staging {
    /// A buffer of at least `bytes` bytes that nobody else owns; the smallest there is.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<HostBuffer> {
        self.free.extend(self.lent.extract_if(.., |buffer| !buffer.is_shared()));
        let fitting =
            self.free.iter().enumerate().filter(|(_, buffer)| Host::size(buffer) >= bytes);
        match fitting.min_by_key(|(_, buffer)| Host::size(buffer)) {
            Some((place, _)) => Ok(self.free.swap_remove(place)),
            None => HostBuffer::zeroed(bytes),
        }
    }

    /// Gives back a buffer that nobody else owns.
    pub(crate) fn give(&mut self, buffer: HostBuffer) {
        self.free.push(buffer);
    }

    /// Gives back a buffer that others may still read.
    pub(crate) fn lend(&mut self, buffer: HostBuffer) {
        self.lent.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_fits_and_is_free_serves_again() {
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
