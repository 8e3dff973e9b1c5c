//! Memory of the cached rows of one rank: a list of segments of equal size, in wire order.
//!
//! A segment is a block that kernels attend to in place, in the memory of the backend. It is
//! allocated whole and never moved, so that an append costs the copy of its rows only.

use std::ops::Range;

use annulus_core::{
    Backend, Block, Error, HostTensors, HostView, Result, RowLayout, RowSegment, RowSet, Rows,
    Shard, Space, index, memory,
};

use super::page_set::Pages;

/// Rows of a segment, rounded up to whole pages. Row numbers of the last segment are listed anew
/// for every call, which takes some microseconds; a kernel attends to 4,096 rows as fast as to
/// more (64 KV tiles).
const SEGMENT_ROWS: u64 = 4096;

/// Cached rows of one rank.
pub(super) struct Segments<S: Space> {
    pages: Pages,
    /// Format of a row: k, then v.
    row_layout: RowLayout,
    /// Rows of a segment.
    rows: u64,
    list: Vec<Segment<S>>,
}

struct Segment<S: Space> {
    buffer: S::Buffer,
    /// Event after the last write; `None` before the first.
    written: Option<S::Event>,
    /// Row numbers and positions of the rows that are in use.
    rows: Rows,
}

impl<S: HostTensors> Segments<S> {
    /// Starts without rows and without memory. With `of_pages` each page is a segment, because the
    /// reproducible order attends to pages one by one.
    pub(super) fn new(pages: Pages, row_layout: RowLayout, of_pages: bool) -> Self {
        let rows = if of_pages { pages.rows } else { SEGMENT_ROWS.next_multiple_of(pages.rows) };
        Self { pages, row_layout, rows, list: Vec::new() }
    }

    /// Returns the rows of a segment.
    pub(super) const fn segment_rows(&self) -> u64 {
        self.rows
    }

    /// Returns the bytes of all segments.
    pub(super) fn bytes(&self) -> u64 {
        self.list.iter().map(|segment| S::size(&segment.buffer)).sum()
    }

    /// Allocates segments for `local_len` rows.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; the cached rows stay.
    pub(super) fn reserve<B: Backend<Space = S>>(
        &mut self,
        backend: &B,
        local_len: u64,
    ) -> Result<()> {
        let segments = index(local_len.div_ceil(self.rows));
        let missing = segments.saturating_sub(self.list.len());
        memory::reserve("the KV cache", &mut self.list, missing)?;
        for number in self.list.len()..segments {
            let bytes = self.rows.checked_mul(self.row_layout.bytes());
            let buffer = backend.allocate(bytes.unwrap_or(u64::MAX))?;
            // lists as long as they will ever be
            let mut rows = Rows::default();
            let first = number as u64 * self.rows;
            self.expand(first..first + self.rows, &mut rows)?;
            self.list.push(Segment { buffer, written: None, rows });
        }
        Ok(())
    }

    /// Writes rows of k `[b, rows, kv_heads, d]` and v `[b, rows, kv_heads, dv]` to the local rows `local`, for which memory is reserved. `sources`
    /// are the rows of the tensors.
    pub(super) fn write<B: Backend<Space = S>>(
        &mut self,
        backend: &B,
        local: Range<u64>,
        [k, v]: &[HostView<'_>; 2],
        sources: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let none = || Error::internal("a row of the KV cache without memory");
        let record_bytes = self.row_layout.bytes();
        let segment_rows = index(self.rows);
        let heads = 0..k.shape()[2];
        let mut sources = sources;
        let mut next = index(local.start);
        let end = index(local.end);
        while next < end {
            let segment = self.list.get_mut(next / segment_rows).ok_or_else(none)?;
            let first = next % segment_rows;
            let count = (segment_rows - first).min(end - next);
            let bytes = first as u64 * record_bytes..(first + count) as u64 * record_bytes;
            let written = backend.write_block(&mut segment.buffer, bytes, &mut |bytes| {
                let records = bytes.chunks_exact_mut(index(record_bytes));
                for (record, source) in records.zip(&mut sources) {
                    let row = [RowSegment { first: source, count: 1 }];
                    let k_bytes = k.pack(&row, heads.clone(), record)?;
                    let record = record.get_mut(k_bytes..).ok_or_else(none)?;
                    v.pack(&row, heads.clone(), record)?;
                }
                Ok(())
            })?;
            segment.written = Some(written);
            next += count;
        }
        Ok(())
    }

    /// Lists row numbers and positions of the first `local_len` rows.
    pub(super) fn list_rows(&mut self, local_len: u64) -> Result<()> {
        for number in 0..self.list.len() {
            let first = number as u64 * self.rows;
            let used = first..first.max(local_len.min(first + self.rows));
            if self.list[number].rows.len() as u64 != used.end - used.start {
                let mut rows = std::mem::take(&mut self.list[number].rows);
                let listed = self.expand(used, &mut rows);
                self.list[number].rows = rows;
                listed?;
            }
        }
        Ok(())
    }

    /// Returns the blocks that have rows.
    ///
    /// # Errors
    /// [`Error::Internal`] for rows that were never written.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Result<Block<'_, S>>> {
        let used = self.list.iter().filter(|segment| !segment.rows.is_empty());
        used.map(|segment| segment.block().ok_or_else(not_written))
    }

    /// Returns the block at `index`, which has rows.
    ///
    /// # Errors
    /// [`Error::Internal`] for a block without rows.
    pub(super) fn block(&self, index: u64) -> Result<Block<'_, S>> {
        let segment = usize::try_from(index).ok().and_then(|index| self.list.get(index));
        let used = segment.filter(|segment| !segment.rows.is_empty());
        used.and_then(Segment::block).ok_or_else(not_written)
    }

    fn expand(&self, local: Range<u64>, rows: &mut Rows) -> Result<()> {
        let numbers = self.pages.row_numbers(local);
        let all = RowSet::all(numbers.len());
        let shard = Shard { positions: vec![numbers.clone()], rows: numbers, segments: Vec::new() };
        shard.expand(&all, rows)
    }
}

impl<S: Space> Segment<S> {
    /// Returns the segment as a block; `None` if it was never written.
    fn block(&self) -> Option<Block<'_, S>> {
        let ready = self.written.as_ref()?;
        Some(Block { buffer: &self.buffer, ready, rows: &self.rows, first_local: None })
    }
}

fn not_written() -> Error {
    Error::internal("rows of the KV cache that were never written")
}
