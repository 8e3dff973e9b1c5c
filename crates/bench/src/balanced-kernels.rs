//! Times the kernels of all ranks on the balanced layout of packed documents against contiguous
//! shards of the same rows, none of whose tiles is cut.
//!
//! ```sh
//! cargo run --release -p annulus-bench --features cpu --bin balanced-kernels -- \
//!     rows=16384 ranks=64 heads=2 d=64 rounds=5 seed=7 draws=1 mask=causal \
//!     blocks=received
//! ```
//! One JSON line for each of four distributions of lengths. Ranks are threads of this process with
//! one compute thread each; f32 passes go forward and backward in the ring once, by the direct
//! route. Then the calls of each rank's kernels are run again, one rank after the other on one
//! thread (`replay.rs`), both layouts in turn. Both have the same visible pairs. A time is the CPU
//! time in these calls: `kernels_ms` of all ranks on the balanced layout, `contiguous_ms` on
//! contiguous shards, medians over rounds. `rate` is the median of contiguous ÷ balanced: the share
//! of their speed that kernels keep. `slowest_over_mean` and `contiguous_slowest_over_mean` are the
//! time of the slowest rank over the mean, and `tiles` the tiles of 64 × 64 with a visible pair
//! over those of contiguous shards, as `balanced` counts them. `tiles_per_call` and
//! `contiguous_tiles_per_call` are the tiles of a head in a call. With `blocks=cached` each block
//! is read before its call, without being timed: the rest of the loss does not come from memory.

mod distributions;
mod replay;
mod tiles;
mod wrapped_tiles;

use annulus::{
    Attention, Batch, Cpu, Dims, Error, Layout, Plan, Result, Route, Tensors,
    comm::threads::{each_rank, ring},
};
use distributions::{distributions, packed};
use ndarray::Array4;
use replay::{CallLog, Replay};
use tiles::Tiles;
use wrapped_tiles::WrappedTiles;

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
    /// True if the blocks of a call are read before it.
    cached: bool,
}

fn main() -> Result<()> {
    let mut case =
        Case { rows: 16_384, ranks: 64, heads: 2, dim: 64, rounds: 5, causal: true, cached: false };
    let [mut seed, mut draws] = [7, 1];
    for given in std::env::args().skip(1) {
        let parsed = match given.split_once('=') {
            Some(("mask", mask @ ("causal" | "full"))) => {
                case.causal = mask == "causal";
                Some(())
            }
            Some(("blocks", blocks @ ("received" | "cached"))) => {
                case.cached = blocks == "cached";
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
                    mask = causal or full, blocks = received or cached";
        parsed.ok_or_else(|| Error::invalid("argument", given, want))?;
    }
    for seed in seed..seed + draws {
        for (name, lens) in distributions(case.rows, seed, None) {
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
        let mut all = all.into_iter().map(Ranks::replays).collect::<Result<Vec<_>>>()?;
        let times = self.time(&mut all)?;
        let [of_balanced, of_contiguous] =
            [0, 1].map(|which| all[which].iter().map(Replay::sum_of_lse).sum::<f64>());
        if (of_balanced - of_contiguous).abs() > TOLERANCE * of_contiguous.abs() {
            let what = format!("lse of both layouts: {of_balanced} and {of_contiguous}");
            return Err(Error::internal(what));
        }
        // each pass computes all tiles
        let per_call = [0, 1].map(|which| {
            let calls = all[which].iter().map(Replay::calls).sum::<usize>();
            2.0 * counted[which] as f64 / calls as f64
        });
        let [sum, sum_contiguous] = times.sums.map(median);
        let [most, most_contiguous] = times.slowest.map(median);
        println!(
            "{{\"documents\":\"{name}\",\"seed\":{seed},\"count\":{},\"rows\":{},\"ranks\":{},\
             \"heads\":{},\"head_dim\":{},\"causal\":{},\"kernels_ms\":{sum:.3},\
             \"contiguous_ms\":{sum_contiguous:.3},\"rate\":{:.4},\"tiles\":{:.4},\
             \"tiles_per_call\":{:.2},\"contiguous_tiles_per_call\":{:.2},\
             \"slowest_over_mean\":{most:.4},\
             \"contiguous_slowest_over_mean\":{most_contiguous:.4}}}",
            lens.len(),
            self.rows,
            self.ranks,
            self.heads,
            self.dim,
            self.causal,
            median(times.rates),
            counted[0] as f64 / counted[1] as f64,
            per_call[0],
            per_call[1],
        );
        Ok(())
    }

    /// Runs the calls of all ranks, of both layouts in turn.
    fn time(&self, all: &mut [Vec<Replay>]) -> Result<Times> {
        let mut times = Times::default();
        for round in 0..=self.rounds {
            let mut of_round = [0.0; 2];
            for (which, ranks) in all.iter_mut().enumerate() {
                let of_ranks = ranks.iter_mut().map(|rank| rank.run(self.cached));
                let of_ranks = of_ranks.collect::<Result<Vec<_>>>()?;
                of_round[which] = of_ranks.iter().sum();
                // the first round touches all memory for the first time
                if round > 0 {
                    times.sums[which].push(of_round[which]);
                    let most = of_ranks.iter().copied().fold(0.0, f64::max);
                    times.slowest[which].push(most * of_ranks.len() as f64 / of_round[which]);
                }
            }
            if round > 0 {
                times.rates.push(of_round[1] / of_round[0]);
            }
        }
        Ok(times)
    }
}

/// Times of the rounds, of the balanced layout and of contiguous shards.
#[derive(Default)]
struct Times {
    /// Milliseconds of all ranks.
    sums: [Vec<f64>; 2],
    /// Time of the slowest rank over the mean.
    slowest: [Vec<f64>; 2],
    /// Contiguous ÷ balanced.
    rates: Vec<f64>,
}

/// The ranks of a ring.
struct Ranks(Vec<Rank>);

/// A rank with its tensors: q, k, v, dout.
struct Rank {
    plan: Plan,
    log: CallLog,
    inputs: [Array4<f32>; 4],
}

impl Ranks {
    fn new(attention: &Attention, dims: Dims, batch: &Batch, ranks: usize) -> Result<Self> {
        let all = each_rank(ring(ranks), |_, transport| {
            let log = CallLog::default();
            let backend = WrappedTiles { inner: Cpu::new(1)?, calls: log.clone() };
            let mut plan = Plan::new(attention, dims, backend, transport)?;
            plan.update(batch)?;
            let rows: Vec<i64> = plan.q_rows().iter().collect();
            let inputs = [0, 1, 2, 3].map(|seed| tensor(&rows, dims, seed));
            Ok(Rank { plan, log, inputs })
        });
        Ok(Self(all?))
    }

    /// Runs a forward and a backward pass in the ring. Returns the calls of each rank.
    fn replays(mut self) -> Result<Vec<Replay>> {
        each_rank(&mut self.0, |_, rank| {
            let [q, k, v, dout] = &rank.inputs;
            let tensors = Tensors::new(q.view(), k.view(), v.view());
            let forward = rank.plan.forward(&tensors)?;
            let backward = rank.plan.backward(&tensors, &forward, dout.view(), None)?;
            Replay::new(&rank.log, rank.inputs.clone(), forward, &backward)
        })
    }
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
