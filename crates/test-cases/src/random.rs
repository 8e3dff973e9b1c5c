//! Random cases: any combination of features, at small and awkward sizes.

use std::sync::Arc;

use annulus_core::{
    Alibi, Alignment, BackwardMode, Batch, BiasOrder, DType, DenseMask, Dims, Dropout, Mask,
    SinkShape, Spec,
    mask::{Axis, Causal, Dense, Edge, Neighborhood, PerHead, Predicate, Window, or},
};
use ndarray::{Array2, Array3};

use crate::{Case, Draw, Masks};

impl Case {
    /// Returns the case number `seed`. Two thirds of the cases have each feature with probability
    /// 1/3 (rare ones 1/6), the others with 1/8 (1/16), so that most features are absent.
    pub fn random(seed: u64) -> Self {
        Self::random_of(seed, random_dims)
    }

    /// Returns the case number `seed` with sequences of up to 400 rows: several KV tiles.
    pub fn random_long(seed: u64) -> Self {
        Self::random_of(seed, |draw| {
            let lengths = [1, 64, 65, 130, 191, 257, 320, 400];
            let q_len = draw.pick(&lengths);
            let kv_len = if draw.once_in(2) { q_len } else { draw.pick(&lengths) };
            Dims { q_len, kv_len, ..random_dims(draw) }
        })
    }

    /// Returns the case number `seed` with more heads, which strategies can divide.
    pub fn random_heads(seed: u64) -> Self {
        Self::random_of(seed, |draw| {
            let heads = [(8, 8), (8, 4), (8, 2), (8, 1), (4, 4), (4, 1), (6, 6), (6, 3), (6, 2)];
            let (q_heads, kv_heads) = draw.pick(&heads);
            Dims { q_heads, kv_heads, ..random_dims(draw) }
        })
    }

    fn random_of(seed: u64, dims: impl FnOnce(&mut Draw) -> Dims) -> Self {
        let draw = &mut Draw::new(seed);
        let dims = dims(draw);
        let every = if draw.once_in(3) { 8 } else { 3 };
        let mut case = Self::new(
            format!("random {seed}"),
            Spec::new(dims, DType::F64),
            random_masks(&dims, every, draw),
            draw,
        );
        let Dims { batch, q_len, kv_len, q_heads, .. } = dims;
        let spec = &mut case.spec;
        if draw.once_in(every) {
            spec.alignment = Alignment::BottomRight;
        }
        if draw.once_in(every) {
            spec.scale = draw.pick(&[0.3, -0.2, 0.0, 1.0]);
        }
        if draw.once_in(every) {
            spec.soft_cap = Some(draw.pick(&[0.9, 5.0]));
        }
        if draw.once_in(2) {
            spec.bias_order = BiasOrder::BeforeSoftCap;
        }
        if draw.once_in(every) {
            spec.bias = Some(
                [batch, q_heads, q_len, kv_len].map(|len| if draw.once_in(3) { 1 } else { len }),
            );
        }
        if draw.once_in(2 * every) {
            spec.bias_function = Some(Arc::new(Alibi::published(q_heads)));
        }
        if draw.once_in(every) {
            spec.sinks = Some(SinkShape { per_head: draw.once_in(2), count: draw.pick(&[1, 3]) });
        }
        spec.normalize = !draw.once_in(every);
        if draw.once_in(every) {
            spec.dropout = Some(Dropout { probability: draw.pick(&[0.1, 0.5]), seed: draw.bits() });
        }
        if draw.once_in(2 * every) {
            spec.logits_dtype = DType::Bf16;
        }
        case.draw_tensors(draw);
        if case.spec.logits_dtype == DType::Bf16 {
            case.round_scores();
        }
        if let Some(bias) = case.bias.as_mut().filter(|_| draw.once_in(2)) {
            bias.mapv_inplace(|x| if draw.once_in(5) { f64::NEG_INFINITY } else { x });
        }
        if draw.once_in(2) {
            case.dlse = Some(draw.tensor((batch, q_heads, q_len)));
        }
        case.batch = random_batch(&dims, every, draw);
        // several ranks refuse the others in a two-pass backward; `bad_input` and `update` test
        // that
        let two_pass_can =
            case.spec.bias.is_none_or(|shape| shape[2] == 1) && case.batch.attention_mask.is_none();
        if two_pass_can && draw.once_in(3) {
            case.spec.backward = BackwardMode::TwoPass;
        }
        case
    }
}

