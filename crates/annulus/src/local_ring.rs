//! A whole ring in one process: one thread per rank, whole tensors in, whole tensors out.

use std::{num::NonZero, ops::Range, thread};

use annulus_comm::{
    ring::{Report, Ring},
    threads::{self, Threads, each_rank},
};
use annulus_core::{
    Backend, Batch, Dims, Element, Error, Host, HostTensors, Result, Runs, Transport, index, memory,
};
use annulus_cpu::Cpu;
use ndarray::{
    Array2, Array4, ArrayView, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut, Axis, CowArray,
    Dimension, Ix3, Ix4, RemoveAxis, Slice,
};

use crate::{
    Attention, Backward, BackwardViewMut, Forward, ForwardView, ForwardViewMut, Plan, Tensors,
    plan::{zero_gradients, zero_outputs},
};

/// A whole ring in this process, planned once and used for many passes.
///
/// [`Attention::local_ring`] makes one of CPU ranks. Every call starts one thread per rank (none for
/// one rank) and returns when all ranks have ended. An error that ends the plan of one rank ends the
/// whole: later calls return [`Error::Poisoned`].
///
/// A rank reads the caller's tensors in place where its rows are one range of constant step
/// ([`crate::Layout::Contiguous`], [`crate::Layout::Striped`]), and writes them in place where they
/// are contiguous. Otherwise its rows are copied.
#[derive(Debug)]
pub struct LocalRing<B: Backend<Space: HostTensors> = Cpu> {
    dims: Dims,
    ranks: Vec<Plan<B>>,
}

impl LocalRing {
    pub(crate) fn of_cpus(attention: &Attention, dims: Dims, ranks: usize) -> Result<Self> {
        let machine = thread::available_parallelism().map_or(1, NonZero::get);
        let default = machine.checked_div(ranks).unwrap_or(1).max(1);
        let threads = attention.chosen_threads().unwrap_or(default);
        if threads == 0 {
            return Err(Error::invalid("threads", 0, "at least 1"));
        }
        let attention = attention.clone().threads(None);
        Self::with_backends(&attention, dims, ranks, |_| Cpu::new(threads))
    }
}

impl<B: Backend<Space: HostTensors>> LocalRing<B> {
    /// Plans an in-process ring of `ranks` ranks; `make` returns the backend of each rank.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`Attention::local_ring`], and the errors of `make`.
    pub fn with_backends(
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        make: impl Fn(usize) -> Result<B> + Sync,
    ) -> Result<Self>
    where
        B: Backend<Space = Host>,
    {
        Self::with_transports(attention, dims, ranks, |rank, endpoint| Ok((make(rank)?, endpoint)))
    }

