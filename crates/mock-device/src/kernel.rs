//! The arithmetic of the mock backend: attention pair by pair in f64, on numbers that were read
//! from device memory.
//!
//! ```text
//! forward    acc ← acc·e^{m − m'} + Σ_j keep·e^{s_j − m'}·v_j
//!            ℓ ← ℓ·e^{m − m'} + Σ_j e^{s_j − m'}
//! backward   ds = p·(dp − delta)    dx = ds·∂s/∂x    dq += scale·dx·k    dk += scale·dx·q
//! ```
//! Logits are rounded to the accumulator's type, so that an unnormalised backward finds the same
//! row maximum as forward.

use annulus_core::{
    BiasOrder, DType, Dims, DropoutMask, RankShard, Result, RowLayout, Rows, Spec, mask::Key,
    mask::Query,
};
use ndarray::{Array1, Array2, Array3, Array4, ArrayView1, s};

use super::{
    memory::fault,
    tensor::{decode, encode},
};

/// The data of a pass that stay on the device over all ring steps.
pub(crate) struct State {
    pub(crate) shard: RankShard,
    pub(crate) q: Array4<f64>,
    pub(crate) bias: Option<Array4<f64>>,
    pub(crate) sinks: Option<Array2<f64>>,
    /// Accumulator, `[b, shard q_len, q_heads, dv]`.
    pub(crate) acc: Array4<f64>,
    /// Row maximum, `[b, q_heads, shard q_len]`; sum and ties have the same shape.
    pub(crate) max: Array3<f64>,
    pub(crate) sum: Array3<f64>,
    pub(crate) ties: Array3<f64>,
    pub(crate) dout: Array4<f64>,
    /// `[b, shard q_len, q_heads, 4]`: see [`Spec::ROW_STATISTICS`].
    pub(crate) statistics: Array4<f64>,
    pub(crate) dq: Array4<f64>,
    pub(crate) dbias: Option<Array4<f64>>,
}

impl State {
    /// Returns the bytes of its arrays.
    pub(crate) fn bytes(&self) -> u64 {
        let Self { q, bias, sinks, acc, max, sum, ties, dout, statistics, dq, dbias, .. } = self;
        let lens = [q, acc, dout, statistics, dq].map(Array4::len);
        let of_rows = [max, sum, ties].map(Array3::len);
        let optional = [bias, dbias].map(|array| array.as_ref().map_or(0, Array4::len));
        let sinks = sinks.as_ref().map_or(0, Array2::len);
        let all = lens.iter().chain(&of_rows).chain(&optional).sum::<usize>() + sinks;
        all as u64 * size_of::<f64>() as u64
    }
}

/// A block of keys `[b, rows, kv_heads, d]` and values `[b, rows, kv_heads, dv]`, unpacked.
pub(crate) struct Keys<'a> {
    pub(crate) rows: &'a Rows,
    pub(crate) k: Array4<f64>,
    pub(crate) v: Array4<f64>,
}

/// Queries of a backward pass: those of this rank, or a block of another's.
pub(crate) struct Queries<'a> {
    pub(crate) rows: &'a Rows,
    pub(crate) q: &'a Array4<f64>,
    pub(crate) dout: &'a Array4<f64>,
    pub(crate) statistics: &'a Array4<f64>,
}

/// A visible pair: key index, logit, ∂s/∂x and dropout factor.
struct Pair {
    j: usize,
    logit: f64,
    slope: f64,
    keep: f64,
}

/// The gradients of one pair: ds of its logit, dx of the logit before bias and soft cap.
struct PairGradient {
    /// [batch, head, query, key].
    at: [usize; 4],
    ds: f64,
    dx: f64,
    /// Factor of dO_i in dV_j.
    weight: f64,
}

impl State {
    pub(crate) fn new(shard: RankShard) -> Self {
        let empty = || Array4::zeros((0, 0, 0, 0));
        let none = || Array3::zeros((0, 0, 0));
        Self {
            shard,
            q: empty(),
            bias: None,
            sinks: None,
            acc: empty(),
            max: none(),
            sum: none(),
            ties: none(),
            dout: empty(),
            statistics: empty(),
            dq: empty(),
            dbias: None,
        }
    }

    /// Resets the accumulator and the softmax statistics.
    pub(crate) fn begin(&mut self) {
        let Dims { batch, q_heads, value_dim, .. } = self.shard.spec.dims;
        let rows = self.shard.queries.len();
        self.acc = Array4::zeros((batch, rows, q_heads, value_dim));
        self.max = Array3::from_elem((batch, q_heads, rows), f64::NEG_INFINITY);
        self.sum = Array3::zeros((batch, q_heads, rows));
        self.ties = Array3::zeros((batch, q_heads, rows));
    }

