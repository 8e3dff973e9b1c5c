//! What backward knows of each query row beforehand.
//!
//! ```text
//! normalised:     delta = ⟨dout, out⟩ − dlse                          lse
//! unnormalised:   delta = −dlse     share = ⟨dout, out⟩ / ties        lse, max
//! ```
//! A row that sees nothing and has no sinks has lse = −∞; kernels are given +∞ instead, so that its weights are 0 whatever its logits.

use std::ops::Range;

use annulus_core::{Error, Result, Spec};

use crate::{real::Real, scratch::RowStatistics};

/// Row statistics of all local queries: `[b, q_heads, q rows]` each, as [`Spec::ROW_STATISTICS`] says; max and share empty where out is normalised.
#[derive(Debug, Default)]
pub(crate) struct Statistics<A> {
    pub(crate) rows: usize,
    pub(crate) lse: Vec<A>,
    pub(crate) max: Vec<A>,
    pub(crate) delta: Vec<A>,
    pub(crate) share: Vec<A>,
}

impl<A: Real> Statistics<A> {
    pub(crate) fn new(spec: &Spec, rows: usize) -> Result<Self> {
        let lines = spec.dims.batch * spec.dims.q_heads;
        let list = |wanted: bool| {
            let len = if wanted { lines * rows } else { 0 };
            let mut list = Vec::new();
            let asked = len as u64 * size_of::<A>() as u64;
            list.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { asked, free: None })?;
            list.resize(len, A::ZERO);
            Ok(list)
        };
        let unnormalised = !spec.normalize;
        Ok(Self { rows, lse: list(true)?, max: list(unnormalised)?, delta: list(true)?, share: list(unnormalised)? })
    }

    /// `[lse, max, delta, share]` of one row; 0 for those that are not kept.
    pub(crate) fn of(&self, line: usize, row: usize) -> [A; Spec::ROW_STATISTICS] {
        let at = |list: &[A]| list.get(line * self.rows + row).copied().unwrap_or(A::ZERO);
        [at(&self.lse), at(&self.max), at(&self.delta), at(&self.share)]
    }

    /// Those of the rows `rows` of one head, as kernels want them.
    pub(crate) fn load(&self, line: usize, rows: Range<usize>, into: &mut RowStatistics<A>) {
        for (place, row) in rows.enumerate() {
            into.set(place, self.of(line, row));
        }
    }
}

impl<A: Real> RowStatistics<A> {
    /// Puts in what is known of one row.
    pub(crate) fn set(&mut self, place: usize, [lse, max, delta, share]: [A; Spec::ROW_STATISTICS]) {
        let empty = lse == -A::INFINITY;
        self.lse[place] = if empty { A::INFINITY } else { lse };
        self.max[place] = if empty { A::INFINITY } else { max };
        self.delta[place] = delta;
        self.share[place] = share;
    }
}
