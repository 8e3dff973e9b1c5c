//! Fault injection: a wrapper that drops, delays or truncates messages, or dies. For
//! tests of everything above the transport.
//!
//! The errors below are returned by the other ranks, each within its deadline + 1 s, if they wrap
//! their transport in [`Deadline`](annulus_comm::Deadline) and abort on errors:
//!
//! | fault | error |
//! |---|---|
//! | a message is dropped | [`Error::Timeout`] with its sender on its receiver, unless another rank that waits in consequence times out first |
//! | a message is delayed by less than the deadline | none |
//! | a message is delayed beyond the deadline | as if it was dropped |
//! | a message is truncated | [`Error::Comm`] "… truncated …" on its receiver |
//! | a rank dies and its endpoint stays | [`Error::Timeout`] with that rank on some rank that needs it |
//! | a rank dies and its endpoint is dropped | [`Error::PeerLost`] with that rank on every rank that needs it |
//!
//! All ranks that do not detect the fault themselves return [`Error::Aborted`] with the text of the
//! first of these errors.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Transport,
};

use annulus_comm::forward_control;

/// A fault. Sends count from 0 over the endpoint's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Injection {
    /// Send number `send` is never sent.
    Drop {
        /// Number of the send.
        send: u64,
    },
    /// Send number `send` is sent later.
    Delay {
        /// Number of the send.
        send: u64,
        /// The delay.
        by: Duration,
    },
    /// Of send number `send` only the first half of the bytes is sent. An empty one is unchanged.
    Truncate {
        /// Number of the send.
        send: u64,
    },
    /// Every send is delayed by a random time.
    DelayAll {
        /// Upper bound of the delays.
        most: Duration,
    },
    /// The endpoint dies at the first post of this step or a later one: from then on it sends
    /// neither blocks nor heartbeats nor its abort, and its own calls return [`Error::Device`].
    Die {
        /// The ring step.
        step: usize,
    },
}

/// A transport with injected faults.
#[derive(Debug)]
pub struct Fault<T> {
    inner: T,
    injections: Vec<Injection>,
    random: Random,
    sends: u64,
    bytes_sent: u64,
    delayed: Vec<(Instant, Sending)>,
    dead: Option<Error>,
}

#[derive(Debug)]
struct Sending {
    header: MessageHeader,
    buffer: HostBuffer,
}

/// SplitMix64 (Steele et al. 2014): a small seeded generator, sufficient to choose bits and delays.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`; 0 if there is none.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

impl<T: Transport<Host>> Fault<T> {
    /// Injects these faults into `inner`. The same seed chooses the same bits and delays.
    pub fn new(inner: T, seed: u64, injections: impl Into<Vec<Injection>>) -> Self {
        Self {
            inner,
            injections: injections.into(),
            random: Random(seed),
            sends: 0,
            bytes_sent: 0,
            delayed: Vec::new(),
            dead: None,
        }
    }

    /// Delays every send by a random time of at most `most`, so that messages overtake each other.
    pub fn random_delays(inner: T, seed: u64, most: Duration) -> Self {
        Self::new(inner, seed, [Injection::DelayAll { most }])
    }

    fn check_alive(&self) -> Result<()> {
        self.dead.clone().map_or(Ok(()), Err)
    }

    fn die(&mut self, of: String) -> Result<()> {
        self.delayed.clear();
        let error = Error::Device {
            what: format!("injected fault: rank {} died in {of}", self.inner.rank()),
        };
        self.dead = Some(error.clone());
        Err(error)
    }

    /// Applies the faults to one send: adds it to `now` or to `self.delayed`.
    fn inject(&mut self, send: &Outgoing<'_, Host>, now: &mut Vec<Sending>) -> Result<()> {
        let number = self.sends;
        self.sends += 1;
        self.bytes_sent += send.header.bytes();
        let mut sending = Sending { header: send.header.clone(), buffer: send.buffer.clone() };
        let mut is_dropped = false;
        let mut delay = Duration::ZERO;
        for injection in self.injections.clone() {
            match injection {
                Injection::Drop { send } if send == number => is_dropped = true,
                Injection::Delay { send, by } if send == number => delay += by,
                Injection::DelayAll { most } => {
                    delay += Duration::from_nanos(
                        self.random.below(u64::try_from(most.as_nanos()).unwrap_or(u64::MAX)),
                    );
                }
                Injection::Truncate { send } if send == number => {
                    sending.header.ranges = first_half(&sending.header)
                }
                _ => {}
            }
        }
        if is_dropped {
            return Ok(());
        }
        if delay.is_zero() {
            now.push(sending)
        } else {
            self.delayed.push((Instant::now() + delay, sending))
        }
        Ok(())
    }

    fn post_now(&mut self, sendings: &[Sending], receives: &mut Vec<Incoming<Host>>) -> Result<()> {
        let outgoing: Vec<_> = sendings
            .iter()
            .map(|Sending { header, buffer }| Outgoing {
                header: header.clone(),
                buffer,
                ready: &(),
            })
            .collect();
        self.inner.post(&outgoing, receives)
    }
}

/// Returns the ranges of the first half of a message's bytes.
fn first_half(header: &MessageHeader) -> Arc<[std::ops::Range<u64>]> {
    let mut left = header.bytes() / 2;
    let cut = |range: &std::ops::Range<u64>| {
        let bytes = left.min(range.end - range.start);
        left -= bytes;
        range.start..range.start + bytes
    };
    header.ranges.iter().map(cut).collect()
}

impl<T: Transport<Host>> Transport<Host> for Fault<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.check_alive()?;
        let headers = || {
            sends
                .iter()
                .map(|send| &send.header)
                .chain(receives.iter().map(|incoming| &incoming.header))
        };
        let latest = headers().map(|header| header.step).max();
        for injection in &self.injections {
            if let (Injection::Die { step }, Some(latest)) = (injection, latest)
                && latest >= *step
            {
                return self.die(format!("step {latest}"));
            }
        }
        let mut now = Vec::with_capacity(sends.len());
        for send in sends {
            self.inject(send, &mut now)?;
        }
        self.post_now(&now, receives)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.check_alive()?;
        let now = Instant::now();
        let due: Vec<Sending> = self
            .delayed
            .extract_if(.., |(due, _)| *due <= now)
            .map(|(_, sending)| sending)
            .collect();
        if !due.is_empty() {
            self.post_now(&due, &mut Vec::new())?;
        }
        let next = self.delayed.iter().map(|(due, _)| due.saturating_duration_since(now)).min();
        self.inner.progress(next.map_or(timeout, |next| next.min(timeout)))
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.check_alive()?;
        self.inner.take(header)
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        self.dead.is_none() && (!self.delayed.is_empty() || self.inner.pending())
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        // a fault may change a length
        false
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl<T: Transport<Host>> Control for Fault<T> {
    forward_control! { rank ranks placement stragglers last_heard last_work }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.check_alive()?;
        self.inner.start_all_gather(round, bytes)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.check_alive()?;
        self.inner.try_all_gather(round)
    }

    fn abort(&mut self, error: &Error) {
        if self.dead.is_none() {
            self.inner.abort(error);
        }
    }

    fn heartbeat(&mut self, working: bool) {
        if self.dead.is_none() {
            self.inner.heartbeat(working);
        }
    }
}
