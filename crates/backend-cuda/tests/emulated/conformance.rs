//! Conformance suite on the emulator, with blocks staged through host memory: random cases, a
//! sample of the feature matrix, all numeric rules.

use std::time::Duration;

use annulus_conformance::{
    Case, Setting,
    suite::{self, Poison, Scale},
};
use annulus_core::DType;
use annulus_plan::Layout;

use crate::{
    common::{hosted, verdicts, wide},
    support::{delayed, emulated, plain, plain_hosted},
};

verdicts! {
    random_cases_hold_on_the_emulated_device: suite::random_cases(&plain(), 0..40);
    a_sample_of_the_matrix_holds_on_the_emulated_device: suite::matrix(&plain(), Scale::OneIn(41));
    random_cases_hold_for_tensors_in_host_memory: suite::random_cases(&plain_hosted(), 100..120);
    key_lists_hold_on_the_emulated_device: suite::key_lists(&plain_hosted(), true, 400..424);
    awkward_sizes_hold_on_the_emulated_device: suite::sizes(&plain(), Scale::Full);
    messages_that_overtake_each_other_change_no_bit:
        suite::same_bits_under_delay(&plain(), &delayed(Duration::from_millis(1)), 3);
}

#[test]
fn the_numeric_rules_hold_on_the_emulated_device() {
    // every layout, but not all combinations, which would take minutes
    for (dtype, (ranks, layout)) in [
        (DType::F64, (1, Layout::Contiguous)),
        (DType::F32, (2, Layout::Zigzag)),
        // bf16 has the kernels of f16, and fewer numbers beyond its range
        (DType::F16, (2, Layout::Striped)),
    ] {
        suite::numeric_rules_on(&plain(), dtype, &Setting::new(ranks, layout)).unwrap();
    }
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_on_the_emulated_device() {
    // a ring an element type: all 13 settings would take the fibers many minutes
    for (dtype, setting) in [
        (DType::F64, Setting::new(2, Layout::Contiguous)),
        (DType::F32, Setting::new(3, Layout::Zigzag)),
        (DType::Bf16, Setting::new(2, Layout::Contiguous)),
        (DType::F16, Setting::new(2, Layout::Striped)),
    ] {
        suite::nonfinite_on(&plain(), Poison::NanAndInfinities, dtype, &[setting]).unwrap();
    }
}

#[test]
fn strategies_hold_for_tensors_in_host_memory() {
    suite::strategies(&plain_hosted(), 4..6).unwrap();
}

#[test]
fn ranks_may_share_a_gpu_and_its_stream() {
    let cuda = emulated().unwrap();
    let subject = hosted("one emulated gpu for all ranks", move || Ok(cuda.clone()));
    for ranks in [2, 3] {
        let case = Case::random(130 + ranks as u64);
        suite::answer(&subject, &case, &Setting::new(ranks, Layout::Zigzag)).unwrap();
    }
}

#[test]
fn wide_heads_hold_on_the_emulated_device() {
    // other tests cover dims of 32 and 64
    for (dtype, dim, causal, ragged) in [
        (DType::F32, 128, true, true),
        (DType::F64, 256, true, true),
        (DType::Bf16, 128, true, false),
        (DType::Bf16, 256, true, true),
        (DType::F16, 256, true, false),
    ] {
        wide(&plain(), dtype, dim, causal, ragged)
            .unwrap_or_else(|wrong| panic!("{dtype} {dim}: {wrong}"));
    }
}