    /// Adds one KV block to the online softmax.
    pub(crate) fn attend(&mut self, keys: &Keys<'_>) {
        let dims = self.shard.spec.dims;
        for [b, h, i] in self.every_row() {
            let pairs = self.pairs(&self.shard.queries, &self.q, keys, [b, h, i]);
            let logits: Vec<f64> = pairs.iter().map(|pair| pair.logit).collect();
            let max = self.rescale([b, h, i], &logits);
            for pair in &pairs {
                // a logit of −∞ has the weight 0, also while the maximum is −∞
                let base = if max == f64::NEG_INFINITY { 0.0 } else { max };
                let weight = pair.keep * (pair.logit - base).exp();
                self.acc
                    .slice_mut(s![b, i, h, ..])
                    .scaled_add(weight, &keys.v.slice(s![b, pair.j, dims.kv_head(h), ..]));
            }
        }
    }

    /// Adds the sinks, divides by the sum if the output is normalised, and returns lse.
    pub(crate) fn finish(&mut self) -> Array3<f64> {
        for [b, h, i] in self.every_row() {
            let sinks = self.sinks_of(h);
            self.rescale([b, h, i], &sinks);
            let sum = self.sum[[b, h, i]];
            if sum.is_nan() {
                self.max[[b, h, i]] = f64::NAN;
                self.ties[[b, h, i]] = 0.0;
                self.acc.slice_mut(s![b, i, h, ..]).fill(f64::NAN);
            } else if self.max[[b, h, i]] == f64::NEG_INFINITY {
                // the accumulator holds 0·v, which is NaN for an infinite v
                self.acc.slice_mut(s![b, i, h, ..]).fill(0.0);
            } else if self.shard.spec.normalize && sum != 0.0 {
                self.acc.slice_mut(s![b, i, h, ..]).mapv_inplace(|x| x / sum);
            }
        }
        &self.max + &self.sum.ln()
    }

    /// Adds logits to a row's maximum, sum and ties, rescales its accumulator to the new maximum,
    /// and returns that maximum.
    fn rescale(&mut self, [b, h, i]: [usize; 3], logits: &[f64]) -> f64 {
        let old = self.max[[b, h, i]];
        let larger =
            |max: f64, &logit: &f64| if logit > max || logit.is_nan() { logit } else { max };
        let max = logits.iter().fold(old, larger);
        if max == f64::NEG_INFINITY {
            return max;
        }
        let factor = if max == old { 1.0 } else { (old - max).exp() };
        let kept_ties = if max == old { self.ties[[b, h, i]] } else { 0.0 };
        self.max[[b, h, i]] = max;
        self.ties[[b, h, i]] =
            kept_ties + logits.iter().filter(|&&logit| logit == max).count() as f64;
        self.sum[[b, h, i]] = self.sum[[b, h, i]] * factor
            + logits.iter().map(|logit| (logit - max).exp()).sum::<f64>();
        self.acc.slice_mut(s![b, i, h, ..]).mapv_inplace(|x| x * factor);
        max
    }

    /// Computes the row statistics from the results of forward; sets dq and dbias to 0.
    pub(crate) fn begin_backward(
        &mut self,
        out: &Array4<f64>,
        max: &Array4<f64>,
        sum: Option<&Array4<f64>>,
        ties: Option<&Array4<f64>>,
        dlse: Option<&Array4<f64>>,
    ) {
        let Dims { batch, q_heads, .. } = self.shard.spec.dims;
        self.statistics =
            Array4::zeros((batch, self.shard.queries.len(), q_heads, Spec::ROW_STATISTICS));
        self.dq = Array4::zeros(self.q.raw_dim());
        self.dbias = self.bias.as_ref().map(|bias| Array4::zeros(bias.raw_dim()));
        for [b, h, i] in self.every_row() {
            let max = max[[b, h, i, 0]];
            if max == f64::NEG_INFINITY {
                let row = Array1::from_iter([f64::INFINITY, 0.0, 0.0, 0.0]);
                self.statistics.slice_mut(s![b, i, h, ..]).assign(&row);
                continue;
            }
            let inverse_sum = 1.0 / sum.map_or(1.0, |sum| sum[[b, h, i, 0]]);
            let dlse = dlse.map_or(0.0, |dlse| dlse[[b, h, i, 0]]);
            let dout_out = self.dout.slice(s![b, i, h, ..]).dot(&out.slice(s![b, i, h, ..]));
            let row = match ties {
                None => [max, inverse_sum, dout_out - dlse, 0.0],
                Some(ties) => [max, inverse_sum, -dlse, dout_out / ties[[b, h, i, 0]]],
            };
            self.statistics.slice_mut(s![b, i, h, ..]).assign(&Array1::from_iter(row));
        }
    }

