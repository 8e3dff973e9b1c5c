//! The KV cache that is sharded over ranks, on any backend: a prefill in chunks and tokens, against
//! the oracle's one attention over all rows.

use std::{ops::Range, sync::Arc};

use annulus::{Alignment, Attention, Cache, CacheShape, Forward, LocalCache, Runtime};
use annulus_comm::threads::{each_rank, ring};
use annulus_core::{
    Alibi, Backend, Batch, DType, Dims, Element, HostTensors, Result, SinkShape,
    mask::Predicate,
    oracle::{self, Problem},
};
use half::{bf16, f16};
use ndarray::{Array2, Array4, s};

use super::{Verdict, ensure};

/// Returns numbers that look random and are the same everywhere.
pub fn numbers<T: Element>(seed: u64, shape: [usize; 4]) -> Array4<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    Array4::from_shape_simple_fn(shape, || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        T::from_f64((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    })
}

/// Tensors of a whole sequence.
#[derive(Debug)]
pub struct Sequence<T: Element> {
    /// Queries of the last rows.
    pub q: Array4<T>,
    /// Keys of all rows.
    pub k: Array4<T>,
    /// Values of all rows.
    pub v: Array4<T>,
    /// Sinks, if there are any.
    pub sinks: Option<Array2<T::Accumulator>>,
}

impl<T: Element> Sequence<T> {
    /// Creates tensors of these lengths.
    pub fn new(dims: Dims, sinks: Option<SinkShape>) -> Self {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
        let sinks = sinks.map(|sinks| {
            let heads = if sinks.per_head { q_heads } else { 1 };
            let sinks = numbers::<T::Accumulator>(4, [heads, sinks.count, 1, 1]);
            sinks.slice_move(s![.., .., 0, 0])
        });
        Self {
            q: numbers(1, [batch, q_len, q_heads, head_dim]),
            k: numbers(2, [batch, kv_len, kv_heads, head_dim]),
            v: numbers(3, [batch, kv_len, kv_heads, value_dim]),
            sinks,
        }
    }

    /// Returns the number of first rows that have no queries.
    fn without_queries(&self) -> usize {
        self.k.dim().1 - self.q.dim().1
    }

    /// Appends rows, and attends with their queries.
    pub fn step(&self, cache: &mut Cache, rows: Range<usize>) -> Result<Forward<T>> {
        let of_rows = s![.., rows.clone(), .., ..];
        cache.append(self.k.slice(of_rows), self.v.slice(of_rows))?;
        let first = self.without_queries();
        let queries = rows.start.max(first) - first..rows.end.max(first) - first;
        let q = self.q.slice(s![.., queries, .., ..]);
        cache.attend(q, self.sinks.as_ref().map(|sinks| sinks.view()))
    }

    /// Computes out and lse of all queries with the oracle.
    pub fn truth(&self, attention: &Attention, dims: Dims) -> Result<oracle::Forward> {
        let spec = attention.spec(dims)?;
        let widened = |x: &Array4<T>| x.mapv(Element::to_f64);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(widened);
        let sinks = self.sinks.as_ref().map(|sinks| sinks.mapv(Element::to_f64));
        oracle::forward(&Problem {
            spec: &spec,
            batch: &Batch::default(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            bias: None,
            sinks: sinks.as_ref().map(|sinks| sinks.view()),
        })
    }
}

/// Returns the worst absolute difference; equal elements (also −∞) differ by 0.
pub fn worst(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    pairs.map(|(got, want)| if got == want { 0.0 } else { (got - want).abs() }).fold(0.0, f64::max)
}

/// A cache, and its calls.
#[derive(Debug, Clone, Copy)]
pub struct Decoding<'a> {
    /// Lengths of the whole sequence. Queries are those of the last rows.
    pub dims: Dims,
    /// Rows of a page.
    pub page_rows: u64,
    /// Number of ranks.
    pub ranks: usize,
    /// Cached rows after each call.
    pub ends: &'a [usize],
}

