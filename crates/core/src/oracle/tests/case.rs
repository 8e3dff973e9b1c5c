//! Random problems that own their tensors, and finite differences of their loss.

use std::sync::Arc;

use ndarray::{Array2, Array3, Array4, Dimension};

use crate::{
    Alibi, Alignment, Batch, BiasFunction, BiasOrder, DType, DenseMask, Dims, Dropout, Fingerprint,
    KeyIntervals, Mask, SinkShape, Spec,
    mask::{Key, Query},
    oracle::{Backward, Forward, Problem, backward, forward},
};

/// Positions with 0 ≤ i − j ≤ width.
#[derive(Debug)]
pub(super) struct Causal {
    pub(super) width: i64,
}

impl Mask for Causal {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("causal within").number(self.width.cast_unsigned())
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        (0..=self.width).contains(&(query.position - key.position))
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        Some(KeyIntervals::one(query.position - self.width, query.position + 1))
    }
}

/// Masks the pairs with an even difference of positions and biases the others.
#[derive(Debug)]
pub(super) struct Checkered;

impl BiasFunction for Checkered {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        into.text("checkered")
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        if (query.position - key.position) % 2 == 0 {
            f64::NEG_INFINITY
        } else {
            0.1 * key.position as f64
        }
    }
}

/// The random number generator SplitMix64.
pub(super) struct Draw(pub(super) u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: u64) -> usize {
        (self.next() % count) as usize
    }

    pub(super) fn number(&mut self) -> f64 {
        (self.next() >> 11) as f64 / 2f64.powi(52) - 1.0
    }

    pub(super) fn tensor<D: Dimension, S: ndarray::ShapeBuilder<Dim = D>>(
        &mut self,
        shape: S,
    ) -> ndarray::Array<f64, D> {
        ndarray::Array::from_shape_simple_fn(shape, || self.number())
    }
}

/// A problem that owns its tensors.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) spec: Spec,
    pub(super) batch: Batch,
    pub(super) q: Array4<f64>,
    pub(super) k: Array4<f64>,
    pub(super) v: Array4<f64>,
    pub(super) bias: Option<Array4<f64>>,
    pub(super) sinks: Option<Array2<f64>>,
    pub(super) dout: Array4<f64>,
    pub(super) dlse: Option<Array3<f64>>,
}