    /// Adds one block's terms to dq and dbias of this rank's queries.
    pub(crate) fn backward_dq(&mut self, keys: &Keys<'_>) {
        let spec = &self.shard.spec;
        let mut dq = std::mem::take(&mut self.dq);
        let mut dbias = self.dbias.take();
        self.pair_gradients(&self.local_queries(), keys, |pair| {
            let PairGradient { at: [b, h, i, j], ds, dx, .. } = pair;
            let k = keys.k.slice(s![b, j, spec.dims.kv_head(h), ..]);
            dq.slice_mut(s![b, i, h, ..]).scaled_add(spec.scale * dx, &k);
            if let Some(dbias) = &mut dbias {
                let index = broadcast(
                    dbias.dim().into(),
                    [b, h, i, annulus_core::index(keys.rows.rows()[j])],
                );
                dbias[index] += if spec.bias_order == BiasOrder::BeforeSoftCap { dx } else { ds };
            }
        });
        self.dq = dq;
        self.dbias = dbias;
    }

    /// Returns dk and dv of a block from these queries.
    pub(crate) fn backward_dkv(&self, queries: &Queries<'_>, keys: &Keys<'_>) -> [Array4<f64>; 2] {
        let spec = &self.shard.spec;
        let mut dk = Array4::zeros(keys.k.raw_dim());
        let mut dv = Array4::zeros(keys.v.raw_dim());
        self.pair_gradients(queries, keys, |pair| {
            let PairGradient { at: [b, h, i, j], dx, weight, .. } = pair;
            let kv_head = spec.dims.kv_head(h);
            dk.slice_mut(s![b, j, kv_head, ..])
                .scaled_add(spec.scale * dx, &queries.q.slice(s![b, i, h, ..]));
            dv.slice_mut(s![b, j, kv_head, ..])
                .scaled_add(weight, &queries.dout.slice(s![b, i, h, ..]));
        });
        [dk, dv]
    }

    /// Returns the sum of dsinks over this rank's queries.
    pub(crate) fn dsinks(&self) -> Option<Array2<f64>> {
        let sinks = self.sinks.as_ref()?;
        let mut dsinks = Array2::zeros(sinks.raw_dim());
        for [b, h, i] in self.every_row() {
            let row = self.statistics.slice(s![b, i, h, ..]);
            let line = if sinks.nrows() == 1 { 0 } else { h };
            for (t, &sink) in
                sinks.row(line).iter().enumerate().filter(|(_, sink)| **sink != f64::NEG_INFINITY)
            {
                let through_max =
                    if !self.shard.spec.normalize && sink == row[0] { row[3] } else { 0.0 };
                dsinks[[line, t]] -= through_max + (sink - row[0]).exp() * row[1] * row[2];
            }
        }
        Some(dsinks)
    }

