//! Transfers of blocks: posting sends and receives, and taking what has arrived.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use annulus_core::{
    Arrived, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Space,
    Transport,
};

use super::{
    Mpi,
    communicator::Communicator,
    frame::{self, CHANNELS, Frame},
    message_buffer::MessageBuffer,
    messages::{MessageKind, PostedReceive, ReceiveStage},
    requests::{Address, Mode},
    window,
};
use crate::ranges;

impl Mpi {
    /// Completion mode of this endpoint's sends.
    pub(super) const fn mode(&self) -> Mode {
        if self.settings.synchronous { Mode::Synchronous } else { Mode::Standard }
    }

    const fn address(data: &Communicator, hop: &MessageHeader, piece: u64) -> Address {
        let tag = hop.tag % window(data) * CHANNELS + frame::number(hop.channel);
        Address { peer: hop.peer, tag, step: hop.step, piece }
    }

    /// Checks the receives of a group, sorted by peer, channel and tag.
    pub(super) fn check_receives<'a>(
        &mut self,
        receives: impl Iterator<Item = ReceiveRequest<'a>>,
    ) -> Result<()> {
        let mut previous = None;
        for receive in receives {
            let key = (receive.hop.peer, receive.hop.channel);
            let last = previous
                .filter(|&(of, _)| of == key)
                .map(|(_, tag)| tag)
                .or_else(|| self.last_tags.get(&key).copied());
            let checked = receive.check(self.ranks, last);
            checked.inspect_err(|error| self.fail(error))?;
            previous = Some((key, receive.hop.tag));
        }
        Ok(())
    }

    /// Starts the receive at `index`, whose message was announced with the right length and is sent
    /// in pieces of `piece` bytes.
    pub(super) fn begin_receive(&mut self, index: usize, piece: u64) -> Result<()> {
        let hop = self.receives[index].hop.clone();
        let address = Self::address(self.enter()?.0, &hop, piece);
        let bytes = hop.bytes();
        let (into, stage, range) = match contiguous(&hop.ranges) {
            Some(range) => (self.receives[index].buffer.take(), ReceiveStage::Direct, range),
            None => {
                let staged = MessageBuffer::Host(self.staging.take(bytes)?);
                (Some(staged), ReceiveStage::Staged, 0..bytes)
            }
        };
        self.receives[index].stage = stage;
        let kind = MessageKind::DataReceive { peer: hop.peer, channel: hop.channel, tag: hop.tag };
        if let (Some(data), Some(into)) = (&self.data, into) {
            self.requests.receive(data, address, into, range, kind)?;
        }
        Ok(())
    }

    fn start_send(&mut self, Outgoing { hop, buffer, .. }: &Outgoing<'_, Host>) -> Result<()> {
        let (from, range) = match contiguous(&hop.ranges) {
            Some(range) => ((*buffer).clone(), range),
            None => (self.pack(buffer, &hop.ranges, hop.bytes())?, 0..hop.bytes()),
        };
        self.start_contiguous_send(hop, MessageBuffer::Host(from), range)
    }

    /// Announces and sends the message `hop`, whose bytes are `range` of `from`.
    pub(super) fn start_contiguous_send(
        &mut self,
        hop: &MessageHeader,
        from: MessageBuffer,
        range: Range<u64>,
    ) -> Result<()> {
        let piece = self.settings.piece_bytes;
        let announcement = Frame::Announce {
            channel: hop.channel,
            tag: hop.tag,
            step: hop.step as u64,
            bytes: hop.bytes(),
            piece,
        };
        let kind = MessageKind::FrameSend { peer: hop.peer };
        self.send_frame(hop.peer, &announcement.encode()?, kind)?;
        let mode = self.mode();
        let (data, _) = self.enter()?;
        let address = Self::address(data, hop, piece);
        self.step = hop.step;
        self.bytes_sent += hop.bytes();
        self.peers.begin_send(hop.peer, hop.step);
        let kind = MessageKind::DataSend { peer: hop.peer, step: hop.step };
        if let Some(data) = &self.data {
            self.requests.send(data, mode, address, from, range, kind)?;
        }
        Ok(())
    }

    /// Copies the bytes `from` of `buffer` to the front of a staging buffer.
    fn pack(&mut self, buffer: &HostBuffer, from: &[Range<u64>], bytes: u64) -> Result<HostBuffer> {
        let mut staged = self.staging.take(bytes)?;
        if let Some(into) = staged.bytes_mut() {
            ranges::copy(buffer.bytes(), from, into, std::slice::from_ref(&(0..bytes)));
        }
        self.staging.lend(staged.clone());
        Ok(staged)
    }

    /// Takes the buffer of a posted receive, if it has arrived.
    pub(super) fn take_buffer(&mut self, hop: &MessageHeader) -> Result<Option<MessageBuffer>> {
        self.check_alive()?;
        let Some(index) =
            self.receives.iter().position(|receive| receive.is_for(hop.peer, hop.channel, hop.tag))
        else {
            let got = format!("{:?} {} from rank {}", hop.channel, hop.tag, hop.peer);
            return Err(Error::invalid("hop", got, "a receive that was posted and not yet taken"));
        };
        if self.receives[index].stage != ReceiveStage::Arrived {
            return Ok(None);
        }
        Ok(self.receives.swap_remove(index).buffer)
    }

    /// Starts the transfers of a group that was checked.
    pub(super) fn start(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: Vec<(MessageHeader, MessageBuffer)>,
    ) -> Result<()> {
        for (hop, buffer) in receives {
            self.step = hop.step;
            self.last_tags.insert((hop.peer, hop.channel), hop.tag);
            let buffer = Some(buffer);
            self.receives.push(PostedReceive { hop, buffer, stage: ReceiveStage::Posted });
        }
        self.match_early()?;
        sends.iter().try_for_each(|send| self.start_send(send))
    }
}

