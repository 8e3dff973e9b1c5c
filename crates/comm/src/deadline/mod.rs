//! Bounded waits: a wrapper that ends every wait at the deadline.
//!
//! The deadline bounds **silence**, not slowness: the wait for a rank that computes for an hour and
//! sends heartbeats meanwhile goes on; that for a rank that sends nothing for the deadline ends.
//! Two clocks run while this rank waits for something (a posted receive, a send in flight, an
//! all-gather), and both start no earlier than the wait itself:
//!
//! | condition that held for the deadline | rank that the error names |
//! |---|---|
//! | no message arrived from a peer that this rank waits for | that peer; of several, the one silent for longest |
//! | no rank of the ring did any work, and some rank was silent for half of that time | that rank, even if this one does not wait for it: it died, and the others wait for each other in consequence |
//! | no rank of the ring did any work, and all are alive | the peer that this rank waits for and that is silent for longest: a message was lost |
//!
//! Either is [`Error::Timeout`] here. It is sent to all ranks as an abort, and is
//! [`Error::Aborted`] there. Both are returned by [`Transport::progress`], within half a second
//! after the deadline if it is called that often.
//!
//! A transport whose heartbeats go to some ranks only ([`Control::watched`]) changes who judges
//! whom: a rank that waits, or computes with heartbeats, judges all ranks that it watches and no
//! others. So the silence of a rank is found at the deadline by those that watch it, whomever they
//! wait for themselves, and their abort reaches the rest. These give them time for that: with live
//! watched ranks only, the last condition of the table takes a quarter of a second longer. Work
//! that a rank learns of is passed on in a heartbeat at once if it is younger by more than a
//! sixteenth of the deadline than what the rank passed on last, so that recent work becomes known
//! to all ranks, although no rank receives heartbeats from all.
//!
//! The wait for ranks that have not entered a collective call ([`Control::start_entry`]) is no wait
//! for a silent rank: their programs may be busy elsewhere. It has a deadline of its own
//! ([`Deadline::with_arrival_deadline`]), by default none. In each quarter of the deadline the
//! warning is called with the lowest of those ranks that this one watches. At the arrival deadline
//! [`Transport::progress`] returns [`Error::ArrivalTimeout`], on this rank only and without an
//! abort: the caller can continue with the same wait. Ranks that have entered are judged as above.
//!
//! Only time in which this rank polled counts: a process that was suspended, or stopped by a
//! debugger, does not hold that time against its peers. A gap between two polls counts for a
//! sixteenth of the deadline at most (a quarter of the least one).
//!
//! Waits send heartbeats themselves, at least every eighth of the deadline. A rank that computes
//! must call [`Control::heartbeat`] with `working` between tiles; more than one call in each eighth
//! of the deadline costs a reading of the clock and sends nothing.

mod checks;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use self::checks::{EntryArrivals, Receives};
use crate::{delegate::forward_control, message::Failure, observed::ObservedClock};

/// A peer that this rank waits for and that is silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Silence {
    /// The silent peer.
    pub peer: usize,
    /// Ring step of the wait.
    pub step: usize,
    /// Observed time since its last message, counted from the start of the wait at the earliest.
    pub waited: Duration,
}

/// A wait for one peer.
#[derive(Clone, Copy)]
struct Wait {
    peer: usize,
    step: usize,
    since: Instant,
}

type Warning = Box<dyn FnMut(Silence) + Send>;

/// A transport whose waits end at the deadline. See the [module](self).
pub struct Deadline<T, S: Space = Host> {
    inner: T,
    deadline: Duration,
    blocks: Receives<S>,
    /// Receives of [`Transport::post_host`].
    host_messages: Receives<Host>,
    /// Wait for the sends to each peer: that for the first one since none was in flight.
    sends: BTreeMap<usize, Wait>,
    /// Start of each all-gather that was not yet collected, by round; of an entry, the time at
    /// which the last rank had entered.
    all_gathers: BTreeMap<u64, Instant>,
    arrivals: EntryArrivals,
    /// Step of the last post, which the error of an all-gather names.
    step: usize,
    observed: ObservedClock,
    last_check: Instant,
    last_heartbeat: Instant,
    last_working_heartbeat: Option<Instant>,
    /// Last work that was known when the last heartbeat was sent.
    passed_on: Instant,
    /// First heartbeat as a working rank since the last all-gather began.
    working_since: Option<Instant>,
    warning: Option<Warning>,
    warned: Vec<bool>,
    /// True if no wait ends.
    is_endless: bool,
    failure: Failure,
    cancellation: Cancellation,
}

