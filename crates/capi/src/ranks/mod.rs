//! Tests of plans and caches of one rank, as those over MPI, here over endpoints of threads: the
//! bits of an in-process ring, and what a refusal, a late rank or a rank that leaves does to the
//! others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cache;
mod documents;

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use annulus::{
    Attention, BackwardMode, Dims, Division, Layout, LocalRing, Route, Setup, Tensors,
    comm::threads::{Threads, each_rank, ring},
};
use annulus_core::Control;
use ndarray::{Array, Array2, Array3, Array4, Axis, Dimension};

use crate::*;

const DIMS: Dims =
    Dims { batch: 1, q_len: 41, kv_len: 41, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };

fn message() -> String {
    // SAFETY: never NULL, ends with a zero byte, and nothing fails on this thread meanwhile
    unsafe { CStr::from_ptr(annulus_last_error()) }.to_str().unwrap().to_owned()
}

fn ok(status: i32) {
    assert_eq!(status, ANNULUS_SUCCESS, "{}", message());
}

fn value(salt: usize, [b, row, head, c]: [usize; 4]) -> f32 {
    ((row * 31 + head * 7 + c * 3 + b * 5 + salt * 11) % 17) as f32 / 8.0 - 1.0
}

fn input(salt: usize, rows: &[i64], heads: usize) -> Array4<f32> {
    Array4::from_shape_fn((1, rows.len(), heads, 4), |(b, i, head, c)| {
        value(salt, [b, rows[i] as usize, head, c])
    })
}

fn tensor<D: Dimension>(array: &Array<f32, D>) -> annulus_tensor {
    let (mut dims, mut strides) = ([1; 4], [0; 4]);
    for (axis, (&len, &stride)) in array.shape().iter().zip(array.strides()).enumerate() {
        dims[axis] = len as i64;
        strides[axis] = stride as i64;
    }
    let data = array.as_ptr().cast_mut().cast();
    annulus_tensor { data, dtype: ANNULUS_F32, dims, strides }
}

/// Rows of a rank, and out, dq, dk and dv of them.
type Share = (Vec<i64>, [Array4<f32>; 4]);

/// Makes the plan of one rank.
fn plan(endpoint: Threads, route: i32, deadline: f64) -> (i32, *mut annulus_plan) {
    plan_with(endpoint, |options| {
        options.causal = 1;
        options.route = route;
        options.deadline_seconds = deadline;
        options.arrival_deadline_seconds = deadline;
    })
}

/// Makes the plan of one rank, with options.
fn plan_with(endpoint: Threads, set: impl Fn(&mut annulus_options)) -> (i32, *mut annulus_plan) {
    // SAFETY: numbers may be 0
    let mut options: annulus_options = unsafe { std::mem::zeroed() };
    let (mut attention, mut plan) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: all pointers are to locals
    unsafe {
        ok(annulus_options_init(&raw mut options, size_of::<annulus_options>() as u64));
        options.batch = 1;
        options.q_len = DIMS.q_len as i64;
        options.kv_len = DIMS.kv_len as i64;
        options.q_heads = 2;
        options.kv_heads = 1;
        options.head_dim = 4;
        options.value_dim = 4;
        set(&mut options);
        ok(annulus_attention_create(&raw const options, &raw mut attention));
        let status = plan_over(attention, endpoint, &mut plan);
        ok(annulus_attention_destroy(attention));
        (status, plan)
    }
}

fn rows(plan: *mut annulus_plan) -> Vec<i64> {
    let mut rows = vec![0; DIMS.q_len];
    let mut count = 0;
    // SAFETY: as many numbers as said
    ok(unsafe { annulus_plan_q_rows(plan, rows.as_mut_ptr(), rows.len() as i64, &raw mut count) });
    rows.truncate(count as usize);
    rows
}

