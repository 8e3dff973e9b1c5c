//! Transfers of blocks: posting sends and receives, and taking what has arrived.

use std::{ops::Range, time::Instant};

use annulus_core::{Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result, Space};

use super::{
    endpoint::MpiEndpoint,
    frame::ControlFrame,
    messages::{Announcement, MessageBuffer, MessageKind, MpiReceive, QueuedSend, ReceiveStage},
    requests::Address,
};
use crate::message::{self, MessageKey, ReceiveRequest, not_posted};

impl MpiEndpoint {
    /// Returns tag and pieces of a message that is received ahead.
    fn form_ahead(&self, context: u64, header: &MessageHeader) -> WireForm {
        let tag = self.tags.ahead(context, header, header.bytes());
        WireForm { tag, piece: self.settings.piece_bytes }
    }

    /// Returns true if the message is received as soon as its receive is posted, and so is not
    /// announced.
    fn is_ahead(&mut self, context: u64, header: &MessageHeader) -> bool {
        header.agreed.is_some() && self.context(context).posts_ahead
    }

    /// Checks the receives of a group, sorted by their keys.
    pub(super) fn check_receives<'a>(
        &mut self,
        context: u64,
        receives: impl Iterator<Item = ReceiveRequest<'a>>,
    ) -> Result<()> {
        let ranks = self.ranks;
        let checked = self.context(context).last_tags.check(ranks, receives);
        checked.inspect_err(|error| self.fail(error))
    }

    /// Starts the receive at `index`. Its message was announced with the right length, or all ranks
    /// agree on it.
    pub(super) fn begin_receive(
        &mut self,
        context: u64,
        index: usize,
        form: WireForm,
    ) -> Result<()> {
        self.enter()?;
        let header = self.context(context).receives[index].header.clone();
        let address = form.address(&header);
        let bytes = header.bytes();
        let (into, stage, range) = match contiguous(&header.ranges) {
            Some(range) => {
                let buffer = self.context(context).receives[index].buffer.take();
                (buffer, ReceiveStage::Direct, range)
            }
            None => {
                let staged = MessageBuffer::Host(self.staging.take(bytes)?);
                (Some(staged), ReceiveStage::Staged, 0..bytes)
            }
        };
        self.context(context).receives[index].stage = stage;
        let kind = MessageKind::DataReceive { context, key: MessageKey::of(&header) };
        if let (Some(data), Some(into)) = (&self.data, into) {
            self.requests.receive(data, address, into, range, kind)?;
        }
        Ok(())
    }

    fn start_send(
        &mut self,
        context: u64,
        Outgoing { header, buffer, .. }: &Outgoing<'_, Host>,
    ) -> Result<()> {
        let (from, range) = match contiguous(&header.ranges) {
            Some(range) => ((*buffer).clone(), range),
            None => (self.pack(buffer, &header.ranges, header.bytes())?, 0..header.bytes()),
        };
        self.start_contiguous_send(context, header, MessageBuffer::Host(from), range)
    }

    /// Sends the message `header`, whose bytes are `range` of `from`, after the messages of the
    /// same context, peer and channel with lower tags.
    ///
    /// Sent at the same time they would share the bandwidth, and all parts of a block would arrive
    /// at the end.
    pub(super) fn start_contiguous_send(
        &mut self,
        number: u64,
        header: &MessageHeader,
        from: MessageBuffer,
        range: Range<u64>,
    ) -> Result<()> {
        let context = self.context(number);
        context.step = header.step;
        context.bytes_sent += header.bytes();
        context.sends.push((MessageKey::of(header), header.step));
        context.queued.push_back(QueuedSend { header: header.clone(), from, range });
        self.start_queued(number)
    }

    /// Starts the queued sends of a context that follow no other one.
    fn start_queued(&mut self, number: u64) -> Result<()> {
        let context = self.context(number);
        let is_first = |queued: &QueuedSend| {
            let key = MessageKey::of(&queued.header);
            !context.sends.iter().any(|(send, _)| send.is_before(&key))
        };
        let queued = &context.queued;
        let first: Vec<usize> =
            (0..queued.len()).filter(|&index| is_first(&queued[index])).collect();
        // descending, because a removal moves those behind it; of a peer and channel there is one
        for index in first.into_iter().rev() {
            if let Some(send) = self.context(number).queued.remove(index) {
                self.start_first(number, send)?;
            }
        }
        Ok(())
    }

    /// Starts a send, and announces it before, unless it is received ahead.
    fn start_first(
        &mut self,
        context: u64,
        QueuedSend { header, from, range }: QueuedSend,
    ) -> Result<()> {
        let form = if self.is_ahead(context, &header) {
            self.form_ahead(context, &header)
        } else {
            let number = self.announced;
            self.announced += 1;
            let piece = self.settings.piece_bytes;
            let (key, step) = (MessageKey::of(&header), header.step);
            let message = Announcement { key, step, bytes: header.bytes(), piece, number };
            let frame = ControlFrame::Announce { context, message }.encode()?;
            let kind = MessageKind::FrameSend { peer: header.peer };
            self.send_frame(self.settings.synchronous, header.peer, &frame, kind)?;
            WireForm { tag: self.tags.announced(number, header.channel), piece }
        };
        self.enter()?;
        let synchronous = self.settings.synchronous;
        let address = form.address(&header);
        let kind = MessageKind::DataSend { context, key: MessageKey::of(&header) };
        if let Some(data) = &self.data {
            self.requests.send(data, synchronous, address, from, range, kind)?;
        }
        Ok(())
    }

    /// Accounts for a send that has completed, and starts the one that follows it. With its last
    /// send a context ends that was dropped.
    pub(super) fn finish_send(&mut self, number: u64, key: MessageKey) -> Result<()> {
        let context = self.context(number);
        context.end_send(key);
        if !context.queued.is_empty() {
            return self.start_queued(number);
        }
        if !context.is_open && !context.has_unsent() {
            self.contexts.remove(&number);
        }
        Ok(())
    }

    /// Copies the bytes `from` of `buffer` to the front of a staging buffer.
    fn pack(&mut self, buffer: &HostBuffer, from: &[Range<u64>], bytes: u64) -> Result<HostBuffer> {
        let mut staged = self.staging.take(bytes)?;
        if let Some(into) = staged.bytes_mut() {
            message::copy(buffer.bytes(), from, into, std::slice::from_ref(&(0..bytes)));
        }
        self.staging.lend(staged.clone());
        Ok(staged)
    }

    /// Takes the buffer of a posted receive, if it has arrived.
    pub(super) fn take_buffer(
        &mut self,
        context: u64,
        header: &MessageHeader,
    ) -> Result<Option<MessageBuffer>> {
        self.check_alive()?;
        let receives = &mut self.context(context).receives;
        let key = MessageKey::of(header);
        let is_it = |receive: &MpiReceive| MessageKey::of(&receive.header) == key;
        let index = receives.iter().position(is_it).ok_or_else(|| not_posted(header))?;
        if receives[index].stage != ReceiveStage::Arrived {
            return Ok(None);
        }
        Ok(receives.swap_remove(index).buffer)
    }

    /// Checks and starts a group of transfers of blocks in host memory.
    pub(super) fn post(
        &mut self,
        context: u64,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        self.check_alive()?;
        self.enter()?;
        for send in sends {
            message::check(&send.header, self.ranks, Host::size(send.buffer))?;
        }
        // the caller may list the receives of a group in any order
        receives.sort_by_key(|incoming| MessageKey::of(&incoming.header));
        let requests = receives.iter().map(|Incoming { header, buffer }| ReceiveRequest {
            header,
            size: Host::size(buffer),
            is_shared: buffer.is_shared(),
        });
        self.check_receives(context, requests)?;
        let receives = receives
            .drain(..)
            .map(|Incoming { header, buffer }| (header, MessageBuffer::Host(buffer)))
            .collect();
        self.idle_since = Instant::now();
        self.start(context, sends, receives).inspect_err(|error| self.fail(error))
    }

    /// Starts the transfers of a group that was checked.
    pub(super) fn start(
        &mut self,
        number: u64,
        sends: &[Outgoing<'_, Host>],
        receives: Vec<(MessageHeader, MessageBuffer)>,
    ) -> Result<()> {
        for (header, buffer) in receives {
            let ahead = self.is_ahead(number, &header).then(|| self.form_ahead(number, &header));
            let context = self.context(number);
            context.step = header.step;
            context.last_tags.post(&header);
            let buffer = Some(buffer);
            context.receives.push(MpiReceive { header, buffer, stage: ReceiveStage::Posted });
            let last = context.receives.len() - 1;
            if let Some(form) = ahead {
                self.begin_receive(number, last, form)?;
            }
        }
        self.match_early(number)?;
        sends.iter().try_for_each(|send| self.start_send(number, send))
    }
}

/// Form of a block on the wire.
#[derive(Debug, Clone, Copy)]
pub(super) struct WireForm {
    /// MPI's tag.
    pub(super) tag: u64,
    /// Bytes of a piece.
    pub(super) piece: u64,
}

impl WireForm {
    const fn address(self, header: &MessageHeader) -> Address {
        let Self { tag, piece } = self;
        Address { peer: header.peer, tag, step: header.step, piece }
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
