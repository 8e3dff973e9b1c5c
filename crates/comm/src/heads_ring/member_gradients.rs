//! Gradients of which every rank has all heads: dsinks, and dbias without a query axis.
//!
//! Each is a sum over all ranks, to which a rank adds zeros for the heads that it does not have
//! (`ring/reduce.rs`: few numbers are gathered whole, of more each rank sums a slice). With one key
//! column the ring has summed over the groups, so only the first group contributes. With several,
//! all ranks have terms.

use std::time::Duration;

use annulus_core::{
    Backend, Gradients, HostTensors, HostViewMut, MessageBalance, Order, Result, Spec,
};

use super::HeadsRing;
use crate::ring::{
    RingOptions,
    reduce::{AllReduce, bias_is_shared, shared_bias_numbers, sink_numbers},
    slices::{Exchange, Slices, Slicing},
};

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Writes dsinks, and a dbias without a query axis, of all heads, unless the caller sums them.
    /// The ring has written the terms of the own heads, and zeros. Returns the exposed
    /// communication of slices.
    ///
    /// # Ordering
    /// Collective.
    pub(super) fn sum_gradients(
        &mut self,
        gradients: &mut Gradients<HostViewMut<'_>>,
    ) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        if self.options.local_gradients {
            return Ok(waited);
        }
        if let Some(dsinks) = &mut gradients.dsinks {
            waited += self.sum(dsinks)?;
        }
        match &mut gradients.dbias {
            Some(dbias) if bias_is_shared(&self.spec) => waited += self.sum(dbias)?,
            _ => {}
        }
        Ok(waited)
    }

    /// Sums a gradient over all ranks.
    fn sum(&mut self, view: &mut HostViewMut<'_>) -> Result<Duration> {
        if self.grid.columns() == 1 && self.grid.group(self.ring_index) > 0 {
            view.fill_zero();
        }
        let slicing = Slicing::new(self.ranks);
        // tags of the rings, whose sums over groups are between some of the same ranks
        let next_tag = self.ring.next_tag_mut();
        let mut waited = Duration::ZERO;
        view.map_widened(slicing.numbers_at_once(), |numbers| {
            let sum = AllReduce {
                slicing,
                transport: &mut self.transport,
                entries: &mut self.calls.entries,
                next_tag: &mut *next_tag,
                order: &self.layout.order,
                rank: self.rank,
                // the step after the last one of the ring
                step: self.grid.groups(),
                lengths: self.lengths,
                hook: self.hook.as_ref(),
            };
            waited += sum.run(numbers)?;
            Ok(())
        })?;
        Ok(waited)
    }

    /// Returns the bytes of slices that this rank sends in a backward pass.
    pub(super) fn sum_bytes(&self) -> u64 {
        slices_of_pass(&self.spec, &self.options, self.ranks)
            .map(|slices| slices.bytes_sent(self.ring_index))
            .sum()
    }
}

/// Adds the slices that `rank` exchanges in a backward pass to its balance.
pub(super) fn add_sums_to(
    balance: &mut MessageBalance,
    spec: &Spec,
    options: &RingOptions,
    order: &Order,
    rank: usize,
) {
    let ranks = order.ranks().len();
    // passes 0 and 1 are those of the exchange
    for (pass, slices) in (2..).zip(slices_of_pass(spec, options, ranks)) {
        Exchange::new(&slices, order, rank, 0).all_transfers().add_to(balance, pass);
    }
}

/// Returns the slices of the sums of a backward pass.
fn slices_of_pass(
    spec: &Spec,
    options: &RingOptions,
    ranks: usize,
) -> impl Iterator<Item = Slices> {
    let is_needed = options.backward && !options.local_gradients;
    let sums = [sink_numbers(spec), shared_bias_numbers(spec)];
    let sums = sums.into_iter().filter(move |_| is_needed);
    sums.flat_map(move |numbers| Slicing::new(ranks).of_sum(numbers))
}
