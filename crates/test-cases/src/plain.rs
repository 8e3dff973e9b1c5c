//! Attention straight from its formulas, every step rounded to one element type: the yardstick for
//! the error of an implementation.
//!
//! ```text
//! X = ‹scale·‹Q Kᵀ››    S = ‹X + bias›, capped    P = ‹softmax(S)›    O = ‹P V›
//! dP = ‹dO Vᵀ›    dS = ‹P ∘ ‹dP − ‹⟨dO, O⟩ − dlse›››
//! dQ = ‹scale·dX K›    dK = ‹scale·dXᵀ Q›    dV = ‹Pᵀ dO›
//! ```
//! ‹·› rounds to the element type. The sums of a product and of the softmax are kept in the
//! accumulator's type and rounded after each term.
//!
//! # Source
//! FlashAttention's tests: an implementation's error may be at most twice that of this computation.

use std::ops::Range;

use annulus_core::{BiasOrder, DType, Dims, DropoutMask, Result, Spec, oracle::PairVisibility};
use ndarray::{Array2, Array3, Array4};

use crate::{Answer, Case};

/// One visible pair of a row.
#[derive(Clone, Copy)]
struct Pair {
    /// Logit.
    s: f64,
    /// ds/dx of the soft cap; 1 without one.
    slope: f64,
    /// Dropout factor: 0, or 1/(1 − probability).
    keep: f64,
}

/// Computes a case in the element type of its spec.
pub fn plain(case: &Case) -> Result<Answer> {
    // rows are read as slices
    let case = &case.in_standard_layout();
    let spec = &case.spec;
    let problem = case.problem();
    let visibility = problem.visibility()?;
    let Dims { batch, q_len, q_heads, value_dim, .. } = spec.dims;
    let statistics = || Array3::zeros((batch, q_heads, q_len));
    let mut answer = Answer {
        out: Array4::zeros((batch, q_len, q_heads, value_dim)),
        lse: statistics(),
        max: statistics(),
        sum: statistics(),
        ties: Some(statistics()),
        dq: Array4::zeros(case.q.raw_dim()),
        dk: Array4::zeros(case.k.raw_dim()),
        dv: Array4::zeros(case.v.raw_dim()),
        dbias: case.bias.as_ref().map(|bias| Array4::zeros(bias.raw_dim())),
        dsinks: case.sinks.as_ref().map(|sinks| Array2::zeros(sinks.raw_dim())),
    };
    for b in 0..batch {
        for h in 0..q_heads {
            for i in 0..q_len {
                let visible: Vec<usize> =
                    (0..spec.dims.kv_len).filter(|&j| visibility.visible(b, h, i, j)).collect();
                Row { case, spec, visibility: &visibility, at: [b, h, i] }
                    .compute(&visible, &mut answer);
            }
        }
    }
    // dk and dv are summed over queries in the accumulator's type and rounded once, here
    answer.dk.mapv_inplace(|x| spec.dtype.round(x));
    answer.dv.mapv_inplace(|x| spec.dtype.round(x));
    if spec.normalize {
        answer.ties = None;
    }
    Ok(answer)
}

/// One query row of one head: `at` is [batch, head, query].
struct Row<'a> {
    case: &'a Case,
    spec: &'a Spec,
    visibility: &'a PairVisibility<'a>,
    at: [usize; 3],
}

/// Softmax statistics of one row, rounded to the accumulator's type.
#[derive(Clone, Copy)]
struct Softmax {
    sums: DType,
    max: f64,
    sum: f64,
    ties: f64,
}

impl Softmax {
    /// Returns e^(s − max).
    fn weight(&self, s: f64) -> f64 {
        self.sums.round((s - self.max).exp())
    }

    /// Returns the probability e^(s − max) / sum.
    fn prob(&self, s: f64) -> f64 {
        self.sums.round(self.weight(s) / self.sum)
    }
}

