//! All-reduce of gradients of which every rank computes a summand: dsinks, and dbias of a bias that
//! is broadcast over queries. In the reproducible order, each column of the latter is a sum on the
//! rank that owns the key, and 0 on the others, so that its sum over ranks is exact.
//!
//! Few numbers are gathered whole by every rank, in ⌈log₂ ranks⌉ messages. Of more, each rank sums
//! a slice (`slices.rs`), so that it receives them twice and not once from every rank. Either adds
//! in ring order, and so has the same bits.
//!
//! In the reproducible order dsinks, and dbias of a bias with one row and one column, are sums over
//! the leaves of all ranks ([`LeafOwners`]):
//!
//! ```text
//! merge the terms of the own leaves into nodes of the tree that are complete here
//! all-gather the nodes, some elements at a time
//! merge the nodes of all ranks in ascending order
//! ```
//! The plan defines the nodes of all ranks, so only numbers are sent.
//!
//! dbias of a table is there a sum over all pairs, which no leaf owns: ranks sum the digits of exact
//! sums ([`ExactSum`]).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{
    AbsentLeaves, AgreedLengths, Backend, Error, ExactSum, Gradients, Order, Result, Space, Spec,
    Transport, ViewMut, memory,
};

use super::{
    PassKind, Ring, RingOptions, StepHook,
    in_flight::InFlight,
    leaf_owners::LeafOwners,
    plan::{Agreed, RingPlan},
    slices::{SliceExchange, Slices, Slicing, add},
    step_events::Observer,
};
use crate::{agreement::all_gather, calls::Entries, delegate::HostMessages};

/// Returns true if every rank computes a summand of dbias, like of dsinks.
pub(crate) fn bias_is_shared(spec: &Spec) -> bool {
    spec.bias.is_some_and(|[_, _, q_len, _]| q_len == 1)
}

/// Returns true if a backward pass of this ring sums gradients over ranks.
pub(super) fn is_needed(spec: &Spec, options: &RingOptions, ranks: usize) -> bool {
    let shared = spec.sinks.is_some() || bias_is_shared(spec);
    ranks > 1 && options.backward && !options.local_gradients && shared
}

