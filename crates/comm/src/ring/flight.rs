//! What is in flight, and the only place where the ring waits.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use annulus_core::{Arrived, Error, Hop, Incoming, Outgoing, Result, Space, Transport};

use super::legs::Transfers;

/// How often a kernel's tick moves data: often enough to keep a network busy, seldom enough to cost nothing.
const TICK_EVERY: Duration = Duration::from_micros(200);
/// How long one wait sleeps before it looks at its deadline again.
const PATIENCE: Duration = Duration::from_millis(20);

/// Transfers of one call between posting and taking.
pub(crate) struct Flight<'a, S: Space> {
    transport: &'a mut dyn Transport<S>,
    first_tag: u64,
    expected: Vec<Hop>,
    incoming: Vec<Incoming<S>>,
    last_tick: Instant,
    failure: Option<Error>,
    /// Time spent waiting so far.
    pub(crate) waited: Duration,
}

impl<'a, S: Space> Flight<'a, S> {
    /// Nothing in flight. Tags of this pass start at `first_tag`.
    pub(crate) fn new(transport: &'a mut dyn Transport<S>, first_tag: u64) -> Self {
        Self {
            transport,
            first_tag,
            expected: Vec::new(),
            incoming: Vec::new(),
            last_tick: Instant::now(),
            failure: None,
            waited: Duration::ZERO,
        }
    }

    /// Posts one group: every send from `source` (needed only if there are sends), every receive into a buffer from `spare`.
    pub(crate) fn post(
        &mut self,
        transfers: &Transfers,
        source: Option<&(S::Buffer, S::Event)>,
        mut spare: impl FnMut(&Hop) -> Result<S::Buffer>,
    ) -> Result<()> {
        if transfers.sends.is_empty() && transfers.receives.is_empty() {
            return Ok(());
        }
        let tagged = |hop: &Hop| Hop { tag: hop.tag + self.first_tag, ..hop.clone() };
        for hop in &transfers.receives {
            let buffer = spare(hop)?;
            let hop = tagged(hop);
            self.expected.push(hop.clone());
            self.incoming.push(Incoming { hop, buffer });
        }
        let mut sends = Vec::with_capacity(transfers.sends.len());
        for hop in &transfers.sends {
            let Some((buffer, ready)) = source else {
                return Err(Error::Device { what: format!("nothing to send to rank {} in step {}", hop.peer, hop.step) });
            };
            sends.push(Outgoing { hop: tagged(hop), buffer, ready });
        }
        self.transport.post(&sends, &mut self.incoming)
    }

    /// The kernel's tick: moves data now and then; breaks once something has failed.
    pub(crate) fn tick(&mut self) -> ControlFlow<()> {
        if self.failure.is_some() {
            return ControlFlow::Break(());
        }
        if self.last_tick.elapsed() < TICK_EVERY {
            return ControlFlow::Continue(());
        }
        self.last_tick = Instant::now();
        self.transport.control().beat(true);
        match self.transport.progress(Duration::ZERO) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.failure = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    /// What broke the last kernel's tick, if anything did.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until the first receive that was posted has arrived.
    pub(crate) fn land_next(&mut self) -> Result<Arrived<S>> {
        self.check()?;
        self.transport.control().beat(true);
        let Some(hop) = self.expected.first() else {
            return Err(Error::Device { what: "nothing is on its way (a defect of the schedule)".into() });
        };
        let start = Instant::now();
        let mut patience = Duration::ZERO;
        let arrived = loop {
            self.transport.progress(patience)?;
            if let Some(arrived) = self.transport.take(hop)? {
                break arrived;
            }
            patience = PATIENCE;
        };
        self.waited += start.elapsed();
        self.expected.remove(0);
        Ok(arrived)
    }

    /// Waits until every posted receive has arrived and every send is gone. Arrivals come in the order in which they were posted.
    pub(crate) fn land(&mut self) -> Result<Vec<(Hop, Arrived<S>)>> {
        self.check()?;
        self.transport.control().beat(true);
        let start = Instant::now();
        let mut landed: Vec<Option<Arrived<S>>> = self.expected.iter().map(|_| None).collect();
        let mut patience = Duration::ZERO;
        loop {
            self.transport.progress(patience)?;
            for (hop, place) in self.expected.iter().zip(&mut landed).filter(|(_, place)| place.is_none()) {
                *place = self.transport.take(hop)?;
            }
            if landed.iter().all(Option::is_some) && !self.transport.pending() {
                break;
            }
            patience = PATIENCE;
        }
        self.waited += start.elapsed();
        Ok(self.expected.drain(..).zip(landed.into_iter().flatten()).collect())
    }
}