fn random_dims(draw: &mut Draw) -> Dims {
    let lengths = [1, 2, 5, 7, 8, 12, 17, 24, 33];
    let q_len = draw.pick(&lengths);
    let kv_len = if draw.once_in(2) { q_len } else { draw.pick(&lengths) };
    let (q_heads, kv_heads) = draw.pick(&[(1, 1), (2, 1), (2, 2), (4, 2), (3, 3)]);
    let (head_dim, value_dim) = draw.pick(&[(4, 4), (8, 8), (1, 3), (7, 5), (16, 2)]);
    // an empty side is a valid problem
    let (q_len, kv_len) = if draw.once_in(25) {
        draw.pick(&[(0, kv_len), (q_len, 0), (0, 0)])
    } else {
        (q_len, kv_len)
    };
    Dims { batch: draw.pick(&[1, 2]), q_len, kv_len, q_heads, kv_heads, head_dim, value_dim }
}

fn random_masks(dims: &Dims, every: usize, draw: &mut Draw) -> Masks {
    let mut masks = Masks { causal: draw.once_in(2), ..Masks::default() };
    if draw.once_in(every) {
        let side = |draw: &mut Draw| draw.pick(&[None, Some(0), Some(1), Some(4), Some(9)]);
        masks.window = Some([side(draw), side(draw)]);
        masks.first_visible = draw.pick(&[0, 0, 2]);
    }
    if draw.once_in(2 * every) {
        masks.chunk = Some(draw.pick(&[1, 3, 8]));
    }
    if draw.once_in(2 * every) {
        masks.prefix = Some(draw.pick(&[0, 2, 6]));
    }
    if draw.once_in(every) {
        let kind = draw.below(OBJECTS);
        masks.objects.push(mask_object(kind, dims, draw));
    }
    masks
}

/// Kinds of [`mask_object`].
const OBJECTS: usize = 5;

/// Returns a mask of this kind: 0 causal, 1 one of two windows or a neighbourhood, 2 a window per
/// head, 3 a predicate, 4 dense.
pub fn mask_object(kind: usize, dims: &Dims, draw: &mut Draw) -> Arc<dyn Mask> {
    let window = |draw: &mut Draw| Window {
        offset: draw.pick(&[-1, 0, 2]),
        ..Window::new(Some(draw.below(6) as u64), draw.pick(&[None, Some(2)]))
    };
    match kind {
        0 => Arc::new(Causal { offset: draw.pick(&[-1, 1, 3]) }),
        // with up to eight intervals
        1 if dims.kv_len > 12 && draw.once_in(2) => {
            let rows = Axis { dilation: draw.pick(&[1, 2]), ..Axis::new(6, draw.pick(&[3, 8])) };
            let columns = Axis::new(dims.kv_len.div_ceil(6) as u64, draw.pick(&[2, 3]));
            let columns = Axis { periodic: draw.once_in(2), ..columns };
            Arc::new(Neighborhood { axes: vec![rows, columns], edge: Edge::Clip })
        }
        1 => or(Arc::new(window(draw)), Arc::new(window(draw))),
        2 => Arc::new(PerHead(
            (0..dims.q_heads).map(|_| Arc::new(window(draw)) as Arc<dyn Mask>).collect(),
        )),
        3 => Arc::new(Predicate::of_positions("every third apart", |i, j| (i - j) % 3 == 0)),
        _ => {
            let bits = draw.bits();
            let shape = [
                draw.pick(&[1, dims.batch]),
                draw.pick(&[1, dims.q_heads]),
                dims.q_len,
                dims.kv_len,
            ];
            Arc::new(Dense(Arc::new(DenseMask::from_fn(shape, |[b, h, i, j]| {
                bits >> ((b * 31 + h * 17 + i * 5 + j * 3) % 61) & 1 != 0
            }))))
        }
    }
}

