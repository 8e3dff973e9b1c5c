//! A whole ring in one process: one thread a rank, whole tensors in, whole tensors out.

use std::{num::NonZero, thread};

use annulus_comm::{
    ring::Ring,
    threads::{self, Threads, each_rank},
};
use annulus_core::{Backend, Batch, Dims, Element, Error, Host, HostTensors, Layout, Result, Runs, Transport, index};
use annulus_cpu::Cpu;
use ndarray::{Array, Array2, Array3, Array4, ArrayView, ArrayView3, ArrayView4, Axis, Dimension, RemoveAxis, Slice};

use crate::{Attention, Backward, Forward, RankPlan, Tensors};

/// An in-process ring, of CPU ranks if made by [`Attention::plan`]. Made once, used for many passes.
///
/// Every call starts a thread a rank and returns when all have ended. An error that ends one rank's plan ends the whole: later calls
/// return [`Error::Poisoned`].
#[derive(Debug)]
pub struct Plan<B: Backend<Space: HostTensors> = Cpu> {
    dims: Dims,
    ranks: Vec<RankPlan<B>>,
}

impl Plan {
    pub(crate) fn new(attention: &Attention, dims: Dims, ranks: usize, layout: Option<Layout>) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        if attention.chosen_threads() == Some(0) {
            return Err(Error::invalid("threads", 0, "at least 1"));
        }
        let machine = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = attention.chosen_threads().unwrap_or((machine / ranks).max(1));
        Self::on(attention, dims, ranks, layout, |_| Cpu::new(threads))
    }
}

impl<B: Backend<Space: HostTensors>> Plan<B> {
    /// An in-process ring of `ranks` ranks, each on the backend that `make` gives for its number.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    /// # Errors
    /// As [`Attention::plan`], and whatever `make` says.
    pub fn on(
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        layout: Option<Layout>,
        make: impl Fn(usize) -> Result<B> + Sync,
    ) -> Result<Self>
    where
        B: Backend<Space = Host>,
    {
        Self::over(attention, dims, ranks, layout, |rank, endpoint| Ok((make(rank)?, endpoint)))
    }

