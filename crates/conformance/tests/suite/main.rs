//! Results of every backend, transport and strategy, and what is refused.
//!
//! This file has the facade, called as a user calls it: whole tensors in, whole tensors out. An
//! eighth of the matrix, 100 random cases, every strategy. And the oracle compared with golden
//! answers, which were computed elsewhere; `annulus check` computes them by the facade, on all
//! ranks and layouts.
//!
//! It also has the CPU backend over threads. In full: mask family × ranks × layout at tiny sizes
//! (dims, element types and other features at random, see `suite/matrix.rs`), the awkward sizes,
//! every numeric rule, every relation. Sampled: random configurations, and all instruction sets of
//! the machine.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bad_input;
mod bias_table;
mod key_lists;
mod mock;
mod reproducible;
mod reproducible_cache;
mod statistics;
mod strategies;

use std::time::Duration;

use annulus_conformance::{
    Answer, Facade, Setting, Subject, golden,
    subjects::{Mixed, cpu, cpu_delayed, cpu_with_isa},
    suite::{self, Poison, Scale},
};
use annulus_core::DType;
use annulus_cpu::Isa;
use annulus_plan::Layout;
use proptest::prelude::*;

#[test]
fn a_sample_of_everything_holds_through_the_facade() {
    suite::matrix(&Facade, Scale::OneIn(8)).unwrap();
    suite::random_cases(&Facade, 5000..5100).unwrap();
}

#[test]
fn some_random_cases_hold_under_every_strategy() {
    suite::strategies(&Facade, 0..20).unwrap();
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn random_cases_hold_under_every_strategy() {
    suite::strategies(&Facade, 20..60).unwrap();
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_through_the_facade() {
    let settings = [1, 2, 3, 4, 7].map(|ranks| Setting::new(ranks, Layout::Contiguous));
    suite::nonfinite_on(&Facade, Poison::NanAndInfinities, DType::F32, &settings).unwrap();
    suite::infinite_scores_on(&Facade, DType::F32, &settings).unwrap();
}

#[test]
fn the_facade_and_a_hand_made_ring_give_the_same_bits() {
    let ring = annulus_conformance::subjects::cpu();
    for seed in 0..40 {
        let case = annulus_conformance::Case::random(seed).in_dtype(DType::F32);
        let setting = Setting::new(3, Layout::Zigzag);
        let run = |subject: &dyn Subject| -> Answer {
            subject.run(&case, &setting, 1).unwrap().remove(0)
        };
        run(&Facade)
            .same_bits(&run(&ring))
            .unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
    }
}

#[test]
fn the_oracle_gives_every_golden_answer() {
    let Some(folder) = golden::folder().unwrap() else { return };
    let all = golden::read(&folder).unwrap();
    assert!(all.len() >= 100, "only {} cases", all.len());
    let mut failures = Vec::new();
    for golden in &all {
        let expected = golden.expected(DType::F64).unwrap();
        assert!(expected.names().count() >= 5, "{}", golden.case.name);
        let answer = Answer::of(golden.case.truth().unwrap(), golden.case.spec.normalize);
        if let Err(wrong) = expected.check(&answer) {
            failures.push(format!("{}: {wrong}", golden.case.name));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn the_whole_matrix_holds_on_the_cpu() {
    suite::matrix(&cpu(), Scale::Full).unwrap();
}

#[test]
fn every_pair_of_choices_holds_on_the_cpu() {
    suite::pairwise_cases(&cpu(), &[1, 2, 3, 4, 7]).unwrap();
}

#[test]
fn awkward_sizes_hold_on_the_cpu() {
    suite::sizes(&cpu(), Scale::Full).unwrap();
}

#[test]
fn the_numeric_rules_hold_on_the_cpu() {
    suite::numeric_rules(&cpu()).unwrap();
}

/// Strips have other widths in each instruction set, and so have partial strips.
#[test]
fn every_instruction_set_of_this_machine_holds() {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    for isa in isas.filter(|isa| !isa.multiplies_pairs()) {
        let subject = cpu_with_isa(isa);
        for &dtype in subject.dtypes() {
            suite::numeric_rules_on(&subject, dtype, &Setting::ALONE).unwrap();
        }
        suite::matrix(&subject, Scale::OneIn(23)).unwrap();
        suite::random_cases(&subject, 0..60).unwrap();
    }
}

/// Operands are multiplied as pairs of bf16, by vectors or by tiles.
#[test]
fn every_instruction_set_of_pairs_holds_for_bf16() {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.multiplies_pairs() && isa.is_available());
    for isa in isas {
        let subject = cpu_with_isa(isa);
        suite::numeric_rules_on(&subject, DType::Bf16, &Setting::ALONE).unwrap();
        suite::nonfinite_on(&subject, Poison::NanAndInfinities, DType::Bf16, &[Setting::ALONE])
            .unwrap();
    }
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_on_the_cpu() {
    suite::nonfinite(&cpu(), Poison::NanAndInfinities).unwrap();
    suite::infinite_scores(&cpu()).unwrap();
}

#[test]
fn rows_that_are_independent_have_the_same_bits_on_the_cpu() {
    suite::independent_rows(&cpu()).unwrap();
}

#[test]
fn bits_repeat_on_the_cpu() {
    suite::same_bits_over_repeats(&cpu(), 100).unwrap();
}

#[test]
fn receives_further_ahead_change_no_bit() {
    suite::same_bits_received_ahead(&cpu()).unwrap();
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn messages_that_overtake_each_other_change_no_bit_on_the_cpu() {
    suite::same_bits_under_delay(&cpu(), &cpu_delayed(Duration::from_micros(500)), 100).unwrap();
}

#[test]
fn known_random_cases_hold_on_the_cpu() {
    suite::random_cases(&cpu(), (0..400).chain([854_477_961_711_389_023])).unwrap();
}

#[test]
fn different_backends_share_a_ring() {
    suite::random_cases(&Mixed, 2000..2100).unwrap();
    suite::matrix(&Mixed, Scale::OneIn(17)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A failing seed is to be added to `known_random_cases_hold_on_the_cpu`.
    #[test]
    fn any_random_case_holds_on_the_cpu(seed in any::<u64>()) {
        prop_assert_eq!(suite::random_cases(&cpu(), std::iter::once(seed)), Ok(()));
    }
}
