//! A KV cache that is sharded over ranks, with typed tensors in host memory.

use annulus_comm::{
    kv_cache::{Attend, KvCache},
    ring::Report,
};
use annulus_core::{
    Backend, Dims, Element, Error, Host, HostTensors, HostView, ProcessOwned, Result, Runs, Spec,
    Transport,
};
use ndarray::{ArrayView2, ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis};

use crate::{
    Attention, Forward, Runtime,
    backend::{Cpu, Opened, or_abort},
    plan::zero_results,
};

/// Lengths of a [`Cache`], equal on all ranks: batch rows, heads, dims, and rows of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    page_rows: Option<u64>,
}

impl CacheShape {
    /// Sets `batch` sequences of equal length, `heads` query and KV heads, and `dim` elements of
    /// queries, keys and values.
    pub const fn new(batch: usize, heads: usize, dim: usize) -> Self {
        Self {
            batch,
            q_heads: heads,
            kv_heads: heads,
            head_dim: dim,
            value_dim: dim,
            page_rows: None,
        }
    }

    /// Sets the KV heads (GQA, MQA), a divisor of the query heads. Default: as many.
    #[must_use]
    pub const fn kv_heads(self, kv_heads: usize) -> Self {
        Self { kv_heads, ..self }
    }

    /// Sets the elements of values and outputs. Default: those of keys.
    #[must_use]
    pub const fn value_dim(self, value_dim: usize) -> Self {
        Self { value_dim, ..self }
    }

    /// Sets the rows of a page, at least 1. Default: 64, a KV tile of the kernels. Numbers of rows
    /// of two ranks differ by at most one page.
    ///
    /// In the reproducible order 256, a leaf, times a power of two. Default: 256. The bytes of a
    /// call are then proportional to the number of pages that its queries attend to.
    #[must_use]
    pub const fn page_rows(self, page_rows: u64) -> Self {
        Self { page_rows: Some(page_rows), ..self }
    }

    const fn dims(&self) -> Dims {
        let Self { batch, q_heads, kv_heads, head_dim, value_dim, .. } = *self;
        Dims { batch, q_len: 1, kv_len: 1, q_heads, kv_heads, head_dim, value_dim }
    }
}

/// One rank of a KV cache for decoding and chunked prefill: each rank has every ranks-th page of
/// the keys and values.
///
/// A program appends the keys and values of new tokens, in chunks or one by one, and then attends
/// with their queries. Both are known to every rank, as in a model whose other layers are
/// replicated. Each rank computes over the rows that it has; one all-gather of (out, max, sum)
/// merges the results. Its bytes depend on the queries alone: a token costs as many after 10⁶
/// cached rows as after 10³.
///
/// A forked child cannot use the caches of its parent, as its plans ([`crate::Plan`]).
///
/// Results are those of one attention over all cached rows, up to rounding: row i has the position
/// i. With more than one rank the output of each rank is rounded to the element type before the
/// merge, and the merged one again. All ranks get the same bits. `docs/semantics.md` in the
/// repository lists what is not supported.
///
/// Keys and values are in the memory of the backend, which computes on them in place. An append
/// copies its rows there, and nothing else: the copies of a token do not depend on the number of
/// cached rows either. Queries, results and messages are in host memory on every backend.
///
/// With [`Attention::reproducible`] the bits are those of one attention over all cached rows, for
/// any number of ranks, any appends and any page size. A call then has two exchanges, whose bytes
/// are proportional to the number of pages that its queries attend to
/// ([`Cache::bytes_predicted`]).
///
/// # Examples
/// Four ranks, here as threads: a prefill of 100 rows, then tokens.
/// ```
/// use annulus::{Attention, Cache, CacheShape, Dims, LocalRing, Runtime, Tensors};
/// use annulus::comm::threads::{each_rank, ring};
/// use ndarray::{Array4, s};
///
/// let x = Array4::<f32>::from_shape_fn((1, 103, 4, 16), |(_, i, h, c)| {
///     ((i * 7 + h * 3 + c) % 11) as f32 * 0.1
/// });
/// let attention = Attention::new().causal(true);
/// let outs = each_rank(ring(4), |_, transport| {
///     let shape = CacheShape::new(1, 4, 16).page_rows(16);
///     let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
///     let mut step = |rows: std::ops::Range<usize>| {
///         let rows = x.slice(s![.., rows, .., ..]);
///         cache.append(rows, rows)?;
///         cache.attend(rows, None)
///     };
///     step(0..100)?;
///     step(100..101)?;
///     step(101..102)?;
///     Ok(step(102..103)?.out)
/// })?;
/// let mut whole = LocalRing::new(&attention, Dims::new(1, 103, 4, 16), 1)?;
/// let whole = whole.forward(&Tensors::new(x.view(), x.view(), x.view()))?;
/// let token = whole.out.slice(s![.., 102.., .., ..]);
/// assert!(outs.iter().all(|out| (out - &token).iter().all(|x| x.abs() < 1e-5)));
/// # Ok::<(), annulus::Error>(())
/// ```
pub struct Cache {
    cache: ProcessOwned<Box<dyn RankCache>>,
}

