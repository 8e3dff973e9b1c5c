//! Deadlines: silence ends a wait, slowness does not; also over a transport whose ranks judge only
//! their neighbours.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{
    Deadline, Silence, Threads, all_gather, barrier, forward_control, forward_transport, threads,
};
use annulus_core::{Channel, Control, Error, Host, Result, Transport};

use crate::*;

const DEADLINE: Duration = Duration::from_secs(1);

fn bounded(endpoint: Threads) -> Deadline<Threads> {
    Deadline::new(endpoint, DEADLINE).unwrap()
}

#[test]
fn a_deadline_below_a_second_is_refused() {
    watched(|| {
        let endpoint = threads::ring(1).remove(0);
        let error = Deadline::new(endpoint, Duration::from_millis(999)).unwrap_err();
        assert_eq!(error, Error::invalid("deadline", "999ms", "at least 1s"));
    });
}

/// Rank 1 computes for `busy` and calls `tick` every 10 ms. Rank 0 waits for its message, rank 2 in
/// an all-gather.
fn wait_while(busy: Duration, tick: fn(&mut Deadline<Threads>)) -> Vec<Result<()>> {
    on_ring(3, bounded, move |mut endpoint| {
        let rank = endpoint.rank();
        let message = |peer| header(peer, Channel::Kv, 4, &[0..8]);
        if rank == 0 {
            receive(&mut endpoint, &message(1), 8)?;
            wait_for(&mut endpoint, &message(1))?;
        }
        if rank == 2 {
            // rank 0 comes first, and so reports first
            thread::sleep(DEADLINE / 10);
        }
        if rank == 1 {
            let started = Instant::now();
            while started.elapsed() < busy {
                thread::sleep(Duration::from_millis(10));
                tick(&mut endpoint);
            }
            let block = buffer(&[1; 8]);
            send(&mut endpoint, message(0), &block)?;
            drain(&mut endpoint)?;
        }
        barrier(&mut endpoint, 1)
    })
}

#[test]
fn the_wait_for_a_working_rank_exceeds_the_deadline() {
    assert_eq!(
        wait_while(DEADLINE * 2, |endpoint| endpoint.heartbeat(true)),
        [Ok(()), Ok(()), Ok(())]
    );
}

#[test]
fn the_wait_for_ranks_that_live_but_do_no_work_ends() {
    let started = Instant::now();
    let results = wait_while(DEADLINE * 2, |endpoint| endpoint.heartbeat(false));
    assert!(results.iter().all(Result::is_err), "{results:?}");
    assert!(
        results.iter().any(|result| matches!(result, Err(Error::Timeout { peer: 1, .. }))),
        "{results:?}"
    );
    assert!(started.elapsed() >= DEADLINE);
}

#[test]
fn a_silent_rank_is_named() {
    let results = wait_while(DEADLINE * 2, |_| ());
    for result in &results[..] {
        assert!(
            matches!(result, Err(Error::Timeout { peer: 1, .. } | Error::Aborted { .. })),
            "{results:?}"
        );
    }
    assert!(
        results[1]
            .as_ref()
            .is_err_and(|error| error.to_string().contains("rank 1 did not deliver")),
        "{results:?}"
    );
}