impl<B: Backend> Ring<B> {
    /// Sums dsinks and a shared dbias over all ranks. Returns the exposed communication of slices.
    pub(crate) fn reduce_gradients(
        &mut self,
        gradients: &mut Gradients<ViewMut<'_, B::Space>>,
    ) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        if let Some(dsinks) = &mut gradients.dsinks {
            let terms = std::mem::take(&mut self.buffers.leaf_sums.sinks);
            waited += self.reduce_gradient(self.plan.q_leaves.clone(), &terms, dsinks)?;
            self.buffers.leaf_sums.sinks = terms;
        }
        if let Some(dbias) = gradients.dbias.as_mut().filter(|_| bias_is_shared(&self.agreed.spec))
        {
            let mut terms = std::mem::take(&mut self.buffers.leaf_sums.bias);
            waited += if self.agreed.spec.sums_bias_exactly() {
                self.reduce_exact(&mut terms, dbias)?
            } else {
                self.reduce_gradient(self.plan.kv_leaves.clone(), &terms, dbias)?
            };
            self.buffers.leaf_sums.bias = terms;
        }
        Ok(waited)
    }

    /// Sums a gradient over the leaves of `owners`, or without these over ranks.
    fn reduce_gradient(
        &mut self,
        owners: Option<Arc<LeafOwners>>,
        terms: &[f64],
        view: &mut <B::Space as Space>::ViewMut<'_>,
    ) -> Result<Duration> {
        match owners {
            Some(owners) => self.reduce_leaves(&owners, terms, view).map(|()| Duration::ZERO),
            None if self.agreed.reduces => self.reduce_view(view),
            None => Ok(Duration::ZERO),
        }
    }

    /// Sums exact sums over ranks: `terms` are the numbers of each element.
    fn reduce_exact(
        &mut self,
        terms: &mut [f64],
        view: &mut <B::Space as Space>::ViewMut<'_>,
    ) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        let lengths = self.plan.lengths;
        if self.agreed.reduces {
            for part in terms.chunks_mut(Slicing::new(self.ranks).numbers_at_once()) {
                waited += self.all_reduce(part, lengths)?;
            }
        }
        let mut view = B::Space::host_view_mut(view)
            .ok_or_else(|| Error::internal("a gradient in device memory cannot be summed"))?;
        let sums = terms.chunks_exact(ExactSum::NUMBERS);
        view.write_each(sums.map(|numbers| ExactSum::of_numbers(numbers).total()));
        Ok(waited)
    }

    fn reduce_view(&mut self, view: &mut <B::Space as Space>::ViewMut<'_>) -> Result<Duration> {
        // a view in device memory was refused when the plan was made
        let mut view = B::Space::host_view_mut(view)
            .ok_or_else(|| Error::internal("a gradient in device memory cannot be summed"))?;
        let mut waited = Duration::ZERO;
        let lengths = self.plan.lengths;
        view.map_widened(Slicing::new(self.ranks).numbers_at_once(), |part| {
            waited += self.all_reduce(part, lengths)?;
            Ok(())
        })?;
        Ok(waited)
    }

    /// Returns the bytes of slices that this rank sends in a backward pass.
    pub(crate) fn reduce_bytes(&self) -> u64 {
        slices_of_pass(&self.agreed, &self.plan)
            .map(|slices| slices.bytes_sent(self.ring_index))
            .sum()
    }

    /// Sums `part` over all ranks in ring order, so that every rank has the same bits.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Ring::forward`].
    pub fn sum_over_ranks(&mut self, part: &mut [f64]) -> Result<()> {
        self.calls.alive()?;
        let chunk = Slicing::new(self.ranks).numbers_at_once();
        // the plan does not know the length of this sum
        let mut chunks = part.chunks_mut(chunk);
        let result = chunks.try_for_each(|part| self.all_reduce(part, None).map(drop));
        self.calls.remember(result)
    }

    /// Sums numbers over all ranks. `lengths` proves that all slices match. Returns the exposed
    /// communication of slices.
    fn all_reduce(&mut self, part: &mut [f64], lengths: Option<AgreedLengths>) -> Result<Duration> {
        let sum = AllReduce {
            slicing: Slicing::new(self.ranks),
            transport: self.transport.as_mut(),
            entries: &mut self.calls.entries,
            next_tag: &mut self.calls.next_tag,
            order: &self.agreed.order,
            rank: self.rank,
            step: self.plan.program.steps.len(),
            lengths,
            hook: self.watch.hook(),
        };
        sum.run(part)
    }
}

/// An all-reduce of numbers over all ranks of a plan, added in ring order, so that every rank has
/// the same bits.
pub(crate) struct AllReduce<'a, S: Space> {
    pub(crate) slicing: Slicing,
    pub(crate) transport: &'a mut dyn Transport<S>,
    pub(crate) entries: &'a mut Entries,
    pub(crate) next_tag: &'a mut u64,
    pub(crate) order: &'a Order,
    pub(crate) rank: usize,
    /// Ring step, for errors and events.
    pub(crate) step: usize,
    /// Proof that the slices match on all ranks.
    pub(crate) lengths: Option<AgreedLengths>,
    pub(crate) hook: Option<&'a StepHook>,
}

impl<S: Space> AllReduce<'_, S> {
    /// Sums at most [`Slicing::numbers_at_once`] numbers. Returns the exposed communication of
    /// slices, whose messages are in host memory.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// Those of the transport; [`Error::OutOfMemory`].
    pub(crate) fn run(self, numbers: &mut [f64]) -> Result<Duration> {
        if self.order.ranks().len() == 1 {
            return Ok(Duration::ZERO);
        }
        match self.slicing.slices(numbers.len()) {
            Some(slices) => self.sum_slices(&slices, numbers),
            None => self.sum_whole(numbers).map(|()| Duration::ZERO),
        }
    }

    /// Gathers the numbers of all ranks and sums them.
    fn sum_whole(self, numbers: &mut [f64]) -> Result<()> {
        let round = self.entries.round();
        let all = all_gather(self.transport, round, &bytes_of(numbers))?;
        numbers.fill(0.0);
        for (&peer, bytes) in self.order.ranks().iter().zip(self.order.by_ring_index(all)) {
            check_length(peer, &bytes, numbers.len())?;
            add(numbers, &bytes);
        }
        Ok(())
    }

    /// Sums the own slice of the numbers, and gathers the sums of all slices.
    fn sum_slices(self, slices: &Slices, numbers: &mut [f64]) -> Result<Duration> {
        let Self { transport, order, rank, .. } = self;
        let first_tag = *self.next_tag;
        *self.next_tag += 1;
        let own = slices.range(order.ring_index(rank));
        let mut sum = memory::filled("a slice of a sum", own.len(), 0.0)?;
        let observer = Observer::of_messages(self.hook, rank, PassKind::Backward, Instant::now());
        let exchange = SliceExchange::new(slices, order, rank, self.step);
        let mut messages = HostMessages::new(&mut *transport);
        let mut in_flight = InFlight::new(&mut messages, first_tag, self.lengths, observer);
        exchange.sum(&mut in_flight, numbers, &mut sum)?;
        let waited = in_flight.waited();
        let sums = all_gather(transport, self.entries.round(), &bytes_of(&sum))?;
        let sums = order.ranks().iter().zip(order.by_ring_index(sums)).enumerate();
        for (ring_index, (&peer, bytes)) in sums {
            let slice = &mut numbers[slices.range(ring_index)];
            check_length(peer, &bytes, slice.len())?;
            slice.fill(0.0);
            add(slice, &bytes);
        }
        Ok(waited)
    }
}

