//! Receives of one kind of memory: when they were posted, and what has arrived.

use std::time::Instant;

use annulus_core::{Arrived, MessageHeader, Result, Space};

use crate::staging::is_same_message;

/// Receives that were posted and not yet taken by the caller.
pub(super) struct Receives<S: Space> {
    /// Those that had not arrived at the last poll, with the times of their posts.
    posted: Vec<(MessageHeader, Instant)>,
    arrived: Vec<(MessageHeader, Arrived<S>)>,
}

impl<S: Space> Default for Receives<S> {
    fn default() -> Self {
        Self { posted: Vec::new(), arrived: Vec::new() }
    }
}

impl<S: Space> Receives<S> {
    /// Adds receives that are posted now.
    pub(super) fn post(&mut self, headers: Vec<MessageHeader>, now: Instant) {
        self.posted.extend(headers.into_iter().map(|header| (header, now)));
    }

    /// Takes all receives that have arrived from the inner transport, by `take`.
    pub(super) fn collect(
        &mut self,
        mut take: impl FnMut(&MessageHeader) -> Result<Option<Arrived<S>>>,
    ) -> Result<()> {
        let mut position = 0;
        while let Some((header, _)) = self.posted.get(position) {
            match take(header)? {
                Some(arrived) => {
                    let (header, _) = self.posted.swap_remove(position);
                    self.arrived.push((header, arrived));
                }
                None => position += 1,
            }
        }
        Ok(())
    }

    /// Returns a receive that has arrived, by the last poll or now, by `take`.
    pub(super) fn take(
        &mut self,
        header: &MessageHeader,
        take: impl FnOnce(&MessageHeader) -> Result<Option<Arrived<S>>>,
    ) -> Result<Option<Arrived<S>>> {
        let same = |other: &MessageHeader| is_same_message(other, header);
        if let Some(position) = self.arrived.iter().position(|(other, _)| same(other)) {
            return Ok(Some(self.arrived.swap_remove(position).1));
        }
        let taken = take(header)?;
        if taken.is_some() {
            self.posted.retain(|(other, _)| !same(other));
        }
        Ok(taken)
    }

    /// Returns the receives that had not arrived at the last poll, with the times of their posts.
    pub(super) fn waiting(&self) -> &[(MessageHeader, Instant)] {
        &self.posted
    }
}
