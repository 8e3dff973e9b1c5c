//! Forward pass of one query: scores, softmax statistics and output.
//!
//! Dropout of the oracle, implemented independently of the backends' [`crate::DropoutMask`].
//!
//! The probability of a pair (i, j) is dropped if and only if word j mod 4 of the output of
//! Philox4×32-10 is less than ⌊p·2³²⌋, with
//!
//! ```text
//! key       seed low, seed high
//! counter   i low, ⌊j/4⌋ low, (i high)·2¹⁶ + (⌊j/4⌋ high), b·q_heads + h
//! ```

use ndarray::Array1;

use crate::{
    Alignment, Batch, BiasOrder, Dims, Dropout, ListedKeys, Result, Spec,
    mask::{Key, Query},
    oracle::{Problem, vector},
};

/// Results of one query row.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// `[dv]`.
    pub out: Array1<f64>,
    /// Natural logarithm; −∞ without visible keys and sinks.
    pub lse: f64,
    /// Maximum of the scores, including sinks.
    pub max: f64,
    /// Σ e^{s − max}, including sinks.
    pub sum: f64,
    /// Number of keys and sinks whose score is the maximum.
    pub ties: f64,
    /// max_product, max_score and entropy: see [`crate::Spec::SCORE_STATISTICS`].
    pub statistics: [f64; 3],
}

/// One visible pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    /// Key row.
    pub(super) j: usize,
    /// Column of the bias tensor: the key row or, of a table, the entry.
    pub(super) bias_column: usize,
    /// scale·q·k, before bias and soft cap.
    product: f64,
    /// s_ij.
    pub(super) score: f64,
    /// The argument of the soft cap: x_ij, with the bias if it is added before the cap.
    pub(super) uncapped: f64,
    /// ∂s_ij/∂x_ij with x = scale·q·k: 1, or 1 − tanh² with a soft cap.
    pub(super) soft_cap_slope: f64,
    /// 1/(1 − p), or 0 if the pair is dropped; 1 without dropout.
    pub(super) keep: f64,
}

/// Scores and softmax statistics of one row.
#[derive(Debug)]
pub(super) struct Softmax {
    /// Batch row, query head, query row.
    pub(super) at: (usize, usize, usize),
    /// Visible pairs; none if the maximum is −∞.
    pub(super) pairs: Vec<Pair>,
    /// `(t, a_t)` of the sinks that are not −∞.
    pub(super) sinks: Vec<(usize, f64)>,
    pub(super) max: f64,
    pub(super) sum: f64,
    pub(super) ties: f64,
}

/// Computes rows of one problem.
pub(super) struct Rows<'p, 'a> {
    problem: &'p Problem<'a>,
    visibility: PairVisibility<'p>,
}

impl<'p, 'a> Rows<'p, 'a> {
    pub(super) fn new(problem: &'p Problem<'a>) -> Result<Self> {
        Ok(Self { problem, visibility: problem.visibility()? })
    }

    pub(super) fn row(&self, b: usize, h: usize, i: usize) -> Softmax {
        let pairs: Vec<Pair> =
            (0..self.problem.spec.dims.kv_len).filter_map(|j| self.pair(b, h, i, j)).collect();
        let sinks = self.problem.sinks_of(h);
        let scores =
            || pairs.iter().map(|pair| pair.score).chain(sinks.iter().map(|&(_, sink)| sink));
        // NaN is absorbing: no later score is larger than it
        let max = scores().fold(f64::NEG_INFINITY, |max, score| {
            if score > max || score.is_nan() { score } else { max }
        });
        // e^{∞ − ∞} is undefined
        let max = if max == f64::INFINITY { f64::NAN } else { max };
        if max == f64::NEG_INFINITY {
            return Softmax {
                at: (b, h, i),
                pairs: Vec::new(),
                sinks: Vec::new(),
                max,
                sum: 0.0,
                ties: 0.0,
            };
        }
        let sum = scores().map(|score| (score - max).exp()).sum();
        let ties = scores().filter(|&score| score == max).count() as f64;
        Softmax { at: (b, h, i), pairs, sinks, max, sum, ties }
    }

