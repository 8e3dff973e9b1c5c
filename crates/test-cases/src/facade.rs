//! A case computed by the facade: its options, its tensors, and its results.

use std::sync::Arc;

use annulus::{Attention, Backward, Forward, LocalRing, Plan, Report, Tensors};
use annulus_core::{Batch, DType, Element, Error, KeyLists, Result, Runs, index};
use half::{bf16, f16};
use ndarray::{Array, Array2, Array3, Array4, ArrayView3, ArrayView4, Axis, Dimension};

use crate::{Answer, Case, Masks};

/// Returns the options of a case, as a user sets them.
pub fn attention(case: &Case) -> Attention {
    let spec = &case.spec;
    let attention = Attention::new()
        .dtype(spec.dtype)
        .align(spec.alignment)
        .softmax_scale(spec.scale)
        .logits_soft_cap(spec.soft_cap)
        .bias(spec.bias)
        .bias_order(spec.bias_order)
        .softmax_aux(spec.sinks)
        .logits_dtype(spec.logits_dtype)
        .precision(spec.precision)
        .backward_mode(spec.backward)
        .unnormalized(!spec.normalize)
        .statistics(spec.statistics)
        .reproducible(spec.leaf_rows.is_some());
    let attention = match &spec.bias_table {
        Some(table) => attention.bias(None).bias_table(table.clone()),
        None => attention,
    };
    let attention = match &spec.bias_function {
        Some(function) => attention.bias_function(Arc::clone(function)),
        None => attention,
    };
    let attention = match spec.dropout {
        Some(dropout) => attention.dropout(dropout.probability, dropout.seed),
        None => attention,
    };
    masked(attention, &case.masks)
}

/// Sets the masks of a case as options.
fn masked(attention: Attention, masks: &Masks) -> Attention {
    let [left, right] = masks.window.unwrap_or_default();
    // an attention sink size without a window is refused
    let windowed = left.is_some() || right.is_some();
    let attention = attention
        .causal(masks.causal)
        .sliding_window(left, right)
        .attention_sink_size(if windowed { masks.first_visible } else { 0 })
        .chunk_size(masks.chunk)
        .prefix_len(masks.prefix);
    masks.objects.iter().fold(attention, |attention, mask| attention.mask(Arc::clone(mask)))
}

/// Applies the batch of a case to a ring, and computes both passes `times` times. Without
/// `out_residual` the rounding residual of out is dropped between the passes.
pub fn compute(
    case: &Case,
    ring: &mut LocalRing,
    times: usize,
    out_residual: bool,
) -> Result<Vec<Answer>> {
    if case.batch != Batch::default() {
        ring.update(&case.batch)?;
    }
    let lists = case.batch.key_lists.as_deref();
    compute_rows(case, (None, lists), ring, times, out_residual)
}

/// Returns the numbers of listed pairs, in the order of the entries, as a bias
/// `[b|1, groups, q rows, kv_len]`; 0 for other pairs. A bias of such a shape has as many gradients.
pub fn as_bias(lists: &KeyLists, numbers: &[f64], kv_len: usize) -> Array4<f64> {
    let [batches, groups, queries] = lists.shape();
    let mut bias = Array4::zeros((batches, groups, queries, kv_len));
    for (b, g, q) in ndarray::indices((batches, groups, queries)) {
        for entry in lists.entries(b, g, q) {
            bias[[b, g, q, lists.keys()[entry] as usize]] = numbers[entry];
        }
    }
    bias
}

/// Computes the rows of a rank, or all, with their key lists.
fn compute_rows(
    case: &Case,
    (rows, lists): (Option<[&[usize]; 2]>, Option<&KeyLists>),
    plan: &mut impl BothPasses,
    times: usize,
    out_residual: bool,
) -> Result<Vec<Answer>> {
    let mut answers = match case.spec.dtype {
        DType::F64 => CaseTensors::<f64>::new(case, rows).compute(plan, times, out_residual),
        DType::F32 => CaseTensors::<f32>::new(case, rows).compute(plan, times, out_residual),
        DType::Bf16 => CaseTensors::<bf16>::new(case, rows).compute(plan, times, out_residual),
        DType::F16 => CaseTensors::<f16>::new(case, rows).compute(plan, times, out_residual),
    }?;
    if let (Some(lists), Some(gradient)) = (lists, plan.list_bias_gradient()) {
        let dbias = as_bias(lists, &gradient, case.spec.dims.kv_len);
        answers.iter_mut().for_each(|answer| answer.dbias = Some(dbias.clone()));
    }
    Ok(answers)
}

/// The rows of one rank, and its results for them.
#[derive(Debug, Clone)]
pub struct RankAnswer {
    /// Numbers of its query rows in the whole sequence.
    pub q_rows: Vec<usize>,
    /// Numbers of its key rows.
    pub kv_rows: Vec<usize>,
    /// Results of these rows.
    pub answer: Answer,
}

/// As [`compute`], for the rows of one rank.
pub fn compute_rank(case: &Case, plan: &mut Plan, times: usize) -> Result<Vec<RankAnswer>> {
    let rows = |runs: &Runs| runs.iter().map(i64::cast_unsigned).collect::<Vec<u64>>();
    let [q_rows, kv_rows] = [rows(plan.q_rows()), rows(plan.kv_rows())];
    let batch = case.batch.select(&q_rows, &kv_rows)?;
    if case.batch != Batch::default() {
        plan.update(&batch)?;
    }
    let [q_rows, kv_rows] =
        [q_rows, kv_rows].map(|rows| rows.into_iter().map(index).collect::<Vec<usize>>());
    let rows = (Some([&q_rows[..], &kv_rows]), batch.key_lists.as_deref());
    let answers = compute_rows(case, rows, plan, times, true)?;
    let of_rank = |answer| RankAnswer { q_rows: q_rows.clone(), kv_rows: kv_rows.clone(), answer };
    Ok(answers.into_iter().map(of_rank).collect())
}

