//! Deadlines over a transport whose ranks judge only their neighbours.

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{Deadline, Threads, barrier, forward_control, forward_transport};
use annulus_core::{Channel, Control, Error, Host, Result, Transport};

use crate::common::*;

const DEADLINE: Duration = Duration::from_secs(1);
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

fn bounded(inner: Threads) -> Deadline<Neighbouring> {
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
    on_ring(RANKS, bounded, move |mut endpoint| {
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
    let results = on_ring(RANKS, bounded, |mut endpoint| {
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
    let results = on_ring(RANKS, bounded, |mut endpoint| {
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
