//! The rows of one rank as parts of whole tensors: borrowed in place if the layout permits, else
//! copied.

use annulus_core::{Element, Result, Runs, index};
use ndarray::{
    ArrayView, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut, Axis, CowArray, Dimension, Ix3,
    Ix4, RemoveAxis, Slice,
};

use crate::{ForwardView, Tensors, plan::zeros};

/// One rank's rows of the inputs of a forward pass: views, or copies if the rows are several runs.
pub(crate) struct RankTensors<'a, T: Element> {
    q: CowArray<'a, T, Ix4>,
    k: CowArray<'a, T, Ix4>,
    v: CowArray<'a, T, Ix4>,
    bias: Option<CowArray<'a, T::Accumulator, Ix4>>,
    softmax_aux: Option<ArrayView2<'a, T::Accumulator>>,
}

impl<'a, T: Element> RankTensors<'a, T> {
    pub(crate) fn of(tensors: &Tensors<'a, T>, q_rows: &Runs, kv_rows: &Runs) -> Result<Self> {
        let all = Runs::counting(0, 1);
        let bias = |bias: ArrayView4<'a, T::Accumulator>| {
            let rows = if bias.dim().2 == 1 { &all } else { q_rows };
            get_rows("bias", bias, Axis(2), rows)
        };
        Ok(Self {
            q: get_rows("q", tensors.q, Axis(1), q_rows)?,
            k: get_rows("k", tensors.k, Axis(1), kv_rows)?,
            v: get_rows("v", tensors.v, Axis(1), kv_rows)?,
            bias: tensors.bias.map(bias).transpose()?,
            softmax_aux: tensors.softmax_aux,
        })
    }

    pub(crate) fn tensors(&self) -> Tensors<'_, T> {
        Tensors {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            softmax_aux: self.softmax_aux.as_ref().map(|sinks| sinks.view()),
        }
    }
}

/// Inputs of a backward pass over whole tensors.
pub(crate) struct BackwardTensors<'a, T: Element> {
    pub(crate) tensors: Tensors<'a, T>,
    pub(crate) forward: ForwardView<'a, T>,
    pub(crate) dout: ArrayView4<'a, T>,
    pub(crate) dlse: Option<ArrayView3<'a, T::Accumulator>>,
}

/// One rank's rows of the inputs of a backward pass.
pub(crate) struct BackwardRankTensors<'a, T: Element> {
    pub(crate) inputs: RankTensors<'a, T>,
    out: CowArray<'a, T, Ix4>,
    lse: CowArray<'a, T::Accumulator, Ix3>,
    max: Option<CowArray<'a, T::Accumulator, Ix3>>,
    sum: Option<CowArray<'a, T::Accumulator, Ix3>>,
    ties: Option<CowArray<'a, T::Accumulator, Ix3>>,
    out_residual: Option<CowArray<'a, T, Ix4>>,
    pub(crate) dout: CowArray<'a, T, Ix4>,
    pub(crate) dlse: Option<CowArray<'a, T::Accumulator, Ix3>>,
}

impl<'a, T: Element> BackwardRankTensors<'a, T> {
    pub(crate) fn of(
        inputs: &BackwardTensors<'a, T>,
        q_rows: &Runs,
        kv_rows: &Runs,
    ) -> Result<Self> {
        let BackwardTensors { tensors, forward, dout, dlse } = inputs;
        let statistics = |name, array| get_rows(name, array, Axis(2), q_rows);
        Ok(Self {
            inputs: RankTensors::of(tensors, q_rows, kv_rows)?,
            out: get_rows("out", forward.out, Axis(1), q_rows)?,
            lse: statistics("lse", forward.lse)?,
            max: forward.max.map(|max| statistics("max", max)).transpose()?,
            sum: forward.sum.map(|sum| statistics("sum", sum)).transpose()?,
            ties: forward.ties.map(|ties| statistics("ties", ties)).transpose()?,
            out_residual: forward
                .out_residual
                .map(|residual| get_rows("out_residual", residual, Axis(1), q_rows))
                .transpose()?,
            dout: get_rows("dout", *dout, Axis(1), q_rows)?,
            dlse: dlse.map(|dlse| statistics("dlse", dlse)).transpose()?,
        })
    }

    pub(crate) fn forward(&self) -> ForwardView<'_, T> {
        ForwardView {
            out: self.out.view(),
            lse: self.lse.view(),
            max: self.max.as_ref().map(|max| max.view()),
            sum: self.sum.as_ref().map(|sum| sum.view()),
            ties: self.ties.as_ref().map(|ties| ties.view()),
            out_residual: self.out_residual.as_ref().map(|residual| residual.view()),
        }
    }
}

/// Returns true if the rows are `first`, `first` + 1, …
pub(crate) fn counts_from(first: i64, rows: &Runs) -> bool {
    match rows.runs() {
        [] => true,
        [run] => run.start == first && (run.step == 1 || run.count == 1),
        _ => false,
    }
}

/// Returns the slices that the global rows `rows` consist of: for each the local index of its first
/// row, its length, and the slice.
fn slices(rows: &Runs) -> impl Iterator<Item = (usize, usize, Slice)> + '_ {
    let mut before = 0;
    rows.runs().iter().map(move |run| {
        let count = index(run.count);
        before += count;
        // a slice of negative step goes from its end to its start
        let last = run.at(run.count.saturating_sub(1));
        let low = run.start.min(last) as isize;
        let high = run.start.max(last) as isize;
        let step = if run.step == 0 { 1 } else { run.step as isize };
        (before - count, count, Slice::new(low, Some(high + 1), step))
    })
}

/// Returns the rows `rows` of `array`, in that order: a view if they are one run, else a copy.
pub(crate) fn get_rows<'a, T: Element, D: Dimension + RemoveAxis>(
    name: &str,
    array: ArrayView<'a, T, D>,
    axis: Axis,
    rows: &Runs,
) -> Result<CowArray<'a, T, D>> {
    let mut all = slices(rows);
    if let (Some((_, _, only)), None) = (all.next(), all.next()) {
        let mut view = array;
        view.slice_axis_inplace(axis, only);
        return Ok(view.into());
    }
    let mut shape = array.raw_dim();
    shape[axis.index()] = index(rows.len());
    let mut own = zeros(name, shape)?;
    for (first, count, slice) in slices(rows) {
        let into = Slice::new(first as isize, Some((first + count) as isize), 1);
        own.slice_axis_mut(axis, into).assign(&array.slice_axis(axis, slice));
    }
    Ok(own.into())
}

/// Writes `part` to the rows `rows` of `whole`.
pub(crate) fn put_rows<T: Clone, D: Dimension + RemoveAxis>(
    whole: &mut ArrayViewMut<'_, T, D>,
    axis: Axis,
    rows: &Runs,
    part: ArrayView<'_, T, D>,
) {
    for (first, count, slice) in slices(rows) {
        let source =
            part.slice_axis(axis, Slice::new(first as isize, Some((first + count) as isize), 1));
        whole.slice_axis_mut(axis, slice).assign(&source);
    }
}
