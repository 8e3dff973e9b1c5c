//! Compute rates: passes of one rank and tokens of its KV cache without messages, while all ranks
//! compute.

use std::time::{Duration, Instant};

use annulus::{Attention, CacheShape, Plan, Tensors};
use annulus_comm::{heads_ring, threads::ring};
use annulus_core::{ComputeRate, Dims, Element, Error, Result, TokenRate};
use ndarray::Array4;

use super::median;
use crate::{
    backend::BackendChoice,
    failure::Outcome,
    job::{Endpoint, Job},
    random::Stream,
};

/// Query and KV heads.
pub(super) const HEADS: usize = 4;
/// Queries and keys: the least is doubled until a forward pass takes [`LEAST_TIME`].
const LEAST_LEN: usize = 512;
const MOST_LEN: usize = 8192;
/// Time of a forward pass beside which its prologue and epilogue are short.
const LEAST_TIME: Duration = Duration::from_millis(20);
/// Time after which no further round starts. Ranks that share cores change places on them within
/// some 100 ms.
const BUDGET: Duration = Duration::from_secs(1);
const LEAST_ROUNDS: usize = 3;
const MOST_ROUNDS: usize = 31;
/// Bytes of cached keys and values that are appended at once, and their number: 64 MiB, which no
/// processor cache of a rank holds.
const CHUNK_BYTES: usize = 4 << 20;
const CHUNKS: usize = 16;
/// Query heads of a KV head with which the rate of further heads is measured: as many as models
/// have.
const GROUP: usize = 8;

/// Measures the rates of an element type at a head dim: full attention, all heads alike, and a
/// token of a KV cache.
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// Those of the ranks.
pub(super) fn measure<T: Element>(
    job: &mut Job,
    backend: &BackendChoice,
    threads: usize,
    head_dim: usize,
) -> Outcome<ComputeRate> {
    let own_ranks = if job.is_mpi() { 1 } else { job.ranks() };
    let own = job.run_local_phase(0..own_ranks, |_, _| {
        rates_of_rank::<T>(head_dim, |attention, dims| {
            let alone = ring(1).pop().ok_or_else(|| Error::internal("a ring has no rank"))?;
            backend.plan(threads, Endpoint::Thread(Box::new(alone)), attention, dims)
        })
    })?;
    let own = [0, 1].map(|pass| median(own.iter().map(|rates| rates[pass]).collect()));
    let all = job.all_gather_numbers(&own)?;
    let [forward, backward] =
        [0, 1].map(|pass| median(all.iter().map(|rates| rates[pass]).collect()));
    let token = Some(token::<T>(job, backend, threads, head_dim)?);
    Ok(ComputeRate { dtype: T::DTYPE, head_dim, forward, backward, token })
}

/// Measures the rate at which partial results are merged: the least of the head dims, while all
/// ranks merge.
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// Those of the ranks.
pub(super) fn merge_bandwidth(job: &mut Job, head_dims: &[usize]) -> Outcome<f64> {
    let own_ranks = if job.is_mpi() { 1 } else { job.ranks() };
    let own = job.run_local_phase(0..own_ranks, |_, _| {
        let mut rates = head_dims.iter().map(|&head_dim| heads_ring::merge_bandwidth(head_dim));
        rates.try_fold(f64::INFINITY, |least, rate| Ok(least.min(rate?)))
    })?;
    let all = job.all_gather_numbers(&[median(own)])?;
    Ok(median(all.iter().map(|rates| rates[0]).collect()))
}

