//! Random combinations of features, forward and backward, over rings of several ranks.

use annulus_core::{DType, Layout};
use annulus_cpu::{Cpu, Isa};

use crate::support::Case;

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F32 => 2e-5,
        DType::F16 => 4e-3,
        DType::Bf16 => 3e-2,
    }
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// True if the case runs on several ranks: with two passes, mask and bias rows of received
/// queries are not available.
fn crosses_ranks(case: &Case) -> bool {
    case.spec.backward == annulus_core::BackwardMode::OnePass
        || case.batch.attention_mask.is_none() && case.spec.bias.is_none_or(|shape| shape[2] == 1)
}

fn any_features(dtype: DType, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let case = Case::any(seed, dtype);
        let want = case.oracle();
        let layout =
            [Layout::Contiguous, Layout::Zigzag, Layout::Striped][seed as usize % 3].clone();
        let ranks = if crosses_ranks(&case) { 1 + seed as usize % 4 } else { 1 };
        for isa in isas() {
            let cpu = Cpu::new(1 + seed as usize % 2).unwrap().with_isa(isa).unwrap();
            let got = case.run(&cpu, &layout, ranks).unwrap();
            got.assert_close(
                &want,
                tolerance(dtype),
                &format!("seed {seed} {isa} {ranks} ranks {:?}", case.spec),
            );
        }
    }
}

#[test]
fn any_features_in_f64() {
    any_features(DType::F64, 0..60);
}

#[test]
fn any_features_in_f32() {
    any_features(DType::F32, 100..200);
}

#[test]
fn any_features_in_bf16() {
    any_features(DType::Bf16, 200..230);
}

#[test]
fn any_features_in_f16() {
    any_features(DType::F16, 300..330);
}
