//! Bad input through the facade: each gives a typed error that names the argument, its value and
//! the values allowed. Nothing is computed, no rank panics or hangs, and a plan that refused a call
//! still works.

use std::{sync::Arc, time::Duration};

use annulus::{
    Attention, BackwardMode, Batch, Dims, Division, Error, Forward, Layout, LocalRing, Result,
    Runtime, Setup, SinkShape, Tensors,
    mask::{Dense, DenseMask},
    planning::{CustomLayout, Runs},
};
use ndarray::{Array2, Array3, Array4};

const DIMS: Dims =
    Dims { batch: 2, q_len: 6, kv_len: 6, q_heads: 4, kv_heads: 2, head_dim: 3, value_dim: 5 };

/// Requires that `result` refuses this argument, with its value and the values allowed.
#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, argument: &str, result: Result<T>) {
    match result {
        Err(error @ Error::InvalidArgument { .. }) => {
            let Error::InvalidArgument { argument: named, got, want } = &error else {
                unreachable!()
            };
            assert_eq!(named, argument, "{what}: {error}");
            assert!(!got.is_empty() && !want.is_empty() && got != want, "{what}: {error}");
            assert_eq!(error.code(), 1);
            assert!(!error.is_fatal() && !error.to_string().contains('\n'));
        }
        other => panic!("{what}: {other:?}"),
    }
}

#[track_caller]
fn unsupported<T: std::fmt::Debug>(what: &str, result: Result<T>) {
    assert!(
        matches!(&result, Err(error @ Error::Unsupported { .. }) if error.code() == 2),
        "{what}: {result:?}"
    );
}

/// Plans a ring of one rank, and one of three.
fn plans(setup: impl Into<Setup>, dims: Dims) -> [Result<LocalRing>; 2] {
    let setup = setup.into().map_division(|division| division.layout(Layout::Zigzag));
    [1, 3].map(|ranks| LocalRing::new(&setup, dims, ranks))
}

#[test]
fn dims_without_meaning() {
    let cases = [
        ("batch", Dims { batch: 0, ..DIMS }),
        ("q_heads", Dims { q_heads: 0, ..DIMS }),
        ("kv_heads", Dims { kv_heads: 0, ..DIMS }),
        ("q_heads", Dims { q_heads: 3, ..DIMS }),
        ("head_dim", Dims { head_dim: 0, ..DIMS }),
        ("head_dim", Dims { head_dim: Dims::MAX_DIM + 1, ..DIMS }),
        ("value_dim", Dims { value_dim: 0, ..DIMS }),
        ("value_dim", Dims { value_dim: Dims::MAX_DIM + 1, ..DIMS }),
        ("q_len", Dims { q_len: usize::MAX, ..DIMS }),
        ("kv_len", Dims { kv_len: 1 << 60, ..DIMS }),
        // loops over batch rows and heads overflow although the tensors have no rows
        ("batch", Dims { batch: 1 << 40, q_heads: 1 << 40, q_len: 0, kv_len: 0, ..DIMS }),
    ];
    for (argument, dims) in cases {
        plans(Attention::new(), dims)
            .into_iter()
            .for_each(|plan| refused(&format!("{dims:?}"), argument, plan));
    }
}

#[test]
fn numbers_without_meaning() {
    let attention = Attention::new;
    let cases = [
        ("softmax_scale", attention().softmax_scale(f64::NAN)),
        ("softmax_scale", attention().softmax_scale(f64::INFINITY)),
        ("softmax_scale", attention().softmax_scale(f64::NEG_INFINITY)),
        ("logits_soft_cap", attention().logits_soft_cap(0.0)),
        ("logits_soft_cap", attention().logits_soft_cap(-1.0)),
        ("logits_soft_cap", attention().logits_soft_cap(f64::NAN)),
        ("logits_soft_cap", attention().logits_soft_cap(f64::INFINITY)),
        ("dropout_prob", attention().dropout(-0.1, 0)),
        ("dropout_prob", attention().dropout(1.0, 0)),
        ("dropout_prob", attention().dropout(f64::NAN, 0)),
        // without a window
        ("attention_sink_size", attention().attention_sink_size(2)),
        ("local_gradients", attention().local_gradients(true)),
        ("bias", attention().bias([2, 4, 6, 7])),
        ("bias", attention().bias([2, 3, 6, 6])),
        ("bias", attention().bias([0, 4, 6, 6])),
        ("softmax_aux", attention().softmax_aux(SinkShape::shared(0))),
        ("softmax_aux", attention().softmax_aux(SinkShape::per_head(0))),
        (
            "mask",
            attention().mask(Arc::new(Dense(Arc::new(DenseMask::from_fn([3, 1, 6, 6], |_| true))))),
        ),
    ];
    for (number, (argument, attention)) in cases.into_iter().enumerate() {
        plans(&attention, DIMS)
            .into_iter()
            .for_each(|plan| refused(&format!("case {number}"), argument, plan));
    }
    for (argument, runtime) in [
        ("deadline", Runtime::new().deadline(Duration::from_millis(10))),
        ("deadline", Runtime::new().deadline(Duration::ZERO)),
        ("threads", Runtime::new().threads(0)),
    ] {
        plans((attention(), Division::new(), runtime), DIMS)
            .into_iter()
            .for_each(|plan| refused(argument, argument, plan));
    }
}

