//! A whole KV cache in one process: one thread per rank.

use std::iter;

use annulus_comm::{
    ring::Report,
    threads::{self, Threads, each_rank},
};
use annulus_core::{Element, Error, Result, Runs, Spec};
use ndarray::{ArrayView2, ArrayView4, ArrayViewMut3, ArrayViewMut4};

use crate::{Attention, Cache, CacheShape, Forward, Runtime, plan::zero_results};

/// A whole KV cache in this process ([`Cache`]), whose ranks are threads.
///
/// A call of [`LocalCache::attend`] starts one thread per rank (none for one rank) and returns when
/// all ranks have ended; appends start none. An error that ends the cache of one rank ends the
/// whole: later calls return [`Error::Poisoned`].
///
/// # Examples
/// Three ranks: a prefill of 100 rows, then tokens.
/// ```
/// use annulus::{Attention, CacheShape, Dims, LocalCache, LocalRing, Runtime, Tensors};
/// use ndarray::{Array4, s};
///
/// let x = Array4::<f32>::from_shape_fn((1, 103, 4, 16), |(_, i, h, c)| {
///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
/// });
/// let attention = Attention::new().causal(true);
/// let shape = CacheShape::new(1, 4, 16).page_rows(16);
/// let mut cache = LocalCache::new(&attention, &Runtime::new(), shape, 3)?;
/// let mut out = None;
/// for rows in [0..100, 100..101, 101..102, 102..103] {
///     let rows = x.slice(s![.., rows, .., ..]);
///     cache.append(rows, rows)?;
///     out = Some(cache.attend(rows, None)?.out);
/// }
/// let mut whole = LocalRing::new(&attention, Dims::new(1, 103, 4, 16), 1)?;
/// let whole = whole.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
/// let token = whole.out.slice(s![.., 102.., .., ..]);
/// assert!(out.is_some_and(|out| (out - &token).iter().all(|x| x.abs() < 1e-5)));
/// # Ok::<(), annulus::Error>(())
/// ```
#[derive(Debug)]
pub struct LocalCache {
    ranks: Vec<Cache>,
}

impl LocalCache {
    /// Creates an empty cache of `ranks` ranks in this process, on the backend of the runtime
    /// ([`Runtime::backend`]). Ranks share a GPU if its number was given, or if they are more than
    /// the GPUs.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Unsupported`], which name the parameter;
    /// [`Error::OutOfMemory`]; those of the device.
    pub fn new(
        attention: &Attention,
        runtime: &Runtime,
        shape: CacheShape,
        ranks: usize,
    ) -> Result<Self> {
        let backend = runtime.backend_of(Some(ranks))?;
        let runtime = runtime.clone().backend(backend).threads(None);
        Self::from_caches(&runtime, ranks, |_, runtime, endpoint| {
            Cache::new(attention, runtime, shape, endpoint)
        })
    }

    /// Creates an empty cache of ranks in this process; `cache` creates one of them from its
    /// number, its runtime and its endpoint of a ring of threads.
    ///
    /// # Ordering
    /// Local. `cache` runs on the thread of the rank, concurrently with those of the other ranks.
    ///
    /// # Errors
    /// As [`LocalCache::new`], and the errors of `cache`.
    pub fn from_caches(
        runtime: &Runtime,
        ranks: usize,
        cache: impl Fn(usize, &Runtime, Threads) -> Result<Cache> + Sync,
    ) -> Result<Self> {
        let ring = threads::checked_ring(ranks)?;
        let runtime = runtime.of_threads();
        let ranks = each_rank(ring, |rank, endpoint| cache(rank, &runtime, endpoint))?;
        Ok(Self { ranks })
    }

    /// Appends rows: each rank copies those of its pages.
    ///
    /// # Shapes
    /// k `[batch, rows, kv_heads, head_dim]`, v `[batch, rows, kv_heads, value_dim]`. Any strides.
    ///
    /// # Ordering
    /// Local.
    ///
    /// # Errors
    /// As [`Cache::append`]: nothing was appended.
    pub fn append<T: Element>(&mut self, k: ArrayView4<'_, T>, v: ArrayView4<'_, T>) -> Result<()> {
        let len = self.len();
        let appended = self.ranks.iter_mut().try_for_each(|cache| cache.append(k, v));
        if appended.is_err() {
            self.truncate(len)?;
        }
        appended
    }

    /// Removes the rows from `len` on. Their memory is kept for later rows.
    ///
    /// # Ordering
    /// Local.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are fewer rows.
    pub fn truncate(&mut self, len: u64) -> Result<()> {
        self.ranks.iter_mut().try_for_each(|cache| cache.truncate(len))
    }

    /// Returns the numbers of the next `count` rows, counted from 0: all, because
    /// [`LocalCache::append`] takes whole tensors.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a cache cannot have so many rows.
    pub fn own_rows(&self, count: usize) -> Result<Runs> {
        self.ranks[0].own_rows(count)?;
        Ok(Runs::counting(0, count as u64))
    }