impl Case {
    /// Returns a case of these dims without other features, with elements in −1..1.
    pub(super) fn plain(dims: Dims, draw: &mut Draw) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
        Self {
            spec: Spec::new(dims, DType::F64),
            batch: Batch::default(),
            q: draw.tensor((batch, q_len, q_heads, head_dim)),
            k: draw.tensor((batch, kv_len, kv_heads, head_dim)),
            v: draw.tensor((batch, kv_len, kv_heads, value_dim)),
            bias: None,
            sinks: None,
            dout: draw.tensor((batch, q_len, q_heads, value_dim)),
            dlse: None,
        }
    }

    pub(super) fn random(seed: u64) -> Self {
        let draw = &mut Draw(seed);
        let q_len = 3 + draw.below(2);
        let kv_len = 3 + draw.below(3);
        let kv_heads = 1 + draw.below(2);
        let dims = Dims {
            batch: 2,
            q_len,
            kv_len,
            q_heads: 2 * kv_heads,
            kv_heads,
            head_dim: 2,
            value_dim: 3,
        };
        let mut case = Self::plain(dims, draw);
        let Dims { batch, q_heads, .. } = dims;
        case.spec.scale = [0.7, -1.3, 0.0, 1.0][draw.below(4)];
        if draw.below(3) > 0 {
            case.spec.mask = Arc::new(Causal { width: [2, 9][draw.below(2)] });
        }
        case.spec.alignment = [Alignment::TopLeft, Alignment::BottomRight][draw.below(2)];
        case.spec.soft_cap = [None, Some(0.8)][draw.below(2)];
        case.spec.bias_order = [BiasOrder::AfterSoftCap, BiasOrder::BeforeSoftCap][draw.below(2)];
        case.spec.normalize = draw.below(2) == 0;
        case.spec.dropout =
            [None, Some(Dropout { probability: 0.4, seed: u64::MAX - seed })][draw.below(2)];
        if draw.below(3) > 0 {
            let full = [batch, q_heads, q_len, kv_len];
            let shape = full.map(|len| if draw.below(2) == 0 { 1 } else { len });
            let mut bias: Array4<f64> = draw.tensor(shape);
            if draw.below(2) == 0 {
                let masked = draw.below(bias.len() as u64);
                bias.as_slice_mut().unwrap()[masked] = f64::NEG_INFINITY;
            }
            case.spec.bias = Some(shape);
            case.bias = Some(bias);
        }
        match draw.below(4) {
            0 => case.spec.bias_function = Some(Arc::new(Alibi::published(q_heads))),
            1 => case.spec.bias_function = Some(Arc::new(Checkered)),
            _ => {}
        }
        if draw.below(3) > 0 {
            let shape = SinkShape { per_head: draw.below(2) == 0, count: 2 };
            case.sinks = Some(draw.tensor((if shape.per_head { q_heads } else { 1 }, 2)));
            case.spec.sinks = Some(shape);
        }
        if draw.below(2) == 0 {
            case.dlse = Some(draw.tensor((batch, q_heads, q_len)));
        }
        case.batch = Self::random_batch(&dims, draw);
        case
    }

    fn random_batch(dims: &Dims, draw: &mut Draw) -> Batch {
        let Dims { batch, q_len, kv_len, q_heads, .. } = *dims;
        let mut random = Batch::default();
        if draw.below(3) == 0 {
            random.q_segment_ids =
                Some(Array2::from_shape_simple_fn((batch, q_len), || draw.below(3) as i32 - 1));
            random.kv_segment_ids =
                Some(Array2::from_shape_simple_fn((batch, kv_len), || draw.below(3) as i32 - 1));
        }
        if draw.below(3) == 0 {
            random.q_positions =
                Some(Array2::from_shape_simple_fn((batch, q_len), || draw.below(6) as i64 - 1));
        }
        if draw.below(3) == 0 {
            random.kv_positions =
                Some(Array2::from_shape_simple_fn((batch, kv_len), || draw.below(6) as i64 - 1));
        }
        if draw.below(3) == 0 {
            random.cum_seqlens_q = Some(vec![0, 2, 3]);
            random.cum_seqlens_k = Some(vec![0, 1, 3]);
        }
        if draw.below(3) == 0 {
            let bits = draw.next();
            random.attention_mask =
                Some(DenseMask::from_fn([1, q_heads, q_len, kv_len], |[_, h, i, j]| {
                    bits >> ((h * 16 + i * 5 + j) % 64) & 3 != 0
                }));
        }
        random
    }

    pub(super) fn problem(&self) -> Problem<'_> {
        Problem {
            spec: &self.spec,
            batch: &self.batch,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|array| array.view()),
            sinks: self.sinks.as_ref().map(|array| array.view()),
        }
    }

    pub(super) fn forward(&self) -> Forward {
        forward(&self.problem()).unwrap()
    }

    pub(super) fn backward(&self) -> Backward {
        backward(&self.problem(), self.dout.view(), self.dlse.as_ref().map(|array| array.view()))
            .unwrap()
    }

    /// Returns ⟨dout, out⟩ + ⟨dlse, lse⟩ over the rows with a finite lse.
    fn loss(&self) -> f64 {
        let Forward { out, lse, .. } = self.forward();
        let of_out: f64 = (&out * &self.dout).sum();
        let of_lse = self
            .dlse
            .iter()
            .flatten()
            .zip(&lse)
            .filter(|(_, lse)| lse.is_finite())
            .map(|(dlse, lse)| dlse * lse)
            .sum::<f64>();
        of_out + of_lse
    }

    /// Compares `gradient` with the central differences of the loss for each element of one tensor.
    fn assert_differences<D: Dimension>(
        &self,
        name: &str,
        gradient: &ndarray::Array<f64, D>,
        tensor: impl Fn(&mut Self) -> &mut ndarray::Array<f64, D>,
    ) {
        let step = 1e-5;
        for (index, got) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut case = self.clone();
                *tensor(&mut case).iter_mut().nth(index).unwrap() += by;
                case.loss()
            };
            let want = (moved(step) - moved(-step)) / (2.0 * step);
            assert!(
                (got - want).abs() <= 2e-7 * (1.0 + want.abs()),
                "{name}[{index}]: {got}, by differences {want}; {:?} {:?}",
                self.spec,
                self.batch
            );
        }
    }

    pub(super) fn assert_gradients(&self) {
        let backward = self.backward();
        self.assert_differences("dq", &backward.dq, |case| &mut case.q);
        self.assert_differences("dk", &backward.dk, |case| &mut case.k);
        self.assert_differences("dv", &backward.dv, |case| &mut case.v);
        if let Some(dbias) = &backward.dbias {
            self.assert_differences("dbias", dbias, |case| case.bias.as_mut().unwrap());
        }
        if let Some(dsinks) = &backward.dsinks {
            self.assert_differences("dsinks", dsinks, |case| case.sinks.as_mut().unwrap());
        }
    }
}
