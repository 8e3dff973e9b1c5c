//! No wait without an end: a wrapper that bounds every wait by the deadline.
//!
//! The deadline is **silence**, not slowness: a rank that computes for an hour and beats meanwhile is waited for; one that says nothing
//! for the deadline is not. Two clocks run while this rank waits for something (a posted receive, a send that is not done, a gather), and
//! both start no earlier than the wait itself:
//!
//! | what lasted for the deadline | who is named |
//! |---|---|
//! | nothing was heard of a peer that is waited for | that peer; of several, the one silent for longest |
//! | nobody in the ring did any work, and some rank was silent for half of that time | that rank, be it waited for here or not: it died, and the others wait for each other in consequence |
//! | nobody in the ring did any work, and all are alive | the peer that is waited for and silent for longest: a message was lost |
//!
//! Either is [`Error::Timeout`] here, and goes to all ranks as an abort, so [`Error::Aborted`] there. Both come from
//! [`Transport::progress`], within half a second after the deadline, given that it is called.
//!
//! Only time in which this rank polled counts: a process that was suspended or stopped by a debugger
//! does not hold that time against its peers. A gap between two polls counts for a sixteenth of the
//! deadline at most (a quarter of the least one).
//!
//! Waits beat by themselves, at least every eighth of the deadline. Who computes must beat with `working` between tiles
//! ([`Control::heartbeat`]); beats beyond one each eighth of the deadline cost a look at the clock and go no further.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use crate::{delegate::forward_control, observed::ObservedClock};

/// A peer that has been waited for, in vain, for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Silence {
    /// Who is silent.
    pub peer: usize,
    /// The ring step that waits.
    pub step: usize,
    /// For how long nothing was heard.
    pub waited: Duration,
}

/// A peer that is waited for, in which step, since when.
type Wait = (usize, usize, Instant);

type Warning = Box<dyn FnMut(Silence) + Send>;

/// A transport of which no wait outlasts the deadline. See the [module](self).
pub struct Deadline<T, S: Space = Host> {
    inner: T,
    deadline: Duration,
    /// Posted, and not yet seen to have arrived.
    receives: Vec<(MessageHeader, Instant)>,
    /// Arrived, and not yet taken by the caller.
    arrived: Vec<(MessageHeader, Arrived<S>)>,
    /// Per peer the first send since all were last done: its step and when it was posted.
    sends: BTreeMap<usize, (usize, Instant)>,
    /// Offered and not yet collected.
    gathers: BTreeMap<u64, Instant>,
    /// The step posted last: the one to name where a gather waits.
    step: usize,
    observed: ObservedClock,
    last_judged: Instant,
    last_beat: Instant,
    last_working_beat: Option<Instant>,
    warning: Option<Warning>,
    warned: Vec<bool>,
    failed: Option<Error>,
}

/// The deadline where none was asked for.
pub const DEFAULT: Duration = Duration::from_secs(120);

/// The least deadline: below it a busy machine looks like a dead one.
pub const LEAST: Duration = Duration::from_secs(1);

/// Signs of life in each deadline.
const BEATS: u32 = 8;

