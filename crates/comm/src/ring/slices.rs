//! Reduce-scatter of numbers of which every rank has a summand. Each rank sums one slice of them.
//!
//! ```text
//! for distances d = 1 to ranks − 1, a few at a time:
//!     send the slice of ring index own + d to its rank
//!     receive the own slice of the rank at ring index own − d
//! sum of the own slice = terms of all ranks in ring order
//! ```
//! Sums do not depend on the order of arrival, because all terms are kept until then: as many
//! numbers as are summed at once.
//!
//! # Source
//! Reduce-scatter and all-gather as the halves of an all-reduce: Rabenseifner 2004, Optimization of
//! Collective Reduction Operations.

use std::ops::Range;

use annulus_core::{Arrived, Channel, Host, HostBuffer, MessageHeader, Order, Result, memory};

use super::{in_flight::InFlight, program::MessageGroup};
use crate::agreement::SUMMANDS_PER_GATHER;

/// Most numbers that are summed at once: 8 MiB, of which a rank keeps some copies.
const MOST_SUMMANDS: usize = 1 << 20;

/// Distances whose messages are in flight at a time: several, to hide their latency, and few, so
/// that no rank receives from all others at once.
const DISTANCES_AT_ONCE: usize = 8;

/// Division of sums over the ranks of a plan into slices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slicing {
    ranks: usize,
    is_sliced: bool,
}

impl Slicing {
    pub(crate) const fn new(ranks: usize) -> Self {
        // two ranks would send as much as whole sums
        Self { ranks, is_sliced: ranks > 2 }
    }

    /// Returns the numbers that are summed at once. A slice has then as many as are gathered whole
    /// otherwise, or fewer on many ranks.
    pub(crate) fn numbers_at_once(&self) -> usize {
        match self.is_sliced {
            true => self.ranks.saturating_mul(SUMMANDS_PER_GATHER).min(MOST_SUMMANDS),
            false => SUMMANDS_PER_GATHER,
        }
    }

    /// Returns the slices of `len` numbers, or `None` if every rank sums all of them.
    pub(super) fn slices(&self, len: usize) -> Option<Slices> {
        (self.is_sliced && len > SUMMANDS_PER_GATHER).then(|| Slices::new(len, self.ranks))
    }

    /// Returns the slices of a sum of any number of numbers.
    pub(crate) fn of_sum(self, numbers: usize) -> impl Iterator<Item = Slices> {
        let chunk = self.numbers_at_once();
        let chunks = (0..numbers).step_by(chunk).map(move |at| chunk.min(numbers - at));
        chunks.filter_map(move |len| self.slices(len))
    }
}

/// Slices of `len` numbers, one for each ring index, as equal as possible.
pub(crate) struct Slices {
    len: usize,
    ranks: usize,
}

impl Slices {
    pub(super) const fn new(len: usize, ranks: usize) -> Self {
        Self { len, ranks }
    }

    /// Returns the numbers of the slice of a ring index.
    pub(super) fn range(&self, ring_index: usize) -> Range<usize> {
        // the product fits: a sum has at most `MOST_SUMMANDS` numbers
        let start = |index: usize| self.len * index / self.ranks;
        start(ring_index)..start(ring_index + 1)
    }

    /// Returns the bytes that the rank at a ring index sends.
    pub(crate) fn bytes_sent(&self, ring_index: usize) -> u64 {
        8 * (self.len - self.range(ring_index).len()) as u64
    }
}

/// The messages of one rank.
pub(crate) struct SliceExchange<'a> {
    slices: &'a Slices,
    order: &'a Order,
    ring_index: usize,
    /// Ring step, for errors and events.
    step: usize,
}

impl<'a> SliceExchange<'a> {
    pub(crate) fn new(slices: &'a Slices, order: &'a Order, rank: usize, step: usize) -> Self {
        Self { slices, order, ring_index: order.ring_index(rank), step }
    }

