//! When each message was posted and taken, and how long this rank waited: a wrapper that writes it down, and the picture of it.
//!
//! The picture is a trace in the form that Perfetto and `chrome://tracing` open: one process a rank, waits and computation on one line,
//! transfers on lines of their own.

use std::{
    borrow::Cow,
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Channel, Control, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use crate::delegate::forward_control;

/// What happened between the begin and the end of an [`Event`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A message was under way to a peer: from its post until this rank saw that all its sends are done.
    Send {
        /// The receiver.
        peer: usize,
        /// What it carries.
        channel: Channel,
    },
    /// A message was awaited: from the post of the receive until it was taken.
    Receive {
        /// The sender.
        peer: usize,
        /// What it carries.
        channel: Channel,
    },
    /// This rank could do nothing but wait for the transport.
    Wait,
    /// A gather: from this rank's offer until it had everybody's.
    Gather,
    /// Something that the caller did, in its words.
    Span(Cow<'static, str>),
}

/// One line of the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub what: What,
    /// The ring step.
    pub step: usize,
    /// Payload.
    pub bytes: u64,
    /// Since the zero of the record.
    pub begin: Duration,
    /// Since the zero of the record.
    pub end: Duration,
}

/// A handle to a rank's record; clones share it.
#[derive(Debug, Clone)]
pub struct TraceLog {
    rank: usize,
    zero: Instant,
    events: Arc<Mutex<Vec<Event>>>,
}

impl TraceLog {
    /// The rank whose record this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// What was recorded so far, in the order in which it began.
    pub fn events(&self) -> Vec<Event> {
        let mut events = self.lock().clone();
        events.sort_by_key(|event| event.begin);
        events
    }

    /// How long this rank could do nothing but wait.
    pub fn waited(&self) -> Duration {
        self.lock()
            .iter()
            .filter(|event| event.what == What::Wait)
            .map(|event| event.end - event.begin)
            .sum()
    }

    /// Forgets what was recorded.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// Records what the caller did from `begin` until now, such as the tiles of a step.
    pub fn span(&self, name: impl Into<Cow<'static, str>>, step: usize, begin: Instant) {
        self.push(What::Span(name.into()), step, 0, begin);
    }

    fn since_zero(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.zero)
    }

    fn push(&self, what: What, step: usize, bytes: u64, begin: Instant) {
        let (begin, end) = (self.since_zero(begin), self.since_zero(Instant::now()));
        let mut events = self.lock();
        // a wait is many short looks at the transport: one line is enough
        if let (What::Wait, Some(last)) = (&what, events.last_mut())
            && last.what == What::Wait
            && last.step == step
            && begin.saturating_sub(last.end) < Duration::from_micros(50)
        {
            last.end = end;
            return;
        }
        events.push(Event { what, step, bytes, begin, end });
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        lock(&self.events)
    }
}

/// The content of a lock, whether or not somebody panicked with it: a record is never half written.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the records of some ranks as one trace-event file.
///
/// # Errors
/// Those of the writer.
pub fn write_chrome(mut writer: impl Write, logs: &[TraceLog]) -> io::Result<()> {
    writer.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut separator = "\n";
    for log in logs {
        let rank = log.rank;
        write!(
            writer,
            "{separator}{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{rank},\"args\":{{\"name\":\"rank {rank}\"}}}}"
        )?;
        separator = ",\n";
        for (number, event) in log.events().into_iter().enumerate() {
            write_event(&mut writer, rank, number, &event)?;
        }
    }
    writer.write_all(b"\n]}\n")
}

fn write_event(
    writer: &mut impl Write,
    rank: usize,
    number: usize,
    event: &Event,
) -> io::Result<()> {
    let Event { what, step, bytes, begin, end } = event;
    let (begin, length, end) = (Micros(*begin), Micros(end.saturating_sub(*begin)), Micros(*end));
    let name = match what {
        What::Send { peer, channel } => Cow::from(format!("{channel:?} to {peer}")),
        What::Receive { peer, channel } => Cow::from(format!("{channel:?} from {peer}")),
        What::Wait => Cow::from("wait"),
        What::Gather => Cow::from("gather"),
        What::Span(name) => name.clone(),
    };
    let name = Quoted(&name);
    let arguments = format!("\"args\":{{\"step\":{step},\"bytes\":{bytes}}}");
    if let What::Wait | What::Span(_) = what {
        return write!(
            writer,
            ",\n{{\"ph\":\"X\",\"name\":{name},\"pid\":{rank},\"tid\":0,\"ts\":{begin},\"dur\":{length},{arguments}}}"
        );
    }
    // transfers overlap, so they are pairs of marks that share an id
    let category = match what {
        What::Send { .. } => "send",
        What::Receive { .. } => "receive",
        _ => "gather",
    };
    for (phase, at) in [("b", begin), ("e", end)] {
        write!(
            writer,
            ",\n{{\"ph\":\"{phase}\",\"cat\":\"{category}\",\"id\":\"{rank}.{number}\",\"name\":{name},"
        )?;
        write!(writer, "\"pid\":{rank},\"tid\":0,\"ts\":{at},{arguments}}}")?;
    }
    Ok(())
}