    /// As [`Plan::on`], on backends whose blocks are not in host memory: `make` gives each rank a backend, and a transport of its blocks made of the
    /// rank's endpoint of a ring of threads.
    ///
    /// # Ordering
    /// As [`Plan::on`]; `make` runs on the rank's thread, beside those of all other ranks, so it may meet them.
    /// # Errors
    /// As [`Plan::on`].
    pub fn over<T: Transport<B::Space> + 'static>(
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        layout: Option<Layout>,
        make: impl Fn(usize, Threads) -> Result<(B, T)> + Sync,
    ) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        let plan = |rank, endpoint| {
            let (backend, transport) = make(rank, endpoint)?;
            RankPlan::new(attention, dims, layout.clone(), backend, transport)
        };
        Ok(Self { dims, ranks: each_rank(threads::ring(ranks), plan)? })
    }

    /// Fits the plan to a new batch (whole tensors). Far cheaper than a pass; `Batch::default()` takes everything back.
    ///
    /// # Shapes
    /// As [`Batch`] says, with all rows.
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor, [`Error::Unsupported`] if the plan cannot take it; the old batch stays in force.
    /// # Examples
    /// Two documents of 5 and 3 tokens in one row: neither sees the other.
    /// ```
    /// use annulus::{Attention, Batch, Dims, Tensors};
    /// use ndarray::{Array4, array};
    ///
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let mut plan = Attention::new().plan(Dims::new(1, 8, 2, 4), 2, None)?;
    /// // the ids of the queries serve for the keys too; a negative id would be padding
    /// plan.update(&Batch { q_segment_ids: Some(array![[0, 0, 0, 0, 0, 1, 1, 1]]), ..Batch::default() })?;
    /// let forward = plan.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// // every logit is q·k/√d = 2, so lse = 2 + ln(keys seen)
    /// assert!((forward.lse[[0, 0, 0]] - (2.0 + 5f32.ln())).abs() < 1e-5);
    /// assert!((forward.lse[[0, 1, 7]] - (2.0 + 3f32.ln())).abs() < 1e-5);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        batch.validate(&self.dims, self.dims.q_len, self.dims.kv_len)?;
        each_rank(&mut self.ranks, |_, plan| {
            let rows = |runs: &Runs| runs.iter().map(i64::cast_unsigned).collect::<Vec<_>>();
            let share = batch.select(&rows(plan.q_rows()), &rows(plan.kv_rows()));
            plan.update(&share)
        })
        .map(|_| ())
    }

    /// Computes out and lse.
    ///
    /// # Shapes
    /// See [`Tensors`] and [`Forward`], whole.
    /// # Errors
    /// [`Error::InvalidArgument`] if a tensor does not fit the plan: nothing was done.
    pub fn forward<T: Element>(&mut self, tensors: &Tensors<'_, T>) -> Result<Forward<T>> {
        self.check(tensors)?;
        let parts = each_rank(&mut self.ranks, |_, plan| {
            let share = Share::of(tensors, plan.q_rows(), plan.kv_rows());
            plan.forward(&share.tensors())
        })?;
        let Dims { batch, q_len, q_heads, value_dim, .. } = self.dims;
        let statistics = || Array3::from_elem((batch, q_heads, q_len), T::Accumulator::from_f64(0.0));
        let unnormalized = parts.iter().any(|part| part.max.is_some());
        let mut whole = Forward {
            out: Array4::from_elem((batch, q_len, q_heads, value_dim), T::from_f64(0.0)),
            lse: statistics(),
            max: unnormalized.then(statistics),
            sum: unnormalized.then(statistics),
            ties: unnormalized.then(statistics),
            reports: Vec::new(),
        };
        for (part, plan) in parts.iter().zip(&self.ranks) {
            let rows = plan.q_rows();
            put_rows(&mut whole.out, Axis(1), rows, &part.out);
            put_rows(&mut whole.lse, Axis(2), rows, &part.lse);
            for (whole, part) in [(&mut whole.max, &part.max), (&mut whole.sum, &part.sum), (&mut whole.ties, &part.ties)] {
                if let (Some(whole), Some(part)) = (whole, part) {
                    put_rows(whole, Axis(2), rows, part);
                }
            }
            whole.reports.extend(&part.reports);
        }
        Ok(whole)
    }

    /// Computes the gradients from what [`Plan::forward`] gave and ∂L/∂out, ∂L/∂lse.
    ///
    /// # Shapes
    /// `dout` as out, `dlse` as lse; see [`Backward`], whole.
    /// # Errors
    /// As [`Plan::forward`].
    /// # Examples
    /// One learnable sink a head, and its gradient.
    /// ```
    /// use annulus::{Attention, Dims, Tensors};
    /// use ndarray::{Array2, Array4};
    ///
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let sinks = Array2::<f32>::from_elem((2, 1), 2.0); // [q_heads, sinks]
    /// let mut plan = Attention::new().causal().sinks_per_head(1).plan(Dims::new(1, 8, 2, 4), 3, None)?;
    /// let tensors = Tensors::new(x.view(), x.view(), x.view()).with_sinks(sinks.view());
    /// let forward = plan.forward(&tensors)?;
    /// assert!((forward.out[[0, 0, 0, 0]] - 0.5).abs() < 1e-6); // one key and a sink of equal logits share the weight
    /// let gradients = plan.backward(&tensors, &forward, x.view(), None)?;
    /// // a larger sink takes weight from every value
    /// assert!(gradients.dsinks.is_some_and(|dsinks| dsinks.dim() == (2, 1) && dsinks.iter().all(|&a| a < 0.0)));
    /// # Ok::<(), annulus::Error>(())
    /// ```
    pub fn backward<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        forward: &Forward<T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        self.check(tensors)?;
        let Dims { batch, q_len, q_heads, value_dim, .. } = self.dims;
        let statistics = [batch, q_heads, q_len];
        same_shape("out", forward.out.shape(), &[batch, q_len, q_heads, value_dim])?;
        same_shape("dout", dout.shape(), &[batch, q_len, q_heads, value_dim])?;
        same_shape("lse", forward.lse.shape(), &statistics)?;
        dlse.map_or(Ok(()), |dlse| same_shape("dlse", dlse.shape(), &statistics))?;
        for (name, array) in [("max", &forward.max), ("sum", &forward.sum), ("ties", &forward.ties)] {
            array.as_ref().map_or(Ok(()), |array| same_shape(name, array.shape(), &statistics))?;
        }
        let parts = each_rank(&mut self.ranks, |_, plan| {
            let rows = plan.q_rows();
            let share = Share::of(tensors, rows, plan.kv_rows());
            let statistics = |array: &Array3<T::Accumulator>| get_rows(array.view(), Axis(2), rows);
            let saved = Forward {
                out: get_rows(forward.out.view(), Axis(1), rows),
                lse: statistics(&forward.lse),
                max: forward.max.as_ref().map(statistics),
                sum: forward.sum.as_ref().map(statistics),
                ties: forward.ties.as_ref().map(statistics),
                reports: Vec::new(),
            };
            let dout = get_rows(dout, Axis(1), rows);
            let dlse = dlse.map(|dlse| get_rows(dlse, Axis(2), rows));
            plan.backward(&share.tensors(), &saved, dout.view(), dlse.as_ref().map(|dlse| dlse.view()))
        })?;
        let mut whole = Backward {
            dq: Array4::from_elem(tensors.q.dim(), T::from_f64(0.0)),
            dk: Array4::from_elem(tensors.k.dim(), T::from_f64(0.0)),
            dv: Array4::from_elem(tensors.v.dim(), T::from_f64(0.0)),
            dbias: tensors.bias.as_ref().map(|bias| Array4::from_elem(bias.dim(), T::Accumulator::from_f64(0.0))),
            dsinks: None,
            reports: Vec::new(),
        };
        for (part, plan) in parts.into_iter().zip(&self.ranks) {
            put_rows(&mut whole.dq, Axis(1), plan.q_rows(), &part.dq);
            put_rows(&mut whole.dk, Axis(1), plan.kv_rows(), &part.dk);
            put_rows(&mut whole.dv, Axis(1), plan.kv_rows(), &part.dv);
            if let (Some(dbias), Some(part)) = (&mut whole.dbias, &part.dbias) {
                if dbias.dim().2 == 1 { dbias.assign(part) } else { put_rows(dbias, Axis(2), plan.q_rows(), part) }
            }
            // already the sum over ranks, the same on each
            whole.dsinks = part.dsinks;
            whole.reports.extend(&part.reports);
        }
        Ok(whole)
    }

    /// As [`Plan::backward`], computing out and lse again instead of keeping them between the passes.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    pub fn backward_recomputed<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        let forward = self.forward(tensors)?;
        self.backward(tensors, &forward, dout, dlse)
    }

    /// Rank 0's engine: schedule, layout, route, spec.
    pub fn ring(&self) -> &Ring<B> {
        self.ranks[0].ring()
    }

    fn check<T: Element>(&self, tensors: &Tensors<'_, T>) -> Result<()> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        same_shape("q", tensors.q.shape(), &[batch, q_len, q_heads, head_dim])?;
        same_shape("k", tensors.k.shape(), &[batch, kv_len, kv_heads, head_dim])?;
        same_shape("v", tensors.v.shape(), &[batch, kv_len, kv_heads, value_dim])?;
        match (&tensors.bias, self.ring().spec().bias) {
            (Some(bias), Some(shape)) => same_shape("bias", bias.shape(), &shape),
            // one without the other: the ranks say so
            _ => Ok(()),
        }
    }
}