/// Default deadline: far longer than any pause of a working rank, and short beside a training run.
pub const DEFAULT: Duration = Duration::from_secs(120);

/// Least deadline: on a busy machine a working rank may be silent for a good part of a second.
pub const LEAST: Duration = Duration::from_secs(1);

/// Heartbeats in each deadline: several, so that one which is late does not matter.
pub(crate) const HEARTBEATS: u32 = 8;

/// Longest single wait of the inner transport, which bounds how late a timeout is detected.
const LONGEST_POLL: Duration = Duration::from_millis(250);

impl<T: Transport<S>, S: Space> Deadline<T, S> {
    /// Bounds every wait of `inner`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the deadline is below [`LEAST`].
    pub fn new(inner: T, deadline: Duration) -> Result<Self> {
        if deadline < LEAST {
            return Err(Error::invalid(
                "deadline",
                format!("{deadline:?}"),
                format!("at least {:?}", LEAST),
            ));
        }
        let warned = vec![false; inner.ranks()];
        let now = Instant::now();
        let heartbeat_interval = deadline / HEARTBEATS;
        // waits poll once per interval; a gap of twice that is still regular
        let regular_gap = 2 * heartbeat_interval.min(LONGEST_POLL);
        Ok(Self {
            inner,
            deadline,
            blocks: Receives::default(),
            host_messages: Receives::default(),
            sends: BTreeMap::new(),
            all_gathers: BTreeMap::new(),
            arrivals: EntryArrivals::new(deadline / 4),
            step: 0,
            observed: ObservedClock::new(now, regular_gap.max(deadline / 16), deadline),
            last_check: now,
            last_heartbeat: now,
            last_working_heartbeat: None,
            passed_on: now,
            working_since: None,
            warning: None,
            warned,
            is_endless: false,
            failure: Failure::default(),
            cancellation: Cancellation::default(),
        })
    }

    /// Calls `warning` when a peer has been silent for a quarter of the deadline: once, until its
    /// next message.
    #[must_use]
    pub fn with_warning(mut self, warning: impl FnMut(Silence) + Send + 'static) -> Self {
        self.warning = Some(Box::new(warning));
        self
    }

    /// Bounds the wait for ranks that have not entered a collective call. Default: no bound.
    #[must_use]
    pub fn with_arrival_deadline(mut self, deadline: Option<Duration>) -> Self {
        self.arrivals.set_deadline(deadline);
        self.observed.extend_horizon(deadline.unwrap_or_default());
        self
    }

    /// Ends a pass that another thread cancels.
    #[must_use]
    pub fn with_cancellation(mut self, cancellation: Cancellation) -> Self {
        self.cancellation = cancellation;
        self
    }

    /// Ends no wait. Heartbeats and warnings remain as with the deadline.
    #[must_use]
    pub fn endless(mut self) -> Self {
        self.is_endless = true;
        self.with_arrival_deadline(None)
    }

    /// Returns the deadline.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    fn heartbeat_interval(&self) -> Duration {
        self.deadline / HEARTBEATS
    }

    fn send_heartbeat(&mut self, now: Instant, working: bool) {
        self.inner.heartbeat(working);
        self.last_heartbeat = now;
        self.passed_on = self.inner.last_work();
    }

    /// Sends a heartbeat if this rank has learned of work that is much younger than what it passed
    /// on last.
    fn pass_on_work(&mut self) {
        let threshold = self.deadline / (2 * HEARTBEATS);
        let younger = self.inner.last_work().saturating_duration_since(self.passed_on);
        if self.inner.watched().is_some() && younger > threshold {
            self.send_heartbeat(Instant::now(), false);
        }
    }

    /// Takes all receives that have arrived from the inner transport.
    fn collect_arrived(&mut self) -> Result<()> {
        let Self { inner, blocks, host_messages, sends, .. } = self;
        blocks.collect(|header| inner.take(header))?;
        host_messages.collect(|header| inner.take_host(header))?;
        if !inner.pending() {
            sends.clear();
        }
        Ok(())
    }

    /// Starts the waits for sends that were posted at `now`, and remembers the step of a post.
    fn posted<M: Space>(
        &mut self,
        sends: &[Outgoing<'_, M>],
        receives: &[MessageHeader],
        now: Instant,
    ) {
        for Outgoing { header, .. } in sends {
            let wait = Wait { peer: header.peer, step: header.step, since: now };
            self.sends.entry(header.peer).or_insert(wait);
        }
        let last = receives.iter().chain(sends.iter().map(|send| &send.header)).last();
        self.step = last.map_or(self.step, |header| header.step);
    }
}

