//! The oracle compared with golden answers, which were computed elsewhere.

use annulus_conformance::{Answer, golden};

#[test]
fn the_oracle_gives_every_golden_answer() {
    let Some(folder) = golden::folder().unwrap() else { return };
    let all = golden::read(&folder).unwrap();
    assert!(all.len() >= 100, "only {} cases", all.len());
    let mut failures = Vec::new();
    for golden in &all {
        assert!(golden.expected.len() >= 5, "{}", golden.case.name);
        let answer = Answer::of(golden.case.truth().unwrap(), golden.case.spec.normalize);
        if let Err(wrong) = golden::check(&answer, &golden.expected, &golden.tolerance_f64) {
            failures.push(format!("{}: {wrong}", golden.case.name));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
