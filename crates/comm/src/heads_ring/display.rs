//! A plan as text.

use std::fmt;

use annulus_core::{Backend, HostTensors};

use super::HeadsRing;
use crate::ring::PassKind;

impl<B: Backend<Space: HostTensors>> fmt::Display for HeadsRing<B> {
    /// Writes mask, ranks, grid, layout, route, and what this rank sends: `Causal { offset: 0 }, 8
    /// ranks, heads in 2 groups of 4 ranks, zigzag, relay-down, 1048576 B sent forward, 2621440 B
    /// backward`. With key columns the grid is `1 parts of the heads × 2 query parts × 4 key
    /// columns`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.grid.groups();
        let grid = match self.grid.columns() {
            1 => format!("heads in {groups} groups of {} ranks", self.grid.members()),
            columns => {
                let parts = self.grid.head_parts();
                format!("{parts} parts of the heads × {groups} query parts × {columns} key columns")
            }
        };
        write!(
            f,
            "{:?}, {} ranks, {grid}, {}, {}, {} B sent forward",
            self.spec.mask,
            self.ranks,
            self.layout().name(),
            self.route().name(),
            self.bytes_predicted(PassKind::Forward),
        )?;
        if self.options.backward {
            write!(f, ", {} B backward", self.bytes_predicted(PassKind::Backward))?;
        }
        Ok(())
    }
}

impl<B: Backend> fmt::Debug for HeadsRing<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadsRing")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("grid", &self.grid)
            .finish_non_exhaustive()
    }
}
