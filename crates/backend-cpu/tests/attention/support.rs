//! Test problems, and the oracle's results for them.

use std::sync::Arc;

use annulus_core::{BackwardMode, Batch, BiasOrder, Dims, Dropout, SinkShape, Spec, mask, oracle};
use ndarray::{Array2, Array3, Array4};

/// SplitMix64: a case is reproduced by its seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// Returns a number in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.word() % n as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Returns a number in `-1.0..1.0`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub(crate) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    pub(crate) fn array(&mut self, shape: [usize; 4], size: f64) -> Array4<f64> {
        Array4::from_shape_simple_fn(shape, || size * self.unit())
    }
}

/// Attention problem with all tensors, in f64 but exactly representable in the spec's type.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) spec: Spec,
    pub(crate) batch: Batch,
    pub(crate) q: Array4<f64>,
    pub(crate) k: Array4<f64>,
    pub(crate) v: Array4<f64>,
    pub(crate) bias: Option<Array4<f64>>,
    pub(crate) sinks: Option<Array2<f64>>,
    pub(crate) dout: Array4<f64>,
    pub(crate) dlse: Option<Array3<f64>>,
}

/// All results, widened to f64.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) out: Array4<f64>,
    pub(crate) lse: Array3<f64>,
    pub(crate) max: Array3<f64>,
    pub(crate) sum: Array3<f64>,
    pub(crate) dq: Array4<f64>,
    pub(crate) dk: Array4<f64>,
    pub(crate) dv: Array4<f64>,
    pub(crate) dbias: Option<Array4<f64>>,
    pub(crate) dsinks: Option<Array2<f64>>,
}

impl Case {
    pub(crate) fn new(spec: Spec, random: &mut Random) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = spec.dims;
        let rounded =
            |array: Array4<f64>, dtype: annulus_core::DType| array.mapv(|x| dtype.round(x));
        let input = spec.dtype;
        let sums = spec.dtype.accumulator();
        let q = rounded(random.array([batch, q_len, q_heads, head_dim], 2.0), input);
        let k = rounded(random.array([batch, kv_len, kv_heads, head_dim], 2.0), input);
        let v = rounded(random.array([batch, kv_len, kv_heads, value_dim], 1.0), input);
        let dout = rounded(random.array([batch, q_len, q_heads, value_dim], 1.0), input);
        let bias = spec.bias.map(|shape| {
            let mut bias = rounded(random.array(shape, 1.0), sums);
            bias.mapv_inplace(|x| if random.one_in(9) { f64::NEG_INFINITY } else { x });
            bias
        });
        let sinks = spec.sinks.map(|SinkShape { per_head, count }| {
            let sinks =
                Array2::from_shape_simple_fn((if per_head { q_heads } else { 1 }, count), || {
                    sums.round(2.0 * random.unit())
                });
            sinks.mapv(|x| if x < -1.8 { f64::NEG_INFINITY } else { x })
        });
        let dlse = random.one_in(2).then(|| {
            Array3::from_shape_simple_fn((batch, q_heads, q_len), || sums.round(random.unit()))
        });
        Self { spec, batch: Batch::default(), q, k, v, bias, sinks, dout, dlse }
    }

    /// Returns a random combination of features.
    pub(crate) fn any(seed: u64, dtype: annulus_core::DType) -> Self {
        let r = &mut Random(seed);
        let kv_heads = 1 + r.below(2);
        let lens = [0, 1, 5, 17, 33, 63, 64, 65, 100, 131];
        let (q_len, kv_len) =
            if r.one_in(3) { (r.pick(&lens), r.pick(&lens)) } else { [r.pick(&lens); 2].into() };
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
                let odd = r.word();
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
        spec.alignment = if r.one_in(3) {
            annulus_core::Alignment::BottomRight
        } else {
            annulus_core::Alignment::TopLeft
        };
        spec.scale = if r.one_in(6) { r.pick(&[0.0, -0.3, 1.5]) } else { spec.scale };
        spec.soft_cap = r.one_in(3).then(|| r.pick(&[0.8, 2.5, 30.0]));
        let or_one = |r: &mut Random, len| if r.one_in(2) { 1 } else { len };
        spec.bias = r.one_in(3).then(|| {
            let Dims { batch, q_heads, q_len, kv_len, .. } = dims;
            [or_one(r, batch), or_one(r, q_heads), or_one(r, q_len), or_one(r, kv_len)]
        });
        spec.bias_function = r.one_in(5).then(|| -> Arc<dyn annulus_core::BiasFunction> {
            Arc::new(annulus_core::Alibi::published(dims.q_heads))
        });
        spec.bias_order =
            if r.one_in(2) { BiasOrder::BeforeSoftCap } else { BiasOrder::AfterSoftCap };
        spec.sinks =
            r.one_in(3).then(|| SinkShape { per_head: r.one_in(2), count: 1 + r.below(3) });
        spec.normalize = !r.one_in(4);
        spec.dropout = r.one_in(5).then(|| Dropout { probability: 0.3, seed: r.word() });
        spec.backward = if r.one_in(3) { BackwardMode::TwoPass } else { BackwardMode::OnePass };
        let mut case = Self::new(spec, r);
        if r.one_in(4) {
            let ids = |r: &mut Random, len: usize| {
                let cut = 1 + r.below(40);
                Array2::from_shape_fn((dims.batch, len), |(b, i)| {
                    ((i / cut + b) % 4) as i32 - i32::from(i % 11 == 10) * 9
                })
            };
            case.batch.q_segment_ids = Some(ids(r, q_len));
            case.batch.kv_segment_ids = Some(ids(r, kv_len));
        }
        if r.one_in(6) {
            case.batch.q_positions =
                Some(Array2::from_shape_simple_fn((dims.batch, q_len), || {
                    r.below(120) as i64 - 20
                }));
        }
        if r.one_in(6) {
            case.batch.kv_positions =
                Some(Array2::from_shape_simple_fn((dims.batch, kv_len), || {
                    r.below(120) as i64 - 20
                }));
        }
        if r.one_in(5) {
            let shape = [or_one(r, dims.batch), or_one(r, dims.q_heads), q_len, kv_len];
            let odd = r.word();
            case.batch.attention_mask =
                Some(annulus_core::DenseMask::from_fn(shape, |[b, h, i, j]| {
                    !(odd ^ (b * 7 + h * 5 + i * 3 + j * 11) as u64).is_multiple_of(5)
                }));
        }
        case
    }

    pub(crate) fn oracle(&self) -> Outcome {
        let problem = oracle::Problem {
            spec: &self.spec,
            batch: &self.batch,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            sinks: self.sinks.as_ref().map(|sinks| sinks.view()),
        };
        let forward = oracle::forward(&problem).unwrap();
        let backward = oracle::backward(
            &problem,
            self.dout.view(),
            self.dlse.as_ref().map(|dlse| dlse.view()),
        )
        .unwrap();
        Outcome {
            out: forward.out,
            lse: forward.lse,
            max: forward.max,
            sum: forward.sum,
            dq: backward.dq,
            dk: backward.dk,
            dv: backward.dv,
            dbias: backward.dbias,
            dsinks: backward.dsinks,
        }
    }
}

