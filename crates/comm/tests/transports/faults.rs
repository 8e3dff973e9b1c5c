//! The fault matrix: for every fault on one rank, every other rank returns the documented error
//! within the deadline and a second.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{Checksum, Deadline, Threads, all_gather, close};
use annulus_core::{
    Channel, Control, Error, Host, HostBuffer, Incoming, Outgoing, Result, Transport,
};
use annulus_mock_device::{Fault, Injection};

use crate::*;

const DEADLINE: Duration = Duration::from_secs(1);
/// Time after the deadline: the machine may be busy with the other cases.
const SLACK: Duration = Duration::from_secs(1);

type Stack = Deadline<Checksum<Fault<Threads>>>;

fn stack(endpoint: Threads, injections: &[Injection]) -> Stack {
    Deadline::new(Checksum::new(Fault::new(endpoint, 7, injections)), DEADLINE).unwrap()
}

/// A minimal ring: gathers, relays every rank's block around the ring, and closes. Aborts on
/// failure.
fn relay(transport: &mut dyn Transport<Host>) -> Result<()> {
    let outcome = try_relay(transport);
    if let Err(error) = &outcome {
        transport.abort(error);
    }
    outcome
}

fn try_relay(transport: &mut dyn Transport<Host>) -> Result<()> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    assert_eq!(all_gather(transport, 0, &[u8::try_from(rank).unwrap()])?.len(), ranks);
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut block = buffer(&[u8::try_from(rank).unwrap(); 100]);
    for step in 0..ranks - 1 {
        let header = |peer| annulus_core::MessageHeader {
            step,
            ..header(peer, Channel::Kv, step as u64, &[0..40, 60..100])
        };
        let incoming = Incoming { header: header(previous), buffer: HostBuffer::zeroed(100)? };
        transport.post(
            &[Outgoing { header: header(next), buffer: &block, ready: &() }],
            &mut vec![incoming],
        )?;
        transport.heartbeat(true);
        transport.progress(Duration::ZERO)?;
        block = wait_for(transport, &header(previous))?;
        assert_eq!(usize::from(block.bytes()[99]), (rank + ranks - step - 1) % ranks);
        drain(transport)?;
    }
    close(transport, 1, Ok(()))
}

struct Case {
    ranks: usize,
    faulty: usize,
    injection: Injection,
    /// True if the dead endpoint is dropped, as in a crash; else it stays and is silent.
    crashes: bool,
}

/// Returns the result of every rank, and the time of the last one.
fn run(case: &Case) -> (Vec<Result<()>>, Duration) {
    let &Case { ranks, faulty, injection, crashes } = case;
    let started = Instant::now();
    let results = on_ring(
        ranks,
        move |endpoint| {
            if endpoint.rank() == faulty {
                stack(endpoint, &[injection])
            } else {
                stack(endpoint, &[])
            }
        },
        move |mut stack| {
            let result = relay(&mut stack);
            // a rank that succeeded may leave; a dead one stays, unless it crashed
            let stays = (result.is_err() && stack.rank() == faulty && !crashes).then_some(stack);
            (result, started.elapsed(), stays)
        },
    );
    let last = results.iter().map(|(_, elapsed, _)| *elapsed).max().unwrap();
    (results.into_iter().map(|(result, ..)| result).collect(), last)
}

/// Describes a case, for failures.
fn name(case: &Case) -> String {
    format!(
        "{:?} on rank {} of {}, crashes: {}",
        case.injection, case.faulty, case.ranks, case.crashes
    )
}

/// Runs all cases at once. `documented` checks each error that a surviving rank detected itself;
/// the other ranks must have been aborted with the text of one of these.
fn matrix(cases: Vec<Case>, documented: fn(&Case, rank: usize, detected: &Error) -> bool) {
    let judge = move |case: Case| {
        let (results, last) = run(&case);
        let name = name(&case);
        assert!(last < DEADLINE + SLACK, "{name}: {last:?}");
        let dies = matches!(case.injection, Injection::Die { .. } | Injection::DieInGather { .. });
        let mut detected = Vec::new();
        for (rank, result) in results.iter().enumerate() {
            let error = result.as_ref().expect_err(&name);
            match error {
                Error::Device { what } if dies && rank == case.faulty => {
                    assert!(what.contains("injected"), "{name}: {error}")
                }
                Error::Aborted { .. } => {}
                error if documented(&case, rank, error) => detected.push((rank, error.to_string())),
                other => panic!("{name}: rank {rank} returned {other}"),
            }
        }
        assert!(!detected.is_empty(), "{name}: not detected: {results:?}");
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            if let Error::Aborted { rank, what } = error {
                assert!(
                    detected.contains(&(*rank, what.clone())),
                    "{name}: {error} but {detected:?}"
                );
            }
        }
    };
    let cases: Vec<_> = cases.into_iter().map(|case| thread::spawn(move || judge(case))).collect();
    cases.into_iter().for_each(|case| case.join().unwrap());
}

