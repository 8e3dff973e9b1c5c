//! All-reduce of gradients of which every rank computes a summand: dsinks, and dbias of a bias that
//! is broadcast over queries. In the reproducible order, each column of the latter is a sum on the
//! rank that owns the key, and 0 on the others, so that its sum over ranks is exact.

use std::sync::Arc;

use annulus_core::{Backend, Error, Gradients, Result, Space, Spec};

use super::{Ring, RingOptions, leaf_reduce::LeafOwners};
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
    /// Sums dsinks and a shared dbias over all ranks.
    pub(super) fn reduce_gradients(
        &mut self,
        gradients: &mut Gradients<'_, B::Space>,
    ) -> Result<()> {
        if let Some(dsinks) = &mut gradients.dsinks {
            let terms = std::mem::take(&mut self.buffers.leaf_sums.sinks);
            self.reduce_gradient(self.plan.q_leaves.clone(), &terms, dsinks)?;
            self.buffers.leaf_sums.sinks = terms;
        }
        if let Some(dbias) = gradients.dbias.as_mut().filter(|_| bias_is_shared(&self.agreed.spec))
        {
            let terms = std::mem::take(&mut self.buffers.leaf_sums.bias);
            self.reduce_gradient(self.plan.kv_leaves.clone(), &terms, dbias)?;
            self.buffers.leaf_sums.bias = terms;
        }
        Ok(())
    }

    /// Sums a gradient over the leaves of `owners`, or without these over ranks.
    fn reduce_gradient(
        &mut self,
        owners: Option<Arc<LeafOwners>>,
        terms: &[f64],
        view: &mut <B::Space as Space>::ViewMut<'_>,
    ) -> Result<()> {
        match owners {
            Some(owners) => self.reduce_leaves(&owners, terms, view),
            None if self.reduces => self.reduce_view(view),
            None => Ok(()),
        }
    }

    fn reduce_view(&mut self, view: &mut <B::Space as Space>::ViewMut<'_>) -> Result<()> {
        // a view in device memory was refused when the plan was made
        let mut view = B::Space::host_view_mut(view)
            .ok_or_else(|| Error::internal("a gradient in device memory cannot be summed"))?;
        view.map_widened(SUMMANDS_PER_GATHER, |part| self.all_reduce(part))
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
        let result = self.all_reduce(part);
        self.remember(result)
    }

    fn all_reduce(&mut self, part: &mut [f64]) -> Result<()> {
        if self.ranks == 1 {
            return Ok(());
        }
        let round = self.entries.round();
        let bytes: Vec<u8> = part.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = all_gather(self.transport.as_mut(), round, &bytes)?;
        part.fill(0.0);
        let order = &self.agreed.order;
        for (&peer, bytes) in order.ranks().iter().zip(order.by_ring_index(all)) {
            if bytes.len() != part.len() * 8 {
                let what = format!("{} numbers to sum, want {}", bytes.len() / 8, part.len());
                return Err(Error::Comm { peer, step: 0, what });
            }
            for (sum, bytes) in part.iter_mut().zip(bytes.chunks_exact(8)) {
                *sum += bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
            }
        }
        Ok(())
    }
}