impl Row<'_> {
    /// Computes the row's output and statistics, and adds its terms to the gradients.
    fn compute(&self, visible: &[usize], answer: &mut Answer) {
        let [b, h, i] = self.at;
        let dtype = self.spec.dtype;
        let sums = self.spec.dtype.accumulator();
        let pairs: Vec<(usize, Pair)> =
            visible.iter().filter_map(|&j| Some((j, self.pair(j)?))).collect();
        let Some(softmax) = self.softmax(&pairs, answer) else { return };
        // P, the factor of V
        let p = |s: f64| {
            dtype.round(if self.spec.normalize { softmax.prob(s) } else { softmax.weight(s) })
        };
        let kv_head = self.spec.dims.kv_head(h);
        let weights: Vec<f64> =
            pairs.iter().map(|(_, pair)| dtype.round(pair.keep * p(pair.s))).collect();
        let values: Vec<&[f64]> =
            pairs.iter().map(|&(j, _)| vector(&self.case.v, [b, j, kv_head])).collect();
        for x in 0..self.spec.dims.value_dim {
            let products = weights.iter().zip(&values).map(|(&weight, v)| (weight, v[x]));
            answer.out[[b, i, h, x]] = dtype.round(dot(sums, products));
        }
        self.add_gradients(&pairs, &weights, softmax, answer);
    }

    /// Computes the row's statistics; `None` if every logit is −∞.
    fn softmax(&self, pairs: &[(usize, Pair)], answer: &mut Answer) -> Option<Softmax> {
        let sums = self.spec.dtype.accumulator();
        let sinks = self.sinks();
        let logits = || pairs.iter().map(|(_, pair)| pair.s).chain(sinks.iter().copied());
        let max =
            logits().fold(f64::NEG_INFINITY, |max, s| if s > max || s.is_nan() { s } else { max });
        answer.max[self.at] = max;
        if max == f64::NEG_INFINITY {
            answer.lse[self.at] = max;
            return None;
        }
        let mut softmax = Softmax { sums, max, sum: 0.0, ties: 0.0 };
        softmax.sum = logits().fold(0.0, |sum, s| sums.round(sum + softmax.weight(s)));
        softmax.ties = logits().filter(|&s| s == max).count() as f64;
        answer.lse[self.at] = sums.round(max + sums.round(softmax.sum.ln()));
        answer.sum[self.at] = softmax.sum;
        if let Some(ties) = &mut answer.ties {
            ties[self.at] = softmax.ties;
        }
        Some(softmax)
    }

    /// Computes the row's dq, and adds its terms to dk, dv, dbias and dsinks. `weights` are the
    /// factors of V.
    fn add_gradients(
        &self,
        pairs: &[(usize, Pair)],
        weights: &[f64],
        softmax: Softmax,
        answer: &mut Answer,
    ) {
        let [b, h, i] = self.at;
        let dtype = self.spec.dtype;
        let sums = self.spec.dtype.accumulator();
        let kv_head = self.spec.dims.kv_head(h);
        let q = vector(&self.case.q, [b, i, h]);
        let dout = vector(&self.case.dout, [b, i, h]);
        let dout_out = dtype.round(dot_of(sums, dout, vector(&answer.out, [b, i, h])));
        let mut dq = vec![0.0; self.spec.dims.head_dim];
        for (&(j, pair), &weight) in pairs.iter().zip(weights) {
            let v = vector(&self.case.v, [b, j, kv_head]);
            let dp = dtype.round(pair.keep * dtype.round(dot_of(sums, dout, v)));
            let ds = self.ds(softmax, dout_out, pair.s, dp);
            let dx = dtype.round(ds * pair.slope);
            let scaled = dtype.round(self.spec.scale * dx);
            add_scaled(sums, &mut dq, scaled, vector(&self.case.k, [b, j, kv_head]));
            add_scaled(sums, vector_mut(&mut answer.dk, [b, j, kv_head]), scaled, q);
            add_scaled(sums, vector_mut(&mut answer.dv, [b, j, kv_head]), weight, dout);
            if let (Some(dbias), Some(column)) = (&mut answer.dbias, self.bias_column(j)) {
                let index = broadcast(dbias.dim().into(), [b, h, i, column]);
                dbias[index] = sums.round(
                    dbias[index]
                        + if self.spec.bias_order == BiasOrder::BeforeSoftCap { dx } else { ds },
                );
            }
        }
        dq.iter()
            .enumerate()
            .for_each(|(x, &number)| answer.dq[[b, i, h, x]] = dtype.round(number));
        if let (Some(dsinks), Some(sinks)) = (&mut answer.dsinks, &self.case.sinks) {
            let line = if sinks.nrows() == 1 { 0 } else { h };
            for (t, &sink) in
                sinks.row(line).iter().enumerate().filter(|(_, sink)| **sink != f64::NEG_INFINITY)
            {
                let ds = self.ds(softmax, dout_out, sink, 0.0);
                dsinks[[line, t]] = sums.round(dsinks[[line, t]] + ds);
            }
        }
    }

    /// Returns the gradient of a logit `s` from dp and ⟨dO, O⟩.
    fn ds(&self, softmax: Softmax, dout_out: f64, s: f64, dp: f64) -> f64 {
        let dtype = self.spec.dtype;
        let dlse = self.case.dlse.as_ref().map_or(0.0, |dlse| dlse[self.at]);
        let prob = dtype.round(softmax.prob(s));
        if self.spec.normalize {
            return dtype.round(prob * dtype.round(dp - dtype.round(dout_out - dlse)));
        }
        let through_max = if s == softmax.max { dtype.round(dout_out / softmax.ties) } else { 0.0 };
        dtype.round(
            dtype.round(dtype.round(softmax.weight(s)) * dp) - through_max
                + dtype.round(prob * dlse),
        )
    }

    /// Returns the pair with key `j`; `None` if its bias is −∞, which masks it.
    fn pair(&self, j: usize) -> Option<Pair> {
        let [b, h, i] = self.at;
        let spec = self.spec;
        let dtype = self.spec.dtype;
        let bias = self.bias(j)?;
        let q = vector(&self.case.q, [b, i, h]);
        let k = vector(&self.case.k, [b, j, spec.dims.kv_head(h)]);
        let product = dtype.round(spec.logits_dtype.round(dot_of(dtype.accumulator(), q, k)));
        let x = dtype.round(spec.scale * product);
        let (before, after) =
            if spec.bias_order == BiasOrder::BeforeSoftCap { (bias, 0.0) } else { (0.0, bias) };
        let (capped, slope) = spec.soft_cap.map_or((dtype.round(x + before), 1.0), |cap| {
            let tanh = dtype.round((dtype.round(x + before) / cap).tanh());
            (dtype.round(cap * tanh), dtype.round(1.0 - dtype.round(tanh * tanh)))
        });
        let keep = spec.dropout.map(DropoutMask::new).map_or(1.0, |mask| {
            if mask.keep(b, h, spec.dims.q_heads, i as u64, j as u64) {
                mask.keep_scale()
            } else {
                0.0
            }
        });
        Some(Pair { s: dtype.round(capped + after), slope, keep })
    }

    /// Returns the bias of the pair with key `j`, tensor and function; `None` if either is −∞.
    fn bias(&self, j: usize) -> Option<f64> {
        let [b, h, i] = self.at;
        let column = self.bias_column(j)?;
        let tensor = self
            .case
            .bias
            .as_ref()
            .map_or(0.0, |bias| bias[broadcast(bias.dim().into(), [b, h, i, column])]);
        let query = self.visibility.query(b, h, i)?;
        let key = self.visibility.key(b, j)?;
        let computed =
            self.spec.bias_function.as_ref().map_or(0.0, |function| function.bias(&query, &key));
        (tensor != f64::NEG_INFINITY && computed != f64::NEG_INFINITY).then_some(tensor + computed)
    }

    /// Returns the last index of the bias tensor for key `j`: the key, or the entry of a table.
    fn bias_column(&self, j: usize) -> Option<usize> {
        let [b, h, i] = self.at;
        let Some(table) = &self.spec.bias_table else { return Some(j) };
        let [query, key] =
            [self.visibility.query(b, h, i)?.position, self.visibility.key(b, j)?.position];
        Some(table.index(query, key))
    }

    /// Returns the sinks of this head, without those of −∞.
    fn sinks(&self) -> Vec<f64> {
        let Some(sinks) = &self.case.sinks else { return Vec::new() };
        let line = sinks.row(if sinks.nrows() == 1 { 0 } else { self.at[1] });
        line.iter().copied().filter(|&sink| sink != f64::NEG_INFINITY).collect()
    }
}

