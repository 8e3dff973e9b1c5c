//! Groups: the messages of one post, from buffers to NCCL's calls and back.

use std::collections::BTreeMap;

use annulus_core::{Arrived, Incoming, MessageHeader, Outgoing, Result, Space};
use annulus_device_cuda::{CudaBuffer, CudaSpace, Event, Stream};

use super::{
    comm,
    communicator::{GroupError, NcclCommunicator, NcclTransfer},
};
use crate::staged::cuda::{self, DeviceStaging};

/// A message and the caller's buffer of it.
struct TransferSide {
    header: MessageHeader,
    buffer: CudaBuffer,
}

/// A send that may start once `ready` has passed.
struct ReadySend {
    side: TransferSide,
    ready: Event,
}

/// A group that is posted and not yet launched.
#[derive(Default)]
pub(super) struct NcclGroup {
    sends: Vec<ReadySend>,
    receives: Vec<TransferSide>,
}

/// A group that is launched. It co-owns all memory that NCCL reads or writes, until its work is
/// done.
pub(super) struct GroupInFlight {
    pub(super) group: NcclGroup,
    /// Staging buffer of each receive; `None` if it has one byte range.
    staged: Vec<Option<CudaBuffer>>,
    /// Event after its work, once NCCL has accepted it.
    done: Option<Event>,
}

/// Receives that have completed.
type Arrivals = Vec<(MessageHeader, Arrived<CudaSpace>)>;

/// Returns the sort key of a message. Both ends of a pair derive the same order from it.
fn order(header: &MessageHeader) -> (usize, annulus_core::Channel, u64) {
    (header.peer, header.channel, header.tag)
}

/// Returns the offset of a message of one byte range in its buffer; `None` of several.
fn contiguous_start(header: &MessageHeader) -> Option<u64> {
    match &*header.ranges {
        [only] => Some(only.start),
        _ => None,
    }
}

/// Returns the events after the kernels of this rank that the messages of a post wait for: those
/// that write what is sent, and those that use the buffers of receives.
pub(super) fn kernels_before<S: Space<Buffer = CudaBuffer, Event = Event>>(
    sends: &[Outgoing<'_, S>],
    receives: &[Incoming<S>],
) -> impl Iterator<Item = Event> {
    let sent = sends.iter().map(|send| send.ready.clone());
    sent.chain(receives.iter().filter_map(|receive| receive.buffer.last_use()))
}

/// Splits a post into groups in launch order: one for each part of a block that is split.
///
/// Parts have tags that count up from the tag of the step, which every whole message of the post
/// has. So both ends of a message place it in the same group of the same post, and no rank waits in
/// one group for a message that its peer sends in a later one.
pub(super) fn groups<S: Space<Buffer = CudaBuffer, Event = Event>>(
    sends: &[Outgoing<'_, S>],
    receives: &mut Vec<Incoming<S>>,
) -> impl Iterator<Item = NcclGroup> {
    let mut groups: BTreeMap<u64, NcclGroup> = BTreeMap::new();
    for Outgoing { header, buffer, ready } in sends {
        let group = groups.entry(header.tag).or_default();
        let side = TransferSide { header: header.clone(), buffer: (*buffer).clone() };
        group.sends.push(ReadySend { side, ready: (*ready).clone() });
    }
    for Incoming { header, buffer } in receives.drain(..) {
        groups.entry(header.tag).or_default().receives.push(TransferSide { header, buffer });
    }
    groups.into_values().map(|mut group| {
        group.sends.sort_by_key(|send| order(&send.side.header));
        group.receives.sort_by_key(|receive| order(&receive.header));
        group
    })
}

impl NcclGroup {
    /// Peer and step of the first message.
    pub(super) fn first(&self) -> Option<(usize, usize)> {
        let sends = self.sends.iter().map(|send| &send.side);
        self.receives.iter().chain(sends).map(|side| (side.header.peer, side.header.step)).next()
    }

    pub(super) fn receives(&self) -> impl Iterator<Item = &MessageHeader> {
        self.receives.iter().map(|receive| &receive.header)
    }

    pub(super) fn sends(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Launches the group, after the work that its buffers wait for.
    pub(super) fn hand_over(
        self,
        communicator: &NcclCommunicator,
        stream: &Stream,
        staging: &mut DeviceStaging,
    ) -> Result<GroupInFlight> {
        let (peer, step) = self.first().unwrap_or_default();
        let mut used = Vec::new();
        let mut outgoing = Vec::with_capacity(self.sends.len());
        for ReadySend { side: TransferSide { header, buffer }, ready } in &self.sends {
            stream.wait_for(ready)?;
            let address = match contiguous_start(header) {
                Some(start) => buffer.address() + start,
                None => {
                    let staged = staging.take(cuda::staged_bytes(header), stream)?;
                    cuda::gather(stream, header, buffer, &staged)?;
                    let address = staged.address();
                    used.push(staged);
                    address
                }
            };
            outgoing.push(NcclTransfer { address, bytes: header.bytes(), peer: header.peer });
        }
        let mut incoming = Vec::with_capacity(self.receives.len());
        let mut staged_receives = Vec::with_capacity(self.receives.len());
        for TransferSide { header, buffer } in &self.receives {
            // after work that was enqueued on it earlier
            buffer.wait_on(stream)?;
            let (address, staged) = match contiguous_start(header) {
                Some(start) => (buffer.address() + start, None),
                None => {
                    let staged = staging.take(cuda::staged_bytes(header), stream)?;
                    (staged.address(), Some(staged))
                }
            };
            incoming.push(NcclTransfer { address, bytes: header.bytes(), peer: header.peer });
            staged_receives.push(staged);
        }
        // both sides of an empty message leave it out
        for transfers in [&mut outgoing, &mut incoming] {
            transfers.retain(|transfer| transfer.bytes > 0);
        }
        if !outgoing.is_empty() || !incoming.is_empty() {
            // SAFETY: the ranges were checked against their buffers, which `GroupInFlight` keeps.
            let launched = unsafe { communicator.group(&outgoing, &incoming, stream) };
            launched.map_err(|GroupError { peer: failed, what }| {
                comm(failed.unwrap_or(peer), step, what)
            })?;
        }
        used.into_iter().for_each(|staged| staging.give(staged));
        Ok(GroupInFlight { group: self, staged: staged_receives, done: None })
    }
}

impl GroupInFlight {
    /// Records the event of a group that NCCL has accepted: later work in the stream runs after it.
    pub(super) fn mark(&mut self, stream: &Stream, staging: &mut DeviceStaging) -> Result<()> {
        for (TransferSide { header, buffer }, staged) in
            self.group.receives.iter().zip(&mut self.staged)
        {
            if let Some(staged) = staged.take() {
                cuda::scatter(stream, header, buffer, &staged)?;
                staging.give(staged);
            }
        }
        let done = stream.record()?;
        // a buffer that is sent keeps its last use, which may be a kernel's: it has no writer while
        // it is co-owned here
        for receive in &self.group.receives {
            receive.buffer.touched_before(&done);
        }
        self.done = Some(done);
        Ok(())
    }

    /// Takes the receives once all work is done.
    pub(super) fn take_completed(&mut self) -> Result<Option<Arrivals>> {
        let Some(done) = self.done.as_ref() else { return Ok(None) };
        if !done.passed()? {
            return Ok(None);
        }
        let ready = done.clone();
        let arrive =
            |TransferSide { header, buffer }| (header, Arrived { buffer, ready: ready.clone() });
        Ok(Some(self.group.receives.drain(..).map(arrive).collect()))
    }
}
