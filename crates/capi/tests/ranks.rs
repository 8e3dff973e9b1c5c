//! Plans and caches of one rank, as those over MPI, here over endpoints of threads: the bits of an
//! in-process ring, and what a refusal, a late rank or a rank that leaves does to the others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::{
    ffi::c_void,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use annulus::{
    Dims,
    comm::threads::{Threads, each_rank, ring},
};
use annulus_capi::*;
use annulus_core::Control;
use common::{PassInputs, args, attention, last_error, ok, options, pointer, rows, tensor};
use ndarray::{Array2, Array3, Array4};

const DIMS: Dims =
    Dims { batch: 1, q_len: 41, kv_len: 41, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };

/// Rows of a rank, and out, dq, dk and dv of them.
type Share = (Vec<i64>, [Array4<f32>; 4]);

/// Makes the plan of one rank: causal, with these options.
fn plan(endpoint: Threads, set: impl Fn(&mut annulus_options)) -> (i32, *mut annulus_plan) {
    let mut options = annulus_options { causal: 1, ..options(DIMS) };
    set(&mut options);
    let (attention, mut plan) = (attention(&options), ptr::null_mut());
    let status = plan_over(attention, endpoint, &mut plan);
    ok(annulus_attention_destroy(attention));
    (status, plan)
}

/// Runs `rank` on a thread for each of `ranks` ranks, and returns the results in their order.
fn on_all<R: Send>(ranks: usize, rank: impl Fn(Threads) -> R + Sync) -> Vec<R> {
    each_rank(ring(ranks), |_, endpoint| Ok(rank(endpoint))).unwrap()
}

/// Runs both passes on one rank; the status of the first that fails. `drop_q` passes NULL as q;
/// `sinks` are one sink and its gradient.
fn passes(plan: *mut annulus_plan, drop_q: bool, sinks: Option<&[Array2<f32>; 2]>) -> (i32, Share) {
    let rows = rows(plan);
    let PassInputs { q, k, v, dout } = PassInputs::<f32>::of(DIMS, &rows);
    let [out, dq] = [(); 2].map(|()| Array4::<f32>::zeros(q.raw_dim()));
    let [dk, dv] = [(); 2].map(|()| Array4::<f32>::zeros(k.raw_dim()));
    let statistics = [(); 3].map(|()| Array3::<f32>::zeros((1, 2, rows.len())));
    let inputs = [&q, &k, &v, &dout].map(tensor);
    let gradients = [&dq, &dk, &dv].map(tensor);
    let [lse, max, sum] = statistics.each_ref().map(tensor);
    let outputs = [&tensor(&out), &lse];
    let (mut forward, mut backward) = args(inputs.each_ref(), outputs, gradients.each_ref());
    let sinks = sinks.map(|sinks| sinks.each_ref().map(tensor));
    (forward.max, forward.sum) = (&raw const max, &raw const sum);
    (backward.max, backward.sum) = (&raw const max, &raw const sum);
    forward.softmax_aux = pointer(sinks.as_ref().map(|sinks| &sinks[0]));
    backward.softmax_aux = forward.softmax_aux;
    backward.dsoftmax_aux = pointer(sinks.as_ref().map(|sinks| &sinks[1]));
    if drop_q {
        forward.q = ptr::null();
    }
    // SAFETY: the arrays outlive the calls, and nobody touches them meanwhile
    let status = unsafe {
        match annulus_forward(plan, &raw const forward) {
            ANNULUS_SUCCESS => annulus_backward(plan, &raw const backward),
            refused => refused,
        }
    };
    (status, (rows, [out, dq, dk, dv]))
}

#[test]
fn destroying_a_plan_ends_a_started_pass_although_no_other_rank_makes_the_call() {
    let began = Instant::now();
    on_all(3, |endpoint| {
        let rank = endpoint.rank();
        // without an arrival deadline
        let (status, plan) = plan(endpoint, |_| {});
        ok(status);
        if rank == 0 {
            let PassInputs { q, k, .. } = PassInputs::<f32>::of(DIMS, &rows(plan));
            let out = Array4::<f32>::zeros(q.raw_dim());
            let lse = Array3::<f32>::zeros((1, 2, q.dim().1));
            let [q, k, out] = [&q, &k, &out].map(tensor);
            let (args, _) = args([&q, &k, &k, &q], [&out, &tensor(&lse)], [&q, &k, &k]);
            let mut done = 7;
            // SAFETY: the tensors live until the plan is destroyed
            unsafe {
                ok(annulus_forward_start(plan, &raw const args));
                thread::sleep(Duration::from_millis(200));
                ok(annulus_plan_test(plan, &raw mut done));
            }
            assert_eq!(done, 0, "the other ranks have not made the call");
        } else {
            thread::sleep(Duration::from_millis(400));
        }
        ok(annulus_plan_destroy(plan));
    });
    assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
}

