//! One attention with all its tensors in f64: its masks, the oracle's results for it, and their
//! comparison with the outputs and gradients that one subject computed.
//!
//! The predicate of the masks is written down from the definitions in `docs/semantics.md`.

use std::{borrow::Cow, sync::Arc};

use annulus_core::{
    Batch, DType, Fingerprint, KeyIntervals, Mask, Result, Spec,
    mask::{Key, Query},
    oracle::{self, Backward, Forward, Problem},
};
use ndarray::{Array, Array2, Array3, Array4, ArrayViewD, Dimension, ShapeBuilder};

/// Spec, batch and global tensors.
#[derive(Debug, Clone)]
pub struct Case {
    /// Name in failures.
    pub name: String,
    /// The attention to compute, with [`Case::masks`] as its mask.
    pub spec: Spec,
    /// Masks besides those of the batch. Changed with [`Case::masked`], which updates the spec too.
    pub masks: Masks,
    /// Per-call masks and positions of the whole sequence.
    pub batch: Batch,
    /// `[b, q_len, q_heads, d]`.
    pub q: Array4<f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub k: Array4<f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub v: Array4<f64>,
    /// `[b|1, q_heads|1, q_len|1, kv_len|1]`.
    pub bias: Option<Array4<f64>>,
    /// `[q_heads|1, sinks]`.
    pub sinks: Option<Array2<f64>>,
    /// `[b, q_len, q_heads, dv]`.
    pub dout: Array4<f64>,
    /// `[b, q_heads, q_len]`; absent = 0.
    pub dlse: Option<Array3<f64>>,
}

/// The oracle's results for a case.
#[derive(Debug, Clone)]
pub struct Truth {
    /// Outputs.
    pub forward: Forward,
    /// Gradients.
    pub backward: Backward,
}

impl Case {
    /// Creates a case of this spec and these masks, with random tensors.
    pub fn new(name: impl Into<String>, spec: Spec, masks: Masks, draw: &mut Draw) -> Self {
        let empty = || Array4::zeros((0, 0, 0, 0));
        let mut case = Self {
            name: name.into(),
            spec: Spec { mask: Arc::new(masks.clone()), ..spec },
            masks,
            batch: Batch::default(),
            q: empty(),
            k: empty(),
            v: empty(),
            bias: None,
            sinks: None,
            dout: empty(),
            dlse: None,
        };
        case.draw_tensors(draw);
        case
    }

    /// Returns the case with other masks.
    #[must_use]
    pub fn masked(mut self, masks: Masks) -> Self {
        self.spec.mask = Arc::new(masks.clone());
        self.masks = masks;
        self
    }

    /// Returns the case with its inputs rounded to `dtype` (bias, sinks and dlse to its
    /// accumulator), so that the oracle computes from the numbers that a computation in `dtype`
    /// receives.
    #[must_use]
    pub fn in_dtype(&self, dtype: DType) -> Self {
        fn rounded<D: Dimension>(tensor: &Array<f64, D>, dtype: DType) -> Array<f64, D> {
            tensor.mapv(|x| dtype.round(x))
        }
        let sums = dtype.accumulator();
        // a rounding of logits that the spec requires stays; the default one follows the element
        // type
        let narrowed = self.spec.logits_dtype != self.spec.dtype.accumulator();
        let logits_dtype = if narrowed { self.spec.logits_dtype } else { sums };
        Self {
            name: format!("{} {dtype}", self.name),
            spec: Spec { dtype, logits_dtype, ..self.spec.clone() },
            masks: self.masks.clone(),
            batch: self.batch.clone(),
            q: rounded(&self.q, dtype),
            k: rounded(&self.k, dtype),
            v: rounded(&self.v, dtype),
            bias: self.bias.as_ref().map(|bias| rounded(bias, sums)),
            sinks: self.sinks.as_ref().map(|sinks| rounded(sinks, sums)),
            dout: rounded(&self.dout, dtype),
            dlse: self.dlse.as_ref().map(|dlse| rounded(dlse, sums)),
        }
    }