fn random_batch(dims: &Dims, every: usize, draw: &mut Draw) -> Batch {
    let mut made = Batch::default();
    for kind in 0..5 {
        if draw.once_in(if kind == 0 { every } else { 2 * every }) {
            set_of_batch(kind, dims, draw, &mut made);
        }
        if kind == 0 && made.q_segment_ids.is_some() && dims.q_len == dims.kv_len && draw.once_in(2)
        {
            made.q_segment_ids = None;
        }
    }
    made
}

/// Sets what a batch has of this kind: 0 segment ids, 1 positions of queries, 2 of keys, 3 packed
/// lengths, 4 a dense mask.
pub fn set_of_batch(kind: usize, dims: &Dims, draw: &mut Draw, made: &mut Batch) {
    let Dims { batch, q_len, kv_len, q_heads, .. } = *dims;
    let positions = |len: usize, draw: &mut Draw| {
        Array2::from_shape_simple_fn((batch, len), || draw.below(kv_len + 9) as i64 - 4)
    };
    match kind {
        0 => {
            let most = draw.pick(&[1, 3]);
            let mut ids = |len: usize| {
                Array2::from_shape_fn((batch, len), |(_, row)| {
                    if draw.once_in(7) { -1 } else { (row * most / len) as i32 }
                })
            };
            made.q_segment_ids = Some(ids(q_len));
            made.kv_segment_ids = Some(ids(kv_len));
        }
        1 => made.q_positions = Some(positions(q_len, draw)),
        2 => made.kv_positions = Some(positions(kv_len, draw)),
        3 => {
            let sequences = 1 + draw.below(3);
            let mut ends = |len: usize| {
                let mut ends: Vec<i64> =
                    (0..sequences).map(|_| draw.below(len + 1) as i64).collect();
                ends.push(0);
                ends.sort_unstable();
                ends
            };
            made.cum_seqlens_q = Some(ends(q_len));
            made.cum_seqlens_k = Some(ends(kv_len));
        }
        _ => {
            let bits = draw.bits() | draw.bits();
            let shape = [draw.pick(&[1, batch]), draw.pick(&[1, q_heads]), q_len, kv_len];
            made.attention_mask = Some(DenseMask::from_fn(shape, |[b, h, i, j]| {
                bits >> ((b * 29 + h * 13 + i * 7 + j) % 64) & 1 != 0
            }));
        }
    }
}

impl Case {
    /// Rounds Q and K to multiples of 1/4, which have exact products and sums: no order of
    /// summation changes the rounding of a logit.
    pub fn round_scores(&mut self) {
        [&mut self.q, &mut self.k]
            .into_iter()
            .for_each(|tensor| tensor.mapv_inplace(|x| (4.0 * x).round() / 4.0));
    }

    /// Draws every tensor anew for the current spec.
    pub fn draw_tensors(&mut self, draw: &mut Draw) {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.spec.dims;
        self.q = draw.tensor((batch, q_len, q_heads, head_dim));
        self.k = draw.tensor((batch, kv_len, kv_heads, head_dim));
        self.v = draw.tensor((batch, kv_len, kv_heads, value_dim));
        self.bias = self.spec.bias.map(|shape| draw.tensor(shape));
        self.sinks = self
            .spec
            .sinks
            .map(|sinks| draw.tensor((if sinks.per_head { q_heads } else { 1 }, sinks.count)));
        self.dout = draw.tensor((batch, q_len, q_heads, value_dim));
        self.dlse =
            self.dlse.as_ref().map(|_| -> Array3<f64> { draw.tensor((batch, q_heads, q_len)) });
    }
}
