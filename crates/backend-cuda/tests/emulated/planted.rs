//! Mutation tests of the kernels: a macro compiles one mistake in, and a case that is correct
//! without it must fail.

use std::time::Duration;

use annulus_conformance::{Case, Draw, Judge, Masks, Setting, Subject};
use annulus_core::{DType, Dims, Spec};
use annulus_cuda_emulator as emulator;

use crate::{
    common::staged,
    support::{emulated_on, next_device, subject, with_seed},
};

/// A causal case of several tiles, with more than one slice of dims and rows that can be copied 16
/// bytes at a time.
fn case(dtype: DType) -> Case {
    case_of_dims(dtype, [40, 48])
}

fn case_of_dims(dtype: DType, [head_dim, value_dim]: [usize; 2]) -> Case {
    let dims =
        Dims { batch: 1, q_len: 70, kv_len: 70, q_heads: 2, kv_heads: 1, head_dim, value_dim };
    let masks = Masks { causal: true, ..Masks::default() };
    Case::new("planted", Spec::new(dims, DType::F64), masks, &mut Draw::new(5)).in_dtype(dtype)
}

/// Verdict on the case with kernels compiled with these options.
fn verdict(dtype: DType, options: &'static [&'static str]) -> Result<(), String> {
    verdict_on(&case(dtype), options)
}

fn verdict_on(case: &Case, options: &'static [&'static str]) -> Result<(), String> {
    let answers = subject(options, Duration::ZERO)
        .run(case, &Setting::ALONE, 1)
        .map_err(|error| error.to_string())?;
    Judge::new(case).map_err(|error| error.to_string())?.check(&answers[0])
}

/// Orders of threads in which a mistake may show.
const ORDERS: u64 = 16;

/// True if the case fails in `array` in some order of threads: mistakes that are races do not fail
/// in every one.
fn is_caught(case: &Case, options: &'static [&'static str], array: &str) -> bool {
    (0..ORDERS).any(|seed| {
        let verdict = with_seed(seed, || verdict_on(case, options));
        verdict.is_err_and(|wrong| wrong.contains(array))
    })
}

/// f64 runs at level `plain`, f16 on tensor cores.
const DTYPES: [DType; 2] = [DType::F64, DType::F16];

#[test]
fn without_a_mistake_the_case_passes() {
    for dtype in DTYPES {
        verdict(dtype, &[]).unwrap();
    }
}

#[test]
fn a_barrier_that_was_removed_is_caught() {
    for dtype in DTYPES {
        // the forward pass already fails; for f16 it is a different kernel
        assert!(is_caught(&case(dtype), &["-DPLANTED_NO_BARRIER"], "out["), "{dtype}");
    }
}

#[test]
fn a_wait_one_stage_late_is_caught() {
    for dtype in DTYPES {
        assert!(is_caught(&case(dtype), &["-DPLANTED_LATE_WAIT"], "out["), "{dtype}");
    }
}

#[test]
fn queries_that_belong_to_a_later_group_of_copies_are_caught() {
    assert!(is_caught(&case(DType::F16), &["-DPLANTED_LATE_QUERIES"], "out["));
}

/// Above 64 dims the forward kernel on tensor cores has two stages instead of four; at 128 dims it
/// computes a tile in two parts, at 256 dims 16 rows a warp.
#[test]
fn mistakes_with_two_stages_are_caught() {
    let mistakes: [&[&str]; 3] =
        [&["-DPLANTED_NO_BARRIER=1"], &["-DPLANTED_LATE_WAIT=1"], &["-DPLANTED_LATE_QUERIES"]];
    for dims in [[104, 120], [136, 200]] {
        let case = case_of_dims(DType::F16, dims);
        verdict_on(&case, &[]).unwrap();
        for mistake in mistakes {
            assert!(is_caught(&case, mistake, "out["), "{dims:?} {mistake:?}");
        }
    }
}

/// A range of keys has a kernel of its own above 64 dims, with four stages.
#[test]
fn mistakes_in_a_range_of_keys_are_caught() {
    let mistakes: [&[&str]; 3] =
        [&["-DPLANTED_NO_BARRIER=1"], &["-DPLANTED_LATE_WAIT=1"], &["-DPLANTED_LATE_QUERIES"]];
    for [head_dim, value_dim] in [[104, 120], [136, 200]] {
        let dims =
            Dims { batch: 1, q_len: 2, kv_len: 523, q_heads: 4, kv_heads: 1, head_dim, value_dim };
        let case =
            Case::new("range", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(5))
                .in_dtype(DType::F16);
        verdict_on(&case, &[]).unwrap();
        for mistake in mistakes {
            assert!(is_caught(&case, mistake, "out["), "{head_dim} {mistake:?}");
        }
    }
}

#[test]
fn a_mask_that_is_off_by_one_is_caught() {
    for dtype in DTYPES {
        assert!(is_caught(&case(dtype), &["-DPLANTED_MASK_OFF_BY_ONE"], "out["), "{dtype}");
    }
}

// Passes as numbered in `kernels/chunk_stream.cuh`: 2 computes dQ, 3 computes dK and dV.

/// As [`is_caught`] in a gradient, which implies a correct output.
fn caught_in_backward(options: &'static [&'static str], gradient: &str) -> bool {
    is_caught(&case(DType::Bf16), options, gradient)
}

#[test]
fn a_barrier_that_was_removed_from_a_backward_pass_is_caught() {
    assert!(caught_in_backward(&["-DPLANTED_NO_BARRIER=2"], "dq["));
    assert!(caught_in_backward(&["-DPLANTED_NO_BARRIER=3"], "dk["));
}

#[test]
fn a_wait_one_stage_late_in_a_backward_pass_is_caught() {
    assert!(caught_in_backward(&["-DPLANTED_LATE_WAIT=2"], "dq["));
    assert!(caught_in_backward(&["-DPLANTED_LATE_WAIT=3"], "dk["));
}

#[test]
fn left_rows_that_belong_to_a_later_group_of_copies_are_caught() {
    assert!(caught_in_backward(&["-DPLANTED_LATE_LEFT_ROWS=2"], "dq["));
    assert!(caught_in_backward(&["-DPLANTED_LATE_LEFT_ROWS=3"], "dk["));
}

/// The warps of dV pass S to those of dK through shared memory, and all read the statistics of the
/// tile's queries there.
#[test]
fn scores_and_statistics_that_are_not_ordered_by_barriers_are_caught() {
    assert!(caught_in_backward(&["-DPLANTED_NO_EXCHANGE_BARRIER"], "dk["));
    assert!(caught_in_backward(&["-DPLANTED_EARLY_STATISTICS"], "dk["));
}

#[test]
fn a_mask_that_is_off_by_one_in_a_backward_pass_is_caught() {
    assert!(caught_in_backward(&["-DPLANTED_BACKWARD_MASK_OFF_BY_ONE=2"], "dq["));
    assert!(caught_in_backward(&["-DPLANTED_BACKWARD_MASK_OFF_BY_ONE=3"], "dk["));
}

#[test]
fn a_barrier_that_only_some_threads_reach_is_a_deadlock_not_a_hang() {
    let ordinal = next_device();
    let make = move || emulated_on(ordinal, &["-DPLANTED_SPLIT_BARRIER"]);
    let subject = staged("one emulated gpu", Duration::ZERO, make);
    let failed = subject.run(&case(DType::F64), &Setting::ALONE, 1).map(drop).unwrap_err();
    assert!(failed.to_string().contains("CUDA_ERROR_LAUNCH_FAILED"), "{failed}");
    assert_eq!(emulator::deadlocks(ordinal), 1);
}
