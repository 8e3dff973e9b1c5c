//! Forked children: what the parent made is refused and harmless there, and new plans compute.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "fork, and what ends a child")]

use std::{
    ffi::c_int,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, thread,
    time::{Duration, Instant},
};

use annulus::{
    Attention, Dims, Division, Error, LocalRing, Plan, Result, Runtime, Tensors,
    backend::{BackendName, Cpu},
    comm::threads::ring,
};
use ndarray::Array4;

unsafe extern "C" {
    safe fn fork() -> c_int;
    safe fn _exit(status: c_int) -> !;
    safe fn kill(process: c_int, signal: c_int) -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
}

const KILL: c_int = 9;
const NO_HANG: c_int = 1;
/// Far longer than the work of a child.
const DEADLINE: Duration = Duration::from_secs(15);

/// Runs `work` in a forked child. Fails if it panics there or does not end.
fn in_child(what: &str, work: impl FnOnce()) {
    let child = fork();
    assert!(child >= 0, "{what}: no child");
    if child == 0 {
        // neither destructors of the parent's values nor exit handlers run
        _exit(c_int::from(catch_unwind(AssertUnwindSafe(work)).is_err()));
    }
    let started = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: a child of this process that was not waited for; the number lives on
        let ended = unsafe { waitpid(child, &raw mut status, NO_HANG) };
        if ended == child {
            return assert!(status == 0, "{what}: the child failed ({status:#x})");
        }
        if started.elapsed() > DEADLINE {
            kill(child, KILL);
            // SAFETY: as above; a status is not needed
            unsafe { waitpid(child, ptr::null_mut(), 0) };
            panic!("{what}: hangs in a forked child");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn dims() -> Dims {
    Dims::new(1, 300, 4, 16)
}

fn input() -> Array4<f32> {
    Array4::from_shape_fn((1, 300, 4, 16), |(_, row, head, element)| {
        ((row * 7 + head * 5 + element * 3) % 13) as f32 * 0.1 - 0.5
    })
}

fn tensors(x: &Array4<f32>) -> Tensors<'_, f32> {
    Tensors::new(x.view(), x.view(), x.view())
}

fn new_ring(ranks: usize, threads: usize) -> LocalRing {
    LocalRing::new(
        (Attention::new().causal(true), Division::new(), Runtime::new().threads(threads)),
        dims(),
        ranks,
    )
    .unwrap()
}

/// Computes both passes.
fn bits(ring: &mut LocalRing, x: &Array4<f32>) -> (Array4<f32>, Array4<f32>) {
    let forward = ring.forward(&tensors(x)).unwrap();
    let gradients = ring.backward(&tensors(x), &forward, x.view(), None).unwrap();
    (forward.out, gradients.dk)
}

/// Checks the error of a value that the parent made.
fn is_refused<T>(name: &str, result: Result<T>) {
    let Err(error) = result else { panic!("{name} of the parent") };
    let told = error.to_string();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{told}");
    assert!(told.starts_with(&format!("{name}: got one of process ")), "{told}");
    assert!(told.ends_with("want a new one, made in this process"), "{told}");
}

#[test]
fn a_child_plans_anew_and_refuses_plans_of_its_parent() {
    let x = input();
    for (ranks, threads) in [(1, 1), (1, 3), (2, 1), (3, 2)] {
        let mut ring = Some(new_ring(ranks, threads));
        let want = bits(ring.as_mut().unwrap(), &x);
        in_child(&format!("{ranks} ranks of {threads} threads"), || {
            let mut ring = ring.take().unwrap();
            is_refused("plan", ring.forward(&tensors(&x)));
            is_refused("plan", ring.update(&Default::default()));
            assert_eq!(ring.plan().ranks(), ranks);
            let mut own = new_ring(ranks, threads);
            assert!(bits(&mut own, &x) == want);
            // as daemon(3): the child of a child
            in_child("a grandchild", || {
                is_refused("plan", own.forward(&tensors(&x)));
                assert!(bits(&mut new_ring(ranks, threads), &x) == want);
                drop(own);
            });
            drop(ring);
        });
        // the child has dropped its copy of the plan only
        assert!(bits(&mut ring.unwrap(), &x) == want);
    }
}

#[test]
fn a_backend_of_the_parent_computes_on_threads_of_the_child() {
    let x = input();
    let attention = Attention::new().causal(true);
    let runtime = Runtime::new()
        .backend(annulus::backend::AnyBackend::open(BackendName::Cpu, None, 3).unwrap());
    let setup = (&attention, &Division::new(), &runtime);
    let want = bits(&mut LocalRing::new(setup, dims(), 1).unwrap(), &x);
    let threads = Cpu::new(3).unwrap();
    in_child("a backend", || {
        assert!(bits(&mut LocalRing::new(setup, dims(), 1).unwrap(), &x) == want);
        let endpoint = ring(1).pop().unwrap();
        let mut plan = Plan::with_backend(&attention, dims(), threads, endpoint).unwrap();
        assert!(plan.forward(&tensors(&x)).unwrap().out == want.0);
    });
}
