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

use annulus_core::{BackwardPass, Channel, Error, Incoming, MessageHeader, Result, Space};

use super::{
    buffers::Places,
    in_flight::InFlight,
    program::{HomeReduce, RankStep},
};

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
