//! Empty rows, non-finite numbers, very large scores.

use std::sync::Arc;

use annulus_core::{BackwardMode, DType, Dims, Layout, Spec, mask};
use annulus_cpu::{Cpu, Isa};
use ndarray::{Array2, Axis, s};

use crate::support::{Case, Random};

fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .map(|isa| Cpu::new(1).unwrap().with_isa(isa).unwrap())
}

/// A case with padding rows on both sides, across several tiles and within one.
fn padded(seed: u64, dtype: DType) -> Case {
    let dims = Dims { q_len: 150, kv_len: 140, ..Dims::new(2, 0, 2, 9) };
    let mut spec = Spec::new(dims, dtype);
    spec.backward =
        if seed.is_multiple_of(2) { BackwardMode::OnePass } else { BackwardMode::TwoPass };
    spec.normalize = !seed.is_multiple_of(3);
    spec.soft_cap = (seed % 4 == 1).then_some(3.0);
    let mut case = Case::new(spec, &mut Random(seed));
    let ids = |len: usize| {
        Array2::from_shape_fn((2, len), |(b, i)| {
            if (60..75 + 20 * b).contains(&i) || i % 13 == 5 { -1 } else { (i / 50) as i32 }
        })
    };
    case.batch.q_segment_ids = Some(ids(150));
    case.batch.kv_segment_ids = Some(ids(140));
    case
}

#[test]
fn masked_rows_never_affect_results() {
    for seed in 0..12 {
        let clean = padded(seed, [DType::F32, DType::F64, DType::Bf16][seed as usize / 4]);
        for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut case = clean.clone();
            let q_ids = case.batch.q_segment_ids.clone().unwrap();
            let kv_ids = case.batch.kv_segment_ids.clone().unwrap();
            for ((b, i), _) in q_ids.indexed_iter().filter(|&(_, &id)| id < 0) {
                case.q.slice_mut(s![b, i, .., ..]).fill(poison);
                case.dout.slice_mut(s![b, i, .., ..]).fill(poison);
                case.dlse.iter_mut().for_each(|dlse| dlse.slice_mut(s![b, .., i]).fill(poison));
            }
            for ((b, j), _) in kv_ids.indexed_iter().filter(|&(_, &id)| id < 0) {
                case.k.slice_mut(s![b, j, .., ..]).fill(poison);
                case.v.slice_mut(s![b, j, .., ..]).fill(poison);
            }
            for cpu in cpus() {
                let got = case.run(&cpu, &Layout::Striped, 2).unwrap();
                let want = clean.run(&cpu, &Layout::Striped, 2).unwrap();
                got.assert_close(&want, 0.0, &format!("seed {seed} {poison} {:?}", cpu.isa()));
                for ((b, i), _) in q_ids.indexed_iter().filter(|&(_, &id)| id < 0) {
                    assert!(
                        got.out
                            .slice(s![b, i, .., ..])
                            .iter()
                            .chain(got.dq.slice(s![b, i, .., ..]))
                            .all(|&x| x == 0.0)
                    );
                    assert!(got.lse.slice(s![b, .., i]).iter().all(|&x| x == f64::NEG_INFINITY));
                }
                for ((b, j), _) in kv_ids.indexed_iter().filter(|&(_, &id)| id < 0) {
                    assert!(
                        got.dk
                            .slice(s![b, j, .., ..])
                            .iter()
                            .chain(got.dv.slice(s![b, j, .., ..]))
                            .all(|&x| x == 0.0)
                    );
                }
            }
        }
    }
}

