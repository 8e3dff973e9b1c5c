//! Gradients of which every rank has all heads: dsinks, and dbias without a query axis.
//!
//! The ring has summed them over the groups. What remains is to collect the parts of the members:
//! those of their heads, or the terms of a sum over all heads.

use std::ops::Range;

use annulus_core::{Backend, Error, Gradients, HostTensors, HostViewMut, Result, memory};

use super::HeadsRing;
use crate::{
    agreement::all_gather,
    ring::reduce::{CHUNK, bias_is_shared},
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
        let heads = |member: usize| if is_shared { 0..1 } else { self.grid.q_heads(member) };
        let members: Vec<Range<usize>> = (0..self.grid.members()).map(heads).collect();
        let own = self.exchange.member;
        let part = view.as_view().slice(axis, members[own].clone()).widened()?;
        let mut parts: Vec<Vec<f64>> = Vec::with_capacity(members.len());
        for _ in &members {
            parts.push(memory::list("a gradient", part.len())?);
        }
        for chunk in part.chunks(CHUNK) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|number| number.to_le_bytes()).collect();
            let round = self.entries.round();
            let gathered = all_gather(&mut self.transport, round, &bytes)?;
            for (numbers, &peer) in parts.iter_mut().zip(&self.exchange.ranks) {
                let of_peer = gathered.get(peer).map(Vec::as_slice).unwrap_or_default();
                if of_peer.len() != bytes.len() {
                    let what = format!("{} numbers to collect", of_peer.len() / 8);
                    return Err(Error::Comm { peer, step: 0, what });
                }
                let of_peer = of_peer.as_chunks::<8>().0.iter();
                numbers.extend(of_peer.map(|bytes| f64::from_le_bytes(*bytes)));
            }
        }
        if is_shared {
            let mut sum = vec![0.0; part.len()];
            for terms in &parts {
                sum.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
            }
            view.write(&sum);
            return Ok(());
        }
        for (heads, numbers) in members.into_iter().zip(&parts) {
            view.reborrow().slice(axis, heads).write(numbers);
        }
        Ok(())
    }
}
