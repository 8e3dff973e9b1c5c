//! The C interface adds no allocation to a warm pass of the facade. The test is alone in its
//! program, because it counts the allocations of the whole process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use annulus::{Attention, Dims, ForwardViewMut, Tensors, ndarray::Array3, ndarray::Array4};
use annulus_capi::*;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are passed to the system's allocator
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const CALLS: usize = 200;

/// Allocations of one call, and the fastest of many.
fn measure(mut call: impl FnMut()) -> (usize, Duration) {
    (0..3).for_each(|_| call());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    call();
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    let time = |_| {
        let began = Instant::now();
        call();
        began.elapsed()
    };
    (allocations, (0..CALLS).map(time).min().unwrap_or_default())
}

#[test]
fn a_warm_forward_by_c_allocates_what_rust_does() {
    let x = Array4::<f32>::ones((1, 64, 1, 16));
    let mut out = Array4::<f32>::zeros((1, 64, 1, 16));
    let mut lse = Array3::<f32>::zeros((1, 1, 64));
    let dims = Dims::new(1, 64, 1, 16);
    let mut ring = Attention::new().threads(1).local_ring(dims, 1).unwrap();
    let (by_rust, rust) = measure(|| {
        let tensors = Tensors::new(x.view(), x.view(), x.view());
        let (out, lse) = (out.view_mut(), lse.view_mut());
        let outputs = ForwardViewMut { out, lse, max: None, sum: None, ties: None };
        drop(ring.forward_into(&tensors, outputs).unwrap());
    });

    let dims = [1, 64, 1, 16];
    let strides = [1024, 16, 16, 1];
    let tensor = |data: *const f32| annulus_tensor {
        data: data.cast_mut().cast(),
        dtype: ANNULUS_F32,
        dims,
        strides,
    };
    let (input, output) = (tensor(x.as_ptr()), tensor(out.as_mut_ptr()));
    let statistics = annulus_tensor {
        data: lse.as_mut_ptr().cast(),
        dtype: ANNULUS_F32,
        dims: [1, 1, 64, 1],
        strides: [64, 64, 1, 1],
    };
    let (mut attention, mut plan) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: numbers may be 0 and pointers null
    let (mut options, mut args): (annulus_options, annulus_forward_args) =
        unsafe { std::mem::zeroed() };
    // SAFETY: all pointers are to locals
    unsafe {
        let size = size_of::<annulus_options>() as u64;
        assert_eq!(annulus_options_init(&raw mut options, size), 0);
        options.batch = 1;
        options.q_len = 64;
        options.kv_len = 64;
        options.q_heads = 1;
        options.kv_heads = 1;
        options.head_dim = 16;
        options.value_dim = 16;
        assert_eq!(annulus_attention_create(&raw const options, &raw mut attention), 0);
        assert_eq!(annulus_plan_create_threads(attention, 1, &raw mut plan), 0);
    }
    args.struct_size = size_of::<annulus_forward_args>() as u64;
    [args.q, args.k, args.v] = [&raw const input; 3];
    args.out = &raw const output;
    args.lse = &raw const statistics;
    let (by_c, c) = measure(|| {
        // SAFETY: the arrays outlive the call, and nobody touches them meanwhile
        assert_eq!(unsafe { annulus_forward(plan, &raw const args) }, 0);
    });
    assert_eq!(annulus_plan_destroy(plan), 0);
    assert_eq!(annulus_attention_destroy(attention), 0);
    assert_eq!(by_c, by_rust, "allocations of one call by C and by Rust");
    println!("1 x 64 x 1 x 16: {rust:?} by Rust, {c:?} by C, {by_rust} allocations");
    // a look-up, a dozen checks: a copy of a tensor or a lock that others hold would show
    assert!(c < rust + Duration::from_micros(50), "{c:?} by C, {rust:?} by Rust");
}
