//! Accuracy: the error against the f64 oracle, compared with the error of another computation.

use std::sync::Arc;

use annulus_core::{Backend, DType, Dims, Dropout, DropoutMask, Precision, Spec, mask};
use annulus_cpu::{Cpu, Isa};
use annulus_plan::Layout;
use ndarray::{Array2, Array4, ArrayView2, Zip, s};

use crate::support::{Case, Outcome, Random};

/// Returns the maximum distance between two tensors.
fn distance(a: &Array4<f64>, b: &Array4<f64>) -> f64 {
    Zip::from(a).and(b).fold(0.0, |most, a, b| {
        let distance = (a - b).abs();
        assert!(distance.is_finite());
        distance.max(most)
    })
}

/// out, dq, dk, dv.
type Four = [Array4<f64>; 4];

fn four(outcome: Outcome) -> Four {
    [outcome.out, outcome.dq, outcome.dk, outcome.dv]
}

fn distances(got: &Four, want: &Four) -> [f64; 4] {
    std::array::from_fn(|i| distance(&got[i], &want[i]))
}

/// Computes attention with every matrix rounded to one type. For one query head per KV head,
/// without bias and segments.
fn same_dtype_attention(case: &Case, dtype: DType) -> Four {
    let spec = &case.spec;
    let dims = spec.dims;
    let round = |array: Array2<f64>| array.mapv(|x| dtype.round(x));
    let mut all = [case.q.clone(), case.q.clone(), case.k.clone(), case.v.clone()];
    for (b, h) in (0..dims.batch).flat_map(|b| (0..dims.q_heads).map(move |h| (b, h))) {
        let of = |tensor: &Array4<f64>| tensor.slice(s![b, .., h, ..]).to_owned();
        let q = of(&case.q);
        let k = of(&case.k);
        let v = of(&case.v);
        let dout = of(&case.dout);
        let x = round(q.dot(&k.t()) * spec.scale);
        let tanh = spec.soft_cap.map(|cap| x.mapv(|x| (x / cap).tanh()));
        let scores = tanh.as_ref().map_or(x.clone(), |tanh| round(tanh * spec.soft_cap.unwrap()));
        let visible = |i: usize, j: usize| j <= i;
        let keep = keep_of(spec, b, h, scores.view());
        let probs = Array2::from_shape_fn(scores.dim(), |(i, j)| {
            let score = |j: usize| if visible(i, j) { scores[[i, j]] } else { f64::NEG_INFINITY };
            let most = (0..dims.kv_len).map(score).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = (0..dims.kv_len).map(|j| (score(j) - most).exp()).sum();
            dtype.round((score(j) - most).exp() / sum)
        });
        let kept = round(&probs * &keep);
        let out = round(kept.dot(&v));
        let dp = round(round(dout.dot(&v.t())) * &keep);
        let delta: Vec<f64> = (&out * &dout).rows().into_iter().map(|row| row.sum()).collect();
        let mut ds = Array2::from_shape_fn(dp.dim(), |(i, j)| {
            dtype.round(probs[[i, j]] * (dp[[i, j]] - delta[i]))
        });
        if let Some(tanh) = tanh {
            ds = round(ds * tanh.mapv(|tanh| 1.0 - tanh * tanh));
        }
        let ds = ds * spec.scale;
        let results = [out, round(ds.dot(&k)), round(ds.t().dot(&q)), round(kept.t().dot(&dout))];
        for (into, result) in all.iter_mut().zip(results) {
            into.slice_mut(s![b, .., h, ..]).assign(&result);
        }
    }
    all
}

/// Returns the dropout factors.
fn keep_of(spec: &Spec, batch: usize, head: usize, scores: ArrayView2<'_, f64>) -> Array2<f64> {
    let Some(mask) = spec.dropout.map(DropoutMask::new) else { return Array2::ones(scores.dim()) };
    Array2::from_shape_fn(scores.dim(), |(i, j)| {
        if mask.keep(batch, head, spec.dims.q_heads, i as u64, j as u64) {
            mask.keep_scale()
        } else {
            0.0
        }
    })
}

fn probs_dtype(cpu: &Cpu, spec: &Spec) -> Option<DType> {
    cpu.capabilities(spec).unwrap().probs_dtype
}

