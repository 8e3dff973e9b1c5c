//! Row number, position and segment id of each row of a list: the inputs of a mask.

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{Result, memory, row_bounds::RowBounds};

/// Rows of one rank or of one block, in local order.
///
/// [`crate::Shard::expand`] refills the lists in place, so that a ring step does not allocate.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    rows: Vec<u64>,
    /// One list for all batch rows, or one per batch row.
    positions: Vec<i64>,
    /// No list, one for all batch rows, or one per batch row.
    segments: Vec<i64>,
    /// One element for all batch rows, or one per batch row; further elements are unused.
    bounds: Vec<RowBounds>,
    /// Number of the refill, of all in this process, that wrote the lists; 0: none has.
    refill: u64,
}

/// Refills of all lists so far.
static REFILLS: AtomicU64 = AtomicU64::new(0);

impl Rows {
    /// Creates rows `0..count` at positions `offset, offset + 1, …`, without segment ids.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn counting(count: u64, offset: i64) -> Result<Self> {
        let mut counting = Self::default();
        counting.reserve([count, count, 0])?;
        counting.refill(|rows, positions, _| {
            rows.extend(0..count);
            positions.extend((0..count.cast_signed()).map(|row| row.saturating_add(offset)));
        })?;
        Ok(counting)
    }

    /// Returns a number that identifies the contents: of all lists in this process, only a clone
    /// has the same one, and another refill changes it. 0: the lists were never filled.
    pub const fn version(&self) -> u64 {
        self.refill
    }

    /// Clears the lists and allocates room for the given numbers of row numbers, positions and
    /// segment ids.
    pub(crate) fn reserve(&mut self, counts: [u64; 3]) -> Result<()> {
        let [rows, positions, segments] = counts.map(crate::index);
        self.refill = 0;
        self.rows.clear();
        memory::reserve("row numbers", &mut self.rows, rows)?;
        self.positions.clear();
        memory::reserve("positions", &mut self.positions, positions)?;
        self.segments.clear();
        memory::reserve("segment ids", &mut self.segments, segments)
    }

    /// Clears the lists, calls `fill` to append row numbers, positions and segment ids, and
    /// computes the bounds of the rows.
    ///
    /// # Shapes
    /// row numbers `[rows]`; positions `[rows]` or `[batch, rows]`; segment ids `[0]`, `[rows]` or
    /// `[batch, rows]`
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] of the bounds. `fill` itself grows the lists without an error.
    pub fn refill(
        &mut self,
        fill: impl FnOnce(&mut Vec<u64>, &mut Vec<i64>, &mut Vec<i64>),
    ) -> Result<()> {
        self.rows.clear();
        self.positions.clear();
        self.segments.clear();
        self.refill = REFILLS.fetch_add(1, Ordering::Relaxed) + 1;
        fill(&mut self.rows, &mut self.positions, &mut self.segments);
        debug_assert!(self.positions.len().is_multiple_of(self.rows.len().max(1)));
        debug_assert!(self.segments.len().is_multiple_of(self.rows.len().max(1)));
        let lists = self.positions.len().max(self.segments.len()) / self.rows.len().max(1);
        if self.bounds.len() < lists {
            memory::reserve("bounds of the rows", &mut self.bounds, lists)?;
            self.bounds.resize_with(lists, RowBounds::default);
        }
        for (batch, bounds) in self.bounds.iter_mut().enumerate().take(lists) {
            let segments = if self.segments.is_empty() {
                &[]
            } else {
                Self::of_batch(&self.segments, self.rows.len(), batch)
            };
            bounds.refill(Self::of_batch(&self.positions, self.rows.len(), batch), segments)?;
        }
        Ok(())
    }

    /// Returns the number of rows.
    pub const fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true if there are no rows.
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the row numbers in the unsharded sequence.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Returns the positions of the rows in batch row `batch`.
    pub fn positions(&self, batch: usize) -> &[i64] {
        Self::of_batch(&self.positions, self.rows.len(), batch)
    }

    /// Returns the segment ids of the rows in batch row `batch`; `None` without segment ids.
    pub fn segments(&self, batch: usize) -> Option<&[i64]> {
        (!self.segments.is_empty()).then(|| Self::of_batch(&self.segments, self.rows.len(), batch))
    }

    /// Returns true if positions or segment ids may differ between batch rows.
    pub const fn per_batch(&self) -> bool {
        self.positions.len() > self.rows.len() || self.segments.len() > self.rows.len()
    }

    /// Returns true if the row numbers of `rows` are consecutive. A dense mask can then be read one
    /// word at a time.
    pub(crate) fn are_consecutive(&self, rows: Range<usize>) -> bool {
        let rows = &self.rows[rows];
        rows.iter()
            .zip(rows.iter().skip(1))
            .fold(true, |all, (here, next)| all & (here.wrapping_add(1) == *next))
    }

    /// Returns strided runs and bounds of the rows, at least one, in batch row `batch`.
    pub(crate) fn row_bounds(&self, batch: usize) -> &RowBounds {
        &self.bounds[if self.per_batch() { batch } else { 0 }]
    }

    fn of_batch(list: &[i64], rows: usize, batch: usize) -> &[i64] {
        let first = if list.len() > rows { batch * rows } else { 0 };
        &list[first..first + rows]
    }
}

impl PartialEq for Rows {
    /// Compares row numbers, positions and segment ids. The bounds follow from them. A list and its
    /// clones are equal without a comparison of their rows, of which there may be many.
    fn eq(&self, other: &Self) -> bool {
        (self.refill != 0 && self.refill == other.refill)
            || (&self.rows, &self.positions, &self.segments)
                == (&other.rows, &other.positions, &other.segments)
    }
}

impl Eq for Rows {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_equal_by_their_numbers_whichever_refill_wrote_them() {
        let rows = Rows::counting(5, 2).unwrap();
        assert_eq!(rows, Rows::counting(5, 2).unwrap());
        assert_ne!(rows, Rows::counting(5, 3).unwrap());
        assert_ne!(rows, Rows::counting(4, 2).unwrap());
        let mut other = rows.clone();
        assert_eq!(other, rows);
        // a clone that is refilled or cleared is another list
        other.refill(|rows, positions, _| (rows.push(7), positions.push(0)).0).unwrap();
        assert_ne!(other, rows);
        let mut cleared = rows.clone();
        cleared.reserve([0; 3]).unwrap();
        assert_ne!(cleared, rows);
        assert_eq!(cleared, Rows::default());
    }
}
