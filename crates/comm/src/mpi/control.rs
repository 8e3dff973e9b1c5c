//! Control messages over MPI: all-gathers, heartbeats, aborts. `circulant.rs` describes the paths
//! of those that concern all ranks.
//!
//! A heartbeat contains the latest work of any rank that its sender knows of: the rank that did it,
//! that rank's work count, and the age, because clocks of different nodes do not agree. Its
//! receiver passes it on in its own heartbeats. The count tells new work from work that comes back
//! by another path: without it, two idle ranks would pass the same work to each other, younger each
//! time by the latency of a message, and a deadlock would never be found.

use std::time::{Duration, Instant};

use annulus_core::{Error, HostBuffer, Result};

use super::{
    circulant::{GatherMessage, TreeAllGather},
    endpoint::MpiEndpoint,
    frame::ControlFrame,
    messages::{MessageBuffer, MessageKind},
    peers::RankWork,
    requests::{Address, LONGEST_PIECE},
};

/// Minimum interval between heartbeats, which limits their cost where kernels tick often: a fifth
/// of the interval at the shortest deadline (1 s / 8).
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(25);

/// Size in bytes at which a frame of parts is complete: large enough to amortise its latency, small
/// enough that the copies of parts in flight take little memory.
const FRAME_BYTES: usize = 1 << 20;

impl MpiEndpoint {
    /// Sends all messages of all-gather `round` of a context whose parts are present.
    pub(super) fn forward_parts(&mut self, context: u64, round: u64) -> Result<()> {
        let rank = self.rank;
        while let Some(GatherMessage { receiver, ranks }) =
            self.all_gather(context, round).next(rank)
        {
            // a rank that has left needs no parts any more
            if self.context(context).departures.get(receiver).is_some() {
                continue;
            }
            let mut runs = self.all_gather(context, round).runs(ranks).into_iter().peekable();
            while runs.peek().is_some() {
                let mut parts = Vec::new();
                let mut bytes = 0;
                while let Some(run) = runs.next_if(|_| bytes < FRAME_BYTES) {
                    bytes += run.bytes.len();
                    parts.push(run);
                }
                self.all_gather(context, round).unsent += 1;
                let frame = ControlFrame::GatherParts { context, round, parts }.encode()?;
                let kind = MessageKind::GatherParts { context, peer: receiver, round };
                self.send_frame(self.settings.synchronous, receiver, &frame, kind)?;
            }
        }
        Ok(())
    }

    /// Returns the state of all-gather `round` of a context, created by its first use.
    pub(super) fn all_gather(&mut self, context: u64, round: u64) -> &mut TreeAllGather {
        let ranks = self.ranks;
        let all_gathers = &mut self.context(context).all_gathers;
        all_gathers.entry(round).or_insert_with(|| TreeAllGather::new(ranks))
    }

    /// Sends a frame to some peers, in the standard mode: none of them needs to receive it. A peer
    /// that does not get it fails at its deadline.
    pub(super) fn send_to_each(
        &mut self,
        peers: impl IntoIterator<Item = usize>,
        frame: &ControlFrame,
    ) -> Result<()> {
        let frame = frame.encode()?;
        peers.into_iter().try_for_each(|peer| {
            let kind = MessageKind::FrameSend { peer };
            self.send_frame(false, peer, &frame, kind)
        })
    }

    /// Sends the first abort that this rank sends or receives to its neighbours.
    pub(super) fn flood_abort(&mut self, error: &Error) {
        if std::mem::replace(&mut self.abort_sent, true) || self.enter().is_err() {
            return;
        }
        // another rank's abort is forwarded with its rank, so that all ranks name one origin
        let (rank, what) = match error {
            Error::Aborted { rank, what } => (*rank as u64, what.clone()),
            error => (self.rank as u64, error.to_string()),
        };
        for peer in self.peers.staying.clone() {
            // a rank that does not get it fails at its deadline
            drop(self.send_to_each([peer], &ControlFrame::Abort { rank, what: what.clone() }));
        }
    }