/// The longest single wait of the inner transport: how late a timeout may be noticed.
const GLANCE: Duration = Duration::from_millis(250);

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
        let beat_every = deadline / BEATS;
        // waits poll this often; twice that is no gap yet
        let regular = 2 * beat_every.min(GLANCE);
        Ok(Self {
            inner,
            deadline,
            receives: Vec::new(),
            arrived: Vec::new(),
            sends: BTreeMap::new(),
            gathers: BTreeMap::new(),
            step: 0,
            observed: ObservedClock::new(now, regular.max(deadline / 16), deadline),
            last_judged: now,
            last_beat: now,
            last_working_beat: None,
            warning: None,
            warned,
            failed: None,
        })
    }

    /// Has `warning` called when a peer was silent for a quarter of the deadline: once, until it is heard again.
    #[must_use]
    pub fn with_warning(mut self, warning: impl FnMut(Silence) + Send + 'static) -> Self {
        self.warning = Some(Box::new(warning));
        self
    }

    /// The deadline.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    fn beat_every(&self) -> Duration {
        self.deadline / BEATS
    }

    /// Moves what has arrived out of the receives that are waited for.
    fn sweep(&mut self) -> Result<()> {
        let mut place = 0;
        while let Some((hop, _)) = self.receives.get(place) {
            match self.inner.take(hop)? {
                Some(arrived) => {
                    let (hop, _) = self.receives.swap_remove(place);
                    self.arrived.push((hop, arrived));
                }
                None => place += 1,
            }
        }
        if !self.inner.pending() {
            self.sends.clear();
        }
        Ok(())
    }

    /// Everything that is waited for.
    fn waits(&self) -> Vec<Wait> {
        let receives = self.receives.iter().map(|(hop, since)| (hop.peer, hop.step, *since));
        let sends = self.sends.iter().map(|(&peer, &(step, since))| (peer, step, since));
        let mut waits: Vec<_> = receives.chain(sends).collect();
        for (&round, &since) in &self.gathers {
            let missing = self.inner.stragglers(round);
            // all have offered and still it is not done: then somebody does not take what is offered to it
            let missing =
                if missing.is_empty() { (0..self.inner.ranks()).collect() } else { missing };
            waits.extend(missing.into_iter().map(|peer| (peer, self.step, since)));
        }
        waits
    }

    /// The observed time without a word of `peer`, counted from `since` at the earliest.
    fn silence(&self, now: Instant, peer: usize, since: Instant) -> Duration {
        self.observed.elapsed(self.inner.last_heard(peer).max(since), now)
    }

    /// Reads both clocks, now and then.
    fn judge(&mut self) -> Result<()> {
        let now = Instant::now();
        self.observed.poll(now);
        let idle = self.receives.is_empty() && self.sends.is_empty() && self.gathers.is_empty();
        if idle
            || now.saturating_duration_since(self.last_judged)
                < (self.deadline / 64).min(GLANCE / 4)
        {
            return Ok(());
        }
        self.last_judged = now;
        let (rank, waits) = (self.inner.rank(), self.waits());
        let silence = |&(peer, step, since): &Wait| Silence {
            peer,
            step,
            waited: self.silence(now, peer, since),
        };
        let silences: Vec<_> =
            waits.iter().filter(|(peer, ..)| *peer != rank).map(silence).collect();
        self.warn(&silences);
        let began = waits.iter().map(|&(_, _, since)| since).min().unwrap_or(now);
        let Some(error) = self.overdue(now, &silences, began) else { return Ok(()) };
        self.inner.abort(&error);
        self.failed = Some(error.clone());
        Err(error)
    }

    /// The timeout, if one of the two clocks has run out; the waits began at `began`.
    fn overdue(&self, now: Instant, silences: &[Silence], began: Instant) -> Option<Error> {
        // the lowest rank of equals, so that a stuck ring reads alike on all ranks
        let worst = silences
            .iter()
            .min_by_key(|silence| (std::cmp::Reverse(silence.waited), silence.peer))?;
        let timeout = |peer, waited| Some(Error::Timeout { peer, step: worst.step, waited });
        if worst.waited >= self.deadline {
            return timeout(worst.peer, worst.waited);
        }
        let idle = self.observed.elapsed(self.inner.last_work().max(began), now);
        if idle < self.deadline {
            return None;
        }
        let others = (0..self.inner.ranks()).filter(|&peer| peer != self.inner.rank());
        let (silent, peer) = others.map(|peer| (self.silence(now, peer, began), peer)).max()?;
        timeout(if silent >= self.deadline / 2 { peer } else { worst.peer }, idle)
    }

    fn warn(&mut self, silences: &[Silence]) {
        let Some(warning) = &mut self.warning else { return };
        for &silence in silences {
            let late = silence.waited >= self.deadline / 4;
            if late && !self.warned[silence.peer] {
                warning(silence);
            }
            self.warned[silence.peer] = late;
        }
    }
}

impl<T: Transport<S>, S: Space> Transport<S> for Deadline<T, S> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        let hops: Vec<MessageHeader> =
            receives.iter().map(|incoming| incoming.hop.clone()).collect();
        self.inner.post(sends, receives)?;
        let now = Instant::now();
        for hop in hops {
            self.step = hop.step;
            self.receives.push((hop, now));
        }
        for Outgoing { hop, .. } in sends {
            self.step = hop.step;
            self.sends.entry(hop.peer).or_insert((hop.step, now));
        }
        Ok(())
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.heartbeat(false);
        self.inner.progress(patience.min(self.beat_every()).min(GLANCE))?;
        self.sweep()?;
        self.judge()
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<S>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let same = |other: &MessageHeader| {
            (other.peer, other.channel, other.tag) == (hop.peer, hop.channel, hop.tag)
        };
        if let Some(place) = self.arrived.iter().position(|(other, _)| same(other)) {
            return Ok(Some(self.arrived.swap_remove(place).1));
        }
        let taken = self.inner.take(hop)?;
        if taken.is_some() {
            self.receives.retain(|(other, _)| !same(other));
        }
        Ok(taken)
    }

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

impl<T: Transport<S>, S: Space> Control for Deadline<T, S> {
    forward_control! { rank ranks placement stragglers abort last_heard last_work }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.inner.start_all_gather(round, bytes)?;
        self.gathers.insert(round, Instant::now());
        Ok(())
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let collected = self.inner.try_all_gather(round)?;
        if collected.is_some() {
            self.gathers.remove(&round);
        }
        Ok(collected)
    }

    fn heartbeat(&mut self, working: bool) {
        let (now, every) = (Instant::now(), self.beat_every());
        let due = |last: Instant| now.saturating_duration_since(last) >= every;
        if working && self.last_working_beat.is_none_or(due) {
            self.last_working_beat = Some(now);
            self.last_beat = now;
            self.inner.heartbeat(true);
        } else if due(self.last_beat) {
            self.last_beat = now;
            self.inner.heartbeat(false);
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