fn headers<S: Space>(receives: &[Incoming<S>]) -> Vec<MessageHeader> {
    receives.iter().map(|incoming| incoming.header.clone()).collect()
}

impl<T: Transport<S>, S: Space> Transport<S> for Deadline<T, S> {
    crate::forward_transport! { of S: pending bytes_sent posts_ahead runs_groups_in_order }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        let headers = headers(receives);
        self.inner.post(sends, receives)?;
        let now = Instant::now();
        self.posted(sends, &headers, now);
        self.blocks.post(headers, now);
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.failure.check()?;
        self.cancellation.check()?;
        self.heartbeat(false);
        self.inner.progress(timeout.min(self.heartbeat_interval()).min(LONGEST_POLL))?;
        self.collect_arrived()?;
        self.pass_on_work();
        self.check_clocks()
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        self.failure.check()?;
        self.blocks.take(header, |header| self.inner.take(header))
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        let headers = headers(receives);
        self.inner.post_host(sends, receives)?;
        let now = Instant::now();
        self.posted(sends, &headers, now);
        self.host_messages.post(headers, now);
        Ok(())
    }

    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.failure.check()?;
        self.host_messages.take(header, |header| self.inner.take_host(header))
    }
}

impl<T: Transport<S>, S: Space> Control for Deadline<T, S> {
    forward_control! { rank ranks placement stragglers abort last_heard last_work }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.working_since = None;
        self.inner.start_all_gather(round, bytes)?;
        self.all_gathers.insert(round, Instant::now());
        Ok(())
    }

    fn start_entry(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.working_since = None;
        self.inner.start_entry(round, bytes)?;
        self.arrivals.enter(round, Instant::now());
        Ok(())
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.failure.check()?;
        let collected = self.inner.try_all_gather(round)?;
        if collected.is_some() {
            self.all_gathers.remove(&round);
            self.arrivals.complete(round);
        }
        Ok(collected)
    }

    fn heartbeat(&mut self, working: bool) {
        let now = Instant::now();
        let interval = self.heartbeat_interval();
        let due = |last: Instant| now.saturating_duration_since(last) >= interval;
        if working {
            self.working_since.get_or_insert(now);
        }
        if working && self.last_working_heartbeat.is_none_or(due) {
            self.last_working_heartbeat = Some(now);
            self.send_heartbeat(now, true);
        } else if due(self.last_heartbeat) {
            self.send_heartbeat(now, false);
        }
    }
}

impl<T: std::fmt::Debug, S: Space> std::fmt::Debug for Deadline<T, S> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Deadline")
            .field("deadline", &self.deadline)
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

/// A flag by which another thread ends the pass of a plan
/// ([`Deadline::with_cancellation`](crate::Deadline::with_cancellation)). Clones are the same flag.
#[derive(Debug, Clone, Default)]
pub struct Cancellation(Arc<AtomicBool>);

impl Cancellation {
    /// Ends the pass under way, at its next wait or after its next tile, and the plan with it on
    /// all ranks. Until [`Cancellation::reset`] it ends every pass.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Lets passes run again.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Checks that no thread has cancelled the pass.
    ///
    /// # Errors
    /// [`Error::Device`], which ends the plan.
    pub(crate) fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Acquire) {
            return Err(Error::Device { what: "the program cancelled the pass".to_owned() });
        }
        Ok(())
    }
}