    /// Sends a heartbeat to the neighbours that answer.
    fn send_heartbeats(&mut self, now: Instant) -> Result<()> {
        let RankWork { rank, count, at } = self.work.latest();
        let age = now.saturating_duration_since(at).as_nanos();
        let age = u64::try_from(age).unwrap_or(u64::MAX);
        let frame = ControlFrame::Heartbeat { rank: rank as u64, count, age };
        let staying = self.peers.staying.clone();
        let peers = staying.into_iter().filter(|&peer| self.peers.all[peer].count_heartbeat());
        let peers: Vec<usize> = peers.collect();
        self.send_to_each(peers, &frame)
    }

    /// Sends a frame, not synchronously if it may never be received.
    pub(super) fn send_frame(
        &mut self,
        synchronous: bool,
        peer: usize,
        frame: &HostBuffer,
        kind: MessageKind,
    ) -> Result<()> {
        self.enter()?;
        let to = Address { peer, tag: 0, step: 0, piece: LONGEST_PIECE };
        let Some(control) = &self.control else { return Ok(()) };
        let range = 0..frame.bytes().len() as u64;
        let frame = MessageBuffer::Host(frame.clone());
        self.requests.send(control, synchronous, to, frame, range, kind)
    }

    /// Starts an all-gather of a context.
    pub(super) fn start_all_gather(
        &mut self,
        context: u64,
        round: u64,
        bytes: &[u8],
    ) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        let rank = self.rank;
        if self.all_gather(context, round).has(rank) {
            let want = "an all-gather that this rank has not started";
            return Err(Error::invalid("round", round, want));
        }
        self.idle_since = Instant::now();
        self.try_start_all_gather(context, round, bytes).inspect_err(|error| self.fail(error))
    }

    fn try_start_all_gather(&mut self, number: u64, round: u64, bytes: &[u8]) -> Result<()> {
        // a frame of parts ends with the part that exceeds its size, so one may have half a piece
        if bytes.len() as u64 > LONGEST_PIECE / 2 {
            return Err(Error::unsupported(
                format!("an all-gather of {} bytes per rank", bytes.len()),
                "the transport over MPI",
            ));
        }
        let rank = self.rank;
        let context = self.context(number);
        let started = context.started;
        context.started += 1;
        let all_gather = self.all_gather(number, round);
        all_gather.put(rank, bytes);
        all_gather.number = Some(started);
        self.forward_parts(number, round)
    }

    /// Returns the parts of an all-gather of a context once it is complete.
    pub(super) fn try_all_gather(
        &mut self,
        number: u64,
        round: u64,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        self.pump()?;
        let context = self.context(number);
        let started = context.all_gathers.get(&round).filter(|started| started.number.is_some());
        let Some(all_gather) = started else {
            let want = "an all-gather that this rank has started and not collected";
            return Err(Error::invalid("round", round, want));
        };
        // a rank that has collected may leave, so its frames to other ranks must be sent before
        if all_gather.unsent > 0 || !all_gather.is_complete() {
            return Ok(None);
        }
        context.is_working = false;
        Ok(context.all_gathers.remove(&round).map(TreeAllGather::into_parts))
    }

    /// Returns the ranks whose part of an all-gather has not arrived.
    pub(super) fn stragglers(&self, context: u64, round: u64) -> Vec<usize> {
        let context = self.contexts.get(&context);
        let gather = context.and_then(|context| context.all_gathers.get(&round));
        let missing = |rank: &usize| gather.is_none_or(|gather| !gather.has(*rank));
        (0..self.ranks).filter(missing).collect()
    }

    /// Ends this endpoint, and sends `error` to all ranks.
    pub(super) fn abort(&mut self, error: &Error) {
        self.failed.get_or_insert_with(|| error.clone());
        self.flood_abort(error);
    }

    /// Sends heartbeats, unless it has just sent some. `working` concerns a context.
    pub(super) fn heartbeat(&mut self, context: u64, working: bool) {
        if working {
            self.context(context).is_working = true;
            self.work.work(Instant::now());
        }
        let now = Instant::now();
        let is_early = self
            .last_heartbeat
            .is_some_and(|last| now.saturating_duration_since(last) < HEARTBEAT_INTERVAL);
        if is_early || self.failed.is_some() || self.enter().is_err() {
            return;
        }
        self.last_heartbeat = Some(now);
        if let Err(error) = self.send_heartbeats(now) {
            self.fail(&error);
        }
    }
}
