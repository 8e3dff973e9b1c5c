//! Endpoint: communicators, requests and peers of one rank, with the contexts of its plans; and a
//! handle to an endpoint, as the transport of one plan.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Placement, Result, Transport,
};

use crate::{
    message::{LastTags, MessageKey},
    mpi::{
        CONTROL, Mpi, Settings,
        circulant::{Barrier, TreeAllGather},
        communicator::MpiCommunicator,
        lifetime::{check_process, is_forked},
        messages::{Announcement, MessageBuffer, MpiReceive, QueuedSend, ReceiveStage, WireTags},
        nodes::{NodeMap, gather_records},
        peers::{Departure, Departures, LatestWork, Peers},
        requests::Requests,
    },
    staged::Staging,
};

/// State of one rank that its contexts share.
pub(super) struct MpiEndpoint {
    /// `None` once it is being dropped.
    pub(super) data: Option<MpiCommunicator>,
    pub(super) control: Option<MpiCommunicator>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) settings: Settings,
    pub(super) tags: WireTags,
    /// True if the settings of all ranks let receives with agreed lengths start when they are
    /// posted. False until the records of all ranks are gathered, right after creation.
    pub(super) posts_ahead: bool,
    pub(super) requests: Requests,
    pub(super) staging: Staging,
    pub(super) peers: Peers,
    /// Empty until the records of all ranks are gathered, right after creation.
    pub(super) nodes: Arc<NodeMap>,
    /// By number. A context is removed when it is dropped and its last send has completed.
    pub(super) contexts: BTreeMap<u64, PlanContext>,
    /// Number of the next context that this rank creates.
    pub(super) next_context: u64,
    /// Number of messages that this rank has announced.
    pub(super) announced: u64,
    /// True if a message was sent that no receive will match: the communicators cannot be freed.
    pub(super) has_unmatched: bool,
    pub(super) work: LatestWork,
    /// Barrier of the drop.
    pub(super) barrier: Barrier,
    pub(super) last_heartbeat: Option<Instant>,
    /// Time since which no message has moved.
    pub(super) idle_since: Instant,
    /// Number of polls in which a message has moved: another thread may have made them.
    pub(super) moves: u64,
    pub(super) abort_sent: bool,
    pub(super) failed: Option<Error>,
}

impl MpiEndpoint {
    /// Creates the endpoint of a communicator that is its own, without the records of other ranks
    /// and without contexts.
    pub(super) fn new(data: MpiCommunicator, settings: Settings) -> Result<Self> {
        // a duplicate of `data`, so that at most one operation is ever pending on the caller's
        let control = MpiCommunicator::duplicate(data.as_parent(), CONTROL, &settings.timeout)?;
        let rank = data.rank;
        let ranks = data.ranks;
        let tags = WireTags::new(data.last_tag, ranks).ok_or_else(|| {
            Error::unsupported(
                format!("a ring of {ranks} ranks"),
                format!("an MPI whose tags end at {}", data.last_tag),
            )
        })?;
        let mut endpoint = Self::detached(rank, ranks);
        endpoint.settings = settings;
        endpoint.tags = tags;
        endpoint.data = Some(data);
        endpoint.control = Some(control);
        Ok(endpoint)
    }

    /// Creates an endpoint without communicators, which can neither send nor receive.
    pub(super) fn detached(rank: usize, ranks: usize) -> Self {
        let now = Instant::now();
        Self {
            data: None,
            control: None,
            rank,
            ranks,
            settings: Settings::default(),
            tags: WireTags::default(),
            posts_ahead: false,
            requests: Requests::default(),
            staging: Staging::default(),
            peers: Peers::new(rank, ranks, now),
            nodes: Arc::new(NodeMap::new(Vec::new())),
            contexts: BTreeMap::new(),
            next_context: 0,
            announced: 0,
            has_unmatched: false,
            work: LatestWork::new(rank, now),
            barrier: Barrier::new(rank, ranks),
            last_heartbeat: None,
            idle_since: now,
            moves: 0,
            abort_sent: false,
            failed: None,
        }
    }

    /// Returns the two communicators, `data` and `control`, if this thread may call MPI now.
    pub(super) fn enter(&self) -> Result<(&MpiCommunicator, &MpiCommunicator)> {
        match (&self.data, &self.control) {
            (Some(data), Some(control)) => data.enter().map(|()| (data, control)),
            _ => Err(Error::invalid("MPI", "an endpoint that is being dropped", "one that is not")),
        }
    }