/// Runs `rank` on a thread for each of `ranks` ranks, and returns the results in their order.
fn on_all<R: Send>(ranks: usize, rank: impl Fn(Threads) -> R + Sync) -> Vec<R> {
    each_rank(ring(ranks), |_, endpoint| Ok(rank(endpoint))).unwrap()
}

/// Runs both passes on one rank; the status of the first that fails. `drop_q` passes NULL as q.
fn passes(plan: *mut annulus_plan, drop_q: bool) -> (i32, Share) {
    passes_with(plan, drop_q, None)
}

/// As [`passes`], with one sink and its gradient.
fn passes_with(
    plan: *mut annulus_plan,
    drop_q: bool,
    sinks: Option<&[Array2<f32>; 2]>,
) -> (i32, Share) {
    let rows = rows(plan);
    let (q, k, v, dout) =
        (input(1, &rows, 2), input(2, &rows, 1), input(3, &rows, 1), input(4, &rows, 2));
    let [out, dq] = [(); 2].map(|()| Array4::<f32>::zeros(q.raw_dim()));
    let [dk, dv] = [(); 2].map(|()| Array4::<f32>::zeros(k.raw_dim()));
    let statistics = [(); 3].map(|()| Array3::<f32>::zeros((1, 2, rows.len())));
    let inputs = [&q, &k, &v, &out, &dout].map(tensor);
    let gradients = [&dq, &dk, &dv].map(tensor);
    let statistics = statistics.each_ref().map(tensor);
    let statistics = statistics.each_ref().map(ptr::from_ref);
    // SAFETY: pointers may be null
    let mut forward: annulus_forward_args = unsafe { std::mem::zeroed() };
    forward.struct_size = size_of::<annulus_forward_args>() as u64;
    forward.q = if drop_q { ptr::null() } else { &raw const inputs[0] };
    forward.k = &raw const inputs[1];
    forward.v = &raw const inputs[2];
    forward.out = &raw const inputs[3];
    [forward.lse, forward.max, forward.sum] = statistics;
    let sinks = sinks.map(|sinks| sinks.each_ref().map(tensor));
    forward.softmax_aux = sinks.as_ref().map_or(ptr::null(), |sinks| &raw const sinks[0]);
    // SAFETY: the arrays outlive the calls, and nobody touches them meanwhile
    let status = unsafe { annulus_forward(plan, &raw const forward) };
    if status != 0 {
        return (status, (rows, [out, dq, dk, dv]));
    }
    // SAFETY: pointers may be null
    let mut backward: annulus_backward_args = unsafe { std::mem::zeroed() };
    backward.struct_size = size_of::<annulus_backward_args>() as u64;
    [backward.q, backward.k, backward.v, backward.out, backward.dout] =
        inputs.each_ref().map(ptr::from_ref);
    [backward.dq, backward.dk, backward.dv] = gradients.each_ref().map(ptr::from_ref);
    [backward.lse, backward.max, backward.sum] = statistics;
    backward.softmax_aux = forward.softmax_aux;
    backward.dsoftmax_aux = sinks.as_ref().map_or(ptr::null(), |sinks| &raw const sinks[1]);
    // SAFETY: as above
    let status = unsafe { annulus_backward(plan, &raw const backward) };
    (status, (rows, [out, dq, dk, dv]))
}

fn by_rust(setup: &Setup, ranks: usize) -> [Array4<f32>; 4] {
    let all: Vec<i64> = (0..DIMS.q_len as i64).collect();
    let (q, k, v, dout) =
        (input(1, &all, 2), input(2, &all, 1), input(3, &all, 1), input(4, &all, 2));
    let setup = setup.clone().map_runtime(|runtime| runtime.threads(1));
    let mut ring = LocalRing::new(setup, DIMS, ranks).unwrap();
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = ring.forward(&tensors).unwrap();
    let gradients = ring.backward(&tensors, &forward, dout.view(), None).unwrap();
    [forward.out, gradients.dq, gradients.dk, gradients.dv]
}