    /// Adds the terms of all ranks to `sum`, of which `terms` are this rank's for all slices.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// Those of the transport; [`Error::OutOfMemory`](annulus_core::Error::OutOfMemory).
    pub(super) fn sum(
        &self,
        in_flight: &mut InFlight<'_, Host>,
        terms: &[f64],
        sum: &mut [f64],
    ) -> Result<()> {
        let ranks = self.slices.ranks;
        let mut packed = HostBuffer::zeroed(8 * terms.len() as u64)?;
        let bytes = packed.bytes_mut().unwrap_or_default();
        for (into, term) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(terms) {
            *into = term.to_le_bytes();
        }
        let source = (packed, ());
        in_flight.start_step(self.step);
        let mut arrived: Vec<Option<Arrived<Host>>> = memory::list("slices of a sum", ranks)?;
        arrived.resize_with(ranks, || None);
        let mut next = 1;
        while next < ranks {
            let distances = next..ranks.min(next + DISTANCES_AT_ONCE);
            next = distances.end;
            let transfers = self.transfers(distances);
            let receive = |header: &MessageHeader| HostBuffer::zeroed(header.bytes());
            in_flight.post(&transfers, Some(&source), receive)?;
            for (header, message) in in_flight.wait_all()? {
                arrived[self.order.ring_index(header.peer)] = Some(message);
            }
        }
        let own = self.slices.range(self.ring_index);
        let own_bytes = source.0.bytes();
        for (ring_index, arrived) in arrived.iter().enumerate() {
            let bytes = match arrived {
                Some(message) => message.buffer.bytes(),
                None if ring_index == self.ring_index => &own_bytes[8 * own.start..8 * own.end],
                // an empty slice has no message
                None => &[],
            };
            add(sum, bytes);
        }
        Ok(())
    }

    /// Returns all messages.
    pub(crate) fn all_transfers(&self) -> MessageGroup {
        self.transfers(1..self.slices.ranks)
    }

    /// Returns the messages of some distances. Slices without numbers have none.
    fn transfers(&self, distances: Range<usize>) -> MessageGroup {
        let header = |ring_index: usize, bytes| MessageHeader {
            peer: self.order.rank(ring_index),
            channel: Channel::FinalGrad,
            tag: 0,
            step: self.step,
            ranges: std::iter::once(bytes).collect(),
            agreed: None,
        };
        let own = 8 * self.slices.range(self.ring_index).len() as u64;
        let members = [self.ring_index, self.slices.ranks];
        MessageGroup::exchange(members, distances, header, |ring_index| {
            let slice = self.slices.range(ring_index);
            [8 * slice.start as u64..8 * slice.end as u64, 0..own]
        })
    }
}

/// Adds the numbers that `bytes` encode.
pub(super) fn add(sums: &mut [f64], bytes: &[u8]) {
    let numbers = bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_all_numbers_once_and_differ_by_one_at_most() {
        for ranks in [1, 3, 7, 64, 1000] {
            for len in [0, 1, 6, 63, 8193, MOST_SUMMANDS] {
                let slices = Slices::new(len, ranks);
                let mut next = 0;
                for index in 0..ranks {
                    let range = slices.range(index);
                    assert_eq!(range.start, next);
                    assert!(range.len() == len / ranks || range.len() == len.div_ceil(ranks));
                    next = range.end;
                }
                assert_eq!(next, len);
                let sent: u64 = (0..ranks).map(|index| slices.bytes_sent(index)).sum();
                assert_eq!(sent, 8 * (ranks as u64 - 1) * len as u64);
            }
        }
        assert_eq!(Slicing::new(2).numbers_at_once(), SUMMANDS_PER_GATHER);
        assert_eq!(Slicing::new(3).numbers_at_once(), 3 * SUMMANDS_PER_GATHER);
        assert_eq!(Slicing::new(5000).numbers_at_once(), MOST_SUMMANDS);
    }
}
