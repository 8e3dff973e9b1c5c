//! Messages within a group: an all-to-all in members − 1 rounds, each with one message to one
//! member and one from another.
//!
//! ```text
//! pack and unpack the own part
//! for distance in 1..members:
//!     post the message to member + distance, and the receive from member − distance
//!     unpack the message of the last round; pack that of the next
//!     wait for both messages
//! unpack the last message
//! ```
//! All messages are of sizes that are known when the plan is made. They are in host memory, as are
//! the tensors, whatever the memory of the ring's blocks.

use std::ops::Range;

use annulus_core::{
    Channel, Error, Host, HostBuffer, MessageBalance, MessageHeader, Result, RowSegment, Side, Spec,
};
use annulus_plan::{ExchangeFields, GroupLayout, HeadField, HeadGrid};

use crate::ring::{in_flight::InFlight, program::MessageGroup};

/// Buffers of each kind: one in flight, one that is packed or unpacked meanwhile.
const BUFFERS: usize = 2;

/// Members of a group, their rows, and buffers for their messages.
pub(super) struct HeadExchange {
    pub(super) grid: HeadGrid,
    pub(super) member: usize,
    /// Rank of each member.
    pub(super) ranks: Vec<usize>,
    /// Rows of each member on both sides; no keys of members of other columns.
    pub(super) rows: Vec<[u64; 2]>,
    /// Rows of each member as segments of the group's rows, on both sides; of keys as segments of
    /// those of the own column.
    pub(super) segments: Vec<[Vec<RowSegment>; 2]>,
    pub(super) buffers: MessageBuffers,
}

/// Buffers of messages that are sent and received.
pub(super) struct MessageBuffers {
    sends: Vec<HostBuffer>,
    receives: Vec<HostBuffer>,
}

/// Messages between this member and the others.
pub(super) struct Messages<'a> {
    /// Rank of each member.
    pub(super) ranks: &'a [usize],
    pub(super) member: usize,
    /// Bytes sent to and received from each member.
    pub(super) bytes: Vec<[u64; 2]>,
    /// Tag relative to the first of the pass.
    pub(super) tag: u64,
    pub(super) step: usize,
}

/// Returns a number of bytes to allocate; one that no machine has if it exceeds 64 bits.
pub(super) fn count_bytes(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Returns the number of a side.
pub(super) fn side_index(side: Side) -> usize {
    usize::from(side == Side::Kv)
}

impl MessageBuffers {
    /// Allocates buffers of `bytes` bytes each.
    pub(super) fn new(bytes: u64) -> Result<Self> {
        let stock = || (0..BUFFERS).map(|_| HostBuffer::zeroed(bytes)).collect::<Result<Vec<_>>>();
        Ok(Self { sends: stock()?, receives: stock()? })
    }
}

impl HeadExchange {
    /// Derives the messages of the rank at `ring_index` and allocates buffers for those of
    /// `passes`.
    pub(super) fn new<'f>(
        spec: &Spec,
        grid: HeadGrid,
        layout: &GroupLayout,
        ring_index: usize,
        passes: impl Iterator<Item = &'f ExchangeFields>,
    ) -> Result<Self> {
        let group = grid.group(ring_index);
        let of_members = || (0..grid.members()).map(|member| grid.ring_index(group, member));
        let lens = [(Side::Q, spec.dims.q_len), (Side::Kv, spec.dims.kv_len)];
        let own = grid.member(ring_index);
        let of_side = |index: usize, (side, len)| match grid.shares(side, own, grid.member(index)) {
            true => layout.segments(&grid, side, len, index),
            false => Vec::new(),
        };
        let segments: Vec<[Vec<RowSegment>; 2]> =
            of_members().map(|index| lens.map(|side| of_side(index, side))).collect();
        let count = |rows: &Vec<RowSegment>| rows.iter().map(|of| of.count as u64).sum();
        let rows: Vec<[u64; 2]> =
            segments.iter().map(|sides| sides.each_ref().map(count)).collect();
        let most = passes.map(|fields| fields.most_bytes(&grid, &rows)).max();
        Ok(Self {
            grid,
            member: own,
            ranks: of_members().map(|index| layout.order.rank(index)).collect(),
            rows,
            segments,
            buffers: MessageBuffers::new(count_bytes(most.unwrap_or(0)))?,
        })
    }

    /// Returns the bytes of the message buffers, between passes.
    pub(super) fn buffer_bytes(&self) -> u64 {
        let buffers = self.buffers.sends.iter().chain(&self.buffers.receives);
        buffers.map(|buffer| buffer.bytes().len() as u64).sum()
    }

    /// Returns the payload bytes that this member sends before and after a pass.
    pub(super) fn bytes_sent(&self, fields: &ExchangeFields) -> u64 {
        count_bytes(fields.bytes_sent(&self.grid, self.member, &self.rows))
    }

    /// Returns the rows of the group on a side, of keys those of the own column.
    pub(super) fn group_rows(&self, side: Side) -> u64 {
        self.rows.iter().map(|rows| rows[side_index(side)]).sum()
    }

    /// Returns this member's rows of a side, as rows of its own tensors.
    pub(super) fn own_rows(&self, side: Side) -> [RowSegment; 1] {
        let count = annulus_core::index(self.rows[self.member][side_index(side)]);
        [RowSegment { first: 0, count }]
    }

    /// Returns the rows of a member on a side, as rows of the tensors of the group.
    pub(super) fn rows_of(&self, member: usize, side: Side) -> &[RowSegment] {
        &self.segments[member][side_index(side)]
    }

    /// Returns the bytes sent to and received from each member before a pass.
    pub(super) fn input_bytes(&self, fields: &[HeadField]) -> Vec<[u64; 2]> {
        let bytes = |member: usize, rows| {
            let between = [self.member, member];
            count_bytes(ExchangeFields::bytes_between(fields, &self.grid, between, rows))
        };
        let own = self.rows[self.member];
        let rows = self.rows.iter().enumerate();
        rows.map(|(member, &of)| [bytes(member, own), bytes(member, of)]).collect()
    }

    /// Returns the bytes sent to and received from each member after a pass.
    pub(super) fn output_bytes(&self, fields: &[HeadField]) -> Vec<[u64; 2]> {
        self.input_bytes(fields).into_iter().map(|[own, others]| [others, own]).collect()
    }

    /// Returns true if this member and another exchange rows of `side`.
    pub(super) fn shares(&self, side: Side, member: usize) -> bool {
        self.grid.shares(side, self.member, member)
    }
}

