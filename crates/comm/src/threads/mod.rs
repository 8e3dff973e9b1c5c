//! One rank a thread: messages over bounded channels, in host memory.
//!
//! A send hands the receiver a co-owning reference to the sender's buffer. The receiver copies the bytes straight into the buffer that it
//! posted (one copy, no staging), gives its reference up and counts the message as consumed; then the send is done. So a send completes
//! only when it was received, as under `MPI_Ssend`: a schedule that finishes here does not lean on buffering.
//!
//! Nothing blocks but [`Transport::progress`](annulus_core::Transport::progress): what does not fit into a peer's inbox waits in an outbox.
//!
//! # Errors
//! | what happened | error |
//! |---|---|
//! | a message has another length than the receive that was posted for it | [`Error::Comm`] "… truncated: got x bytes, want y" |
//! | a message has a tag that was received before | [`Error::Comm`] "duplicate message …" |
//! | a receive is posted with a tag that is not above the last one's, or in a buffer that somebody else co-owns | [`Error::Comm`] |
//! | a hop names no rank of this ring, or bytes outside its buffer; a round or hop is asked for that was never begun | [`Error::InvalidArgument`], nothing was done |
//! | an endpoint was dropped that this one still waits for | [`Error::PeerLost`] |
//! | a rank called [`Control::abort`](annulus_core::Control::abort) | [`Error::Aborted`] on every other rank, its own error on itself |
//!
//! After any but [`Error::InvalidArgument`] the endpoint is dead and returns the same error again.

mod shared;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        mpsc::{Receiver, TrySendError, sync_channel},
    },
    time::{Duration, Instant},
};

use annulus_core::{Arrived, Channel, Control, Error, Hop, Host, HostBuffer, Incoming, Outgoing, Result, Space, Transport};

use self::shared::{Data, Envelope, Shared};
use crate::ranges;

/// Makes a ring of `ranks` endpoints, number r for rank r. Each may be sent to its own thread.
///
/// # Examples
/// ```
/// use annulus_core::Control;
/// let ring = annulus_comm::threads::ring(3);
/// assert_eq!(ring.iter().map(|endpoint| endpoint.rank()).collect::<Vec<_>>(), [0, 1, 2]);
/// ```
pub fn ring(ranks: usize) -> Vec<Threads> {
    // room for a gather and for a step's messages from everybody; more goes through the outboxes
    let (inboxes, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| sync_channel(16 + 2 * ranks)).unzip();
    let shared = Arc::new(Shared::new(inboxes));
    let endpoint = |(rank, inbox)| Threads {
        rank,
        shared: Arc::clone(&shared),
        inbox,
        outboxes: (0..ranks).map(|_| VecDeque::new()).collect(),
        receives: Vec::new(),
        early: Vec::new(),
        last_tags: HashMap::new(),
        sends: (0..ranks).map(|_| Sends::default()).collect(),
        gathers: BTreeMap::new(),
        step: 0,
        consumed_seen: 0,
        bytes_sent: 0,
        failed: None,
    };
    receivers.into_iter().enumerate().map(endpoint).collect()
}

/// One rank's endpoint of a ring of threads, made by [`ring`].
pub struct Threads {
    rank: usize,
    shared: Arc<Shared>,
    inbox: Receiver<Envelope>,
    /// What did not fit into each peer's inbox.
    outboxes: Vec<VecDeque<Envelope>>,
    /// Posted and not yet taken.
    receives: Vec<Receive>,
    /// Came before its receive was posted.
    early: Vec<Data>,
    /// The last tag that was posted for a receive.
    last_tags: HashMap<(usize, Channel), u64>,
    /// To each peer.
    sends: Vec<Sends>,
    gathers: BTreeMap<u64, Gather>,
    /// The step that was posted last.
    step: usize,
    consumed_seen: u64,
    bytes_sent: u64,
    failed: Option<Error>,
}

struct Receive {
    hop: Hop,
    buffer: HostBuffer,
    arrived: bool,
}

impl Receive {
    fn is_for(&self, peer: usize, channel: Channel, tag: u64) -> bool {
        (self.hop.peer, self.hop.channel, self.hop.tag) == (peer, channel, tag)
    }
}