impl Decoding<'_> {
    /// Returns the lengths of the cache.
    pub const fn shape(&self) -> CacheShape {
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = self.dims;
        CacheShape::new(batch, q_heads, head_dim)
            .kv_heads(kv_heads)
            .value_dim(value_dim)
            .page_rows(self.page_rows)
    }

    /// Makes the calls on ranks with the backends of `make`. Returns the worst difference of out
    /// and lse from one attention over all rows.
    pub fn difference<T: Element, B: Backend<Space: HostTensors>>(
        &self,
        attention: &Attention,
        make: impl Fn(usize) -> Result<B> + Sync,
    ) -> Result<f64, String> {
        let text = |error: annulus_core::Error| error.to_string();
        let attention = attention.clone().dtype(T::DTYPE).align(Alignment::BottomRight);
        let sinks = attention.spec(self.dims).map_err(text)?.sinks;
        let all = Sequence::<T>::new(self.dims, sinks);
        let want = all.truth(&attention, self.dims).map_err(text)?;
        let of_ranks = each_rank(ring(self.ranks), |rank, transport| {
            let mut cache = Cache::with_backend(
                &attention,
                &Runtime::new(),
                self.shape(),
                make(rank)?,
                transport,
            )?;
            let starts = [0].iter().chain(self.ends);
            let steps = starts.zip(self.ends).map(|(&first, &end)| {
                let forward = all.step(&mut cache, first..end)?;
                Ok((forward, cache.bytes_predicted(end - first)))
            });
            steps.collect::<Result<Vec<_>>>()
        })
        .map_err(text)?;
        let without = all.without_queries();
        let mut difference: f64 = 0.0;
        let mut first = 0;
        for (step, (forward, _)) in of_ranks[0].iter().enumerate() {
            let end = self.ends[step].max(without) - without;
            for (rank, steps) in of_ranks.iter().enumerate() {
                let (other, predicted) = &steps[step];
                let same = (&other.out, &other.lse) == (&forward.out, &forward.lse);
                ensure(same, || format!("rank {rank} has other bits in call {step}"))?;
                let report = other.reports[0];
                let bytes = [report.bytes_sent, report.bytes_predicted];
                ensure(end == first || bytes == [*predicted; 2], || {
                    format!("rank {rank} sent and predicted {bytes:?} bytes, want {predicted}")
                })?;
            }
            let out = want.out.slice(s![.., first..end, .., ..]);
            let lse = want.lse.slice(s![.., .., first..end]);
            let outs = forward.out.iter().map(|x| x.to_f64()).zip(out.iter().copied());
            let statistics = forward.lse.iter().map(|x| x.to_f64()).zip(lse.iter().copied());
            difference = difference.max(worst(outs)).max(worst(statistics));
            first = end;
        }
        ensure(first == self.dims.q_len, || "not all queries were computed".to_owned())?;
        Ok(difference)
    }

    /// Makes the calls in `dtype` and requires that they are one attention within its rounding.
    pub fn check<B: Backend<Space: HostTensors>>(
        &self,
        attention: &Attention,
        dtype: DType,
        make: impl Fn(usize) -> Result<B> + Sync,
    ) -> Verdict {
        let (difference, most) = match dtype {
            DType::F64 => (self.difference::<f64, B>(attention, make), 1e-13),
            DType::F32 => (self.difference::<f32, B>(attention, make), 2e-6),
            DType::Bf16 => (self.difference::<bf16, B>(attention, make), 2e-2),
            DType::F16 => (self.difference::<f16, B>(attention, make), 2e-3),
        };
        let context = || format!("{dtype} on {} ranks", self.ranks);
        let difference = difference.map_err(|error| format!("{}: {error}", context()))?;
        ensure(difference < most, || format!("{}: differs by {difference}", context()))
    }
}

/// Lengths of the cases: GQA, values that are shorter than keys, and pages of 5 rows, which no call
/// fills.
pub const CACHED: Decoding<'static> = Decoding {
    dims: Dims {
        batch: 2,
        q_len: 61,
        kv_len: 61,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 8,
        value_dim: 6,
    },
    page_rows: 5,
    ranks: 1,
    // a prefill in two chunks, tokens, a chunk of several tokens, a token
    ends: &[17, 40, 41, 42, 43, 44, 60, 61],
};

/// Checks a prefill in chunks and tokens under every kind of mask and score, on each number of
/// ranks; and that refused tokens leave no trace.
pub fn kv_cache<B: Backend<Space: HostTensors>>(
    dtype: DType,
    ranks: &[usize],
    make: impl Fn(usize) -> Result<B> + Sync,
) -> Verdict {
    let even = Predicate::of_positions("even keys", |_, key| key % 2 == 0);
    let causal = || Attention::new().causal(true);
    let cases = [
        ("causal", causal()),
        ("window", causal().sliding_window(7, 0)),
        ("window, first keys", causal().sliding_window(9, 0).attention_sink_size(3)),
        ("chunks", Attention::new().chunk_size(16)),
        // of keys that are cached before the first query attends
        ("prefix", causal().prefix_len(17)),
        ("soft cap, scale", causal().logits_soft_cap(0.7).softmax_scale(-0.9)),
        ("ALiBi", causal().bias_function(Arc::new(Alibi::published(4)))),
        ("sinks of heads", causal().softmax_aux(SinkShape::per_head(2))),
        ("sinks", causal().sliding_window(2, 0).softmax_aux(SinkShape::shared(3))),
        // the first query has no visible key but itself, and odd ones among few keys have none
        ("no visible keys", causal().mask(Arc::new(even)).sliding_window(0, 0)),
        ("dropout", causal().dropout(0.3, 11)),
    ];
    for (name, attention) in cases {
        for &ranks in ranks {
            let checked = Decoding { ranks, ..CACHED }.check(&attention, dtype, &make);
            checked.map_err(|wrong| format!("{name}: {wrong}"))?;
        }
    }
    refused_tokens(make)
}

