//! Times of messages and waits of a rank: a wrapper that records them, and a file that shows them.
//!
//! The file is in the trace-event format that Perfetto and `chrome://tracing` open: one process per
//! rank, waits and computation in one row, transfers in rows of their own.

use std::{
    borrow::Cow,
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Channel, Control, Host, Incoming, MessageHeader, Outgoing, Result, Space, Transport,
};

use crate::delegate::forward_control;

/// Kind of an [`Event`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// A send, from its post until a poll found that no send of this rank is in flight.
    Send {
        /// The receiver.
        peer: usize,
        /// Channel of the message.
        channel: Channel,
    },
    /// A receive, from its post until it was taken.
    Receive {
        /// The sender.
        peer: usize,
        /// Channel of the message.
        channel: Channel,
    },
    /// Exposed communication: this rank waited for the transport.
    Wait,
    /// An all-gather, from its start until the parts of all ranks had arrived.
    AllGather {
        /// Its number, equal on all ranks.
        round: u64,
    },
    /// An activity of the caller, by its name.
    Span(Cow<'static, str>),
}

/// One recorded activity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Kind of the activity.
    pub kind: EventKind,
    /// Ring step.
    pub step: usize,
    /// Payload bytes.
    pub bytes: u64,
    /// Start, as time since the zero of the log.
    pub begin: Duration,
    /// End, as time since the zero of the log.
    pub end: Duration,
}

/// Longest gap between two waits that are recorded as one: more than the time between two polls of
/// one wait, less than a tile takes.
const MERGED_GAP: Duration = Duration::from_micros(50);

/// Default number of events that a log keeps: of a ring of 1,000 ranks those of some hundred
/// passes, in about 100 MB.
pub const CAPACITY: usize = 1 << 20;

/// Handle to the log of a rank. Clones share the log. Once the log is full, each event replaces the
/// oldest one.
#[derive(Debug, Clone)]
pub struct TraceLog {
    rank: usize,
    zero: Instant,
    log: Arc<Mutex<Log>>,
}

/// The events of a log.
#[derive(Debug, Default)]
struct Log {
    events: VecDeque<Event>,
    capacity: usize,
    /// Number of events that were replaced.
    dropped: u64,
    /// Total time of waits, those of replaced events included.
    waited: Duration,
}

impl TraceLog {
    /// Returns the rank that recorded this log.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the events so far, in the order of their starts.
    pub fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = self.lock().events.iter().cloned().collect();
        events.sort_by_key(|event| event.begin);
        events
    }

    /// Returns the number of events that were replaced because the log was full.
    pub fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Returns the total time of exposed communication, that of replaced events included.
    pub fn waited(&self) -> Duration {
        self.lock().waited
    }

    /// Removes all events.
    pub fn clear(&self) {
        let mut log = self.lock();
        *log = Log { capacity: log.capacity, ..Log::default() };
    }

    /// Records an activity of the caller from `begin` until now, such as the tiles of a step.
    pub fn span(&self, name: impl Into<Cow<'static, str>>, step: usize, begin: Instant) {
        self.push(EventKind::Span(name.into()), step, 0, begin);
    }

    fn since_zero(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.zero)
    }

    fn push(&self, kind: EventKind, step: usize, bytes: u64, begin: Instant) {
        let begin = self.since_zero(begin);
        let end = self.since_zero(Instant::now());
        let mut log = self.lock();
        let is_wait = kind == EventKind::Wait;
        // a wait consists of many short polls of the transport, which are merged into one event
        if let (true, Some(last)) = (is_wait, log.events.back_mut())
            && last.kind == EventKind::Wait
            && last.step == step
            && begin.saturating_sub(last.end) < MERGED_GAP
        {
            let more = end.saturating_sub(last.end);
            last.end = end;
            log.waited += more;
            return;
        }
        if is_wait {
            log.waited += end.saturating_sub(begin);
        }
        if log.events.len() >= log.capacity {
            log.events.pop_front();
            log.dropped += 1;
        }
        log.events.push_back(Event { kind, step, bytes, begin, end });
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }
}

