//! One rank a thread: messages over bounded channels, in host memory.
//!
//! A send hands the receiver a co-owning reference to the sender's buffer. The receiver copies the bytes straight into the buffer that it
//! posted (one copy, no staging), gives its reference up and counts the message as consumed; then the send is done. So a send completes
//! only when it was received, as under `MPI_Ssend`: a schedule that finishes here does not lean on buffering.
//!
//! Nothing blocks but [`Transport::progress`]: what does not fit into a peer's inbox waits in an outbox.
//!
//! # Errors
//! | what happened | error |
//! |---|---|
//! | a message has another length than the receive that was posted for it | [`Error::Comm`] "… truncated: got x bytes, want y" |
//! | a message has a tag that was received before | [`Error::Comm`] "duplicate message …" |
//! | a receive is posted with a tag that is not above the last one's, or in a buffer that somebody else co-owns | [`Error::Comm`] |
//! | a hop names no rank of this ring, or bytes outside its buffer; a round or hop is asked for that was never begun | [`Error::InvalidArgument`], nothing was done |
//! | an endpoint was dropped that this one still waits for | [`Error::PeerLost`] |
//! | a rank called [`Control::abort`] | [`Error::Aborted`] on every other rank, its own error on itself |
//!
//! After any but [`Error::InvalidArgument`] the endpoint is dead and returns the same error again.

mod each_rank;
mod pump;
mod shared;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Space, Transport,
};

pub use self::each_rank::each_rank;
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
    let (inboxes, receivers): (Vec<_>, Vec<_>) =
        (0..ranks).map(|_| sync_channel(16 + 2 * ranks)).unzip();
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
    hop: MessageHeader,
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
        formatter
            .debug_struct("Threads")
            .field("rank", &rank)
            .field("ranks", &ranks)
            .finish_non_exhaustive()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.leave(self.rank);
    }
}

impl Transport<Host> for Threads {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        for send in sends {
            ranges::check(&send.hop, self.shared.ranks(), Host::size(send.buffer))?;
        }
        // within a group the order means nothing
        receives
            .sort_by_key(|incoming| (incoming.hop.peer, incoming.hop.channel, incoming.hop.tag));
        let mut previous = None;
        for incoming in receives.iter() {
            let key = (incoming.hop.peer, incoming.hop.channel);
            let last = previous
                .filter(|&(of, _)| of == key)
                .map(|(_, tag)| tag)
                .or_else(|| self.last_tags.get(&key).copied());
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
            let MessageHeader { channel, tag, step, .. } = *hop;
            let data = Data {
                from: self.rank,
                channel,
                tag,
                step,
                ranges: Arc::clone(&hop.ranges),
                buffer: (*buffer).clone(),
            };
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
        let envelope =
            if let Ok(false) = moved { self.inbox.recv_timeout(patience).ok() } else { None };
        self.shared.awake(self.rank);
        moved?;
        if let Some(envelope) = envelope {
            self.accept(envelope).inspect_err(|error| self.fail(error))?;
        }
        self.pump().map(drop)
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Some(place) =
            self.receives.iter().position(|receive| receive.is_for(hop.peer, hop.channel, hop.tag))
        else {
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
        self.sends
            .iter()
            .enumerate()
            .any(|(peer, sends)| sends.posted > self.shared.consumed(self.rank, peer))
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

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let (rank, bytes) = (self.rank, Arc::<[u8]>::from(bytes));
        if self.gather(round).parts[rank].is_some() {
            return Err(Error::invalid(
                "round",
                round,
                "a gather that this rank has not offered to",
            ));
        }
        self.gather(round).parts[rank] = Some(Arc::clone(&bytes));
        for peer in (0..self.ranks()).filter(|&peer| peer != rank) {
            self.dispatch(peer, Envelope::Offer { from: rank, round, bytes: Arc::clone(&bytes) });
        }
        Ok(())
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        self.pump()?;
        let rank = self.rank;
        let Some(gather) = self.gathers.get(&round).filter(|gather| gather.parts[rank].is_some())
        else {
            return Err(Error::invalid(
                "round",
                round,
                "a gather that this rank has offered to and not collected",
            ));
        };
        // whoever has collected may leave, so its own part must have left before
        let unsent = |envelope: &Envelope| matches!(envelope, Envelope::Offer { round: of, .. } if *of == round);
        if gather.parts.iter().any(Option::is_none) || self.outboxes.iter().flatten().any(unsent) {
            return Ok(None);
        }
        let parts = self.gathers.remove(&round).map(|gather| gather.parts).unwrap_or_default();
        Ok(Some(parts.iter().flatten().map(|part| part.to_vec()).collect()))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        let missing = |rank: &usize| {
            self.gathers.get(&round).is_none_or(|gather| gather.parts[*rank].is_none())
        };
        (0..self.ranks()).filter(missing).collect()
    }

    fn abort(&mut self, error: &Error) {
        self.failed.get_or_insert_with(|| error.clone());
        self.shared.abort(self.rank, error.to_string());
    }

    fn heartbeat(&mut self, working: bool) {
        self.shared.heartbeat(self.rank, working);
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.shared.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.shared.last_work()
    }
}
