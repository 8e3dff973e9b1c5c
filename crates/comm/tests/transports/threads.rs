//! The module documentation of `threads`, tested line by line, but for what every transport has:
//! `annulus_conformance::suite::messages`.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{Threads, threads};
use annulus_core::{Channel::*, Control, Error, HostBuffer, Incoming, Transport};

use crate::*;

fn pair() -> (Threads, Threads) {
    let mut ring = threads::ring(2).into_iter();
    (ring.next().unwrap(), ring.next().unwrap())
}

#[test]
fn a_send_completes_once_received_and_frees_its_buffer() {
    watched(|| {
        let (mut a, mut b) = pair();
        let mut block = buffer(&[1, 2, 3, 4, 5]);
        send(&mut a, header(1, Kv, 1, &[3..5, 0..1]), &block).unwrap();
        assert!(a.pending() && block.bytes_mut().is_none());
        let header = header(0, Kv, 1, &[1..4]);
        b.progress(Duration::ZERO).unwrap();
        assert!(a.pending(), "its receive is not posted yet");
        receive(&mut b, &header, 4).unwrap();
        assert!(b.take(&header).unwrap().is_none());
        b.progress(Duration::ZERO).unwrap();
        assert!(!a.pending() && block.bytes_mut().is_some());
        assert_eq!(b.take(&header).unwrap().unwrap().buffer.bytes(), [0, 4, 5, 1]);
        assert_eq!((a.bytes_sent(), b.bytes_sent()), (3, 0));
        assert_eq!(
            b.take(&header).unwrap_err().code(),
            Error::invalid("", "", "").code(),
            "a receive is taken once"
        );
    });
}

#[test]
fn a_message_and_a_receipt_end_a_wait() {
    watched(|| {
        let (mut a, mut b) = pair();
        let timeout = Duration::from_secs(20);
        let started = Instant::now();
        let sender = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            send(&mut a, header(1, Kv, 1, &[0..4]), &buffer(&[1, 2, 3, 4])).unwrap();
            while a.pending() {
                a.progress(timeout).unwrap();
            }
        });
        let wanted = header(0, Kv, 1, &[0..4]);
        b.progress(timeout).unwrap();
        thread::sleep(Duration::from_millis(30));
        receive(&mut b, &wanted, 4).unwrap();
        assert_eq!(wait_for(&mut b, &wanted).unwrap().bytes(), [1, 2, 3, 4]);
        sender.join().unwrap();
        assert!(
            started.elapsed() < timeout / 2,
            "a message and a receipt both wake a waiting rank"
        );
    });
}

#[test]
fn a_receive_needs_a_buffer_of_its_own() {
    watched(|| {
        let (mut a, _b) = pair();
        let buffer = HostBuffer::zeroed(4).unwrap();
        let mut receives =
            vec![Incoming { header: header(1, Kv, 1, &[0..4]), buffer: buffer.clone() }];
        assert!(matches!(a.post(&[], &mut receives), Err(Error::Comm { peer: 1, .. })));
        drop(buffer);
    });
}

#[test]
fn a_peer_that_left_is_lost_only_for_ranks_that_wait_for_it() {
    watched(|| {
        let (mut a, mut b) = pair();
        send(&mut a, header(1, Kv, 1, &[0..1]), &buffer(&[7])).unwrap();
        a.start_all_gather(1, &[1]).unwrap();
        b.start_all_gather(1, &[2]).unwrap();
        b.progress(Duration::ZERO).unwrap();
        a.progress(Duration::ZERO).unwrap();
        assert_eq!(a.try_all_gather(1).unwrap().unwrap(), [[1], [2]]);
        drop(a);
        // a message that it sent before it left still arrives
        let wanted = header(0, Kv, 1, &[0..1]);
        receive(&mut b, &wanted, 1).unwrap();
        assert_eq!(wait_for(&mut b, &wanted).unwrap().bytes(), [7]);
        assert_eq!(b.try_all_gather(1).unwrap().unwrap(), [[1], [2]]);
        b.progress(Duration::from_millis(1)).unwrap();
        receive(&mut b, &header(0, Kv, 2, &[0..1]), 1).unwrap();
        assert_eq!(
            b.progress(Duration::from_secs(9)).unwrap_err(),
            Error::PeerLost { peer: 0, step: 2 }
        );
    });
}

#[test]
fn a_lost_receiver_or_all_gather_member_is_an_error() {
    watched(|| {
        let (mut a, b) = pair();
        send(&mut a, header(1, Kv, 6, &[0..1]), &buffer(&[7])).unwrap();
        let loss = thread::spawn(move || wait_for_error(&mut a));
        thread::sleep(Duration::from_millis(10));
        drop(b);
        assert_eq!(loss.join().unwrap(), Error::PeerLost { peer: 1, step: 6 });
        let (mut a, b) = pair();
        a.start_all_gather(0, &[]).unwrap();
        assert_eq!(a.stragglers(0), [1]);
        drop(b);
        assert_eq!(a.try_all_gather(0).unwrap_err(), Error::PeerLost { peer: 1, step: 0 });
    });
}

#[test]
fn many_all_gathers_at_once_exceed_the_inboxes_and_stay_separate() {
    let ranks = 7;
    let rounds = 40;
    let gathered = on_threads(ranks, move |mut endpoint| {
        let rank = u8::try_from(endpoint.rank()).unwrap();
        // far more messages than an inbox holds
        for round in 0..rounds {
            endpoint.start_all_gather(round, &vec![rank; usize::try_from(round).unwrap()]).unwrap();
        }
        assert!(endpoint.start_all_gather(0, &[]).is_err());
        let mut all = Vec::new();
        for round in (0..rounds).rev() {
            all.push(loop {
                match endpoint.try_all_gather(round).unwrap() {
                    Some(parts) => break parts,
                    None => endpoint.progress(Duration::from_millis(20)).unwrap(),
                }
            });
        }
        all
    });
    for all in gathered {
        for (round, parts) in (0..usize::try_from(rounds).unwrap()).rev().zip(all) {
            assert_eq!(parts, (0..7u8).map(|rank| vec![rank; round]).collect::<Vec<_>>());
        }
    }
}

#[test]
fn heartbeats_report_life_and_work_separately() {
    watched(|| {
        let (mut a, b) = pair();
        let (heard, worked) = (b.last_heard(0), b.last_work());
        thread::sleep(Duration::from_millis(2));
        a.heartbeat(false);
        assert!(b.last_heard(0) > heard && b.last_work() == worked);
        a.heartbeat(true);
        assert!(b.last_work() > worked);
    });
}
