//! A ring over functions of the host: the bits of an in-process ring, and what a host that fails,
//! or a rank that leaves, does to the others. The host here carries messages between threads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod documents;
#[path = "../host/mod.rs"]
mod host;

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use annulus::{
    Attention, BackwardMode, CacheShape, Dims, Layout, Route, Tensors, ndarray::Array2,
    ndarray::Array3, ndarray::Array4,
};
use annulus_capi::*;

use host::{Host, on_all, transport};

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

fn tensor<D: annulus::ndarray::Dimension>(
    array: &annulus::ndarray::Array<f32, D>,
) -> annulus_tensor {
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

/// The plan of one rank over callbacks.
fn plan(transport: &annulus_transport, route: i32, deadline: f64) -> (i32, *mut annulus_plan) {
    plan_with(transport, |options| {
        options.causal = 1;
        options.route = route;
        options.deadline_seconds = deadline;
        options.arrival_deadline_seconds = deadline;
    })
}

/// The plan of one rank over callbacks, with options.
fn plan_with(
    transport: &annulus_transport,
    set: impl Fn(&mut annulus_options),
) -> (i32, *mut annulus_plan) {
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
        let status = annulus_plan_create_callbacks(attention, transport, &raw mut plan);
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

fn by_rust(attention: &Attention, ranks: usize) -> [Array4<f32>; 4] {
    let all: Vec<i64> = (0..DIMS.q_len as i64).collect();
    let (q, k, v, dout) =
        (input(1, &all, 2), input(2, &all, 1), input(3, &all, 1), input(4, &all, 2));
    let mut ring = attention.clone().threads(1).local_ring(DIMS, ranks).unwrap();
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let forward = ring.forward(&tensors).unwrap();
    let gradients = ring.backward(&tensors, &forward, dout.view(), None).unwrap();
    [forward.out, gradients.dq, gradients.dk, gradients.dv]
}

/// Compares a ring over callbacks with an in-process ring of as many ranks.
fn compare(name: &str, ranks: i64, attention: &Attention, set: fn(&mut annulus_options)) {
    let want = by_rust(attention, ranks as usize);
    let run = |host: &Host| {
        let (status, plan) = plan_with(&transport(host, ranks), set);
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
    let (shares, wire) = on_all(ranks, |_| usize::MAX, run);
    let axis = annulus::ndarray::Axis(1);
    for (rows, parts) in &shares {
        for (part, want) in parts.iter().zip(&want) {
            for (i, &row) in rows.iter().enumerate() {
                let same = part.index_axis(axis, i) == want.index_axis(axis, row as usize);
                assert!(same, "{name}: row {row} of {ranks} ranks");
            }
        }
    }
    assert_eq!(shares.iter().map(|(rows, _)| rows.len()).sum::<usize>(), DIMS.q_len, "{name}");
    assert_eq!(wire.messages.load(Ordering::Relaxed) > 0, ranks > 1, "{name}");
    // nothing is in flight after all have left
    assert_eq!(wire.live.load(Ordering::Relaxed), 0, "{name}");
}

/// The cache of one rank over callbacks.
fn cache(transport: &annulus_transport, q_len: i64) -> (i32, *mut annulus_cache) {
    // SAFETY: numbers may be 0
    let mut options: annulus_options = unsafe { std::mem::zeroed() };
    let (mut attention, mut cache) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: all pointers are to locals
    unsafe {
        ok(annulus_options_init(&raw mut options, size_of::<annulus_options>() as u64));
        (options.batch, options.q_len, options.q_heads, options.kv_heads) = (1, q_len, 2, 1);
        (options.head_dim, options.value_dim, options.page_rows) = (4, 4, 3);
        (options.causal, options.deadline_seconds) = (1, 60.0);
        ok(annulus_attention_create(&raw const options, &raw mut attention));
        let status = annulus_cache_create_callbacks(attention, transport, &raw mut cache);
        ok(annulus_attention_destroy(attention));
        (status, cache)
    }
}

/// Appends rows and attends with their queries. `drop_q` passes NULL as q.
fn decode(cache: *mut annulus_cache, rows: &[i64], drop_q: bool) -> (i32, Array4<f32>) {
    let (q, k, v) = (input(1, rows, 2), input(2, rows, 1), input(3, rows, 1));
    let out = Array4::<f32>::zeros(q.raw_dim());
    let lse = Array3::<f32>::zeros((1, 2, rows.len()));
    let [q, k, v, out_tensor] = [&q, &k, &v, &out].map(tensor);
    let lse_tensor = tensor(&lse);
    let args = annulus_attend_args {
        struct_size: size_of::<annulus_attend_args>() as u64,
        q: if drop_q { ptr::null() } else { &raw const q },
        softmax_aux: ptr::null(),
        out: &raw const out_tensor,
        lse: &raw const lse_tensor,
    };
    // SAFETY: the arrays outlive the calls, and nobody touches them meanwhile
    let status = unsafe {
        ok(annulus_cache_append(cache, &raw const k, &raw const v));
        annulus_cache_attend(cache, &raw const args)
    };
    (status, out)
}

#[test]
fn a_cache_over_callbacks_gives_the_bits_of_a_cache_of_threads() {
    let chunks: [Vec<i64>; 3] = [(0..20).collect(), vec![20], vec![21]];
    for ranks in [1, 2, 3] {
        let shape = CacheShape::new(1, 2, 4).kv_heads(1).page_rows(3);
        let attention = Attention::new().causal(true).threads(1);
        let mut threads = attention.local_cache(shape, ranks as usize).unwrap();
        let mut by_threads = |rows: &Vec<i64>| {
            threads.append(input(2, rows, 1).view(), input(3, rows, 1).view()).unwrap();
            threads.attend(input(1, rows, 2).view(), None).unwrap().out
        };
        let want: Vec<Array4<f32>> = chunks.iter().map(&mut by_threads).collect();
        let run = |host: &Host| {
            let (status, cache) = cache(&transport(host, ranks), 0);
            ok(status);
            let refused = decode(cache, &[0], host.rank == 0).0;
            let of_rank = if host.rank == 0 { ANNULUS_INVALID_ARGUMENT } else { ANNULUS_REFUSED };
            assert_eq!(refused, of_rank, "{}", message());
            ok(annulus_cache_truncate(cache, 0));
            for (rows, want) in chunks.iter().zip(&want) {
                let (status, out) = decode(cache, rows, false);
                ok(status);
                assert!(out == want, "rank {} of {ranks}", host.rank);
            }
            ok(annulus_cache_destroy(cache));
        };
        let (_, wire) = on_all(ranks, |_| usize::MAX, run);
        assert_eq!(wire.messages.load(Ordering::Relaxed) > 0, ranks > 1);
        assert_eq!(wire.live.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn ranks_do_not_wait_for_one_whose_options_have_no_cache() {
    let run = |host: &Host| {
        let (status, none) = cache(&transport(host, 2), host.rank);
        assert!(none.is_null());
        (status, message())
    };
    let (statuses, wire) = on_all(2, |_| usize::MAX, run);
    assert_eq!(statuses[1].0, ANNULUS_INVALID_ARGUMENT);
    assert!(statuses[1].1.starts_with("q_len: got 1"), "{statuses:?}");
    assert_eq!(statuses[0].0, ANNULUS_PEER_LOST, "{statuses:?}");
    assert_eq!(wire.live.load(Ordering::Relaxed), 0);
}

#[test]
fn a_ring_over_callbacks_gives_the_bits_of_a_ring_of_threads() {
    for ranks in [1, 2, 3, 5] {
        compare("causal", ranks, &Attention::new().causal(true), |options| options.causal = 1);
    }
    // hops of several ranges of rows, in every direction
    let striped = Attention::new().sliding_window(5, 2).layout(Layout::Striped);
    compare("striped, direct", 3, &striped.clone().route(Route::Direct), |options| {
        options.window_left = 5;
        options.window_right = 2;
        options.layout = ANNULUS_LAYOUT_STRIPED;
        options.route = ANNULUS_ROUTE_DIRECT;
    });
    let zigzag = Attention::new().sliding_window(9, 0).layout(Layout::Zigzag);
    compare("zigzag, down", 4, &zigzag.clone().route(Route::RelayDown), |options| {
        options.window_left = 9;
        options.window_right = 0;
        options.layout = ANNULUS_LAYOUT_ZIGZAG;
        options.route = ANNULUS_ROUTE_RELAY_DOWN;
    });
    let two_pass = zigzag.route(Route::Direct).backward_mode(BackwardMode::TwoPass);
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
    let (_, wire) = on_all(
        3,
        |_| usize::MAX,
        |host| {
            let (status, plan) = plan(&transport(host, 3), ANNULUS_ROUTE_DIRECT, 20.0);
            ok(status);
            let status = passes(plan, host.rank == 1).0;
            if host.rank == 1 {
                assert_eq!((status, message().as_str()), (1, "q: got NULL, want a pointer"));
            } else {
                assert_eq!(status, ANNULUS_REFUSED);
                assert_eq!(message(), "rank 1 refused the call: q: got NULL, want a pointer");
            }
            ok(passes(plan, false).0);
            ok(annulus_plan_destroy(plan));
        },
    );
    assert_eq!(wire.live.load(Ordering::Relaxed), 0);
}

#[test]
fn plans_that_differ_are_a_mismatch() {
    on_all(
        2,
        |_| usize::MAX,
        |host| {
            let route = if host.rank == 0 { ANNULUS_ROUTE_DIRECT } else { ANNULUS_ROUTE_RELAY_UP };
            let (status, plan) = plan(&transport(host, 2), route, 20.0);
            assert_eq!(status, ANNULUS_RANK_MISMATCH, "{}", message());
            assert!(plan.is_null());
        },
    );
}

#[test]
fn a_host_that_fails_ends_the_plan_on_all_ranks() {
    // rank 1 cannot tell the others, which find out by its silence, or by its absence from a call;
    // as many messages as planning needs, and a few more
    for sends in [0, 1, 5, 9, 14, 20] {
        let left = |rank| if rank == 1 { sends } else { usize::MAX };
        let (statuses, wire) = on_all(3, left, |host| {
            let (status, plan) = plan(&transport(host, 3), ANNULUS_ROUTE_AUTO, 1.5);
            if status != 0 {
                assert!(plan.is_null());
                return (status, message());
            }
            let first = (0..100).map(|_| passes(plan, false).0).find(|&status| status != 0);
            let (first, told) = (first.unwrap(), message());
            if first != ANNULUS_ARRIVAL_TIMEOUT {
                assert_eq!(passes(plan, false).0, ANNULUS_POISONED);
            }
            ok(annulus_plan_destroy(plan));
            (first, told)
        });
        for (rank, (status, told)) in statuses.iter().enumerate() {
            let is_late = rank != 1 && *status == ANNULUS_ARRIVAL_TIMEOUT;
            assert!(*status >= 40 || is_late, "rank {rank} after {sends} sends: {status} {told}");
        }
        let said = &statuses[1].1;
        assert!(said.contains("the host's function send returned 17"), "{sends}: {said}");
        assert_eq!(wire.live.load(Ordering::Relaxed), 0, "after {sends} sends");
    }
}

#[test]
fn a_rank_that_leaves_is_missed() {
    let began = std::time::Instant::now();
    on_all(
        3,
        |_| usize::MAX,
        |host| {
            let (status, plan) = plan(&transport(host, 3), ANNULUS_ROUTE_AUTO, 20.0);
            ok(status);
            if host.rank != 2 {
                let status = passes(plan, false).0;
                // by its goodbye, or by the abort of the other rank that noticed it
                assert!([ANNULUS_PEER_LOST, ANNULUS_ABORTED].contains(&status), "{}", message());
                assert!(message().contains("connection to rank 2 lost"), "{}", message());
            }
            ok(annulus_plan_destroy(plan));
        },
    );
    // long before the deadline
    assert!(began.elapsed().as_secs() < 10);
}

#[test]
fn destroying_a_plan_ends_a_started_pass_although_no_other_rank_makes_the_call() {
    let began = std::time::Instant::now();
    on_all(
        3,
        |_| usize::MAX,
        |host| {
            // without an arrival deadline
            let (status, plan) = plan_with(&transport(host, 3), |options| options.causal = 1);
            ok(status);
            if host.rank == 0 {
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
        },
    );
    assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
}

#[test]
fn local_gradients_are_the_parts_of_the_sum() {
    let of_sinks = |is_local: bool| {
        let run = |host: &Host| {
            let (status, plan) = plan_with(&transport(host, 3), |options| {
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
        on_all(3, |_| usize::MAX, run).0
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
    let run = |host: &Host| {
        // SAFETY: numbers may be 0
        let mut options: annulus_options = unsafe { std::mem::zeroed() };
        let (mut attention, mut plan) = (ptr::null_mut(), ptr::null_mut());
        let transport = transport(host, 2);
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
            ok(annulus_plan_create_callbacks(attention, &raw const transport, &raw mut plan));
        }
        ok(annulus_attention_destroy(attention));
        if host.rank == 1 {
            // more than a quarter of the deadline, less than the deadline
            thread::sleep(std::time::Duration::from_millis(1800));
        } else {
            assert_eq!(passes(plan, false).0, ANNULUS_ARRIVAL_TIMEOUT);
            assert!(message().starts_with("rank 1: its entry into the call"), "{}", message());
        }
        ok(passes(plan, false).0);
        ok(annulus_plan_destroy(plan));
    };
    on_all(2, |_| usize::MAX, run);
    assert_eq!(silences.load(Ordering::Relaxed), 1);
}