fn same_shape(name: &str, got: &[usize], want: &[usize]) -> Result<()> {
    if got == want { Ok(()) } else { Err(Error::invalid(name, format!("{got:?}"), format!("{want:?}"))) }
}

/// One rank's rows of the whole tensors.
struct Share<T: Element> {
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    bias: Option<Array4<T::Accumulator>>,
    sinks: Option<Array2<T::Accumulator>>,
}

impl<T: Element> Share<T> {
    fn of(tensors: &Tensors<'_, T>, q_rows: &Runs, kv_rows: &Runs) -> Self {
        let bias = |bias: &ArrayView4<'_, T::Accumulator>| {
            if bias.dim().2 == 1 { bias.to_owned() } else { get_rows(bias.view(), Axis(2), q_rows) }
        };
        Self {
            q: get_rows(tensors.q, Axis(1), q_rows),
            k: get_rows(tensors.k, Axis(1), kv_rows),
            v: get_rows(tensors.v, Axis(1), kv_rows),
            bias: tensors.bias.as_ref().map(bias),
            sinks: tensors.sinks.map(|sinks| sinks.to_owned()),
        }
    }

    fn tensors(&self) -> Tensors<'_, T> {
        Tensors {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            sinks: self.sinks.as_ref().map(|sinks| sinks.view()),
        }
    }
}

/// The slices of global rows that `rows` names, each with the place of its first row among them.
fn slices(rows: &Runs) -> impl Iterator<Item = (usize, usize, Slice)> + '_ {
    let mut before = 0;
    rows.runs().iter().map(move |run| {
        let count = index(run.count);
        before += count;
        // a slice of negative step goes from its end to its start
        let last = run.at(run.count.saturating_sub(1));
        let (low, high) = (run.start.min(last) as isize, run.start.max(last) as isize);
        let step = if run.step == 0 { 1 } else { run.step as isize };
        (before - count, count, Slice::new(low, Some(high + 1), step))
    })
}

/// The rows `rows` of `array`, in that order.
fn get_rows<T: Clone, D: Dimension + RemoveAxis>(array: ArrayView<'_, T, D>, axis: Axis, rows: &Runs) -> Array<T, D> {
    let parts: Vec<_> = slices(rows).map(|(_, _, slice)| array.slice_axis(axis, slice)).collect();
    if parts.is_empty() {
        return array.slice_axis(axis, Slice::new(0, Some(0), 1)).to_owned();
    }
    ndarray::concatenate(axis, &parts).unwrap_or_else(|_| array.slice_axis(axis, Slice::new(0, Some(0), 1)).to_owned())
}

/// Writes `part` to the rows `rows` of `whole`.
fn put_rows<T: Clone, D: Dimension + RemoveAxis>(whole: &mut Array<T, D>, axis: Axis, rows: &Runs, part: &Array<T, D>) {
    for (first, count, slice) in slices(rows) {
        let source = part.slice_axis(axis, Slice::new(first as isize, Some((first + count) as isize), 1));
        whole.slice_axis_mut(axis, slice).assign(&source);
    }
}