/// Measures a token of a KV cache of one rank that no processor cache holds, while all ranks read
/// theirs: with one query head of each KV head, and with [`GROUP`].
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// Those of the ranks.
fn token<T: Element>(
    job: &mut Job,
    backend: &BackendChoice,
    threads: usize,
    head_dim: usize,
) -> Outcome<TokenRate> {
    let own_ranks = if job.is_mpi() { 1 } else { job.ranks() };
    let row_bytes = 2 * HEADS * head_dim * size_of::<T>();
    let rows = (CHUNK_BYTES / row_bytes).max(1);
    let own = job.run_local_phase(0..own_ranks, |_, _| {
        let chunk = tensor::<T>(rows, HEADS, head_dim);
        let cache = |heads: usize| {
            let alone = ring(1).pop().ok_or_else(|| Error::internal("a ring has no rank"))?;
            let endpoint = Endpoint::Thread(Box::new(alone));
            let shape = CacheShape::new(1, heads, head_dim).kv_heads(HEADS);
            let attention = Attention::new().dtype(T::DTYPE);
            let mut cache = backend.cache(threads, endpoint, &attention, shape)?;
            for _ in 0..CHUNKS {
                cache.append(chunk.view(), chunk.view())?;
            }
            Ok((cache, tensor::<T>(1, heads, head_dim)))
        };
        let mut caches = [cache(HEADS)?, cache(HEADS * GROUP)?];
        let mut times = [vec![], vec![]];
        let mut begin = Instant::now();
        // each cache in turn, so that neither is in a processor cache; the first round warms up
        for round in 0..=MOST_ROUNDS {
            if round > LEAST_ROUNDS && begin.elapsed() >= BUDGET {
                break;
            }
            for ((cache, token), times) in caches.iter_mut().zip(&mut times) {
                let start = Instant::now();
                cache.attend(token.view(), None)?;
                times.push(start.elapsed().as_secs_f64());
            }
            if round == 0 {
                times.iter_mut().for_each(Vec::clear);
                begin = Instant::now();
            }
        }
        Ok(times.map(median))
    })?;
    let own = [0, 1].map(|group| median(own.iter().map(|times| times[group]).collect()));
    let all = job.all_gather_numbers(&own)?;
    let seconds = [0, 1].map(|group| median(all.iter().map(|times| times[group]).collect()));
    Ok(token_rate(CHUNKS * rows, head_dim, row_bytes, seconds))
}

/// Returns the rates of a token over `rows` rows of `row_bytes` bytes that takes these seconds with
/// one query head of each KV head, and with [`GROUP`].
fn token_rate(rows: usize, head_dim: usize, row_bytes: usize, seconds: [f64; 2]) -> TokenRate {
    let [one, all] = seconds;
    let flops = 4.0 * (rows * HEADS * (GROUP - 1) * head_dim) as f64;
    // further heads that take no measurable time
    let further = (all - one).max(one / 100.0);
    TokenRate { bandwidth: (rows * row_bytes) as f64 / one, further_heads: flops / further }
}

/// Returns the FLOP/s of a forward and of a backward pass.
fn rates_of_rank<T: Element>(
    head_dim: usize,
    plan: impl Fn(&Attention, Dims) -> Result<Plan>,
) -> Result<[f64; 2]> {
    let mut len = LEAST_LEN;
    loop {
        let dims = Dims::new(1, len, HEADS, head_dim);
        let mut plan = plan(&Attention::new().dtype(T::DTYPE), dims)?;
        let x = tensor::<T>(len, HEADS, head_dim);
        round(&mut plan, &x)?;
        let [forward, _] = round(&mut plan, &x)?;
        if forward < LEAST_TIME && len < MOST_LEN {
            len *= 2;
            continue;
        }
        let begin = Instant::now();
        let mut rounds = Vec::new();
        while rounds.len() < LEAST_ROUNDS
            || (begin.elapsed() < BUDGET && rounds.len() < MOST_ROUNDS)
        {
            rounds.push(round(&mut plan, &x)?);
        }
        // 2 products of a forward pass, 5 of a backward pass
        let product = 2.0 * (len * len * HEADS * head_dim) as f64;
        let seconds =
            |pass: usize| median(rounds.iter().map(|times| times[pass].as_secs_f64()).collect());
        return Ok([2.0 * product / seconds(0), 5.0 * product / seconds(1)]);
    }
}

/// Returns normally distributed numbers, shape (1, `len`, `heads`, `head_dim`).
pub(super) fn tensor<T: Element>(len: usize, heads: usize, head_dim: usize) -> Array4<T> {
    let stream = Stream::new(0, "measure");
    Array4::from_shape_fn((1, len, heads, head_dim), |(_, row, head, column)| {
        T::from_f64(stream.normal(((row * heads + head) * head_dim + column) as u64))
    })
}

/// Returns the times of a forward and a backward pass.
pub(super) fn round<T: Element>(plan: &mut Plan, x: &Array4<T>) -> Result<[Duration; 2]> {
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let begin = Instant::now();
    let forward = plan.forward::<T>(&tensors)?;
    let forward_time = begin.elapsed();
    let begin = Instant::now();
    plan.backward(&tensors, &forward, x.view(), None)?;
    Ok([forward_time, begin.elapsed()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_heads_take_the_rest_of_the_time() {
        // 10 rows of 4 KV heads of dim 2: 7 further heads have 4 · 2 FLOPs for each
        let rate = token_rate(10, 2, 64, [0.5, 0.75]);
        assert_eq!(rate, TokenRate { bandwidth: 1280.0, further_heads: 2240.0 / 0.25 });
        // no time that could be measured
        assert_eq!(token_rate(10, 2, 64, [0.5, 0.4]).further_heads, 2240.0 / 0.005);
    }
}
