//! The facade, called as a user calls it: whole tensors in, whole tensors out. An eighth of the
//! matrix, 100 random cases, every strategy. And the oracle compared with golden answers, which
//! were computed elsewhere; `annulus check` computes them by the facade, on all ranks and layouts.

use annulus_conformance::{
    Answer, Facade, Setting, Subject, golden,
    suite::{self, Poison, Scale},
};
use annulus_core::DType;
use annulus_plan::Layout;

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
    suite::strategies(&Facade, 20..120).unwrap();
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
