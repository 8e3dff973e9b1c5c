//! Passes on threads of their own: the bits of a call, and what ends them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Backward, Dims, Division, Error, Forward, LocalRing, Plan, Result, Runtime, Setup,
    Tensors,
    comm::{
        forward_control, forward_transport,
        threads::{Threads, each_rank, ring},
    },
    overlapped::Overlapped,
};
use annulus_core::{Control, Host, Transport};
use ndarray::Array4;

const LEN: usize = 96;

fn dims() -> Dims {
    Dims::new(1, LEN, 2, 16)
}

fn input(rows: usize) -> Array4<f32> {
    Array4::from_shape_fn((1, rows, 2, 16), |(_, row, head, element)| {
        ((row * 7 + head * 5 + element * 3) % 13) as f32 * 0.1 - 0.5
    })
}

fn tensors(x: &Array4<f32>) -> Tensors<'_, f32> {
    Tensors::new(x.view(), x.view(), x.view())
}

fn plans(ranks: usize) -> Vec<Plan> {
    let attention = Attention::new().causal(true);
    each_rank(ring(ranks), |_, endpoint| Plan::new(&attention, dims(), endpoint)).unwrap()
}

fn rank_input(plan: &Plan) -> Array4<f32> {
    input(usize::try_from(plan.q_rows().len()).unwrap())
}

/// Results of both passes, without times.
fn bits(forward: Forward<f32>, gradients: Backward<f32>) -> (Forward<f32>, Backward<f32>) {
    let forward = Forward { reports: Vec::new(), ..forward };
    (forward, Backward { reports: Vec::new(), ..gradients })
}

#[test]
fn passes_of_one_rank_each_have_the_bits_of_calls() {
    let call = |plan: &mut Plan, x: &Array4<f32>| {
        let forward = plan.forward(&tensors(x))?;
        let gradients = plan.backward(&tensors(x), &forward, x.view(), None)?;
        Ok(bits(forward, gradients))
    };
    let start = |plan: &mut Plan, x: &Array4<f32>| {
        let forward =
            thread::scope(|scope| plan.start(scope, |plan| plan.forward(&tensors(x)))?.wait())?;
        let gradients = thread::scope(|scope| {
            let pass =
                plan.start(scope, |plan| plan.backward(&tensors(x), &forward, x.view(), None))?;
            while !pass.test() {
                thread::yield_now();
            }
            pass.wait()
        })?;
        Ok(bits(forward, gradients))
    };
    for ranks in [1, 3] {
        let mut plans = plans(ranks);
        let results = each_rank(plans.iter_mut(), |rank, plan| {
            let x = rank_input(plan);
            // in each pass, ranks that start it meet ranks that call it
            let of_calls = call(plan, &x)?;
            let mixed = if rank % 2 == 0 { start(plan, &x)? } else { call(plan, &x)? };
            Ok((of_calls, mixed, start(plan, &x)?))
        });
        for (of_calls, mixed, started) in results.unwrap() {
            assert!(of_calls == mixed && of_calls == started, "{ranks} ranks");
        }
    }
}

#[test]
fn passes_of_a_ring_have_the_bits_of_calls_and_overlap_with_the_program() {
    let mut local = LocalRing::new(Attention::new().causal(true), dims(), 3).unwrap();
    let x = input(LEN);
    let forward = local.forward(&tensors(&x)).unwrap();
    let gradients = local.backward(&tensors(&x), &forward, x.view(), None).unwrap();
    let (program, pass) = mpsc::channel();
    let of_pass = &x;
    let started = thread::scope(|scope| {
        let pass = local
            .start(scope, move |local| {
                // the pass cannot go on unless the program runs meanwhile
                pass.recv_timeout(Duration::from_secs(60)).map_err(Error::internal)?;
                local.forward(&tensors(of_pass))
            })
            .unwrap();
        assert!(!pass.test());
        program.send(()).unwrap();
        pass.wait().unwrap()
    });
    let again = thread::scope(|scope| {
        let pass = local.start(scope, |ring| ring.backward(&tensors(&x), &started, x.view(), None));
        pass.unwrap().wait().unwrap()
    });
    assert!(bits(forward, gradients) == bits(started, again));
}

