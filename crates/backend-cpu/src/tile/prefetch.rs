//! Software prefetch of strided rows of a caller's tensor.
//!
//! ```text
//! after each register tile of a product:
//!     while rows of the next strip, or of the outputs, are left:  prefetch two of them
//!     every interval-th time:                                     prefetch one row of the next
//!                                                                 tile's panels
//! ```
//! The panels are K and V with queries in lanes, Q and dO with keys in lanes. The strip is needed
//! sooner: the first tile of a task packs one for each of its products. The outputs are those of
//! the current strip, which are written after the products.
//! Rows of one head lie far apart in memory, so that demand loads stall. Too many prefetches at
//! once exhaust the line-fill buffers and stall as well. The rows that are packed next are
//! therefore prefetched a few at a time, spread over the products of the current tile.

use std::ops::Range;

use annulus_core::{Dims, Element};
use ndarray::ArrayView2;

use crate::{
    simd::{isa::prefetch_l1_at, vector::MAX_LANES},
    tile::{
        input::{Plane, TileSource},
        operands::GemmEpilogue,
        tile_mask::TILE,
    },
};

/// Rows of a register tile of full strips on AVX-512, from which the number of register tiles is
/// estimated.
const REGISTER_ROWS: usize = 4;

/// Rows of a strip, or of its outputs, that are prefetched after a register tile: the 64 of a strip
/// within its 32 register tiles at D = 64.
const LANES_PER_CALL: usize = 2;

/// Distance of prefetches in loops that write strided rows and have no product to hide their
/// latency: the rows of one transposed block.
pub(crate) const ROWS_AHEAD: usize = MAX_LANES;

/// Maximum keys of a block that is short: two tiles. Its keys are prefetched at the start of a call
/// and, in the backward pass, under the products of the KV head before. Blocks of balanced layouts
/// come from memory, and are too short for the prefetches under products to hide that.
pub(crate) const SHORT_BLOCK_KEYS: usize = 2 * TILE;

/// Prefetches the keys and values that a call for a block of `keys` keys reads first, if it is
/// short: they arrive while the visibility of the block is computed.
pub(crate) fn prefetch_first_tile<E: Element>(
    dims: Dims,
    keys: usize,
    sources: [&TileSource<'_, E>; 2],
) {
    if keys <= SHORT_BLOCK_KEYS && dims.batch * dims.kv_heads > 0 {
        for source in sources {
            let rows = PrefetchRows::of(source.plane(0, 0));
            (0..keys.min(TILE)).for_each(|row| rows.prefetch(row));
        }
    }
}

/// Rows that are packed next and not prefetched yet.
#[derive(Debug, Default)]
pub(crate) struct Prefetcher {
    /// Rows of the next tile.
    rows: Range<usize>,
    /// Head of `rows`, where it may differ from that of the current tile.
    pub(crate) rows_head: usize,
    /// Rows of the next strip: they will lie in lanes.
    lanes: Range<usize>,
    /// Head of `lanes`.
    pub(crate) head: usize,
    /// Rows of the outputs of the current strip.
    outputs: Range<usize>,
    /// Register tiles between two prefetches of `rows`.
    interval: usize,
    /// Calls of [`PrefetchCursor::issue`] until the next prefetch of `rows`.
    wait: usize,
    /// Register tiles until the next call of [`PrefetchCursor::issue`].
    countdown: usize,
}

impl Prefetcher {
    /// Spreads the prefetches of a tile over the products of `tiles` tiles, each of about `lines`
    /// rows of results.
    pub(crate) fn spread(&mut self, tiles: usize, lines: usize) {
        self.interval = (tiles * lines / REGISTER_ROWS / TILE).saturating_sub(1);
    }

    /// Schedules the rows of the next tile, of head `head`.
    pub(crate) const fn schedule_rows(&mut self, head: usize, rows: Range<usize>) {
        self.rows_head = head;
        self.rows = rows;
        self.wait = 0;
        self.countdown = 0;
    }

    /// Schedules the rows of the next strip, of head `head`.
    pub(crate) fn schedule_lanes(&mut self, head: usize, rows: Range<usize>) {
        self.head = head;
        self.lanes = rows;
        self.countdown = 0;
    }

    /// Schedules the rows of the outputs of the current strip.
    pub(crate) const fn schedule_outputs(&mut self, rows: Range<usize>) {
        self.outputs = rows;
        self.countdown = 0;
    }

    /// Returns the epilogue that prefetches during a product: `rows` from the first two planes,
    /// `lanes` from the third, and outputs.
    pub(crate) const fn cursor<'a>(
        &'a mut self,
        rows: [PrefetchRows; 2],
        lanes: PrefetchRows,
        outputs: PrefetchRows,
    ) -> PrefetchCursor<'a> {
        PrefetchCursor { prefetcher: self, rows, lanes, outputs }
    }
}

