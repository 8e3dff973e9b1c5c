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
    frame::Frame,
    message_buffer::MessageBuffer,
    messages::{MessageKind, PostedReceive, QueuedSend, ReceiveStage, SendKey},
    requests::{Address, Mode},
};
use crate::ranges;

impl Mpi {
    /// Completion mode of this endpoint's sends.
    pub(super) const fn mode(&self) -> Mode {
        if self.settings.synchronous { Mode::Synchronous } else { Mode::Standard }
    }

    fn address(&self, header: &MessageHeader, piece: u64) -> Address {
        let tag = self.tags.of(header, header.bytes());
        Address { peer: header.peer, tag, step: header.step, piece }
    }

    /// Returns true if the message is received as soon as its receive is posted, and so is not
    /// announced.
    const fn is_ahead(&self, header: &MessageHeader) -> bool {
        self.posts_ahead && header.agreed.is_some()
    }

    /// Checks the receives of a group, sorted by peer, channel and tag.
    pub(super) fn check_receives<'a>(
        &mut self,
        receives: impl Iterator<Item = ReceiveRequest<'a>>,
    ) -> Result<()> {
        let mut previous = None;
        for receive in receives {
            let key = (receive.header.peer, receive.header.channel);
            let last = previous
                .filter(|&(of, _)| of == key)
                .map(|(_, tag)| tag)
                .or_else(|| self.last_tags.get(&key).copied());
            let checked = receive.check(self.ranks, last);
            checked.inspect_err(|error| self.fail(error))?;
            previous = Some((key, receive.header.tag));
        }
        Ok(())
    }

    /// Starts the receive at `index`. Its message was announced with the right length, or all ranks
    /// agree on it; it is sent in pieces of `piece` bytes.
    pub(super) fn begin_receive(&mut self, index: usize, piece: u64) -> Result<()> {
        let header = self.receives[index].header.clone();
        self.enter()?;
        let address = self.address(&header, piece);
        let bytes = header.bytes();
        let (into, stage, range) = match contiguous(&header.ranges) {
            Some(range) => (self.receives[index].buffer.take(), ReceiveStage::Direct, range),
            None => {
                let staged = MessageBuffer::Host(self.staging.take(bytes)?);
                (Some(staged), ReceiveStage::Staged, 0..bytes)
            }
        };
        self.receives[index].stage = stage;
        let kind = MessageKind::DataReceive {
            peer: header.peer,
            channel: header.channel,
            tag: header.tag,
        };
        if let (Some(data), Some(into)) = (&self.data, into) {
            self.requests.receive(data, address, into, range, kind)?;
        }
        Ok(())
    }

    fn start_send(&mut self, Outgoing { header, buffer, .. }: &Outgoing<'_, Host>) -> Result<()> {
        let (from, range) = match contiguous(&header.ranges) {
            Some(range) => ((*buffer).clone(), range),
            None => (self.pack(buffer, &header.ranges, header.bytes())?, 0..header.bytes()),
        };
        self.start_contiguous_send(header, MessageBuffer::Host(from), range)
    }

    /// Sends the message `header`, whose bytes are `range` of `from`, after the messages of the
    /// same peer and channel with lower tags.
    ///
    /// Sent at the same time they would share the bandwidth, and all parts of a block would arrive
    /// at the end.
    pub(super) fn start_contiguous_send(
        &mut self,
        header: &MessageHeader,
        from: MessageBuffer,
        range: Range<u64>,
    ) -> Result<()> {
        self.step = header.step;
        self.bytes_sent += header.bytes();
        self.peers.begin_send(header.peer, header.step);
        self.sends.push(SendKey::of(header));
        self.queued.push_back(QueuedSend { header: header.clone(), from, range });
        self.start_queued()
    }

    /// Starts the queued sends that follow no other one.
    fn start_queued(&mut self) -> Result<()> {
        let is_first = |queued: &QueuedSend| {
            let key = SendKey::of(&queued.header);
            !self.sends.iter().any(|send| send.is_before(&key))
        };
        let first: Vec<usize> =
            (0..self.queued.len()).filter(|&index| is_first(&self.queued[index])).collect();
        // descending, because a removal moves those behind it; of a peer and channel there is one
        for index in first.into_iter().rev() {
            if let Some(send) = self.queued.remove(index) {
                self.start_first(send)?;
            }
        }
        Ok(())
    }

    /// Starts a send, and announces it before, unless it is received ahead.
    fn start_first(&mut self, QueuedSend { header, from, range }: QueuedSend) -> Result<()> {
        let piece = self.settings.piece_bytes;
        if !self.is_ahead(&header) {
            let announcement = Frame::Announce {
                channel: header.channel,
                tag: header.tag,
                step: header.step as u64,
                bytes: header.bytes(),
                piece,
            };
            let kind = MessageKind::FrameSend { peer: header.peer };
            self.send_frame(header.peer, &announcement.encode()?, kind)?;
        }
        self.enter()?;
        let mode = self.mode();
        let address = self.address(&header, piece);
        let kind = MessageKind::DataSend { key: SendKey::of(&header), step: header.step };
        if let Some(data) = &self.data {
            self.requests.send(data, mode, address, from, range, kind)?;
        }
        Ok(())
    }

    /// Accounts for a send that has completed, and starts the one that follows it.
    pub(super) fn finish_send(&mut self, key: SendKey, step: usize) -> Result<()> {
        self.peers.end_send(key.peer, step);
        if let Some(index) = self.sends.iter().position(|send| *send == key) {
            self.sends.swap_remove(index);
        }
        if self.queued.is_empty() { Ok(()) } else { self.start_queued() }
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
    pub(super) fn take_buffer(&mut self, header: &MessageHeader) -> Result<Option<MessageBuffer>> {
        self.check_alive()?;
        let Some(index) = self
            .receives
            .iter()
            .position(|receive| receive.is_for(header.peer, header.channel, header.tag))
        else {
            let got = format!("{:?} {} from rank {}", header.channel, header.tag, header.peer);
            return Err(Error::invalid(
                "header",
                got,
                "a receive that was posted and not yet taken",
            ));
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
        for (header, buffer) in receives {
            self.step = header.step;
            self.last_tags.insert((header.peer, header.channel), header.tag);
            let is_ahead = self.is_ahead(&header);
            let buffer = Some(buffer);
            self.receives.push(PostedReceive { header, buffer, stage: ReceiveStage::Posted });
            if is_ahead {
                self.begin_receive(self.receives.len() - 1, self.settings.piece_bytes)?;
            }
        }
        self.match_early()?;
        sends.iter().try_for_each(|send| self.start_send(send))
    }
}

/// A receive that is to be posted.
pub(super) struct ReceiveRequest<'a> {
    pub(super) header: &'a MessageHeader,
    /// Bytes of its buffer.
    pub(super) size: u64,
    /// True if its buffer has another owner.
    pub(super) is_shared: bool,
}