/// A receive that is to be posted.
pub(super) struct ReceiveRequest<'a> {
    pub(super) hop: &'a MessageHeader,
    /// Bytes of its buffer.
    pub(super) size: u64,
    /// True if its buffer has another owner.
    pub(super) is_shared: bool,
}

impl ReceiveRequest<'_> {
    /// Checks this receive; `last` is the tag of the previous one from its peer on its channel.
    fn check(&self, ranks: usize, last: Option<u64>) -> Result<()> {
        let &MessageHeader { peer, step, channel, tag, .. } = self.hop;
        ranges::check(self.hop, ranks, self.size)?;
        if last.is_some_and(|last| tag <= last) {
            return Err(Error::Comm {
                peer,
                step,
                what: format!(
                    "receive {channel:?} {tag} posted after a tag as high: tags only grow"
                ),
            });
        }
        if self.is_shared {
            return Err(Error::Comm {
                peer,
                step,
                what: format!("the buffer of receive {channel:?} {tag} is in use"),
            });
        }
        Ok(())
    }
}

/// Returns the union of `ranges` if they are contiguous and in order.
pub(super) fn contiguous(ranges: &[Range<u64>]) -> Option<Range<u64>> {
    let mut filled = ranges.iter().filter(|range| range.start < range.end);
    let first = filled.next().cloned().unwrap_or(0..0);
    filled.try_fold(first, |whole, range| {
        (whole.end == range.start).then_some(whole.start..range.end)
    })
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
        self.check_alive()?;
        self.enter()?;
        for send in sends {
            ranges::check(&send.hop, self.ranks, Host::size(send.buffer))?;
        }
        // the caller may list the receives of a group in any order
        receives
            .sort_by_key(|incoming| (incoming.hop.peer, incoming.hop.channel, incoming.hop.tag));
        self.check_receives(receives.iter().map(|Incoming { hop, buffer }| ReceiveRequest {
            hop,
            size: Host::size(buffer),
            is_shared: buffer.is_shared(),
        }))?;
        let receives = receives
            .drain(..)
            .map(|Incoming { hop, buffer }| (hop, MessageBuffer::Host(buffer)))
            .collect();
        self.idle_since = Instant::now();
        self.start(sends, receives).inspect_err(|error| self.fail(error))
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.wait(patience)
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken = self.take_buffer(hop)?;
        Ok(taken.and_then(MessageBuffer::into_host).map(|buffer| Arrived { buffer, ready: () }))
    }

    fn pending(&self) -> bool {
        self.peers.has_unsent()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranges_are_contiguous() {
        assert_eq!(contiguous(&[]), Some(0..0));
        assert_eq!(contiguous(&[5..5, 2..2]), Some(0..0));
        assert_eq!(contiguous(&[3..3, 4..6, 7..7, 6..9]), Some(4..9));
        assert_eq!(contiguous(&[4..6, 7..9]), None);
        assert_eq!(contiguous(&[4..6, 2..4]), None);
    }
}
