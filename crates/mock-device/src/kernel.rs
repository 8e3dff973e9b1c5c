//! Attention pair by pair in f64: the arithmetic of the mock device, on numbers and on
//! the bytes of blocks.
//!
//! ```text
//! forward    acc ← acc·e^{m − m'} + Σ_j keep·e^{s_j − m'}·v_j
//!            ℓ ← ℓ·e^{m − m'} + Σ_j e^{s_j − m'}
//! backward   ds = p·(dp − delta)    dx = ds·∂s/∂x    dq += scale·dx·k    dk += scale·dx·q
//! ```
//! Logits are rounded to the accumulator's type, so that an unnormalised backward finds the same
//! row maximum as forward.

use annulus_core::{
    BackwardInputs, BiasOrder, DType, Dims, DropoutMask, Element, Error, Gradients, Inputs,
    Outputs, RangePairs, RankShard, Reduction, Result, RowLayout, Rows, Spec, index,
    mask::{Key, Query},
};
use half::{bf16, f16};
use ndarray::{Array1, Array3, Array4, Axis, s};

/// The data of a pass that stay on the device over all ring steps.
pub(crate) struct State {
    shard: RankShard,
    inputs: Inputs<Array4<f64>>,
    /// Accumulator, `[b, shard q_len, q_heads, dv]`.
    acc: Array4<f64>,
    /// Row maximum, `[b, q_heads, shard q_len]`; sum and ties have the same shape.
    max: Array3<f64>,
    sum: Array3<f64>,
    ties: Array3<f64>,
    dout: Array4<f64>,
    /// `[b, shard q_len, q_heads, 4]`: see [`Spec::ROW_STATISTICS`].
    statistics: Array4<f64>,
    dq: Array4<f64>,
    dbias: Option<Array4<f64>>,
}

/// A block of keys `[b, rows, kv_heads, d]` and values `[b, rows, kv_heads, dv]`, unpacked.
struct Keys<'a> {
    rows: &'a Rows,
    k: Array4<f64>,
    v: Array4<f64>,
}