    /// Returns the case with every tensor element changed by about 5 %, so that other roundings
    /// occur.
    #[must_use]
    pub fn nearby(&self, draw: &mut Draw) -> Self {
        fn moved<D: Dimension>(tensor: &Array<f64, D>, draw: &mut Draw) -> Array<f64, D> {
            tensor.mapv(|x| x * (1.0 + 0.05 * draw.normal()))
        }
        let near = Self {
            name: self.name.clone(),
            spec: self.spec.clone(),
            masks: self.masks.clone(),
            batch: self.batch.clone(),
            q: moved(&self.q, draw),
            k: moved(&self.k, draw),
            v: moved(&self.v, draw),
            bias: self.bias.as_ref().map(|bias| moved(bias, draw)),
            sinks: self.sinks.as_ref().map(|sinks| moved(sinks, draw)),
            dout: moved(&self.dout, draw),
            dlse: self.dlse.as_ref().map(|dlse| moved(dlse, draw)),
        };
        Self { name: self.name.clone(), ..near.in_dtype(self.spec.dtype) }
    }

    /// Returns the case with q, k, v and dout in the order of their axes.
    pub(crate) fn in_standard_layout(&self) -> Cow<'_, Self> {
        let tensors = [&self.q, &self.k, &self.v, &self.dout];
        if tensors.into_iter().all(|tensor| tensor.is_standard_layout()) {
            return Cow::Borrowed(self);
        }
        let [q, k, v, dout] = tensors.map(|tensor| tensor.as_standard_layout().into_owned());
        Cow::Owned(Self { q, k, v, dout, ..self.clone() })
    }

    /// Returns the case in the form that the oracle takes.
    pub fn problem(&self) -> Problem<'_> {
        Problem {
            spec: &self.spec,
            batch: &self.batch,
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            sinks: self.sinks.as_ref().map(|sinks| sinks.view()),
        }
    }

    /// Computes the oracle's results.
    pub fn truth(&self) -> Result<Truth> {
        let problem = self.problem();
        let backward = oracle::backward(
            &problem,
            self.dout.view(),
            self.dlse.as_ref().map(|dlse| dlse.view()),
        )?;
        Ok(Truth { forward: oracle::forward(&problem)?, backward })
    }
}

/// The mask conditions of a case besides those of its batch. A pair is visible if all hold.
#[derive(Debug, Clone, Default)]
pub struct Masks {
    /// Positions j' ≤ i'.
    pub causal: bool,
    /// i' − l ≤ j' ≤ i' + r; `None` is unbounded.
    pub window: Option<[Option<u64>; 2]>,
    /// Keys with j' below this number are exempt from the window.
    pub first_visible: u64,
    /// ⌊i'/C⌋ = ⌊j'/C⌋ and j' ≤ i'.
    pub chunk: Option<u64>,
    /// j' < n or j' ≤ i'.
    pub prefix: Option<u64>,
    /// Mask objects.
    pub objects: Vec<Arc<dyn Mask>>,
}

/// The predicate only. It has no intervals, so that the oracle does not share the code of subjects.
impl Mask for Masks {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        // constant: fingerprints are compared between ranks, and the oracle runs on none
        into.text("conformance")
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        let i = i128::from(query.position);
        let j = i128::from(key.position);
        let near = |[left, right]: [Option<u64>; 2]| {
            left.is_none_or(|left| i - i128::from(left) <= j)
                && right.is_none_or(|right| j <= i + i128::from(right))
        };
        let exempt = self.first_visible > 0 && j < i128::from(self.first_visible);
        let same_chunk =
            |size: u64| i.div_euclid(size.into()) == j.div_euclid(size.into()) && j <= i;
        (!self.causal || self.prefix.is_some() || j <= i)
            && (self.window.is_none_or(near) || exempt)
            && self.chunk.is_none_or(same_chunk)
            && self.prefix.is_none_or(|prefix| j < i128::from(prefix) || j <= i)
            && self.objects.iter().all(|mask| mask.visible(query, key))
    }

    fn intervals(&self, _: &Query) -> Option<KeyIntervals> {
        None
    }

    fn per_head(&self) -> bool {
        self.objects.iter().any(|mask| mask.per_head())
    }

    fn per_batch(&self) -> bool {
        self.objects.iter().any(|mask| mask.per_batch())
    }
}

/// Outputs and gradients of one case.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// `[b, q_len, q_heads, dv]`.
    pub out: Array4<f64>,
    /// `[b, q_heads, q_len]`, as the three below.
    pub lse: Array3<f64>,
    /// Largest logit.
    pub max: Array3<f64>,
    /// Σ e^{s − max}.
    pub sum: Array3<f64>,
    /// Number of pairs and sinks that share the largest logit, if the output is not normalised.
    pub ties: Option<Array3<f64>>,
    /// `[b, q_len, q_heads, d]`.
    pub dq: Array4<f64>,
    /// `[b, kv_len, kv_heads, d]`.
    pub dk: Array4<f64>,
    /// `[b, kv_len, kv_heads, dv]`.
    pub dv: Array4<f64>,
    /// Shape of the bias.
    pub dbias: Option<Array4<f64>>,
    /// Shape of the sinks.
    pub dsinks: Option<Array2<f64>>,
}

