//! Times the kernels of all ranks on the balanced layout of packed documents against contiguous
//! shards of the same rows, none of whose tiles is cut.
//!
//! ```sh
//! cargo run --release -p annulus-bench --features cpu --bin balanced-kernels -- \
//!     rows=16384 ranks=64 heads=2 d=64 rounds=5 seed=7 draws=1 mask=causal
//! ```
//! One JSON line for each of four distributions of lengths. Ranks are threads of this process with
//! one compute thread each, and f32 passes go forward and backward. Both layouts have the same
//! visible pairs, take the direct route and take turns. A time is the CPU time in calls of kernels,
//! without messages and without the ring's ticks: `kernels_ms` of all ranks on the balanced layout,
//! `contiguous_ms` on contiguous shards, medians over rounds. `rate` is the median of contiguous ÷
//! balanced: the share of their speed that kernels keep. `slowest_over_mean` and
//! `contiguous_slowest_over_mean` are the time of the slowest rank over the mean, and `tiles` the
//! tiles of 64 × 64 with a visible pair over those of contiguous shards, as `balanced` counts them.

mod distributions;
mod tiles;
mod wrapped_tiles;

use std::{
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use annulus::{
    Attention, Backward, Batch, Cpu, Dims, Error, Forward, Layout, Plan, Result, Route, Tensors,
    comm::threads::{each_rank, ring},
};
use annulus_core::Tick;
use distributions::{distributions, packed};
use ndarray::Array4;
use rustix::time::{ClockId, clock_gettime};
use tiles::Tiles;
use wrapped_tiles::{TileCalls, WrappedTiles};

/// Largest difference of the sums of all lse, relative to their magnitude.
const TOLERANCE: f64 = 1e-4;

/// Arguments of the program.
#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    ranks: usize,
    heads: usize,
    dim: usize,
    rounds: usize,
    causal: bool,
}

fn main() -> Result<()> {
    let mut case = Case { rows: 16_384, ranks: 64, heads: 2, dim: 64, rounds: 5, causal: true };
    let [mut seed, mut draws] = [7, 1];
    for given in std::env::args().skip(1) {
        let parsed = match given.split_once('=') {
            Some(("mask", mask @ ("causal" | "full"))) => {
                case.causal = mask == "causal";
                Some(())
            }
            Some((name, number)) => {
                number.parse().ok().filter(|&number| number > 0).and_then(|number: usize| {
                    match name {
                        "rows" => case.rows = number,
                        "ranks" => case.ranks = number,
                        "heads" => case.heads = number,
                        "d" => case.dim = number,
                        "rounds" => case.rounds = number,
                        "seed" => seed = number as u64,
                        "draws" => draws = number as u64,
                        _ => return None,
                    }
                    Some(())
                })
            }
            None => None,
        };
        let want = "rows, ranks, heads, d, rounds, seed or draws = a positive number, \
                    mask = causal or full";
        parsed.ok_or_else(|| Error::invalid("argument", given, want))?;
    }
    for seed in seed..seed + draws {
        for (name, lens) in distributions(case.rows, seed) {
            case.measure(name, seed, &lens)?;
        }
    }
    Ok(())
}

impl Case {
    fn measure(&self, name: &str, seed: u64, lens: &[usize]) -> Result<()> {
        let dims = Dims::new(1, self.rows, self.heads, self.dim);
        let batch = packed(lens);
        let plain = Attention::new().causal(self.causal);
        let balanced = plain.clone().balanced(dims, &batch, self.ranks)?;
        let spec = plain.spec(dims)?;
        let layouts = [Layout::balanced(&spec, &batch, self.ranks)?, Layout::Contiguous];
        let counted =
            layouts.map(|layout| Tiles::new(lens, &layout, self.ranks).count(self.causal));
        let contiguous = plain.layout(Layout::Contiguous);
        let mut all = Vec::new();
        for attention in [balanced, contiguous] {
            all.push(Ranks::new(&attention.route(Route::Direct), dims, &batch, self.ranks)?);
        }
        let mut rates = Vec::new();
        let [mut sums, mut slowest] = [const { [Vec::new(), Vec::new()] }; 2];
        for round in 0..=self.rounds {
            let mut of_round = [0.0; 2];
            for (which, ranks) in all.iter_mut().enumerate() {
                let times = ranks.run()?;
                of_round[which] = times.iter().sum();
                // the first round touches all memory for the first time
                if round > 0 {
                    sums[which].push(of_round[which]);
                    let most = times.iter().copied().fold(0.0, f64::max);
                    slowest[which].push(most * times.len() as f64 / of_round[which]);
                }
            }
            if round > 0 {
                rates.push(of_round[1] / of_round[0]);
            }
        }
        let [of_balanced, of_contiguous] = [all[0].lse(), all[1].lse()];
        if (of_balanced - of_contiguous).abs() > TOLERANCE * of_contiguous.abs() {
            let what = format!("lse of both layouts: {of_balanced} and {of_contiguous}");
            return Err(Error::internal(what));
        }
        let [sum, sum_contiguous] = sums.map(median);
        let [most, most_contiguous] = slowest.map(median);
        println!(
            "{{\"documents\":\"{name}\",\"seed\":{seed},\"count\":{},\"rows\":{},\"ranks\":{},\
             \"heads\":{},\"head_dim\":{},\"causal\":{},\"kernels_ms\":{sum:.3},\
             \"contiguous_ms\":{sum_contiguous:.3},\"rate\":{:.4},\"tiles\":{:.4},\
             \"slowest_over_mean\":{most:.4},\
             \"contiguous_slowest_over_mean\":{most_contiguous:.4}}}",
            lens.len(),
            self.rows,
            self.ranks,
            self.heads,
            self.dim,
            self.causal,
            median(rates),
            counted[0] as f64 / counted[1] as f64,
        );
        Ok(())
    }
}