/// Queries of a backward pass: those of this rank, or a block of another's.
struct Queries<'a> {
    rows: &'a Rows,
    q: &'a Array4<f64>,
    dout: &'a Array4<f64>,
    statistics: &'a Array4<f64>,
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
        Self {
            shard,
            inputs: Inputs::default(),
            acc: Default::default(),
            max: Default::default(),
            sum: Default::default(),
            ties: Default::default(),
            dout: Default::default(),
            statistics: Default::default(),
            dq: Default::default(),
            dbias: None,
        }
    }

    /// Returns the bytes of its arrays.
    pub(crate) fn bytes(&self) -> u64 {
        let Self { inputs, acc, max, sum, ties, dout, statistics, dq, dbias, .. } = self;
        let arrays = inputs.as_ref().into_tensors().chain([acc, dout, statistics, dq]).chain(dbias);
        let rows = [max, sum, ties].map(Array3::len);
        (arrays.map(Array4::len).chain(rows).sum::<usize>() * size_of::<f64>()) as u64
    }

    /// Starts a forward pass: resets the accumulator and the softmax statistics.
    pub(crate) fn begin(&mut self, inputs: Inputs<Array4<f64>>) {
        let Dims { batch, q_heads, value_dim, .. } = self.shard.spec.dims;
        let rows = self.shard.queries.len();
        self.inputs = inputs;
        self.acc = Array4::zeros((batch, rows, q_heads, value_dim));
        self.max = Array3::from_elem((batch, q_heads, rows), f64::NEG_INFINITY);
        self.sum = Array3::zeros((batch, q_heads, rows));
        self.ties = Array3::zeros((batch, q_heads, rows));
    }

    /// Returns the local keys and values as records.
    pub(crate) fn packed_kv(&self) -> Vec<u8> {
        pack(&self.shard.spec.kv_row_layout(), &[&self.inputs.k, &self.inputs.v])
    }

    /// Returns the local queries as records of a two-pass backward.
    pub(crate) fn packed_queries(&self) -> Vec<u8> {
        let fields = [&self.inputs.q, &self.dout, &self.statistics];
        pack(&self.shard.spec.query_row_layout(), &fields)
    }

    /// Adds one KV block to the online softmax.
    pub(crate) fn attend(&mut self, rows: &Rows, records: &[u8]) -> Result<()> {
        let keys = &self.keys(rows, records)?;
        let dims = self.shard.spec.dims;
        for [b, h, i] in self.every_row() {
            let pairs = self.pairs(&self.shard.queries, &self.inputs.q, keys, [b, h, i]);
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
        Ok(())
    }

    /// Adds the sinks, divides by the sum if the output is normalised, and returns all outputs.
    pub(crate) fn finish(&mut self) -> Outputs<Array4<f64>> {
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
        let dtype = self.shard.spec.dtype;
        let residual = |exact: f64| {
            let rounded = dtype.round(exact);
            if rounded.is_finite() { exact - rounded } else { 0.0 }
        };
        let statistic = |of: &Array3<f64>| of.clone().insert_axis(Axis(3));
        Outputs {
            out: self.acc.clone(),
            lse: statistic(&(&self.max + &self.sum.ln())),
            max: Some(statistic(&self.max)),
            sum: Some(statistic(&self.sum)),
            ties: Some(statistic(&self.ties)),
            out_residual: Some(self.acc.mapv(residual)),
            statistics: None,
            head_statistics: None,
        }
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

    /// Starts a backward pass: computes the row statistics from the results of forward.
    pub(crate) fn begin_backward(&mut self, inputs: BackwardInputs<Array4<f64>>) {
        let BackwardInputs { forward, mut out, max, sum, ties, out_residual, dout, dlse } = inputs;
        let Dims { batch, q_heads, .. } = self.shard.spec.dims;
        if let Some(residual) = out_residual {
            out += &residual;
        }
        self.statistics =
            Array4::zeros((batch, self.shard.queries.len(), q_heads, Spec::ROW_STATISTICS));
        self.dq = Array4::zeros(forward.q.raw_dim());
        self.dbias = forward.bias.as_ref().map(|bias| Array4::zeros(bias.raw_dim()));
        self.inputs = forward;
        self.dout = dout;
        for [b, h, i] in self.every_row() {
            let max = max[[b, h, i, 0]];
            if max == f64::NEG_INFINITY {
                let row = Array1::from_iter([f64::INFINITY, 0.0, 0.0, 0.0]);
                self.statistics.slice_mut(s![b, i, h, ..]).assign(&row);
                continue;
            }
            let inverse_sum = 1.0 / sum.as_ref().map_or(1.0, |sum| sum[[b, h, i, 0]]);
            let dlse = dlse.as_ref().map_or(0.0, |dlse| dlse[[b, h, i, 0]]);
            let dout_out = self.dout.slice(s![b, i, h, ..]).dot(&out.slice(s![b, i, h, ..]));
            let row = match &ties {
                None => [max, inverse_sum, dout_out - dlse, 0.0],
                Some(ties) => [max, inverse_sum, -dlse, dout_out / ties[[b, h, i, 0]]],
            };
            self.statistics.slice_mut(s![b, i, h, ..]).assign(&Array1::from_iter(row));
        }
    }

    /// Adds one block's terms to dq and dbias of this rank's queries.
    pub(crate) fn attend_kv(&mut self, rows: &Rows, records: &[u8]) -> Result<()> {
        let keys = &self.keys(rows, records)?;
        let spec = &self.shard.spec;
        let mut dq = std::mem::take(&mut self.dq);
        let mut dbias = self.dbias.take();
        self.pair_gradients(&self.local_queries(), keys, |pair| {
            let PairGradient { at: [b, h, i, j], ds, dx, .. } = pair;
            let k = keys.k.slice(s![b, j, spec.dims.kv_head(h), ..]);
            dq.slice_mut(s![b, i, h, ..]).scaled_add(spec.scale * dx, &k);
            if let Some(dbias) = &mut dbias {
                let at = broadcast(dbias.dim().into(), [b, h, i, index(keys.rows.rows()[j])]);
                dbias[at] += if spec.bias_order == BiasOrder::BeforeSoftCap { dx } else { ds };
            }
        });
        self.dq = dq;
        self.dbias = dbias;
        Ok(())
    }

    /// Returns dk and dv of one block from this rank's queries, as records.
    pub(crate) fn packed_dkv(&self, rows: &Rows, records: &[u8]) -> Result<Vec<u8>> {
        let dkv = self.dkv(&self.local_queries(), &self.keys(rows, records)?);
        Ok(pack(&self.shard.spec.gradient_row_layout(), &dkv.each_ref()))
    }

    /// Adds the terms of a block of queries to the records `dkv` of all local keys.
    pub(crate) fn attend_queries(&self, rows: &Rows, records: &[u8], dkv: &mut [u8]) -> Result<()> {
        let Self { shard, inputs, .. } = self;
        let Inputs { k, v, .. } = inputs.clone();
        let [q, dout, statistics] =
            &self.unpack(&shard.spec.query_row_layout(), rows.len(), records)?;
        let keys = Keys { rows: &shard.keys, k, v };
        let [dk, dv] = self.dkv(&Queries { rows, q, dout, statistics }, &keys);
        let layout = shard.spec.gradient_row_layout();
        let [old_dk, old_dv] = self.unpack(&layout, shard.keys.len(), dkv)?;
        let sums = pack(&layout, &[&(old_dk + dk), &(old_dv + dv)]);
        dkv[..sums.len()].copy_from_slice(&sums);
        Ok(())
    }

    /// Copies or adds gradient records.
    pub(crate) fn reduce(
        &self,
        into: &mut [u8],
        from: &[u8],
        pairs: &RangePairs,
        reduction: Reduction,
    ) -> Result<()> {
        let layout = self.shard.spec.gradient_row_layout();
        let record = index(layout.bytes());
        for (to, source) in pairs {
            let [to, source] = [to, source].map(|of| index(of.start)..index(of.end));
            let bytes = |of: std::ops::Range<usize>| of.start * record..of.end * record;
            let (rows, source_rows) = (to.len(), source.len());
            let source = from.get(bytes(source)).filter(|_| source_rows == rows);
            let (Some(new), Some(old)) = (source, into.get_mut(bytes(to))) else {
                return Err(Error::internal("records past the end, or other rows than records"));
            };
            let [mut dk, mut dv] = self.unpack(&layout, rows, new)?;
            if reduction == Reduction::Add {
                let [old_dk, old_dv] = self.unpack(&layout, rows, old)?;
                dk += &old_dk;
                dv += &old_dv;
            }
            old.copy_from_slice(&pack(&layout, &[&dk, &dv]));
        }
        Ok(())
    }

    /// Returns the gradients; `dkv` has records of all local keys.
    pub(crate) fn gradients(&self, dkv: &[u8]) -> Result<Gradients<Array4<f64>>> {
        let layout = self.shard.spec.gradient_row_layout();
        let [dk, dv] = self.unpack(&layout, self.shard.keys.len(), dkv)?;
        let dsinks = self.dsinks();
        Ok(Gradients { dq: self.dq.clone(), dk, dv, dbias: self.dbias.clone(), dsinks })
    }

    /// Returns dk and dv of a block from these queries.
    fn dkv(&self, queries: &Queries<'_>, keys: &Keys<'_>) -> [Array4<f64>; 2] {
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
    fn dsinks(&self) -> Option<Array4<f64>> {
        let sinks = self.inputs.sinks.as_ref()?;
        let mut dsinks = Array4::zeros(sinks.raw_dim());
        for [b, h, i] in self.every_row() {
            let row = self.statistics.slice(s![b, i, h, ..]);
            let line = if sinks.dim().0 == 1 { 0 } else { h };
            for (t, sink) in (0..).zip(sinks.slice(s![line, .., 0, 0])) {
                if *sink == f64::NEG_INFINITY {
                    continue;
                }
                let through_max =
                    if !self.shard.spec.normalize && *sink == row[0] { row[3] } else { 0.0 };
                dsinks[[line, t, 0, 0]] -= through_max + (sink - row[0]).exp() * row[1] * row[2];
            }
        }
        Some(dsinks)
    }

    /// Returns this rank's queries.
    fn local_queries(&self) -> Queries<'_> {
        Queries {
            rows: &self.shard.queries,
            q: &self.inputs.q,
            dout: &self.dout,
            statistics: &self.statistics,
        }
    }

    /// Unpacks a block of keys and values.
    fn keys<'a>(&self, rows: &'a Rows, records: &[u8]) -> Result<Keys<'a>> {
        let [k, v] = self.unpack(&self.shard.spec.kv_row_layout(), rows.len(), records)?;
        Ok(Keys { rows, k, v })
    }

    /// Unpacks the `N` fields of `rows` records, each `[b, rows, heads, dim]`.
    fn unpack<const N: usize>(
        &self,
        layout: &RowLayout,
        rows: usize,
        records: &[u8],
    ) -> Result<[Array4<f64>; N]> {
        let fields = layout.fields();
        let batch = self.shard.spec.dims.batch;
        let record = index(layout.bytes());
        if fields.len() != N || records.len() < rows * record {
            return Err(Error::internal("a block with too few records or fields"));
        }
        Ok(std::array::from_fn(|number| {
            let field = &fields[number];
            let size = field.dtype.bytes();
            Array4::from_shape_fn((batch, rows, field.heads, field.dim), |(b, row, head, x)| {
                let at = row * record + index(layout.offset(number, b, head)) + x * size;
                decode(field.dtype, &records[at..at + size])
            })
        }))
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
        let at = [query.batch, query.head, i, index(key.row)];
        let tensor =
            self.inputs.bias.as_ref().map_or(0.0, |bias| bias[broadcast(bias.dim().into(), at)]);
        let computed = self
            .shard
            .spec
            .bias_function
            .as_ref()
            .map_or(0.0, |function| function.bias(query, key));
        (tensor != f64::NEG_INFINITY && computed != f64::NEG_INFINITY).then_some(tensor + computed)
    }

    fn sinks_of(&self, h: usize) -> Vec<f64> {
        let Some(sinks) = &self.inputs.sinks else { return Vec::new() };
        let line = if sinks.dim().0 == 1 { 0 } else { h };
        let line = sinks.slice(s![line, .., 0, 0]);
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

/// Packs these fields `[b, rows, heads, dim]` as records.
fn pack(layout: &RowLayout, fields: &[&Array4<f64>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in 0..fields[0].dim().1 {
        for (field, array) in layout.fields().iter().zip(fields) {
            let numbers = array.slice(s![.., row, .., ..]);
            numbers.iter().for_each(|&number| encode(number, field.dtype, &mut bytes));
        }
    }
    bytes
}

/// Rounds a number and appends its bytes.
pub fn encode(number: f64, dtype: DType, into: &mut Vec<u8>) {
    match dtype {
        DType::F64 => into.extend(number.to_ne_bytes()),
        DType::F32 => into.extend(<f32 as Element>::from_f64(number).to_ne_bytes()),
        DType::Bf16 => into.extend(<bf16 as Element>::from_f64(number).to_ne_bytes()),
        DType::F16 => into.extend(<f16 as Element>::from_f64(number).to_ne_bytes()),
    }
}

/// Widens the number in these bytes, of which there are as many as it has.
pub fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    fn read<T: Element>(bytes: &[u8]) -> f64 {
        bytemuck::pod_read_unaligned::<T>(bytes).to_f64()
    }
    match dtype {
        DType::F64 => read::<f64>(bytes),
        DType::F32 => read::<f32>(bytes),
        DType::Bf16 => read::<bf16>(bytes),
        DType::F16 => read::<f16>(bytes),
    }
}
