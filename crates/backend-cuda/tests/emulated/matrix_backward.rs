//! Backward on tensor cores with `mma.sync`: full and partial tiles in all parts of a kernel, score
//! options, large scores, numbers that are not finite, and the order of threads.
//!
//! dX beyond the range of f16: on tensor cores dX is rounded to the element type before the
//! products with K and Q.

use std::sync::Arc;

use annulus::{Attention, Backward, Dims, Element, LocalRing, Plan, Result, Tensors};
use annulus_comm::Staged;
use annulus_conformance::{Case, Draw, Judge, Masks, Setting, Subject};
use annulus_core::{Alibi, BackwardMode, DType, Dropout, HostViews, Spec};
use annulus_cuda::device::{CudaCopier, CudaSpace};
use annulus_plan::Layout;
use half::{bf16, f16};
use ndarray::{Array4, s};

use crate::support::{emulated, masked_rows_change_no_bit, plain, with_seed};

/// One batch row, heads 2 : 1, and several tiles of both sides, the last ones ragged.
fn dims(dim: usize) -> Dims {
    Dims { kv_len: 230, kv_heads: 1, value_dim: dim / 2 + 20, ..Dims::new(1, 300, 2, dim) }
}

fn case_of(spec: Spec, masks: Masks, dtype: DType) -> Case {
    Case::new("backward", spec, masks, &mut Draw::new(3)).in_dtype(dtype)
}

/// Checks the answers of `ranks` ranks.
fn check(case: &Case, ranks: usize) -> Result<(), String> {
    let setting = Setting::new(ranks, Layout::Zigzag);
    let answers = plain().run(case, &setting, 1).map_err(|error| error.to_string())?;
    let judge = Judge::new(case).map_err(|error| error.to_string())?;
    answers.iter().try_for_each(|answer| judge.check(answer))
}

#[test]
fn every_dim_type_and_backward_mode_holds() {
    for (dtype, dim, causal, backward, ranks) in [
        (DType::Bf16, 64, false, BackwardMode::OnePass, 1),
        (DType::F16, 64, true, BackwardMode::TwoPass, 2),
        (DType::F16, 128, false, BackwardMode::TwoPass, 2),
        (DType::Bf16, 128, true, BackwardMode::OnePass, 1),
        (DType::Bf16, 256, false, BackwardMode::TwoPass, 2),
        (DType::F16, 256, true, BackwardMode::OnePass, 1),
        // rows that cannot be copied 16 bytes at a time
        (DType::Bf16, 71, false, BackwardMode::OnePass, 1),
    ] {
        let spec = Spec { backward, ..Spec::new(dims(dim), DType::F64) };
        let case = case_of(spec, Masks { causal, ..Masks::default() }, dtype);
        check(&case, ranks).unwrap_or_else(|wrong| panic!("{dtype} {dim} {causal}: {wrong}"));
    }
}

#[test]
fn score_options_hold() {
    type Change = fn(&mut Spec);
    let changes: [(&str, Change); 4] = [
        ("soft cap", |spec| spec.soft_cap = Some(1.5)),
        ("alibi", |spec| spec.bias_function = Some(Arc::new(Alibi::published(2)))),
        ("bias", |spec| spec.bias = Some([1, 2, 300, 230])),
        ("dropout", |spec| spec.dropout = Some(Dropout { probability: 0.4, seed: 8 })),
    ];
    for (name, change) in changes {
        // two parts of a tile, in both kernels
        let mut spec = Spec::new(dims(72), DType::F64);
        change(&mut spec);
        let masks = Masks { window: Some([Some(170), Some(90)]), ..Masks::default() };
        check(&case_of(spec, masks, DType::Bf16), 1)
            .unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
    }
}

/// Scores whose lse is beyond the bound of fused exponents, in full tiles and in partial ones.
#[test]
fn large_scores_hold() {
    for causal in [false, true] {
        let spec = Spec { scale: 1.0, ..Spec::new(dims(64), DType::F64) };
        let mut case = case_of(spec, Masks { causal, ..Masks::default() }, DType::F64);
        // one dim adds the same 2048 to all scores, which leaves the probabilities as they are
        case.q.slice_mut(s![.., .., .., 0]).fill(32.0);
        case.k.slice_mut(s![.., .., .., 0]).fill(64.0);
        check(&case.in_dtype(DType::F16), 1).unwrap_or_else(|wrong| panic!("{causal}: {wrong}"));
    }
}

#[test]
fn masked_rows_that_are_not_finite_change_no_bit() {
    for (dtype, dim) in [(DType::F16, 64), (DType::F16, 128), (DType::F16, 256)] {
        masked_rows_change_no_bit(&plain(), dtype, [300, dim])
            .unwrap_or_else(|wrong| panic!("{dtype} {dim}: {wrong}"));
    }
}