    /// Returns this rank's queries.
    pub(crate) fn local_queries(&self) -> Queries<'_> {
        Queries {
            rows: &self.shard.queries,
            q: &self.q,
            dout: &self.dout,
            statistics: &self.statistics,
        }
    }

    /// Calls `visit` for every visible pair of these queries and keys.
    fn pair_gradients(
        &self,
        queries: &Queries<'_>,
        keys: &Keys<'_>,
        mut visit: impl FnMut(PairGradient),
    ) {
        let spec = &self.shard.spec;
        for b in 0..spec.dims.batch {
            for h in 0..spec.dims.q_heads {
                for i in 0..queries.rows.len() {
                    let row = queries.statistics.slice(s![b, i, h, ..]);
                    let [max, inverse_sum, delta, share] = [row[0], row[1], row[2], row[3]];
                    let pairs = if max == f64::INFINITY {
                        Vec::new()
                    } else {
                        self.pairs(queries.rows, queries.q, keys, [b, h, i])
                    };
                    for pair in pairs {
                        let dout = queries.dout.slice(s![b, i, h, ..]);
                        let dp = pair.keep
                            * dout.dot(&keys.v.slice(s![b, pair.j, spec.dims.kv_head(h), ..]));
                        let e = (pair.logit - max).exp();
                        let p = e * inverse_sum;
                        let (ds, weight) = if spec.normalize {
                            (p * (dp - delta), p)
                        } else {
                            (e * dp - if pair.logit == max { share } else { 0.0 } - p * delta, e)
                        };
                        visit(PairGradient {
                            at: [b, h, i, pair.j],
                            ds,
                            dx: ds * pair.slope,
                            weight: pair.keep * weight,
                        });
                    }
                }
            }
        }
    }

    /// Returns the visible pairs of one query with a block.
    fn pairs(
        &self,
        rows: &Rows,
        q: &Array4<f64>,
        keys: &Keys<'_>,
        [b, h, i]: [usize; 3],
    ) -> Vec<Pair> {
        let spec = &self.shard.spec;
        let visibility = self.shard.visibility(rows, keys.rows);
        let query =
            Query { batch: b, head: h, row: rows.rows()[i], position: rows.positions(b)[i] };
        let one = |j: usize| {
            if !visibility.pair(b, h, i, j) {
                return None;
            }
            let key = Key { row: keys.rows.rows()[j], position: keys.rows.positions(b)[j] };
            let bias = self.bias(&query, &key, i)?;
            let dot =
                q.slice(s![b, i, h, ..]).dot(&keys.k.slice(s![b, j, spec.dims.kv_head(h), ..]));
            let (logit, slope) = logit(spec, dot, bias);
            let (head, q_heads) = spec.whole_head(h);
            let keep = spec.dropout.map(DropoutMask::new).map_or(1.0, |mask| {
                if mask.keep(b, head, q_heads, query.row, key.row) {
                    mask.keep_scale()
                } else {
                    0.0
                }
            });
            Some(Pair { j, logit, slope, keep })
        };
        (0..keys.rows.len()).filter_map(one).collect()
    }

    fn bias(&self, query: &Query, key: &Key, i: usize) -> Option<f64> {
        let index = [query.batch, query.head, i, annulus_core::index(key.row)];
        let tensor =
            self.bias.as_ref().map_or(0.0, |bias| bias[broadcast(bias.dim().into(), index)]);
        let computed = self
            .shard
            .spec
            .bias_function
            .as_ref()
            .map_or(0.0, |function| function.bias(query, key));
        (tensor != f64::NEG_INFINITY && computed != f64::NEG_INFINITY).then_some(tensor + computed)
    }

    fn sinks_of(&self, h: usize) -> Vec<f64> {
        let Some(sinks) = &self.sinks else { return Vec::new() };
        let line: ArrayView1<'_, f64> = sinks.row(if sinks.nrows() == 1 { 0 } else { h });
        line.iter().copied().filter(|&sink| sink != f64::NEG_INFINITY).collect()
    }

    fn every_row(&self) -> impl Iterator<Item = [usize; 3]> + use<> {
        let Dims { batch, q_heads, .. } = self.shard.spec.dims;
        let rows = self.shard.queries.len();
        (0..batch * q_heads * rows)
            .map(move |n| [n / (q_heads * rows), n / rows % q_heads, n % rows])
    }
}

/// Returns s and ∂s/∂x of one pair.
fn logit(spec: &Spec, dot: f64, bias: f64) -> (f64, f64) {
    let sums = spec.dtype.accumulator();
    let x = spec.scale * if spec.logits_dtype == sums { dot } else { spec.logits_dtype.round(dot) };
    let (before, after) =
        if spec.bias_order == BiasOrder::BeforeSoftCap { (bias, 0.0) } else { (0.0, bias) };
    let (capped, slope) = spec.soft_cap.map_or((x + before, 1.0), |cap| {
        let tanh = ((x + before) / cap).tanh();
        (cap * tanh, 1.0 - tanh * tanh)
    });
    (sums.round(capped + after), slope)
}

fn broadcast(shape: [usize; 4], index: [usize; 4]) -> [usize; 4] {
    std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { index[axis] })
}

/// Unpacks the fields of `rows` rows of a block, each `[b, rows, heads, dim]`.
pub(crate) fn unpack(
    record: &RowLayout,
    batch: usize,
    rows: usize,
    bytes: &[u8],
) -> Result<Vec<Array4<f64>>> {
    let number = |field: usize, dtype: DType, [b, row, head, x]: [usize; 4]| {
        let at = annulus_core::index(row as u64 * record.bytes() + record.offset(field, b, head))
            + x * dtype.bytes();
        bytes
            .get(at..at + dtype.bytes())
            .map(|bytes| decode(dtype, bytes))
            .ok_or_else(|| fault("a block with too few records"))
    };
    let fields = record.fields().iter().enumerate();
    fields
        .map(|(index, field)| {
            let mut array = Array4::zeros((batch, rows, field.heads, field.dim));
            for (at, element) in array.indexed_iter_mut() {
                *element = number(index, field.dtype, at.into())?;
            }
            Ok(array)
        })
        .collect()
}

/// Packs these fields as the rows of a block, in shard order.
pub(crate) fn pack(record: &RowLayout, rows: usize, fields: &[&Array4<f64>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in 0..rows {
        for (field, array) in record.fields().iter().zip(fields) {
            array
                .slice(s![.., row, .., ..])
                .iter()
                .for_each(|&number| encode(number, field.dtype, &mut bytes));
        }
    }
    bytes
}
