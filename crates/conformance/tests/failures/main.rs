//! Ranks, messages, devices and updates that fail or are late. A program of its own, because its
//! deadlines are short beside the computations of the suite.
//!
//! This file has the ring under faults of messages: every rank returns a documented error by
//! deadline + 1 s that names the fault, and its plan is dead afterwards. Delays of messages, and
//! ranks that make a call much later than others, cause no failure. And the contract of a transport,
//! over threads.

mod mismatch;
mod slow_ranks;
mod update;

use std::{
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Batch, Dims, Division, Error, Layout, Plan, Result, Runtime, Setup, Strategy,
    Tensors,
    backend::Cpu,
    comm::{
        ring::{Ring, RingOptions},
        threads::{each_rank, ring},
    },
};
use annulus_conformance::{
    device::{Fault, Injection},
    suite::messages::CONTRACT,
};
use ndarray::Array4;

const RANKS: usize = 4;
const DEADLINE: Duration = Duration::from_secs(1);
const DIMS: Dims =
    Dims { batch: 1, q_len: 16, kv_len: 16, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };

/// One rank's first error, its time, and the error of the next call.
#[derive(Debug)]
struct Fate {
    error: Option<Error>,
    after: Duration,
    next: Option<Error>,
}

/// Runs forward and backward of full attention, three hops each way; rank 1 has the fault.
fn run(injection: Injection) -> Vec<Fate> {
    run_with(Strategy::Ring, injection)
}

/// As [`run`], under a strategy.
fn run_with(strategy: Strategy, injection: Injection) -> Vec<Fate> {
    let fates = each_rank(ring(RANKS), |rank, endpoint| {
        let injections = if rank == 1 { vec![injection] } else { Vec::new() };
        let transport = Fault::new(endpoint, 5, injections);
        let attention = Setup::from((
            Attention::new(),
            Division::new().layout(Layout::Contiguous).strategy(strategy),
            Runtime::new().deadline(DEADLINE),
        ));
        let plan = Plan::new(&attention, DIMS, transport);
        let start = Instant::now();
        Ok(match plan {
            Err(error) => Fate { error: Some(error), after: start.elapsed(), next: None },
            Ok(mut plan) => {
                let error = passes(&mut plan).err();
                let after = start.elapsed();
                let next = error.is_some().then(|| passes(&mut plan).err()).flatten();
                Fate { error, after, next }
            }
        })
    });
    fates.expect("no rank panics")
}

fn passes(plan: &mut Plan) -> Result<()> {
    let rows = annulus_core::index(plan.q_rows().len());
    let tensor = |heads| Array4::<f32>::from_elem((1, rows, heads, 4), 0.5);
    let q = tensor(2);
    let kv = tensor(1);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    plan.backward(&tensors, &forward, q.view(), None).map(drop)
}

/// Requires that every rank failed in time with a fatal error and stays dead, and that at least one
/// rank's own error is `root`.
fn assert_all_fail(injection: Injection, root: fn(usize, &Error) -> bool) {
    assert_fates(injection, &run(injection), root);
}

/// As [`assert_all_fail`], with heads or keys divided among pairs of ranks.
fn assert_all_fail_in_groups(injection: Injection, root: fn(usize, &Error) -> bool) {
    for strategy in [IN_PAIRS, IN_COLUMNS] {
        assert_fates(injection, &run_with(strategy, injection), root);
    }
}

fn assert_fates(injection: Injection, fates: &[Fate], root: fn(usize, &Error) -> bool) {
    let mut found = false;
    for (rank, fate) in fates.iter().enumerate() {
        let error = fate
            .error
            .as_ref()
            .unwrap_or_else(|| panic!("{injection:?}: rank {rank} has no error: {fates:?}"));
        assert!(error.is_fatal(), "{injection:?}: rank {rank}: {error}");
        assert!(
            fate.after <= DEADLINE + Duration::from_secs(1),
            "{injection:?}: rank {rank} took {:?}",
            fate.after
        );
        assert!(
            matches!(&fate.next, Some(Error::Poisoned { .. })),
            "{injection:?}: rank {rank} continues: {:?}",
            fate.next
        );
        found |= root(rank, error);
    }
    assert!(found, "{injection:?}: no rank names the cause: {fates:?}");
}

fn assert_none_fails(injection: Injection) {
    for (rank, fate) in run(injection).into_iter().enumerate() {
        assert!(fate.error.is_none(), "{injection:?}: rank {rank}: {:?}", fate.error);
    }
}

/// Pairs of ranks divide the heads, and form a ring of two pairs.
const IN_PAIRS: Strategy = Strategy::HeadsRing { heads: 2 };