/// Elements that are not finite in K, Q and dO reach only the gradients of pairs that are visible,
/// in parts of tiles in the middle of a pass.
#[test]
fn masked_non_finite_elements_change_nothing() {
    for dim in [64, 128, 256] {
        let masks = Masks { window: Some([Some(20), Some(20)]), ..Masks::default() };
        let dims = Dims { kv_len: 300, ..dims(dim) };
        let mut case = case_of(Spec::new(dims, DType::F64), masks, DType::Bf16);
        // of queries 180 … 220, and through them of keys 160 … 240
        case.k[[0, 200, 0, 3]] = f64::NAN;
        // keys 0 … 40 and 20 … 60
        case.q[[0, 20, 1, 5]] = f64::INFINITY;
        case.dout[[0, 40, 0, 7]] = f64::NAN;
        let answer = plain().run(&case, &Setting::ALONE, 1).unwrap().remove(0);
        let want = case.truth().unwrap().backward;
        for (what, got, want) in [
            ("dq", &answer.dq, &want.dq),
            ("dk", &answer.dk, &want.dk),
            ("dv", &answer.dv, &want.dv),
        ] {
            for ((index, got), want) in got.indexed_iter().zip(want) {
                assert_eq!(got.is_nan(), want.is_nan(), "{dim}: {what}{index:?}: {got} {want}");
                let near = want.is_nan() || (got - want).abs() < 0.02 + 0.02 * want.abs();
                assert!(near, "{dim}: {what}{index:?}: got {got}, want {want}");
            }
        }
        assert!(answer.dq[[0, 180, 0, 0]].is_nan() && answer.dq[[0, 179, 0, 0]].is_finite());
        assert!(answer.dk[[0, 60, 0, 0]].is_nan() && answer.dk[[0, 61, 0, 0]].is_finite());
        assert!(answer.dv[[0, 60, 0, 7]].is_nan() && answer.dv[[0, 61, 0, 7]].is_finite());
    }
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    let masks = Masks { causal: true, ..Masks::default() };
    let case = case_of(Spec::new(dims(128), DType::F64), masks, DType::F16);
    let run = |seed| with_seed(seed, || plain().run(&case, &Setting::ALONE, 1)).unwrap().remove(0);
    let want = run(31);
    for seed in 32..34 {
        run(seed).same_bits(&want).unwrap();
    }
}

const ROWS: usize = 24;
const DIM: usize = 32;

/// Computes gradients on the emulator and on the CPU, where dX stays f32. dX is small for the first
/// half of the queries and about 10⁵ for the second. Keys are small, so dQ of every row is within
/// f16.
fn gradients<T: Element>() -> Result<[Backward<T>; 2]> {
    let dims = Dims::new(1, ROWS, 1, DIM);
    let tensor = |scale: &dyn Fn(usize) -> f64, shift: usize| {
        Array4::from_shape_fn((1, ROWS, 1, DIM), |(_, i, _, x)| {
            T::from_f64(scale(i) * (((i * 7 + x * 3 + shift) % 11) as f64 / 5.0 - 1.0))
        })
    };
    let q = tensor(&|_| 1.0, 0);
    let k = tensor(&|_| 1e-3, 1);
    let v = tensor(&|_| 4.0, 2);
    // parallel to v, so that dout·v does not cancel
    let dout = Array4::from_shape_fn(v.dim(), |(_, i, _, x)| {
        T::from_f64(if i < ROWS / 2 { 1.0 } else { 3e4 } * v[[0, i % 5, 0, x]].to_f64() / 4.0)
    });
    let tensors = Tensors::new(q.view(), k.view(), v.view());
    let attention = Attention::new().dtype(T::DTYPE);
    let mut on_device = LocalRing::from_plans(&attention, dims, 1, |_, setup, endpoint| {
        let cuda = emulated()?;
        let copier = CudaCopier::new(cuda.stream().device())?;
        Plan::with_backend(
            setup,
            dims,
            cuda.on_host(),
            Staged::<_, HostViews<CudaSpace>>::new(endpoint, copier),
        )
    })?;
    let mut on_cpu = LocalRing::new(&attention, dims, 1)?;
    let forward = on_device.forward(&tensors)?;
    let want = on_cpu.forward(&tensors)?;
    Ok([
        on_device.backward(&tensors, &forward, dout.view(), None)?,
        on_cpu.backward(&tensors, &want, dout.view(), None)?,
    ])
}

/// True if the difference is within a few roundings of `largest`.
fn close(got: f64, want: f64, largest: f64, epsilon: f64) -> bool {
    (got - want).abs() <= 16.0 * epsilon * largest
}

/// For each row of dQ: all elements close; no element finite.
fn rows<T: Element>([got, want]: &[Backward<T>; 2], epsilon: f64) -> Vec<(bool, bool)> {
    let row = |i: usize| {
        let pairs: Vec<[f64; 2]> = (0..DIM)
            .map(|x| [got.dq[[0, i, 0, x]].to_f64(), want.dq[[0, i, 0, x]].to_f64()])
            .collect();
        let largest = pairs.iter().map(|[_, want]| want.abs()).fold(0.0, f64::max);
        assert!(largest > 0.0 && largest < 65504.0, "row {i}: {largest}");
        (
            pairs.iter().all(|&[got, want]| close(got, want, largest, epsilon)),
            pairs.iter().all(|[got, _]| !got.is_finite()),
        )
    };
    (0..ROWS).map(row).collect()
}

#[test]
fn results_beyond_f16_are_not_finite_instead_of_wrong() {
    let both = gradients::<f16>().unwrap();
    let rows = rows(&both, f64::powi(2.0, -11));
    assert!(rows[..ROWS / 2].iter().all(|&(close, _)| close), "{rows:?}");
    assert!(rows.iter().all(|&(close, lost)| close || lost), "{rows:?}");
    // the case does overflow
    assert!(rows.iter().any(|&(_, lost)| lost), "{rows:?}");
}

#[test]
fn bf16_holds_them_all() {
    let both = gradients::<bf16>().unwrap();
    let rows = rows(&both, f64::powi(2.0, -8));
    assert!(rows.iter().all(|&(close, _)| close), "{rows:?}");
}
