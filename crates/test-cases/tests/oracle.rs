//! The oracle: small problems with results computed by hand. Golden cases, computed elsewhere, have
//! every gradient (`crates/conformance/tests/suite/main.rs`).

#![allow(clippy::unwrap_used, reason = "a test")]

use annulus_core::{
    DType, Dims, Error, SinkShape, Spec,
    oracle::{Backward, Forward, forward_rows},
};
use annulus_test_cases::{Case, Draw, Masks};
use ndarray::{Array3, Array4, Axis, array, s};

/// Returns a case in f64 without features.
fn plain(dims: Dims) -> Case {
    Case::new("plain", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(1))
}

fn causal() -> Masks {
    Masks { causal: true, ..Masks::default() }
}

fn forward(case: &Case) -> Forward {
    case.truth().unwrap().forward
}

fn gradients(case: &Case) -> Backward {
    case.truth().unwrap().backward
}

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-12 * (1.0 + a.abs().max(b.abs()))
}

#[test]
fn two_keys_by_hand() {
    let mut case = plain(Dims::new(1, 2, 1, 1));
    case.spec.scale = 2.0;
    case = case.masked(causal());
    case.q = array![[[[1.0]], [[3.0]]]];
    case.k = array![[[[0.5]], [[-1.0]]]];
    case.v = array![[[[10.0]], [[20.0]]]];
    let Forward { out, lse, max, sum, ties, .. } = forward(&case);
    // query 0 attends to key 0 alone, with score 1; query 1 has the scores 3 and −6
    let (a, b) = (3f64.exp(), (-6f64).exp());
    assert_eq!(
        [out[[0, 0, 0, 0]], lse[[0, 0, 0]], max[[0, 0, 0]], sum[[0, 0, 0]], ties[[0, 0, 0]]],
        [10.0, 1.0, 1.0, 1.0, 1.0]
    );
    assert!(close(out[[0, 1, 0, 0]], (10.0 * a + 20.0 * b) / (a + b)));
    assert!(close(lse[[0, 0, 1]], (a + b).ln()));
    assert_eq!(max[[0, 0, 1]], 3.0);
}

#[test]
fn equal_largest_scores_share_the_gradient_of_the_maximum() {
    // three keys and one sink, all with the score 0
    let mut case = plain(Dims { q_len: 1, kv_len: 3, ..Dims::new(1, 1, 1, 1) });
    case.spec.normalize = false;
    case.spec.bias = Some([1, 1, 1, 3]);
    case.spec.sinks = Some(SinkShape { per_head: true, count: 1 });
    case.q.fill(0.0);
    case.v = array![[[[1.0]], [[2.0]], [[4.0]]]];
    case.bias = Some(Array4::zeros((1, 1, 1, 3)));
    case.sinks = Some(array![[0.0]]);
    case.dout.fill(1.0);
    assert_eq!(forward(&case).ties[[0, 0, 0]], 4.0);
    let Backward { dbias, dsinks, dv, .. } = gradients(&case);
    // out = 7: ds = value − 7/4 for a key, −7/4 for the sink
    assert_eq!(dbias.unwrap().into_raw_vec_and_offset().0, [1.0 - 1.75, 2.0 - 1.75, 4.0 - 1.75]);
    assert_eq!(dsinks.unwrap()[[0, 0]], -1.75);
    assert!(dv.iter().all(|&x| x == 1.0));
}

#[test]
fn non_finite_keys_affect_only_the_queries_that_attend_to_them() {
    for poison in [f64::NAN, f64::INFINITY] {
        let mut case = plain(Dims::new(1, 4, 1, 2));
        case = case.masked(Masks { window: Some([Some(1), None]), ..causal() });
        let clean = forward(&case);
        let clean_gradients = gradients(&case);
        // only queries 2 and 3 attend to key 2
        case.k[[0, 2, 0, 0]] = poison;
        case.v[[0, 2, 0, 1]] = poison;
        let poisoned = forward(&case);
        let of_poisoned = gradients(&case);
        for i in [0, 1] {
            assert_eq!(poisoned.out.index_axis(Axis(1), i), clean.out.index_axis(Axis(1), i));
            assert_eq!(poisoned.lse[[0, 0, i]], clean.lse[[0, 0, i]]);
            assert_eq!(
                of_poisoned.dq.index_axis(Axis(1), i),
                clean_gradients.dq.index_axis(Axis(1), i)
            );
        }
        for i in [2, 3] {
            assert!(poisoned.out.index_axis(Axis(1), i).iter().any(|x| x.is_nan() || *x == poison));
            assert!(of_poisoned.dq.index_axis(Axis(1), i).iter().all(|x| x.is_nan()));
        }
        assert_eq!(
            of_poisoned.dk.index_axis(Axis(1), 0),
            clean_gradients.dk.index_axis(Axis(1), 0)
        );
    }
}