#[test]
fn idle_time_before_a_call_does_not_count() {
    let results = on_ring(2, bounded, |mut endpoint| {
        thread::sleep(DEADLINE * 3 / 2);
        all_gather(&mut endpoint, 0, &[]).map(drop)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

/// Rank 0 posts a receive and stops for three deadlines, as a suspended process does. Rank 1 stops
/// with it, and starts again `later` than rank 0, or only after that one has failed.
fn stop_together(later: Option<Duration>) -> Vec<(Result<()>, Duration)> {
    on_ring(2, bounded, move |mut endpoint| {
        let message = |peer| header(peer, Channel::Kv, 4, &[0..8]);
        let begin = |endpoint: &mut Deadline<Threads>| {
            if endpoint.rank() == 0 {
                receive(endpoint, &message(1), 8)?;
            }
            endpoint.progress(Duration::from_millis(1))
        };
        let run = |endpoint: &mut Deadline<Threads>| {
            if endpoint.rank() == 0 {
                return wait_for(endpoint, &message(1)).map(drop);
            }
            send(endpoint, message(0), &buffer(&[1; 8]))?;
            drain(endpoint)
        };
        let begun = begin(&mut endpoint);
        thread::sleep(DEADLINE * 3);
        let resumed = Instant::now();
        if endpoint.rank() == 1 {
            // alive but silent until the other one has failed
            thread::sleep(later.unwrap_or(DEADLINE * 4));
        }
        (begun.and_then(|()| run(&mut endpoint)), resumed.elapsed())
    })
}

#[test]
fn time_in_which_a_rank_did_not_poll_is_not_its_peers_silence() {
    let results = stop_together(Some(DEADLINE * 2 / 5));
    assert!(results.iter().all(|(result, _)| result.is_ok()), "{results:?}");
}

#[test]
fn a_rank_that_stays_silent_after_such_a_time_is_detected() {
    let results = stop_together(None);
    let (error, after) = &results[0];
    assert!(matches!(error, Err(Error::Timeout { peer: 1, .. })), "{results:?}");
    assert!(*after >= DEADLINE / 2 && *after <= DEADLINE * 2, "{results:?}");
}

#[test]
fn one_warning_follows_a_quarter_of_the_deadline() {
    watched(|| {
        let warnings = Arc::new(Mutex::new(Vec::new()));
        let [mut a, b]: [Threads; 2] = threads::ring(2).try_into().unwrap();
        let recorded = Arc::clone(&warnings);
        let sleeper = thread::spawn(move || {
            let mut b = b;
            thread::sleep(DEADLINE / 2);
            b.start_all_gather(3, &[]).unwrap();
            while b.try_all_gather(3).unwrap().is_none() {
                b.progress(Duration::from_millis(20)).unwrap();
            }
        });
        a.heartbeat(true);
        let mut a = bounded(a).with_warning(move |silence| recorded.lock().unwrap().push(silence));
        assert_eq!(a.deadline(), DEADLINE);
        barrier(&mut a, 3).unwrap();
        sleeper.join().unwrap();
        let warnings = warnings.lock().unwrap();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].peer == 1 && warnings[0].waited >= DEADLINE / 4);
    });
}

/// Enters a call, and continues the wait up to `attempts` times if it ends at the arrival deadline.
fn enter<T: Transport<Host>>(endpoint: &mut T, attempts: usize) -> Vec<Result<()>> {
    let wait = |endpoint: &mut T| loop {
        if endpoint.try_all_gather(1)?.is_some() {
            return Ok(());
        }
        endpoint.progress(Duration::from_millis(20))?;
    };
    let mut results = Vec::new();
    if let Err(error) = endpoint.start_entry(1, &[]) {
        return vec![Err(error)];
    }
    while results.len() < attempts && !matches!(results.last(), Some(Ok(()))) {
        results.push(wait(endpoint));
    }
    results
}

#[test]
fn a_rank_that_enters_a_call_late_is_warned_of_and_fails_nothing() {
    let warnings = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&warnings);
    let wrap = move |endpoint: Threads| {
        let rank = endpoint.rank();
        let recorded = Arc::clone(&recorded);
        let warn = move |silence: Silence| recorded.lock().unwrap().push((rank, silence.peer));
        bounded(endpoint).with_warning(warn)
    };
    let results = on_ring(3, wrap, |mut endpoint| {
        if endpoint.rank() == 2 {
            thread::sleep(DEADLINE * 2);
        }
        let entered = enter(&mut endpoint, 1);
        (entered, barrier(&mut endpoint, 2))
    });
    assert!(results.iter().all(|result| *result == (vec![Ok(())], Ok(()))), "{results:?}");
    let warnings = warnings.lock().unwrap();
    // two ranks, in each quarter of the deadline
    assert!((8..=16).contains(&warnings.len()), "{warnings:?}");
    assert!(warnings.iter().all(|&(rank, peer)| rank != 2 && peer == 2), "{warnings:?}");
}