impl Cache {
    /// Creates one rank of an empty cache over a transport of host memory, on the backend of the
    /// runtime ([`Runtime::backend`]). Memory is allocated by appends. Ranks may have different
    /// backends.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Unsupported`] here, then [`Error::Refused`]
    /// elsewhere; [`Error::RankMismatch`] on all ranks; [`Error::ArrivalTimeout`]. Those of the
    /// device: then [`Error::Aborted`] on the other ranks.
    pub fn new<T: Transport<Host> + 'static>(
        attention: &Attention,
        runtime: &Runtime,
        shape: CacheShape,
        mut transport: T,
    ) -> Result<Self> {
        let opened = or_abort(runtime.backend_of(None), &mut transport)?;
        // the opened backend has them
        let runtime = runtime.clone().backend(None).threads(None);
        match &opened.0 {
            Opened::Cpu(threads) => {
                let cpu = or_abort(Cpu::new(*threads), &mut transport)?;
                Self::with_backend(attention, &runtime, shape, cpu, transport)
            }
            #[cfg(feature = "wgpu")]
            Opened::Wgpu(devices) => {
                let gpu = or_abort(devices.of_rank(&transport), &mut transport)?;
                let wgpu = annulus_wgpu::Wgpu::on_host(gpu);
                Self::with_backend(attention, &runtime, shape, wgpu, transport)
            }
            #[cfg(feature = "cuda")]
            Opened::Cuda(devices) => {
                let cuda = or_abort(devices.of_rank(&transport), &mut transport)?;
                Self::with_backend(attention, &runtime, shape, cuda.on_host(), transport)
            }
        }
    }

    /// Creates one rank as [`Cache::new`] does, on a backend of the program's own.
    /// [`Runtime::backend`] and [`Runtime::threads`] are refused.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn with_backend<B, T>(
        attention: &Attention,
        runtime: &Runtime,
        shape: CacheShape,
        backend: B,
        transport: T,
    ) -> Result<Self>
    where
        B: Backend<Space: HostTensors>,
        T: Transport<Host> + 'static,
    {
        // a value that cannot be read enters the agreement, so that no rank waits for this one
        let variable = Runtime::deadline_variable();
        let deadline_variable = variable.clone().unwrap_or_default();
        let transport = runtime.bounded(transport, deadline_variable)?;
        let spec = variable.and_then(|_| runtime.check_own_backend());
        let spec = spec.and_then(|()| runtime.check_cache());
        let spec = spec.and_then(|()| attention.check_cache());
        let spec = spec.and_then(|()| attention.spec(shape.dims()));
        let transport = Box::new(transport);
        let page_rows = shape.page_rows.unwrap_or(attention.default_page_rows());
        let cache = KvCache::new(backend, transport, spec, page_rows, deadline_variable)?;
        Ok(Self { cache: ProcessOwned::new(Box::new(cache)) })
    }

    /// Appends rows that every rank has: this rank copies those of its pages.
    ///
    /// # Shapes
    /// k `[batch, rows, kv_heads, head_dim]`, v `[batch, rows, kv_heads, value_dim]`: the same rows
    /// on every rank. Any strides.
    ///
    /// # Ordering
    /// Local: nothing is sent. [`Cache::attend`] checks that all ranks have appended as many rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], [`Error::OutOfMemory`], [`Error::Poisoned`]: nothing was
    /// appended. [`Error::Device`] and [`Error::Internal`] end the cache, on the other ranks in
    /// their next call.
    pub fn append<T: Element>(&mut self, k: ArrayView4<'_, T>, v: ArrayView4<'_, T>) -> Result<()> {
        self.check_process()?;
        self.cache.append(&T::view(k), &T::view(v))
    }

    /// Appends `count` rows of a prefill whose keys and values are sharded: this rank passes the
    /// rows of its own pages ([`Cache::own_rows`]).
    ///
    /// # Shapes
    /// k `[batch, own rows, kv_heads, head_dim]`, v `[batch, own rows, kv_heads, value_dim]`, in
    /// ascending order. Any strides.
    ///
    /// # Ordering
    /// As [`Cache::append`]; `count` is the same on every rank.
    ///
    /// # Errors
    /// As [`Cache::append`].
    pub fn append_own<T: Element>(
        &mut self,
        count: usize,
        k: ArrayView4<'_, T>,
        v: ArrayView4<'_, T>,
    ) -> Result<()> {
        self.check_process()?;
        self.cache.append_own(count, &T::view(k), &T::view(v))
    }

    /// Returns the rows of this rank among the next `count` rows, counted from 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a cache cannot have so many rows.
    pub fn own_rows(&self, count: usize) -> Result<Runs> {
        self.cache.own_rows(count).map_err(|error| match error {
            Error::InvalidArgument { got, want, .. } => Error::invalid("count", got, want),
            other => other,
        })
    }

    /// Removes the rows from `len` on, for example tokens of a speculation that were refused. Their
    /// memory is kept for later rows.
    ///
    /// # Ordering
    /// Local, as [`Cache::append`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are fewer rows.
    pub fn truncate(&mut self, len: u64) -> Result<()> {
        self.check_process()?;
        self.cache.truncate(len)
    }

    /// Computes out and lse of the queries of the last cached rows: of n queries, query i has the
    /// row number and the position len − n + i.
    ///
    /// # Shapes
    /// q `[batch, n, q_heads, head_dim]`, n at most [`Cache::len`]; softmax_aux as
    /// [`Attention::softmax_aux`] declares it. All ranks pass the same numbers and get the same
    /// bits.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::OutOfMemory`] here and [`Error::Refused`] elsewhere;
    /// [`Error::RankMismatch`] if the ranks have different numbers of cached rows or of queries:
    /// nothing was done on any rank. [`Error::ArrivalTimeout`]: likewise; make the same call again
    /// ([`Runtime::arrival_deadline`]). [`Error::Comm`], [`Error::Timeout`], [`Error::PeerLost`],
    /// [`Error::Aborted`], [`Error::Device`] and [`Error::Internal`] end the cache; later calls
    /// return [`Error::Poisoned`].
    ///
    /// # Source
    /// Dao et al. 2023, Flash-Decoding for long-context inference, over ranks.
    pub fn attend<T: Element>(
        &mut self,
        q: ArrayView4<'_, T>,
        softmax_aux: Option<ArrayView2<'_, T::Accumulator>>,
    ) -> Result<Forward<T>> {
        let forward = zero_results(self.spec(), q.dim().1);
        let mut forward = forward.map_err(|error| self.cache.refuse(error))?;
        let report =
            self.attend_into(q, softmax_aux, forward.out.view_mut(), forward.lse.view_mut())?;
        forward.reports.push(report);
        Ok(forward)
    }

    /// Computes out and lse as [`Cache::attend`] does, into tensors of the caller's.
    ///
    /// # Shapes
    /// As [`Cache::attend`]; out `[batch, n, q_heads, value_dim]`, lse `[batch, q_heads, n]`. Any
    /// strides.
    ///
    /// # Ordering
    /// Collective.
    ///
    /// # Errors
    /// As [`Cache::attend`].
    pub fn attend_into<T: Element>(
        &mut self,
        q: ArrayView4<'_, T>,
        softmax_aux: Option<ArrayView2<'_, T::Accumulator>>,
        out: ArrayViewMut4<'_, T>,
        lse: ArrayViewMut3<'_, T::Accumulator>,
    ) -> Result<Report> {
        self.check_process()?;
        let sinks = softmax_aux
            .map(|sinks| T::Accumulator::view(sinks.insert_axis(Axis(2)).insert_axis(Axis(3))));
        self.cache.attend(Attend {
            q: T::view(q),
            sinks,
            out: T::view_mut(out),
            lse: T::Accumulator::view_mut(lse.insert_axis(Axis(3))),
        })
    }

    /// Refuses the call of [`Cache::attend`] that the other ranks make, on a rank that cannot make
    /// it. They get [`Error::Refused`], and the cache can still be used.
    ///
    /// # Ordering
    /// Collective, in place of the call.
    pub fn refuse(&mut self, why: Error) -> Error {
        self.check_process().err().unwrap_or_else(|| self.cache.refuse(why))
    }

    /// Checks that this is not a forked child of the process that made the cache.
    fn check_process(&self) -> Result<()> {
        self.cache.process().check("cache")
    }

    /// Returns the number of cached rows of all ranks.
    pub fn len(&self) -> u64 {
        self.cache.len()
    }

    /// Returns true if no rows are cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of cached rows of this rank.
    pub fn local_len(&self) -> u64 {
        self.cache.local_len()
    }

    /// Returns the rows of a page.
    pub fn page_rows(&self) -> u64 {
        self.cache.page_rows()
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.cache.rank()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.cache.ranks()
    }

    /// Returns the definition of the attention. Its lengths have no meaning.
    pub fn spec(&self) -> &Spec {
        self.cache.spec()
    }

    /// Returns the payload bytes that this rank sends in a call with `queries` queries.
    ///
    /// By default they are (ranks − 1) · rows · (value_dim elements, maximum and sum), where rows
    /// is batch · queries · q_heads, and it receives as many. In the reproducible order it sends,
    /// of its pages that the queries of a round attend to, and its rows / ranks rows:
    ///
    /// ```text
    /// (rows − own rows) · own pages · (value_dim + 2) accumulators
    ///     + (ranks − 1) · own rows · (value_dim elements and lse)
    /// ```
    /// Then it is 0 for more queries than cached rows, a call that is refused.
    pub fn bytes_predicted(&self, queries: usize) -> u64 {
        self.bytes_predicted_at(self.len(), queries)
    }

    /// As [`Cache::bytes_predicted`], once `len` rows are cached.
    pub fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64 {
        self.cache.bytes_predicted_at(len, queries)
    }

    /// Returns the bytes of this rank's keys, values and message buffers. Memory of the cache grows
    /// by segments of at least 4,096 rows.
    pub fn buffer_bytes(&self) -> u64 {
        self.cache.buffer_bytes()
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("len", &self.len())
            .field("page_rows", &self.page_rows())
            .finish_non_exhaustive()
    }
}