    /// Computes one pair; `None` if it is masked.
    fn pair(&self, b: usize, h: usize, i: usize, j: usize) -> Option<Pair> {
        let Problem { spec, q, k, .. } = self.problem;
        if !self.visibility.visible(b, h, i, j) {
            return None;
        }
        let (bias, bias_column) = self.bias(b, h, i, j)?;
        let dot = vector(q, [b, i, h]).dot(&vector(k, [b, j, spec.dims.kv_head(h)]));
        let product = if spec.logits_dtype == spec.dtype.accumulator() {
            dot
        } else {
            spec.logits_dtype.round(dot)
        };
        let x = spec.scale * product;
        let (before, after) = match spec.bias_order {
            BiasOrder::BeforeSoftCap => (bias, 0.0),
            BiasOrder::AfterSoftCap => (0.0, bias),
        };
        let (capped, soft_cap_slope) = match spec.soft_cap {
            None => (x + before, 1.0),
            Some(cap) => {
                let tanh = ((x + before) / cap).tanh();
                (cap * tanh, 1.0 - tanh * tanh)
            }
        };
        let keep = match spec.dropout {
            None => 1.0,
            Some(dropout) if dropped(&spec.dims, dropout, b, h, i, j) => 0.0,
            Some(dropout) => 1.0 / (1.0 - dropout.probability),
        };
        let score = capped + after;
        Some(Pair { j, bias_column, product: x, score, uncapped: x + before, soft_cap_slope, keep })
    }

    /// Returns bias tensor + bias function, and the column of the tensor; `None` if either is −∞,
    /// which masks the pair.
    fn bias(&self, b: usize, h: usize, i: usize, j: usize) -> Option<(f64, usize)> {
        let query = self.visibility.query(b, h, i)?;
        let key = self.visibility.key(b, j)?;
        let table = self.problem.spec.bias_table.as_ref();
        let column = table.map_or(j, |table| table.index(query.position, key.position));
        let tensor = self
            .problem
            .bias
            .as_ref()
            .map_or(0.0, |bias| bias[broadcast(bias.dim().into(), [b, h, i, column])]);
        let function = self.problem.spec.bias_function.as_ref();
        let computed = function.map_or(0.0, |function| function.bias(&query, &key));
        (tensor != f64::NEG_INFINITY && computed != f64::NEG_INFINITY)
            .then_some((tensor + computed, column))
    }
}

impl Softmax {
    /// Returns e^{s − m}, the unnormalised probability of a score of this row.
    pub(super) fn unnormalised(&self, score: f64) -> f64 {
        (score - self.max).exp()
    }

    /// Computes `out`, normalised if the spec requires it.
    pub(super) fn out(&self, problem: &Problem<'_>) -> Array1<f64> {
        let (b, h, _) = self.at;
        let dims = &problem.spec.dims;
        let mut out = Array1::zeros(dims.value_dim);
        for pair in &self.pairs {
            out.scaled_add(
                pair.keep * self.unnormalised(pair.score),
                &vector(&problem.v, [b, pair.j, dims.kv_head(h)]),
            );
        }
        if self.sum.is_nan() {
            // also for a row with sinks and without visible keys
            return Array1::from_elem(dims.value_dim, f64::NAN);
        }
        // a row without scores has the sum 0 and the output 0
        if problem.spec.normalize && self.sum != 0.0 { out / self.sum } else { out }
    }

    pub(super) fn finish(&self, problem: &Problem<'_>) -> Row {
        Row {
            out: self.out(problem),
            lse: self.max + self.sum.ln(),
            max: self.max,
            sum: self.sum,
            ties: self.ties,
            statistics: self.statistics(),
        }
    }

