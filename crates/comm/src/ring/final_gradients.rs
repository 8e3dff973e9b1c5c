//! Final gradients that arrive, and their reduction into the local dK/dV.
//!
//! They are reduced in the order of their steps, which fixes the bits, whenever the rank computes
//! no tile: at the end of a step, and in every wait. No step waits for one. Its receive is posted
//! once its place is free, the first ones at the start of the pass, so that a rank that is ahead
//! need not wait for the owner of its keys.
//!
//! No rank waits forever. Of all ranks consider one in the earliest step. What it waits for was
//! sent in earlier steps, or is a sum of an earlier step that it sends to an owner. That owner has
//! places for the final gradients before it, all of which are of earlier steps and so have been
//! sent; it reduces them, in whatever step it is, and posts the receive of this one.
//!
//! A transport that runs groups in order gets the receive in the group of its step, which waits for
//! its place.
//!
//! The first records of a row are copied, which initialises the row, and all others are added.

use std::ops::Range;

use annulus_core::{
    Arrived, BackwardPass, Channel, Error, Incoming, MessageHeader, Reduction, Result, RowSet,
    Space,
};

use super::{buffers::Places, in_flight::InFlight, program::RankStep};

/// The final gradients of a pass.
pub(super) struct FinalGradients<'a, S: Space> {
    places: &'a mut Places<S>,
    /// All messages of the pass in the order of their steps.
    messages: Vec<(MessageHeader, &'a HomeReduce)>,
    posted: usize,
    reduced: usize,
    /// True if a receive is posted with the group of its step.
    whole_groups: bool,
}

impl<'a, S: Space> FinalGradients<'a, S> {
    /// Lists the final gradients of `steps`, whose messages have the tags of `in_flight`.
    pub(super) fn new(
        steps: &'a [RankStep],
        in_flight: &InFlight<'_, S>,
        places: &'a mut Places<S>,
        whole_groups: bool,
    ) -> Self {
        let of_step = |step: &'a RankStep| {
            let messages = step.gradients.receives.iter();
            let finals = messages.filter(|message| message.channel == Channel::FinalGrad);
            finals.zip(&step.home_reduces)
        };
        let messages = steps.iter().flat_map(of_step);
        let messages = messages.map(|(message, reduce)| (in_flight.tagged(message), reduce));
        Self { places, messages: messages.collect(), posted: 0, reduced: 0, whole_groups }
    }

    /// Posts the receives whose places are free, unless they are posted with their groups.
    pub(super) fn post(&mut self, in_flight: &mut InFlight<'_, S>) -> Result<()> {
        let mut receives = Vec::new();
        while !self.whole_groups && self.posted < self.messages.len() && self.has_place() {
            receives.push(self.take()?);
        }
        in_flight.start(&[], None, receives)
    }

    /// Returns the receive of the next final gradient, whose group is posted; waits until its place
    /// is free.
    pub(super) fn next_of_group<P: BackwardPass<S>>(
        &mut self,
        pass: &mut P,
        local_dkv: &mut S::Buffer,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<Incoming<S>> {
        if !self.has_place() {
            in_flight.wait_until(|in_flight| {
                self.advance(pass, local_dkv, in_flight)?;
                Ok(self.has_place().then_some(()))
            })?;
        }
        self.take()
    }

    /// Reduces the final gradients that have arrived, and posts the receives whose places are free.
    pub(super) fn advance<P: BackwardPass<S>>(
        &mut self,
        pass: &mut P,
        local_dkv: &mut S::Buffer,
        in_flight: &mut InFlight<'_, S>,
    ) -> Result<()> {
        while let Some((message, reduce)) = self.messages[..self.posted].get(self.reduced) {
            let Some(arrived) = in_flight.take(message)? else { break };
            reduce.run(pass, local_dkv, &arrived)?;
            self.places.put(self.place(self.reduced), arrived.buffer);
            self.reduced += 1;
        }
        self.post(in_flight)
    }

    /// Returns true if all have been reduced.
    pub(super) const fn is_done(&self) -> bool {
        self.reduced == self.messages.len()
    }

    fn place(&self, number: usize) -> usize {
        number % self.places.len().max(1)
    }

    fn has_place(&self) -> bool {
        self.places.is_free(self.place(self.posted))
    }

    /// Takes the receive of the next final gradient.
    fn take(&mut self) -> Result<Incoming<S>> {
        let none = || Error::internal("more final gradients than the plan has");
        let (header, _) = self.messages.get(self.posted).ok_or_else(none)?;
        let header = header.clone();
        let buffer = self.places.take(self.place(self.posted))?;
        self.posted += 1;
        Ok(Incoming { header, buffer })
    }
}

