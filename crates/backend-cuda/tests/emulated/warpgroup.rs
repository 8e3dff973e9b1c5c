//! The forward pass on warpgroups, on an emulated GPU of compute capability 9.0: the suite, and mistakes that must be caught.

use annulus_conformance::{Case, Draw, Judge, Masks, Setting, Subject, suite};
use annulus_core::{DType, Dims, Spec};

use crate::{common::wide, support::on_warpgroups};

#[test]
fn every_dim_holds_on_warpgroups() {
    for (dtype, dim, causal) in
        [(DType::Bf16, 64, true), (DType::F16, 64, false), (DType::Bf16, 128, true), (DType::F16, 128, false), (DType::Bf16, 256, true)]
    {
        wide(&on_warpgroups(0), dtype, dim, causal, false).unwrap_or_else(|wrong| panic!("{dtype} {dim}: {wrong}"));
    }
}

#[test]
fn random_cases_hold_on_warpgroups() {
    suite::random_cases(&on_warpgroups(0), 200..230).unwrap();
}

/// The mistakes that `kernels/warpgroup.cuh` numbers from 1 on, and what is seen of each: a launch that fails, or wrong numbers.
const MISTAKES: [(&str, bool); 15] = [
    ("a full stage is taken for an empty one", true),
    ("a stage is given back before it was read", false),
    ("a stage is not given back", true),
    ("values are used before they have come", true),
    ("a phase is told of too few bytes", true),
    ("products belong to no group", false),
    ("products are used while they are made", false),
    ("products begin while their registers may not be written yet", true),
    ("sums are scaled while products add to them", false),
    ("what was stored is not shown to the units", true),
    ("a wrong swizzle", false),
    ("the next sixteen dims are looked for too near", false),
    ("the next columns are looked for too near", false),
    ("a mask that is off by one", false),
    ("a turn that is never given", true),
];

/// What the judge says of a case with two panels of dims. Of many keys, so that stages are used again; or of few, so that one more is felt.
fn verdict(mistake: u32, few: bool) -> Result<(), String> {
    let (q_len, kv_len) = if few { (70, 70) } else { (120, 390) };
    let dims = Dims { batch: 1, q_len, kv_len, q_heads: 1, kv_heads: 1, head_dim: 72, value_dim: 80 };
    // some tiles are seen whole, the last in part
    let masks = Masks { causal: few, window: (!few).then_some([None, Some(300)]), ..Masks::default() };
    let case = Case::new("planted", Spec::new(dims, DType::F64), masks, &mut Draw::new(5)).in_dtype(DType::F16);
    let answers = on_warpgroups(mistake).run(&case, &Setting::ALONE, 1).map_err(|error| error.to_string())?;
    Judge::new(&case).map_err(|error| error.to_string())?.check(&answers[0])
}

#[test]
fn every_mistake_on_warpgroups_is_caught() {
    for few in [false, true] {
        verdict(0, few).unwrap();
    }
    for (number, (what, fails)) in (1..).zip(MISTAKES) {
        let verdict = verdict(number, what.contains("mask"));
        let sign = if fails { "CUDA_ERROR_LAUNCH_FAILED" } else { "out[" };
        assert!(verdict.as_ref().is_err_and(|wrong| wrong.contains(sign)), "{what}: {verdict:?}");
    }
}
