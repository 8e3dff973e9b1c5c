//! One attention with all its tensors in f64, and the oracle's results for it.

use std::{borrow::Cow, sync::Arc};

use annulus_core::{
    Batch, DType, Result, Spec,
    oracle::{self, Backward, Forward, Problem},
};
use ndarray::{Array, Array2, Array3, Array4, Dimension};

use crate::{Draw, Masks};

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
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] if the parts do not fit each other.
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