impl Messages<'_> {
    /// Exchanges all messages: `pack(member, bytes)` writes the message to a member,
    /// `unpack(member, bytes)` reads the message of a member, the own one first, then those of
    /// member − 1, member − 2, ….
    pub(super) fn exchange(
        &self,
        buffers: &mut MessageBuffers,
        in_flight: &mut InFlight<'_, Host>,
        mut pack: impl FnMut(usize, &mut [u8]) -> Result<()>,
        mut unpack: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let members = self.ranks.len();
        let none = || Error::internal("all buffers of the exchange are in flight");
        let MessageBuffers { sends, receives } = buffers;
        let mut packed = |sends: &mut Vec<HostBuffer>, to: usize| -> Result<HostBuffer> {
            let mut buffer = sends.pop().ok_or_else(none)?;
            let bytes = buffer.bytes_mut().and_then(|all| all.get_mut(self.sent(to)));
            pack(to, bytes.ok_or_else(none)?)?;
            Ok(buffer)
        };
        let mut unpacked = |buffer: &HostBuffer, from: usize, range: Range<usize>| -> Result<()> {
            unpack(from, buffer.bytes().get(range).ok_or_else(none)?)
        };
        let own = packed(sends, self.member)?;
        unpacked(&own, self.member, self.sent(self.member))?;
        sends.push(own);
        in_flight.start_step(self.step);
        let mut next = None;
        let mut arrived: Option<(usize, HostBuffer)> = None;
        for distance in 1..members {
            let to = (self.member + distance) % members;
            let from = (self.member + members - distance) % members;
            let buffer = match next.take() {
                Some(buffer) => buffer,
                None => packed(sends, to)?,
            };
            let source = (buffer, ());
            let transfers = self.transfers(distance..distance + 1);
            in_flight.post(&transfers, Some(&source), |_| receives.pop().ok_or_else(none))?;
            if let Some((from, buffer)) = arrived.take() {
                unpacked(&buffer, from, self.received(from))?;
                receives.push(buffer);
            }
            if distance + 1 < members {
                next = Some(packed(sends, (to + 1) % members)?);
            }
            let mut messages = in_flight.wait_all()?;
            arrived = messages.pop().map(|(_, message)| (from, message.buffer));
            sends.push(source.0);
        }
        if let Some((from, buffer)) = arrived.take() {
            unpacked(&buffer, from, self.received(from))?;
            receives.push(buffer);
        }
        Ok(())
    }

    /// Adds these messages, which are those of pass `pass`, to the balance of this rank.
    pub(super) fn add_to(&self, balance: &mut MessageBalance, pass: u64) {
        self.transfers(1..self.ranks.len()).add_to(balance, pass);
    }

    /// Returns the messages of some distances.
    fn transfers(&self, distances: Range<usize>) -> MessageGroup {
        let header = |member: usize, bytes| MessageHeader {
            peer: self.ranks[member],
            channel: Channel::Kv,
            tag: self.tag,
            step: self.step,
            ranges: std::iter::once(bytes).collect(),
            agreed: None,
        };
        MessageGroup::exchange([self.member, self.ranks.len()], distances, header, |member| {
            self.bytes[member].map(|bytes| 0..bytes)
        })
    }

    fn sent(&self, to: usize) -> Range<usize> {
        0..annulus_core::index(self.bytes[to][0])
    }

    fn received(&self, from: usize) -> Range<usize> {
        0..annulus_core::index(self.bytes[from][1])
    }
}