/// Compares plans of single ranks with an in-process ring of as many ranks.
fn compare(name: &str, ranks: usize, setup: &Setup, set: fn(&mut annulus_options)) {
    let want = by_rust(setup, ranks);
    let run = |endpoint: Threads| {
        let (status, plan) = plan_with(endpoint, set);
        ok(status);
        let first = passes(plan, false);
        // a warm plan
        let second = passes(plan, false);
        ok(first.0);
        ok(second.0);
        assert!(first.1 == second.1, "{name}");
        ok(annulus_plan_destroy(plan));
        second.1
    };
    let shares = on_all(ranks, run);
    let axis = Axis(1);
    for (rows, parts) in &shares {
        for (part, want) in parts.iter().zip(&want) {
            for (i, &row) in rows.iter().enumerate() {
                let same = part.index_axis(axis, i) == want.index_axis(axis, row as usize);
                assert!(same, "{name}: row {row} of {ranks} ranks");
            }
        }
    }
    assert_eq!(shares.iter().map(|(rows, _)| rows.len()).sum::<usize>(), DIMS.q_len, "{name}");
}

#[test]
fn plans_of_single_ranks_give_the_bits_of_a_ring_of_threads() {
    for ranks in [1, 2, 3, 5] {
        compare("causal", ranks, &Attention::new().causal(true).into(), |options| {
            options.causal = 1
        });
    }
    // hops of several ranges of rows, in every direction
    let striped = Setup::from((
        Attention::new().sliding_window(5, 2),
        Division::new().layout(Layout::Striped),
    ));
    compare(
        "striped, direct",
        3,
        &striped.map_division(|division| division.route(Route::Direct)),
        |options| {
            options.window_left = 5;
            options.window_right = 2;
            options.layout = ANNULUS_LAYOUT_STRIPED;
            options.route = ANNULUS_ROUTE_DIRECT;
        },
    );
    let zigzag = Setup::from((
        Attention::new().sliding_window(9, 0),
        Division::new().layout(Layout::Zigzag),
    ));
    compare(
        "zigzag, down",
        4,
        &zigzag.clone().map_division(|of| of.route(Route::RelayDown)),
        |options| {
            options.window_left = 9;
            options.window_right = 0;
            options.layout = ANNULUS_LAYOUT_ZIGZAG;
            options.route = ANNULUS_ROUTE_RELAY_DOWN;
        },
    );
    let two_pass = zigzag
        .map_division(|division| division.route(Route::Direct))
        .map_attention(|attention| attention.backward_mode(BackwardMode::TwoPass));
    compare("zigzag, direct, two passes", 4, &two_pass, |options| {
        options.window_left = 9;
        options.window_right = 0;
        options.layout = ANNULUS_LAYOUT_ZIGZAG;
        options.route = ANNULUS_ROUTE_DIRECT;
        options.backward_mode = ANNULUS_BACKWARD_TWO_PASS;
    });
}

#[test]
fn bad_arguments_of_one_rank_are_refused_on_all_and_the_plans_live() {
    on_all(3, |endpoint| {
        let rank = endpoint.rank();
        let (status, plan) = plan(endpoint, ANNULUS_ROUTE_DIRECT, 20.0);
        ok(status);
        let status = passes(plan, rank == 1).0;
        if rank == 1 {
            assert_eq!((status, message().as_str()), (1, "q: got NULL, want a pointer"));
        } else {
            assert_eq!(status, ANNULUS_REFUSED);
            assert_eq!(message(), "rank 1 refused the call: q: got NULL, want a pointer");
        }
        ok(passes(plan, false).0);
        ok(annulus_plan_destroy(plan));
    });
}

#[test]
fn plans_that_differ_are_a_mismatch() {
    on_all(2, |endpoint| {
        let rank = endpoint.rank();
        let route = if rank == 0 { ANNULUS_ROUTE_DIRECT } else { ANNULUS_ROUTE_RELAY_UP };
        let (status, plan) = plan(endpoint, route, 20.0);
        assert_eq!(status, ANNULUS_RANK_MISMATCH, "{}", message());
        assert!(plan.is_null());
    });
}

