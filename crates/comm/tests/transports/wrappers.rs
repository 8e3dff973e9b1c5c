//! Wrappers, alone or stacked, deliver the same bytes as the transport inside.

use std::time::{Duration, Instant};

use annulus_comm::{Checksum, Deadline, Trace, TraceLog, barrier, trace};
use annulus_core::{Control, Host, Transport};
use annulus_mock_device::Fault;
use proptest::prelude::*;

use crate::{common::*, patterns::*};

proptest! {
    // of a stuck ring every step of shrinking takes as long as the watchdog, so it is limited
    #![proptest_config(ProptestConfig {
        cases: 24,
        max_shrink_time: 10_000,
        ..ProptestConfig::default()
    })]

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
    assert!(logs[0].waited() >= Duration::from_millis(20), "{:?}", logs[0].waited());
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

#[test]
fn a_trace_reports_the_waiting_time_of_a_rank() {
    let waited = on_ring(
        2,
        |endpoint| Trace::new(endpoint, Instant::now()),
        |mut endpoint| {
            if endpoint.rank() == 1 {
                std::thread::sleep(Duration::from_millis(60));
            }
            barrier(&mut endpoint, 0).unwrap();
            endpoint.log().waited()
        },
    );
    assert!(waited[0] >= Duration::from_millis(40) && waited[0] > waited[1], "{waited:?}");
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
