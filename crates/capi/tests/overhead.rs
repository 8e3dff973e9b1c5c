//! Costs of a warm pass besides its kernels: allocations, memory, and the time that C adds. The
//! tests count the allocations of the whole process, so they run one at a time.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use annulus::{
    Attention, Backward, Batch, Dims, Division, Forward, Layout as RowLayout, LocalRing, Runtime,
    Setup, SinkShape, Tensors,
    bias::Alibi,
    ndarray::{Array2, Array4},
};
use annulus_capi::*;
use common::{args, options, plan_of_threads, tensor};

/// Counts allocations, and bytes that are in use.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Bytes of all allocations.
static BYTES: AtomicUsize = AtomicUsize::new(0);
static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are passed to the system's allocator
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Only one test runs at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    TESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocations of one warm call: the least of several, because the test harness starts the other
/// tests, and so allocates, at the same time.
fn allocations(mut call: impl FnMut()) -> usize {
    (0..3).for_each(|_| call());
    let mut least = usize::MAX;
    for _ in 0..5 {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        call();
        least = least.min(ALLOCATIONS.load(Ordering::Relaxed) - before);
    }
    least
}

/// Returns the least bytes that one of several warm calls allocates.
fn bytes_allocated(mut call: impl FnMut()) -> usize {
    let mut of_call = || {
        let before = BYTES.load(Ordering::Relaxed);
        call();
        BYTES.load(Ordering::Relaxed) - before
    };
    of_call();
    (0..3).map(|_| of_call()).min().unwrap()
}

const CALLS: usize = 200;

/// The fastest of many calls.
fn fastest(mut call: impl FnMut()) -> Duration {
    let time = |_| {
        let began = Instant::now();
        call();
        began.elapsed()
    };
    (0..CALLS).map(time).min().unwrap_or_default()
}

/// Causal attention, with one thread for each rank.
fn causal() -> Setup {
    (Attention::new().causal(true), Division::new(), Runtime::new().threads(1)).into()
}

/// Tensors `[1, len, heads, dim]`, which are those of a forward and of a backward pass.
struct Case {
    dims: Dims,
    x: Array4<f32>,
    forward: Forward<f32>,
    gradients: Backward<f32>,
}

impl Case {
    fn new(len: usize, heads: usize, dim: usize) -> Self {
        let dims = Dims::new(1, len, heads, dim);
        let x = Array4::ones((1, len, heads, dim));
        let mut ring = LocalRing::new(causal(), dims, 1).unwrap();
        let tensors = Tensors::new(x.view(), x.view(), x.view());
        let mut forward = ring.forward(&tensors).unwrap();
        (forward.max, forward.sum) = (None, None);
        let gradients = ring.backward(&tensors, &forward, x.view(), None).unwrap();
        Self { dims, x, forward, gradients }
    }

    fn forward(&mut self, ring: &mut LocalRing) {
        let tensors = Tensors::new(self.x.view(), self.x.view(), self.x.view());
        ring.forward_into(&tensors, self.forward.view_mut()).unwrap();
    }

    fn backward(&mut self, ring: &mut LocalRing) {
        let x = self.x.view();
        let (forward, gradients) = (self.forward.view(), self.gradients.view_mut());
        ring.backward_into(&Tensors::new(x, x, x), &forward, x, None, gradients).unwrap();
    }

    /// A plan of C over threads, causal, in f32.
    fn plan(&self, ranks: usize) -> *mut annulus_plan {
        plan_of_threads(&annulus_options { causal: 1, ..options(self.dims) }, ranks)
    }

    /// Calls `pass` with the arguments of both passes.
    fn by_c(&mut self, pass: impl FnOnce(&annulus_forward_args, &annulus_backward_args)) {
        let [input, output] = [&self.x, &self.forward.out].map(tensor);
        let Backward { dq, dk, dv, .. } = &self.gradients;
        let gradients = [dq, dk, dv].map(tensor);
        let outputs = [&output, &tensor(&self.forward.lse)];
        let (forward, backward) = args([&input; 4], outputs, gradients.each_ref());
        pass(&forward, &backward);
    }
}

#[test]
fn a_warm_pass_of_one_rank_allocates_nothing() {
    let _alone = alone();
    let mut case = Case::new(64, 1, 16);
    for causal in [false, true] {
        let setup = self::causal().map_attention(|attention| attention.causal(causal));
        let mut ring = LocalRing::new(setup, case.dims, 1).unwrap();
        assert_eq!(allocations(|| case.forward(&mut ring)), 0, "forward");
        assert_eq!(allocations(|| case.backward(&mut ring)), 0, "backward");
    }
    let plan = case.plan(1);
    case.by_c(|forward, backward| {
        // SAFETY: the arrays outlive the call, and nobody touches them meanwhile
        let of_forward = allocations(|| unsafe { assert_eq!(annulus_forward(plan, forward), 0) });
        // SAFETY: as above
        let of_backward =
            allocations(|| unsafe { assert_eq!(annulus_backward(plan, backward), 0) });
        assert_eq!([of_forward, of_backward], [0, 0], "by C");
    });
    assert_eq!(annulus_plan_destroy(plan), 0);
}