/// Pairs of ranks divide the keys: two query tiles over two key columns.
const IN_COLUMNS: Strategy = Strategy::Grid { heads: 1, queries: 2, keys: 2 };

/// Sends before, in and after the ring of a forward pass, and the first of the backward pass.
const SENDS_IN_PAIRS: [u64; 4] = [0, 1, 2, 3];

/// The first and the last send of a forward pass, and two of the backward pass, by number.
const SENDS: [u64; 4] = [0, 2, 4, 6];

/// Runs the cases concurrently: most of their time is waiting.
fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, check: impl Fn(T) + Sync) {
    let check = &check;
    thread::scope(|scope| {
        let cases: Vec<_> =
            cases.into_iter().map(|case| scope.spawn(move || check(case))).collect();
        cases.into_iter().for_each(|case| case.join().expect("the case holds"));
    });
}

#[test]
fn a_message_that_never_arrives_is_a_timeout() {
    at_once(SENDS, |send| {
        assert_all_fail(Injection::Drop { send }, |_, error| matches!(error, Error::Timeout { .. }))
    });
}

#[test]
fn the_receiver_of_a_truncated_message_names_its_sender() {
    fn truncated(_: usize, error: &Error) -> bool {
        matches!(error, Error::Comm { peer: 1, what, .. } if what.contains("truncated"))
    }
    for send in SENDS {
        assert_all_fail(Injection::Truncate { send }, truncated);
    }
}

#[test]
fn a_rank_that_dies_is_lost_to_the_others() {
    at_once(0..3, |step| {
        assert_all_fail(Injection::Die { step }, |rank, error| {
            rank != 1 && matches!(error, Error::Timeout { .. } | Error::PeerLost { .. })
        });
    });
}

#[test]
fn faults_of_an_exchange_of_heads_fail_all_ranks() {
    at_once(SENDS_IN_PAIRS, |send| {
        assert_all_fail_in_groups(Injection::Drop { send }, |_, error| {
            matches!(error, Error::Timeout { .. })
        });
    });
    for send in SENDS_IN_PAIRS {
        assert_all_fail_in_groups(
            Injection::Truncate { send },
            |_, error| matches!(error, Error::Comm { peer: 1, what, .. } if what.contains("truncated")),
        );
    }
    at_once(0..3, |step| {
        assert_all_fail_in_groups(Injection::Die { step }, |rank, error| {
            rank != 1 && matches!(error, Error::Timeout { .. } | Error::PeerLost { .. })
        });
    });
    for strategy in [IN_PAIRS, IN_COLUMNS] {
        for fate in run_with(strategy, Injection::DelayAll { most: Duration::from_millis(20) }) {
            assert!(fate.error.is_none(), "{fate:?}");
        }
    }
}

#[test]
fn messages_that_arrive_late_cause_no_failure() {
    at_once(SENDS, |send| {
        assert_none_fails(Injection::Delay { send, by: Duration::from_millis(300) })
    });
    assert_none_fails(Injection::DelayAll { most: Duration::from_millis(20) });
}

/// Plans on each of two ranks and runs `body`.
fn on_two<T: Send>(
    setup: impl Into<Setup>,
    body: impl Fn(usize, Plan) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let setup = setup
        .into()
        .map_division(|division| division.layout(Layout::Contiguous))
        .map_runtime(|runtime| runtime.deadline(DEADLINE));
    let rank =
        |rank, endpoint| Ok(Plan::new(&setup, DIMS, endpoint).and_then(|plan| body(rank, plan)));
    each_rank(ring(2), rank).expect("no rank panics")
}

/// Runs a forward pass of this rank's rows.
fn forward(plan: &mut Plan) -> Result<Array4<f32>> {
    let rows = plan.q_rows().iter().collect::<Vec<_>>();
    let tensor = |heads| {
        Array4::from_shape_fn((1, rows.len(), heads, 4), |(_, row, head, dim)| {
            ((rows[row] * 7) as usize + head * 3 + dim) as f32 * 0.1 - 1.0
        })
    };
    let q = tensor(2);
    let kv = tensor(1);
    plan.forward(&Tensors::new(q.view(), kv.view(), kv.view())).map(|forward| forward.out)
}

#[test]
fn a_rank_that_is_busy_between_two_calls_for_two_deadlines_fails_nothing() {
    let results = on_two(Attention::new(), |rank, mut plan| {
        let first = forward(&mut plan)?;
        if rank == 1 {
            thread::sleep(DEADLINE * 2);
        }
        let second = forward(&mut plan)?;
        if rank == 0 {
            thread::sleep(DEADLINE * 2);
        }
        plan.update(&Batch::default())?;
        Ok(first == second && first == forward(&mut plan)?)
    });
    assert_eq!(results, [Ok(true), Ok(true)]);
}

