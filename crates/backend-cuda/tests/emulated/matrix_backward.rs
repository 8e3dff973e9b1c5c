//! Backward on tensor cores with `mma.sync`: full and partial tiles in all parts of a kernel, score
//! options, large scores, numbers that are not finite, and the order of threads.
//!
//! dX beyond the range of f16: on tensor cores dX is rounded to the element type before the
//! products with K and Q.

use annulus_conformance::{Case, Draw, Masks, Setting, Subject, suite};
use annulus_core::{BackwardMode, DType, Dims, Spec};
use annulus_plan::Layout;
use ndarray::{Array4, Axis, s};

use crate::support::{SCORE_OPTIONS, masked_rows_change_no_bit, orders_change_no_bit, plain};

/// One batch row, heads 2 : 1, and several tiles of both sides, the last ones ragged.
pub(crate) fn dims(dim: usize) -> Dims {
    Dims { kv_len: 230, kv_heads: 1, value_dim: dim / 2 + 20, ..Dims::new(1, 300, 2, dim) }
}

fn case_of(spec: Spec, masks: Masks, dtype: DType) -> Case {
    Case::new("backward", spec, masks, &mut Draw::new(3)).in_dtype(dtype)
}

/// Checks passes of an element type, dims, perhaps causal, and a mode on a number of ranks.
pub(crate) fn passes_hold(
    subject: &dyn Subject,
    dims: fn(usize) -> Dims,
    passes: &[(DType, usize, bool, BackwardMode, usize)],
) {
    for &(dtype, dim, causal, backward, ranks) in passes {
        let spec = Spec { backward, ..Spec::new(dims(dim), DType::F64) };
        let case = case_of(spec, Masks { causal, ..Masks::default() }, dtype);
        suite::answer(subject, &case, &Setting::new(ranks, Layout::Zigzag))
            .unwrap_or_else(|wrong| panic!("{dtype} {dim} {causal}: {wrong}"));
    }
}

#[test]
fn every_dim_type_and_backward_mode_holds() {
    let passes = [
        (DType::Bf16, 64, false, BackwardMode::OnePass, 1),
        (DType::F16, 64, true, BackwardMode::TwoPass, 2),
        (DType::F16, 128, false, BackwardMode::TwoPass, 2),
        (DType::Bf16, 128, true, BackwardMode::OnePass, 1),
        (DType::Bf16, 256, false, BackwardMode::TwoPass, 2),
        (DType::F16, 256, true, BackwardMode::OnePass, 1),
        // rows that cannot be copied 16 bytes at a time
        (DType::Bf16, 71, false, BackwardMode::OnePass, 1),
    ];
    passes_hold(&plain(), dims, &passes);
}

#[test]
fn score_options_hold() {
    for (name, change) in &SCORE_OPTIONS[..4] {
        // two parts of a tile, in both kernels
        let mut spec = Spec::new(dims(72), DType::F64);
        change(&mut spec);
        let masks = Masks { window: Some([Some(170), Some(90)]), ..Masks::default() };
        suite::answer(&plain(), &case_of(spec, masks, DType::Bf16), &Setting::ALONE)
            .unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
    }
}

/// Scores whose lse is beyond the bound of fused exponents, in full tiles or also in partial ones.
pub(crate) fn large_scores(dims: Dims, causal: bool) -> Case {
    let spec = Spec { scale: 1.0, ..Spec::new(dims, DType::F64) };
    let mut case = case_of(spec, Masks { causal, ..Masks::default() }, DType::F64);
    // one dim adds the same 2048 to all scores, which leaves the probabilities as they are
    case.q.slice_mut(s![.., .., .., 0]).fill(32.0);
    case.k.slice_mut(s![.., .., .., 0]).fill(64.0);
    case.in_dtype(DType::F16)
}

#[test]
fn large_scores_hold() {
    for causal in [false, true] {
        suite::answer(&plain(), &large_scores(dims(64), causal), &Setting::ALONE).unwrap();
    }
}

#[test]
fn masked_rows_that_are_not_finite_change_no_bit() {
    for dim in [64, 128, 256] {
        masked_rows_change_no_bit(&plain(), DType::F16, [300, dim]).unwrap();
    }
}