    /// Gathers the locations of all ranks, and finds out if messages may be received ahead: if no
    /// rank announces them and all divide them into the same pieces.
    pub(super) fn gather_records(&mut self) -> Result<()> {
        let (_, communicator) = self.enter()?;
        let messages = self.settings.message_format();
        let records = gather_records(communicator, &messages, &self.settings.timeout)?;
        let is_same = records.iter().all(|record| record.messages == messages);
        self.posts_ahead = is_same && !self.settings.announce;
        self.nodes = Arc::new(NodeMap::new(records));
        Ok(())
    }

    pub(super) fn check_alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Creates the next context of this rank. Returns its number.
    ///
    /// If a context with the same slot of tags still exists, this one announces its messages: ranks
    /// drop contexts at different times, so they cannot choose another slot without a message.
    ///
    /// # Errors
    /// That of a dead endpoint.
    pub(super) fn open_context(&mut self) -> Result<u64> {
        self.check_alive()?;
        let number = self.next_context;
        let slot = self.tags.slot(number);
        let has_same_slot = |(&other, context): (&u64, &PlanContext)| {
            context.is_open && context.posts_ahead && self.tags.slot(other) == slot
        };
        let posts_ahead =
            self.posts_ahead && slot.is_some() && !self.contexts.iter().any(has_same_slot);
        self.next_context += 1;
        // neighbours that have left the endpoint will not create it
        let left: Vec<(usize, Instant)> =
            self.peers.left.iter().map(|(&peer, &at)| (peer, at)).collect();
        let context = self.context(number);
        context.is_open = true;
        context.posts_ahead = posts_ahead;
        for (peer, at) in left {
            context.depart_before_creation(peer, at);
        }
        Ok(number)
    }

    /// Returns the state of a context, created by its first use: frames of ranks that have created
    /// it may arrive before this rank does.
    pub(super) fn context(&mut self, number: u64) -> &mut PlanContext {
        self.contexts.entry(number).or_default()
    }

    /// Returns true if this rank has dropped a context.
    pub(super) fn has_dropped(&self, context: u64) -> bool {
        context < self.next_context
            && self.contexts.get(&context).is_none_or(|context| !context.is_open)
    }

    /// Records that `peer` has left the endpoint, and so all contexts.
    pub(super) fn leave_endpoint(&mut self, peer: usize, at: Instant, has_failed: bool) {
        self.peers.leave(peer, at, has_failed);
        for context in self.contexts.values_mut() {
            context.depart_before_creation(peer, at);
        }
    }
}

impl PlanContext {
    /// Records that `peer` has left the endpoint without having created this context, unless it is
    /// known to have left this one.
    fn depart_before_creation(&mut self, peer: usize, at: Instant) {
        if self.departures.get(peer).is_none() {
            let departure =
                Departure { at, is_forwarded: false, started: 0, unfinished: Vec::new() };
            self.departures.add(peer, departure);
        }
    }
}

/// An endpoint that handles and the list of deferred drops share.
pub(super) struct SharedEndpoint(Mutex<MpiEndpoint>);

impl SharedEndpoint {
    pub(super) const fn new(endpoint: MpiEndpoint) -> Self {
        Self(Mutex::new(endpoint))
    }

    /// Locks the endpoint. A poisoned lock is no error: the endpoint records its own failures.
    pub(super) fn lock(&self) -> MutexGuard<'_, MpiEndpoint> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mpi {
    /// Calls `work` with the endpoint, then notes which neighbours are left.
    fn with_endpoint<R>(&mut self, work: impl FnOnce(&mut MpiEndpoint, u64) -> R) -> R {
        let mut endpoint = self.shared.lock();
        let result = work(&mut endpoint, self.context);
        // neighbours only leave
        if endpoint.peers.staying.len() != self.watched.len() {
            self.watched = endpoint.peers.staying.clone();
        }
        result
    }
}

