//! Times packed documents on several ranks, with the balanced layout, against the same documents
//! one by one: on as many ranks (the same useful operations, without packing), and each on one rank
//! (without communication too).
//!
//! ```sh
//! cargo run --release -p annulus-bench --features cpu --bin ring-documents -- \
//!     rows=8192 ranks=2 d=64 heads=8 rounds=7 seed=7
//! ```
//! One JSON line for each of four distributions of lengths. All compute causal attention, forward
//! and backward, in f32; ranks are threads of this process with one compute thread each. Plans and
//! outputs are made beforehand, and the three take turns in one process. Times are CPU
//! milliseconds, summed over ranks, medians over all rounds. `of_sharded` and `of_alone` are the
//! medians of one by one ÷ packed, on as many ranks and on one: the rate of packed passes relative
//! to that of documents one by one. Outputs and gradients of packed passes are compared with those
//! of documents alone.

use annulus::{
    Attention, Backward, Dims, Division, Error, Forward, Plan, Result, Tensors,
    comm::threads::{each_rank, ring},
};
use annulus_bench::{
    Parameters, cpu_seconds,
    distributions::{distributions, packed},
    median,
};
use annulus_core::index;
use ndarray::{Array4, Axis};

/// Largest difference of an element of both, for inputs within ±2.
const TOLERANCE: f32 = 1e-3;

/// Arguments of the program.
#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    ranks: usize,
    heads: usize,
    dim: usize,
    rounds: usize,
}

fn main() -> Result<()> {
    let names = ["rows", "ranks", "heads", "d", "rounds", "seed"];
    let given = Parameters::parse(std::env::args().skip(1), &names)?;
    let case = Case {
        rows: given.count("rows", 8192)?,
        ranks: given.count("ranks", 2)?,
        heads: given.count("heads", 8)?,
        dim: given.count("d", 64)?,
        rounds: given.count("rounds", 7)?,
    };
    let seed = given.number("seed", 7)?;
    for (name, lens) in distributions(case.rows, seed, None) {
        case.measure(name, &lens)?;
    }
    Ok(())
}

impl Case {
    fn measure(&self, name: &str, lens: &[usize]) -> Result<()> {
        let Self { rows, ranks, heads, dim, rounds } = *self;
        let inputs = [0, 1, 2, 3].map(|seed| tensor(rows, heads, dim, seed));
        let mut packed = self.packed(&inputs, lens)?;
        let mut sharded = self.one_by_one(ranks, &inputs, lens)?;
        let mut alone = self.one_by_one(1, &inputs, lens)?;
        let mut times = [vec![], vec![], vec![], vec![], vec![]];
        for round in 0..=rounds {
            let start = now();
            each_rank(&mut packed, |_, rank| rank.run())?;
            let of_packed = now() - start;
            let one_by_one = |plans: &mut Vec<Vec<Passes>>| {
                let start = now();
                each_rank(plans, |_, documents| documents.iter_mut().try_for_each(Passes::run))?;
                Ok(now() - start)
            };
            let [of_sharded, of_alone] = [one_by_one(&mut sharded)?, one_by_one(&mut alone)?];
            // the first round touches all memory for the first time
            if round > 0 {
                let figures =
                    [of_packed, of_sharded, of_alone, of_sharded / of_packed, of_alone / of_packed];
                times.iter_mut().zip(figures).for_each(|(times, figure)| times.push(figure));
            }
        }
        let difference = difference(&packed, &alone[0])?;
        if difference > TOLERANCE {
            let what = format!("packed documents differ by {difference} from documents alone");
            return Err(Error::internal(what));
        }
        let [of_packed, of_sharded, of_alone, ratio, ratio_alone] = times.map(median);
        println!(
            "{{\"documents\":\"{name}\",\"count\":{},\"rows\":{rows},\"ranks\":{ranks},\
             \"heads\":{heads},\"head_dim\":{dim},\"packed_cpu_ms\":{of_packed:.3},\
             \"sharded_cpu_ms\":{of_sharded:.3},\"alone_cpu_ms\":{of_alone:.3},\
             \"of_sharded\":{ratio:.4},\"of_alone\":{ratio_alone:.4}}}",
            lens.len()
        );
        Ok(())
    }