#[test]
fn rounded_probs_are_within_twice_the_error_of_plain_bf16() {
    let isas = [Isa::Avx512Bf16, Isa::Portable];
    for (number, isa) in (0..8)
        .flat_map(|number| isas.map(|isa| (number, isa)))
        .filter(|(_, isa)| isa.is_available())
    {
        let mut spec = Spec::new(Dims::new(1, 150, 2, 40), DType::Bf16);
        spec.mask = Arc::new(mask::Causal::default());
        // scores up to about 20, or 4
        spec.scale *= if number % 2 == 0 { 4.0 } else { 1.0 };
        spec.soft_cap = (number / 2 % 2 == 1).then_some(5.0);
        spec.dropout = (number / 4 == 1).then_some(Dropout { probability: 0.3, seed: 7 });
        let mut case = Case::new(spec, &mut Random(900 + number));
        case.dlse = None;
        let want = four(case.oracle());
        let got = four(
            case.run(&Cpu::new(1).unwrap().with_isa(isa).unwrap(), &Layout::Contiguous, 2).unwrap(),
        );
        let (ours, plain) =
            (distances(&got, &want), distances(&same_dtype_attention(&case, DType::Bf16), &want));
        for (ours, plain) in ours.into_iter().zip(plain) {
            assert!(ours <= 2.0 * plain, "case {number}, {isa}: {ours:e}, same dtype {plain:e}");
        }
    }
}

#[test]
fn every_instruction_set_is_about_as_accurate_as_the_portable_one() {
    for (number, dtype) in
        [DType::F32, DType::F32, DType::F64, DType::Bf16, DType::F16].into_iter().enumerate()
    {
        let mut spec = Spec::new(Dims::new(1, 200, 2, 64), dtype);
        spec.mask = Arc::new(mask::Causal::default());
        spec.soft_cap = (number == 1).then_some(5.0);
        let case = Case::new(spec, &mut Random(950 + number as u64));
        let want = four(case.oracle());
        let of = |isa| {
            let cpu = Cpu::new(1).unwrap().with_isa(isa).unwrap();
            distances(&four(case.run(&cpu, &Layout::Contiguous, 1).unwrap()), &want)
        };
        let portable = of(Isa::Portable);
        for isa in [Isa::Neon, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.is_available())
        {
            for (ours, portable) in of(isa).into_iter().zip(portable) {
                assert!(ours <= 1.5 * portable, "{dtype}, {isa}: {ours:e}, portable {portable:e}");
            }
        }
    }
}

#[test]
fn probs_are_rounded_only_where_the_spec_allows_it() {
    let spec = |dtype, precision| Spec { precision, ..Spec::new(Dims::new(1, 64, 1, 16), dtype) };
    let cpu = Cpu::new(1).unwrap();
    let free = std::env::var_os(Isa::VARIABLE).is_none();
    for (dtype, precision) in [
        (DType::Bf16, Precision::Highest),
        (DType::Bf16, Precision::High),
        (DType::F32, Precision::Default),
    ] {
        assert_eq!(cpu.isa_for(&spec(dtype, precision)), cpu.isa());
        assert!(!free || probs_dtype(&cpu, &spec(dtype, precision)).is_none());
    }
    let allowed = spec(DType::Bf16, Precision::Default);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let cpu = Cpu::new(1).unwrap().with_isa(isa).unwrap();
        assert_eq!(cpu.isa_for(&allowed), Ok(isa));
        assert_eq!(probs_dtype(&cpu, &allowed), (isa == Isa::Avx512Bf16).then_some(DType::Bf16));
        assert_eq!(probs_dtype(&cpu, &spec(DType::F16, Precision::Default)), None);
    }
    // the selected instruction set is the one that runs
    let chosen = cpu.isa_for(&allowed).unwrap();
    assert_eq!(probs_dtype(&cpu, &allowed).is_some(), chosen == Isa::Avx512Bf16);
    let run = |cpu: &Cpu| {
        Case::new(allowed.clone(), &mut Random(5)).run(cpu, &Layout::Contiguous, 1).unwrap().bits()
    };
    assert!(run(&cpu) == run(&Cpu::new(1).unwrap().with_isa(chosen).unwrap()));
    if Isa::Avx512Bf16.is_available() {
        let bits = |isa| run(&Cpu::new(1).unwrap().with_isa(isa).unwrap());
        assert!(bits(Isa::Avx512Bf16) != bits(Isa::Avx512));
    }
}

fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .map(|isa| Cpu::new(1).unwrap().with_isa(isa).unwrap())
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
