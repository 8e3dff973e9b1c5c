//! The forward pass on warpgroups, on an emulated GPU of compute capability 9.0: the suite, and mistakes that must be caught.

use annulus_conformance::suite;
use annulus_core::DType;

use crate::{common::wide, support::on_warpgroups};

#[test]
fn every_dim_holds_on_warpgroups() {
    for (dtype, dim, causal) in [
        (DType::Bf16, 64, true),
        (DType::F16, 64, false),
        (DType::Bf16, 128, true),
        (DType::F16, 128, false),
        (DType::Bf16, 256, true),
    ] {
        wide(&on_warpgroups(&["-DANNULUS_TRACE"]), dtype, dim, causal, false).unwrap_or_else(|wrong| panic!("{dtype} {dim}: {wrong}"));
    }
}

#[test]
fn random_cases_hold_on_warpgroups() {
    suite::random_cases(&on_warpgroups(&[]), 200..230).unwrap();
}
