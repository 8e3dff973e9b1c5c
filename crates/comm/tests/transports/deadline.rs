//! Silence ends a wait; slowness does not.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use annulus_comm::{Deadline, Threads, barrier, gather, threads};
use annulus_core::{Channel, Control, Error, Result, Transport};

use crate::common::*;

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

/// Rank 1 is busy for `busy`, saying `say` every so often; rank 0 waits for its message, rank 2 in a gather.
fn wait_while(busy: Duration, say: fn(&mut Deadline<Threads>)) -> Vec<Result<()>> {
    on_ring(3, bounded, move |mut endpoint| {
        let rank = endpoint.rank();
        let message = |peer| hop(peer, Channel::Block, 4, &[0..8]);
        if rank == 0 {
            receive(&mut endpoint, &message(1), 8)?;
            wait_for(&mut endpoint, &message(1))?;
        }
        if rank == 1 {
            let started = Instant::now();
            while started.elapsed() < busy {
                thread::sleep(Duration::from_millis(10));
                say(&mut endpoint);
            }
            let block = buffer(&[1; 8]);
            send(&mut endpoint, message(0), &block)?;
            drain(&mut endpoint)?;
        }
        barrier(&mut endpoint, 1)
    })
}

#[test]
fn a_rank_that_works_is_waited_for_beyond_the_deadline() {
    assert_eq!(wait_while(DEADLINE * 2, |endpoint| endpoint.beat(true)), [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn ranks_that_live_but_do_nothing_are_not() {
    let started = Instant::now();
    let results = wait_while(DEADLINE * 2, |endpoint| endpoint.beat(false));
    assert!(results.iter().all(Result::is_err), "{results:?}");
    assert!(results.iter().any(|result| matches!(result, Err(Error::Timeout { peer: 1, .. }))), "{results:?}");
    assert!(started.elapsed() >= DEADLINE);
}

#[test]
fn a_rank_that_neither_works_nor_lives_is_named() {
    let results = wait_while(DEADLINE * 2, |_| ());
    for result in &results[..] {
        assert!(matches!(result, Err(Error::Timeout { peer: 1, .. } | Error::Aborted { .. })), "{results:?}");
    }
    assert!(results[1].as_ref().is_err_and(|error| error.to_string().contains("rank 1 did not deliver")), "{results:?}");
}

#[test]
fn idle_hours_before_a_call_do_not_count() {
    let results = on_ring(2, bounded, |mut endpoint| {
        thread::sleep(DEADLINE * 3 / 2);
        gather(&mut endpoint, 0, &[]).map(drop)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn a_quarter_of_the_deadline_is_time_for_one_warning() {
    watched(|| {
        let warnings = Arc::new(Mutex::new(Vec::new()));
        let [mut a, b]: [Threads; 2] = threads::ring(2).try_into().unwrap();
        let heard = Arc::clone(&warnings);
        let sleeper = thread::spawn(move || {
            let mut b = b;
            thread::sleep(DEADLINE / 2);
            b.offer(3, &[]).unwrap();
            while b.collect(3).unwrap().is_none() {
                b.progress(Duration::from_millis(20)).unwrap();
            }
        });
        a.beat(true);
        let mut a = bounded(a).with_warning(move |silence| heard.lock().unwrap().push(silence));
        assert_eq!(a.deadline(), DEADLINE);
        barrier(&mut a, 3).unwrap();
        sleeper.join().unwrap();
        let warnings = warnings.lock().unwrap();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].peer == 1 && warnings[0].waited >= DEADLINE / 4);
    });
}