/// Returns the last axis of a tensor at three indices.
fn vector(tensor: &Array4<f64>, at: [usize; 3]) -> &[f64] {
    &tensor.as_slice().unwrap_or_default()[range(tensor, at)]
}

/// As [`vector`], mutable.
fn vector_mut(tensor: &mut Array4<f64>, at: [usize; 3]) -> &mut [f64] {
    let range = range(tensor, at);
    &mut tensor.as_slice_mut().unwrap_or_default()[range]
}

fn range(tensor: &Array4<f64>, [b, row, head]: [usize; 3]) -> Range<usize> {
    let (_, rows, heads, length) = tensor.dim();
    let start = ((b * rows + row) * heads + head) * length;
    start..start + length
}

/// Computes `sum += factor·terms`, each product and sum rounded.
fn add_scaled(sums: DType, sum: &mut [f64], factor: f64, terms: &[f64]) {
    for (sum, &term) in sum.iter_mut().zip(terms) {
        *sum = sums.round(*sum + sums.round(factor * term));
    }
}

fn dot_of(sums: DType, a: &[f64], b: &[f64]) -> f64 {
    dot(sums, a.iter().copied().zip(b.iter().copied()))
}

fn dot(sums: DType, pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    pairs.fold(0.0, |sum, (a, b)| sums.round(sum + sums.round(a * b)))
}

fn broadcast(shape: [usize; 4], index: [usize; 4]) -> [usize; 4] {
    std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { index[axis] })
}