/// Requires that elements that are not finite in K, Q and dO reach only the gradients of pairs that
/// are visible, in parts of tiles in the middle of a pass over 300 queries and keys.
pub(crate) fn non_finite_elements_reach_visible_pairs(subject: &dyn Subject, spec: Spec) {
    let name = format!("{:?}, {:?}", spec.dims, spec.soft_cap);
    let masks = Masks { window: Some([Some(20), Some(20)]), ..Masks::default() };
    let mut case = case_of(spec, masks, DType::Bf16);
    // of queries 180 … 220, and through them of keys 160 … 240
    case.k[[0, 200, 0, 3]] = f64::NAN;
    // keys 0 … 40 and 20 … 60
    case.q[[0, 20, 1, 5]] = f64::INFINITY;
    case.dout[[0, 40, 0, 7]] = f64::NAN;
    let answer = suite::run(subject, &case, &Setting::ALONE).expect("an answer");
    let want = case.truth().expect("a truth").backward;
    for (what, got, want) in
        [("dq", &answer.dq, &want.dq), ("dk", &answer.dk, &want.dk), ("dv", &answer.dv, &want.dv)]
    {
        for ((index, got), want) in got.indexed_iter().zip(want) {
            assert_eq!(got.is_nan(), want.is_nan(), "{name}: {what}{index:?}: {got} {want}");
            let near = want.is_nan() || (got - want).abs() < 0.02 + 0.02 * want.abs();
            assert!(near, "{name}: {what}{index:?}: got {got}, want {want}");
        }
    }
    assert!(answer.dq[[0, 180, 0, 0]].is_nan() && answer.dq[[0, 179, 0, 0]].is_finite());
    assert!(answer.dk[[0, 60, 0, 0]].is_nan() && answer.dk[[0, 61, 0, 0]].is_finite());
    assert!(answer.dv[[0, 60, 0, 7]].is_nan() && answer.dv[[0, 61, 0, 7]].is_finite());
}

#[test]
fn masked_non_finite_elements_change_nothing() {
    for dim in [64, 128, 256] {
        let spec = Spec::new(Dims { kv_len: 300, ..dims(dim) }, DType::F64);
        non_finite_elements_reach_visible_pairs(&plain(), spec);
    }
}

#[test]
fn the_order_of_threads_changes_no_bit() {
    let masks = Masks { causal: true, ..Masks::default() };
    let case = case_of(Spec::new(dims(128), DType::F64), masks, DType::F16);
    orders_change_no_bit(plain, &case, 31..34);
}

const ROWS: usize = 24;

/// For each row of dQ: all elements within a few roundings of the largest; no element finite. dX is
/// small for the first half of the queries and about 10⁵ for the second. Keys are small, so dQ of
/// every row is within f16.
fn rows_of_dq(dtype: DType, epsilon: f64) -> Vec<(bool, bool)> {
    let dims = Dims::new(1, ROWS, 1, 32);
    let numbers = |scale: f64, shift: usize| {
        Array4::from_shape_fn((1, ROWS, 1, 32), |(_, i, _, x)| {
            scale * (((i * 7 + x * 3 + shift) % 11) as f64 / 5.0 - 1.0)
        })
    };
    let mut case = case_of(Spec::new(dims, DType::F64), Masks::default(), DType::F64);
    (case.q, case.k, case.v) = (numbers(1.0, 0), numbers(1e-3, 1), numbers(4.0, 2));
    // parallel to v, so that dout·v does not cancel
    case.dout = Array4::from_shape_fn((1, ROWS, 1, 32), |(_, i, _, x)| {
        let scale = if i < ROWS / 2 { 1.0 } else { 3e4 };
        scale * case.v[[0, i % 5, 0, x]] / 4.0
    });
    let case = case.in_dtype(dtype);
    let got = suite::run(&plain(), &case, &Setting::ALONE).expect("an answer").dq;
    let want = case.truth().expect("a truth").backward.dq;
    let row = |row: usize| {
        let [got, want] = [&got, &want].map(|dq| dq.index_axis(Axis(1), row));
        let largest = want.fold(0.0, |largest: f64, x| largest.max(x.abs()));
        assert!(largest > 0.0 && largest < 65504.0, "row {row}: {largest}");
        let close = |(got, want): (&f64, &f64)| (got - want).abs() <= 16.0 * epsilon * largest;
        (got.iter().zip(want).all(close), got.iter().all(|x| !x.is_finite()))
    };
    (0..ROWS).map(row).collect()
}

#[test]
fn results_beyond_f16_are_not_finite_instead_of_wrong_and_bf16_holds_them_all() {
    let rows = rows_of_dq(DType::F16, f64::powi(2.0, -11));
    assert!(rows[..ROWS / 2].iter().all(|&(close, _)| close), "{rows:?}");
    assert!(rows.iter().all(|&(close, lost)| close || lost), "{rows:?}");
    // the case does overflow
    assert!(rows.iter().any(|&(_, lost)| lost), "{rows:?}");
    let rows = rows_of_dq(DType::Bf16, f64::powi(2.0, -8));
    assert!(rows.iter().all(|&(close, _)| close), "{rows:?}");
}