    /// Plans an in-process ring on backends whose blocks are not in host memory.
    ///
    /// `make` returns the backend of a rank and the transport of its blocks, built on the rank's
    /// endpoint of a ring of threads.
    ///
    /// # Ordering
    /// As [`LocalRing::with_backends`]. `make` runs on the thread of the rank, concurrently with
    /// those of the other ranks, so it may call collectives.
    ///
    /// # Errors
    /// As [`LocalRing::with_backends`].
    pub fn with_transports<T: Transport<B::Space> + 'static>(
        attention: &Attention,
        dims: Dims,
        ranks: usize,
        make: impl Fn(usize, Threads) -> Result<(B, T)> + Sync,
    ) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", 0, "at least 1"));
        }
        let ring_options = attention.ring_options();
        if ring_options.local_gradients {
            return Err(Error::invalid(
                "local_gradients",
                true,
                "false: a ring in one process returns whole gradients",
            ));
        }
        let plan = |rank, endpoint| {
            let (backend, transport) = make(rank, endpoint)?;
            Plan::new(attention, dims, backend, transport)
        };
        Ok(Self { dims, ranks: each_rank(threads::ring(ranks), plan)? })
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
    /// use annulus::{Attention, Batch, Dims, Tensors};
    /// use ndarray::{Array4, array};
    ///
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let mut ring = Attention::new().local_ring(Dims::new(1, 8, 2, 4), 2)?;
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
            let share = || batch.select(&rows(plan.q_rows())?, &rows(plan.kv_rows())?);
            match share() {
                Ok(share) => plan.update(&share),
                Err(error) => Err(plan.ring_mut().refuse(error)),
            }
        })
        .map(|_| ())
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
        let mut forward = zero_outputs(self.ring().spec(), self.dims.q_len)?;
        forward.reports = self.forward_into(tensors, forward.view_mut())?;
        Ok(forward)
    }

    /// Computes out and lse as [`LocalRing::forward`] does, into tensors of the caller's. Returns
    /// one report per rank.
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
    ) -> Result<Vec<Report>> {
        self.check(tensors)?;
        self.check_outputs(&outputs)?;
        if let Some(blocks) = contiguous(&self.ranks, Plan::q_rows) {
            return self.forward_parts(tensors, outputs.split(&blocks));
        }
        let zeros = |plan: &Plan<B>| zero_outputs(plan.ring().spec(), index(plan.q_rows().len()));
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
        }
        Ok(reports)
    }

    /// Runs the forward pass of every rank into its part of the outputs.
    fn forward_parts<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        parts: Vec<ForwardViewMut<'_, T>>,
    ) -> Result<Vec<Report>> {
        each_rank(self.ranks.iter_mut().zip(parts), |_, (plan, outputs)| {
            match Share::of(tensors, plan.q_rows(), plan.kv_rows()) {
                Ok(share) => plan.forward_into(&share.tensors(), outputs),
                Err(error) => Err(plan.ring_mut().refuse(error)),
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
    /// use annulus::{Attention, Dims, SinkShape, Tensors};
    /// use ndarray::{Array2, Array4};
    ///
    /// let x = Array4::<f32>::ones((1, 8, 2, 4));
    /// let sinks = Array2::<f32>::from_elem((2, 1), 2.0); // [q_heads, sinks]
    /// let attention = Attention::new().causal(true).softmax_aux(SinkShape::per_head(1));
    /// let mut ring = attention.local_ring(Dims::new(1, 8, 2, 4), 3)?;
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
        gradients.reports = self.backward_into(tensors, &forward.view(), dout, dlse, view)?;
        Ok(gradients)
    }

    /// Computes the gradients as [`LocalRing::backward`] does, into tensors of the caller's. Returns
    /// one report per rank.
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
    ) -> Result<Vec<Report>> {
        self.check(tensors)?;
        self.check_backward(forward, &dout, dlse.as_ref())?;
        check_gradients(tensors, &gradients)?;
        let whole = BackwardTensors {
            tensors: tensors.reborrow(),
            forward: forward.reborrow(),
            dout: dout.view(),
            dlse: dlse.as_ref().map(|dlse| dlse.view()),
        };
        let blocks =
            contiguous(&self.ranks, Plan::q_rows).zip(contiguous(&self.ranks, Plan::kv_rows));
        // every rank has the whole of a gradient that is summed over ranks
        let bias_is_shared = tensors.bias.as_ref().is_some_and(|bias| bias.dim().2 == 1);
        if let Some((q_blocks, kv_blocks)) = blocks {
            let mut shared = self.shared_gradients(tensors, bias_is_shared)?;
            let parts = gradients.reborrow().split(&q_blocks, &kv_blocks, &mut shared);
            return self.backward_parts(&whole, parts);
        }
        let zeros = |plan: &Plan<B>| {
            let share = Share::of(tensors, plan.q_rows(), plan.kv_rows())?;
            zero_gradients(&share.tensors())
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
        Ok(reports)
    }

    /// Runs the backward pass of every rank into its part of the gradients.
    fn backward_parts<T: Element>(
        &mut self,
        inputs: &BackwardTensors<'_, T>,
        parts: Vec<BackwardViewMut<'_, T>>,
    ) -> Result<Vec<Report>> {
        each_rank(self.ranks.iter_mut().zip(parts), |_, (plan, gradients)| match BackwardShare::of(
            inputs,
            plan.q_rows(),
            plan.kv_rows(),
        ) {
            Ok(share) => plan.backward_into(
                &share.share.tensors(),
                &share.forward(),
                share.dout.view(),
                share.dlse.as_ref().map(|dlse| dlse.view()),
                gradients,
            ),
            Err(error) => Err(plan.ring_mut().refuse(error)),
        })
    }

    /// Gradients that are summed over ranks, for all ranks but the first, which writes the caller's.
    fn shared_gradients<T: Element>(
        &self,
        tensors: &Tensors<'_, T>,
        bias_is_shared: bool,
    ) -> Result<Vec<SharedGradients<T>>> {
        let bias = tensors.bias.as_ref().filter(|_| bias_is_shared);
        let one = |_| {
            Ok(SharedGradients {
                dbias: bias.map(|bias| memory::zeros("dbias", bias.dim())).transpose()?,
                dsoftmax_aux: tensors
                    .softmax_aux
                    .map(|sinks| memory::zeros("dsoftmax_aux", sinks.dim()))
                    .transpose()?,
            })
        };
        (1..self.ranks.len()).map(one).collect()
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

    /// Returns the ring engine of rank 0, which has the spec, layout, route and schedule.
    pub fn ring(&self) -> &Ring<B> {
        self.ranks[0].ring()
    }

    /// Returns the ring engines of all ranks, in their order.
    pub fn rings(&self) -> impl Iterator<Item = &Ring<B>> {
        self.ranks.iter().map(Plan::ring)
    }

    fn check<T: Element>(&self, tensors: &Tensors<'_, T>) -> Result<()> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        same_shape("q", tensors.q.shape(), &[batch, q_len, q_heads, head_dim])?;
        same_shape("k", tensors.k.shape(), &[batch, kv_len, kv_heads, head_dim])?;
        same_shape("v", tensors.v.shape(), &[batch, kv_len, kv_heads, value_dim])?;
        match (&tensors.bias, self.ring().spec().bias) {
            (Some(bias), Some(shape)) => same_shape("bias", bias.shape(), &shape),
            // it has no known shape, so its rows cannot be dealt to the ranks
            (Some(bias), None) => Err(undeclared("bias", bias.shape())),
            // the ranks report it
            (None, _) => Ok(()),
        }
    }

    fn check_outputs<T: Element>(&self, outputs: &ForwardViewMut<'_, T>) -> Result<()> {
        let Dims { batch, q_len, q_heads, value_dim, .. } = self.dims;
        let ForwardViewMut { out, lse, max, sum, ties } = outputs;
        same_shape("out", out.shape(), &[batch, q_len, q_heads, value_dim])?;
        let statistics = [
            ("lse", Some(lse)),
            ("max", max.as_ref()),
            ("sum", sum.as_ref()),
            ("ties", ties.as_ref()),
        ];
        for (name, array) in statistics {
            let Some(array) = array else { continue };
            same_shape(name, array.shape(), &[batch, q_heads, q_len])?;
        }
        Ok(())
    }

    fn check_backward<T: Element>(
        &self,
        forward: &ForwardView<'_, T>,
        dout: &ArrayView4<'_, T>,
        dlse: Option<&ArrayView3<'_, T::Accumulator>>,
    ) -> Result<()> {
        let Dims { batch, q_len, q_heads, value_dim, .. } = self.dims;
        same_shape("out", forward.out.shape(), &[batch, q_len, q_heads, value_dim])?;
        same_shape("dout", dout.shape(), &[batch, q_len, q_heads, value_dim])?;
        let statistics = [
            ("lse", Some(&forward.lse)),
            ("max", forward.max.as_ref()),
            ("ties", forward.ties.as_ref()),
            ("dlse", dlse),
        ];
        for (name, array) in statistics {
            let Some(array) = array else { continue };
            same_shape(name, array.shape(), &[batch, q_heads, q_len])?;
        }
        Ok(())
    }
}

impl<B: Backend<Space: HostTensors>> std::fmt::Display for LocalRing<B> {
    /// Writes what [`Ring`] writes: mask, ranks, layout, route, hops and bytes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self.ring(), f)
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

/// One rank's rows of the whole tensors: views, or copies where the rows are several runs.
struct Share<'a, T: Element> {
    q: CowArray<'a, T, Ix4>,
    k: CowArray<'a, T, Ix4>,
    v: CowArray<'a, T, Ix4>,
    bias: Option<CowArray<'a, T::Accumulator, Ix4>>,
    softmax_aux: Option<ArrayView2<'a, T::Accumulator>>,
}

impl<'a, T: Element> Share<'a, T> {
    fn of(tensors: &Tensors<'a, T>, q_rows: &Runs, kv_rows: &Runs) -> Result<Self> {
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

    fn tensors(&self) -> Tensors<'_, T> {
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
struct BackwardTensors<'a, T: Element> {
    tensors: Tensors<'a, T>,
    forward: ForwardView<'a, T>,
    dout: ArrayView4<'a, T>,
    dlse: Option<ArrayView3<'a, T::Accumulator>>,
}

/// One rank's rows of them.
struct BackwardShare<'a, T: Element> {
    share: Share<'a, T>,
    out: CowArray<'a, T, Ix4>,
    lse: CowArray<'a, T::Accumulator, Ix3>,
    max: Option<CowArray<'a, T::Accumulator, Ix3>>,
    ties: Option<CowArray<'a, T::Accumulator, Ix3>>,
    dout: CowArray<'a, T, Ix4>,
    dlse: Option<CowArray<'a, T::Accumulator, Ix3>>,
}

impl<'a, T: Element> BackwardShare<'a, T> {
    fn of(inputs: &BackwardTensors<'a, T>, q_rows: &Runs, kv_rows: &Runs) -> Result<Self> {
        let BackwardTensors { tensors, forward, dout, dlse } = inputs;
        let statistics = |name, array| get_rows(name, array, Axis(2), q_rows);
        Ok(Self {
            share: Share::of(tensors, q_rows, kv_rows)?,
            out: get_rows("out", forward.out, Axis(1), q_rows)?,
            lse: statistics("lse", forward.lse)?,
            max: forward.max.map(|max| statistics("max", max)).transpose()?,
            ties: forward.ties.map(|ties| statistics("ties", ties)).transpose()?,
            dout: get_rows("dout", *dout, Axis(1), q_rows)?,
            dlse: dlse.map(|dlse| statistics("dlse", dlse)).transpose()?,
        })
    }

    fn forward(&self) -> ForwardView<'_, T> {
        ForwardView {
            out: self.out.view(),
            lse: self.lse.view(),
            max: self.max.as_ref().map(|max| max.view()),
            ties: self.ties.as_ref().map(|ties| ties.view()),
        }
    }
}

/// A rank's own copy of gradients that are summed over ranks.
struct SharedGradients<T: Element> {
    dbias: Option<Array4<T::Accumulator>>,
    dsoftmax_aux: Option<Array2<T::Accumulator>>,
}

impl<'a, T: Element> ForwardViewMut<'a, T> {
    /// Splits the outputs into the rows of each rank.
    fn split(self, blocks: &[Range<usize>]) -> Vec<Self> {
        let Self { out, lse, max, sum, ties } = self;
        let mut max = max.map(|max| split_rows(max, Axis(2), blocks).into_iter());
        let mut sum = sum.map(|sum| split_rows(sum, Axis(2), blocks).into_iter());
        let mut ties = ties.map(|ties| split_rows(ties, Axis(2), blocks).into_iter());
        let parts = split_rows(out, Axis(1), blocks).into_iter();
        parts
            .zip(split_rows(lse, Axis(2), blocks))
            .map(|(out, lse)| Self {
                out,
                lse,
                max: max.as_mut().and_then(Iterator::next),
                sum: sum.as_mut().and_then(Iterator::next),
                ties: ties.as_mut().and_then(Iterator::next),
            })
            .collect()
    }
}

impl<'a, T: Element> BackwardViewMut<'a, T> {
    /// Splits the gradients into the rows of each rank. Gradients that are summed over ranks go to
    /// the first rank, and to `shared` of the others.
    fn split(
        self,
        q_blocks: &[Range<usize>],
        kv_blocks: &[Range<usize>],
        shared: &'a mut [SharedGradients<T>],
    ) -> Vec<Self> {
        let Self { dq, dk, dv, mut dbias, mut dsoftmax_aux } = self;
        let bias_is_shared = dbias.as_ref().is_some_and(|dbias| dbias.dim().2 == 1);
        let mut dbias_rows = dbias
            .take_if(|_| !bias_is_shared)
            .map(|dbias| split_rows(dbias, Axis(2), q_blocks).into_iter());
        let mut shared = shared.iter_mut();
        let dkv =
            split_rows(dk, Axis(1), kv_blocks).into_iter().zip(split_rows(dv, Axis(1), kv_blocks));
        split_rows(dq, Axis(1), q_blocks)
            .into_iter()
            .zip(dkv)
            .enumerate()
            .map(|(rank, (dq, (dk, dv)))| {
                let of_others = if rank == 0 { None } else { shared.next() };
                let (own_dbias, own_dsinks) = match of_others {
                    Some(own) => (
                        own.dbias.as_mut().map(|dbias| dbias.view_mut()),
                        own.dsoftmax_aux.as_mut().map(|dsinks| dsinks.view_mut()),
                    ),
                    None => (dbias.take(), dsoftmax_aux.take()),
                };
                let rows = dbias_rows.as_mut().and_then(Iterator::next);
                Self { dq, dk, dv, dbias: rows.or(own_dbias), dsoftmax_aux: own_dsinks }
            })
            .collect()
    }
}

/// Returns the rows of each rank if every rank's are contiguous and in the order of ranks.
fn contiguous<B: Backend<Space: HostTensors>>(
    ranks: &[Plan<B>],
    rows: impl Fn(&Plan<B>) -> &Runs,
) -> Option<Vec<Range<usize>>> {
    let mut next = 0;
    let mut blocks = Vec::with_capacity(ranks.len());
    for plan in ranks {
        let rows = rows(plan);
        match rows.runs() {
            [] => {}
            [run] if run.start == next && (run.step == 1 || run.count == 1) => {}
            _ => return None,
        }
        let first = next;
        next += rows.len().cast_signed();
        blocks.push(index(first.cast_unsigned())..index(next.cast_unsigned()));
    }
    Some(blocks)
}

/// Splits a tensor into adjacent blocks of rows.
fn split_rows<'a, T, D: Dimension>(
    whole: ArrayViewMut<'a, T, D>,
    axis: Axis,
    blocks: &[Range<usize>],
) -> Vec<ArrayViewMut<'a, T, D>> {
    let mut parts = Vec::with_capacity(blocks.len());
    let mut rest = whole;
    for block in blocks {
        let (part, after) = rest.split_at(axis, block.len());
        parts.push(part);
        rest = after;
    }
    parts
}

/// Slices of the global rows `rows`: for each the index of its first row among them, its length,
/// itself.
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

/// Returns the rows `rows` of `array`, in that order: a view if they are one run, else a copy.
fn get_rows<'a, T: Element, D: Dimension + RemoveAxis>(
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
    let mut own = memory::zeros(name, shape)?;
    for (first, count, slice) in slices(rows) {
        let into = Slice::new(first as isize, Some((first + count) as isize), 1);
        own.slice_axis_mut(axis, into).assign(&array.slice_axis(axis, slice));
    }
    Ok(own.into())
}

/// Writes `part` to the rows `rows` of `whole`.
fn put_rows<T: Clone, D: Dimension + RemoveAxis>(
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
