//! Compute rates: passes of one rank without messages, while all ranks compute.

use std::{
    array::from_fn,
    time::{Duration, Instant},
};

use annulus::{Attention, Plan, Tensors};
use annulus_comm::threads::ring;
use annulus_core::{Dims, Element, Error, Result};
use annulus_plan::ComputeRate;
use ndarray::Array4;

use super::median;
use crate::{
    backend::BackendChoice,
    failure::Outcome,
    job::{Job, RankEndpoint},
    make::RandomStream,
};

/// Query and KV heads.
const HEADS: usize = 4;
/// Queries and keys: the least is doubled until a forward pass takes [`LEAST_TIME`].
const LEAST_LEN: usize = 512;
const MOST_LEN: usize = 8192;
/// Time of a forward pass beside which its prologue and epilogue are short.
const LEAST_TIME: Duration = Duration::from_millis(20);
/// Time after which no further round starts, so that all ranks compute for as long.
const BUDGET: Duration = Duration::from_millis(2500);
const LEAST_ROUNDS: usize = 3;
/// Least seconds of a batch of rounds, of which the mean counts. Ranks that share cores change
/// places on them within some 100 ms: most shorter rounds can have a core alone, and few wait for
/// all the others.
const BATCH: f64 = 0.25;

/// Measures the rates of an element type at a head dim: full attention, all heads alike.
///
/// # Ordering
/// Collective over the processes.
pub(super) fn measure<T: Element>(
    job: &mut Job,
    backend: &BackendChoice,
    threads: usize,
    head_dim: usize,
) -> Outcome<ComputeRate> {
    let own_ranks = job.ranks() / job.processes();
    let own = job.run_local_phase(0..own_ranks, |_, _| {
        rates_of_rank::<T>(head_dim, |attention, dims| {
            let alone = ring(1).pop().ok_or_else(|| Error::internal("a ring has no rank"))?;
            backend.plan(threads, RankEndpoint::Thread(Box::new(alone)), &attention.into(), dims)
        })
    })?;
    let [forward, backward] = mean_of_ranks(job, &own)?;
    Ok(ComputeRate { dtype: T::DTYPE, head_dim, forward, backward })
}

/// Returns the means over all ranks of the figures of the ranks of this process. Of ranks that
/// share cores some can have a core alone and others a third of one, but all together have these
/// cores.
///
/// # Ordering
/// Collective over the processes, which have as many ranks each.
fn mean_of_ranks(job: &mut Job, own: &[[f64; 2]]) -> Outcome<[f64; 2]> {
    fn mean(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = numbers.len().max(1) as f64;
        numbers.sum::<f64>() / count
    }
    let own: [f64; 2] = from_fn(|figure| mean(own.iter().map(|of_rank| of_rank[figure])));
    let all = job.all_gather_values(&own)?;
    Ok(from_fn(|figure| mean(all.iter().map(|of_process| of_process[figure]))))
}

/// Returns the seconds of each part of a round, of rounds one after another for [`BUDGET`].
fn seconds_of(mut round: impl FnMut() -> Result<[Duration; 2]>) -> Result<[f64; 2]> {
    let begin = Instant::now();
    let mut rounds = Vec::new();
    while rounds.len() < LEAST_ROUNDS || begin.elapsed() < BUDGET {
        rounds.push(round()?.map(|time| time.as_secs_f64()));
    }
    Ok(median_of_batches(&rounds))
}

/// Returns for each part of the rounds the median over batches of its mean seconds. A batch has
/// consecutive rounds of at least [`BATCH`]; rounds left over at the end count only if there is no
/// batch.
fn median_of_batches(rounds: &[[f64; 2]]) -> [f64; 2] {
    let mean = |batch: &[[f64; 2]]| -> [f64; 2] {
        from_fn(|part| batch.iter().map(|times| times[part]).sum::<f64>() / batch.len() as f64)
    };
    let mut batches = Vec::new();
    let (mut first, mut seconds) = (0, 0.0);
    for (index, times) in rounds.iter().enumerate() {
        seconds += times.iter().sum::<f64>();
        if seconds >= BATCH {
            batches.push(mean(&rounds[first..=index]));
            (first, seconds) = (index + 1, 0.0);
        }
    }
    if batches.is_empty() {
        batches.push(mean(rounds));
    }
    from_fn(|part| median(batches.iter().map(|means| means[part]).collect()))
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
        let [forward, backward] = seconds_of(|| round(&mut plan, &x))?;
        // 2 products of a forward pass, 5 of a backward pass
        let product = 2.0 * (len * len * HEADS * head_dim) as f64;
        return Ok([2.0 * product / forward, 5.0 * product / backward]);
    }
}

/// Returns normally distributed numbers, shape (1, `len`, `heads`, `head_dim`).
fn tensor<T: Element>(len: usize, heads: usize, head_dim: usize) -> Array4<T> {
    let stream = RandomStream::new(0, "measure");
    Array4::from_shape_fn((1, len, heads, head_dim), |(_, row, head, column)| {
        T::from_f64(stream.normal(((row * heads + head) * head_dim + column) as u64))
    })
}

/// Returns the times of a forward and a backward pass.
fn round<T: Element>(plan: &mut Plan, x: &Array4<T>) -> Result<[Duration; 2]> {
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
    fn rounds_of_ranks_in_turns_count_with_their_waits() {
        // a rank with half of a core: 9 rounds of 2 + 8 ms, then one that waits for 100 ms more
        let alone = [0.002, 0.008];
        let mut rounds = Vec::new();
        for _ in 0..24 {
            rounds.extend([alone; 9]);
            rounds.push([0.102, 0.008]);
        }
        let [forward, backward] = median_of_batches(&rounds);
        assert!((0.008..0.016).contains(&forward), "{forward}");
        assert!((backward - 0.008).abs() < 1e-12, "{backward}");
        // one stall does not count: it is in one batch of several
        let exact = [1.0 / 512.0, 1.0 / 128.0];
        let mut stalled = vec![exact; 125];
        stalled[60] = [0.5, 0.9];
        assert_eq!(median_of_batches(&stalled), exact);
        // fewer rounds than fill a batch
        assert_eq!(median_of_batches(&[[0.0625, 0.125], [0.0625; 2]]), [0.0625, 0.09375]);
        // rounds left over do not count
        assert_eq!(median_of_batches(&[[0.25; 2], [0.25; 2], [0.25; 2], [0.0; 2]]), [0.25; 2]);
    }
}