    /// Computes out and lse of the queries of the last cached rows ([`Cache::attend`]). There is
    /// one report per rank.
    ///
    /// # Shapes
    /// As [`Cache::attend`].
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`]: nothing was done. [`Error::Device`],
    /// [`Error::Comm`], [`Error::Timeout`] and [`Error::Internal`] end the cache.
    pub fn attend<T: Element>(
        &mut self,
        q: ArrayView4<'_, T>,
        softmax_aux: Option<ArrayView2<'_, T::Accumulator>>,
    ) -> Result<Forward<T>> {
        let queries = q.dim().1;
        if queries as u64 > self.len() {
            let want = format!("at most the {} cached rows", self.len());
            return Err(Error::invalid("q", format!("{queries} queries"), want));
        }
        let mut forward = zero_results(self.spec(), queries)?;
        let outputs = (forward.out.view_mut(), forward.lse.view_mut());
        forward.reports = self.attend_into(q, softmax_aux, outputs.0, outputs.1)?;
        Ok(forward)
    }

    /// Computes out and lse as [`LocalCache::attend`] does, into tensors of the caller's. Every
    /// rank but the first allocates outputs of its own. Returns one report per rank.
    ///
    /// # Shapes
    /// As [`Cache::attend_into`]. Any strides.
    ///
    /// # Ordering
    /// Local: all ranks are threads of this process.
    ///
    /// # Errors
    /// As [`LocalCache::attend`].
    pub fn attend_into<T: Element>(
        &mut self,
        q: ArrayView4<'_, T>,
        softmax_aux: Option<ArrayView2<'_, T::Accumulator>>,
        out: ArrayViewMut4<'_, T>,
        lse: ArrayViewMut3<'_, T::Accumulator>,
    ) -> Result<Vec<Report>> {
        // all ranks compute the same bits: the first writes those of the caller
        let outputs = iter::once(Some((out, lse))).chain(iter::repeat_with(|| None));
        each_rank(self.ranks.iter_mut().zip(outputs), |_, (cache, outputs)| match outputs {
            Some((out, lse)) => cache.attend_into(q, softmax_aux, out, lse),
            None => cache.attend(q, softmax_aux).map(|forward| forward.reports[0]),
        })
    }

    /// Returns the caches of all ranks, in their order.
    pub fn ranks(&self) -> &[Cache] {
        &self.ranks
    }

    /// Returns the number of cached rows.
    pub fn len(&self) -> u64 {
        self.ranks[0].len()
    }

    /// Returns true if no rows are cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the rows of a page.
    pub fn page_rows(&self) -> u64 {
        self.ranks[0].page_rows()
    }

    /// Returns the definition of the attention. Its lengths have no meaning.
    pub fn spec(&self) -> &Spec {
        self.ranks[0].spec()
    }

    /// Returns the payload bytes that all ranks send in a call with `queries` queries.
    pub fn bytes_predicted(&self, queries: usize) -> u64 {
        self.bytes_predicted_at(self.len(), queries)
    }

    /// As [`LocalCache::bytes_predicted`], once `len` rows are cached.
    pub fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64 {
        let ranks = self.ranks.iter().map(|cache| cache.bytes_predicted_at(len, queries));
        ranks.fold(0, u64::saturating_add)
    }

    /// Returns the bytes of the keys, values and message buffers of all ranks.
    pub fn buffer_bytes(&self) -> u64 {
        self.ranks.iter().map(Cache::buffer_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Precision, bias::BiasTable};

    fn text<T>(result: Result<T>) -> String {
        result.map(drop).unwrap_err().to_string()
    }

    #[test]
    fn what_a_cache_does_not_have_is_refused_by_name() {
        let shape = CacheShape::new(1, 4, 8);
        let cache = |attention: &Attention, runtime: &Runtime, shape, ranks| {
            LocalCache::new(attention, runtime, shape, ranks)
        };
        let (new, runtime) = (Attention::new, Runtime::new());
        let watched = runtime.clone().on_step(|_| {});
        let told = text(cache(&new(), &watched, shape, 2));
        assert_eq!(told, "on_step is not supported by the KV cache");
        let table = BiasTable::clipped(1, 1).unwrap();
        let told = text(cache(&new().bias_table(table), &runtime, shape, 2));
        assert_eq!(told, "bias_table is not supported by the KV cache");
        assert!(cache(&new().precision(Precision::Default), &runtime, shape, 2).is_ok());
        let told = |shape, ranks| text(cache(&new(), &runtime, shape, ranks));
        assert_eq!(told(shape, 0), "ranks: got 0, want at least 1");
        assert_eq!(told(shape, 1025), "ranks: got 1025, want at most 1024 in one process");
        let no_threads = Runtime::new().threads(0);
        let told = text(cache(&new(), &no_threads, shape, 1));
        assert_eq!(told, "threads: got 0, want at least 1");
    }
}
