//! Random message patterns, for tests of transports: every rank sends and receives its messages in
//! an order of its own, and compares their bytes.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    AgreedLengths, Channel, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Transport, index,
};

use crate::fault::Random;

const CHANNELS: [Channel; 3] = [Channel::Kv, Channel::PartialGrad, Channel::FinalGrad];

/// Longest wait for a message: longer means that it hangs.
const LIMIT: Duration = Duration::from_secs(30);

/// One message. `cuts` are the lengths of its ranges at the sender and at the receiver, with equal
/// sums.
#[derive(Debug, Clone)]
pub struct Message {
    /// Rank that sends it.
    pub from: usize,
    /// Rank that receives it.
    pub to: usize,
    /// Its channel.
    pub channel: Channel,
    /// Its tag.
    pub tag: u64,
    /// Lengths of its ranges at both ends.
    pub cuts: [Vec<u64>; 2],
}

/// Draws `count` groups of messages among all ranks, also of a rank to itself; the same for equal
/// seeds. Each range has fewer bytes than one of `limits`. Tags increase.
pub fn groups(ranks: usize, seed: u64, count: usize, limits: &[usize]) -> Vec<Vec<Message>> {
    let mut random = Random(seed);
    let mut below = |end: usize| index(random.below(end as u64));
    let sizes: Vec<usize> = (0..count).map(|_| below(12)).collect();
    let mut tag = 0;
    let mut message = || {
        tag += 1 + below(3) as u64;
        let limit = limits[below(limits.len())];
        let mut cuts =
            [(); 2].map(|()| (0..below(4)).map(|_| below(limit) as u64).collect::<Vec<_>>());
        let [sent, received] = [0, 1].map(|end| cuts[end].iter().sum::<u64>());
        // the shorter side gets a further range
        cuts[usize::from(sent > received)].push(sent.abs_diff(received));
        Message { from: below(ranks), to: below(ranks), channel: CHANNELS[below(3)], tag, cuts }
    };
    sizes.into_iter().map(|size| (0..size).map(|_| message()).collect()).collect()
}

/// Returns ranges of these lengths with a gap of three bytes before each, except every third.
fn ranges(cuts: &[u64]) -> Arc<[Range<u64>]> {
    let mut end = 0;
    let range = |(number, &length): (usize, &u64)| {
        let start = end + if number % 3 == 2 { 0 } else { 3 };
        end = start + length;
        start..end
    };
    cuts.iter().enumerate().map(range).collect()
}

impl Message {
    fn header(&self, peer: usize, end: usize, agreed: Option<AgreedLengths>) -> MessageHeader {
        let ranges = ranges(&self.cuts[end]);
        MessageHeader { peer, channel: self.channel, tag: self.tag, step: 0, ranges, agreed }
    }

    /// Returns a buffer with the message in its ranges at one end, other bytes for every message.
    fn buffer(&self, end: usize) -> Result<HostBuffer> {
        let ranges = ranges(&self.cuts[end]);
        let mut buffer = HostBuffer::zeroed(ranges.last().map_or(0, |range| range.end))?;
        let bytes = buffer.bytes_mut().ok_or_else(|| Error::internal("a new buffer is shared"))?;
        let Self { from, to, channel, tag, .. } = self;
        let of_message =
            (*from as u64) << 56 ^ (*to as u64) << 48 ^ (*channel as u64) << 40 ^ tag << 24;
        for (number, at) in ranges.iter().cloned().flatten().enumerate() {
            let mixed = (of_message ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            bytes[index(at)] = (mixed >> 56) as u8;
        }
        Ok(buffer)
    }
}

/// Sends and receives this rank's messages. `order` selects, for each group, if its receives are
/// posted before, after or with its sends, and in which order they are posted and taken.
///
/// # Errors
/// Those of the transport. [`Error::Internal`] if a message has other bytes or does not arrive, if
/// a buffer is shared after its send ended, and if other payload bytes are counted than those sent.
pub fn play(
    transport: &mut dyn Transport<Host>,
    groups: &[Vec<Message>],
    order: u64,
    agreed: Option<AgreedLengths>,
) -> Result<()> {
    let rank = transport.control().rank();
    let mut payload = transport.bytes_sent();
    for (number, group) in groups.iter().enumerate() {
        let mut random = Random(order ^ (number as u64) << 32 ^ (rank as u64) << 48);
        let mut once_in_two = || random.below(2) == 0;
        let mut outgoing: Vec<_> = group.iter().filter(|message| message.from == rank).collect();
        let mut incoming: Vec<_> = group.iter().filter(|message| message.to == rank).collect();
        if once_in_two() {
            outgoing.reverse();
        }
        if once_in_two() {
            incoming.reverse();
        }
        let buffers = outgoing.iter().map(|of| of.buffer(0)).collect::<Result<Vec<_>>>()?;
        let send = |(message, buffer): (&&Message, _)| Outgoing {
            header: message.header(message.to, 0, agreed),
            buffer,
            ready: &(),
        };
        let sends: Vec<_> = outgoing.iter().zip(&buffers).map(send).collect();
        let receive = |message: &&Message| {
            let header = message.header(message.from, 1, agreed);
            let buffer = HostBuffer::zeroed(header.ranges.last().map_or(0, |range| range.end))?;
            Ok(Incoming { header, buffer })
        };
        let mut receives = incoming.iter().map(receive).collect::<Result<Vec<_>>>()?;
        match (once_in_two(), once_in_two()) {
            (true, _) => transport.post(&sends, &mut receives)?,
            (_, true) => {
                transport.post(&sends, &mut Vec::new())?;
                transport.progress(Duration::from_millis(2))?;
                transport.post(&[], &mut receives)?;
            }
            _ => {
                transport.post(&[], &mut receives)?;
                for send in outgoing.iter().zip(&buffers).map(send) {
                    transport.post(&[send], &mut Vec::new())?;
                }
            }
        }
        payload += sends.iter().map(|send| send.header.bytes()).sum::<u64>();
        if once_in_two() {
            incoming.reverse();
        }
        let started = Instant::now();
        for message in incoming {
            let header = message.header(message.from, 1, agreed);
            let arrived = loop {
                if let Some(arrived) = transport.take(&header)? {
                    break arrived.buffer;
                }
                wait(transport, started, message)?;
            };
            if arrived.bytes() != message.buffer(1)?.bytes() {
                return Err(Error::internal(format!("rank {rank}: other bytes of {message:?}")));
            }
        }
        while transport.pending() {
            wait(transport, started, group)?;
        }
        drop(sends);
        if buffers.iter().any(HostBuffer::is_shared) {
            return Err(Error::internal("a buffer is shared after its send ended"));
        }
    }
    if transport.bytes_sent() != payload {
        let counted = transport.bytes_sent();
        return Err(Error::internal(format!("{counted} bytes are counted, {payload} were sent")));
    }
    Ok(())
}

fn wait(
    transport: &mut dyn Transport<Host>,
    started: Instant,
    what: impl std::fmt::Debug,
) -> Result<()> {
    if started.elapsed() > LIMIT {
        return Err(Error::internal(format!("{what:?} did not end")));
    }
    transport.progress(Duration::from_millis(20))
}
