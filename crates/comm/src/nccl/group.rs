//! Groups: the messages of one post, from buffers to NCCL's calls and back.

use std::collections::BTreeMap;

use annulus_core::{Arrived, Incoming, MessageHeader, Outgoing, Result, Space};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event, Stream};

use super::{Side, comm, communicator::Communicator};
use crate::cuda_gather::{self, DeviceStaging};

/// A group that is posted and not yet launched.
#[derive(Default)]
pub(super) struct Group {
    sends: Vec<(Side, Event)>,
    receives: Vec<Side>,
}

/// A group that is launched. It co-owns all memory that NCCL reads or writes, until its work is done.
pub(super) struct GroupInFlight {
    sends: Vec<Side>,
    receives: Vec<Side>,
    /// DeviceStaging of each receive of several byte ranges.
    landing: Vec<Option<CudaBuffer>>,
    /// Event after its work, once NCCL has accepted it.
    done: Option<Event>,
}

/// Receives that have completed.
type Arrivals = Vec<(MessageHeader, Arrived<CudaSpace>)>;

/// Order of messages that both ends of a pair derive alike.
fn order(hop: &MessageHeader) -> (usize, annulus_core::Channel, u64) {
    (hop.peer, hop.channel, hop.tag)
}

/// Address of a message in one piece.
fn whole(hop: &MessageHeader) -> Option<u64> {
    match &*hop.ranges {
        [only] => Some(only.start),
        _ => None,
    }
}

/// Splits a post into groups in launch order: one for each part of a block that is split.
///
/// Parts have tags that count up from the tag of the step, which every whole message of the post
/// has. So both ends of a message place it in the same group of the same post, and no rank waits in
/// one group for a message that its peer sends in a later one.
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
    /// Peer and step of the first message.
    pub(super) fn first(&self) -> Option<(usize, usize)> {
        let hops = self.receives.iter().chain(self.sends.iter().map(|(side, _)| side));
        hops.map(|(hop, _)| (hop.peer, hop.step)).next()
    }

    pub(super) fn receives(&self) -> impl Iterator<Item = &MessageHeader> {
        self.receives.iter().map(|(hop, _)| hop)
    }

    pub(super) fn sends(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Launches the group, after the work that its buffers wait for.
    pub(super) fn hand_over(
        self,
        communicator: &Communicator,
        stream: &Stream,
        staging: &mut DeviceStaging,
    ) -> Result<GroupInFlight> {
        let (peer, step) = self.first().unwrap_or_default();
        let mut used = Vec::new();
        let mut outgoing = Vec::with_capacity(self.sends.len());
        for ((hop, buffer), ready) in &self.sends {
            stream.wait_for(ready)?;
            let at = match whole(hop) {
                Some(start) => buffer.address() + start,
                None => {
                    let one = staging.take(hop.bytes(), stream)?;
                    cuda_gather::gather(stream, hop, buffer, &one)?;
                    used.push(one);
                    used.last().map_or(0, CudaBuffer::address)
                }
            };
            outgoing.push((at, hop.bytes(), hop.peer));
        }
        let (mut incoming, mut landing) =
            (Vec::with_capacity(self.receives.len()), Vec::with_capacity(self.receives.len()));
        for (hop, buffer) in &self.receives {
            // after work that was enqueued on it earlier
            buffer.wait_on(stream)?;
            let one =
                if whole(hop).is_some() { None } else { Some(staging.take(hop.bytes(), stream)?) };
            let at = one
                .as_ref()
                .map_or_else(|| buffer.address() + whole(hop).unwrap_or(0), CudaBuffer::address);
            incoming.push((at, hop.bytes(), hop.peer));
            landing.push(one);
        }
        // an empty message is sent by neither side
        for side in [&mut outgoing, &mut incoming] {
            side.retain(|&(_, bytes, _)| bytes > 0);
        }
        if !outgoing.is_empty() || !incoming.is_empty() {
            // SAFETY: the ranges were checked against their buffers, which `GroupInFlight` keeps.
            let queued = unsafe { communicator.group(&outgoing, &incoming, stream) };
            queued.map_err(|(named, what)| comm(named.unwrap_or(peer), step, what))?;
        }
        used.into_iter().for_each(|one| staging.give(one));
        let sends = self.sends.into_iter().map(|(side, _)| side).collect();
        Ok(GroupInFlight { sends, receives: self.receives, landing, done: None })
    }
}

impl GroupInFlight {
    pub(super) fn first(&self) -> Option<(usize, usize)> {
        self.receives.iter().chain(&self.sends).map(|(hop, _)| (hop.peer, hop.step)).next()
    }

    pub(super) fn receives(&self) -> impl Iterator<Item = &MessageHeader> {
        self.receives.iter().map(|(hop, _)| hop)
    }

    pub(super) fn sends(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Records the event of a group that NCCL has accepted: later work in the stream runs after it.
    pub(super) fn mark(&mut self, stream: &Stream, staging: &mut DeviceStaging) -> Result<()> {
        for ((hop, buffer), landing) in self.receives.iter().zip(&mut self.landing) {
            if let Some(one) = landing.take() {
                cuda_gather::scatter(stream, hop, buffer, &one)?;
                staging.give(one);
            }
        }
        let done = stream.record()?;
        // a buffer that is sent keeps its last use, which may be a kernel's: it has no writer while it
        // is co-owned here
        for (_, buffer) in &self.receives {
            buffer.touched_before(&done);
        }
        self.done = Some(done);
        Ok(())
    }

    /// Returns the receives once all work is done. Returns them once.
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