    fn dims(&self, rows: usize) -> Dims {
        Dims::new(1, rows, self.heads, self.dim)
    }

    /// Makes one plan on all ranks.
    fn packed(&self, inputs: &[Array4<f32>; 4], lens: &[usize]) -> Result<Vec<Passes>> {
        let batch = packed(lens);
        let dims = self.dims(self.rows);
        let attention = Attention::new().causal(true);
        let division = Division::new().balanced(&attention, dims, &batch, self.ranks)?;
        each_rank(ring(self.ranks), |_, transport| {
            let mut plan = Plan::new((&attention, &division), dims, transport)?;
            plan.update(&batch)?;
            let rows: Vec<usize> =
                plan.q_rows().iter().map(|row| index(row.unsigned_abs())).collect();
            Ok(Passes::new(plan, rows, inputs))
        })
    }

    /// Makes a plan for each document on `ranks` ranks. Returns those of each rank.
    fn one_by_one(
        &self,
        ranks: usize,
        inputs: &[Array4<f32>; 4],
        lens: &[usize],
    ) -> Result<Vec<Vec<Passes>>> {
        let attention = Attention::new().causal(true);
        let mut all: Vec<Vec<Passes>> = (0..ranks).map(|_| Vec::new()).collect();
        let mut first = 0;
        for &len in lens {
            let of_ranks = each_rank(ring(ranks), |_, transport| {
                let plan = Plan::new(&attention, self.dims(len), transport)?;
                let rows = plan.q_rows().iter().map(|row| first + index(row.unsigned_abs()));
                let rows = rows.collect();
                Ok(Passes::new(plan, rows, inputs))
            })?;
            all.iter_mut().zip(of_ranks).for_each(|(of_rank, passes)| of_rank.push(passes));
            first += len;
        }
        Ok(all)
    }
}

/// A plan with its tensors.
struct Passes {
    plan: Plan,
    /// Numbers of its rows.
    rows: Vec<usize>,
    /// q, k, v, dout.
    inputs: [Array4<f32>; 4],
    /// Results of the first round, which later ones overwrite.
    results: Option<(Forward<f32>, Backward<f32>)>,
}

impl Passes {
    fn new(plan: Plan, rows: Vec<usize>, inputs: &[Array4<f32>; 4]) -> Self {
        let inputs = inputs.each_ref().map(|tensor| tensor.select(Axis(1), &rows));
        Self { plan, rows, inputs, results: None }
    }

    /// Runs a forward and a backward pass.
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

/// Returns the largest difference of an output or gradient. Rows of `alone` are in order.
fn difference(packed: &[Passes], alone: &[Passes]) -> Result<f32> {
    let none = || Error::internal("passes without results");
    let mut most = 0.0f32;
    for part in packed {
        let (forward, backward) = part.results.as_ref().ok_or_else(none)?;
        for (local, &row) in part.rows.iter().enumerate() {
            let document = alone.partition_point(|of| of.rows.last().is_some_and(|&l| l < row));
            let document = alone.get(document).ok_or_else(none)?;
            let (of_forward, of_backward) = document.results.as_ref().ok_or_else(none)?;
            let first = document.rows.first().copied().ok_or_else(none)?;
            for (ours, theirs) in [
                (&forward.out, &of_forward.out),
                (&backward.dq, &of_backward.dq),
                (&backward.dk, &of_backward.dk),
                (&backward.dv, &of_backward.dv),
            ] {
                let ours = ours.index_axis(Axis(1), local);
                let theirs = theirs.index_axis(Axis(1), row - first);
                for (a, b) in ours.iter().zip(&theirs) {
                    // f32::max would ignore NaN
                    most = if (a - b).abs() <= most { most } else { (a - b).abs() };
                }
            }
        }
    }
    Ok(most)
}

fn tensor(rows: usize, heads: usize, dim: usize, seed: usize) -> Array4<f32> {
    Array4::from_shape_fn((1, rows, heads, dim), |(_, i, h, c)| {
        let hash = (i * 7 + h * 131 + c * 29 + seed * 1009).wrapping_mul(0x9e37_79b9);
        (hash >> 8 & 0xffff) as f32 / 16_384.0 - 2.0
    })
}

/// Returns the CPU time of all threads, in milliseconds.
fn now() -> f64 {
    cpu_seconds() * 1e3
}