/// A time in microseconds, to the nanosecond.
#[derive(Clone, Copy)]
struct Micros(Duration);

impl std::fmt::Display for Micros {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{:03}", self.0.as_micros(), self.0.subsec_nanos() % 1000)
    }
}

/// A JSON string.
struct Quoted<'a>(&'a str);

impl std::fmt::Display for Quoted<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("\"")?;
        for letter in self.0.chars() {
            match letter {
                '"' | '\\' => write!(formatter, "\\{letter}")?,
                letter if u32::from(letter) < 0x20 => {
                    write!(formatter, "\\u{:04x}", u32::from(letter))?
                }
                letter => write!(formatter, "{letter}")?,
            }
        }
        formatter.write_str("\"")
    }
}

/// A transport that records what it does. See the [module](self).
#[derive(Debug)]
pub struct Trace<T> {
    inner: T,
    log: TraceLog,
    /// Posted and not yet seen to be done; behind a lock because a look at [`Transport::pending`] may be the last that is taken.
    sends: Mutex<Vec<(MessageHeader, Instant)>>,
    /// Posted and not yet taken.
    receives: Vec<(MessageHeader, Instant)>,
    gathers: Vec<(u64, Instant)>,
    step: usize,
}

impl<T: Control> Trace<T> {
    /// Records what `inner` does. Ranks of one machine that are given the same `zero` share a time axis.
    pub fn new(inner: T, zero: Instant) -> Self {
        let log = TraceLog { rank: inner.rank(), zero, events: Arc::default() };
        Self {
            inner,
            log,
            sends: Mutex::default(),
            receives: Vec::new(),
            gathers: Vec::new(),
            step: 0,
        }
    }

    /// The record, to keep when the transport is gone.
    pub fn log(&self) -> TraceLog {
        self.log.clone()
    }
}

impl<S: Space, T: Transport<S>> Transport<S> for Trace<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        let begin = Instant::now();
        let hops: Vec<MessageHeader> =
            receives.iter().map(|incoming| incoming.hop.clone()).collect();
        self.inner.post(sends, receives)?;
        self.step = hops
            .iter()
            .chain(sends.iter().map(|send| &send.hop))
            .map(|hop| hop.step)
            .max()
            .unwrap_or(self.step);
        self.receives.extend(hops.into_iter().map(|hop| (hop, begin)));
        lock(&self.sends).extend(sends.iter().map(|send| (send.hop.clone(), begin)));
        Ok(())
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        let begin = Instant::now();
        let progressed = self.inner.progress(patience);
        if !patience.is_zero() {
            self.log.push(What::Wait, self.step, 0, begin);
        }
        self.pending();
        progressed
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<S>>> {
        let taken = self.inner.take(hop)?;
        let posted = self.receives.iter().position(|(posted, _)| posted == hop);
        if let (Some(_), Some(posted)) = (&taken, posted) {
            let (hop, begin) = self.receives.swap_remove(posted);
            self.log.push(
                What::Receive { peer: hop.peer, channel: hop.channel },
                hop.step,
                hop.bytes(),
                begin,
            );
        }
        Ok(taken)
    }

    fn pending(&self) -> bool {
        let pending = self.inner.pending();
        if !pending {
            for (hop, begin) in lock(&self.sends).drain(..) {
                self.log.push(
                    What::Send { peer: hop.peer, channel: hop.channel },
                    hop.step,
                    hop.bytes(),
                    begin,
                );
            }
        }
        pending
    }

    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
}

impl<T: Control> Control for Trace<T> {
    forward_control! { rank ranks placement stragglers abort heartbeat last_heard last_work }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.gathers.push((round, Instant::now()));
        self.inner.start_all_gather(round, bytes)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        let collected = self.inner.try_all_gather(round)?;
        let offered = self.gathers.iter().position(|&(of, _)| of == round);
        if let (Some(parts), Some(offered)) = (&collected, offered) {
            let (_, begin) = self.gathers.swap_remove(offered);
            let bytes = parts.iter().map(|part| part.len() as u64).sum();
            self.log.push(What::Gather, self.step, bytes, begin);
        }
        Ok(collected)
    }
}