#[test]
fn rings_without_meaning() {
    refused("no ranks", "ranks", LocalRing::new(Attention::new(), DIMS, 0));
    let shards = |shards: &[&[i64]]| {
        shards.iter().map(|rows| rows.iter().copied().collect::<Runs>()).collect::<Vec<_>>()
    };
    let good: &[&[i64]] = &[&[0, 2, 4], &[1, 3, 5]];
    let layout = |q: &[&[i64]], kv: &[&[i64]]| {
        Layout::Custom(Arc::new(CustomLayout { q: shards(q), kv: shards(kv) }))
    };
    let cases = [
        ("one shard too few", layout(good, &[&[0, 1, 2, 3, 4, 5]])),
        ("a row twice", layout(&[&[0, 2, 4], &[1, 3, 5, 0]], good)),
    ];
    for (what, layout) in cases {
        refused(
            what,
            "layout",
            LocalRing::new((Attention::new(), Division::new().layout(layout)), DIMS, 2),
        );
    }
    let two_pass = Attention::new().backward_mode(BackwardMode::TwoPass);
    unsupported(
        "a bias with queries in two passes",
        LocalRing::new(two_pass.bias([1, 1, 6, 6]), DIMS, 2),
    );
}

#[test]
fn batches_that_do_not_fit() {
    let batch = Batch::default;
    let cases = [
        ("q_segment_ids", Batch { q_segment_ids: Some(Array2::zeros((2, 5))), ..batch() }),
        ("kv_positions", Batch { kv_positions: Some(Array2::zeros((1, 6))), ..batch() }),
        ("cum_seqlens_q", Batch { cum_seqlens_q: Some(vec![0, 4, 3]), ..batch() }),
    ];
    for (argument, batch) in &cases {
        for plan in plans(Attention::new(), DIMS) {
            let mut plan = plan.unwrap();
            refused(argument, argument, plan.update(batch));
            works(&mut plan);
        }
    }
    let two_pass = Attention::new().backward_mode(BackwardMode::TwoPass);
    let attention_mask = Some(DenseMask::from_fn([1, 1, 6, 6], |_| true));
    unsupported(
        "a dense mask in two passes",
        LocalRing::new(two_pass, DIMS, 2).unwrap().update(&Batch { attention_mask, ..batch() }),
    );
}

/// Tensors of the whole sequence for [`DIMS`].
struct Whole {
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    dout: Array4<f32>,
}

impl Whole {
    fn new() -> Self {
        let tensor = |shape| {
            Array4::from_shape_fn(shape, |(b, i, h, c)| {
                ((b * 5 + i * 7 + h * 3 + c) % 11) as f32 * 0.1
            })
        };
        Self {
            q: tensor((2, 6, 4, 3)),
            k: tensor((2, 6, 2, 3)),
            v: tensor((2, 6, 2, 5)),
            dout: tensor((2, 6, 4, 5)),
        }
    }

    fn tensors(&self) -> Tensors<'_, f32> {
        Tensors::new(self.q.view(), self.k.view(), self.v.view())
    }
}

/// Requires that a plan without bias and sinks still computes.
#[track_caller]
fn works(plan: &mut LocalRing) {
    let whole = Whole::new();
    let forward = plan.forward(&whole.tensors()).expect("a plan works after a refusal");
    let backward = plan
        .backward(&whole.tensors(), &forward, whole.dout.view(), None)
        .expect("a plan works after a refusal");
    assert!(forward.out.iter().chain(&backward.dk).all(|x| x.is_finite()));
}