#[test]
fn scores_are_rounded_and_rounding_has_slope_one() {
    let dims = Dims { q_heads: 2, ..Dims::new(1, 4, 1, 3) };
    let mut rounded = plain(dims);
    rounded.spec.logits_dtype = DType::Bf16;
    // the same scores without rounding, with a bias equal to the rounding error
    let mut shifted = rounded.clone();
    shifted.spec.logits_dtype = DType::F64;
    shifted.spec.bias = Some([1, 2, 4, 4]);
    shifted.bias = Some(Array4::from_shape_fn((1, 2, 4, 4), |(b, h, i, j)| {
        let dot: f64 = (0..3).map(|x| rounded.q[[b, i, h, x]] * rounded.k[[b, j, 0, x]]).sum();
        rounded.spec.scale * (DType::Bf16.round(dot) - dot)
    }));
    let (got, want) = (forward(&rounded), forward(&shifted));
    assert!(got.out.iter().zip(&want.out).all(|(&a, &b)| close(a, b)));
    let (got, want) = (gradients(&rounded), gradients(&shifted));
    for (got, want) in [(got.dq, want.dq), (got.dk, want.dk), (got.dv, want.dv)] {
        assert!(got.iter().zip(&want).all(|(&a, &b)| close(a, b)));
    }
    let exact =
        Case { spec: Spec { logits_dtype: DType::F64, ..rounded.spec.clone() }, ..rounded.clone() };
    assert!(
        forward(&exact).out.iter().zip(&forward(&rounded).out).any(|(a, b)| (a - b).abs() > 1e-5)
    );
}

#[test]
fn sampled_rows_equal_those_of_the_whole_output() {
    let case = plain(Dims::new(2, 3, 2, 2)).masked(causal());
    let whole = forward(&case);
    let at = [(0, 0, 0), (1, 1, 2), (0, 1, 1)];
    for (row, &(b, h, i)) in forward_rows(&case.problem(), &at).unwrap().iter().zip(&at) {
        assert_eq!(row.out, whole.out.slice(s![b, i, h, ..]));
        assert_eq!(
            [row.lse, row.max, row.sum, row.ties],
            [
                whole.lse[[b, h, i]],
                whole.max[[b, h, i]],
                whole.sum[[b, h, i]],
                whole.ties[[b, h, i]]
            ]
        );
    }
    assert!(matches!(
        forward_rows(&case.problem(), &[(2, 0, 0)]),
        Err(Error::InvalidArgument { argument, .. }) if argument == "rows"
    ));
}

#[test]
fn errors_name_the_tensor_with_a_wrong_shape() {
    let case = plain(Dims::new(1, 3, 2, 2));
    let name = |change: &dyn Fn(&mut Case)| {
        let mut bad = case.clone();
        change(&mut bad);
        match bad.truth() {
            Err(Error::InvalidArgument { argument, .. }) => argument,
            other => panic!("{other:?}"),
        }
    };
    let wrong = || Array4::zeros((1, 2, 2, 2));
    assert_eq!(name(&|case| case.q = wrong()), "query");
    assert_eq!(name(&|case| case.k = wrong()), "key");
    assert_eq!(name(&|case| case.v = wrong()), "value");
    assert_eq!(name(&|case| case.dout = wrong()), "dout");
    assert_eq!(name(&|case| case.dlse = Some(Array3::zeros((1, 1, 3)))), "dlse");
    assert_eq!(name(&|case| case.bias = Some(wrong())), "bias");
    assert_eq!(name(&|case| case.spec.bias = Some([1, 1, 3, 3])), "bias");
    assert_eq!(name(&|case| case.sinks = Some(array![[0.0]])), "softmax_aux");
    assert_eq!(name(&|case| case.spec.scale = f64::NAN), "softmax_scale");
}
