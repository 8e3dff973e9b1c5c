//! A transport of some ranks of another one, renumbered from 0.
//!
//! Several handles share one transport, on one thread at a time: a handle for all ranks, and one
//! for each inner ring. Rounds of all-gathers are numbered anew, in the order of their starts.
//!
//! An all-gather of an inner ring is an all-gather of all ranks; each inner ring reads the parts of
//! its members. So no transport needs groups. All inner rings make the same all-gathers in
//! the same order: all ranks agree on all arguments before an inner ring receives them, so that
//! none refuses alone.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Placement, Result, Space,
    Transport,
};

/// A transport with several handles.
struct SharedTransport<S: Space> {
    transport: Box<dyn Transport<S>>,
    next_round: u64,
}

/// A handle on a transport, with some of its ranks.
pub(super) struct Subset<S: Space> {
    shared: Arc<Mutex<SharedTransport<S>>>,
    /// Rank of the shared transport of each rank of this one.
    members: Arc<[usize]>,
    rank: usize,
    /// Round of the shared transport of each all-gather under way.
    rounds: BTreeMap<u64, u64>,
    /// The placement of all ranks; none of a part, whose layout is fixed.
    placement: Option<Placement>,
    /// True for all ranks, whose entries may wait for late ones.
    is_whole: bool,
}

impl<S: Space> Subset<S> {
    /// Makes a transport of all ranks.
    pub(super) fn whole(transport: Box<dyn Transport<S>>) -> Self {
        let members = (0..transport.ranks()).collect();
        let rank = transport.rank();
        let placement = transport.placement().cloned();
        let shared = Arc::new(Mutex::new(SharedTransport { transport, next_round: 0 }));
        Self { shared, members, rank, rounds: BTreeMap::new(), placement, is_whole: true }
    }

    /// Makes another handle on the same ranks, between all-gathers.
    pub(super) fn handle(&self) -> Self {
        let shared = Arc::clone(&self.shared);
        let members = Arc::clone(&self.members);
        let placement = self.placement.clone();
        Self { shared, members, rounds: BTreeMap::new(), placement, ..*self }
    }

    /// Makes a handle on the ranks `members`, of which this is number `rank`.
    pub(super) fn subset(&self, members: Vec<usize>, rank: usize) -> Self {
        let members = members.into();
        Self { members, rank, placement: None, is_whole: false, ..self.handle() }
    }

    /// Locks the shared transport. A panic of another handle's call has ended the plan, so its
    /// state is never computed with.
    fn shared(&self) -> MutexGuard<'_, SharedTransport<S>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a message with its peer's rank of the shared transport.
    fn of_shared(&self, header: &MessageHeader) -> Result<MessageHeader> {
        let peer = self.members.get(header.peer).copied();
        let peer = peer.ok_or_else(|| {
            Error::internal(format!("rank {} of {}", header.peer, self.members.len()))
        })?;
        Ok(MessageHeader { peer, ..header.clone() })
    }

    /// Returns a group of transfers with their peers' ranks of the shared transport.
    fn of_shared_group<'a, M: Space>(
        &self,
        sends: &[Outgoing<'a, M>],
        receives: &mut [Incoming<M>],
    ) -> Result<Vec<Outgoing<'a, M>>> {
        let of_shared = |send: &Outgoing<'a, M>| {
            let header = self.of_shared(&send.header)?;
            Ok(Outgoing { header, buffer: send.buffer, ready: send.ready })
        };
        let sends = sends.iter().map(of_shared).collect::<Result<Vec<_>>>()?;
        for receive in receives {
            receive.header = self.of_shared(&receive.header)?;
        }
        Ok(sends)
    }

    fn start(&mut self, round: u64, bytes: &[u8], is_entry: bool) -> Result<()> {
        let mut shared = self.shared();
        let of_shared = shared.next_round;
        shared.next_round += 1;
        if is_entry {
            shared.transport.start_entry(of_shared, bytes)?;
        } else {
            shared.transport.start_all_gather(of_shared, bytes)?;
        }
        drop(shared);
        self.rounds.insert(round, of_shared);
        Ok(())
    }

    /// Returns the round of the shared transport.
    fn round(&self, round: u64) -> Result<u64> {
        let round = self.rounds.get(&round).copied();
        round.ok_or_else(|| Error::internal("an all-gather that was not started"))
    }
}

impl<S: Space> Transport<S> for Subset<S> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, S>], receives: &mut Vec<Incoming<S>>) -> Result<()> {
        let sends = self.of_shared_group(sends, receives)?;
        self.shared().transport.post(&sends, receives)
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.shared().transport.progress(timeout)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<S>>> {
        let header = self.of_shared(header)?;
        self.shared().transport.take(&header)
    }

    fn post_host(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        let sends = self.of_shared_group(sends, receives)?;
        self.shared().transport.post_host(&sends, receives)
    }

    fn take_host(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let header = self.of_shared(header)?;
        self.shared().transport.take_host(&header)
    }

    fn pending(&self) -> bool {
        self.shared().transport.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.shared().transport.bytes_sent()
    }

    fn posts_ahead(&self) -> bool {
        self.shared().transport.posts_ahead()
    }

    fn runs_groups_in_order(&self) -> bool {
        self.shared().transport.runs_groups_in_order()
    }
}

impl<S: Space> Control for Subset<S> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.members.len()
    }

    fn start_all_gather(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.start(round, bytes, false)
    }

    /// All ranks have entered the call of which an inner ring's entry is a part.
    fn start_entry(&mut self, round: u64, bytes: &[u8]) -> Result<()> {
        self.start(round, bytes, self.is_whole)
    }

    fn try_all_gather(&mut self, round: u64) -> Result<Option<Vec<Vec<u8>>>> {
        let of_shared = self.round(round)?;
        let gathered = self.shared().transport.try_all_gather(of_shared)?;
        let Some(mut gathered) = gathered else { return Ok(None) };
        self.rounds.remove(&round);
        if self.is_whole {
            return Ok(Some(gathered));
        }
        let mut of_member = |&member: &usize| gathered.get_mut(member).map(std::mem::take);
        let of_members = self.members.iter();
        Ok(Some(of_members.map(|member| of_member(member).unwrap_or_default()).collect()))
    }

    fn stragglers(&self, round: u64) -> Vec<usize> {
        let Ok(of_shared) = self.round(round) else { return Vec::new() };
        let late = self.shared().transport.stragglers(of_shared);
        (0..self.members.len()).filter(|&rank| late.contains(&self.members[rank])).collect()
    }

    fn abort(&mut self, error: &Error) {
        self.shared().transport.abort(error);
    }

    fn heartbeat(&mut self, working: bool) {
        self.shared().transport.heartbeat(working);
    }

    fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    fn any_thread(&self) -> bool {
        self.shared().transport.any_thread()
    }

    fn last_heard(&self, peer: usize) -> Instant {
        let peer = self.members.get(peer).copied().unwrap_or_default();
        self.shared().transport.last_heard(peer)
    }

    fn last_work(&self) -> Instant {
        self.shared().transport.last_work()
    }
}
