//! One case of a benchmark: creates its tensors and its ring, measures it, and prints its line.

use std::time::{Duration, Instant};

use annulus::{Attention, Backward, Division, Forward, Plan, Runtime, Setup, Tensors};
use annulus_core::{Batch, DType, Dims, Element, Result, Runs, index};
use annulus_plan::{Machine, Strategy};
use clap::{ValueEnum, builder::PossibleValue};
use ndarray::Array4;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::{
    arguments::{names, values::WindowSides},
    backend::BackendChoice,
    bench::{BenchFlags, MeasuredPasses},
    failure::Outcome,
    job::{DEFAULT_DEADLINE, Job},
    make::RandomStream,
    memory, pairs, say,
};

/// Shape and mask of one case.
#[derive(Debug)]
pub(super) struct BenchCase<'a> {
    pub(super) flags: &'a BenchFlags,
    pub(super) dims: Dims,
    pub(super) dtype: DType,
    pub(super) causal: bool,
    /// Machine by which a strategy is chosen.
    pub(super) machine: Option<&'a Machine>,
    /// Packed documents as cumulative lengths.
    pub(super) batch: &'a Batch,
}

/// Plan of one rank with its tensors.
struct BenchRank<T: Element> {
    plan: Plan,
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    dout: Array4<T>,
    /// Results of the warm-up round, which later rounds overwrite. The operating system clears new
    /// pages, and that is not the work of a pass.
    forward: Option<Forward<T>>,
    gradients: Option<Backward<T>>,
}

/// Measurement of one case, as its line has it.
#[derive(Debug)]
struct Measured<'a> {
    least: Least,
    backend: &'a str,
    clock: &'a Clock,
    ranks: usize,
    layout: &'static str,
    /// Strategy in force, by its published name if it was given or chosen by that.
    strategy: String,
    /// Visible pairs, all heads and batch rows.
    pairs: f64,
}