impl ReceiveRequest<'_> {
    /// Checks this receive; `last` is the tag of the previous one from its peer on its channel.
    fn check(&self, ranks: usize, last: Option<u64>) -> Result<()> {
        let &MessageHeader { peer, step, channel, tag, .. } = self.header;
        ranges::check(self.header, ranks, self.size)?;
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
            ranges::check(&send.header, self.ranks, Host::size(send.buffer))?;
        }
        // the caller may list the receives of a group in any order
        receives.sort_by_key(|incoming| {
            (incoming.header.peer, incoming.header.channel, incoming.header.tag)
        });
        self.check_receives(receives.iter().map(|Incoming { header, buffer }| ReceiveRequest {
            header,
            size: Host::size(buffer),
            is_shared: buffer.is_shared(),
        }))?;
        let receives = receives
            .drain(..)
            .map(|Incoming { header, buffer }| (header, MessageBuffer::Host(buffer)))
            .collect();
        self.idle_since = Instant::now();
        self.start(sends, receives).inspect_err(|error| self.fail(error))
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.wait(patience)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        let taken = self.take_buffer(header)?;
        Ok(taken.and_then(MessageBuffer::into_host).map(|buffer| Arrived { buffer, ready: () }))
    }

    fn pending(&self) -> bool {
        self.peers.has_unsent()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        self.posts_ahead
    }

    fn runs_groups_in_order(&self) -> bool {
        false
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