/// Returns cases with each of these faults on the first, a middle or the last rank of several
/// rings.
fn cases(injections: impl Fn(usize) -> Vec<Injection>, crashes: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for (ranks, faulty) in [(2, 0), (2, 1), (3, 1), (5, 4), (8, 3)] {
        for injection in injections(ranks) {
            cases.push(Case { ranks, faulty, injection, crashes });
        }
    }
    cases
}

/// Returns the numbers of the first and the last send of a rank, which sends once per step.
fn first_and_last(ranks: usize) -> [u64; 2] {
    [0, ranks as u64 - 2]
}

#[test]
fn a_lost_message_is_a_timeout() {
    let lost = |ranks| {
        let late = first_and_last(ranks).map(|send| Injection::Delay { send, by: 20 * DEADLINE });
        first_and_last(ranks).map(|send| Injection::Drop { send }).into_iter().chain(late).collect()
    };
    // all ranks are alive, so the first one to time out names the peer that it waits for
    matrix(cases(lost, false), |_, rank, detected| match detected {
        Error::Timeout { peer, waited, .. } => *peer != rank && *waited >= DEADLINE,
        _ => false,
    });
}

#[test]
fn a_corrupted_message_is_detected_by_its_receiver() {
    let corrupted = |ranks| first_and_last(ranks).into_iter().flat_map(corruptions).collect();
    fn corruptions(send: u64) -> [Injection; 3] {
        [Injection::Truncate { send }, Injection::Duplicate { send }, Injection::Corrupt { send }]
    }
    matrix(cases(corrupted, false), |case, rank, detected| {
        let (send, words) = match case.injection {
            Injection::Truncate { send } => (send, "truncated: got 44 bytes, want 88"),
            Injection::Duplicate { send } => (send, "duplicate message"),
            Injection::Corrupt { send } => (send, "checksum mismatch"),
            _ => return false,
        };
        let Error::Comm { peer, step, what } = detected else { return false };
        rank == (case.faulty + 1) % case.ranks
            && *peer == case.faulty
            && *step as u64 == send
            && what.contains(words)
    });
}

#[test]
fn a_silent_death_is_a_timeout_that_names_the_dead_rank() {
    let deaths = |ranks: usize| {
        [Injection::DieInGather { round: 0 }, Injection::DieInGather { round: 1 }]
            .into_iter()
            .chain([0, (ranks - 2) / 2].map(|step| Injection::Die { step }))
            .collect()
    };
    matrix(
        cases(deaths, false),
        |case, _, detected| matches!(detected, Error::Timeout { peer, .. } if *peer == case.faulty),
    );
}

#[test]
fn a_crash_is_a_lost_peer() {
    let deaths = |ranks: usize| {
        vec![
            Injection::DieInGather { round: 0 },
            Injection::DieInGather { round: 1 },
            Injection::Die { step: ranks - 2 },
        ]
    };
    matrix(
        cases(deaths, true),
        |case, _, detected| matches!(detected, Error::PeerLost { peer, .. } if *peer == case.faulty),
    );
}

#[test]
fn delays_within_the_deadline_are_no_failure() {
    let delays = |ranks| {
        let most = DEADLINE / 50;
        let late = first_and_last(ranks).map(|send| Injection::Delay { send, by: DEADLINE / 3 });
        late.into_iter().chain([Injection::DelayAll { most }]).collect()
    };
    let cases = cases(delays, false)
        .into_iter()
        .map(|case| thread::spawn(move || (run(&case).0, name(&case))));
    for case in cases.collect::<Vec<_>>() {
        let (results, name) = case.join().unwrap();
        assert!(results.iter().all(Result::is_ok), "{name}: {results:?}");
    }
}
