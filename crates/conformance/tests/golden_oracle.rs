//! The oracle compared with golden answers, which were computed elsewhere.

use annulus_conformance::{Answer, golden};
use annulus_core::DType;

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