#[test]
fn an_entry_that_ended_at_its_deadline_is_continued() {
    let wrap = |endpoint| bounded(endpoint).with_arrival_deadline(Some(DEADLINE));
    let results = on_ring(2, wrap, |mut endpoint| {
        if endpoint.rank() == 1 {
            thread::sleep(DEADLINE * 5 / 2);
        }
        let entered = enter(&mut endpoint, 10);
        (entered, barrier(&mut endpoint, 2))
    });
    let (entered, then) = &results[0];
    let late = |result: &Result<()>| matches!(result, Err(Error::ArrivalTimeout { peer: 1, .. }));
    assert!(late(&entered[0]) && late(&entered[1]) && entered[2..] == [Ok(())], "{results:?}");
    assert_eq!(*then, Ok(()));
    assert_eq!(results[1], (vec![Ok(())], Ok(())));
}

/// Rank 1 enters and is silent, rank 2 is late.
#[test]
fn a_rank_that_has_entered_is_judged_by_its_silence() {
    let results = on_ring(3, bounded, |mut endpoint| {
        let started = Instant::now();
        let result = match endpoint.rank() {
            0 => enter(&mut endpoint, 1).remove(0),
            rank => {
                let entered = if rank == 1 { endpoint.start_entry(1, &[]) } else { Ok(()) };
                thread::sleep(DEADLINE * 3);
                entered
            }
        };
        (result, started.elapsed())
    });
    let (error, after) = &results[0];
    assert!(matches!(error, Err(Error::Timeout { peer: 1, .. })), "{results:?}");
    assert!(*after >= DEADLINE && *after <= DEADLINE * 3 / 2, "{results:?}");
}