/// Both passes of a ring, or of one rank.
trait BothPasses {
    fn forward<T: Element>(&mut self, tensors: &Tensors<'_, T>) -> Result<Forward<T>>;

    fn backward<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        forward: &Forward<T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>>;

    fn list_bias_gradient(&self) -> Option<Vec<f64>>;
}

macro_rules! both_passes {
    ($plan:ty) => {
        impl BothPasses for $plan {
            fn forward<T: Element>(&mut self, tensors: &Tensors<'_, T>) -> Result<Forward<T>> {
                <$plan>::forward(self, tensors)
            }

            fn backward<T: Element>(
                &mut self,
                tensors: &Tensors<'_, T>,
                forward: &Forward<T>,
                dout: ArrayView4<'_, T>,
                dlse: Option<ArrayView3<'_, T::Accumulator>>,
            ) -> Result<Backward<T>> {
                <$plan>::backward(self, tensors, forward, dout, dlse)
            }

            fn list_bias_gradient(&self) -> Option<Vec<f64>> {
                <$plan>::list_bias_gradient(self)
            }
        }
    };
}

both_passes!(LocalRing);
both_passes!(Plan);

/// Tensors of a case, rounded to `T`.
#[derive(Debug)]
pub struct CaseTensors<T: Element> {
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    bias: Option<Array4<T::Accumulator>>,
    sinks: Option<Array2<T::Accumulator>>,
    /// As [`Case::dout`].
    pub dout: Array4<T>,
    /// As [`Case::dlse`].
    pub dlse: Option<Array3<T::Accumulator>>,
}

impl<T: Element> CaseTensors<T> {
    /// Rounds the tensors of these queries and keys, or all.
    pub fn new(case: &Case, rows: Option<[&[usize]; 2]>) -> Self {
        let [q_rows, kv_rows] = rows.map_or([None; 2], |rows| rows.map(Some));
        let of = |tensor: &Array4<f64>, rows: Option<&[usize]>| match rows {
            Some(rows) => narrow(&tensor.select(Axis(1), rows)),
            None => narrow(tensor),
        };
        let bias = case.bias.as_ref().map(|bias| match q_rows {
            Some(rows) if bias.len_of(Axis(2)) > 1 => narrow(&bias.select(Axis(2), rows)),
            _ => narrow(bias),
        });
        let dlse = case.dlse.as_ref().map(|dlse| match q_rows {
            Some(rows) => narrow(&dlse.select(Axis(2), rows)),
            None => narrow(dlse),
        });
        Self {
            q: of(&case.q, q_rows),
            k: of(&case.k, kv_rows),
            v: of(&case.v, kv_rows),
            bias,
            sinks: case.sinks.as_ref().map(narrow),
            dout: of(&case.dout, q_rows),
            dlse,
        }
    }

    /// Returns the inputs of a forward pass.
    pub fn tensors(&self) -> Tensors<'_, T> {
        Tensors {
            bias: self.bias.as_ref().map(|bias| bias.view()),
            softmax_aux: self.sinks.as_ref().map(|sinks| sinks.view()),
            ..Tensors::new(self.q.view(), self.k.view(), self.v.view())
        }
    }

    fn compute(
        &self,
        plan: &mut impl BothPasses,
        times: usize,
        out_residual: bool,
    ) -> Result<Vec<Answer>> {
        let tensors = self.tensors();
        let mut once = || {
            let mut forward = plan.forward(&tensors)?;
            forward.out_residual.take_if(|_| !out_residual);
            let dlse = self.dlse.as_ref().map(|dlse| dlse.view());
            let backward = plan.backward(&tensors, &forward, self.dout.view(), dlse)?;
            for (pass, reports) in [("forward", &forward.reports), ("backward", &backward.reports)]
            {
                reports.iter().try_for_each(|report| check_bytes(pass, report))?;
            }
            Ok(answer(&forward, &backward))
        };
        (0..times).map(|_| once()).collect()
    }
}

/// Returns an error unless the bytes sent are those that the schedule predicts.
pub fn check_bytes(pass: &str, report: &Report) -> Result<()> {
    if report.bytes_sent == report.bytes_predicted {
        return Ok(());
    }
    Err(Error::Device {
        what: format!(
            "{pass} sent {} bytes, the schedule predicts {}",
            report.bytes_sent, report.bytes_predicted
        ),
    })
}

/// Widens the results of the facade to f64.
pub fn answer<T: Element>(forward: &Forward<T>, backward: &Backward<T>) -> Answer {
    Answer {
        out: widen(&forward.out),
        lse: widen(&forward.lse),
        max: forward.max.as_ref().map(widen).unwrap_or_default(),
        sum: forward.sum.as_ref().map(widen).unwrap_or_default(),
        ties: forward.ties.as_ref().map(widen),
        dq: widen(&backward.dq),
        dk: widen(&backward.dk),
        dv: widen(&backward.dv),
        dbias: backward.dbias.as_ref().map(widen),
        dsinks: backward.dsoftmax_aux.as_ref().map(widen),
    }
}

/// Rounds to an element type.
pub fn narrow<T: Element, D: Dimension>(array: &Array<f64, D>) -> Array<T, D> {
    array.mapv(T::from_f64)
}

/// Widens to f64.
pub fn widen<T: Element, D: Dimension>(array: &Array<T, D>) -> Array<f64, D> {
    array.mapv(T::to_f64)
}
