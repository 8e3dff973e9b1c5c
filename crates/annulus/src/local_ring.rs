//! A whole ring in one process: one thread per rank, whole tensors in, whole tensors out.

use std::{sync::Arc, thread::Scope};

use annulus_comm::{
    Cancellation,
    ring::Report,
    threads::{self, Threads, each_rank},
};
use annulus_core::{Batch, Dims, Element, Error, KeyLists, Result, Runs, Spec, index, memory};
use ndarray::{ArrayView3, ArrayView4, Axis};

use crate::{
    Backward, BackwardViewMut, Forward, ForwardView, ForwardViewMut, Plan, Setup, Tensors,
    overlapped::{OverlapPlan, StartedPass},
    plan::{zero_gradients, zero_outputs},
    rank_tensors::{BackwardRankTensors, BackwardTensors, RankTensors, counts_from, put_rows},
};

/// A whole ring in this process, planned once and used for many passes.
///
/// Every call starts one thread per rank (none
/// for one rank) and returns when all ranks have ended. An error that ends the plan of one rank
/// ends the whole: later calls return [`Error::Poisoned`].
///
/// A rank reads the caller's tensors in place where its rows are one range of constant step
/// ([`crate::Layout::Contiguous`], [`crate::Layout::Striped`]); otherwise its rows are copied.
/// Results of several ranks are copied to the caller's tensors.
#[derive(Debug)]
pub struct LocalRing {
    dims: Dims,
    pub(crate) ranks: Vec<Plan>,
    /// Key lists of all queries.
    key_lists: Option<Arc<KeyLists>>,
    /// Reports of the last pass, one per rank.
    reports: Vec<Report>,
}

impl LocalRing {
    /// Plans an in-process ring of `ranks` ranks over whole tensors, on the backend of the runtime
    /// ([`Runtime::backend`](crate::Runtime::backend)). Ranks share a GPU if its number was given,
    /// or if they are more than the GPUs.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Unsupported`], [`Error::OutOfMemory`]; those of the
    /// device.
    pub fn new(setup: impl Into<Setup>, dims: Dims, ranks: usize) -> Result<Self> {
        let mut setup = setup.into();
        let backend = setup.runtime.backend_of(Some(ranks))?;
        setup.runtime = setup.runtime.backend(backend).threads(None);
        Self::from_plans(setup, dims, ranks, |_, setup, endpoint| Plan::new(setup, dims, endpoint))
    }

    /// Plans an in-process ring of ranks of `plan`, which plans one of them from its number, its
    /// setup and its endpoint of a ring of threads: on a backend of the program's own, or over a
    /// transport built on the endpoint.
    ///
    /// # Ordering
    /// Local. `plan` runs on the thread of the rank, concurrently with those of the other ranks, so
    /// it may call collectives.
    ///
    /// # Errors
    /// As [`LocalRing::new`], and the errors of `plan`.
    pub fn from_plans(
        setup: impl Into<Setup>,
        dims: Dims,
        ranks: usize,
        plan: impl Fn(usize, &Setup, Threads) -> Result<Plan> + Sync,
    ) -> Result<Self> {
        let mut setup = setup.into();
        let ring = threads::checked_ring(ranks)?;
        if setup.attention.local_gradients {
            return Err(Error::invalid(
                "local_gradients",
                true,
                "false: a ring in one process returns whole gradients",
            ));
        }
        setup.runtime = setup.runtime.of_threads();
        let ranks = each_rank(ring, |rank, endpoint| plan(rank, &setup, endpoint))?;
        Ok(Self { dims, ranks, key_lists: None, reports: Vec::new() })
    }

