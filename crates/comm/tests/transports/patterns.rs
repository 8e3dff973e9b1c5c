//! Random message patterns arrive intact, in any order of posts and takes, over wrappers as over
//! the transport inside; traces record them.

use std::time::{Duration, Instant};

use annulus_comm::{Deadline, Trace, TraceLog, barrier, trace};
use annulus_core::{Control, Host, Transport};
use annulus_mock_device::{
    Fault,
    patterns::{Message, groups, play},
};

use crate::*;

#[test]
fn messages_arrive_intact_in_any_order() {
    for seed in 0..48 {
        on_threads(4, move |mut endpoint| {
            play(&mut endpoint, &groups(4, seed, 4, &[50]), seed, None).unwrap();
        });
    }
}

#[test]
fn stacked_wrappers_deliver_the_same_bytes_under_random_delays() {
    for seed in 0..48 {
        on_ring(
            3,
            move |endpoint| {
                let late = Fault::random_delays(endpoint, seed, Duration::from_millis(2));
                let traced = Trace::new(late, Instant::now());
                let boxed: Box<dyn Transport<Host>> = Box::new(traced);
                Deadline::new(boxed, Duration::from_secs(10)).unwrap()
            },
            move |mut endpoint| {
                play(&mut endpoint, &groups(3, seed, 4, &[50]), seed, None).unwrap();
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
            play(&mut endpoint, &groups, 1, None).unwrap();
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
    Message { from, to, channel: Channel::Kv, tag: 1, cuts: [vec![bytes], vec![bytes]] }
}
