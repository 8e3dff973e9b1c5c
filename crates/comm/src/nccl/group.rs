//! The messages of one post: from buffers to NCCL's calls and back.

use std::collections::BTreeMap;

use annulus_core::{Arrived, Hop, Incoming, Outgoing, Result, Space};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event, Stream};

use super::{Side, comm, communicator::Communicator};
use crate::pieces::{self, Scratch};

/// Posted, and not handed over yet.
#[derive(Default)]
pub(super) struct Group {
    sends: Vec<(Side, Event)>,
    receives: Vec<Side>,
}

/// Handed over. Everything that NCCL touches is co-owned here until its work is done.
pub(super) struct Flying {
    sends: Vec<Side>,
    receives: Vec<Side>,
    /// Of each receive that lies in pieces: where it comes in one.
    landing: Vec<Option<CudaBuffer>>,
    /// After all of it, once NCCL has accepted it.
    done: Option<Event>,
}

/// Receives that are done.
type Arrivals = Vec<(Hop, Arrived<CudaSpace>)>;

/// The order of messages that both ends of a pair share.
fn order(hop: &Hop) -> (usize, annulus_core::Channel, u64) {
    (hop.peer, hop.channel, hop.tag)
}

/// Where a message in one piece lies.
fn whole(hop: &Hop) -> Option<u64> {
    match &*hop.ranges {
        [only] => Some(only.start),
        _ => None,
    }
}

/// The groups of one post, in the order in which they are handed over: a group for each part of a block that travels in parts.
///
/// Parts of one message have tags that count up from the step's own, which every message of a post has that travels whole. So both ends of a message
/// find it in the same group of the same post, and no rank waits in one group for what another rank sends in a later one.
pub(super) fn groups<S: Space<Buffer = CudaBuffer, Event = Event>>(
    sends: &[Outgoing<'_, S>],
    receives: &mut Vec<Incoming<S>>,
) -> impl Iterator<Item = Group> {
    let mut groups: BTreeMap<u64, Group> = BTreeMap::new();
    for Outgoing { hop, buffer, ready } in sends {
        let group = groups.entry(hop.tag).or_default();
        group.sends.push(((hop.clone(), (*buffer).clone()), (*ready).clone()));
    }
    for Incoming { hop, buffer } in receives.drain(..) {
        groups.entry(hop.tag).or_default().receives.push((hop, buffer));
    }
    groups.into_values().map(|mut group| {
        group.sends.sort_by_key(|((hop, _), _)| order(hop));
        group.receives.sort_by_key(|(hop, _)| order(hop));
        group
    })
}

impl Group {
    /// The other end and the step of the first message.
    pub(super) fn first(&self) -> Option<(usize, usize)> {
        let hops = self.receives.iter().chain(self.sends.iter().map(|(side, _)| side));
        hops.map(|(hop, _)| (hop.peer, hop.step)).next()
    }

    pub(super) fn receives(&self) -> impl Iterator<Item = &Hop> {
        self.receives.iter().map(|(hop, _)| hop)
    }

    pub(super) fn sends(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Queues it, after whatever its buffers wait for.
    pub(super) fn hand_over(self, communicator: &Communicator, stream: &Stream, scratch: &mut Scratch) -> Result<Flying> {
        let (peer, step) = self.first().unwrap_or_default();
        let mut used = Vec::new();
        let mut outgoing = Vec::with_capacity(self.sends.len());
        for ((hop, buffer), ready) in &self.sends {
            stream.wait_for(ready)?;
            let at = match whole(hop) {
                Some(start) => buffer.address() + start,
                None => {
                    let one = scratch.take(hop.bytes(), stream)?;
                    pieces::gather(stream, hop, buffer, &one)?;
                    used.push(one);
                    used.last().map_or(0, CudaBuffer::address)
                }
            };
            outgoing.push((at, hop.bytes(), hop.peer));
        }
        let (mut incoming, mut landing) = (Vec::with_capacity(self.receives.len()), Vec::with_capacity(self.receives.len()));
        for (hop, buffer) in &self.receives {
            // work that was queued on it earlier comes first
            buffer.wait_on(stream)?;
            let one = if whole(hop).is_some() { None } else { Some(scratch.take(hop.bytes(), stream)?) };
            let at = one.as_ref().map_or_else(|| buffer.address() + whole(hop).unwrap_or(0), CudaBuffer::address);
            incoming.push((at, hop.bytes(), hop.peer));
            landing.push(one);
        }
        // no bytes are no message, on both sides
        for side in [&mut outgoing, &mut incoming] {
            side.retain(|&(_, bytes, _)| bytes > 0);
        }
        if !outgoing.is_empty() || !incoming.is_empty() {
            // SAFETY: the ranges were checked against their buffers, which `Flying` keeps.
            let queued = unsafe { communicator.group(&outgoing, &incoming, stream) };
            queued.map_err(|(named, what)| comm(named.unwrap_or(peer), step, what))?;
        }
        used.into_iter().for_each(|one| scratch.give(one));
        let sends = self.sends.into_iter().map(|(side, _)| side).collect();
        Ok(Flying { sends, receives: self.receives, landing, done: None })
    }
}

impl Flying {
    pub(super) fn first(&self) -> Option<(usize, usize)> {
        self.receives.iter().chain(&self.sends).map(|(hop, _)| (hop.peer, hop.step)).next()
    }

    pub(super) fn receives(&self) -> impl Iterator<Item = &Hop> {
        self.receives.iter().map(|(hop, _)| hop)
    }

    pub(super) fn sends(&self) -> bool {
        !self.sends.is_empty()
    }

    /// NCCL has accepted it: what comes now into the stream comes after it.
    pub(super) fn mark(&mut self, stream: &Stream, scratch: &mut Scratch) -> Result<()> {
        for ((hop, buffer), landing) in self.receives.iter().zip(&mut self.landing) {
            if let Some(one) = landing.take() {
                pieces::scatter(stream, hop, buffer, &one)?;
                scratch.give(one);
            }
        }
        let done = stream.record()?;
        // a buffer that is sent keeps its last use, which may be a kernel's: nobody writes to it while it is co-owned here
        for (_, buffer) in &self.receives {
            buffer.touched_before(&done);
        }
        self.done = Some(done);
        Ok(())
    }

    /// What has come, once all is done. Given back once.
    pub(super) fn landed(&mut self) -> Result<Option<Arrivals>> {
        let Some(done) = self.done.as_ref() else { return Ok(None) };
        if !done.passed()? {
            return Ok(None);
        }
        let ready = done.clone();
        let arrive = |(hop, buffer)| (hop, Arrived { buffer, ready: ready.clone() });
        Ok(Some(self.receives.drain(..).map(arrive).collect()))
    }
}
