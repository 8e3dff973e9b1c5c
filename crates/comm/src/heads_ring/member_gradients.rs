//! Gradients of which every rank has all heads: dsinks, and dbias without a query axis.
//!
//! With one key column the ring has summed them over the groups. What remains is to collect the
//! parts of the members: those of their heads, or the terms of a sum over all heads. With several
//! columns all ranks have terms, which are summed in the order of the ring indices.

use std::ops::Range;

use annulus_core::{Backend, Error, Gradients, HostTensors, HostViewMut, Result, memory};

use super::HeadsRing;
use crate::{
    agreement::{SUMMANDS_PER_GATHER, all_gather},
    ring::reduce::bias_is_shared,
};

impl<B: Backend<Space: HostTensors>> HeadsRing<B> {
    /// Writes dsinks, and a dbias without a query axis, of all heads, unless the caller sums them.
    ///
    /// # Ordering
    /// Collective.
    pub(super) fn gather_gradients(
        &mut self,
        gradients: &mut Gradients<'_, B::Space>,
    ) -> Result<()> {
        if self.options.local_gradients {
            return Ok(());
        }
        if let Some(dsinks) = &mut gradients.dsinks {
            self.gather(dsinks, 0)?;
        }
        match &mut gradients.dbias {
            Some(dbias) if bias_is_shared(&self.spec) => self.gather(dbias, 1),
            _ => Ok(()),
        }
    }

    /// Collects the parts of all members, whose heads are on `axis`.
    fn gather(&mut self, view: &mut HostViewMut<'_>, axis: usize) -> Result<()> {
        let is_shared = view.shape()[axis] == 1 && self.spec.dims.q_heads > 1;
        let grid = self.grid;
        let heads: Vec<Range<usize>> = match is_shared {
            true => std::iter::once(0..1).collect(),
            false => (0..grid.head_parts()).map(|part| grid.q_heads(part)).collect(),
        };
        let part_of = |member: usize| if is_shared { 0 } else { grid.part(member) };
        let own = part_of(self.exchange.member);
        let terms = view.as_view().slice(axis, heads[own].clone()).widened()?;
        let mut sums: Vec<Vec<f64>> = Vec::with_capacity(heads.len());
        for _ in &heads {
            sums.push(memory::filled("a gradient", terms.len(), 0.0)?);
        }
        // the ring of one column has summed over the groups
        let ring_indices = match grid.columns() {
            1 => {
                let first = grid.ring_index(grid.group(self.ring_index), 0);
                first..first + grid.members()
            }
            _ => 0..self.ranks,
        };
        for (number, chunk) in terms.chunks(SUMMANDS_PER_GATHER).enumerate() {
            let bytes: Vec<u8> = chunk.iter().flat_map(|number| number.to_le_bytes()).collect();
            let round = self.entries.round();
            let gathered = all_gather(&mut self.transport, round, &bytes)?;
            for ring_index in ring_indices.clone() {
                let peer = self.layout.order.rank(ring_index);
                let of_peer = gathered.get(peer).map(Vec::as_slice).unwrap_or_default();
                if of_peer.len() != bytes.len() {
                    let what = format!("{} numbers to collect", of_peer.len() / 8);
                    return Err(Error::Comm { peer, step: 0, what });
                }
                let sum =
                    &mut sums[part_of(grid.member(ring_index))][number * SUMMANDS_PER_GATHER..];
                let of_peer = of_peer.as_chunks::<8>().0.iter();
                let of_peer = of_peer.map(|bytes| f64::from_le_bytes(*bytes));
                sum.iter_mut().zip(of_peer).for_each(|(sum, term)| *sum += term);
            }
        }
        for (heads, sum) in heads.into_iter().zip(&sums) {
            view.reborrow().slice(axis, heads).write(sum);
        }
        Ok(())
    }
}
