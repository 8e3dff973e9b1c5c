//! All-reduce of gradients of which every rank computes a summand: dsinks, and dbias of a bias that
//! is broadcast over queries. In the reproducible order, each column of the latter is a sum on the
//! rank that owns the key, and 0 on the others, so that its sum over ranks is exact.
//!
//! Few numbers are gathered whole by every rank, in ⌈log₂ ranks⌉ messages. Of more, each rank sums
//! a slice (`slices.rs`), so that it receives them twice and not once from every rank. Either adds
//! in ring order, and so has the same bits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{AgreedLengths, Backend, Error, Gradients, Result, Space, Spec, memory};

use super::{
    PassKind, Ring, RingOptions,
    in_flight::InFlight,
    leaf_reduce::LeafOwners,
    plan::{Agreed, RingPlan},
    slices::{self, Slices, add},
    step_events::Observer,
};
use crate::agreement::{SUMMANDS_PER_GATHER, all_gather};

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
    pub(super) fn reduce_gradients(
        &mut self,
        gradients: &mut Gradients<'_, B::Space>,
    ) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        if let Some(dsinks) = &mut gradients.dsinks {
            let terms = std::mem::take(&mut self.buffers.leaf_sums.sinks);
            waited += self.reduce_gradient(self.plan.q_leaves.clone(), &terms, dsinks)?;
            self.buffers.leaf_sums.sinks = terms;
        }
        if let Some(dbias) = gradients.dbias.as_mut().filter(|_| bias_is_shared(&self.agreed.spec))
        {
            let terms = std::mem::take(&mut self.buffers.leaf_sums.bias);
            waited += self.reduce_gradient(self.plan.kv_leaves.clone(), &terms, dbias)?;
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

    fn reduce_view(&mut self, view: &mut <B::Space as Space>::ViewMut<'_>) -> Result<Duration> {
        // a view in device memory was refused when the plan was made
        let mut view = B::Space::host_view_mut(view)
            .ok_or_else(|| Error::internal("a gradient in device memory cannot be summed"))?;
        let mut waited = Duration::ZERO;
        let lengths = self.plan.lengths;
        view.map_widened(summands_at_once(&self.agreed, self.ranks), |part| {
            waited += self.all_reduce(part, lengths)?;
            Ok(())
        })?;
        Ok(waited)
    }

    /// Returns the bytes of slices that this rank sends in a backward pass.
    pub(super) fn reduce_bytes(&self) -> u64 {
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
        self.alive()?;
        let chunk = summands_at_once(&self.agreed, self.ranks);
        // the plan does not know the length of this sum
        let mut chunks = part.chunks_mut(chunk);
        let result = chunks.try_for_each(|part| self.all_reduce(part, None).map(drop));
        self.remember(result)
    }

    /// Sums numbers over all ranks. `lengths` proves that all slices match. Returns the exposed
    /// communication of slices.
    fn all_reduce(&mut self, part: &mut [f64], lengths: Option<AgreedLengths>) -> Result<Duration> {
        if self.ranks == 1 {
            return Ok(Duration::ZERO);
        }
        match slices_of(&self.agreed, self.ranks, part.len()) {
            Some(slices) => self.sum_slices(&slices, part, lengths),
            None => self.sum_whole(part).map(|()| Duration::ZERO),
        }
    }

    /// Gathers the numbers of all ranks and sums them.
    fn sum_whole(&mut self, part: &mut [f64]) -> Result<()> {
        let round = self.entries.round();
        let all = all_gather(self.transport.as_mut(), round, &bytes_of(part))?;
        part.fill(0.0);
        let order = &self.agreed.order;
        for (&peer, bytes) in order.ranks().iter().zip(order.by_ring_index(all)) {
            check_length(peer, &bytes, part.len())?;
            add(part, &bytes);
        }
        Ok(())
    }

    /// Sums the own slice of the numbers, and gathers the sums of all slices.
    fn sum_slices(
        &mut self,
        slices: &Slices,
        part: &mut [f64],
        lengths: Option<AgreedLengths>,
    ) -> Result<Duration> {
        let first_tag = self.next_tag;
        self.next_tag += 1;
        let own = slices.range(self.ring_index);
        let mut sum = memory::filled("a slice of a sum", own.len(), 0.0)?;
        let hook = self.watch.hook();
        let observer = Observer::of_messages(hook, self.rank, PassKind::Backward, Instant::now());
        let step = self.plan.program.steps.len();
        let exchange = slices::Exchange::new(slices, &self.agreed.order, self.rank, step);
        let transport = self.transport.as_mut();
        let mut in_flight = InFlight::new(transport, first_tag, lengths, observer);
        let backend = &self.backend;
        let allocate = |bytes| backend.allocate(bytes);
        exchange.sum(&mut in_flight, allocate, part, &mut sum)?;
        let waited = in_flight.waited();
        let round = self.entries.round();
        let sums = all_gather(self.transport.as_mut(), round, &bytes_of(&sum))?;
        let order = &self.agreed.order;
        let sums = order.ranks().iter().zip(order.by_ring_index(sums)).enumerate();
        for (ring_index, (&peer, bytes)) in sums {
            let slice = &mut part[slices.range(ring_index)];
            check_length(peer, &bytes, slice.len())?;
            slice.fill(0.0);
            add(slice, &bytes);
        }
        Ok(waited)
    }
}

/// Returns the numbers that are summed at once.
fn summands_at_once(agreed: &Agreed, ranks: usize) -> usize {
    if sums_slices(agreed, ranks) { slices::summands(ranks) } else { SUMMANDS_PER_GATHER }
}

/// Returns true if long sums are made by slices. Two ranks would send as much as whole sums.
fn sums_slices(agreed: &Agreed, ranks: usize) -> bool {
    agreed.host_buffers && ranks > 2
}

/// Returns the slices of `len` numbers, or `None` if every rank sums all of them.
fn slices_of(agreed: &Agreed, ranks: usize, len: usize) -> Option<Slices> {
    let is_long = sums_slices(agreed, ranks) && len > SUMMANDS_PER_GATHER;
    is_long.then(|| Slices::new(len, ranks))
}

/// Returns the slices of the sums of a backward pass.
pub(super) fn slices_of_pass<'a>(
    agreed: &'a Agreed,
    plan: &RingPlan,
) -> impl Iterator<Item = Slices> + use<'a> {
    let ranks = plan.shards.kv.len();
    let spec = &agreed.spec;
    let sinks = spec.sinks.filter(|_| plan.q_leaves.is_none());
    let sinks =
        sinks.map_or(
            0,
            |sinks| {
                if sinks.per_head { spec.dims.q_heads * sinks.count } else { sinks.count }
            },
        );
    let bias = spec.bias.filter(|_| bias_is_shared(spec) && plan.kv_leaves.is_none());
    let bias = bias.map_or(0, |shape| shape.iter().product());
    let sums = [sinks, bias].into_iter().filter(|_| agreed.reduces);
    let chunk = summands_at_once(agreed, ranks);
    let chunks =
        sums.flat_map(move |len| (0..len).step_by(chunk).map(move |at| chunk.min(len - at)));
    chunks.filter_map(move |len| slices_of(agreed, ranks, len))
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