/// Returns the slices of the sums of a backward pass.
pub(super) fn slices_of_pass<'a>(
    agreed: &'a Agreed,
    plan: &RingPlan,
) -> impl Iterator<Item = Slices> + use<'a> {
    let spec = &agreed.spec;
    let sinks = if plan.q_leaves.is_none() { sink_numbers(spec) } else { 0 };
    let bias = if plan.kv_leaves.is_none() { shared_bias_numbers(spec) } else { 0 };
    let bias = if spec.sums_bias_exactly() { bias * ExactSum::NUMBERS } else { bias };
    let sums = [sinks, bias].into_iter().filter(|_| agreed.reduces);
    let slicing = Slicing::new(plan.shards.kv.len());
    sums.flat_map(move |numbers| slicing.of_sum(numbers))
}

/// Returns the numbers of dsinks.
pub(crate) fn sink_numbers(spec: &Spec) -> usize {
    let heads = |per_head| if per_head { spec.dims.q_heads } else { 1 };
    spec.sinks.map_or(0, |sinks| heads(sinks.per_head) * sinks.count)
}

/// Returns the numbers of a dbias of which every rank computes a summand, else 0.
pub(crate) fn shared_bias_numbers(spec: &Spec) -> usize {
    spec.bias.filter(|_| bias_is_shared(spec)).map_or(0, |shape| shape.iter().product())
}

fn bytes_of(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn check_length(peer: usize, bytes: &[u8], want: usize) -> Result<()> {
    if bytes.len() == want * 8 {
        return Ok(());
    }
    let what = format!("{} numbers to sum, want {want}", bytes.len() / 8);
    Err(Error::Comm { peer, step: 0, what })
}

impl<B: Backend> Ring<B> {
    /// Writes the sum over all leaves of `terms`, `[own leaves][elements of the view]`; over those
    /// of this rank alone if the caller sums over ranks.
    ///
    /// # Ordering
    /// Collective.
    pub(super) fn reduce_leaves(
        &mut self,
        owners: &LeafOwners,
        terms: &[f64],
        view: &mut <B::Space as Space>::ViewMut<'_>,
    ) -> Result<()> {
        let (_, shape) = B::Space::describe_mut(view);
        let width = shape.iter().product();
        let mut view = B::Space::host_view_mut(view)
            .ok_or_else(|| Error::internal("a gradient in device memory cannot be summed"))?;
        let absent = if self.agreed.reduces { AbsentLeaves::Unknown } else { AbsentLeaves::Empty };
        let own = owners.merge_own(terms, width, absent)?;
        let mut first = 0;
        view.map_widened(owners.chunk(), |part| {
            let elements = first..first + part.len();
            first = elements.end;
            if !self.agreed.reduces {
                part.fill(0.0);
                part.iter_mut()
                    .zip(own.get(elements).unwrap_or_default())
                    .for_each(|(into, &sum)| *into = sum);
                return Ok(());
            }
            let nodes = own.chunks_exact(width).flat_map(|node| &node[elements.clone()]);
            let bytes: Vec<u8> = nodes.flat_map(|number| number.to_le_bytes()).collect();
            let round = self.calls.entries.round();
            let parts = all_gather(self.transport.as_mut(), round, &bytes)?;
            owners.merge_all(parts, &self.agreed.order, part)
        })
    }
}