/// Addresses of the vectors of one batch row and head, which are never dereferenced. None if the
/// vectors are not contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefetchRows {
    first: *const u8,
    rows: usize,
    /// Bytes between the first bytes of two rows.
    stride: isize,
    /// Bytes of a vector.
    len: usize,
}

impl Default for PrefetchRows {
    fn default() -> Self {
        Self { first: std::ptr::null(), rows: 0, stride: 0, len: 0 }
    }
}

impl PrefetchRows {
    /// Describes the vectors of a plane.
    pub(crate) fn of<E: Element>(plane: Plane<'_, E>) -> Self {
        match plane {
            Plane::Tensor(vectors) => Self::of_view(vectors),
            Plane::Vectors { elements, stride, dim } => Self {
                first: elements.as_ptr().cast(),
                rows: elements.len().checked_sub(dim).map_or(0, |last| last / stride.max(1) + 1),
                stride: (stride * size_of::<E>()).cast_signed(),
                len: dim * size_of::<E>(),
            },
        }
    }

    /// Describes the vectors `[rows, dim]` of a view.
    pub(crate) fn of_view<E: Element>(vectors: ArrayView2<'_, E>) -> Self {
        let (rows, dim) = vectors.dim();
        if dim > 1 && vectors.strides()[1] != 1 {
            return Self::default();
        }
        Self {
            first: vectors.as_ptr().cast(),
            rows,
            stride: vectors.strides()[0] * size_of::<E>().cast_signed(),
            len: dim * size_of::<E>(),
        }
    }

    /// Prefetches one row, if it exists.
    pub(crate) fn prefetch(&self, row: usize) {
        if row < self.rows {
            let offset = self.stride.wrapping_mul(row.cast_signed());
            prefetch_l1_at(self.first.wrapping_offset(offset), self.len);
        }
    }
}

/// Epilogue that issues the prefetches of a [`Prefetcher`].
#[derive(Debug)]
pub(crate) struct PrefetchCursor<'a> {
    prefetcher: &'a mut Prefetcher,
    rows: [PrefetchRows; 2],
    lanes: PrefetchRows,
    outputs: PrefetchRows,
}

impl PrefetchCursor<'_> {
    /// Prefetches the next row. Not inlined: it runs seldom, and inlined it would take registers
    /// from the register tile.
    #[inline(never)]
    fn issue(&mut self) {
        for _ in 0..LANES_PER_CALL {
            if let Some(row) = self.prefetcher.outputs.next() {
                self.outputs.prefetch(row);
            } else if let Some(row) = self.prefetcher.lanes.next() {
                self.lanes.prefetch(row);
            }
        }
        let Prefetcher { rows, lanes, outputs, interval, wait, countdown, .. } =
            &mut *self.prefetcher;
        if *wait > 0 {
            *wait -= 1;
        } else if let Some(row) = rows.next() {
            *wait = *interval;
            self.rows.iter().for_each(|rows| rows.prefetch(row));
        }
        *countdown = match (lanes.len() + outputs.len(), rows.len()) {
            (1.., _) => 0,
            (0, 1..) => std::mem::take(wait),
            // nothing is left until more is scheduled
            (0, 0) => usize::MAX,
        };
    }
}

impl GemmEpilogue for PrefetchCursor<'_> {
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
        let mut prefetcher = Prefetcher::default();
        prefetcher.spread(4, REGISTER_ROWS * TILE / 2);
        assert_eq!(prefetcher.interval, 1);
        let elements = [0f32; 64];
        let lines =
            PrefetchRows::of(Plane::Vectors { elements: &elements[..], stride: 16, dim: 8 });
        let next = |prefetcher: &mut Prefetcher, calls: usize| {
            let mut remaining = Vec::new();
            for _ in 0..calls {
                // missing rows are not prefetched
                let none = PrefetchRows::default();
                prefetcher.cursor([lines, none], lines, none).after_register_tile();
                remaining.push((prefetcher.rows.len(), prefetcher.lanes.len()));
            }
            remaining
        };
        prefetcher.schedule_rows(0, 3..7);
        prefetcher.schedule_lanes(0, 0..3);
        // two rows of the strip each time, a row of the panels every other time
        assert_eq!(
            next(&mut prefetcher, 8),
            [(3, 1), (3, 0), (2, 0), (2, 0), (1, 0), (1, 0), (0, 0), (0, 0)]
        );
        prefetcher.schedule_rows(0, 0..1);
        assert_eq!(next(&mut prefetcher, 2), [(0, 0), (0, 0)]);
    }
}