#[test]
fn a_visible_nan_propagates_and_a_masked_one_does_not() {
    for (seed, dtype) in
        (0..12).map(|seed| (seed, DType::F32)).chain((12..20).map(|seed| (seed, DType::Bf16)))
    {
        let random = &mut Random(seed);
        let dims = Dims { q_heads: 4, ..Dims::new(1, 130, 2, 8) };
        let mut spec = Spec::new(dims, dtype);
        spec.mask = mask::and(
            Arc::new(mask::Causal::default()),
            Arc::new(mask::Window::new(Some(20 + 10 * (seed % 12)), None)),
        );
        spec.normalize = !seed.is_multiple_of(4);
        spec.bias = seed.is_multiple_of(3).then_some([1, 1, 130, 130]);
        let mut case = Case::new(spec, random);
        let row = random.below(130);
        let head = random.below(2);
        let tensor = [&mut case.q, &mut case.k, &mut case.v, &mut case.dout]
            .into_iter()
            .nth(seed as usize % 4)
            .unwrap();
        tensor[[0, row, head, 3]] = f64::NAN;
        let want = case.oracle();
        assert!(want.dq.iter().any(|x| x.is_nan()) && !want.dq.iter().all(|x| x.is_nan()));
        for cpu in cpus() {
            let got = case.run(&cpu, &Layout::Contiguous, 2).unwrap();
            // the maximum of a row with a visible NaN is unspecified
            let strip = |mut outcome: crate::support::Outcome| {
                let nan: Vec<bool> = outcome.lse.iter().map(|x| x.is_nan()).collect();
                let rows = outcome.max.iter_mut().zip(&nan);
                rows.filter(|(_, nan)| **nan).for_each(|(max, _)| *max = f64::NAN);
                outcome
            };
            let tolerance = if dtype == DType::F32 { 2e-5 } else { 3e-2 };
            strip(got).assert_close(
                &strip(want.clone()),
                tolerance,
                &format!("seed {seed} {:?}", cpu.isa()),
            );
        }
    }
}

#[test]
fn large_scores_neither_overflow_nor_vanish() {
    for dtype in [DType::F32, DType::F64] {
        let mut spec = Spec::new(Dims::new(1, 100, 2, 8), dtype);
        spec.scale = 2500.0;
        spec.mask = Arc::new(mask::Causal::default());
        let case = Case::new(spec, &mut Random(5));
        let want = case.oracle();
        assert!(want.lse.iter().any(|x| x.abs() > 1e4));
        for cpu in cpus() {
            let got = case.run(&cpu, &Layout::Zigzag, 3).unwrap();
            // a score of 1e4 has a precision of 1e-3 in f32
            let tolerance = if dtype == DType::F32 { 2e-2 } else { 1e-10 };
            got.assert_close(&want, tolerance, &format!("{dtype}"));
        }
    }
}

#[test]
fn narrow_scores_are_rounded_as_the_oracle_rounds_them() {
    for (dtype, narrow) in [
        (DType::F32, DType::Bf16),
        (DType::F32, DType::F16),
        (DType::F64, DType::F32),
        (DType::F64, DType::Bf16),
    ] {
        let mut spec = Spec::new(Dims::new(1, 70, 1, 16), dtype);
        spec.logits_dtype = narrow;
        // multiples of 1/16: products are exact in every order, so that rounding them has one
        // result
        let mut case = Case::new(spec, &mut Random(9));
        for tensor in [&mut case.q, &mut case.k] {
            tensor.mapv_inplace(|x| (x * 16.0).round() / 16.0);
        }
        let mut plain = case.clone();
        plain.spec.logits_dtype = dtype;
        assert!(narrow == DType::F32 || plain.oracle() != case.oracle());
        for cpu in cpus() {
            let got = case.run(&cpu, &Layout::Contiguous, 2).unwrap();
            got.assert_close(&case.oracle(), 2e-5, &format!("{dtype} {narrow}"));
        }
    }
}

#[test]
fn sinks_alone_fill_a_row() {
    let mut spec = Spec::new(Dims { q_len: 20, kv_len: 8, ..Dims::new(1, 0, 2, 4) }, DType::F64);
    // rows 0..12 precede the first key
    spec.alignment = annulus_core::Alignment::BottomRight;
    spec.mask = Arc::new(mask::Causal::default());
    spec.sinks = Some(annulus_core::SinkShape { per_head: false, count: 2 });
    for normalize in [true, false] {
        spec.normalize = normalize;
        let mut case = Case::new(spec.clone(), &mut Random(3));
        case.sinks = Some(ndarray::array![[0.5, -1.0]]);
        let got = case.run(&Cpu::new(1).unwrap(), &Layout::Contiguous, 2).unwrap();
        let lse = (0.5f64.exp() + (-1f64).exp()).ln();
        assert!(got.lse.index_axis(Axis(2), 4).iter().all(|x| (x - lse).abs() < 1e-12));
        assert!(got.out.index_axis(Axis(1), 4).iter().all(|&x| x == 0.0));
        got.assert_close(&case.oracle(), 1e-12, "sinks alone");
    }
}