#[test]
fn a_rank_that_leaves_is_missed() {
    let began = std::time::Instant::now();
    on_all(3, |endpoint| {
        let rank = endpoint.rank();
        let (status, plan) = plan(endpoint, ANNULUS_ROUTE_AUTO, 20.0);
        ok(status);
        if rank != 2 {
            let status = passes(plan, false).0;
            // by its goodbye, or by the abort of the other rank that noticed it
            assert!([ANNULUS_PEER_LOST, ANNULUS_ABORTED].contains(&status), "{}", message());
            assert!(message().contains("connection to rank 2 lost"), "{}", message());
        }
        ok(annulus_plan_destroy(plan));
    });
    // long before the deadline
    assert!(began.elapsed().as_secs() < 10);
}

#[test]
fn destroying_a_plan_ends_a_started_pass_although_no_other_rank_makes_the_call() {
    let began = std::time::Instant::now();
    on_all(3, |endpoint| {
        let rank = endpoint.rank();
        // without an arrival deadline
        let (status, plan) = plan_with(endpoint, |options| options.causal = 1);
        ok(status);
        if rank == 0 {
            let rows = rows(plan);
            let [q, k] = [input(1, &rows, 2), input(2, &rows, 1)];
            let out = Array4::<f32>::zeros(q.raw_dim());
            let lse = Array3::<f32>::zeros((1, 2, rows.len()));
            let [q, k, out] = [&q, &k, &out].map(tensor);
            let lse = tensor(&lse);
            // SAFETY: pointers may be null
            let mut args: annulus_forward_args = unsafe { std::mem::zeroed() };
            args.struct_size = size_of::<annulus_forward_args>() as u64;
            (args.q, args.k, args.v) = (&raw const q, &raw const k, &raw const k);
            (args.out, args.lse) = (&raw const out, &raw const lse);
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
            let (status, plan) = plan_with(endpoint, |options| {
                options.causal = 1;
                options.sinks = 1;
                options.local_gradients = is_local.into();
            });
            ok(status);
            let sinks = [Array2::from_elem((1, 1), 0.5), Array2::from_elem((1, 1), 7.0)];
            ok(passes_with(plan, false, Some(&sinks)).0);
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
        // SAFETY: numbers may be 0
        let mut options: annulus_options = unsafe { std::mem::zeroed() };
        let (mut attention, mut plan) = (ptr::null_mut(), ptr::null_mut());
        let rank = endpoint.rank();
        // SAFETY: all pointers are to locals, or to the counter
        unsafe {
            ok(annulus_options_init(&raw mut options, size_of::<annulus_options>() as u64));
            [options.batch, options.kv_heads, options.q_heads] = [1, 1, 2];
            [options.q_len, options.kv_len] = [DIMS.q_len as i64; 2];
            [options.head_dim, options.value_dim] = [4; 2];
            options.deadline_seconds = 4.0;
            options.arrival_deadline_seconds = 1.5;
            ok(annulus_attention_create(&raw const options, &raw mut attention));
            let counter = ptr::from_ref(&silences).cast_mut().cast();
            ok(annulus_attention_on_silence(attention, Some(count_silence), counter));
            ok(plan_over(attention, endpoint, &mut plan));
        }
        ok(annulus_attention_destroy(attention));
        if rank == 1 {
            // more than a quarter of the deadline, less than the deadline
            thread::sleep(std::time::Duration::from_millis(1800));
        } else {
            assert_eq!(passes(plan, false).0, ANNULUS_ARRIVAL_TIMEOUT);
            assert!(message().starts_with("rank 1: its entry into the call"), "{}", message());
        }
        ok(passes(plan, false).0);
        ok(annulus_plan_destroy(plan));
    };
    on_all(2, run);
    assert_eq!(silences.load(Ordering::Relaxed), 1);
}
