//! What an endpoint does whenever it is called: outboxes to inboxes, inboxes to posted buffers, receipts, failures.

use std::sync::mpsc::TrySendError;

use annulus_core::{Error, Host, Incoming, MessageHeader, Result, Space};

use super::{
    Gather, Receive, Threads,
    shared::{Data, Envelope},
};
use crate::ranges;

impl Threads {
    /// Does everything that can be done without waiting; whether anything was. An error is for good.
    pub(super) fn pump(&mut self) -> Result<bool> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.try_pump().inspect_err(|error| self.fail(error))
    }

    /// Remembers what killed this endpoint. A bad argument does not.
    pub(super) fn fail(&mut self, error: &Error) {
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
            Some((rank, what)) if *rank != self.rank => {
                Err(Error::Aborted { rank: *rank, what: what.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Puts an envelope into a peer's inbox, behind those that wait for room in it.
    pub(super) fn dispatch(&mut self, peer: usize, envelope: Envelope) {
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
            self.shared.heartbeat(self.rank, false);
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

    pub(super) fn accept(&mut self, envelope: Envelope) -> Result<()> {
        match envelope {
            Envelope::Wake => Ok(()),
            Envelope::Offer { from, round, bytes } => {
                self.gather(round).parts[from] = Some(bytes);
                Ok(())
            }
            Envelope::Data(data) => {
                let (peer, channel, tag) = (data.from, data.channel, data.tag);
                let posted = self
                    .receives
                    .iter()
                    .position(|receive| receive.is_for(peer, channel, tag) && !receive.arrived);
                if let Some(receive) = posted {
                    return self.deliver(receive, data);
                }
                let late = self.last_tags.get(&(peer, channel)).is_some_and(|&last| tag <= last);
                if late
                    || self
                        .early
                        .iter()
                        .any(|early| (early.from, early.channel, early.tag) == (peer, channel, tag))
                {
                    return Err(Error::Comm {
                        peer,
                        step: data.step,
                        what: format!("duplicate message {channel:?} {tag}"),
                    });
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
            let what = format!(
                "message {:?} {} truncated: got {got} bytes, want {want}",
                hop.channel, hop.tag
            );
            return Err(Error::Comm { peer, step, what });
        }
        let Some(bytes) = buffer.bytes_mut() else {
            return Err(Error::Comm {
                peer,
                step,
                what: "the buffer of a posted receive is in use".to_owned(),
            });
        };
        ranges::copy(data.buffer.bytes(), &data.ranges, bytes, &hop.ranges);
        *arrived = true;
        drop(data);
        self.shared.count_consumed(peer, self.rank);
        self.shared.heartbeat(self.rank, true);
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
        let receive =
            self.receives.iter().find(|receive| receive.hop.peer == peer && !receive.arrived);
        let receive = receive.map(|receive| receive.hop.step);
        let send = || self.sends[peer].steps.front().copied();
        let gather = || {
            self.gathers
                .values()
                .any(|gather| gather.parts[self.rank].is_some() && gather.parts[peer].is_none())
        };
        let step = receive.or_else(send).or_else(|| gather().then_some(self.step))?;
        Some((peer, step))
    }

    pub(super) fn gather(&mut self, round: u64) -> &mut Gather {
        let ranks = self.shared.ranks();
        self.gathers.entry(round).or_insert_with(|| Gather { parts: vec![None; ranks] })
    }

    pub(super) fn check_receive(&self, incoming: &Incoming<Host>, last: Option<u64>) -> Result<()> {
        let MessageHeader { peer, step, channel, tag, .. } = incoming.hop;
        ranges::check(&incoming.hop, self.shared.ranks(), Host::size(&incoming.buffer))?;
        if last.is_some_and(|last| tag <= last) {
            return Err(Error::Comm {
                peer,
                step,
                what: format!(
                    "receive {channel:?} {tag} posted after a tag as high: tags only grow"
                ),
            });
        }
        if incoming.buffer.is_shared() {
            return Err(Error::Comm {
                peer,
                step,
                what: format!("the buffer of receive {channel:?} {tag} is in use"),
            });
        }
        Ok(())
    }
}