/// Locks `mutex`, poisoned or not: no panic leaves its content in a partial state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the logs of several ranks as one trace-event file.
///
/// # Errors
/// Those of the writer.
pub fn write_chrome(mut writer: impl Write, logs: &[TraceLog]) -> io::Result<()> {
    writer.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut separator = "\n";
    for log in logs {
        let rank = log.rank;
        write!(writer, "{separator}{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{rank},")?;
        write!(writer, "\"args\":{{\"name\":\"rank {rank}\"}}}}")?;
        separator = ",\n";
        let dropped = log.dropped();
        if dropped > 0 {
            write!(writer, ",\n{{\"ph\":\"M\",\"name\":\"process_labels\",\"pid\":{rank},")?;
            write!(writer, "\"args\":{{\"labels\":\"{dropped} earlier events dropped\"}}}}")?;
        }
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
    let Event { kind, step, bytes, begin, end } = event;
    let duration = Micros(end.saturating_sub(*begin));
    let begin = Micros(*begin);
    let end = Micros(*end);
    let name = match kind {
        EventKind::Send { peer, channel } => Cow::from(format!("{channel:?} to {peer}")),
        EventKind::Receive { peer, channel } => Cow::from(format!("{channel:?} from {peer}")),
        EventKind::Wait => Cow::from("wait"),
        EventKind::AllGather { .. } => Cow::from("gather"),
        EventKind::Span(name) => name.clone(),
    };
    let name = Quoted(&name);
    let round = match kind {
        EventKind::AllGather { round } => format!(",\"round\":{round}"),
        _ => String::new(),
    };
    let arguments = format!("\"args\":{{\"step\":{step},\"bytes\":{bytes}{round}}}");
    if let EventKind::Wait | EventKind::Span(_) = kind {
        write!(writer, ",\n{{\"ph\":\"X\",\"name\":{name},\"pid\":{rank},\"tid\":0,")?;
        return write!(writer, "\"ts\":{begin},\"dur\":{duration},{arguments}}}");
    }
    // transfers overlap, so each is a pair of asynchronous events with a common id
    let category = match kind {
        EventKind::Send { .. } => "send",
        EventKind::Receive { .. } => "receive",
        _ => "gather",
    };
    for (phase, at) in [("b", begin), ("e", end)] {
        write!(writer, ",\n{{\"ph\":\"{phase}\",\"cat\":\"{category}\",")?;
        write!(writer, "\"id\":\"{rank}.{number}\",\"name\":{name},")?;
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

/// A transport that records its messages and waits. See the [module](self).
#[derive(Debug)]
pub struct Trace<T> {
    inner: T,
    log: TraceLog,
    /// Sends that were in flight at the last poll. Behind a lock because [`Transport::pending`],
    /// which takes `&self`, may be the last poll.
    sends: Mutex<Vec<(MessageHeader, Instant)>>,
    /// Receives that were posted and not yet taken.
    receives: Vec<(MessageHeader, Instant)>,
    all_gathers: Vec<(u64, Instant)>,
    step: usize,
}

impl<T: Control> Trace<T> {
    /// Records the messages and waits of `inner`. Ranks of one machine with the same `zero` share a
    /// time axis.
    pub fn new(inner: T, zero: Instant) -> Self {
        Self::with_capacity(inner, zero, CAPACITY)
    }

    /// As [`Trace::new`]; the log keeps the last `capacity` events, at least one.
    pub fn with_capacity(inner: T, zero: Instant, capacity: usize) -> Self {
        let log = Log { capacity: capacity.max(1), ..Log::default() };
        let log = TraceLog { rank: inner.rank(), zero, log: Arc::new(Mutex::new(log)) };
        Self {
            inner,
            log,
            sends: Mutex::default(),
            receives: Vec::new(),
            all_gathers: Vec::new(),
            step: 0,
        }
    }

    /// Returns a handle to the log, which may outlive the transport.
    pub fn log(&self) -> TraceLog {
        self.log.clone()
    }

    /// Remembers the messages of a post that began at `begin`.
    fn posted(&mut self, sends: Vec<MessageHeader>, receives: Vec<MessageHeader>, begin: Instant) {
        let steps = receives.iter().chain(&sends).map(|header| header.step);
        self.step = steps.max().unwrap_or(self.step);
        self.receives.extend(receives.into_iter().map(|header| (header, begin)));
        lock(&self.sends).extend(sends.into_iter().map(|header| (header, begin)));
    }

    /// Makes the event of a receive that has been taken.
    fn taken(&mut self, header: &MessageHeader) {
        let posted = self.receives.iter().position(|(posted, _)| posted == header);
        if let Some(posted) = posted {
            let (header, begin) = self.receives.swap_remove(posted);
            self.log.push(
                EventKind::Receive { peer: header.peer, channel: header.channel },
                header.step,
                header.bytes(),
                begin,
            );
        }
    }
}

/// Returns the headers of a post: those of its sends, and of its receives.
fn headers<S: Space>(
    sends: &[Outgoing<'_, S>],
    receives: &[Incoming<S>],
) -> [Vec<MessageHeader>; 2] {
    let sends = sends.iter().map(|send| send.header.clone()).collect();
    [sends, receives.iter().map(|incoming| incoming.header.clone()).collect()]
}

impl<S: Space, T: Transport<S>> Transport<S> for Trace<T> {
    crate::forward_transport! { of S: bytes_sent posts_ahead runs_groups_in_order }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        let begin = Instant::now();
        let [sent, received] = headers(sends, receives);
        self.inner.post(sends, receives)?;
        self.posted(sent, received, begin);
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        let begin = Instant::now();
        let progressed = self.inner.progress(timeout);
        if !timeout.is_zero() {
            self.log.push(EventKind::Wait, self.step, 0, begin);
        }
        self.pending();
        progressed
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        let taken = self.inner.take(header)?;
        if taken.is_some() {
            self.taken(header);
        }
        Ok(taken)
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        let begin = Instant::now();
        let [sent, received] = headers(sends, receives);
        self.inner.post_host(sends, receives)?;
        self.posted(sent, received, begin);
        Ok(())
    }

    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken = self.inner.take_host(header)?;
        if taken.is_some() {
            self.taken(header);
        }
        Ok(taken)
    }

    fn pending(&self) -> bool {
        let pending = self.inner.pending();
        if !pending {
            for (header, begin) in lock(&self.sends).drain(..) {
                self.log.push(
                    EventKind::Send { peer: header.peer, channel: header.channel },
                    header.step,
                    header.bytes(),
                    begin,
                );
            }
        }
        pending
    }
}

impl<T: Control> Control for Trace<T> {
    forward_control! { rank ranks placement stragglers abort heartbeat last_heard last_work }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.all_gathers.push((round, Instant::now()));
        self.inner.start_all_gather(round, bytes)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        let collected = self.inner.try_all_gather(round)?;
        let started = self.all_gathers.iter().position(|&(started, _)| started == round);
        if let (Some(parts), Some(started)) = (&collected, started) {
            let (_, begin) = self.all_gathers.swap_remove(started);
            let bytes = parts.iter().map(|part| part.len() as u64).sum();
            self.log.push(EventKind::AllGather { round }, self.step, bytes, begin);
        }
        Ok(collected)
    }
}
