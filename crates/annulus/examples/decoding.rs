//! Decoding with a KV cache that is sharded over ranks: each rank has a quarter of the keys and
//! values, and a token costs as many bytes after 5,000 rows as after 500.
//!
//! ```sh
//! cargo run --release -p annulus --example decoding
//! ```

use std::ops::Range;

use annulus::{
    Attention, Cache, CacheShape, Result, Runtime,
    comm::threads::{Threads, each_rank, ring},
    ndarray::Array4,
};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// The model's projections of some tokens, which every rank computes.
fn project(tokens: Range<u64>, heads: usize, salt: u64) -> Array4<f32> {
    let count = (tokens.end - tokens.start) as usize;
    Array4::from_shape_fn((1, count, heads, DIM), |(_, i, h, c)| {
        let row = tokens.start + i as u64;
        (0.3 * ((row * 31 + salt) as f32 + (h * 7 + c) as f32)).sin()
    })
}

/// Appends tokens and attends with their queries. Returns the sum of out and the bytes sent.
fn step(cache: &mut Cache, tokens: Range<u64>) -> Result<(f32, u64)> {
    let q = project(tokens.clone(), HEADS, 1);
    let k = project(tokens.clone(), KV_HEADS, 2);
    let v = project(tokens, KV_HEADS, 3);
    cache.append(k.view(), v.view())?;
    let forward = cache.attend(q.view(), None)?;
    Ok((forward.out.sum(), forward.reports[0].bytes_sent))
}

fn rank(transport: Threads) -> Result<()> {
    let attention = Attention::new().causal(true);
    let shape = CacheShape::new(1, HEADS, DIM).kv_heads(KV_HEADS);
    let mut cache = Cache::new(&attention, &Runtime::new(), shape, transport)?;
    for prefill in [500, 5_000] {
        // a prefill in chunks, then tokens one by one
        while cache.len() < prefill {
            let first = cache.len();
            step(&mut cache, first..prefill.min(first + 1_000))?;
        }
        for _ in 0..3 {
            let token = cache.len();
            let (sum, bytes) = step(&mut cache, token..token + 1)?;
            assert_eq!(bytes, cache.bytes_predicted(1)); // whatever the number of rows
            if cache.rank() == 0 {
                let local = cache.local_len();
                println!("token {token}: out sums to {sum:.5}, {local} rows here, {bytes} bytes");
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    each_rank(ring(4), |_, transport| rank(transport)).map(drop)
}
