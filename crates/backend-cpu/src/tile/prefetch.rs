//! Software prefetch of strided rows of a caller's tensor.
//!
//! ```text
//! after each register tile of a product:
//!     if countdown = 0:  prefetch one row of K and V, or else of Q;  countdown ← interval
//!     else:              countdown ← countdown − 1
//! ```
//! Rows of one head lie far apart in memory, so that demand loads stall. Too many prefetches at
//! once exhaust the line-fill buffers and stall as well. The rows that are packed next are
//! therefore prefetched a few at a time, spread over the products of the current tile.

use std::ops::Range;

use annulus_core::Element;

use crate::{
    simd::{dispatch::MAX_REGISTER_ROWS, hints::prefetch_l1},
    tile::{gemm::Epilogue, input::Plane, tile_mask::TILE},
};

/// Rows that are packed next and not prefetched yet.
#[derive(Debug, Default)]
pub(crate) struct Prefetcher {
    /// Rows of the next tile.
    pub(crate) rows: Range<usize>,
    /// Queries of the next strip, prefetched after `rows`.
    pub(crate) queries: Range<usize>,
    /// Head of `queries`.
    pub(crate) head: usize,
    /// Register tiles between two prefetches.
    interval: usize,
    /// Register tiles until the next prefetch.
    countdown: usize,
}

impl Prefetcher {
    /// Spreads the prefetches of a tile and a strip over the products of `tiles` tiles, each of
    /// about `lines` rows of results.
    pub(crate) fn spread(&mut self, tiles: usize, lines: usize) {
        self.interval = (tiles * lines / MAX_REGISTER_ROWS / TILE).saturating_sub(1);
    }

    /// Returns the epilogue that prefetches during a product: `rows` from the first two planes,
    /// then `queries` from the last.
    pub(crate) const fn cursor<'a>(
        &'a mut self,
        rows: [PrefetchRows<'a>; 2],
        queries: PrefetchRows<'a>,
    ) -> PrefetchCursor<'a> {
        PrefetchCursor { prefetcher: self, rows, queries }
    }
}

/// Vectors of one batch row and head, as bytes. Empty if the vectors are not contiguous.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PrefetchRows<'a> {
    bytes: &'a [u8],
    stride: usize,
    len: usize,
}

impl<'a> PrefetchRows<'a> {
    /// Describes the vectors of a plane.
    pub(crate) fn of<E: Element>(plane: Plane<'a, E>) -> Self {
        match plane {
            Plane::Tensor(_) => Self::default(),
            Plane::Vectors { elements, stride, dim } => Self {
                bytes: bytemuck::cast_slice(elements),
                stride: stride * size_of::<E>(),
                len: dim * size_of::<E>(),
            },
        }
    }

    /// Prefetches one row, if it exists.
    fn prefetch(&self, row: usize) {
        prefetch_l1(
            self.bytes.get(row * self.stride..row * self.stride + self.len).unwrap_or_default(),
        );
    }
}

/// Epilogue that issues the prefetches of a [`Prefetcher`].
#[derive(Debug)]
pub(crate) struct PrefetchCursor<'a> {
    prefetcher: &'a mut Prefetcher,
    rows: [PrefetchRows<'a>; 2],
    queries: PrefetchRows<'a>,
}

impl PrefetchCursor<'_> {
    /// Prefetches the next row. Not inlined: it runs seldom, and inlined it would take registers
    /// from the register tile.
    #[inline(never)]
    fn issue(&mut self) {
        self.prefetcher.countdown = self.prefetcher.interval;
        if let Some(row) = self.prefetcher.rows.next() {
            self.rows.iter().for_each(|rows| rows.prefetch(row));
        } else if let Some(row) = self.prefetcher.queries.next() {
            self.queries.prefetch(row);
        }
    }
}

impl Epilogue for PrefetchCursor<'_> {
    #[inline(always)]
    fn after_register_tile(&mut self) {
        if self.prefetcher.countdown == 0 {
            self.issue();
        } else {
            self.prefetcher.countdown -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetches_are_spread_and_end() {
        let mut prefetcher = Prefetcher { rows: 3..5, queries: 0..2, ..Prefetcher::default() };
        prefetcher.spread(4, MAX_REGISTER_ROWS * TILE / 2);
        assert_eq!(prefetcher.interval, 1);
        let elements = [0f32; 64];
        let lines =
            PrefetchRows::of(Plane::Vectors { elements: &elements[..], stride: 16, dim: 8 });
        let mut remaining = Vec::new();
        for _ in 0..10 {
            // missing rows are not prefetched
            prefetcher.cursor([lines, PrefetchRows::default()], lines).after_register_tile();
            remaining.push((prefetcher.rows.len(), prefetcher.queries.len()));
        }
        assert_eq!(
            remaining,
            [(1, 2), (1, 2), (0, 2), (0, 2), (0, 1), (0, 1), (0, 0), (0, 0), (0, 0), (0, 0)]
        );
    }
}
