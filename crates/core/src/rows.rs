//! What a mask must know of a set of rows: row number, position and segment id of each.

use std::ops::Range;

use crate::{Result, memory, row_bounds::RowBounds};

/// One rank's rows, or one block's, in local order. Refilled in place from compact runs, so that a ring step allocates nothing.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    rows: Vec<u64>,
    /// one list shared by all batch rows, or one a batch row
    positions: Vec<i64>,
    /// none, one list shared by all batch rows, or one a batch row
    segments: Vec<i64>,
    /// one shared by all batch rows, or one a batch row; some may be left over from an earlier filling
    outlines: Vec<RowBounds>,
}

impl Rows {
    /// Rows `0..count` at positions `offset, offset + 1, …`, without segment ids.
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

    /// Empties the lists and makes room for so many row numbers, positions and segment ids.
    pub(crate) fn reserve(&mut self, counts: [u64; 3]) -> Result<()> {
        let [rows, positions, segments] = counts.map(crate::index);
        self.rows.clear();
        memory::reserve("row numbers", &mut self.rows, rows)?;
        self.positions.clear();
        memory::reserve("positions", &mut self.positions, positions)?;
        self.segments.clear();
        memory::reserve("segment ids", &mut self.segments, segments)
    }

    /// Empties the lists and lets `fill` append to them: row numbers, positions (`rows` or `batch × rows` of them), segment
    /// ids (none, `rows` or `batch × rows` of them).
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] for what follows from the lists; the lists themselves grow in
    /// `fill`.
    pub fn refill(
        &mut self,
        fill: impl FnOnce(&mut Vec<u64>, &mut Vec<i64>, &mut Vec<i64>),
    ) -> Result<()> {
        self.rows.clear();
        self.positions.clear();
        self.segments.clear();
        fill(&mut self.rows, &mut self.positions, &mut self.segments);
        debug_assert!(self.positions.len().is_multiple_of(self.rows.len().max(1)));
        debug_assert!(self.segments.len().is_multiple_of(self.rows.len().max(1)));
        let lists = self.positions.len().max(self.segments.len()) / self.rows.len().max(1);
        if self.outlines.len() < lists {
            memory::reserve("outlines of the rows", &mut self.outlines, lists)?;
            self.outlines.resize_with(lists, RowBounds::default);
        }
        for (batch, outline) in self.outlines.iter_mut().enumerate().take(lists) {
            let segments = if self.segments.is_empty() {
                &[]
            } else {
                Self::of_batch(&self.segments, self.rows.len(), batch)
            };
            outline.refill(Self::of_batch(&self.positions, self.rows.len(), batch), segments)?;
        }
        Ok(())
    }

    /// How many rows.
    pub const fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Row numbers in the unsharded sequence.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Positions of the rows in batch row `batch`.
    pub fn positions(&self, batch: usize) -> &[i64] {
        Self::of_batch(&self.positions, self.rows.len(), batch)
    }

    /// Segment ids of the rows in batch row `batch`; `None` if there are none at all.
    pub fn segments(&self, batch: usize) -> Option<&[i64]> {
        (!self.segments.is_empty()).then(|| Self::of_batch(&self.segments, self.rows.len(), batch))
    }

    /// Whether batch rows differ in positions or segment ids.
    pub const fn per_batch(&self) -> bool {
        self.positions.len() > self.rows.len() || self.segments.len() > self.rows.len()
    }

    /// Whether the row numbers of `rows` count up one by one, so that bits by row number can be taken a word at a time.
    pub(crate) fn count_up(&self, rows: Range<usize>) -> bool {
        let rows = &self.rows[rows];
        rows.iter()
            .zip(rows.iter().skip(1))
            .fold(true, |all, (here, next)| all & (here.wrapping_add(1) == *next))
    }

    /// What the rows look like from afar in batch row `batch`. There must be rows.
    pub(crate) fn outline(&self, batch: usize) -> &RowBounds {
        &self.outlines[if self.per_batch() { batch } else { 0 }]
    }

    fn of_batch(list: &[i64], rows: usize, batch: usize) -> &[i64] {
        let first = if list.len() > rows { batch * rows } else { 0 };
        &list[first..first + rows]
    }
}

impl PartialEq for Rows {
    /// By row numbers, positions and segment ids: all else follows from them.
    fn eq(&self, other: &Self) -> bool {
        (&self.rows, &self.positions, &self.segments)
            == (&other.rows, &other.positions, &other.segments)
    }
}

impl Eq for Rows {}
