//! Small problems with results computed by hand, and finite differences for every gradient with
//! random combinations of features.

use std::sync::Arc;

use ndarray::{Array3, Array4, array};

use super::*;
use crate::{Alignment, DType, Dropout, SinkShape};
use case::{Case, Causal, Draw};

mod case;

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-12 * (1.0 + a.abs().max(b.abs()))
}

#[test]
fn gradients_match_finite_differences_of_the_loss() {
    (0..200).for_each(|seed| Case::random(seed).assert_gradients());
}

#[test]
fn two_keys_by_hand() {
    let mut case = Case::plain(Dims::new(1, 2, 1, 1), &mut Draw(1));
    case.spec.scale = 2.0;
    case.spec.mask = Arc::new(Causal { width: 9 });
    case.q = array![[[[1.0]], [[3.0]]]];
    case.k = array![[[[0.5]], [[-1.0]]]];
    case.v = array![[[[10.0]], [[20.0]]]];
    let Forward { out, lse, max, sum, ties } = case.forward();
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
fn queries_without_visible_keys_are_zero_and_have_no_gradient() {
    let mut case = Case::plain(Dims::new(1, 3, 2, 2), &mut Draw(2));
    case.dlse = Some(Array3::from_elem((1, 2, 3), 5.0));
    case.dout.fill(f64::NAN);
    case.spec.bias = Some([1, 1, 1, 1]);
    case.bias = Some(Array4::from_elem((1, 1, 1, 1), f64::NEG_INFINITY));
    for normalize in [true, false] {
        case.spec.normalize = normalize;
        let Forward { out, lse, max, sum, ties } = case.forward();
        assert!(out.iter().chain(&sum).chain(&ties).all(|&x| x == 0.0));
        assert!(lse.iter().chain(&max).all(|&x| x == f64::NEG_INFINITY));
        let Backward { dq, dk, dv, dbias, dsinks } = case.backward();
        assert!(dq.iter().chain(&dk).chain(&dv).chain(&dbias.unwrap()).all(|&x| x == 0.0));
        assert!(dsinks.is_none());
    }
}

#[test]
fn sinks_alone_have_an_lse_and_its_gradient() {
    let mut case = Case::plain(Dims { q_len: 2, kv_len: 0, ..Dims::new(1, 2, 1, 1) }, &mut Draw(3));
    case.spec.sinks = Some(SinkShape { per_head: false, count: 3 });
    case.sinks = Some(array![[0.5, f64::NEG_INFINITY, -1.0]]);
    case.dlse = Some(array![[[2.0, 3.0]]]);
    let total = 0.5f64.exp() + (-1f64).exp();
    let Forward { out, lse, .. } = case.forward();
    assert!(out.iter().all(|&x| x == 0.0));
    assert!(lse.iter().all(|&x| close(x, total.ln())));
    let dsinks = case.backward().dsinks.unwrap();
    assert!(close(dsinks[[0, 0]], 5.0 * 0.5f64.exp() / total));
    assert_eq!(dsinks[[0, 1]], 0.0);
    assert!(close(dsinks[[0, 2]], 5.0 * (-1f64).exp() / total));
}

#[test]
fn equal_largest_scores_share_the_gradient_of_the_maximum() {
    // three keys and one sink, all with the score 0
    let mut case = Case::plain(Dims { q_len: 1, kv_len: 3, ..Dims::new(1, 1, 1, 1) }, &mut Draw(4));
    case.spec.normalize = false;
    case.spec.bias = Some([1, 1, 1, 3]);
    case.spec.sinks = Some(SinkShape { per_head: true, count: 1 });
    case.q.fill(0.0);
    case.v = array![[[[1.0]], [[2.0]], [[4.0]]]];
    case.bias = Some(Array4::zeros((1, 1, 1, 3)));
    case.sinks = Some(array![[0.0]]);
    case.dout.fill(1.0);
    assert_eq!(case.forward().ties[[0, 0, 0]], 4.0);
    let Backward { dbias, dsinks, dv, .. } = case.backward();
    // out = 7: ds = value − 7/4 for a key, −7/4 for the sink
    assert_eq!(dbias.unwrap().into_raw_vec_and_offset().0, [1.0 - 1.75, 2.0 - 1.75, 4.0 - 1.75]);
    assert_eq!(dsinks.unwrap()[[0, 0]], -1.75);
    assert!(dv.iter().all(|&x| x == 1.0));
}

#[test]
fn non_finite_keys_affect_only_the_queries_that_attend_to_them() {
    for poison in [f64::NAN, f64::INFINITY] {
        let mut case = Case::plain(Dims::new(1, 4, 1, 2), &mut Draw(5));
        case.spec.mask = Arc::new(Causal { width: 1 });
        let clean = case.forward();
        let clean_gradients = case.backward();
        // only queries 2 and 3 attend to key 2
        case.k[[0, 2, 0, 0]] = poison;
        case.v[[0, 2, 0, 1]] = poison;
        let forward = case.forward();
        let gradients = case.backward();
        for i in [0, 1] {
            assert_eq!(forward.out.index_axis(Axis(1), i), clean.out.index_axis(Axis(1), i));
            assert_eq!(forward.lse[[0, 0, i]], clean.lse[[0, 0, i]]);
            assert_eq!(
                gradients.dq.index_axis(Axis(1), i),
                clean_gradients.dq.index_axis(Axis(1), i)
            );
        }
        for i in [2, 3] {
            assert!(forward.out.index_axis(Axis(1), i).iter().any(|x| x.is_nan() || *x == poison));
            assert!(gradients.dq.index_axis(Axis(1), i).iter().all(|x| x.is_nan()));
        }
        assert_eq!(gradients.dk.index_axis(Axis(1), 0), clean_gradients.dk.index_axis(Axis(1), 0));
    }
}

#[test]
fn scores_are_rounded_and_rounding_has_slope_one() {
    let dims = Dims { q_heads: 2, ..Dims::new(1, 4, 1, 3) };
    let mut rounded = Case::plain(dims, &mut Draw(6));
    rounded.spec.logits_dtype = DType::Bf16;
    // the same scores without rounding, with a bias equal to the rounding error
    let mut shifted = rounded.clone();
    shifted.spec.logits_dtype = DType::F64;
    shifted.spec.bias = Some([1, 2, 4, 4]);
    shifted.bias = Some(Array4::from_shape_fn((1, 2, 4, 4), |(b, h, i, j)| {
        let dot: f64 = (0..3).map(|x| rounded.q[[b, i, h, x]] * rounded.k[[b, j, 0, x]]).sum();
        rounded.spec.scale * (half::bf16::from_f64(dot).to_f64() - dot)
    }));
    let (got, want) = (rounded.forward(), shifted.forward());
    assert!(got.out.iter().zip(&want.out).all(|(&a, &b)| close(a, b)));
    let (got, want) = (rounded.backward(), shifted.backward());
    for (got, want) in [(got.dq, want.dq), (got.dk, want.dk), (got.dv, want.dv)] {
        assert!(got.iter().zip(&want).all(|(&a, &b)| close(a, b)));
    }
    let exact =
        Case { spec: Spec { logits_dtype: DType::F64, ..rounded.spec.clone() }, ..rounded.clone() };
    assert!(
        exact.forward().out.iter().zip(&rounded.forward().out).any(|(a, b)| (a - b).abs() > 1e-5)
    );
}

#[test]
fn dropout_does_not_change_the_row_sum() {
    let mut case = Case::plain(Dims::new(2, 40, 2, 2), &mut Draw(7));
    let clean = case.forward();
    case.spec.dropout = Some(Dropout { probability: 0.25, seed: 0x1234_5678_9abc_def0 });
    let dropped = case.forward();
    assert_eq!(clean.lse, dropped.lse);
    assert_ne!(clean.out, dropped.out);
    let count = |case: &Case| {
        let dropped = |b, h, i, j| {
            super::row::dropped(&case.spec.dims, case.spec.dropout.unwrap(), b, h, i, j)
        };
        (0..2 * 2 * 40 * 40)
            .filter(|n| dropped(n / 3200, n / 1600 % 2, n / 40 % 40, n % 40))
            .count()
    };
    // 6400 draws with probability 1/4: 1600 ± 4.9 standard deviations
    assert!((1430..=1770).contains(&count(&case)), "{}", count(&case));
}

#[test]
fn packed_sequences_restart_positions_and_are_aligned_separately() {
    let mut case = Case::plain(Dims { kv_len: 6, ..Dims::new(1, 4, 1, 1) }, &mut Draw(8));
    case.spec.mask = Arc::new(Causal { width: 9 });
    case.batch.cum_seqlens_q = Some(vec![0, 1, 1, 3]);
    case.batch.cum_seqlens_k = Some(vec![0, 3, 4, 5]);
    let visible = |case: &Case| -> Vec<String> {
        let problem = case.problem();
        let visibility = problem.visibility().unwrap();
        let mark = |i, j| if visibility.visible(0, 0, i, j) { 'x' } else { '.' };
        (0..4).map(|i| (0..6).map(|j| mark(i, j)).collect()).collect()
    };
    assert_eq!(visible(&case), ["x.....", "....x.", "....x.", "......"]);
    case.spec.alignment = Alignment::BottomRight;
    assert_eq!(visible(&case), ["xxx...", "......", "....x.", "......"]);
    // explicit query positions are not aligned
    case.batch.q_positions = Some(array![[1, 0, -1, 7]]);
    assert_eq!(visible(&case), ["xx....", "....x.", "......", "......"]);
}

#[test]
fn ids_given_for_one_side_are_used_for_both() {
    let mut case = Case::plain(Dims::new(2, 3, 1, 1), &mut Draw(9));
    let ids = array![[0, 0, 1], [-1, 5, 5]];
    let visible = |batch: Batch| -> Vec<bool> {
        let case = Case { batch, ..case.clone() };
        let problem = case.problem();
        let visibility = problem.visibility().unwrap();
        (0..18).map(|n| visibility.visible(n / 9, 0, n / 3 % 3, n % 3)).collect()
    };
    let both = visible(Batch {
        q_segment_ids: Some(ids.clone()),
        kv_segment_ids: Some(ids.clone()),
        ..Batch::default()
    });
    assert_eq!(
        both.iter().map(|&visible| u8::from(visible)).collect::<Vec<_>>(),
        [1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1]
    );
    assert_eq!(visible(Batch { q_segment_ids: Some(ids.clone()), ..Batch::default() }), both);
    assert_eq!(visible(Batch { kv_segment_ids: Some(ids), ..Batch::default() }), both);
    case.spec.dims.kv_len = 4;
    case.batch.q_segment_ids = Some(array![[0, 0, 1], [-1, 5, 5]]);
    assert!(case.problem().visibility().is_err());
}

#[test]
fn sampled_rows_equal_those_of_the_whole_output() {
    let case = Case::random(11);
    let whole = case.forward();
    let at = [(0, 0, 0), (1, 1, 2), (0, 1, 1)];
    for (row, &(b, h, i)) in forward_rows(&case.problem(), &at).unwrap().iter().zip(&at) {
        assert_eq!(row.out, vector(&whole.out, [b, i, h]));
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
    let case = Case::plain(Dims::new(1, 3, 2, 2), &mut Draw(12));
    let name = |change: &dyn Fn(&mut Case)| {
        let mut bad = case.clone();
        change(&mut bad);
        match backward(&bad.problem(), bad.dout.view(), bad.dlse.as_ref().map(|array| array.view()))
        {
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