#[test]
fn a_plan_of_its_own_refuses_what_does_not_fit_its_pass() {
    let local = LocalRing::new(Attention::new(), dims(), 2).unwrap();
    let mut plan = Overlapped::<LocalRing, Forward<f32>>::new(local);
    let refused = |result: Result<()>, what: &str| match result.unwrap_err() {
        Error::InvalidArgument { argument, got, .. } => {
            assert_eq!((argument.as_str(), got.as_str()), ("plan", what));
        }
        other => panic!("{other}"),
    };
    refused(plan.wait().map(drop), "one without a pass under way");
    assert!(plan.test());
    let x = Arc::new(input(LEN));
    let (program, pass) = mpsc::channel::<()>();
    let of_pass = Arc::clone(&x);
    plan.start(move |plan| {
        assert!(pass.recv().is_err(), "the program has dropped its end");
        plan.forward(&tensors(&of_pass))
    })
    .unwrap();
    assert!(!plan.test());
    refused(plan.plan_mut().map(drop), "one with a pass under way");
    let second = plan.start(|_| Err(Error::internal("a second pass")));
    refused(second, "one with a pass under way");
    drop(program);
    let forward = plan.wait().unwrap();
    let mut local = plan.into_plan().unwrap();
    assert_eq!(forward.out, local.forward(&tensors(&x)).unwrap().out);
}

#[test]
fn a_panic_is_the_error_of_the_pass() {
    fn panics(plan: &mut LocalRing) -> Result<Forward<f32>> {
        let _ = plan;
        panic!("of the program")
    }
    let want = |error: Error| {
        assert!(matches!(&error, Error::Internal { what } if what.contains("of the program")));
    };
    let mut plan = Overlapped::new(LocalRing::new(Attention::new(), dims(), 2).unwrap());
    plan.start(panics).unwrap();
    want(plan.wait().unwrap_err());
    // the ranks were not called, so the plan lives
    let x = input(LEN);
    let mut local = plan.into_plan().unwrap();
    local.forward(&tensors(&x)).unwrap();
    let scoped = thread::scope(|scope| local.start(scope, panics).unwrap().wait());
    want(scoped.unwrap_err());
    local.forward(&tensors(&x)).unwrap();
    // a panic on a rank ends the plan
    let attention = Setup::from((
        Attention::new(),
        Division::new(),
        Runtime::new().on_step(|_| panic!("of the program")),
    ));
    let mut local = LocalRing::new(&attention, dims(), 2).unwrap();
    let pass = thread::scope(|scope| {
        local.start(scope, |ring| ring.forward(&tensors(&x))).unwrap().wait()
    });
    want(pass.unwrap_err());
}

/// Runs rank 0 of two, whose other rank does not make the call before `end` has returned, and
/// returns the error of that rank's call.
fn abandoned(end: impl FnOnce(Plan)) -> Error {
    let mut plans = plans(2);
    let mut other = plans.pop().unwrap();
    let begin = Instant::now();
    end(plans.pop().unwrap());
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    let x = rank_input(&other);
    let error = other.forward(&tensors(&x)).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
    error
}

