//! The oracle against answers that were computed elsewhere.

use annulus_conformance::golden;
use ndarray::{ArrayD, ArrayViewD, IxDyn};

/// The largest |got − want|; ∞ where a NaN or one-sided infinity stands.
fn distance(got: ArrayViewD<'_, f64>, want: &ArrayD<f64>) -> f64 {
    assert_eq!(got.shape(), want.shape());
    let apart = |(&got, &want): (&f64, &f64)| if got == want { 0.0 } else { (got - want).abs() };
    got.iter().zip(want).map(apart).fold(0.0, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
}

#[test]
fn the_oracle_gives_every_golden_answer() {
    let Some(folder) = golden::folder().unwrap() else { return };
    let all = golden::read(&folder).unwrap();
    assert!(all.len() >= 100, "only {} cases", all.len());
    let mut failures = Vec::new();
    for golden in &all {
        let truth = golden.case.truth().unwrap();
        assert!(golden.expected.len() >= 5, "{}", golden.case.name);
        for (name, want) in &golden.expected {
            let got = match name.as_str() {
                "out" => truth.forward.out.view().into_dyn(),
                "lse" => truth.forward.lse.view().into_dyn(),
                "dq" => truth.backward.dq.view().into_dyn(),
                "dk" => truth.backward.dk.view().into_dyn(),
                "dv" => truth.backward.dv.view().into_dyn(),
                "dbias" => truth.backward.dbias.as_ref().unwrap().view().into_dyn(),
                "dsoftmax_aux" => {
                    let dsinks = truth.backward.dsinks.as_ref().unwrap().view().into_dyn();
                    if want.ndim() == 1 { dsinks.into_shape_with_order(IxDyn(want.shape())).unwrap() } else { dsinks }
                }
                other => panic!("{other}"),
            };
            let (distance, tolerance) = (distance(got, want), golden.tolerance_f64[name]);
            if distance > tolerance {
                failures.push(format!("{} {name}: error {distance:e}, tolerance {tolerance:e}", golden.case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
