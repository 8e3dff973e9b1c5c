//! Creation of a cache, which checks its definition and agrees on it with all ranks, and appends
//! and removals of rows, which are local.
//!
//! The memory of the cached rows of one rank is a list of segments of equal size, in wire order. A
//! segment is a block that kernels attend to in place, in the memory of the backend. It is
//! allocated whole and never moved, so that an append costs the copy of its rows only.

use std::{ops::Range, time::Duration};

use annulus_core::{
    Backend, Block, Capabilities, Dims, Error, Host, HostTensors, HostView, Result, RowLayout,
    RowSegment, RowSet, Rows, Runs, Space, Spec, Transport, index, memory,
};
use annulus_plan::Strategy;

use super::{
    KvCache,
    page_set::{Pages, shard_of},
    page_tree,
};
use crate::{
    calls::Collective,
    ring::{
        RingOptions,
        check::{self, Shapes},
    },
};

impl<B: Backend<Space: HostTensors>> KvCache<B> {
    /// Appends rows that every rank has: this rank copies those of its pages.
    ///
    /// # Shapes
    /// k `[b, rows, kv_heads, d]`, v `[b, rows, kv_heads, dv]`: the same rows on every rank.
    ///
    /// # Ordering
    /// Local. [`KvCache::attend`] checks that all ranks have appended as many rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`]: nothing was appended.
    /// [`Error::Device`] ends the cache, on the other ranks at their next call;
    /// [`Error::Poisoned`].
    pub fn append(&mut self, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        let count = k.shape()[1];
        self.check_rows(k, v, count)?;
        let local = self.reserve(count)?;
        let len = self.len;
        let numbers = self.pages.runs(local.clone());
        let sources = numbers.flat_map(|run| {
            let first = annulus_core::index(run.start.cast_unsigned() - len);
            first..first + annulus_core::index(run.count)
        });
        self.write(local, count, [k.reborrow(), v.reborrow()], sources)
    }

    /// Appends `count` rows. This rank has the rows of its own pages ([`KvCache::own_rows`]).
    ///
    /// # Shapes
    /// k `[b, own rows, kv_heads, d]`, v `[b, own rows, kv_heads, dv]`, in ascending order.
    ///
    /// # Ordering
    /// As [`KvCache::append`]: `count` is the same on every rank.
    ///
    /// # Errors
    /// As [`KvCache::append`].
    pub fn append_own(&mut self, count: usize, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        let own = self.own_rows(count)?.len();
        self.check_rows(k, v, annulus_core::index(own))?;
        let local = self.reserve(count)?;
        self.write(local, count, [k.reborrow(), v.reborrow()], 0..)
    }

    /// Returns the rows of this rank among the next `count` rows, counted from 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the cache cannot have so many rows.
    pub fn own_rows(&self, count: usize) -> Result<Runs> {
        let local = self.local_rows(count)?;
        let mut rows = Runs::new();
        self.pages.runs(local).for_each(|run| {
            let start = run.start - self.len.cast_signed();
            rows.push_run(annulus_core::Run { start, ..run });
        });
        Ok(rows)
    }

    /// Removes the rows from `len` on. Their memory is reused. `len` above the number of rows is
    /// refused.
    ///
    /// # Ordering
    /// Local, as [`KvCache::append`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub fn truncate(&mut self, len: u64) -> Result<()> {
        if len > self.len {
            let want = format!("at most the {} cached rows", self.len);
            return Err(Error::invalid("len", len, want));
        }
        self.len = len;
        Ok(())
    }

    /// Returns the local rows of the next `count` rows.
    fn local_rows(&self, count: usize) -> Result<Range<u64>> {
        let most = i64::MAX as u64 / 4;
        let len = self.len.checked_add(count as u64).filter(|&len| len <= most);
        let len = len.ok_or_else(|| {
            Error::invalid("k", format!("{count} rows"), format!("at most {most} cached rows"))
        })?;
        Ok(self.pages.local_len(self.len)..self.pages.local_len(len))
    }

    /// Allocates memory for the next `count` rows. Returns the local rows.
    fn reserve(&mut self, count: usize) -> Result<Range<u64>> {
        self.calls.alive()?;
        let local = self.local_rows(count)?;
        let reserved = self.segments.reserve(&self.backend, local.end);
        self.or_end(reserved)?;
        Ok(local)
    }

    /// Writes the next `count` rows, of which this rank has the local rows `local`: the rows
    /// `sources` of k and v.
    fn write(
        &mut self,
        local: Range<u64>,
        count: usize,
        kv: [HostView<'_>; 2],
        sources: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let written = self.segments.write(&self.backend, local, &kv, sources);
        self.or_end(written)?;
        self.len += count as u64;
        Ok(())
    }

    fn check_rows(&self, k: &HostView<'_>, v: &HostView<'_>, rows: usize) -> Result<()> {
        Shapes::new(&self.spec, 0, rows).keys_values(Host::describe(k), Host::describe(v))
    }
}

/// Agrees with all ranks on a cache. Returns the spec, and true if all transports post ahead.
pub(super) fn agree<B: Backend>(
    backend: &B,
    transport: &mut dyn Transport<Host>,
    spec: Result<Spec>,
    page_rows: u64,
    deadline_variable: Option<Duration>,
) -> Result<(Spec, bool)> {
    let checked = spec.and_then(|spec| check_spec(backend, spec, page_rows));
    let options = RingOptions { deadline_variable, ..RingOptions::default() };
    let described = checked.as_ref().map_err(Error::clone);
    let described = described.map(|(spec, capabilities)| (spec, capabilities, Strategy::Ring));
    let combined = check::agree_on_plan(transport, described, &options, page_rows)?;
    let (spec, _) = checked?;
    Ok((spec, combined.posts_ahead))
}

/// Checks the definition of a cache.
fn check_spec<B: Backend>(backend: &B, spec: Spec, page_rows: u64) -> Result<(Spec, Capabilities)> {
    let spec = Spec { dims: Dims { q_len: 1, kv_len: 1, ..spec.dims }, ..spec };
    let refusals =
        [(spec.bias.is_some(), "a bias tensor"), (!spec.normalize, "unnormalised output")];
    if let Some((_, what)) = refusals.into_iter().find(|(refused, _)| *refused) {
        return Err(Error::unsupported(what, "the KV cache"));
    }
    spec.validate()?;
    // a segment, the unit of allocation, is at least a page
    if !(1..=1 << 32).contains(&page_rows) {
        return Err(Error::invalid("page_rows", page_rows, "1 to 2^32"));
    }
    let capabilities = backend.capabilities(&spec)?;
    check::reproducible(&spec, &capabilities)?;
    if let Some(rows) = spec.leaf_rows {
        // a page is then a node of the tree over leaves
        if !page_rows.is_multiple_of(rows) || !(page_rows / rows).is_power_of_two() {
            let want = format!("{rows} times a power of two in the reproducible order");
            return Err(Error::invalid("page_rows", page_rows, want));
        }
        backend.capabilities(&page_tree::page_spec(&spec))?;
        backend.capabilities(&page_tree::tree_spec(&spec, 1)?)?;
    }
    Ok((spec, capabilities))
}

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

    /// Writes rows of k `[b, rows, kv_heads, d]` and v `[b, rows, kv_heads, dv]` to the local rows
    /// `local`, for which memory is reserved. `sources` are the rows of the tensors.
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
        shard_of(numbers).expand(&all, rows)
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