#[test]
fn a_call_that_ended_at_its_arrival_deadline_is_made_again() {
    at_once([Strategy::Ring, IN_PAIRS], again_after_arrival_deadline);
}

fn again_after_arrival_deadline(strategy: Strategy) {
    let attention = Setup::from((
        Attention::new(),
        Division::new().strategy(strategy),
        Runtime::new().arrival_deadline(DEADLINE),
    ));
    let results = on_two(&attention, |rank, mut plan| {
        let first = forward(&mut plan)?;
        if rank == 1 {
            thread::sleep(DEADLINE * 3 / 2);
            return Ok(forward(&mut plan)? == first && forward(&mut plan)? == first);
        }
        let late = forward(&mut plan).map(drop);
        assert!(matches!(late, Err(Error::ArrivalTimeout { peer: 1, .. })), "{late:?}");
        // the other rank gets this one's entry into the pass
        let other = plan.update(&Batch::default());
        assert!(matches!(other, Err(Error::InvalidArgument { .. })), "{other:?}");
        Ok(forward(&mut plan)? == first && forward(&mut plan)? == first)
    });
    assert_eq!(results, [Ok(true), Ok(true)]);
}

/// A refusal whose entry ended at the arrival deadline reaches the other rank, and the call after
/// it is the next one of both.
#[test]
fn a_refusal_that_ended_at_its_arrival_deadline_ends_one_call() {
    let results = on_two(
        (Attention::new(), Division::new(), Runtime::new().arrival_deadline(DEADLINE)),
        |rank, mut plan| {
            let first = forward(&mut plan)?;
            if rank == 1 {
                thread::sleep(DEADLINE * 3 / 2);
                let refused = forward(&mut plan).map(drop);
                assert!(matches!(refused, Err(Error::Refused { rank: 0, .. })), "{refused:?}");
            } else {
                let wrong = Array4::<f32>::zeros((1, 1, 1, 1));
                let tensors = Tensors::new(wrong.view(), wrong.view(), wrong.view());
                let own = plan.forward(&tensors).map(drop);
                assert!(matches!(own, Err(Error::InvalidArgument { .. })), "{own:?}");
            }
            Ok(forward(&mut plan)? == first)
        },
    );
    assert_eq!(results, [Ok(true), Ok(true)]);
}

#[test]
fn a_plan_that_ended_at_its_arrival_deadline_is_lost_to_the_late_rank() {
    let attention =
        Setup::from((Attention::new(), Division::new(), Runtime::new().arrival_deadline(DEADLINE)));
    let results = each_rank(ring(2), |rank, endpoint| {
        if rank == 1 {
            thread::sleep(DEADLINE * 3 / 2);
        }
        Ok(Plan::new(&attention, DIMS, endpoint).map(drop))
    });
    let results = results.expect("no rank panics");
    assert!(matches!(results[0], Err(Error::ArrivalTimeout { peer: 1, .. })), "{results:?}");
    assert!(matches!(results[1], Err(Error::PeerLost { peer: 0, .. })), "{results:?}");
}

#[test]
fn ranks_with_different_deadlines_of_the_environment_are_refused() {
    let ranks = ring(2).into_iter().zip([None, Some(Duration::ZERO)]);
    let results = each_rank(ranks, |_, (endpoint, deadline_variable)| {
        let setup = Setup::default();
        let options = RingOptions { deadline_variable, ..setup.ring_options() };
        let ring = Ring::new(Cpu::new(1)?, Box::new(endpoint), setup.spec(DIMS), options);
        Ok(ring.map(drop))
    });
    for result in results.expect("no rank panics") {
        let error: Error = result.expect_err("a mismatch");
        let want = "ANNULUS_DEADLINE differs between ranks: rank 1 has Some(0.0), rank 0 has None";
        assert_eq!(error.to_string(), want);
    }
}

#[test]
fn threads_keep_the_contract_of_transports() {
    for ranks in [1, 2, 3, 7] {
        for (name, _, check) in CONTRACT.into_iter().filter(|of| ranks >= of.1) {
            let verdicts = each_rank(ring(ranks), |_, mut endpoint| check(&mut endpoint));
            let verdicts = verdicts.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(verdicts.iter().all(Result::is_ok), "{name}, {ranks} ranks: {verdicts:?}");
        }
    }
}