    /// Adapts the plan to a new batch: segment ids, positions, dense mask, packed lengths.
    ///
    /// `Batch::default()` removes them. The layout and the route stay; the schedule is derived
    /// anew, O(ranks²).
    ///
    /// # Shapes
    /// As [`Batch`], with all rows.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names the tensor, [`Error::Unsupported`] and
    /// [`Error::OutOfMemory`]: the old batch stays in force.
    ///
    /// # Examples
    /// Two documents of 5 and 3 tokens in one row, which do not attend to each other.
    /// ```
    /// use annulus::{Attention, Batch, Dims, LocalRing, Tensors};
    /// use ndarray::{Array4, array};
    ///
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let mut ring = LocalRing::new(Attention::new(), Dims::new(1, 8, 2, 4), 2)?;
    /// // the ids of the queries serve for the keys too; a negative id is padding
    /// let q_segment_ids = Some(array![[0, 0, 0, 0, 0, 1, 1, 1]]);
    /// ring.update(&Batch { q_segment_ids, ..Batch::default() })?;
    /// let forward = ring.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
    /// // every score is q·k/√d = 2, so lse = 2 + ln(visible keys)
    /// assert!((forward.lse[[0, 0, 0]] - (2.0 + 5f32.ln())).abs() < 1e-5);
    /// assert!((forward.lse[[0, 1, 7]] - (2.0 + 3f32.ln())).abs() < 1e-5);
    /// # Ok::<(), annulus::Error>(())
    /// ```
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        batch.validate(&self.dims, self.dims.q_len, self.dims.kv_len)?;
        each_rank(&mut self.ranks, |_, plan| {
            let rows = |runs: &Runs| {
                memory::collect(
                    "row numbers",
                    index(runs.len()),
                    runs.iter().map(i64::cast_unsigned),
                )
            };
            let of_rank = || batch.select(&rows(plan.q_rows())?, &rows(plan.kv_rows())?);
            match of_rank() {
                Ok(batch) => plan.update(&batch),
                Err(error) => Err(plan.refuse(error)),
            }
        })?;
        self.key_lists.clone_from(&batch.key_lists);
        Ok(())
    }

    /// Returns the gradient of the bias of the key lists that the last backward pass or double
    /// backward has computed.
    ///
    /// # Shapes
    /// `[listed pairs]`, in the order of [`KeyLists`]; `None` without a bias.
    pub fn list_bias_gradient(&self) -> Option<Vec<f64>> {
        let lists = self.key_lists.as_ref()?;
        let mut whole = vec![0.0; lists.len()];
        for plan in &self.ranks {
            let part = plan.list_bias_gradient()?;
            entries_of(lists, plan.q_rows()).zip(part).for_each(|(entry, of)| whole[entry] = of);
        }
        Some(whole)
    }

    /// Checks numbers of all listed pairs, and returns them with the lists.
    pub(crate) fn list_bias_direction<'d>(
        &self,
        direction: Option<&'d [f64]>,
    ) -> Result<Option<(Arc<KeyLists>, &'d [f64])>> {
        let Some(direction) = direction else { return Ok(None) };
        match &self.key_lists {
            Some(lists) if lists.len() == direction.len() => {
                Ok(Some((Arc::clone(lists), direction)))
            }
            _ => {
                let got = format!("{} numbers", direction.len());
                Err(Error::invalid("direction of key_list_bias", got, "one for each listed pair"))
            }
        }
    }

    /// Computes out and lse.
    ///
    /// # Shapes
    /// [`Tensors`] and [`Forward`], with all rows.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a tensor does not fit the plan: nothing was done.
    /// [`Error::Device`], [`Error::Comm`], [`Error::Timeout`] and [`Error::Internal`] end the plan.
    ///
    /// # Source
    /// Liu et al. 2023, Ring Attention with Blockwise Transformers, section 3.
    pub fn forward<T: Element>(&mut self, tensors: &Tensors<'_, T>) -> Result<Forward<T>> {
        self.check(tensors)?;
        let plan = self.plan();
        let mut forward = zero_outputs(plan.spec(), self.dims.q_len, plan.has_out_residual())?;
        forward.reports = self.forward_into(tensors, forward.view_mut())?.to_vec();
        Ok(forward)
    }

    /// Computes out and lse as [`LocalRing::forward`] does, into tensors of the caller's. Returns
    /// one report per rank.
    ///
    /// A warm call on one CPU rank of one thread allocates nothing.
    ///
    /// # Shapes
    /// [`Tensors`] and [`ForwardViewMut`], with all rows. Any strides.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`LocalRing::forward`].
    pub fn forward_into<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        mut outputs: ForwardViewMut<'_, T>,
    ) -> Result<&[Report]> {
        self.check(tensors)?;
        self.check_outputs(&outputs)?;
        if let Some(plan) = only_rank(&mut self.ranks) {
            let report = plan.forward_into(tensors, outputs)?;
            return Ok(self.keep_reports([report]));
        }
        // the tensors that were given, so that the ranks refuse those that do not fit together
        let zeros = |plan: &Plan| {
            let has_residual = outputs.out_residual.is_some();
            let part = zero_outputs(plan.spec(), index(plan.q_rows().len()), has_residual)?;
            let statistics = |is_given: bool| is_given.then(|| part.lse.clone());
            Ok(Forward {
                max: statistics(outputs.max.is_some()),
                sum: statistics(outputs.sum.is_some()),
                ties: statistics(outputs.ties.is_some()),
                statistics: part.statistics.filter(|_| outputs.statistics.is_some()),
                head_statistics: part.head_statistics.filter(|_| outputs.head_statistics.is_some()),
                ..part
            })
        };
        let mut parts = self.ranks.iter().map(zeros).collect::<Result<Vec<Forward<T>>>>()?;
        let views = parts.iter_mut().map(Forward::view_mut).collect();
        let reports = self.forward_parts(tensors, views)?;
        for (part, plan) in parts.iter().zip(&self.ranks) {
            let rows = plan.q_rows();
            put_rows(&mut outputs.out, Axis(1), rows, part.out.view());
            put_rows(&mut outputs.lse, Axis(2), rows, part.lse.view());
            for (whole, part) in [
                (&mut outputs.max, &part.max),
                (&mut outputs.sum, &part.sum),
                (&mut outputs.ties, &part.ties),
            ] {
                if let (Some(whole), Some(part)) = (whole, part) {
                    put_rows(whole, Axis(2), rows, part.view());
                }
            }
            if let (Some(whole), Some(part)) = (&mut outputs.out_residual, &part.out_residual) {
                put_rows(whole, Axis(1), rows, part.view());
            }
            if let (Some(whole), Some(part)) = (&mut outputs.statistics, &part.statistics) {
                put_rows(whole, Axis(2), rows, part.view());
            }
            // every rank has those of all heads
            if let (Some(whole), Some(part)) = (&mut outputs.head_statistics, &part.head_statistics)
            {
                whole.assign(part);
            }
        }
        Ok(self.keep_reports(reports))
    }

    /// Runs the forward pass of every rank into its part of the outputs.
    fn forward_parts<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        parts: Vec<ForwardViewMut<'_, T>>,
    ) -> Result<Vec<Report>> {
        each_rank(self.ranks.iter_mut().zip(parts), |_, (plan, outputs)| {
            match RankTensors::of(tensors, plan.q_rows(), plan.kv_rows()) {
                Ok(rank) => plan.forward_into(&rank.tensors(), outputs),
                Err(error) => Err(plan.refuse(error)),
            }
        })
    }

    /// Computes the gradients from the result of [`LocalRing::forward`], ∂L/∂out and ∂L/∂lse.
    ///
    /// # Shapes
    /// `dout` as out, `dlse` as lse; [`Backward`] with all rows. `None` as `dlse` is 0.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`LocalRing::forward`]. [`Error::InvalidArgument`] also of a plan that is forward only.
    ///
    /// # Source
    /// Dao 2023, FlashAttention-2, algorithm 2.
    ///
    /// # Examples
    /// One learnable sink per head, and its gradient.
    /// ```
    /// use annulus::{Attention, Dims, LocalRing, SinkShape, Tensors};
    /// use ndarray::{Array2, Array4};
    ///
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let sinks = Array2::<f32>::from_elem((2, 1), 2.0); // [q_heads, sinks]
    /// let attention = Attention::new().causal(true).softmax_aux(SinkShape::per_head(1));
    /// let mut ring = LocalRing::new(&attention, Dims::new(1, 8, 2, 4), 3)?;
    /// let tensors = Tensors::new(x.view(), x.view(), x.view()).with_softmax_aux(sinks.view());
    /// let forward = ring.forward(&tensors)?;
    /// // one key and one sink with equal scores: each has probability 1/2
    /// assert!((forward.out[[0, 0, 0, 0]] - 0.5).abs() < 1e-6);
    /// let gradients = ring.backward(&tensors, &forward, x.view(), None)?;
    /// // a larger sink lowers the probability of every value
    /// let dsinks = gradients.dsoftmax_aux.unwrap();
    /// assert!(dsinks.dim() == (2, 1) && dsinks.iter().all(|&a| a < 0.0));
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
        let mut gradients = zero_gradients(tensors)?;
        let view = gradients.view_mut();
        let reports = self.backward_into(tensors, &forward.view(), dout, dlse, view)?.to_vec();
        gradients.reports = reports;
        Ok(gradients)
    }

    /// Computes the gradients as [`LocalRing::backward`] does, into tensors of the caller's.
    /// Returns one report per rank.
    ///
    /// A warm call on one CPU rank of one thread makes two allocations of 48 bytes.
    ///
    /// # Shapes
    /// As [`LocalRing::backward`], and [`BackwardViewMut`] with all rows. Any strides.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`LocalRing::backward`].
    pub fn backward_into<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        forward: &ForwardView<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
        mut gradients: BackwardViewMut<'_, T>,
    ) -> Result<&[Report]> {
        self.check(tensors)?;
        self.check_backward(forward, &dout, dlse.as_ref())?;
        check_gradients(tensors, &gradients)?;
        if let Some(plan) = only_rank(&mut self.ranks) {
            let report = plan.backward_into(tensors, forward, dout, dlse, gradients)?;
            return Ok(self.keep_reports([report]));
        }
        let whole = BackwardTensors {
            tensors: tensors.reborrow(),
            forward: forward.reborrow(),
            dout: dout.view(),
            dlse: dlse.as_ref().map(|dlse| dlse.view()),
        };
        // every rank has the whole of a gradient that is summed over ranks
        let bias_is_shared = tensors.bias.as_ref().is_some_and(|bias| bias.dim().2 == 1);
        let zeros = |plan: &Plan| {
            let rank = RankTensors::of(tensors, plan.q_rows(), plan.kv_rows())?;
            zero_gradients(&rank.tensors())
        };
        let mut parts = self.ranks.iter().map(zeros).collect::<Result<Vec<Backward<T>>>>()?;
        let views = parts.iter_mut().map(Backward::view_mut).collect();
        let reports = self.backward_parts(&whole, views)?;
        for (part, plan) in parts.iter().zip(&self.ranks) {
            put_rows(&mut gradients.dq, Axis(1), plan.q_rows(), part.dq.view());
            put_rows(&mut gradients.dk, Axis(1), plan.kv_rows(), part.dk.view());
            put_rows(&mut gradients.dv, Axis(1), plan.kv_rows(), part.dv.view());
            if let (Some(dbias), Some(part)) = (&mut gradients.dbias, &part.dbias) {
                if bias_is_shared {
                    dbias.assign(part);
                } else {
                    put_rows(dbias, Axis(2), plan.q_rows(), part.view());
                }
            }
            if let (Some(dsinks), Some(part)) = (&mut gradients.dsoftmax_aux, &part.dsoftmax_aux) {
                dsinks.assign(part);
            }
        }
        Ok(self.keep_reports(reports))
    }

    /// Stores the reports of a pass in memory that the next pass reuses.
    fn keep_reports(&mut self, reports: impl IntoIterator<Item = Report>) -> &[Report] {
        self.reports.clear();
        self.reports.extend(reports);
        &self.reports
    }

    /// Runs the backward pass of every rank into its part of the gradients.
    fn backward_parts<T: Element>(
        &mut self,
        inputs: &BackwardTensors<'_, T>,
        parts: Vec<BackwardViewMut<'_, T>>,
    ) -> Result<Vec<Report>> {
        each_rank(self.ranks.iter_mut().zip(parts), |_, (plan, gradients)| {
            match BackwardRankTensors::of(inputs, plan.q_rows(), plan.kv_rows()) {
                Ok(rank) => plan.backward_into(
                    &rank.inputs.tensors(),
                    &rank.forward(),
                    rank.dout.view(),
                    rank.dlse.as_ref().map(|dlse| dlse.view()),
                    gradients,
                ),
                Err(error) => Err(plan.refuse(error)),
            }
        })
    }

    /// Computes the gradients as [`LocalRing::backward`] does, after computing out and lse again.
    ///
    /// It saves the memory of [`Forward`] between the passes.
    ///
    /// # Shapes
    /// As [`LocalRing::backward`].
    ///
    /// # Ordering
    /// Local: a forward and a backward pass.
    ///
    /// # Errors
    /// As [`LocalRing::forward`].
    pub fn backward_recomputed<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        let forward = self.forward(tensors)?;
        self.backward(tensors, &forward, dout, dlse)
    }

    /// Starts `pass` on a thread of its own, so that it overlaps with the program: a forward or a
    /// backward pass of any form.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`Error::Device`] if no thread starts: the pass is not started.
    pub fn start<'scope, R: Send + 'scope>(
        &'scope mut self,
        scope: &'scope Scope<'scope, '_>,
        pass: impl FnOnce(&mut Self) -> Result<R> + Send + 'scope,
    ) -> Result<StartedPass<'scope, R>> {
        StartedPass::of(self, scope, pass)
    }

    /// Returns the plan of rank 0, which has the spec, strategy, layout and route.
    pub fn plan(&self) -> &Plan {
        &self.ranks[0]
    }

    /// Returns the plans of all ranks, in their order.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        self.ranks.iter()
    }

    pub(crate) fn check<T: Element>(&self, tensors: &Tensors<'_, T>) -> Result<()> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        same_shape("q", tensors.q.shape(), &[batch, q_len, q_heads, head_dim])?;
        same_shape("k", tensors.k.shape(), &[batch, kv_len, kv_heads, head_dim])?;
        same_shape("v", tensors.v.shape(), &[batch, kv_len, kv_heads, value_dim])?;
        match (&tensors.bias, self.plan().spec().bias) {
            (Some(bias), Some(shape)) => same_shape("bias", bias.shape(), &shape),
            // it has no known shape, so its rows cannot be dealt to the ranks
            (Some(bias), None) => Err(undeclared("bias", bias.shape())),
            // the ranks report it
            (None, _) => Ok(()),
        }
    }

    fn check_outputs<T: Element>(&self, outputs: &ForwardViewMut<'_, T>) -> Result<()> {
        let ForwardViewMut { out, lse, max, sum, ties, out_residual, .. } = outputs;
        let Dims { batch, q_len, q_heads, .. } = self.dims;
        let statistics = outputs.statistics.as_ref().map(|of| of.shape());
        let head_statistics = outputs.head_statistics.as_ref().map(|of| of.shape());
        let count = Spec::SCORE_STATISTICS;
        for (name, got, want) in [
            ("statistics", statistics, &[batch, q_heads, q_len, count][..]),
            ("head_statistics", head_statistics, &[q_heads, count, 2]),
        ] {
            match got {
                Some(got) if !self.plan().spec().statistics => {
                    let want = "none: the attention has no statistics";
                    return Err(Error::invalid(name, format!("{got:?}"), want));
                }
                Some(got) => same_shape(name, got, want)?,
                // the ranks report it
                None => {}
            }
        }
        self.check_rows([
            ("out", Some(out.shape())),
            ("out_residual", out_residual.as_ref().map(|residual| residual.shape())),
            ("lse", Some(lse.shape())),
            ("max", max.as_ref().map(|max| max.shape())),
            ("sum", sum.as_ref().map(|sum| sum.shape())),
            ("ties", ties.as_ref().map(|ties| ties.shape())),
        ])
    }

    fn check_backward<T: Element>(
        &self,
        forward: &ForwardView<'_, T>,
        dout: &ArrayView4<'_, T>,
        dlse: Option<&ArrayView3<'_, T::Accumulator>>,
    ) -> Result<()> {
        let ForwardView { out, lse, max, sum, ties, out_residual } = forward;
        self.check_rows([
            ("out", Some(out.shape())),
            ("out_residual", out_residual.as_ref().map(|residual| residual.shape())),
            ("dout", Some(dout.shape())),
            ("lse", Some(lse.shape())),
            ("max", max.as_ref().map(|max| max.shape())),
            ("sum", sum.as_ref().map(|sum| sum.shape())),
            ("ties", ties.as_ref().map(|ties| ties.shape())),
            ("dlse", dlse.map(|dlse| dlse.shape())),
        ])
    }

    /// Checks tensors of query rows by name and shape: of out's shape if they have four axes, of
    /// lse's otherwise.
    pub(crate) fn check_rows<const N: usize>(
        &self,
        tensors: [(&str, Option<&[usize]>); N],
    ) -> Result<()> {
        let Dims { batch, q_len, q_heads, value_dim, .. } = self.dims;
        for (name, got) in tensors {
            match got {
                Some(got) if got.len() == 4 => {
                    same_shape(name, got, &[batch, q_len, q_heads, value_dim])?;
                }
                Some(got) => same_shape(name, got, &[batch, q_heads, q_len])?,
                None => {}
            }
        }
        Ok(())
    }
}

