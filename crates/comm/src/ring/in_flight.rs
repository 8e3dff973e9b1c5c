//! Transfers in flight, and the only place where the ring waits.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use annulus_core::{
    AgreedLengths, Arrived, Error, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use crate::profiler::span;

use super::{program::MessageGroup, step_events::Observer};

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
        transfers: &MessageGroup,
        source: Option<&(S::Buffer, S::Event)>,
        mut take_buffer: impl FnMut(&MessageHeader) -> Result<S::Buffer>,
    ) -> Result<()> {
        let mut receives = Vec::with_capacity(transfers.receives.len());
        for header in &transfers.receives {
            receives.push(Incoming { buffer: take_buffer(header)?, header: self.tagged(header) });
        }
        self.expected.extend(receives.iter().map(|incoming| incoming.header.clone()));
        self.start(&transfers.sends, source, receives)
    }

    /// Returns a message of the program with its tag in the transport.
    pub(super) fn tagged(&self, header: &MessageHeader) -> MessageHeader {
        let tag = header.tag + self.first_tag;
        MessageHeader { tag, agreed: self.lengths, ..header.clone() }
    }

    /// Posts one group: `sends` from `source`, and receives with the headers of
    /// [`InFlight::tagged`], which the caller takes with [`InFlight::take`].
    pub(super) fn start(
        &mut self,
        headers: &[MessageHeader],
        source: Option<&(S::Buffer, S::Event)>,
        receives: Vec<Incoming<S>>,
    ) -> Result<()> {
        if headers.is_empty() && receives.is_empty() {
            return Ok(());
        }
        self.incoming.extend(receives);
        let mut sends = Vec::with_capacity(headers.len());
        for header in headers {
            let Some((buffer, ready)) = source else {
                return Err(Error::internal(format!(
                    "nothing to send to rank {} in step {}",
                    header.peer, header.step
                )));
            };
            sends.push(Outgoing { header: self.tagged(header), buffer, ready });
        }
        if let Some(now) = self.observer.now().filter(|_| !sends.is_empty()) {
            let bytes = headers.iter().map(MessageHeader::bytes).sum();
            self.posts.push((self.step, bytes, now));
        }
        self.transport.post(&sends, &mut self.incoming)
    }

    /// Returns a receive of [`InFlight::start`] once it has arrived. Does not block.
    pub(super) fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        self.transport.take(header)
    }

    /// Returns true if a send is in flight.
    pub(super) fn sends(&self) -> bool {
        self.transport.pending()
    }

    /// Tick of a kernel: polls the transport, and breaks once a transfer has failed.
    pub(crate) fn tick(&mut self) -> ControlFlow<()> {
        self.tick_with(|_| Ok(()))
    }

    /// As [`InFlight::tick`]; calls `after_poll` after each poll.
    pub(super) fn tick_with(
        &mut self,
        after_poll: impl FnOnce(&mut Self) -> Result<()>,
    ) -> ControlFlow<()> {
        if self.failure.is_some() {
            return ControlFlow::Break(());
        }
        if self.last_tick.elapsed() < TICK_INTERVAL {
            return ControlFlow::Continue(());
        }
        self.last_tick = Instant::now();
        self.transport.control().heartbeat(true);
        match self.poll(Duration::ZERO).and_then(|()| after_poll(self)) {
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

    /// Moves messages, and makes the events of those that have been sent.
    fn poll(&mut self, timeout: Duration) -> Result<()> {
        self.transport.progress(timeout)?;
        if !self.posts.is_empty() && !self.transport.pending() {
            self.record_sent();
        }
        Ok(())
    }

    /// Makes the events of all sends, of which none is in flight.
    fn record_sent(&mut self) {
        for (step, bytes, posted) in self.posts.drain(..) {
            self.observer.sent(step, bytes, posted);
        }
    }

    /// Polls until `result` returns a value, and at least once.
    pub(super) fn wait_until<T>(
        &mut self,
        mut result: impl FnMut(&mut Self) -> Result<Option<T>>,
    ) -> Result<T> {
        span!("wait");
        self.check()?;
        self.transport.control().heartbeat(true);
        let start = Instant::now();
        let mut timeout = Duration::ZERO;
        let value = loop {
            self.poll(timeout)?;
            if let Some(value) = result(self)? {
                break value;
            }
            timeout = PATIENCE;
        };
        self.waited += start.elapsed();
        self.observer.waited(self.step, start);
        Ok(value)
    }

    /// Waits for all receives of [`InFlight::post`]. Returns them in the order in which they were
    /// posted.
    fn wait_receives(&mut self) -> Result<Vec<(MessageHeader, Arrived<S>)>> {
        if self.expected.is_empty() {
            return self.check().map(|()| Vec::new());
        }
        let expected = std::mem::take(&mut self.expected);
        let mut arrived: Vec<Option<Arrived<S>>> = expected.iter().map(|_| None).collect();
        self.wait_until(|in_flight| {
            for (header, slot) in
                expected.iter().zip(&mut arrived).filter(|(_, slot)| slot.is_none())
            {
                *slot = in_flight.transport.take(header)?;
            }
            Ok(arrived.iter().all(Option::is_some).then_some(()))
        })?;
        Ok(expected.into_iter().zip(arrived.into_iter().flatten()).collect())
    }

    /// Waits for all sends.
    pub(super) fn wait_sends(&mut self) -> Result<()> {
        self.check()?;
        if self.transport.pending() || !self.posts.is_empty() {
            self.wait_until(|in_flight| Ok((!in_flight.sends()).then_some(())))?;
            // a receiver may have taken the last message after the last poll
            self.record_sent();
        }
        Ok(())
    }

    /// Waits for all receives of [`InFlight::post`], and for all sends. Returns the receives in the
    /// order in which they were posted.
    pub(crate) fn wait_all(&mut self) -> Result<Vec<(MessageHeader, Arrived<S>)>> {
        let arrived = self.wait_receives()?;
        self.wait_sends()?;
        Ok(arrived)
    }

    /// Returns the exposed communication so far.
    pub(crate) const fn waited(&self) -> Duration {
        self.waited
    }
}