    /// Computes the largest product, the largest score of a key, and −Σ p·ln p over keys and sinks.
    fn statistics(&self) -> [f64; 3] {
        if self.sum.is_nan() {
            return [f64::NAN; 3];
        }
        let largest =
            |of: fn(&Pair) -> f64| self.pairs.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        let scores = self.pairs.iter().map(|pair| pair.score);
        let entropy: f64 = scores
            .chain(self.sinks.iter().map(|&(_, sink)| sink))
            .map(|score| self.unnormalised(score) / self.sum)
            .filter(|&p| p > 0.0)
            .map(|p| -p * p.ln())
            .sum();
        [largest(|pair| pair.product), largest(|pair| pair.score), entropy]
    }
}

impl Problem<'_> {
    /// Returns `(t, a_t)` of the head's sinks; a sink of −∞ is omitted, as if it did not exist.
    fn sinks_of(&self, h: usize) -> Vec<(usize, f64)> {
        let Some(sinks) = &self.sinks else { return Vec::new() };
        let of_head = sinks.row(if sinks.nrows() == 1 { 0 } else { h });
        of_head.iter().copied().enumerate().filter(|&(_, sink)| sink != f64::NEG_INFINITY).collect()
    }
}

/// Returns the index of an element in a tensor whose axes of length 1 are broadcast.
pub(super) fn broadcast(shape: [usize; 4], index: [usize; 4]) -> [usize; 4] {
    std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { index[axis] })
}

/// Returns true if the probability of query row `i` and key row `j` is dropped.
pub(super) fn dropped(
    dims: &Dims,
    dropout: Dropout,
    b: usize,
    h: usize,
    i: usize,
    j: usize,
) -> bool {
    let i = i as u64;
    let quad = j as u64 / 4;
    let key = [low(dropout.seed), high(dropout.seed)];
    let counter =
        [low(i), low(quad), (high(i) << 16) + high(quad), low((b * dims.q_heads + h) as u64)];
    f64::from(philox(counter, key)[j % 4]) < (dropout.probability * 2f64.powi(32)).floor()
}

/// Computes Philox4×32 with ten rounds.
///
/// # Source
/// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the constants are those of
/// its library, Random123.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = 0xD251_1F53 * u64::from(counter[0]);
        let second = 0xCD9E_8D57 * u64::from(counter[2]);
        counter = [
            high(second) ^ counter[1] ^ key[0],
            low(second),
            high(first) ^ counter[3] ^ key[1],
            low(first),
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[expect(clippy::cast_possible_truncation, reason = "returns the lower half")]
const fn low(number: u64) -> u32 {
    number as u32
}

const fn high(number: u64) -> u32 {
    low(number >> 32)
}

/// Properties of one row on which visibility depends.
#[derive(Debug, Clone, Copy)]
struct RowProperties {
    position: i64,
    /// `None` without segment ids.
    segment: Option<i32>,
    /// Index of the packed sequence; `None` without packing, `Some(None)` for padding after the
    /// last sequence.
    sequence: Option<Option<usize>>,
}

/// Visible pairs of one problem, computed pair by pair.
#[derive(Debug)]
pub struct PairVisibility<'a> {
    spec: &'a Spec,
    batch: &'a Batch,
    /// `[batch][row]`.
    queries: Vec<Vec<RowProperties>>,
    /// `[batch][row]`.
    keys: Vec<Vec<RowProperties>>,
}

