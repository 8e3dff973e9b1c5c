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
    Attention, BackwardMode, Batch, CacheShape, Dims, Division, Layout, LocalCache, Route, Runtime,
    Setup,
    comm::threads::{Threads, each_rank, ring},
};
use annulus_capi::*;
use annulus_core::Control;
use common::{PassInputs, args, attention, batch, last_error, ok, options, pointer, rows, tensor};
use ndarray::{Array1, Array2, Array3, Array4, Axis};

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

/// As [`plan`], on a route and with deadlines of 20 s.
fn plan_on(endpoint: Threads, route: i32) -> (i32, *mut annulus_plan) {
    plan(endpoint, |options| {
        options.route = route;
        [options.deadline_seconds, options.arrival_deadline_seconds] = [20.0; 2];
    })
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

/// Compares plans of single ranks with an in-process ring of as many ranks.
fn compare(name: &str, ranks: usize, setup: Setup, set: fn(&mut annulus_options)) {
    let (forward, gradients) =
        PassInputs::<f32>::all(DIMS).by_facade(setup, DIMS, ranks, &Batch::default());
    let want = [forward.out, gradients.dq, gradients.dk, gradients.dv];
    let run = |endpoint: Threads| {
        let (status, plan) = plan(endpoint, set);
        ok(status);
        // the second time of a warm plan
        let [first, second] = [(); 2].map(|()| passes(plan, false, None));
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
        compare("causal", ranks, Attention::new().causal(true).into(), |_| {});
    }
    // hops of several ranges of rows, in every direction
    let setup = |left, right, layout, route| {
        let attention = Attention::new().sliding_window(left, right);
        Setup::from((attention, Division::new().layout(layout).route(route)))
    };
    let striped = setup(5, 2, Layout::Striped, Route::Direct);
    compare("striped, direct", 3, striped, |options| {
        options.causal = 0;
        (options.window_left, options.window_right) = (5, 2);
        (options.layout, options.route) = (ANNULUS_LAYOUT_STRIPED, ANNULUS_ROUTE_DIRECT);
    });
    let zigzag = setup(9, 0, Layout::Zigzag, Route::RelayDown);
    compare("zigzag, down", 4, zigzag, |options| {
        options.causal = 0;
        (options.window_left, options.window_right) = (9, 0);
        (options.layout, options.route) = (ANNULUS_LAYOUT_ZIGZAG, ANNULUS_ROUTE_RELAY_DOWN);
    });
    let two_pass = setup(9, 0, Layout::Zigzag, Route::Direct)
        .map_attention(|attention| attention.backward_mode(BackwardMode::TwoPass));
    compare("zigzag, direct, two passes", 4, two_pass, |options| {
        options.causal = 0;
        (options.window_left, options.window_right) = (9, 0);
        (options.layout, options.route) = (ANNULUS_LAYOUT_ZIGZAG, ANNULUS_ROUTE_DIRECT);
        options.backward_mode = ANNULUS_BACKWARD_TWO_PASS;
    });
}

#[test]
fn bad_arguments_of_one_rank_are_refused_on_all_and_the_plans_live() {
    on_all(3, |endpoint| {
        let rank = endpoint.rank();
        let (status, plan) = plan_on(endpoint, ANNULUS_ROUTE_DIRECT);
        ok(status);
        let status = passes(plan, rank == 1, None).0;
        if rank == 1 {
            assert_eq!((status, last_error().as_str()), (1, "q: got NULL, want a pointer"));
        } else {
            assert_eq!(status, ANNULUS_REFUSED);
            assert_eq!(last_error(), "rank 1 refused the call: q: got NULL, want a pointer");
        }
        ok(passes(plan, false, None).0);
        ok(annulus_plan_destroy(plan));
    });
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

/// First rows of four documents, and the end of the last. On contiguous shards of 2 and 4 ranks no
/// document is divided.
const STARTS: [i64; 5] = [0, 10, 20, 30, DIMS.q_len as i64];

/// Calls `with` with a batch of the packed documents of [`STARTS`].
fn packed(with: impl FnOnce(*const annulus_batch)) {
    let starts = Array1::from_iter(STARTS);
    let starts = common::described(&starts, ANNULUS_I64);
    with(&annulus_batch { cum_seqlens_q: &raw const starts, ..batch() });
}

/// Returns the description of an attention whose strategy is chosen: causal, with the heads of
/// [`DIMS`], or full, with as many query and KV heads as given.
fn described(layout: i32, full_heads: Option<usize>) -> *mut annulus_attention {
    let [kv_heads, q_heads] = full_heads.map_or([1, 2], |heads| [heads; 2]);
    attention(&annulus_options {
        causal: full_heads.is_none().into(),
        layout,
        strategy: ANNULUS_STRATEGY_AUTO,
        ..options(Dims { kv_heads, q_heads, ..DIMS })
    })
}

/// Returns the rows that a description assigns to a rank.
fn rows_before_plan(attention: *const annulus_attention, ranks: i64, rank: i64) -> Vec<i64> {
    let (mut rows, mut count) = (vec![0; DIMS.q_len], 0);
    let room = rows.len() as i64;
    // SAFETY: as many numbers as said
    unsafe {
        let first = rows.as_mut_ptr();
        ok(annulus_attention_q_rows(attention, ranks, rank, first, room, &raw mut count));
    }
    rows.truncate(count as usize);
    rows
}

/// Runs both passes of one rank over the documents of [`STARTS`].
fn run(endpoint: Threads, ranks: usize, layout: i32) -> Share {
    let attention = described(layout, None);
    let rank = endpoint.rank() as i64;
    let ranks = ranks as i64;
    let mut plan = ptr::null_mut();
    // SAFETY: the batch lives through the calls
    packed(|batch| unsafe {
        if layout == ANNULUS_LAYOUT_BALANCED {
            ok(annulus_attention_set_balanced_layout(attention, ranks, batch));
        } else {
            ok(annulus_attention_set_documents(attention, batch));
        }
    });
    let own = (layout != ANNULUS_LAYOUT_AUTO).then(|| rows_before_plan(attention, ranks, rank));
    // SAFETY: pointers to locals, and a batch that lives through the call
    unsafe {
        ok(plan_over(attention, endpoint, &mut plan));
        packed(|batch| ok(annulus_plan_update(plan, batch)));
    }
    assert!(own.is_none_or(|own| own == rows(plan)), "layout {layout}");
    let (status, share) = passes(plan, false, None);
    ok(status);
    ok(annulus_plan_destroy(plan));
    ok(annulus_attention_destroy(attention));
    share
}

/// Returns the strategy in force of a plan of four ranks with its parts of heads, and the bytes of
/// a forward pass.
fn chosen(attention: *const annulus_attention) -> ([i32; 2], u64) {
    let (mut plan, mut strategy, mut heads, mut bytes) = (ptr::null_mut(), 7, 7, 7);
    // SAFETY: pointers to locals
    unsafe {
        ok(annulus_plan_create_threads(attention, 4, &raw mut plan));
        packed(|batch| ok(annulus_plan_update(plan, batch)));
        ok(annulus_plan_strategy(plan, &raw mut strategy, &raw mut heads));
        ok(annulus_plan_predicted_bytes(plan, ANNULUS_PASS_FORWARD, &raw mut bytes));
    }
    ok(annulus_plan_destroy(plan));
    ([strategy, heads], bytes)
}

#[test]
fn ranks_ask_for_their_rows_and_compute_what_one_rank_does() {
    let documents = Batch { cum_seqlens_q: Some(STARTS.to_vec()), ..Batch::default() };
    let causal = Attention::new().causal(true);
    let (forward, gradients) = PassInputs::<f32>::all(DIMS).by_facade(&causal, DIMS, 1, &documents);
    let want = [forward.out, gradients.dq, gradients.dk, gradients.dv];
    for ranks in [2, 4] {
        for layout in [ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_AUTO] {
            let of_ranks = on_all(ranks, |endpoint| run(endpoint, ranks, layout));
            let mut held = vec![0; DIMS.q_len];
            for (rows, parts) in &of_ranks {
                rows.iter().for_each(|&row| held[row as usize] += 1);
                for (part, want) in parts.iter().zip(&want) {
                    for (i, &row) in rows.iter().enumerate() {
                        let want = want.index_axis(Axis(1), row as usize);
                        let error = &part.index_axis(Axis(1), i) - &want;
                        let most = error.iter().fold(0f32, |most, error| most.max(error.abs()));
                        assert!(most < 2e-5, "row {row} of {ranks} ranks, {layout}: {most}");
                    }
                }
            }
            assert!(held.iter().all(|&ranks| ranks == 1), "{layout}: {held:?}");
        }
    }
}

#[test]
fn the_strategy_is_chosen_for_the_documents() {
    let attention = described(ANNULUS_LAYOUT_CONTIGUOUS, Some(8));
    let (by_mask, _) = chosen(attention);
    assert_eq!(by_mask, [ANNULUS_STRATEGY_HEADS_RING, 4]);
    // SAFETY: a batch that lives through the call
    packed(|batch| unsafe { ok(annulus_attention_set_documents(attention, batch)) });
    // no document is on two ranks
    assert_eq!(chosen(attention), ([ANNULUS_STRATEGY_RING, 1], 0));
    // SAFETY: NULL removes the documents
    unsafe { ok(annulus_attention_set_documents(attention, ptr::null())) };
    assert_eq!(chosen(attention).0, by_mask);
    ok(annulus_attention_destroy(attention));
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

/// Appends rows and attends with their queries. `drop_q` passes NULL as q.
fn decode(cache: *mut annulus_cache, rows: &[i64], drop_q: bool) -> (i32, Array4<f32>) {
    let PassInputs { q, k, v, .. } = PassInputs::of(DIMS, rows);
    let out = Array4::<f32>::zeros(q.raw_dim());
    let lse = Array3::<f32>::zeros((1, 2, rows.len()));
    let [q, k, v, out_tensor] = [&q, &k, &v, &out].map(tensor);
    let lse_tensor = tensor(&lse);
    let args = annulus_attend_args {
        struct_size: size_of::<annulus_attend_args>() as u64,
        q: pointer((!drop_q).then_some(&q)),
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
fn caches_of_single_ranks_give_the_bits_of_a_cache_of_threads() {
    let chunks: [Vec<i64>; 3] = [(0..20).collect(), vec![20], vec![21]];
    for ranks in [1, 2, 3] {
        let shape = CacheShape::new(1, 2, 4).kv_heads(1).page_rows(3);
        let attention = Attention::new().causal(true);
        let runtime = Runtime::new().threads(1);
        let mut threads = LocalCache::new(&attention, &runtime, shape, ranks).unwrap();
        let mut by_threads = |rows: &Vec<i64>| {
            let inputs = PassInputs::<f32>::of(DIMS, rows);
            threads.append(inputs.k.view(), inputs.v.view()).unwrap();
            threads.attend(inputs.q.view(), None).unwrap().out
        };
        let want: Vec<Array4<f32>> = chunks.iter().map(&mut by_threads).collect();
        let run = |endpoint: Threads| {
            let rank = endpoint.rank();
            let (status, cache) = cache(endpoint, 0);
            ok(status);
            let refused = decode(cache, &[0], rank == 0).0;
            let of_rank = if rank == 0 { ANNULUS_INVALID_ARGUMENT } else { ANNULUS_REFUSED };
            assert_eq!(refused, of_rank, "{}", last_error());
            ok(annulus_cache_truncate(cache, 0));
            for (rows, want) in chunks.iter().zip(&want) {
                let (status, out) = decode(cache, rows, false);
                ok(status);
                assert!(out == want, "rank {} of {ranks}", rank);
            }
            ok(annulus_cache_destroy(cache));
        };
        on_all(ranks, run);
    }
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
