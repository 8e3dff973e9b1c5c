//! What a mask must know of a set of rows: row number, position and segment id of each.

/// One rank's rows, or one block's, in local order. Refilled in place from compact runs, so that a ring step allocates nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    rows: Vec<u64>,
    /// one list shared by all batch rows, or one a batch row
    positions: Vec<i64>,
    /// none, one list shared by all batch rows, or one a batch row
    segments: Vec<i64>,
}

impl Rows {
    /// Rows `0..count` at positions `offset, offset + 1, …`, without segment ids.
    pub fn counting(count: u64, offset: i64) -> Self {
        Self { rows: (0..count).collect(), positions: (0..count.cast_signed()).map(|row| row + offset).collect(), segments: Vec::new() }
    }

    /// Empties the lists and lets `fill` append to them: row numbers, positions (`rows` or `batch × rows` of them), segment
    /// ids (none, `rows` or `batch × rows` of them).
    pub fn refill(&mut self, fill: impl FnOnce(&mut Vec<u64>, &mut Vec<i64>, &mut Vec<i64>)) {
        self.rows.clear();
        self.positions.clear();
        self.segments.clear();
        fill(&mut self.rows, &mut self.positions, &mut self.segments);
        debug_assert!(self.positions.len().is_multiple_of(self.rows.len().max(1)));
        debug_assert!(self.segments.len().is_multiple_of(self.rows.len().max(1)));
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

    fn of_batch(list: &[i64], rows: usize, batch: usize) -> &[i64] {
        let first = if list.len() > rows { batch * rows } else { 0 };
        &list[first..first + rows]
    }
}