impl<'a> PairVisibility<'a> {
    pub(super) fn new(spec: &'a Spec, batch: &'a Batch) -> Self {
        // ids or packed lengths given for one side only are used for both
        let query_ids = batch.q_segment_ids.as_ref().or(batch.kv_segment_ids.as_ref());
        let key_ids = batch.kv_segment_ids.as_ref().or(batch.q_segment_ids.as_ref());
        let query_lens = batch.cum_seqlens_q.as_ref().or(batch.cum_seqlens_k.as_ref());
        let key_lens = batch.cum_seqlens_k.as_ref().or(batch.cum_seqlens_q.as_ref());
        let dims = &spec.dims;

        let query = |b: usize, row: usize| {
            let sequence = query_lens.map(|lens| sequence_of(lens, row as i64));
            let aligned = match (sequence, query_lens, key_lens) {
                (Some(Some(s)), Some(queries), Some(keys)) => {
                    let within = row as i64 - queries[s];
                    within
                        + shift(spec.alignment, queries[s + 1] - queries[s], keys[s + 1] - keys[s])
                }
                _ => row as i64 + shift(spec.alignment, dims.q_len as i64, dims.kv_len as i64),
            };
            let position =
                batch.q_positions.as_ref().map_or(aligned, |positions| positions[[b, row]]);
            RowProperties { position, segment: query_ids.map(|ids| ids[[b, row]]), sequence }
        };
        let key = |b: usize, row: usize| {
            let sequence = key_lens.map(|lens| sequence_of(lens, row as i64));
            let own = match (sequence, key_lens) {
                (Some(Some(s)), Some(lens)) => row as i64 - lens[s],
                _ => row as i64,
            };
            let position = batch.kv_positions.as_ref().map_or(own, |positions| positions[[b, row]]);
            RowProperties { position, segment: key_ids.map(|ids| ids[[b, row]]), sequence }
        };
        Self {
            spec,
            batch,
            queries: (0..dims.batch)
                .map(|b| (0..dims.q_len).map(|row| query(b, row)).collect())
                .collect(),
            keys: (0..dims.batch)
                .map(|b| (0..dims.kv_len).map(|row| key(b, row)).collect())
                .collect(),
        }
    }

    /// Returns the query as passed to masks and bias functions; `None` if there is no such row.
    pub fn query(&self, batch: usize, head: usize, row: usize) -> Option<Query> {
        let properties = self.queries.get(batch)?.get(row)?;
        (head < self.spec.dims.q_heads).then_some(Query {
            batch,
            head,
            row: row as u64,
            position: properties.position,
        })
    }

    /// Returns the key as passed to masks and bias functions; `None` if there is no such row.
    pub fn key(&self, batch: usize, row: usize) -> Option<Key> {
        let properties = self.keys.get(batch)?.get(row)?;
        Some(Key { row: row as u64, position: properties.position })
    }

    /// Returns true if query row `i` attends to key row `j` by the mask, the segment ids, the
    /// packed sequences, the dense mask and the key lists together. Returns false for rows that do
    /// not exist. A bias of −∞, which also masks a pair, is not considered.
    pub fn visible(&self, batch: usize, head: usize, i: usize, j: usize) -> bool {
        let (Some(query), Some(key)) = (self.query(batch, head, i), self.key(batch, j)) else {
            return false;
        };
        let of_query = &self.queries[batch][i];
        let of_key = &self.keys[batch][j];
        let by_mask = self.spec.mask.visible(&query, &key);
        let by_segment =
            of_query.segment == of_key.segment && of_query.segment.is_none_or(|id| id >= 0);
        let by_sequence = of_query.sequence == of_key.sequence && of_query.sequence != Some(None);
        let by_dense =
            self.batch.attention_mask.as_ref().is_none_or(|mask| mask.visible(batch, head, i, j));
        let by_list = self.batch.key_lists.as_deref().is_none_or(|lists| {
            let listed = ListedKeys::new(lists, self.spec.dims.q_heads);
            listed.keys(batch, head, i).iter().any(|&key| key as usize == j)
        });
        by_mask && by_segment && by_sequence && by_dense && by_list
    }
}

/// Returns the difference between a query's position and its row number in the sequence.
const fn shift(alignment: Alignment, q_len: i64, kv_len: i64) -> i64 {
    match alignment {
        Alignment::TopLeft => 0,
        Alignment::BottomRight => kv_len - q_len,
    }
}

/// Returns the packed sequence that contains `row`; `None` after the last.
fn sequence_of(lens: &[i64], row: i64) -> Option<usize> {
    lens.windows(2).position(|pair| pair[0] <= row && row < pair[1])
}