impl BenchCase<'_> {
    /// Measures the case on a ring of the job's ranks and prints a line for each of `passes`.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(super) fn run<T: Element>(
        &self,
        job: &mut Job,
        passes: &[MeasuredPasses],
        backend: &BackendChoice,
    ) -> Outcome {
        let clock = &Clock::of(backend, job)?;
        let named = |error| names::of_flags(error, &self.flags.names());
        // before the pairs, whose count takes O(sequence length)
        job.agree(self.setup().spec(self.dims).map(drop).map_err(named))?;
        job.agree(names::check_strategy(self.flags.division.strategy, &self.dims, job.ranks()))?;
        let held = memory::Tensors::of(
            &self.dims,
            self.dtype,
            passes.contains(&MeasuredPasses::ForwardBackward),
        );
        job.agree(held.shared_by(job.processes()).must_fit().map_err(named))?;
        let pairs = job.agree(self.pairs().map_err(named))?;
        let batch = || Ok(self.batch.clone());
        let Setup { attention, division, runtime } = self.setup();
        let layout = self.flags.division.layout;
        let placed = layout.apply(division, &attention, self.dims, job.ranks(), batch);
        let division = job.agree(placed.map_err(named))?;
        for &passes in passes {
            let attention = attention.clone().forward_only(passes == MeasuredPasses::Forward);
            let setup = Setup::from((attention, &division, &runtime));
            let endpoints = job.endpoints()?;
            let mut ranks = job.run_phase(endpoints, |_, endpoint| {
                let mut plan = backend.plan(self.flags.threads, endpoint, &setup, self.dims)?;
                if *self.batch != Batch::default() {
                    plan.update(self.batch)?;
                }
                BenchRank::<T>::new(plan, &self.dims)
            })?;
            let least = least(job, |job| match &mut ranks[..] {
                // a single rank needs no thread of its own
                [only] if job.ranks() == 1 => Ok(vec![only.round(passes, clock)?]),
                ranks => job.run_phase(ranks, |_, rank| rank.round(passes, clock)),
            })?;
            let layout = ranks.first().map_or("", |rank| rank.plan.layout().name());
            if let Some(rank) = ranks.first().filter(|_| job.is_leader()) {
                let strategy = rank.plan.named_strategy().to_string();
                let (backend, ranks) = (backend.name(), job.ranks());
                let measured = Measured { least, backend, clock, ranks, layout, strategy, pairs };
                say!("{}", self.line(passes, &measured));
            }
        }
        Ok(())
    }

    fn attention(&self) -> Attention {
        let flags = self.flags;
        let WindowSides { left, right } =
            flags.window.unwrap_or(WindowSides { left: None, right: None });
        let attention = Attention::new().causal(self.causal).sliding_window(left, right);
        let attention = attention.align(flags.align.into()).reproducible(flags.reproducible);
        attention.dtype(self.dtype).precision(flags.precision.into())
    }

    fn setup(&self) -> Setup {
        let flags = &self.flags.division;
        let is_chosen = flags.strategy == Strategy::Auto && !self.flags.documents.is_empty();
        let division = flags
            .set_division(Division::new())
            .strategy(flags.strategy)
            .machine(self.machine.cloned())
            .documents(is_chosen.then(|| self.batch.clone()));
        let runtime = Runtime::new().arrival_deadline(DEFAULT_DEADLINE);
        Setup::from((self.attention(), division, runtime))
    }

    /// Counts the visible pairs, all heads and batch rows; n²/2 for plain causal, as the benchmarks
    /// of other libraries do.
    fn pairs(&self) -> Result<f64> {
        let Dims { batch, q_len, kv_len, q_heads, .. } = self.dims;
        let plain = self.flags.window.is_none() && self.flags.documents.is_empty();
        if plain && (!self.causal || q_len == kv_len) {
            let share = if self.causal { 0.5 } else { 1.0 };
            return Ok(share * q_len as f64 * kv_len as f64 * q_heads as f64 * batch as f64);
        }
        Ok(pairs::visible(&self.attention().spec(self.dims)?, self.batch))
    }

    /// Formats the JSON line.
    fn line(&self, passes: MeasuredPasses, measured: &Measured<'_>) -> String {
        let BenchFlags { threads, window, documents, .. } = self.flags;
        let Measured { least, backend, clock, ranks, layout, strategy, pairs } = measured;
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        // the backward pass has 5 matrix products, the forward pass 2
        let (name, factor) = match passes {
            MeasuredPasses::Forward => ("fwd", 1.0),
            MeasuredPasses::ForwardBackward => ("fwd+bwd", 3.5),
        };
        let flops = factor * 2.0 * pairs * (head_dim + value_dim) as f64;
        let rounded = |number: f64, scale: f64| {
            if number.is_finite() { json!((number * scale).round() / scale) } else { Value::Null }
        };
        let align = self.flags.align.to_possible_value();
        let line = json!({
            "peer": concat!("annulus-", env!("CARGO_PKG_VERSION")),
            "what": name,
            "dtype": self.dtype.name(),
            "threads": threads,
            "batch": batch,
            "heads": q_heads,
            "head_dim": head_dim,
            "n": q_len,
            "causal": self.causal,
            "ms": rounded(least.wall * 1e3, 1e3),
            "gflops": rounded(flops / least.wall / 1e9, 10.0),
            "gflops_cpu": rounded(flops / (least.cpu / (threads * ranks) as f64) / 1e9, 10.0),
            "kv_heads": kv_heads,
            "q_len": q_len,
            "kv_len": kv_len,
            "ranks": ranks,
            "layout": layout,
            "window": window.map(|window| [window.left, window.right]),
            "documents": Some(documents).filter(|documents| !documents.is_empty()),
            "align": align.as_ref().map(PossibleValue::get_name),
            "precision": format!("{:?}", self.flags.precision).to_lowercase(),
            "pairs": pairs,
            "backend": backend,
            "clock": clock.name(),
            "strategy": strategy,
        });
        line.to_string()
    }
}

