//! The facade, called as a user calls it: whole tensors in, whole tensors out. Every golden case
//! over 1, 3 and 7 ranks in f32 and f64 (the command `annulus check` runs all ranks and layouts),
//! an eighth of the matrix, 100 random cases.

use annulus_conformance::{
    Answer, Facade, Setting, Subject, golden, suite,
    suite::{Poison, Scale},
};
use annulus_core::{DType, Layout};

#[test]
fn a_sample_of_everything_holds_through_the_facade() {
    suite::matrix(&Facade, Scale::OneIn(8)).unwrap();
    suite::random_cases(&Facade, 5000..5100).unwrap();
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn random_cases_hold_under_every_strategy() {
    suite::strategies(&Facade, 0..120).unwrap();
}

#[test]
#[ignore = "long: scripts/test --whole"]
fn a_sample_of_golden_cases_holds_under_every_strategy() {
    let Some(folder) = golden::folder().unwrap() else { return };
    for (number, golden) in golden::read(&folder).unwrap().into_iter().enumerate() {
        let case = golden.case.in_dtype(DType::F32);
        let expected = golden.expected(DType::F32).unwrap();
        let ranks = [2, 4, 8][number % 3];
        for setting in suite::strategy_settings(&case, ranks, number) {
            let answers = Facade
                .run(&case, &setting, 2)
                .unwrap_or_else(|error| panic!("{} on {setting}: {error}", case.name));
            for answer in &answers {
                expected
                    .check(answer)
                    .unwrap_or_else(|wrong| panic!("{} on {setting}: {wrong}", case.name));
            }
        }
    }
}

#[test]
fn a_visible_nan_does_not_depend_on_the_ranks_through_the_facade() {
    let settings = [1, 2, 3, 4, 7].map(|ranks| Setting::new(ranks, Layout::Contiguous));
    suite::nonfinite_on(&Facade, Poison::NanAndInfinities, DType::F32, &settings).unwrap();
    suite::infinite_scores_on(&Facade, DType::F32, &settings).unwrap();
}

#[test]
fn every_golden_case_holds_through_the_facade() {
    let Some(folder) = golden::folder().unwrap() else { return };
    let settings =
        [Setting::ALONE, Setting::new(3, Layout::Striped), Setting::new(7, Layout::Zigzag)];
    for golden in golden::read(&folder).unwrap() {
        for dtype in [DType::F32, DType::F64] {
            let case = golden.case.in_dtype(dtype);
            let expected = golden.expected(dtype).unwrap();
            for setting in &settings {
                let answers = Facade
                    .run(&case, setting, 1)
                    .unwrap_or_else(|error| panic!("{} on {setting}: {error}", case.name));
                expected
                    .check(&answers[0])
                    .unwrap_or_else(|wrong| panic!("{} on {setting}: {wrong}", case.name));
            }
        }
    }
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