fn with<'a>(
    tensors: &Tensors<'a, f32>,
    bias: Option<&'a Array4<f32>>,
    sinks: Option<&'a Array2<f32>>,
) -> Tensors<'a, f32> {
    let mut tensors = tensors.clone();
    tensors.bias = bias.map(|bias| bias.view());
    tensors.softmax_aux = sinks.map(|sinks| sinks.view());
    tensors
}

#[test]
fn tensors_that_do_not_fit() {
    let whole = Whole::new();
    let good = whole.tensors();
    let q = Array4::<f32>::zeros((2, 5, 4, 3));
    let k = Array4::<f32>::zeros((2, 6, 4, 3));
    let v = Array4::<f32>::zeros((1, 6, 2, 5));
    let per_head = Array2::<f32>::zeros((4, 2));
    let other_bias = Array4::<f32>::zeros((1, 1, 6, 5));
    let bias = Array4::<f32>::zeros((1, 1, 6, 6));
    let sinks = Array2::<f32>::zeros((1, 2));
    for plan in plans(Attention::new(), DIMS) {
        let mut plan = plan.unwrap();
        for (what, argument, tensors) in [
            ("q of another length", "q", Tensors::new(q.view(), good.k, good.v)),
            ("k of other heads", "k", Tensors::new(good.q, k.view(), good.v)),
            ("v of another batch", "v", Tensors::new(good.q, good.k, v.view())),
            ("a bias that was not planned", "bias", with(&good, Some(&bias), None)),
            ("sinks that were not planned", "softmax_aux", with(&good, None, Some(&sinks))),
        ] {
            refused(what, argument, plan.forward(&tensors));
        }
        let [q, k, v] = [&whole.q, &whole.k, &whole.v].map(|tensor| tensor.mapv(f64::from));
        let wide = Tensors::new(q.view(), k.view(), v.view());
        refused("f64 for an f32 plan", "q", plan.forward(&wide));
        works(&mut plan);
    }
    for plan in plans(Attention::new().bias([1, 1, 6, 6]).softmax_aux(SinkShape::per_head(2)), DIMS)
    {
        let mut plan = plan.unwrap();
        for (argument, bias, sinks) in [
            ("bias", None, Some(&per_head)),
            ("softmax_aux", Some(&bias), None),
            ("bias", Some(&other_bias), Some(&per_head)),
            // shared sinks for sinks per head
            ("softmax_aux", Some(&bias), Some(&sinks)),
        ] {
            refused(argument, argument, plan.forward(&with(&good, bias, sinks)));
        }
        plan.forward(&with(&good, Some(&bias), Some(&per_head))).unwrap();
    }
}

#[test]
fn gradients_that_do_not_fit() {
    let whole = Whole::new();
    let good = whole.tensors();
    for plan in plans(Attention::new(), DIMS) {
        let mut plan = plan.unwrap();
        let forward = plan.forward(&good).unwrap();
        let other_dout = Array4::<f32>::zeros((2, 6, 4, 3));
        let dlse = Array3::<f32>::zeros((2, 4, 5));
        let [of_dout, dout] = [&other_dout, &whole.dout].map(|dout| dout.view());
        let with = |edit: fn(&mut Forward<f32>)| {
            let mut other = forward.clone();
            edit(&mut other);
            other
        };
        for (argument, forward, dout, dlse) in [
            ("dout", forward.clone(), of_dout, None),
            ("dlse", forward.clone(), dout, Some(dlse.view())),
            ("out", with(|other| other.out = Array4::zeros((2, 6, 2, 5))), dout, None),
            ("lse", with(|other| other.lse = Array3::zeros((2, 4, 7))), dout, None),
            // a max without a sum
            ("sum", with(|other| other.sum = None), dout, None),
        ] {
            refused(argument, argument, plan.backward(&good, &forward, dout, dlse));
        }
        works(&mut plan);
    }
    for plan in plans(Attention::new().unnormalized(true), DIMS) {
        let mut plan = plan.unwrap();
        let mut forward = plan.forward(&good).unwrap();
        forward.ties = None;
        refused("no ties", "ties", plan.backward(&good, &forward, whole.dout.view(), None));
        forward.max = None;
        refused("no max", "max", plan.backward(&good, &forward, whole.dout.view(), None));
    }
    for plan in plans(Attention::new().forward_only(true), DIMS) {
        let mut plan = plan.unwrap();
        let forward = plan.forward(&good).unwrap();
        refused(
            "a plan for forward only",
            "backward",
            plan.backward(&good, &forward, whole.dout.view(), None),
        );
    }
}