impl Transport<Host> for Mpi {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        check_process()?;
        self.with_endpoint(|endpoint, context| endpoint.post(context, sends, receives))
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        // not in the polls between tiles
        if !timeout.is_zero() {
            check_process()?;
        }
        self.shared.wait(timeout, &mut self.seen)?;
        self.with_endpoint(|_, _| Ok(()))
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken =
            self.with_endpoint(|endpoint, context| endpoint.take_buffer(context, header))?;
        Ok(taken.and_then(MessageBuffer::into_host).map(|buffer| Arrived { buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        let endpoint = self.shared.lock();
        endpoint.contexts.get(&self.context).is_some_and(|context| context.has_unsent())
    }

    fn bytes_sent(&self) -> u64 {
        let endpoint = self.shared.lock();
        endpoint.contexts.get(&self.context).map_or(0, |context| context.bytes_sent)
    }

    fn posts_ahead(&self) -> bool {
        self.posts_ahead
    }

    fn runs_groups_in_order(&self) -> bool {
        false
    }
}

impl Control for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        check_process()?;
        self.with_endpoint(|endpoint, context| endpoint.start_all_gather(context, round, bytes))
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.with_endpoint(|endpoint, context| endpoint.try_all_gather(context, round))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        self.shared.lock().stragglers(self.context, round)
    }

    fn abort(&mut self, error: &Error) {
        if !is_forked() {
            self.with_endpoint(|endpoint, _| endpoint.abort(error));
        }
    }

    fn heartbeat(&mut self, working: bool) {
        if !is_forked() {
            self.with_endpoint(|endpoint, context| endpoint.heartbeat(context, working));
        }
    }

    fn placement(&self) -> Option<&Placement> {
        Some(self.nodes.placement())
    }

    fn any_thread(&self) -> bool {
        Self::any_thread(self)
    }

    fn last_heard(&self, peer: usize) -> Instant {
        if peer == self.rank { Instant::now() } else { self.shared.lock().peers.last_heard(peer) }
    }

    fn watched(&self) -> Option<&[usize]> {
        Some(&self.watched)
    }

    fn last_work(&self) -> Instant {
        self.shared.lock().work.latest().at
    }
}

// Context: the messages of one plan over an endpoint that several plans may share.
//
// Blocks, all-gathers and last frames carry the number of their context, so messages of different
// plans are never matched. Everything else belongs to the endpoint: communicators, locations,
// heartbeats, aborts.
//
// Contexts are numbers, not communicators: a further plan costs no message. Ranks drop plans at
// different times, so they could agree on a free slot of tags (`messages.rs`) only by a message.
// Instead the number of a plan determines its slot, and a plan whose slot is taken on any rank
// announces its messages on all. A fatal error ends all plans of an endpoint, because messages of
// the plan that failed may still be in flight.

/// State of one plan's messages on this rank.
#[derive(Default)]
pub(super) struct PlanContext {
    /// False before this rank has created the context: frames of others may arrive earlier.
    pub(super) is_open: bool,
    /// True if receives with agreed lengths start when they are posted. Then the context has its
    /// slot of tags (`messages.rs`) for itself.
    pub(super) posts_ahead: bool,
    /// Sends that have not completed, with their steps, in order.
    pub(super) sends: Vec<(MessageKey, usize)>,
    /// Those of them that follow another one and have not started.
    pub(super) queued: VecDeque<QueuedSend>,
    /// Posted and not yet taken.
    pub(super) receives: Vec<MpiReceive>,
    /// Announced before their receives were posted.
    pub(super) early: Vec<Announcement>,
    pub(super) last_tags: LastTags,
    pub(super) all_gathers: BTreeMap<u64, TreeAllGather>,
    /// Number of all-gathers that this rank has started.
    pub(super) started: u64,
    /// Step of the last post.
    pub(super) step: usize,
    pub(super) bytes_sent: u64,
    /// True from a heartbeat of a working rank to the end of the next all-gather.
    pub(super) is_working: bool,
    pub(super) departures: Departures,
}

impl PlanContext {
    /// Counts a send as done.
    pub(super) fn end_send(&mut self, key: MessageKey) {
        if let Some(index) = self.sends.iter().position(|(send, _)| *send == key) {
            self.sends.remove(index);
        }
    }