#[test]
fn local_gradients_are_the_parts_of_the_sum() {
    let of_sinks = |is_local: bool| {
        let run = |endpoint: Threads| {
            let (status, plan) = plan(endpoint, |options| {
                options.sinks = 1;
                options.local_gradients = is_local.into();
            });
            ok(status);
            let sinks = [Array2::from_elem((1, 1), 0.5), Array2::from_elem((1, 1), 7.0)];
            ok(passes(plan, false, Some(&sinks)).0);
            ok(annulus_plan_destroy(plan));
            sinks[1][[0, 0]]
        };
        on_all(3, run)
    };
    let (parts, sums) = (of_sinks(true), of_sinks(false));
    assert!(sums.iter().all(|&sum| sum == sums[0]), "{sums:?}");
    let sum: f32 = parts.iter().sum();
    assert!((sum - sums[0]).abs() < 1e-4 * sums[0].abs().max(1.0), "{parts:?} {sums:?}");
    assert!(parts.iter().all(|&part| part != sums[0]), "{parts:?} {sums:?}");
}

/// Ranks reported as silent by the function of [`annulus_attention_on_silence`].
unsafe extern "C" fn count_silence(context: *mut c_void, peer: i64, step: i64, waited: f64) {
    assert!(peer == 1 && step >= 0 && (0.4..10.0).contains(&waited), "{peer} {step} {waited}");
    // SAFETY: the context is a counter that outlives the plan
    unsafe { &*context.cast::<AtomicUsize>() }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_late_rank_is_told_of_and_the_call_is_made_again() {
    let silences = AtomicUsize::new(0);
    let run = |endpoint: Threads| {
        let rank = endpoint.rank();
        let attention = attention(&annulus_options {
            deadline_seconds: 4.0,
            arrival_deadline_seconds: 1.5,
            ..options(DIMS)
        });
        let counter = ptr::from_ref(&silences).cast_mut().cast();
        let mut plan = ptr::null_mut();
        // SAFETY: the counter outlives the plan
        ok(unsafe { annulus_attention_on_silence(attention, Some(count_silence), counter) });
        ok(plan_over(attention, endpoint, &mut plan));
        ok(annulus_attention_destroy(attention));
        if rank == 1 {
            // more than a quarter of the deadline, less than the deadline
            thread::sleep(Duration::from_millis(1800));
        } else {
            assert_eq!(passes(plan, false, None).0, ANNULUS_ARRIVAL_TIMEOUT);
            assert!(
                last_error().starts_with("rank 1: its entry into the call"),
                "{}",
                last_error()
            );
        }
        ok(passes(plan, false, None).0);
        ok(annulus_plan_destroy(plan));
    };
    on_all(2, run);
    assert_eq!(silences.load(Ordering::Relaxed), 1);
}

/// Makes the cache of one rank.
fn cache(endpoint: Threads, q_len: usize) -> (i32, *mut annulus_cache) {
    let attention = attention(&annulus_options {
        page_rows: 3,
        causal: 1,
        deadline_seconds: 60.0,
        ..options(Dims { q_len, kv_len: 0, ..DIMS })
    });
    let mut cache = ptr::null_mut();
    let status = cache_over(attention, endpoint, &mut cache);
    ok(annulus_attention_destroy(attention));
    (status, cache)
}

#[test]
fn ranks_do_not_wait_for_one_whose_options_have_no_cache() {
    let run = |endpoint: Threads| {
        let rank = endpoint.rank();
        let (status, none) = cache(endpoint, rank);
        assert!(none.is_null());
        (status, last_error())
    };
    let statuses = on_all(2, run);
    assert_eq!(statuses[1].0, ANNULUS_INVALID_ARGUMENT);
    assert!(statuses[1].1.starts_with("q_len: got 1"), "{statuses:?}");
    assert_eq!(statuses[0].0, ANNULUS_PEER_LOST, "{statuses:?}");
}