impl<T: Element> BenchRank<T> {
    /// Creates a rank with random tensors. Their values do not depend on the number of ranks.
    fn new(plan: Plan, dims: &Dims) -> Result<Self> {
        let normal = |name: &str, rows: &Runs, heads, dim| {
            let stream = RandomStream::new(0, name);
            let rows: Vec<i64> =
                annulus_core::memory::collect(name, index(rows.len()), rows.iter())?;
            let width = (heads * dim) as u64;
            let mut tensor =
                annulus_core::memory::zeros(name, (dims.batch, rows.len(), heads, dim))?;
            for ((b, i, h, c), element) in tensor.indexed_iter_mut() {
                let line = b as u64 * rows.len() as u64 + rows[i].cast_unsigned();
                *element = T::from_f64(stream.normal(line * width + (h * dim + c) as u64));
            }
            Ok(tensor)
        };
        let q_rows = plan.q_rows();
        let kv_rows = plan.kv_rows();
        Ok(Self {
            q: normal("query", q_rows, dims.q_heads, dims.head_dim)?,
            k: normal("key", kv_rows, dims.kv_heads, dims.head_dim)?,
            v: normal("value", kv_rows, dims.kv_heads, dims.value_dim)?,
            dout: normal("dout", q_rows, dims.q_heads, dims.value_dim)?,
            plan,
            forward: None,
            gradients: None,
        })
    }

    /// Runs one round of the passes and returns its time.
    fn round(&mut self, passes: MeasuredPasses, clock: &Clock) -> Result<Duration> {
        let tensors = Tensors::new(self.q.view(), self.k.view(), self.v.view());
        clock.time(|| {
            let forward = match &mut self.forward {
                Some(forward) => {
                    self.plan.forward_into(&tensors, forward.view_mut())?;
                    forward
                }
                none => none.insert(self.plan.forward(&tensors)?),
            };
            if passes == MeasuredPasses::ForwardBackward {
                let dout = self.dout.view();
                match &mut self.gradients {
                    Some(gradients) => {
                        let into = gradients.view_mut();
                        self.plan.backward_into(&tensors, &forward.view(), dout, None, into)?;
                    }
                    none => *none = Some(self.plan.backward(&tensors, forward, dout, None)?),
                }
            }
            Ok(())
        })
    }
}

#[cfg(feature = "wgpu")]
use annulus_core::Error;

/// Time after which no further round starts: it bounds a case of long rounds.
const BUDGET: Duration = Duration::from_millis(1500);
/// The most rounds: of short rounds the least of 8 is stable.
const MOST_ROUNDS: usize = 8;
/// The least number of rounds, so that there is a minimum even of rounds longer than the budget.
const LEAST_ROUNDS: usize = 2;

/// Clock of a measurement.
#[derive(Debug, Clone)]
pub(super) enum Clock {
    /// Wall clock of the host: the time that a caller waits.
    Host,
    /// Timestamps in the device's queue before and after all work of the pass. Includes host work
    /// only where the device waits for it.
    #[cfg(feature = "wgpu")]
    Device(annulus_wgpu::Gpu),
}

impl Clock {
    /// Chooses the device's clock if the devices of all processes have one that runs, else the
    /// host's.
    ///
    /// # Ordering
    /// Collective over the processes.
    pub(super) fn of(backend: &BackendChoice, job: &mut Job) -> Outcome<Self> {
        let own = match backend {
            #[cfg(feature = "wgpu")]
            BackendChoice::Wgpu(devices) => Self::of_device(devices),
            _ => Self::Host,
        };
        let all = job.all_gather_values(&!matches!(own, Self::Host))?;
        Ok(if all.iter().all(|&of_device| of_device) { own } else { Self::Host })
    }

    /// Chooses the device's clock if the ranks share one device and its clock runs.
    #[cfg(feature = "wgpu")]
    fn of_device(devices: &annulus::backend::WgpuDevices) -> Self {
        let alone = devices.get(0).ok().filter(|_| devices.count() == 1);
        alone.map_or(Self::Host, Self::of_gpu)
    }

    /// Chooses the device's clock if it runs.
    #[cfg(feature = "wgpu")]
    fn of_gpu(gpu: annulus_wgpu::Gpu) -> Self {
        let runs = annulus_wgpu::Stopwatch::runs(&gpu).unwrap_or(false);
        if runs { Self::Device(gpu) } else { Self::Host }
    }