/// Methods of [`KvCache`].
pub(crate) trait RankCache: Send {
    fn append(&mut self, k: &HostView<'_>, v: &HostView<'_>) -> Result<()>;
    fn append_own(&mut self, count: usize, k: &HostView<'_>, v: &HostView<'_>) -> Result<()>;
    fn truncate(&mut self, len: u64) -> Result<()>;
    fn attend(&mut self, tensors: Attend<'_>) -> Result<Report>;
    fn refuse(&mut self, why: Error) -> Error;
    fn own_rows(&self, count: usize) -> Result<Runs>;
    fn len(&self) -> u64;
    fn local_len(&self) -> u64;
    fn page_rows(&self) -> u64;
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    fn spec(&self) -> &Spec;
    fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64;
    fn buffer_bytes(&self) -> u64;
}

impl<B: Backend<Space: HostTensors>> RankCache for KvCache<B> {
    fn append(&mut self, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        Self::append(self, k, v)
    }
    fn append_own(&mut self, count: usize, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        Self::append_own(self, count, k, v)
    }
    fn truncate(&mut self, len: u64) -> Result<()> {
        Self::truncate(self, len)
    }
    fn attend(&mut self, tensors: Attend<'_>) -> Result<Report> {
        Self::attend(self, tensors)
    }
    fn refuse(&mut self, why: Error) -> Error {
        Self::refuse(self, why)
    }
    fn own_rows(&self, count: usize) -> Result<Runs> {
        Self::own_rows(self, count)
    }
    fn len(&self) -> u64 {
        Self::len(self)
    }
    fn local_len(&self) -> u64 {
        Self::local_len(self)
    }
    fn page_rows(&self) -> u64 {
        Self::page_rows(self)
    }
    fn rank(&self) -> usize {
        Self::rank(self)
    }
    fn ranks(&self) -> usize {
        Self::ranks(self)
    }
    fn spec(&self) -> &Spec {
        Self::spec(self)
    }
    fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64 {
        Self::bytes_predicted_at(self, len, queries)
    }
    fn buffer_bytes(&self) -> u64 {
        Self::buffer_bytes(self)
    }
}