/// Sends to one peer: how many ever, and the steps of those that may not be consumed yet.
#[derive(Default)]
struct Sends {
    posted: u64,
    steps: VecDeque<usize>,
}

struct Gather {
    parts: Vec<Option<Arc<[u8]>>>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, ranks) = (self.rank, self.shared.ranks());
        formatter.debug_struct("Threads").field("rank", &rank).field("ranks", &ranks).finish_non_exhaustive()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.leave(self.rank);
    }
}

impl Threads {
    /// Does everything that can be done without waiting; whether anything was. An error is for good.
    fn pump(&mut self) -> Result<bool> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.try_pump().inspect_err(|error| self.fail(error))
    }

    /// Remembers what killed this endpoint. A bad argument does not.
    fn fail(&mut self, error: &Error) {
        if error.is_fatal() {
            self.failed.get_or_insert_with(|| error.clone());
        }
    }

    fn try_pump(&mut self) -> Result<bool> {
        self.check_abort()?;
        let mut moved = self.flush();
        moved |= self.drain()?;
        moved |= self.count_receipts();
        if let Some((peer, _)) = (0..self.shared.ranks()).find_map(|peer| self.missed(peer)) {
            // what it did before it left is visible by now: its last messages, its last receipts, its abort
            self.drain()?;
            self.count_receipts();
            self.check_abort()?;
            if let Some((peer, step)) = self.missed(peer) {
                return Err(Error::PeerLost { peer, step });
            }
        }
        Ok(moved)
    }

    fn check_abort(&self) -> Result<()> {
        match self.shared.aborted() {
            Some((rank, what)) if *rank != self.rank => Err(Error::Aborted { rank: *rank, what: what.clone() }),
            _ => Ok(()),
        }
    }

    /// Puts an envelope into a peer's inbox, behind those that wait for room in it.
    fn dispatch(&mut self, peer: usize, envelope: Envelope) {
        self.outboxes[peer].push_back(envelope);
        self.flush_to(peer);
    }

    fn flush(&mut self) -> bool {
        let mut moved = false;
        for peer in 0..self.outboxes.len() {
            moved |= self.flush_to(peer);
        }
        moved
    }

    fn flush_to(&mut self, peer: usize) -> bool {
        let mut moved = false;
        while let Some(envelope) = self.outboxes[peer].pop_front() {
            match self.shared.inbox(peer).try_send(envelope) {
                Ok(()) => moved = true,
                Err(TrySendError::Full(envelope)) => {
                    self.outboxes[peer].push_front(envelope);
                    break;
                }
                // whether the peer still owes anything is judged in `missed`
                Err(TrySendError::Disconnected(_)) => self.outboxes[peer].clear(),
            }
        }
        if moved {
            self.shared.beat(self.rank, false);
        }
        moved
    }

    /// Takes in what has come; also matches early messages with the receives that were posted since.
    fn drain(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut place = 0;
        while let Some(data) = self.early.get(place) {
            let (peer, channel, tag) = (data.from, data.channel, data.tag);
            match self.receives.iter().position(|receive| receive.is_for(peer, channel, tag)) {
                Some(receive) => {
                    let data = self.early.remove(place);
                    self.deliver(receive, data)?;
                    moved = true;
                }
                None => place += 1,
            }
        }
        while let Ok(envelope) = self.inbox.try_recv() {
            self.accept(envelope)?;
            moved = true;
        }
        Ok(moved)
    }

    fn accept(&mut self, envelope: Envelope) -> Result<()> {
        match envelope {
            Envelope::Wake => Ok(()),
            Envelope::Offer { from, round, bytes } => {
                self.gather(round).parts[from] = Some(bytes);
                Ok(())
            }
            Envelope::Data(data) => {
                let (peer, channel, tag) = (data.from, data.channel, data.tag);
                let posted = self.receives.iter().position(|receive| receive.is_for(peer, channel, tag) && !receive.arrived);
                if let Some(receive) = posted {
                    return self.deliver(receive, data);
                }
                let late = self.last_tags.get(&(peer, channel)).is_some_and(|&last| tag <= last);
                if late || self.early.iter().any(|early| (early.from, early.channel, early.tag) == (peer, channel, tag)) {
                    return Err(Error::Comm { peer, step: data.step, what: format!("duplicate message {channel:?} {tag}") });
                }
                self.early.push(data);
                Ok(())
            }
        }
    }

    /// Copies a message to where it was wanted, and lets go of the sender's buffer.
    fn deliver(&mut self, receive: usize, data: Data) -> Result<()> {
        let Receive { hop, buffer, arrived } = &mut self.receives[receive];
        let (peer, step) = (hop.peer, hop.step);
        let (got, want) = (data.bytes(), hop.bytes());
        if got != want {
            let what = format!("message {:?} {} truncated: got {got} bytes, want {want}", hop.channel, hop.tag);
            return Err(Error::Comm { peer, step, what });
        }
        let Some(bytes) = buffer.bytes_mut() else {
            return Err(Error::Comm { peer, step, what: "the buffer of a posted receive is in use".to_owned() });
        };
        ranges::copy(data.buffer.bytes(), &data.ranges, bytes, &hop.ranges);
        *arrived = true;
        drop(data);
        self.shared.count_consumed(peer, self.rank);
        self.shared.beat(self.rank, true);
        Ok(())
    }

    /// Forgets sends that were consumed; whether there were any.
    fn count_receipts(&mut self) -> bool {
        let mut total = 0;
        for (peer, sends) in self.sends.iter_mut().enumerate() {
            let consumed = self.shared.consumed(self.rank, peer);
            total += consumed;
            while sends.steps.len() as u64 > sends.posted - consumed {
                sends.steps.pop_front();
            }
        }
        std::mem::replace(&mut self.consumed_seen, total) != total
    }

    /// The peer and the step in which it is missed, if this peer left although something is still wanted of it.
    fn missed(&self, peer: usize) -> Option<(usize, usize)> {
        if !self.shared.has_left(peer) {
            return None;
        }
        let receive = self.receives.iter().find(|receive| receive.hop.peer == peer && !receive.arrived);
        let receive = receive.map(|receive| receive.hop.step);
        let send = || self.sends[peer].steps.front().copied();
        let gather = || self.gathers.values().any(|gather| gather.parts[self.rank].is_some() && gather.parts[peer].is_none());
        let step = receive.or_else(send).or_else(|| gather().then_some(self.step))?;
        Some((peer, step))
    }

    fn gather(&mut self, round: u64) -> &mut Gather {
        let ranks = self.shared.ranks();
        self.gathers.entry(round).or_insert_with(|| Gather { parts: vec![None; ranks] })
    }

    fn check_receive(&self, incoming: &Incoming<Host>, last: Option<u64>) -> Result<()> {
        let Hop { peer, step, channel, tag, .. } = incoming.hop;
        ranges::check(&incoming.hop, self.shared.ranks(), Host::size(&incoming.buffer))?;
        if last.is_some_and(|last| tag <= last) {
            return Err(Error::Comm { peer, step, what: format!("receive {channel:?} {tag} posted after a tag as high: tags only grow") });
        }
        if incoming.buffer.is_shared() {
            return Err(Error::Comm { peer, step, what: format!("the buffer of receive {channel:?} {tag} is in use") });
        }
        Ok(())
    }
}

