//! Random message patterns arrive intact, in any order of posts and takes, over wrappers as over
//! the transport inside; traces record them.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_comm::{Checksum, Deadline, Trace, TraceLog, barrier, trace};

use annulus_core::{
    Channel, Control, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Transport,
};
use annulus_mock_device::Fault;
use proptest::prelude::*;

use crate::*;

/// A message. `cuts` are the lengths of its byte ranges at the sender and at the receiver, with
/// equal sums.
#[derive(Debug, Clone)]
struct Message {
    from: usize,
    to: usize,
    channel: Channel,
    tag: u64,
    cuts: [Vec<u64>; 2],
}

/// Generates groups of random messages among `ranks`. The tags of each (sender, receiver, channel)
/// grow from group to group.
fn messages(ranks: usize) -> impl Strategy<Value = Vec<Vec<Message>>> {
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
fn play(transport: &mut dyn Transport<Host>, groups: &[Vec<Message>], order: u64) {
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
fn payload(groups: &[Vec<Message>], rank: usize) -> u64 {
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
        on_threads(4, move |mut endpoint| {
            play(&mut endpoint, &groups, order);
            assert_eq!(endpoint.bytes_sent(), payload(&groups, endpoint.rank()));
        });
    }

    #[test]
    fn stacked_wrappers_deliver_the_same_bytes_under_random_delays(
        groups in messages(3),
        order: u64,
        seed: u64,
    ) {
        on_ring(
            3,
            move |endpoint| {
                let late = Fault::random_delays(endpoint, seed, Duration::from_millis(2));
                let traced = Trace::new(Checksum::new(late), Instant::now());
                let boxed: Box<dyn Transport<Host>> = Box::new(traced);
                Deadline::new(boxed, Duration::from_secs(10)).unwrap()
            },
            move |mut endpoint| {
                play(&mut endpoint, &groups, order);
                let payload = payload(&groups, endpoint.rank());
                assert_eq!(endpoint.bytes_sent(), payload, "payload only");
                barrier(&mut endpoint, 1).unwrap();
            },
        );
    }
}

/// Sends the messages of one pattern over traced endpoints.
fn traced(groups: Vec<Vec<Message>>) -> Vec<TraceLog> {
    let zero = Instant::now();
    on_ring(
        3,
        move |endpoint| Trace::new(endpoint, zero),
        move |mut endpoint| {
            let begin = Instant::now();
            play(&mut endpoint, &groups, 1);
            endpoint.log().span("all \"of\" it\n", 7, begin);
            barrier(&mut endpoint, 1).unwrap();
            endpoint.log()
        },
    )
}

#[test]
fn a_trace_file_is_valid_json_with_every_message_in_it() {
    let groups = vec![
        vec![message(0, 1, 100), message(1, 2, 200), message(2, 0, 0)],
        vec![Message { tag: 2, ..message(0, 1, 5) }],
    ];
    let logs = traced(groups);
    let mut file = Vec::new();
    trace::write_chrome(&mut file, &logs).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let count = |phase: &str, category: &str| {
        events
            .iter()
            .filter(|event| event["ph"] == phase && event["cat"].as_str().unwrap_or("") == category)
            .count()
    };
    for (category, want) in [("send", 4), ("receive", 4), ("gather", 3)] {
        assert_eq!((count("b", category), count("e", category)), (want, want), "{category}");
    }
    assert_eq!(count("M", ""), 3);
    let spans: Vec<_> = events.iter().filter(|event| event["name"] == "all \"of\" it\n").collect();
    assert_eq!(spans.len(), 3);
    assert!(spans.iter().all(|span| span["ph"] == "X"
        && span["args"]["step"] == 7
        && span["dur"].as_f64().unwrap() >= 0.0));
    for (rank, log) in logs.iter().enumerate() {
        assert_eq!(log.rank(), rank);
        let mut last = Duration::ZERO;
        for event in log.events() {
            assert!(event.begin >= last && event.end >= event.begin);
            last = event.begin;
        }
        let of_this_rank = events
            .iter()
            .filter(|event| event["pid"] == rank && event["ph"] == "b" && event["cat"] == "send");
        let bytes: u64 = of_this_rank.map(|event| event["args"]["bytes"].as_u64().unwrap()).sum();
        assert_eq!(bytes, [105, 200, 0][rank]);
        log.clear();
        assert_eq!((log.events().len(), log.waited()), (0, Duration::ZERO));
    }
}

#[test]
fn a_full_log_keeps_the_last_events_and_the_whole_waiting_time() {
    let logs = on_ring(
        2,
        |endpoint| Trace::with_capacity(endpoint, Instant::now(), 5),
        |mut endpoint| {
            let log = endpoint.log();
            for round in 1..=8 {
                if endpoint.rank() == 1 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                barrier(&mut endpoint, round).unwrap();
                log.span("tiles", 0, Instant::now());
            }
            log
        },
    );
    let mut file = Vec::new();
    trace::write_chrome(&mut file, &logs).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let is_label = |event: &&serde_json::Value| event["name"] == "process_labels";
    let labels: Vec<_> = json["traceEvents"].as_array().unwrap().iter().filter(is_label).collect();
    let dropped = format!("{} earlier events dropped", logs[0].dropped());
    assert_eq!(labels[0]["args"]["labels"], dropped);
    assert_eq!(labels.len(), 2);
    // that of the waits that were replaced, too: each of 5 ms
    let [late, early] = [1, 0].map(|rank: usize| logs[rank].waited());
    assert!(early >= Duration::from_millis(20) && early > late, "{early:?} {late:?}");
    for log in &logs {
        let events = log.events();
        assert_eq!(events.len(), 5);
        // of each round at least an all-gather and a span
        assert!(log.dropped() >= 2 * 8 - 5);
        let rounds: Vec<u64> = events
            .iter()
            .filter_map(|event| match event.kind {
                trace::EventKind::AllGather { round } => Some(round),
                _ => None,
            })
            .collect();
        assert_eq!(rounds.last(), Some(&8));
        log.clear();
        assert_eq!((log.events().len(), log.dropped()), (0, 0));
        log.span("after", 0, Instant::now());
        assert_eq!(log.events().len(), 1);
    }
}

fn message(from: usize, to: usize, bytes: u64) -> Message {
    Message {
        from,
        to,
        channel: annulus_core::Channel::Kv,
        tag: 1,
        cuts: [vec![bytes], vec![bytes]],
    }
}
