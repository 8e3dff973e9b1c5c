//! The sharded KV cache over MPI: a prefill and tokens against the oracle and bytes of a token, on
//! any backend, and the bits of one attention in the reproducible order.

use annulus::{
    AnyBackend, Attention, Batch, Cache, CacheShape, DType, Dims, Element, LocalRing, Result,
    Runtime, Tensors,
};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::oracle::{self, Problem};
use ndarray::{Array4, s};

use crate::harness::{Harness, Verdict, ensure};

const DIMS: Dims =
    Dims { batch: 1, q_len: 300, kv_len: 300, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

/// Tokens in f64 on the CPU, and the reproducible order.
pub(crate) fn tokens(harness: &mut Harness, settings: &Settings) -> Verdict {
    let cpu =
        AnyBackend::open(annulus::BackendName::Cpu, None, 1).map_err(|error| error.to_string());
    cpu.and_then(|cpu| tokens_on::<f64>(harness, settings, &cpu, 1e-13))?;
    let same = reproducible(settings).map_err(|error| format!("reproducible: {error}"));
    let verdict = same.and_then(|same| {
        ensure(same, || "the reproducible KV cache has other bits than one attention".into())
    });
    harness.share(verdict)
}

/// Requires that tokens in `T` on a backend differ from the oracle by less than `most`, and that
/// each of them sends the same bytes.
pub(crate) fn tokens_on<T: Element>(
    harness: &mut Harness,
    settings: &Settings,
    backend: &AnyBackend,
    most: f64,
) -> Verdict {
    let verdict = run::<T>(settings, backend).map_err(|error| format!("the KV cache: {error}"));
    let verdict = verdict.and_then(|(worst, bytes)| {
        ensure(worst < most, || format!("the KV cache differs from the oracle by {worst}"))?;
        // out, maximum and sum of four heads to each of the others
        let row_bytes = 6 * T::DTYPE.bytes() + 2 * T::DTYPE.accumulator().bytes();
        let token = (harness.ranks() as u64 - 1) * 4 * row_bytes as u64;
        ensure(bytes.len() == 10 && bytes.iter().all(|&bytes| bytes == token), || {
            format!("tokens cost {bytes:?} bytes, want {token}")
        })
    });
    harness.share(verdict)
}

/// Returns `[1, rows, heads, dim]` numbers that are the same on all ranks.
fn tensor(rows: usize, salt: usize, heads: usize, dim: usize) -> Array4<f64> {
    Array4::from_shape_fn((1, rows, heads, dim), |(_, i, h, c)| {
        (0.7 * (i * 31 + h * 7 + c * 3 + salt * 11) as f64).sin()
    })
}

/// Returns true if decoding in the reproducible order has the bits of one attention, and sends the
/// predicted bytes.
fn reproducible(settings: &Settings) -> Result<bool> {
    let dims = Dims { q_len: 1300, kv_len: 1300, ..DIMS };
    let Dims { q_len, q_heads, kv_heads, head_dim, value_dim, .. } = dims;
    let q = tensor(q_len, 1, q_heads, head_dim);
    let k = tensor(q_len, 2, kv_heads, head_dim);
    let v = tensor(q_len, 3, kv_heads, value_dim);
    let attention = Attention::new().dtype(DType::F64).causal(true).reproducible(true);
    let whole = LocalRing::new(&attention, dims, 1)?.forward(&Tensors::new(
        q.view(),
        k.view(),
        v.view(),
    ))?;
    let shape = CacheShape::new(1, q_heads, head_dim).kv_heads(kv_heads).value_dim(value_dim);
    let transport = Mpi::world(settings.clone())?;
    let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
    let mut same = true;
    let mut first = 0;
    for end in [700, 1290].into_iter().chain(1291..=q_len) {
        let rows = s![.., first..end, .., ..];
        cache.append(k.slice(rows), v.slice(rows))?;
        let predicted = cache.bytes_predicted(end - first);
        let forward = cache.attend(q.slice(rows), None)?;
        same &= forward.out == whole.out.slice(rows)
            && forward.lse == whole.lse.slice(s![.., .., first..end])
            && forward.reports[0].bytes_sent == predicted;
        first = end;
    }
    Ok(same)
}

/// Returns the worst difference from the oracle, and the bytes of each token.
fn run<T: Element>(settings: &Settings, backend: &AnyBackend) -> Result<(f64, Vec<u64>)> {
    let Dims { q_len, q_heads, kv_heads, head_dim, value_dim, .. } = DIMS;
    let tensor = |salt, heads, dim| tensor(q_len, salt, heads, dim).mapv(T::from_f64);
    let q = tensor(1, q_heads, head_dim);
    let k = tensor(2, kv_heads, head_dim);
    let v = tensor(3, kv_heads, value_dim);
    let attention = Attention::new().dtype(T::DTYPE).causal(true).sliding_window(200, 0);
    let spec = attention.spec(DIMS)?;
    let batch = Batch::default();
    let (bias, sinks) = (None, None);
    let [wide_q, wide_k, wide_v] = [&q, &k, &v].map(|tensor| tensor.mapv(T::to_f64));
    let [q_view, k_view, v_view] = [wide_q.view(), wide_k.view(), wide_v.view()];
    let problem =
        Problem { spec: &spec, batch: &batch, q: q_view, k: k_view, v: v_view, bias, sinks };
    let want = oracle::forward(&problem)?;

    let shape = CacheShape::new(1, q_heads, head_dim).kv_heads(kv_heads).value_dim(value_dim);
    let transport = Mpi::world(settings.clone())?;
    let runtime = Runtime::new().backend(backend.clone());
    let mut cache = Cache::new(&attention, &runtime, shape.page_rows(16), transport)?;
    let mut worst: f64 = 0.0;
    let mut bytes = Vec::new();
    let mut first = 0;
    for end in [150, 290].into_iter().chain(291..=q_len) {
        let rows = s![.., first..end, .., ..];
        cache.append(k.slice(rows), v.slice(rows))?;
        let forward = cache.attend(q.slice(rows), None)?;
        let pairs = forward.out.iter().zip(want.out.slice(rows));
        worst = pairs.map(|(got, want)| (got.to_f64() - want).abs()).fold(worst, f64::max);
        if end == first + 1 {
            bytes.push(forward.reports[0].bytes_sent);
        }
        first = end;
    }
    Ok((worst, bytes))
}