/// The ranks of a ring.
struct Ranks(Vec<Rank>);

/// A rank with its tensors.
struct Rank {
    plan: Plan,
    clock: KernelClock,
    /// q, k, v, dout.
    inputs: [Array4<f32>; 4],
    /// Results of the first round, which later ones overwrite.
    results: Option<(Forward<f32>, Backward<f32>)>,
}

impl Ranks {
    fn new(attention: &Attention, dims: Dims, batch: &Batch, ranks: usize) -> Result<Self> {
        let all = each_rank(ring(ranks), |_, transport| {
            let clock = KernelClock::default();
            let backend = WrappedTiles { inner: Cpu::new(1)?, calls: clock.clone() };
            let mut plan = Plan::new(attention, dims, backend, transport)?;
            plan.update(batch)?;
            let rows: Vec<i64> = plan.q_rows().iter().collect();
            let inputs = [0, 1, 2, 3].map(|seed| tensor(&rows, dims, seed));
            Ok(Rank { plan, clock, inputs, results: None })
        });
        Ok(Self(all?))
    }

    /// Runs a forward and a backward pass. Returns the milliseconds of each rank's kernels.
    fn run(&mut self) -> Result<Vec<f64>> {
        each_rank(&mut self.0, |_, rank| {
            rank.run()?;
            Ok(rank.clock.0.swap(0, Ordering::Relaxed) as f64 * 1e-6)
        })
    }

    /// Returns the sum of all lse.
    fn lse(&self) -> f64 {
        let results = self.0.iter().filter_map(|rank| rank.results.as_ref());
        results.flat_map(|(forward, _)| &forward.lse).map(|&lse| f64::from(lse)).sum()
    }
}

impl Rank {
    fn run(&mut self) -> Result<()> {
        let Self { plan, inputs: [q, k, v, dout], results, .. } = self;
        let tensors = Tensors::new(q.view(), k.view(), v.view());
        match results {
            Some((forward, backward)) => {
                plan.forward_into(&tensors, forward.view_mut())?;
                let into = backward.view_mut();
                plan.backward_into(&tensors, &forward.view(), dout.view(), None, into)?;
            }
            none => {
                let forward = plan.forward(&tensors)?;
                let backward = plan.backward(&tensors, &forward, dout.view(), None)?;
                *none = Some((forward, backward));
            }
        }
        Ok(())
    }
}

/// Nanoseconds of CPU time in the tiles of a rank.
#[derive(Debug, Clone, Default)]
struct KernelClock(Arc<AtomicU64>);

impl TileCalls for KernelClock {
    fn run(
        &self,
        _keys: usize,
        _products: f64,
        tick: Tick<'_>,
        work: impl FnOnce(Tick<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut of_ticks = 0;
        let start = thread_nanoseconds();
        let done = work(&mut || {
            let start = thread_nanoseconds();
            let flow: ControlFlow<()> = tick();
            of_ticks += thread_nanoseconds() - start;
            flow
        });
        let taken = thread_nanoseconds() - start - of_ticks;
        self.0.fetch_add(taken, Ordering::Relaxed);
        done
    }
}

/// Returns the CPU time of the calling thread: a backend of one thread computes on it.
fn thread_nanoseconds() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Returns rows of a tensor, which have the same numbers on any rank.
fn tensor(rows: &[i64], dims: Dims, seed: usize) -> Array4<f32> {
    let shape = (1, rows.len(), dims.q_heads, dims.head_dim);
    Array4::from_shape_fn(shape, |(_, i, h, c)| {
        let row = rows[i].unsigned_abs() as usize;
        let hash = (row * 7 + h * 131 + c * 29 + seed * 1009).wrapping_mul(0x9e37_79b9);
        (hash >> 8 & 0xffff) as f32 / 16_384.0 - 2.0
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
