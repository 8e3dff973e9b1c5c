//! The sharded KV cache over MPI: a prefill and tokens against the oracle, and bytes of a token.

use annulus::{Attention, Batch, Cache, CacheShape, Cpu, DType, Dims, Result};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::oracle::{self, Problem};
use ndarray::{Array4, s};

use crate::harness::{Harness, Verdict, ensure};

const DIMS: Dims =
    Dims { batch: 1, q_len: 300, kv_len: 300, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

pub(crate) fn tokens(harness: &mut Harness, settings: &Settings) -> Verdict {
    let verdict = run(settings).map_err(|error| format!("the KV cache: {error}"));
    let verdict = verdict.and_then(|(worst, bytes)| {
        ensure(worst < 1e-13, || format!("the KV cache differs from the oracle by {worst}"))?;
        // out and lse in f64 of four heads to each of the others
        let token = (harness.ranks() as u64 - 1) * 4 * (6 + 1) * 8;
        ensure(bytes.iter().all(|&bytes| bytes == token), || {
            format!("tokens cost {bytes:?} bytes, want {token}")
        })
    });
    harness.share(verdict)
}

/// Returns the worst difference from the oracle, and the bytes of each token.
fn run(settings: &Settings) -> Result<(f64, Vec<u64>)> {
    let Dims { q_len, q_heads, kv_heads, head_dim, value_dim, .. } = DIMS;
    let tensor = |salt: usize, heads, dim| {
        Array4::from_shape_fn((1, q_len, heads, dim), |(_, i, h, c)| {
            (0.7 * (i * 31 + h * 7 + c * 3 + salt * 11) as f64).sin()
        })
    };
    let q = tensor(1, q_heads, head_dim);
    let k = tensor(2, kv_heads, head_dim);
    let v = tensor(3, kv_heads, value_dim);
    let attention = Attention::new().dtype(DType::F64).causal(true).sliding_window(200, 0);
    let spec = attention.spec(DIMS)?;
    let batch = Batch::default();
    let (bias, sinks) = (None, None);
    let problem =
        Problem { spec: &spec, batch: &batch, q: q.view(), k: k.view(), v: v.view(), bias, sinks };
    let want = oracle::forward(&problem)?;

    let shape = CacheShape::new(1, q_heads, head_dim).kv_heads(kv_heads).value_dim(value_dim);
    let transport = Mpi::world(settings.clone())?;
    let mut cache = Cache::new(&attention, shape.page_rows(16), Cpu::new(1)?, transport)?;
    let mut worst: f64 = 0.0;
    let mut bytes = Vec::new();
    let mut first = 0;
    for end in [150, 290].into_iter().chain(291..=q_len) {
        let rows = s![.., first..end, .., ..];
        cache.append(k.slice(rows), v.slice(rows))?;
        let forward = cache.attend(q.slice(rows), None)?;
        let pairs = forward.out.iter().zip(want.out.slice(rows));
        worst = pairs.map(|(got, want)| (got - want).abs()).fold(worst, f64::max);
        if end == first + 1 {
            bytes.push(forward.reports[0].bytes_sent);
        }
        first = end;
    }
    Ok((worst, bytes))
}