/// Pairs `(into, from)` of ranges of record numbers, of equal lengths.
pub(crate) type RangePairs = Vec<(Range<u64>, Range<u64>)>;

/// A reduction of the gradient records of one message into the local dK/dV.
#[derive(Debug, Default)]
pub(crate) struct HomeReduce {
    /// Records that are the first of their rows.
    pub(crate) copied: RangePairs,
    /// All other records.
    pub(crate) added: RangePairs,
}

impl HomeReduce {
    /// Splits `pairs` by whether their rows are `unwritten`, and removes them from that set.
    pub(super) fn split(pairs: RangePairs, unwritten: &mut RowSet) -> Self {
        let mut reduce = Self::default();
        for (into, from) in pairs {
            let mut next = into.start;
            let from_of = |rows: &Range<u64>| {
                from.start + (rows.start - into.start)..from.start + (rows.end - into.start)
            };
            let begin = unwritten.ranges().partition_point(|range| range.end <= into.start);
            for range in
                unwritten.ranges()[begin..].iter().take_while(|range| range.start < into.end)
            {
                let copied = range.start.max(into.start)..range.end.min(into.end);
                if next < copied.start {
                    reduce.added.push((next..copied.start, from_of(&(next..copied.start))));
                }
                next = copied.end;
                reduce.copied.push((copied.clone(), from_of(&copied)));
            }
            if next < into.end {
                reduce.added.push((next..into.end, from_of(&(next..into.end))));
            }
        }
        *unwritten =
            unwritten.difference(&reduce.copied.iter().map(|(into, _)| into.clone()).collect());
        reduce
    }

    /// Reduces the records of a buffer into the local dK/dV.
    pub(super) fn run<S: Space>(
        &self,
        pass: &mut impl BackwardPass<S>,
        local_dkv: &mut S::Buffer,
        arrived: &Arrived<S>,
    ) -> Result<()> {
        let Arrived { buffer, ready } = arrived;
        for (pairs, reduction) in [(&self.copied, Reduction::Copy), (&self.added, Reduction::Add)] {
            if !pairs.is_empty() {
                pass.reduce(local_dkv, buffer, ready, pairs, reduction)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[Range<u64>]) -> RowSet {
        ranges.iter().cloned().collect()
    }

    #[test]
    fn the_first_records_of_a_row_are_copied_and_all_others_added() {
        let mut unwritten = set(&[4..8, 10..20]);
        // a message with rows 2..6 and 7..12, as records 0..4 and 4..9
        let first = HomeReduce::split(vec![(2..6, 0..4), (7..12, 4..9)], &mut unwritten);
        assert_eq!(first.copied, [(4..6, 2..4), (7..8, 4..5), (10..12, 7..9)]);
        assert_eq!(first.added, [(2..4, 0..2), (8..10, 5..7)]);
        assert_eq!(unwritten, set(&[6..7, 12..20]));
        let again = HomeReduce::split(vec![(4..7, 0..3)], &mut unwritten);
        assert_eq!((again.copied, again.added), (vec![(6..7, 2..3)], vec![(4..6, 0..2)]));
        let rest = HomeReduce::split(vec![(12..20, 0..8)], &mut unwritten);
        assert!(rest.added.is_empty() && rest.copied == [(12..20, 0..8)] && unwritten.is_empty());
    }
}
