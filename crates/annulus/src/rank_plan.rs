//! One rank of a ring, with typed tensors in host memory: what an MPI program holds.

use annulus_comm::ring::Ring;
use annulus_core::{Backend, Batch, Dims, Element, Error, Gradients, HostTensors, Inputs, Layout, Outputs, Result, Runs, Saved, Transport};
use ndarray::{Array2, Array3, Array4, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut4, Axis};

use crate::{Attention, Backward, Forward, Tensors};

/// One rank's plan. Made once, used for many passes; every `&mut self` method is collective over the ring.
///
/// # Examples
/// A ring of two ranks, each of which holds its own rows and nothing else. Here a rank is a thread; the body of `rank` is what a process
/// of a distributed program runs, with that process's transport.
/// ```
/// use annulus::{
///     Attention, Cpu, Dims, RankPlan, Result, Tensors,
///     comm::threads::{Threads, each_rank, ring},
/// };
/// use ndarray::Array4;
///
/// fn rank(transport: Threads) -> Result<f32> {
///     let dims = Dims::new(1, 64, 4, 16); // of the whole sequence, the same on every rank
///     let attention = Attention::new().causal();
///     let mut plan = RankPlan::new(&attention, dims, None, Cpu::new(1)?, transport)?;
///
///     // this rank makes (reads, receives, computes) the rows that the layout gives it, in that order
///     let rows: Vec<i64> = plan.q_rows().iter().collect();
///     let x = Array4::from_shape_fn((1, rows.len(), 4, 16), |(_, i, h, c)| ((rows[i] as usize * 7 + h * 3 + c) % 11) as f32 * 0.1);
///     let tensors = Tensors::new(x.view(), x.view(), x.view());
///
///     let forward = plan.forward(&tensors)?; // out and lse of these rows, over the keys of all ranks
///     let gradients = plan.backward(&tensors, &forward, x.view(), None)?;
///     assert_eq!(gradients.dk.dim(), x.dim());
///     Ok(forward.lse.sum())
/// }
///
/// let sums = each_rank(ring(2), |_, transport| rank(transport))?;
/// assert!(sums.iter().all(|sum| sum.is_finite()));
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug)]
pub struct RankPlan<B: Backend<Space: HostTensors>> {
    ring: Ring<B>,
}

