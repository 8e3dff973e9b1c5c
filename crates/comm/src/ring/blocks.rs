//! The blocks of one travelling pass: the one at hand, the one that arrives, and which buffer is free when.

use annulus_core::{Arrived, Result, Route, Space};

use super::{buffers::spare, flight::Flight, legs::Transfers};

/// A relay needs two buffers (at hand, arriving) and recycles the home block as soon as it is sent; a direct route keeps the home
/// block, from which alone it sends, and needs three.
pub(super) struct Blocks<'a, S: Space> {
    stock: &'a mut Vec<S::Buffer>,
    home: Option<(S::Buffer, S::Event)>,
    here: Option<(S::Buffer, S::Event)>,
    next: Option<(S::Buffer, S::Event)>,
    first: bool,
}

impl<'a, S: Space> Blocks<'a, S> {
    /// Starts with the home block, packed and `ready`.
    pub(super) fn new(home: S::Buffer, ready: S::Event, route: Route, stock: &'a mut Vec<S::Buffer>) -> Self {
        let kept = (route == Route::Direct).then(|| (home.clone(), ready.clone()));
        Self { stock, home: kept, here: Some((home, ready)), next: None, first: true }
    }

    /// Posts the transfers that bring the next step's block.
    pub(super) fn post_next(&mut self, transfers: &Transfers, flight: &mut Flight<'_, S>) -> Result<()> {
        let source = self.home.as_ref().or(self.here.as_ref());
        flight.post(transfers, source, |hop| spare::<S>(self.stock, hop.bytes()))
    }

    /// The block at hand; `None` if this step has none.
    pub(super) fn here(&self) -> Option<(&S::Buffer, &S::Event)> {
        self.here.as_ref().map(|(buffer, ready)| (buffer, ready))
    }

    /// Takes the next step's block.
    pub(super) fn arrive(&mut self, arrived: Arrived<S>) {
        self.next = Some((arrived.buffer, arrived.ready));
    }

    /// Takes back the buffer of a part that has been attended.
    pub(super) fn give(&mut self, buffer: S::Buffer) {
        self.stock.push(buffer);
    }

    /// Ends a step: everything posted has landed, so the block at hand is free, unless it is the kept home block.
    pub(super) fn advance(&mut self) {
        let done = std::mem::replace(&mut self.here, self.next.take());
        let kept = std::mem::replace(&mut self.first, false) && self.home.is_some();
        if let Some((buffer, _)) = done.filter(|_| !kept) {
            self.stock.push(buffer);
        }
    }

    /// Ends the pass: every buffer is back in the stock.
    pub(super) fn put_back(self) {
        self.stock.extend(self.home.into_iter().chain(self.here).map(|(buffer, _)| buffer));
    }
}