impl Outcome {
    /// Asserts that every number is within `tolerance` × max(1, largest finite number) of `want`,
    /// or equally non-finite.
    pub(crate) fn assert_close(&self, want: &Self, tolerance: f64, what: &str) {
        let list = |outcome: &Self| -> Vec<(&'static str, Vec<f64>)> {
            let flat3 = |array: &Array3<f64>| array.iter().copied().collect::<Vec<_>>();
            let flat4 = |array: &Array4<f64>| array.iter().copied().collect::<Vec<_>>();
            vec![
                ("out", flat4(&outcome.out)),
                ("lse", flat3(&outcome.lse)),
                ("max", flat3(&outcome.max)),
                ("sum", flat3(&outcome.sum)),
                ("dq", flat4(&outcome.dq)),
                ("dk", flat4(&outcome.dk)),
                ("dv", flat4(&outcome.dv)),
                ("dbias", outcome.dbias.as_ref().map(flat4).unwrap_or_default()),
                (
                    "dsinks",
                    outcome
                        .dsinks
                        .as_ref()
                        .map(|array| array.iter().copied().collect())
                        .unwrap_or_default(),
                ),
            ]
        };
        for ((name, got), (_, want)) in list(self).into_iter().zip(list(want)) {
            assert_eq!(got.len(), want.len(), "{what}: {name}");
            let largest = want
                .iter()
                .filter(|x| x.is_finite())
                .fold(1.0, |largest: f64, x| largest.max(x.abs()));
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let close = (got - want).abs() <= tolerance * largest
                    || got == want
                    || got.is_nan() && want.is_nan();
                assert!(close, "{what}: {name}[{index}]: got {got}, want {want}");
            }
        }
    }

    /// Returns the bits of every number.
    pub(crate) fn bits(&self) -> Vec<u64> {
        let mut bits: Vec<u64> = Vec::new();
        let mut add = |numbers: &mut dyn Iterator<Item = &f64>| {
            bits.extend(numbers.map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }))
        };
        [&self.out, &self.dq, &self.dk, &self.dv]
            .into_iter()
            .chain(&self.dbias)
            .for_each(|array| add(&mut array.iter()));
        [&self.lse, &self.max, &self.sum].into_iter().for_each(|array| add(&mut array.iter()));
        self.dsinks.iter().for_each(|array| add(&mut array.iter()));
        bits
    }
}
