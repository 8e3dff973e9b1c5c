//! All-reduce of gradients of which every rank computes a summand: dsinks, and dbias of a bias that
//! is broadcast over queries. In the reproducible order, each column of the latter is a sum on the
//! rank that owns the key, and 0 on the others, so that its sum over ranks is exact.
//!
//! Few numbers are gathered whole by every rank, in ⌈log₂ ranks⌉ messages. Of more, each rank sums a
//! slice (`slices.rs`), so that it receives them twice and not once from every rank. Either adds in
//! ring order, and so has the same bits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use annulus_core::{Backend, Error, Gradients, Result, Space, Spec, memory};

use super::{
    PassKind, Ring, RingOptions,
    leaf_reduce::LeafOwners,
    slices::{self, Slices},
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
            None if self.reduces => self.reduce_view(view),
            None => Ok(Duration::ZERO),
        }
    }

    fn reduce_view(&mut self, view: &mut <B::Space as Space>::ViewMut<'_>) -> Result<Duration> {
        // a view in device memory was refused when the plan was made
        let mut view = B::Space::host_view_mut(view)
            .ok_or_else(|| Error::internal("a gradient in device memory cannot be summed"))?;
        let mut waited = Duration::ZERO;
        view.map_widened(self.summands_at_once(), |part| {
            waited += self.all_reduce(part)?;
            Ok(())
        })?;
        Ok(waited)
    }

    /// Returns the bytes of slices that this rank sends in a backward pass.
    pub(super) fn reduce_bytes(&self) -> u64 {
        if !self.reduces {
            return 0;
        }
        let spec = &self.agreed.spec;
        let heads = |per_head| if per_head { spec.dims.q_heads } else { 1 };
        let sinks = spec.sinks.filter(|_| self.plan.q_leaves.is_none());
        let sinks = sinks.map_or(0, |sinks| heads(sinks.per_head) * sinks.count);
        let has_dbias = bias_is_shared(spec) && self.plan.kv_leaves.is_none();
        let bias = spec.bias.filter(|_| has_dbias);
        let bias = bias.map_or(0, |shape| shape.iter().product());
        let chunk = self.summands_at_once();
        let of_chunk = |len: usize| match self.slices(len) {
            Some(slices) => slices.bytes_sent(self.ring_index),
            None => 0,
        };
        let of = |len: usize| (len / chunk) as u64 * of_chunk(chunk) + of_chunk(len % chunk);
        of(sinks) + of(bias)
    }

    /// Returns the numbers that are summed at once.
    fn summands_at_once(&self) -> usize {
        if self.sums_slices() { slices::summands(self.ranks) } else { SUMMANDS_PER_GATHER }
    }

    /// Returns true if long sums are made by slices. Two ranks would send as much as whole sums.
    fn sums_slices(&self) -> bool {
        self.agreed.host_buffers && self.ranks > 2
    }

    /// Returns the slices of `len` numbers, or `None` if every rank sums all of them.
    fn slices(&self, len: usize) -> Option<Slices> {
        let is_long = self.sums_slices() && len > SUMMANDS_PER_GATHER;
        is_long.then(|| Slices::new(len, self.ranks))
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
        let chunk = self.summands_at_once();
        let result = part.chunks_mut(chunk).try_for_each(|part| self.all_reduce(part).map(drop));
        self.remember(result)
    }

    /// Sums numbers over all ranks. Returns the exposed communication of slices.
    fn all_reduce(&mut self, part: &mut [f64]) -> Result<Duration> {
        if self.ranks == 1 {
            return Ok(Duration::ZERO);
        }
        match self.slices(part.len()) {
            Some(slices) => self.sum_slices(&slices, part),
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
    fn sum_slices(&mut self, slices: &Slices, part: &mut [f64]) -> Result<Duration> {
        let tag = self.next_tag;
        self.next_tag += 1;
        let own = slices.range(self.ring_index);
        let mut sum = memory::filled("a slice of a sum", own.len(), 0.0)?;
        let hook = self.watch.hook();
        let observer = Observer::of_messages(hook, self.rank, PassKind::Backward, Instant::now());
        let exchange = slices::Exchange {
            slices,
            order: &self.agreed.order,
            ring_index: self.ring_index,
            step: self.plan.program.steps.len(),
            tag,
        };
        let backend = &self.backend;
        let waited = exchange.sum::<B::Space>(
            self.transport.as_mut(),
            observer,
            |bytes| backend.allocate(bytes),
            part,
            &mut sum,
        )?;
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

fn bytes_of(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Adds the numbers that `bytes` encode.
pub(super) fn add(sums: &mut [f64], bytes: &[u8]) {
    let numbers = bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
}

fn check_length(peer: usize, bytes: &[u8], want: usize) -> Result<()> {
    if bytes.len() == want * 8 {
        return Ok(());
    }
    let what = format!("{} numbers to sum, want {want}", bytes.len() / 8);
    Err(Error::Comm { peer, step: 0, what })
}