impl Transport<Host> for Threads {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, Host>], receives: &mut Vec<Incoming<Host>>) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        for send in sends {
            ranges::check(&send.hop, self.shared.ranks(), Host::size(send.buffer))?;
        }
        // within a group the order means nothing
        receives.sort_by_key(|incoming| (incoming.hop.peer, incoming.hop.channel, incoming.hop.tag));
        let mut previous = None;
        for incoming in receives.iter() {
            let key = (incoming.hop.peer, incoming.hop.channel);
            let last = previous.filter(|&(of, _)| of == key).map(|(_, tag)| tag).or_else(|| self.last_tags.get(&key).copied());
            let checked = self.check_receive(incoming, last);
            checked.inspect_err(|error| self.fail(error))?;
            previous = Some((key, incoming.hop.tag));
        }
        for Incoming { hop, buffer } in receives.drain(..) {
            self.step = hop.step;
            self.last_tags.insert((hop.peer, hop.channel), hop.tag);
            self.receives.push(Receive { hop, buffer, arrived: false });
        }
        for Outgoing { hop, buffer, .. } in sends {
            self.step = hop.step;
            self.bytes_sent += hop.bytes();
            self.sends[hop.peer].posted += 1;
            self.sends[hop.peer].steps.push_back(hop.step);
            let Hop { channel, tag, step, .. } = *hop;
            let data = Data { from: self.rank, channel, tag, step, ranges: Arc::clone(&hop.ranges), buffer: (*buffer).clone() };
            self.dispatch(hop.peer, Envelope::Data(data));
        }
        Ok(())
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        if self.pump()? || patience.is_zero() {
            return Ok(());
        }
        // nobody tells when a full inbox has room again
        let blocked = self.outboxes.iter().any(|outbox| !outbox.is_empty());
        let patience = if blocked { patience.min(Duration::from_millis(1)) } else { patience };
        self.shared.fall_asleep(self.rank);
        let moved = self.pump();
        let envelope = if let Ok(false) = moved { self.inbox.recv_timeout(patience).ok() } else { None };
        self.shared.awake(self.rank);
        moved?;
        if let Some(envelope) = envelope {
            self.accept(envelope).inspect_err(|error| self.fail(error))?;
        }
        self.pump().map(drop)
    }

    fn take(&mut self, hop: &Hop) -> Result<Option<Arrived<Host>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Some(place) = self.receives.iter().position(|receive| receive.is_for(hop.peer, hop.channel, hop.tag)) else {
            let got = format!("{:?} {} from rank {}", hop.channel, hop.tag, hop.peer);
            return Err(Error::invalid("hop", got, "a receive that was posted and not yet taken"));
        };
        if !self.receives[place].arrived {
            return Ok(None);
        }
        let Receive { buffer, .. } = self.receives.swap_remove(place);
        Ok(Some(Arrived { buffer, ready: () }))
    }

    fn pending(&self) -> bool {
        self.sends.iter().enumerate().any(|(peer, sends)| sends.posted > self.shared.consumed(self.rank, peer))
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

impl Control for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.ranks()
    }

    fn offer(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let (rank, bytes) = (self.rank, Arc::<[u8]>::from(bytes));
        if self.gather(round).parts[rank].is_some() {
            return Err(Error::invalid("round", round, "a gather that this rank has not offered to"));
        }
        self.gather(round).parts[rank] = Some(Arc::clone(&bytes));
        for peer in (0..self.ranks()).filter(|&peer| peer != rank) {
            self.dispatch(peer, Envelope::Offer { from: rank, round, bytes: Arc::clone(&bytes) });
        }
        Ok(())
    }

    fn collect(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.pump()?;
        let rank = self.rank;
        let Some(gather) = self.gathers.get(&round).filter(|gather| gather.parts[rank].is_some()) else {
            return Err(Error::invalid("round", round, "a gather that this rank has offered to and not collected"));
        };
        // whoever has collected may leave, so its own part must have left before
        let unsent = |envelope: &Envelope| matches!(envelope, Envelope::Offer { round: of, .. } if *of == round);
        if gather.parts.iter().any(Option::is_none) || self.outboxes.iter().flatten().any(unsent) {
            return Ok(None);
        }
        let parts = self.gathers.remove(&round).map(|gather| gather.parts).unwrap_or_default();
        Ok(Some(parts.iter().flatten().map(|part| part.to_vec()).collect()))
    }

    fn missing(&self, round: u64) -> Vec<usize> {
        let missing = |rank: &usize| self.gathers.get(&round).is_none_or(|gather| gather.parts[*rank].is_none());
        (0..self.ranks()).filter(missing).collect()
    }

    fn abort(&mut self, error: &Error) {
        self.failed.get_or_insert_with(|| error.clone());
        self.shared.abort(self.rank, error.to_string());
    }

    fn beat(&mut self, working: bool) {
        self.shared.beat(self.rank, working);
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.shared.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.shared.last_work()
    }
}