impl Answer {
    /// The oracle's answer for a case; with `normalize` it has no `ties`.
    pub fn of(truth: Truth, normalize: bool) -> Self {
        let Truth { forward, backward } = truth;
        Self {
            out: forward.out,
            lse: forward.lse,
            max: forward.max,
            sum: forward.sum,
            ties: (!normalize).then_some(forward.ties),
            dq: backward.dq,
            dk: backward.dk,
            dv: backward.dv,
            dbias: backward.dbias,
            dsinks: backward.dsinks,
        }
    }

    /// Returns every array that is present, with its name.
    pub fn arrays(&self) -> Vec<(&'static str, ArrayViewD<'_, f64>)> {
        let mut all = vec![
            ("out", self.out.view().into_dyn()),
            ("lse", self.lse.view().into_dyn()),
            ("max", self.max.view().into_dyn()),
            ("sum", self.sum.view().into_dyn()),
            ("dq", self.dq.view().into_dyn()),
            ("dk", self.dk.view().into_dyn()),
            ("dv", self.dv.view().into_dyn()),
        ];
        all.extend(self.ties.iter().map(|ties| ("ties", ties.view().into_dyn())));
        all.extend(self.dbias.iter().map(|dbias| ("dbias", dbias.view().into_dyn())));
        all.extend(self.dsinks.iter().map(|dsinks| ("dsoftmax_aux", dsinks.view().into_dyn())));
        all
    }

    /// Compares array by array. `within` is the largest difference allowed in an array of that
    /// name. An infinity equals only itself; NaN equals NaN.
    pub fn compare(&self, want: &Self, within: impl Fn(&str) -> f64) -> Result<(), String> {
        let got = self.arrays();
        let want = want.arrays();
        let names = |arrays: &[(&'static str, ArrayViewD<'_, f64>)]| {
            arrays.iter().map(|(name, _)| *name).collect::<Vec<_>>()
        };
        if names(&got) != names(&want) {
            return Err(format!("arrays {:?}, want {:?}", names(&got), names(&want)));
        }
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            if got.shape() != want.shape() {
                return Err(format!(
                    "{name} has the shape {:?}, want {:?}",
                    got.shape(),
                    want.shape()
                ));
            }
            let bound = within(name);
            let wrong = |(_, (got, want)): &(usize, (&f64, &f64))| {
                let same = got == want || (got.is_nan() && want.is_nan());
                let apart = (**got - **want).abs();
                !same && (apart.is_nan() || apart > bound)
            };
            if let Some((index, (got, want))) = got.iter().zip(want).enumerate().find(wrong) {
                return Err(format!(
                    "{name}[{index}]: got {got:e}, want {want:e}, at most {bound:e} apart"
                ));
            }
        }
        Ok(())
    }

    /// Compares bit for bit; every NaN counts as the same NaN.
    pub fn same_bits(&self, other: &Self) -> Result<(), String> {
        let bits = |x: &f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
        for ((name, a), (other_name, b)) in self.arrays().iter().zip(&other.arrays()) {
            if name != other_name
                || a.shape() != b.shape()
                || a.iter().map(bits).ne(b.iter().map(bits))
            {
                return Err(format!("{name} differs in its bits"));
            }
        }
        Ok(())
    }
}

/// SplitMix64.
///
/// # Source
/// Steele, Lea, Flood 2014.
#[derive(Debug, Clone)]
pub struct Draw(u64);

impl Draw {
    /// Creates a generator; the same seed gives the same numbers.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..count`.
    pub const fn below(&mut self, count: usize) -> usize {
        annulus_core::index(self.bits() % count as u64)
    }

    /// True with probability 1 / `every`.
    pub const fn once_in(&mut self, every: usize) -> bool {
        self.below(every) == 0
    }

    /// Returns one of `choices`.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    /// Returns a number in [0, 1) with 53 random bits, as many as an f64 holds.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / 2f64.powi(53)
    }

    /// Returns a standard normal number (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Returns an array of standard normal numbers.
    pub fn tensor<D: Dimension, S: ShapeBuilder<Dim = D>>(&mut self, shape: S) -> Array<f64, D> {
        Array::from_shape_simple_fn(shape, || self.normal())
    }

    /// Returns a permutation of `0..count` (Fisher–Yates).
    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        (1..count).rev().for_each(|last| order.swap(last, self.below(last + 1)));
        order
    }
}