/// Checks that tokens that were computed and then refused leave no trace.
fn refused_tokens<B: Backend<Space: HostTensors>>(
    make: impl Fn(usize) -> Result<B> + Sync,
) -> Verdict {
    let attention = Attention::new().causal(true);
    let all = Sequence::<f32>::new(CACHED.dims, None);
    let other = numbers::<f32>(9, [2, 7, 2, 8]);
    let decode = |speculates: bool| {
        each_rank(ring(2), |rank, transport| {
            let (backend, runtime) = (make(rank)?, Runtime::new());
            let mut cache =
                Cache::with_backend(&attention, &runtime, CACHED.shape(), backend, transport)?;
            all.step(&mut cache, 0..53)?;
            if speculates {
                cache.append(other.view(), other.slice(s![.., .., .., ..6]))?;
                cache.attend(all.q.slice(s![.., ..7, .., ..]), None)?;
                cache.truncate(53)?;
            }
            Ok(all.step(&mut cache, 53..61)?.out)
        })
        .map_err(|error| error.to_string())
    };
    ensure(decode(true)? == decode(false)?, || "refused tokens change later ones".to_owned())
}

/// Checks tokens around the end of a rank's first segment of 4,096 rows, and rows whose bytes are
/// no multiple of 4 for elements of two bytes.
pub fn kv_cache_segments<B: Backend<Space: HostTensors>>(
    dtype: DType,
    make: impl Fn(usize) -> Result<B> + Sync,
) -> Verdict {
    let dims = Dims { q_len: 10, kv_heads: 1, value_dim: 3, ..Dims::new(1, 4103, 3, 8) };
    let ends = [3000, 4093, 4094, 4095, 4096, 4097, 4103];
    let decoding = Decoding { dims, page_rows: 64, ranks: 1, ends: &ends };
    decoding.check(&Attention::new().causal(true), dtype, make)
}

/// Bytes copied between the host and the devices of all ranks.
#[derive(Debug, Clone, Copy)]
pub struct Copied {
    /// Bytes to devices.
    pub to_device: u64,
    /// Bytes of tile lists and bitmasks. `None` if `to_device` includes them.
    pub lists: Option<u64>,
    /// Bytes to the host. `None` if they are not counted.
    pub to_host: Option<u64>,
}

impl Copied {
    /// Returns the bytes copied since `before`.
    fn since(self, before: Self) -> Self {
        let subtract = |now: Option<u64>, before: Option<u64>| Some(now? - before?);
        Self {
            to_device: self.to_device - before.to_device,
            lists: subtract(self.lists, before.lists),
            to_host: subtract(self.to_host, before.to_host),
        }
    }
}

/// Checks that a token copies its own rows and queries to the devices and its results to the host,
/// whatever the number of cached rows, and an append its rows alone. The tile lists of a token have
/// at most `list_bytes` bytes for each segment of 4,096 rows. `copied` counts all copies so far.
pub fn kv_cache_copies(
    cache: &mut LocalCache,
    list_bytes: u64,
    copied: impl Fn() -> Copied,
) -> Verdict {
    const ROWS: [u64; 3] = [500, 4_000, 9_000];
    let ranks = cache.ranks().len() as u64;
    let row_bytes = 2 * (8 + 6) * 4;
    let query_bytes = ranks * 4 * 8 * 4;
    // out, lse, maximum and sum
    let result_bytes = ranks * 4 * (6 + 3) * 4;
    let [k, v] = [numbers::<f32>(1, [1, 500, 2, 8]), numbers::<f32>(2, [1, 500, 2, 6])];
    let q = numbers::<f32>(3, [1, 1, 4, 8]);
    let text = |error: annulus_core::Error| error.to_string();
    let row = s![.., ..1, .., ..];
    for rows in ROWS {
        while cache.len() < rows {
            let before = copied();
            cache.append(k.view(), v.view()).map_err(text)?;
            let used = copied().since(before);
            let is_rows = used.to_device == 500 * row_bytes && used.to_host.unwrap_or(0) == 0;
            ensure(is_rows, || format!("an append at {rows} rows: {used:?}"))?;
        }
        // the first call makes the workspaces
        cache.attend(q.view(), None).map_err(text)?;
        let before = copied();
        cache.append(k.slice(row), v.slice(row)).map_err(text)?;
        cache.attend(q.view(), None).map_err(text)?;
        let used = copied().since(before);
        let context = || format!("a token at {rows} rows on {ranks} ranks: {used:?}");
        let lists = used.to_device.checked_sub(row_bytes + query_bytes).ok_or_else(context)?;
        let lists = match used.lists {
            Some(apart) => {
                ensure(lists == 0, context)?;
                apart
            }
            None => lists,
        };
        // runs of full tiles, for each segment of each rank
        let segments = (rows + 1).div_ceil(ranks).div_ceil(4096) * ranks;
        ensure(lists > 0 && lists <= list_bytes * segments, context)?;
        ensure(used.to_host.is_none_or(|bytes| bytes == result_bytes), context)?;
    }
    Ok(())
}

/// Lengths of the cache of [`kv_cache_copies`].
pub const COPIED: CacheShape = CacheShape::new(1, 4, 8).kv_heads(2).value_dim(6);