impl OverlapPlan for LocalRing {
    fn any_thread(&self) -> bool {
        true
    }

    fn cancellations(&self) -> Vec<Cancellation> {
        self.ranks.iter().flat_map(Plan::cancellations).collect()
    }
}

impl std::fmt::Display for LocalRing {
    /// Writes mask, ranks, strategy, layout, route and bytes of rank 0.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self.plan(), f)
    }
}

/// Returns the entries of the lists of the queries `rows`, in the order of the lists of a rank that
/// owns them.
pub(crate) fn entries_of(lists: &KeyLists, rows: &Runs) -> impl Iterator<Item = usize> {
    let [batches, groups, _] = lists.shape();
    let planes = (0..batches).flat_map(move |batch| (0..groups).map(move |group| (batch, group)));
    planes.flat_map(move |(batch, group)| {
        let lists_of = rows.iter().map(|row| index(row.cast_unsigned()));
        lists_of.flat_map(move |row| lists.entries(batch, group, row))
    })
}

/// Returns the rank of a ring of one rank, if its tensors are the whole tensors.
fn only_rank(ranks: &mut [Plan]) -> Option<&mut Plan> {
    match ranks {
        [plan] if counts_from(0, plan.q_rows()) && counts_from(0, plan.kv_rows()) => Some(plan),
        _ => None,
    }
}

