//! Appends and removals of rows, which are local.

use std::ops::Range;

use annulus_core::{Backend, Error, Host, HostTensors, HostView, Result, Runs, Space};

use super::{KvCache, segments::KeysValues};
use crate::{calls::Collective, ring::check::Shapes};

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
        self.write(local, count, KeysValues { k: k.reborrow(), v: v.reborrow() }, sources)
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
        self.write(local, count, KeysValues { k: k.reborrow(), v: v.reborrow() }, 0..)
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
    /// `sources` of `tensors`.
    fn write(
        &mut self,
        local: Range<u64>,
        count: usize,
        tensors: KeysValues<'_>,
        sources: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let written = self.segments.write(&self.backend, local, &tensors, sources);
        self.or_end(written)?;
        self.len += count as u64;
        Ok(())
    }

    fn check_rows(&self, k: &HostView<'_>, v: &HostView<'_>, rows: usize) -> Result<()> {
        Shapes::new(&self.spec, 0, rows).keys_values(Host::describe(k), Host::describe(v))
    }
}
