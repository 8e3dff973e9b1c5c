//! Random message patterns arrive intact, in any order of posts and takes.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use annulus_core::{
    Channel, Control, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Transport,
};
use proptest::prelude::*;

use crate::common::*;

/// A message. `cuts` are the lengths of its byte ranges at the sender and at the receiver, with
/// equal sums.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) channel: Channel,
    pub(crate) tag: u64,
    pub(crate) cuts: [Vec<u64>; 2],
}

/// Generates groups of random messages among `ranks`. The tags of each (sender, receiver, channel)
/// grow from group to group.
pub(crate) fn messages(ranks: usize) -> impl Strategy<Value = Vec<Vec<Message>>> {
    let channel =
        prop_oneof![Just(Channel::Kv), Just(Channel::PartialGrad), Just(Channel::FinalGrad)];
    let cut = || proptest::collection::vec(0..50u64, 0..4);
    let message = (0..ranks, 0..ranks, channel, cut(), cut());
    proptest::collection::vec(proptest::collection::vec(message, 0..12), 1..5).prop_map(|groups| {
        let mut tags = BTreeMap::new();
        let mut number = |(from, to, channel, mut here, mut there): (
            usize,
            usize,
            Channel,
            Vec<u64>,
            Vec<u64>,
        )| {
            // the shorter side gets a further range
            let sent = here.iter().sum::<u64>();
            let received = there.iter().sum::<u64>();
            if sent < received {
                here.push(received - sent)
            } else {
                there.push(sent - received)
            }
            let tag = tags.entry((from, to, channel)).or_insert(0);
            *tag += 1;
            Message { from, to, channel, tag: *tag, cuts: [here, there] }
        };
        groups.into_iter().map(|group| group.into_iter().map(&mut number).collect()).collect()
    })
}

/// Returns ranges of these lengths with a gap of three bytes before each.
fn ranges(cuts: &[u64]) -> Arc<[Range<u64>]> {
    let mut end = 0;
    let range = |&length: &u64| {
        let start = end + 3;
        end = start + length;
        start..end
    };
    cuts.iter().map(range).collect()
}

/// Returns byte `offset` of a message; every message has other bytes.
fn byte(message: &Message, offset: u64) -> u8 {
    let mix = (message.from as u64) << 40
        ^ (message.to as u64) << 32
        ^ (message.channel as u64) << 24
        ^ message.tag << 16
        ^ offset;
    (mix.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn filled(message: &Message) -> HostBuffer {
    let ranges = ranges(&message.cuts[0]);
    let mut buffer = HostBuffer::zeroed(ranges.last().map_or(0, |range| range.end)).unwrap();
    for (offset, at) in ranges.iter().cloned().flatten().enumerate() {
        buffer.bytes_mut().unwrap()[at as usize] = byte(message, offset as u64);
    }
    buffer
}

fn verify(message: &Message, buffer: &HostBuffer) {
    let mut expected = vec![0; buffer.bytes().len()];
    for (offset, at) in ranges(&message.cuts[1]).iter().cloned().flatten().enumerate() {
        expected[at as usize] = byte(message, offset as u64);
    }
    assert_eq!(buffer.bytes(), expected, "{message:?}");
}

/// Sends and receives one rank's messages. `order` selects, for each group, if its receives are
/// posted before, after or with its sends, and in which order they are posted and taken.
pub(crate) fn play(transport: &mut dyn Transport<Host>, groups: &[Vec<Message>], order: u64) {
    let rank = transport.control().rank();
    let header = |message: &Message, peer, side: usize| MessageHeader {
        peer,
        channel: message.channel,
        tag: message.tag,
        step: 0,
        ranges: ranges(&message.cuts[side]),
        agreed: None,
    };
    for (number, group) in groups.iter().enumerate() {
        let shuffle =
            (order ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 ^ rank as u64;
        let mut outgoing: Vec<_> = group
            .iter()
            .filter(|message| message.from == rank)
            .map(|message| (message, filled(message)))
            .collect();
        let mut incoming: Vec<_> = group.iter().filter(|message| message.to == rank).collect();
        if shuffle & 1 == 1 {
            outgoing.reverse();
        }
        if shuffle & 2 == 2 {
            incoming.reverse();
        }
        let sends: Vec<_> = outgoing
            .iter()
            .map(|(message, buffer)| Outgoing {
                header: header(message, message.to, 0),
                buffer,
                ready: &(),
            })
            .collect();
        let receive = |message: &&Message| {
            let header = header(message, message.from, 1);
            let size = header.ranges.last().map_or(0, |range| range.end);
            Incoming { header, buffer: HostBuffer::zeroed(size).unwrap() }
        };
        let mut receives: Vec<_> = incoming.iter().map(receive).collect();
        match shuffle >> 2 & 3 {
            0 => transport.post(&sends, &mut receives).unwrap(),
            1 => {
                transport.post(&sends, &mut Vec::new()).unwrap();
                transport.post(&[], &mut receives).unwrap();
            }
            _ => {
                transport.post(&[], &mut receives).unwrap();
                sends.iter().for_each(|send| {
                    let send = Outgoing { header: send.header.clone(), ..*send };
                    transport.post(&[send], &mut Vec::new()).unwrap();
                });
            }
        }
        assert!(receives.is_empty());
        if shuffle & 16 == 16 {
            incoming.reverse();
        }
        for message in incoming {
            verify(message, &wait_for(transport, &header(message, message.from, 1)).unwrap());
        }
        if shuffle & 32 == 32 {
            drain(transport).unwrap();
        }
    }
    drain(transport).unwrap();
}

/// Returns the payload bytes that `rank` sends.
pub(crate) fn payload(groups: &[Vec<Message>], rank: usize) -> u64 {
    groups
        .iter()
        .flatten()
        .filter(|message| message.from == rank)
        .map(|message| message.cuts[0].iter().sum::<u64>())
        .sum()
}

proptest! {
    // of a stuck ring every step of shrinking takes as long as the watchdog, so it is limited
    #![proptest_config(ProptestConfig {
        cases: 48,
        max_shrink_time: 10_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn messages_arrive_intact_in_any_order(groups in messages(4), order: u64) {
        on_ring(4, |endpoint| endpoint, move |mut endpoint| {
            play(&mut endpoint, &groups, order);
            assert_eq!(endpoint.bytes_sent(), payload(&groups, endpoint.rank()));
        });
    }
}