fn check_gradients<T: Element>(
    tensors: &Tensors<'_, T>,
    gradients: &BackwardViewMut<'_, T>,
) -> Result<()> {
    same_shape("dq", gradients.dq.shape(), tensors.q.shape())?;
    same_shape("dk", gradients.dk.shape(), tensors.k.shape())?;
    same_shape("dv", gradients.dv.shape(), tensors.v.shape())?;
    match (&gradients.dbias, &tensors.bias) {
        (Some(dbias), Some(bias)) => same_shape("dbias", dbias.shape(), bias.shape())?,
        (Some(dbias), None) => return Err(undeclared("dbias", dbias.shape())),
        // the ranks report it
        (None, _) => {}
    }
    if let (Some(dsinks), Some(sinks)) = (&gradients.dsoftmax_aux, &tensors.softmax_aux) {
        same_shape("dsoftmax_aux", dsinks.shape(), sinks.shape())?;
    }
    // one without the other: the ranks report it
    Ok(())
}

fn undeclared(name: &str, shape: &[usize]) -> Error {
    Error::invalid(name, format!("{shape:?}"), "none, because the attention has no bias tensor")
}

fn same_shape(name: &str, got: &[usize], want: &[usize]) -> Result<()> {
    if got == want {
        Ok(())
    } else {
        Err(Error::invalid(name, format!("{got:?}"), format!("{want:?}")))
    }
}