impl<B: Backend<Space: HostTensors>> RankPlan<B> {
    /// Plans `attention` over tensors of global lengths `dims` on this rank of `transport`.
    ///
    /// # Ordering
    /// Collective.
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::Unsupported`], [`Error::RankMismatch`], [`Error::Refused`], [`Error::OutOfMemory`].
    pub fn new<T: Transport<B::Space> + 'static>(
        attention: &Attention,
        dims: Dims,
        layout: Option<Layout>,
        backend: B,
        transport: T,
    ) -> Result<Self> {
        let transport = attention.bounded(transport)?;
        let ring = Ring::new(backend, Box::new(transport), attention.spec(dims), attention.ring_options(layout))?;
        Ok(Self { ring })
    }

    /// Fits the plan to a new batch; `batch` has this rank's rows (`cum_seqlens` whole).
    ///
    /// # Ordering
    /// Collective; far cheaper than a pass.
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor here and [`Error::Refused`] elsewhere; [`Error::RankMismatch`], [`Error::Unsupported`]:
    /// the old batch stays in force. As [`RankPlan::forward`] if communication fails.
    pub fn update(&mut self, batch: &Batch) -> Result<()> {
        self.ring.update(batch)
    }

    /// Computes this rank's out and lse.
    ///
    /// # Shapes
    /// See [`Tensors`] and [`Forward`], with this rank's rows ([`RankPlan::q_rows`], [`RankPlan::kv_rows`]).
    /// # Ordering
    /// Collective.
    /// # Errors
    /// [`Error::InvalidArgument`] here and [`Error::Refused`] elsewhere if a tensor does not fit the plan, [`Error::RankMismatch`]: nothing
    /// was done on any rank. [`Error::Comm`], [`Error::Timeout`], [`Error::PeerLost`], [`Error::Aborted`], [`Error::Device`] end the plan;
    /// from then on [`Error::Poisoned`].
    pub fn forward<T: Element>(&mut self, tensors: &Tensors<'_, T>) -> Result<Forward<T>> {
        let (spec, q_rows) = (self.ring.spec(), self.q_rows().len() as usize);
        let Dims { batch, q_heads, value_dim, .. } = spec.dims;
        let statistics = || Array3::from_elem((batch, q_heads, q_rows), zero::<T::Accumulator>());
        let unnormalized = |normalize: bool| (!normalize).then(statistics);
        let mut forward = Forward {
            out: Array4::from_elem((batch, q_rows, q_heads, value_dim), zero::<T>()),
            lse: statistics(),
            max: unnormalized(spec.normalize),
            sum: unnormalized(spec.normalize),
            ties: unnormalized(spec.normalize),
            reports: Vec::new(),
        };
        let mut outputs = Outputs {
            out: T::view_mut(forward.out.view_mut()),
            lse: T::Accumulator::view_mut(with_last_axis(&mut forward.lse)),
            max: forward.max.as_mut().map(|max| T::Accumulator::view_mut(with_last_axis(max))),
            sum: forward.sum.as_mut().map(|sum| T::Accumulator::view_mut(with_last_axis(sum))),
            ties: forward.ties.as_mut().map(|ties| T::Accumulator::view_mut(with_last_axis(ties))),
        };
        let report = self.ring.forward(&inputs(tensors), &mut outputs)?;
        forward.reports.push(report);
        Ok(forward)
    }

    /// Computes this rank's gradients from what [`RankPlan::forward`] gave and ∂L/∂out, ∂L/∂lse.
    ///
    /// dsinks, and dbias if it is broadcast over queries, are summed over all ranks unless the plan says `local_gradients`.
    ///
    /// # Shapes
    /// `dout` as out, `dlse` as lse; see [`Backward`].
    /// # Ordering
    /// Collective.
    /// # Errors
    /// As [`RankPlan::forward`].
    pub fn backward<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        forward: &Forward<T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        let mut gradients = Backward {
            dq: Array4::from_elem(tensors.q.dim(), zero::<T>()),
            dk: Array4::from_elem(tensors.k.dim(), zero::<T>()),
            dv: Array4::from_elem(tensors.v.dim(), zero::<T>()),
            dbias: tensors.bias.as_ref().map(|bias| Array4::from_elem(bias.dim(), zero::<T::Accumulator>())),
            dsinks: tensors.sinks.as_ref().map(|sinks| Array2::from_elem(sinks.dim(), zero::<T::Accumulator>())),
            reports: Vec::new(),
        };
        let saved = Saved::<B::Space> {
            out: T::view(forward.out.view()),
            lse: view3::<T>(forward.lse.view()),
            max: forward.max.as_ref().map(|max| view3::<T>(max.view())),
            ties: forward.ties.as_ref().map(|ties| view3::<T>(ties.view())),
            dout: T::view(dout),
            dlse: dlse.map(view3::<T>),
        };
        let mut places = Gradients::<B::Space> {
            dq: T::view_mut(gradients.dq.view_mut()),
            dk: T::view_mut(gradients.dk.view_mut()),
            dv: T::view_mut(gradients.dv.view_mut()),
            dbias: gradients.dbias.as_mut().map(|dbias| T::Accumulator::view_mut(dbias.view_mut())),
            dsinks: gradients
                .dsinks
                .as_mut()
                .map(|dsinks| T::Accumulator::view_mut(dsinks.view_mut().insert_axis(Axis(2)).insert_axis(Axis(3)))),
        };
        let report = self.ring.backward(&inputs(tensors), &saved, &mut places)?;
        gradients.reports.push(report);
        self.reduce(&mut gradients)?;
        Ok(gradients)
    }

    /// As [`RankPlan::backward`], computing out and lse again instead of keeping them between the passes.
    ///
    /// # Ordering
    /// Collective: a forward and a backward pass.
    /// # Errors
    /// As [`RankPlan::forward`].
    pub fn backward_recomputed<T: Element>(
        &mut self,
        tensors: &Tensors<'_, T>,
        dout: ArrayView4<'_, T>,
        dlse: Option<ArrayView3<'_, T::Accumulator>>,
    ) -> Result<Backward<T>> {
        let forward = self.forward(tensors)?;
        self.backward(tensors, &forward, dout, dlse)
    }

    /// The global query rows of this rank, in the order in which its tensors have them.
    pub fn q_rows(&self) -> &Runs {
        self.ring.q_rows()
    }

    /// The global key rows of this rank, in the order in which its tensors have them.
    pub fn kv_rows(&self) -> &Runs {
        self.ring.kv_rows()
    }

    /// The engine: schedule, layout, route, spec, and passes over raw views.
    pub const fn ring(&self) -> &Ring<B> {
        &self.ring
    }

    /// The engine, for passes over raw views.
    pub const fn ring_mut(&mut self) -> &mut Ring<B> {
        &mut self.ring
    }

    /// Sums what every rank has only a part of.
    fn reduce<T: Element>(&mut self, gradients: &mut Backward<T>) -> Result<()> {
        if !self.ring.reduces_gradients() {
            return Ok(());
        }
        if let Some(dsinks) = &mut gradients.dsinks {
            sum_parts(&mut self.ring, dsinks.as_slice_mut())?;
        }
        let over_queries = self.ring.spec().bias.is_some_and(|shape| shape[2] == 1);
        if let Some(dbias) = gradients.dbias.as_mut().filter(|_| over_queries) {
            sum_parts(&mut self.ring, dbias.as_slice_mut())?;
        }
        Ok(())
    }
}

fn sum_parts<B: Backend<Space: HostTensors>, T: Element>(ring: &mut Ring<B>, part: Option<&mut [T]>) -> Result<()> {
    let part = part.ok_or_else(|| Error::Device { what: "a gradient that is not contiguous".into() })?;
    let mut sum: Vec<f64> = part.iter().map(|number| number.to_f64()).collect();
    ring.sum_over_ranks(&mut sum)?;
    part.iter_mut().zip(sum).for_each(|(number, sum)| *number = T::from_f64(sum));
    Ok(())
}

fn inputs<'a, T: Element, S: HostTensors>(tensors: &'a Tensors<'_, T>) -> Inputs<'a, S> {
    let sinks = |sinks: &'a ArrayView2<'_, T::Accumulator>| T::Accumulator::view(sinks.view().insert_axis(Axis(2)).insert_axis(Axis(3)));
    Inputs {
        q: T::view(tensors.q.view()),
        k: T::view(tensors.k.view()),
        v: T::view(tensors.v.view()),
        bias: tensors.bias.as_ref().map(|bias| T::Accumulator::view(bias.view())),
        sinks: tensors.sinks.as_ref().map(sinks),
    }
}

fn with_last_axis<T>(array: &mut Array3<T>) -> ArrayViewMut4<'_, T> {
    array.view_mut().insert_axis(Axis(3))
}

fn view3<T: Element>(array: ArrayView3<'_, T::Accumulator>) -> annulus_core::HostView<'_> {
    T::Accumulator::view(array.insert_axis(Axis(3)))
}

fn zero<T: Element>() -> T {
    T::from_f64(0.0)
}