    /// Name in a line.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            #[cfg(feature = "wgpu")]
            Self::Device(_) => "device",
        }
    }

    /// Runs `work` and returns its time.
    pub(super) fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
        #[cfg(feature = "wgpu")]
        if let Self::Device(gpu) = self
            && let Some(watch) = annulus_wgpu::Stopwatch::start(gpu)?
        {
            work()?;
            let stopped =
                || Error::Device { what: format!("the clock of {} has stopped", gpu.name()) };
            return watch.stop()?.ok_or_else(stopped);
        }
        let begin = Instant::now();
        work()?;
        Ok(begin.elapsed())
    }
}

/// Least times of a case, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Least {
    /// Time of the slowest rank, by the [`Clock`].
    pub(super) wall: f64,
    /// CPU time of all threads of all processes.
    pub(super) cpu: f64,
}

/// Runs `work`, which returns the time of each rank, once to warm up and then [`LEAST_ROUNDS`] to
/// [`MOST_ROUNDS`] times. Returns the least time of each clock.
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// Those of `work`; the loss of a process.
pub(super) fn least(
    job: &mut Job,
    mut work: impl FnMut(&mut Job) -> Outcome<Vec<Duration>>,
) -> Outcome<Least> {
    work(job)?;
    let mut least = Least { wall: f64::INFINITY, cpu: f64::INFINITY };
    let mut spent = 0.0;
    let mut rounds = 0;
    // `spent` is equal on all processes, so they stop after the same round
    while rounds < LEAST_ROUNDS || (spent < BUDGET.as_secs_f64() && rounds < MOST_ROUNDS) {
        let before = cpu_seconds();
        let slowest = work(job)?.into_iter().max().unwrap_or_default();
        let own = (slowest.as_secs_f64(), cpu_seconds() - before);
        let all = job.all_gather_values(&own)?;
        let wall = all.iter().map(|(wall, _)| *wall).fold(0.0, f64::max);
        least.wall = least.wall.min(wall);
        least.cpu = least.cpu.min(all.iter().map(|(_, cpu)| cpu).sum());
        spent += wall;
        rounds += 1;
    }
    Ok(least)
}

/// CPU time of all threads of this process, in seconds.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_bounded_and_errors_returned() {
        let mut rounds = 0;
        let mut job = Job::of_threads(2);
        let least = least(&mut job, |_| {
            rounds += 1;
            Ok(vec![Duration::ZERO, Duration::from_millis(rounds)])
        });
        // the warm-up round is not measured
        assert!(least.is_ok_and(|least| least.wall == 0.002 && least.cpu >= 0.0));
        assert_eq!(rounds, 1 + MOST_ROUNDS as u64);
        assert!(
            super::least(&mut job, |_| Err(annulus_core::Error::invalid("x", 1, 2).into()))
                .is_err()
        );
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_device_whose_timestamps_are_0_is_timed_by_the_host() {
        if annulus_wgpu::Gpu::list().is_empty() {
            let required = std::env::var("ANNULUS_REQUIRE")
                .is_ok_and(|words| words.split(',').any(|word| word == "wgpu"));
            assert!(!required, "ANNULUS_REQUIRE has wgpu, and there is no adapter");
            eprintln!("NOT RUN: no Vulkan, Metal or DX12 adapter");
            return;
        }
        let gpu = annulus_wgpu::Gpu::open(&annulus_wgpu::Options::default()).unwrap();
        if annulus_wgpu::Stopwatch::runs(&gpu).unwrap() {
            assert_eq!(Clock::of_gpu(gpu.clone()).name(), "device");
        }
        let stopped = gpu.without_clock().unwrap();
        let clock = Clock::of_gpu(stopped.clone());
        assert_eq!(clock.name(), "host");
        let pause = Duration::from_millis(2);
        let work = || {
            std::thread::sleep(pause);
            Ok(())
        };
        assert!(clock.time(work).unwrap() >= pause);
        // a clock that stops later has measured nothing
        if annulus_wgpu::Stopwatch::is_there(&stopped) {
            let error = Clock::Device(stopped).time(|| Ok(())).unwrap_err();
            assert!(error.to_string().contains("has stopped"), "{error}");
        }
    }
}