    /// Returns true while any send is in flight.
    pub(super) fn has_unsent(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Returns true while any send or receive is in flight.
    fn has_transfers(&self) -> bool {
        self.has_unsent()
            || self.receives.iter().any(|receive| receive.stage != ReceiveStage::Arrived)
    }

    /// Returns true if this rank is within a call that needs other ranks.
    pub(super) fn is_busy(&self) -> bool {
        self.is_working || self.has_transfers()
    }

    /// Returns true if a rank with this last frame is missing in an all-gather of this rank.
    pub(super) fn misses(&self, departure: &Departure) -> bool {
        self.all_gathers.iter().any(|(round, gather)| {
            gather.is_incomplete()
                && (gather.number >= Some(departure.started)
                    || departure.unfinished.contains(round))
        })
    }

    /// Returns the step in which a message from or to `peer`, which has left, can no longer
    /// complete. `overdue` is true if messages in flight have had their time to.
    pub(super) fn missing_from(
        &self,
        peer: usize,
        departure: &Departure,
        overdue: bool,
    ) -> Option<usize> {
        // its own last frame comes after all its other frames, but its blocks may take a little
        // longer
        let is_final = overdue || !departure.is_forwarded;
        let is_missing = |receive: &&MpiReceive| match receive.stage {
            ReceiveStage::Posted => {
                receive.header.peer == peer
                    && is_final
                    && (overdue || !self.early.iter().any(|early| early.is_for(receive)))
            }
            ReceiveStage::Direct | ReceiveStage::Staged => receive.header.peer == peer && overdue,
            ReceiveStage::Arrived => false,
        };
        let receive = self.receives.iter().find(is_missing).map(|receive| receive.header.step);
        let oldest = || self.sends.iter().find(|(key, _)| key.peer == peer);
        let send = || oldest().filter(|_| overdue).map(|&(_, step)| step);
        // a rank that started an all-gather may leave while other ranks still forward its part
        let started = Some(departure.started);
        let gather = || {
            let misses =
                |gather: &TreeAllGather| gather.is_incomplete() && gather.number >= started;
            self.all_gathers.values().any(misses)
        };
        receive.or_else(send).or_else(|| gather().then_some(self.step))
    }

    /// Returns true if the rank of `departure` has left without forwarding all parts of an
    /// all-gather that is incomplete here.
    pub(super) fn is_unfinished_by(&self, departure: &Departure) -> bool {
        let is_incomplete =
            |round: &u64| self.all_gathers.get(round).is_some_and(TreeAllGather::is_incomplete);
        departure.unfinished.iter().any(is_incomplete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank() -> MpiEndpoint {
        let mut rank = MpiEndpoint::detached(0, 3);
        rank.tags = WireTags::new(i32::MAX as u64, 3).unwrap();
        rank.posts_ahead = true;
        rank
    }

    #[test]
    fn a_context_whose_slot_is_taken_announces_its_messages() {
        let mut rank = rank();
        let slots = (1..).find(|&number| rank.tags.slot(number) == Some(0)).unwrap();
        for number in 0..slots {
            assert_eq!(rank.open_context(), Ok(number));
            assert!(rank.context(number).posts_ahead);
        }
        // the slot of context 0
        assert_eq!(rank.open_context(), Ok(slots));
        assert!(!rank.context(slots).posts_ahead);
        // a context that announces takes no slot
        rank.contexts.remove(&0);
        rank.next_context = 2 * slots;
        assert_eq!(rank.open_context(), Ok(2 * slots));
        assert!(rank.context(2 * slots).posts_ahead);
        assert!(rank.has_dropped(0) && !rank.has_dropped(1) && !rank.has_dropped(2 * slots + 1));
        rank.failed = Some(Error::PeerLost { peer: 1, step: 0 });
        assert_eq!(rank.open_context(), Err(Error::PeerLost { peer: 1, step: 0 }));
    }

    #[test]
    fn a_neighbour_that_leaves_the_endpoint_leaves_every_context() {
        let now = Instant::now();
        let mut rank = rank();
        rank.open_context().unwrap();
        let own = Departure { at: now, is_forwarded: false, started: 7, unfinished: Vec::new() };
        rank.context(0).departures.add(1, own.clone());
        rank.leave_endpoint(1, now, false);
        assert_eq!(rank.context(0).departures.get(1), Some(&own));
        // it never creates the next one, of which this rank waits for it in vain
        rank.open_context().unwrap();
        let started = rank.context(1).departures.get(1).map(|departure| departure.started);
        assert_eq!(started, Some(0));
    }
}