#[test]
fn without_an_end_silence_is_warned_of_and_fails_nothing() {
    let warnings = Arc::new(Mutex::new(0));
    let count = Arc::clone(&warnings);
    let wrap = move |endpoint: Threads| {
        let count = Arc::clone(&count);
        bounded(endpoint).with_warning(move |_| *count.lock().unwrap() += 1).endless()
    };
    let results = on_ring(2, wrap, |mut endpoint| {
        if endpoint.rank() == 1 {
            thread::sleep(DEADLINE * 2);
        }
        barrier(&mut endpoint, 1)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
    assert_eq!(*warnings.lock().unwrap(), 1);
}

const RANKS: usize = 6;

/// Ranks of a ring in which rank r watches ranks r - 1 and r + 1 only.
struct Neighbouring {
    inner: Threads,
    watched: [usize; 2],
}

impl Transport<Host> for Neighbouring {
    forward_transport! {
        post progress take pending bytes_sent posts_ahead runs_groups_in_order
    }
}

impl Control for Neighbouring {
    forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat placement last_work
    }

    fn last_heard(&self, peer: usize) -> Instant {
        self.inner.last_heard(peer)
    }

    fn watched(&self) -> Option<&[usize]> {
        Some(&self.watched)
    }
}

fn neighbouring(inner: Threads) -> Deadline<Neighbouring> {
    let rank = inner.rank();
    let mut watched = [(rank + 1) % RANKS, (rank + RANKS - 1) % RANKS];
    watched.sort_unstable();
    Deadline::new(Neighbouring { inner, watched }, DEADLINE).unwrap()
}

/// Rank 0 waits for a message of rank 3, which is not its neighbour, and all other ranks compute
/// for `busy`. Rank 3 calls `tick` every 10 ms.
fn wait_for_a_stranger(
    busy: Duration,
    tick: fn(&mut Deadline<Neighbouring>),
) -> Vec<(Result<()>, Duration)> {
    on_ring(RANKS, neighbouring, move |mut endpoint| {
        let rank = endpoint.rank();
        let message = |peer| header(peer, Channel::Kv, 4, &[0..8]);
        let started = Instant::now();
        let mut run = || -> Result<()> {
            if rank == 0 {
                receive(&mut endpoint, &message(3), 8)?;
                wait_for(&mut endpoint, &message(3))?;
            } else {
                while started.elapsed() < busy {
                    thread::sleep(Duration::from_millis(10));
                    if rank == 3 {
                        tick(&mut endpoint);
                    } else {
                        endpoint.heartbeat(true);
                        endpoint.progress(Duration::ZERO)?;
                    }
                }
            }
            if rank == 3 {
                send(&mut endpoint, message(0), &buffer(&[1; 8]))?;
                drain(&mut endpoint)?;
            }
            barrier(&mut endpoint, 1)
        };
        (run(), started.elapsed())
    })
}

#[test]
fn a_rank_that_is_no_neighbour_may_be_slow() {
    let results = wait_for_a_stranger(DEADLINE * 2, |endpoint| endpoint.heartbeat(true));
    assert!(results.iter().all(|(result, _)| result.is_ok()), "{results:?}");
}

/// The neighbours of the silent rank compute and wait for nobody.
#[test]
fn neighbours_report_a_silent_rank_for_which_another_one_waits() {
    let results = wait_for_a_stranger(DEADLINE * 3, |_| ());
    let (error, after) = &results[0];
    assert!(
        matches!(error, Err(Error::Aborted { rank: 2 | 4, what }) if what.contains("rank 3 did")),
        "{results:?}"
    );
    assert!(*after >= DEADLINE && *after <= DEADLINE * 3 / 2, "{results:?}");
    let names_it = |rank: usize| matches!(&results[rank].0, Err(Error::Timeout { peer: 3, .. }));
    assert!(names_it(2) || names_it(4), "{results:?}");
}

/// All ranks live, and rank 0 waits for a message that nobody sends.
#[test]
fn a_lost_message_of_a_rank_that_is_no_neighbour_is_detected() {
    let results = on_ring(RANKS, neighbouring, |mut endpoint| {
        let started = Instant::now();
        if endpoint.rank() == 0 {
            let message = header(3, Channel::Kv, 4, &[0..8]);
            receive(&mut endpoint, &message, 8).unwrap();
        }
        let result = barrier(&mut endpoint, 1);
        let result = result.map(|()| wait_for_error(&mut endpoint));
        (result, started.elapsed())
    });
    let (error, after) = &results[0];
    assert!(matches!(error, Ok(Error::Timeout { peer: 3, .. })), "{results:?}");
    assert!(*after >= DEADLINE && *after <= DEADLINE * 3 / 2, "{results:?}");
}

/// Rank 3 is late, rank 5 enters and is silent: its neighbours, which wait with it, report it.
#[test]
fn neighbours_report_a_silent_rank_that_has_entered_a_call_and_no_late_one() {
    let results = on_ring(RANKS, neighbouring, |mut endpoint| {
        let started = Instant::now();
        let rank = endpoint.rank();
        if rank == 3 {
            thread::sleep(DEADLINE * 2);
        }
        let mut wait = || -> Result<()> {
            endpoint.start_entry(1, &[])?;
            if rank == 5 {
                thread::sleep(DEADLINE * 2);
            }
            while endpoint.try_all_gather(1)?.is_none() {
                endpoint.progress(Duration::from_millis(20))?;
            }
            Ok(())
        };
        (wait(), started.elapsed())
    });
    for neighbour in [0, 4] {
        let (error, after) = &results[neighbour];
        let names_it = matches!(error, Err(Error::Timeout { peer: 5, .. }))
            || matches!(error, Err(Error::Aborted { what, .. }) if what.contains("rank 5 did"));
        assert!(names_it, "{results:?}");
        assert!(*after >= DEADLINE && *after <= DEADLINE * 3 / 2, "{results:?}");
    }
}