/// Calls of a workspace may allocate for each of its threads, but no memory that grows with the
/// rows, whatever the options, and whatever the batch before.
#[test]
fn a_warm_pass_with_every_option_allocates_nothing_that_grows() {
    const HEADS: usize = 4;
    let _alone = alone();
    for (threads, has_bias) in [(1, true), (1, false), (3, true)] {
        let bytes = [150, 900].map(|len| {
            let attention = Attention::new()
                .causal(true)
                .logits_soft_cap(5.0)
                .softmax_aux(SinkShape::per_head(1))
                .dropout(0.2, 1)
                .bias_function(Arc::new(Alibi::published(HEADS)))
                .bias(has_bias.then_some([1, 1, 1, len]));
            let dims = Dims::new(1, len, HEADS, 16);
            let setup = (attention, Division::new(), Runtime::new().threads(threads));
            let mut ring = LocalRing::new(setup, dims, 1).unwrap();
            let x = Array4::<f32>::ones((1, len, HEADS, 16));
            let (bias, sinks) = (Array4::zeros((1, 1, 1, len)), Array2::zeros((HEADS, 1)));
            let mut tensors =
                Tensors::new(x.view(), x.view(), x.view()).with_softmax_aux(sinks.view());
            tensors.bias = has_bias.then(|| bias.view());
            let mut forward = ring.forward(&tensors).unwrap();
            let mut gradients = ring.backward(&tensors, &forward, x.view(), None).unwrap();
            let mut pass = |ring: &mut LocalRing| {
                ring.forward_into(&tensors, forward.view_mut()).unwrap();
                let into = gradients.view_mut();
                ring.backward_into(&tensors, &forward.view(), x.view(), None, into).unwrap();
            };
            let of_rows = bytes_allocated(|| pass(&mut ring));
            let ids = Array2::from_shape_fn((1, len), |(_, row)| (row / 150) as i32);
            let documents = Batch {
                q_segment_ids: Some(ids.clone()),
                kv_segment_ids: Some(ids),
                ..Batch::default()
            };
            // tasks are shorter and in another order for documents
            for batch in [&documents, &Batch::default(), &documents, &Batch::default()] {
                ring.update(batch).unwrap();
                let of_batch = bytes_allocated(|| pass(&mut ring));
                assert!(of_batch < 8192, "{threads} threads, {len} rows: {of_batch} bytes");
            }
            println!("{threads} threads, bias {has_bias}, {len} rows: {of_rows} bytes");
            of_rows
        });
        assert!(bytes.iter().all(|&bytes| bytes < 8192), "{threads} threads: {bytes:?} bytes");
        assert!(threads > 1 || bytes[0] == bytes[1], "at 150 and 900 rows: {bytes:?} bytes");
    }
}

/// Allocations of a warm pass for each rank of an in-process ring: its thread, the agreement before
/// the pass and the one after it, and the messages. `docs/embedding.md` has this number.
const PER_RANK: usize = 150;

#[test]
fn allocations_of_a_ring_of_threads_do_not_depend_on_the_length() {
    let _alone = alone();
    for ranks in [2, 3] {
        for layout in [RowLayout::Contiguous, RowLayout::Striped, RowLayout::Zigzag] {
            let counts = [96, 960].map(|len| {
                let mut case = Case::new(len, 1, 16);
                let setup = causal().map_division(|division| division.layout(layout.clone()));
                let mut ring = LocalRing::new(setup, case.dims, ranks).unwrap();
                let forward = allocations(|| case.forward(&mut ring));
                [forward, allocations(|| case.backward(&mut ring))]
            });
            println!("{ranks} ranks, {layout:?}: {counts:?} allocations");
            for count in counts.as_flattened() {
                assert!(*count <= PER_RANK * ranks, "{ranks} ranks, {layout:?}: {counts:?}");
            }
        }
    }
}

#[test]
fn the_bytes_of_a_plan_are_what_the_allocator_counts() {
    let _alone = alone();
    for (len, ranks) in [(1024, 1), (1024, 3), (4096, 2)] {
        let mut case = Case::new(len, 2, 64);
        let before = IN_USE.load(Ordering::Relaxed);
        let plan = case.plan(ranks);
        case.by_c(|forward, backward| {
            for _ in 0..2 {
                // SAFETY: the arrays outlive the calls, and nobody touches them meanwhile
                unsafe {
                    assert_eq!(annulus_forward(plan, forward), 0);
                    assert_eq!(annulus_backward(plan, backward), 0);
                }
            }
        });
        let counted = (IN_USE.load(Ordering::Relaxed) - before) as f64;
        let mut told = 0;
        // SAFETY: a number of this function
        assert_eq!(unsafe { annulus_plan_workspace_bytes(plan, &raw mut told) }, 0);
        let factor = counted / told as f64;
        println!("{len} rows, {ranks} ranks: {told} bytes, the allocator counts {factor:.3} times");
        assert!((1.0..1.25).contains(&factor), "{counted} bytes are in use, {told} are told");
        assert_eq!(annulus_plan_destroy(plan), 0);
    }
}

#[test]
fn a_call_by_c_takes_the_time_of_a_call_by_rust() {
    let _alone = alone();
    let mut case = Case::new(64, 1, 16);
    let mut ring = LocalRing::new(causal(), case.dims, 1).unwrap();
    let by_rust = fastest(|| case.forward(&mut ring));
    let plan = case.plan(1);
    let mut by_c = Duration::MAX;
    case.by_c(|forward, _| {
        // SAFETY: the arrays outlive the call, and nobody touches them meanwhile
        by_c = fastest(|| unsafe { assert_eq!(annulus_forward(plan, forward), 0) });
    });
    assert_eq!(annulus_plan_destroy(plan), 0);
    println!("1 x 64 x 1 x 16: {by_rust:?} by Rust, {by_c:?} by C");
    // a look-up, a dozen checks: a copy of a tensor or a lock that others hold would show
    assert!(by_c < by_rust + Duration::from_micros(50), "{by_c:?} by C, {by_rust:?} by Rust");
}