#[test]
fn dropping_a_pass_ends_it_although_another_rank_never_makes_the_call() {
    let error = abandoned(|mut plan| {
        let x = rank_input(&plan);
        thread::scope(|scope| {
            let pass = plan.start(scope, |plan| plan.forward(&tensors(&x))).unwrap();
            thread::sleep(Duration::from_millis(100));
            assert!(!pass.test());
        });
        let poisoned = plan.forward(&tensors(&x)).unwrap_err();
        assert!(poisoned.to_string().contains("cancelled"), "{poisoned}");
    });
    assert!(matches!(error, Error::Aborted { rank: 0, .. } | Error::PeerLost { .. }), "{error}");
    let error = abandoned(|plan| {
        let x = rank_input(&plan);
        let mut plan = Overlapped::<Plan, Forward<f32>>::new(plan);
        plan.start(move |plan| plan.forward(&tensors(&x))).unwrap();
        thread::sleep(Duration::from_millis(100));
        assert!(!plan.test());
    });
    assert!(matches!(error, Error::Aborted { rank: 0, .. } | Error::PeerLost { .. }), "{error}");
}

#[test]
fn a_cancelled_pass_tells_the_ranks_within_it() {
    let mut plans = plans(2);
    let errors = each_rank(plans.iter_mut(), |rank, plan| {
        let x = rank_input(plan);
        plan.forward(&tensors(&x))?;
        let ended = if rank == 0 {
            thread::scope(|scope| {
                // it is dropped while the pass has not reached the ring yet
                drop(plan.start(scope, |plan| {
                    thread::sleep(Duration::from_millis(200));
                    plan.forward(&tensors(&x))
                })?);
                plan_is_dead()
            })
        } else {
            plan.forward(&tensors(&x)).map(drop)
        };
        Ok(ended.unwrap_err())
    });
    let errors = errors.unwrap();
    assert!(matches!(&errors[1], Error::Aborted { rank: 0, what } if what.contains("cancelled")));
}

fn plan_is_dead() -> Result<()> {
    Err(Error::Poisoned { first: "a cancelled pass".to_owned() })
}

#[test]
fn dropping_a_pass_that_has_ended_leaves_the_plan_usable() {
    let x = input(LEN);
    let mut local = LocalRing::new(Attention::new(), dims(), 2).unwrap();
    thread::scope(|scope| {
        let pass = local.start(scope, |ring| ring.forward(&tensors(&x))).unwrap();
        while !pass.test() {
            thread::yield_now();
        }
    });
    local.forward(&tensors(&x)).unwrap();
}

/// A transport that only the thread which made it may use.
struct Funneled {
    inner: Threads,
    thread: thread::ThreadId,
    foreign: Arc<AtomicUsize>,
}

impl Control for Funneled {
    forward_control! {
        rank ranks start_all_gather try_all_gather stragglers abort heartbeat last_heard last_work
    }

    fn any_thread(&self) -> bool {
        false
    }
}

impl Transport<Host> for Funneled {
    forward_transport! {
        post take pending bytes_sent posts_ahead runs_groups_in_order
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        if thread::current().id() != self.thread {
            self.foreign.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.progress(timeout)
    }
}

#[test]
fn a_transport_of_one_thread_refuses_a_pass_on_another_and_the_call_takes_its_place() {
    let foreign = Arc::new(AtomicUsize::new(0));
    for heads in [1, 2] {
        let attention = Setup::from((
            Attention::new(),
            Division::new().strategy(annulus::Strategy::HeadsRing { heads }),
        ));
        let results = each_rank(ring(2), |_, inner| {
            let foreign = Arc::clone(&foreign);
            let transport = Funneled { inner, thread: thread::current().id(), foreign };
            let mut plan = Plan::new(&attention, dims(), transport)?;
            let x = rank_input(&plan);
            let refused = thread::scope(|scope| {
                plan.start(scope, |plan| plan.forward(&tensors(&x))).map(drop)
            });
            let forward = plan.forward(&tensors(&x))?;
            let mut plan = Overlapped::<Plan, Forward<f32>>::new(plan);
            let owned = plan.start(|_| Err(Error::internal("a pass on another thread")));
            Ok(([refused.unwrap_err(), owned.unwrap_err()], forward.out.sum()))
        });
        for (refused, sum) in results.unwrap() {
            for error in refused {
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            }
            assert!(sum.is_finite());
        }
    }
    assert_eq!(foreign.load(Ordering::Relaxed), 0);
}
