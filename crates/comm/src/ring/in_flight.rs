//! Transfers in flight, and the only place where the ring waits.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use annulus_core::{
    AgreedLengths, Arrived, Error, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use crate::span::span;

use super::{program::Transfers, step_events::Observer};

/// Minimum time between two polls of the transport by a kernel's tick. Kernels tick after every
/// tile, which may take only some microseconds, in which a poll has little to move.
const TICK_INTERVAL: Duration = Duration::from_micros(200);
/// Longest time of one wait, after which deadlines are checked again.
const PATIENCE: Duration = Duration::from_millis(20);

/// Transfers of one pass that have been posted and not yet completed.
pub(crate) struct InFlight<'a, S: Space> {
    transport: &'a mut dyn Transport<S>,
    first_tag: u64,
    /// Proof for all messages of the pass.
    lengths: Option<AgreedLengths>,
    expected: Vec<MessageHeader>,
    incoming: Vec<Incoming<S>>,
    last_tick: Instant,
    failure: Option<Error>,
    /// Exposed communication so far.
    waited: Duration,
    /// Ring step, for events.
    step: usize,
    /// Step, bytes and time of the posts of messages that are being sent, for events.
    posts: Vec<(usize, u64, Instant)>,
    observer: Observer<'a>,
}

impl<'a, S: Space> InFlight<'a, S> {
    /// Starts with nothing in flight. Tags of the pass start at `first_tag`; `lengths` proves that
    /// all of its messages match.
    pub(crate) fn new(
        transport: &'a mut dyn Transport<S>,
        first_tag: u64,
        lengths: Option<AgreedLengths>,
        observer: Observer<'a>,
    ) -> Self {
        Self {
            transport,
            first_tag,
            lengths,
            expected: Vec::new(),
            incoming: Vec::new(),
            last_tick: Instant::now(),
            failure: None,
            waited: Duration::ZERO,
            step: 0,
            posts: Vec::new(),
            observer,
        }
    }

    /// Starts a ring step.
    pub(crate) fn start_step(&mut self, step: usize) {
        self.step = step;
    }

    /// Runs the tiles of a block of `owner`, or of a part of it: `rows` of its `block_rows` rows.
    pub(crate) fn compute<T>(
        &mut self,
        owner: usize,
        rows: [u64; 2],
        tiles: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let began = self.observer.now();
        let result = tiles(self)?;
        self.observer.computed(self.step, owner, rows, began);
        Ok(result)
    }

    /// Posts one group: every send from `source` (required if there are sends), every receive into
    /// a buffer from `take_buffer`.
    pub(crate) fn post(
        &mut self,
        transfers: &Transfers,
        source: Option<&(S::Buffer, S::Event)>,
        mut take_buffer: impl FnMut(&MessageHeader) -> Result<S::Buffer>,
    ) -> Result<()> {
        if transfers.sends.is_empty() && transfers.receives.is_empty() {
            return Ok(());
        }
        let tagged = |header: &MessageHeader| MessageHeader {
            tag: header.tag + self.first_tag,
            agreed: self.lengths,
            ..header.clone()
        };
        for header in &transfers.receives {
            let buffer = take_buffer(header)?;
            let header = tagged(header);
            self.expected.push(header.clone());
            self.incoming.push(Incoming { header, buffer });
        }
        let mut sends = Vec::with_capacity(transfers.sends.len());
        for header in &transfers.sends {
            let Some((buffer, ready)) = source else {
                return Err(Error::internal(format!(
                    "nothing to send to rank {} in step {}",
                    header.peer, header.step
                )));
            };
            sends.push(Outgoing { header: tagged(header), buffer, ready });
        }
        if let Some(now) = self.observer.now().filter(|_| !sends.is_empty()) {
            self.posts.push((self.step, transfers.bytes_sent(), now));
        }
        self.transport.post(&sends, &mut self.incoming)
    }

    /// Tick of a kernel: polls the transport, and breaks once a transfer has failed.
    pub(crate) fn tick(&mut self) -> ControlFlow<()> {
        if self.failure.is_some() {
            return ControlFlow::Break(());
        }
        if self.last_tick.elapsed() < TICK_INTERVAL {
            return ControlFlow::Continue(());
        }
        self.last_tick = Instant::now();
        self.transport.control().heartbeat(true);
        match self.transport.progress(Duration::ZERO) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.failure = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    /// Returns the error that broke a kernel's tick, if any.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Waits for the receive that was posted first.
    pub(crate) fn wait_next(&mut self) -> Result<Arrived<S>> {
        span!("wait");
        self.check()?;
        self.transport.control().heartbeat(true);
        let Some(header) = self.expected.first() else {
            return Err(Error::internal("the schedule waits for a message that was not posted"));
        };
        let start = Instant::now();
        let mut patience = Duration::ZERO;
        let arrived = loop {
            self.transport.progress(patience)?;
            if let Some(arrived) = self.transport.take(header)? {
                break arrived;
            }
            patience = PATIENCE;
        };
        self.waited += start.elapsed();
        self.observer.waited(self.step, start);
        self.expected.remove(0);
        Ok(arrived)
    }

    /// Waits for all receives and sends. Returns the receives in the order in which they were
    /// posted.
    pub(crate) fn wait_all(&mut self) -> Result<Vec<(MessageHeader, Arrived<S>)>> {
        span!("wait");
        self.check()?;
        self.transport.control().heartbeat(true);
        let start = Instant::now();
        let awaits_any = !self.expected.is_empty() || self.transport.pending();
        let mut arrived: Vec<Option<Arrived<S>>> = self.expected.iter().map(|_| None).collect();
        let mut patience = Duration::ZERO;
        loop {
            self.transport.progress(patience)?;
            for (header, slot) in
                self.expected.iter().zip(&mut arrived).filter(|(_, slot)| slot.is_none())
            {
                *slot = self.transport.take(header)?;
            }
            if arrived.iter().all(Option::is_some) && !self.transport.pending() {
                break;
            }
            patience = PATIENCE;
        }
        self.waited += start.elapsed();
        if awaits_any {
            self.observer.waited(self.step, start);
        }
        for (step, bytes, posted) in self.posts.drain(..) {
            self.observer.sent(step, bytes, posted);
        }
        Ok(self.expected.drain(..).zip(arrived.into_iter().flatten()).collect())
    }

    /// Returns the exposed communication so far.
    pub(crate) const fn waited(&self) -> Duration {
        self.waited
    }
}
