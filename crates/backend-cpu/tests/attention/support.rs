//! Test problems, and comparisons with the oracle's results.

use std::{collections::HashMap, sync::Arc};

use annulus_core::{BackwardMode, BiasOrder, Dims, Dropout, SinkShape, Spec, mask};
use annulus_test_cases::{Answer, Case, Draw, Masks};
use ndarray::Array2;

/// Returns a case of this spec with random tensors, of which some biases and sinks are −∞.
pub(crate) fn case(spec: Spec, draw: &mut Draw) -> Case {
    let mask = Arc::clone(&spec.mask);
    let Dims { batch, q_heads, q_len, .. } = spec.dims;
    let mut case = Case::new("", spec, Masks::default(), draw);
    case.spec.mask = mask;
    if let Some(bias) = &mut case.bias {
        bias.mapv_inplace(|x| if draw.once_in(9) { f64::NEG_INFINITY } else { x });
    }
    if let Some(sinks) = &mut case.sinks {
        sinks.mapv_inplace(|x| if draw.once_in(9) { f64::NEG_INFINITY } else { x });
    }
    case.dlse = draw.once_in(2).then(|| draw.tensor((batch, q_heads, q_len)));
    case.in_dtype(case.spec.dtype)
}

/// Returns a random combination of features.
pub(crate) fn any_features(seed: u64, dtype: annulus_core::DType) -> Case {
    let r = &mut Draw::new(seed);
    let kv_heads = 1 + r.below(2);
    let lens = [0, 1, 5, 17, 33, 63, 64, 65, 100, 131];
    let (q_len, kv_len) =
        if r.once_in(3) { (r.pick(&lens), r.pick(&lens)) } else { [r.pick(&lens); 2].into() };
    let dims = Dims {
        batch: 1 + r.below(2),
        q_len,
        kv_len,
        q_heads: kv_heads * (1 + r.below(3)),
        kv_heads,
        head_dim: r.pick(&[1, 3, 7, 8, 16, 17, 32]),
        value_dim: r.pick(&[1, 2, 8, 9, 24]),
    };
    let mut spec = Spec::new(dims, dtype);
    let causal = || -> mask::SharedMask { Arc::new(mask::Causal::default()) };
    spec.mask = match r.below(9) {
        0 | 1 => Arc::new(mask::Everything),
        2 | 3 => causal(),
        4 => mask::and(
            causal(),
            Arc::new(mask::Window {
                first_visible: r.below(4) as u64,
                ..mask::Window::new(Some(r.below(30) as u64), None)
            }),
        ),
        5 => Arc::new(mask::ChunkedCausal { size: 1 + r.below(40) as u64 }),
        6 => Arc::new(mask::Window::new(Some(r.below(40) as u64), Some(r.below(40) as u64))),
        7 => {
            let odd = r.bits();
            Arc::new(mask::Predicate::of_positions(format!("scattered {odd}"), move |i, j| {
                (i * 31 + j * 17 + odd as i64) % 3 != 0
            }))
        }
        _ => {
            let heads = (0..dims.q_heads).map(|h| -> mask::SharedMask {
                if h % 2 == 0 {
                    Arc::new(mask::Causal { offset: h as i64 })
                } else {
                    Arc::new(mask::Window::new(Some(9), Some(3)))
                }
            });
            Arc::new(mask::PerHead(heads.collect()))
        }
    };
    spec.alignment = if r.once_in(3) {
        annulus_core::Alignment::BottomRight
    } else {
        annulus_core::Alignment::TopLeft
    };
    spec.scale = if r.once_in(6) { r.pick(&[0.0, -0.3, 1.5]) } else { spec.scale };
    spec.soft_cap = r.once_in(3).then(|| r.pick(&[0.8, 2.5, 30.0]));
    let or_one = |r: &mut Draw, len| if r.once_in(2) { 1 } else { len };
    spec.bias = r.once_in(3).then(|| {
        let Dims { batch, q_heads, q_len, kv_len, .. } = dims;
        [or_one(r, batch), or_one(r, q_heads), or_one(r, q_len), or_one(r, kv_len)]
    });
    spec.bias_function = r.once_in(5).then(|| -> Arc<dyn annulus_core::BiasFunction> {
        Arc::new(annulus_core::Alibi::published(dims.q_heads))
    });
    spec.bias_order = if r.once_in(2) { BiasOrder::BeforeSoftCap } else { BiasOrder::AfterSoftCap };
    spec.sinks = r.once_in(3).then(|| SinkShape { per_head: r.once_in(2), count: 1 + r.below(3) });
    spec.normalize = !r.once_in(4);
    spec.dropout = r.once_in(5).then(|| Dropout { probability: 0.3, seed: r.bits() });
    spec.backward = if r.once_in(3) { BackwardMode::TwoPass } else { BackwardMode::OnePass };
    let mut case = case(spec, r);
    if r.once_in(4) {
        let ids = |r: &mut Draw, len: usize| {
            let cut = 1 + r.below(40);
            Array2::from_shape_fn((dims.batch, len), |(b, i)| {
                ((i / cut + b) % 4) as i32 - i32::from(i % 11 == 10) * 9
            })
        };
        case.batch.q_segment_ids = Some(ids(r, q_len));
        case.batch.kv_segment_ids = Some(ids(r, kv_len));
    }
    if r.once_in(6) {
        case.batch.q_positions =
            Some(Array2::from_shape_simple_fn((dims.batch, q_len), || r.below(120) as i64 - 20));
    }
    if r.once_in(6) {
        case.batch.kv_positions =
            Some(Array2::from_shape_simple_fn((dims.batch, kv_len), || r.below(120) as i64 - 20));
    }
    if r.once_in(5) {
        let shape = [or_one(r, dims.batch), or_one(r, dims.q_heads), q_len, kv_len];
        let odd = r.bits();
        case.batch.attention_mask =
            Some(annulus_core::DenseMask::from_fn(shape, |[b, h, i, j]| {
                !(odd ^ (b * 7 + h * 5 + i * 3 + j * 11) as u64).is_multiple_of(5)
            }));
    }
    case
}

/// Returns the oracle's results.
pub(crate) fn oracle(case: &Case) -> Answer {
    Answer::of(case.truth().unwrap(), case.spec.normalize)
}

/// Asserts that every number is within `tolerance` × max(1, largest finite number of its array) of
/// `want`, or equally non-finite.
pub(crate) fn assert_close(got: &Answer, want: &Answer, tolerance: f64, what: &str) {
    let arrays: HashMap<_, _> = want.arrays().into_iter().collect();
    let within = |name: &str| {
        let finite = arrays[name].iter().filter(|x| x.is_finite());
        tolerance * finite.fold(1.0, |largest: f64, x| largest.max(x.abs()))
    };
    got.compare(want, within).unwrap_or_else(|error| panic!("{what}: {error}"));
}
