//! `annulus doctor`: what this build and this machine have.

#[cfg(feature = "mpi")]
mod job;

use annulus_cpu::Isa;
use clap::Args;

use crate::{
    VERSION,
    arguments::ring::{TransportName, WITH_MPI, cores},
    crew::{Crew, PATIENCE},
    engine::backends,
    failure::{Failure, Outcome},
    launcher,
    report::say,
};

const EXAMPLES: &str = "Examples:
  annulus doctor
  annulus doctor --json
  mpirun -n 4 annulus doctor";

/// Lists backends, transports, CPU features, threads and versions; under a launcher (mpirun, srun) also which rank runs where
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorFlags {
    /// The transport whose ranks are listed
    #[arg(long, value_enum, default_value = "auto")]
    transport: TransportName,
    /// Print the report as one JSON object: a list of texts for each name
    #[arg(long)]
    json: bool,
}

/// The report: names and what there is to say of each, in order.
#[derive(Debug, Default)]
struct Findings(Vec<(String, String)>);

impl Findings {
    /// Adds a line.
    fn line(&mut self, name: &str, what: &str) {
        self.0.push((name.to_owned(), what.to_owned()));
    }

    /// Prints it, as lines or as JSON.
    fn print(&self, json: bool) {
        if !json {
            self.0.iter().for_each(|(name, what)| say!("{name:<12} {what}"));
            return;
        }
        let mut all = serde_json::Map::new();
        for (name, what) in &self.0 {
            let texts =
                all.entry(name.as_str()).or_insert_with(|| serde_json::Value::Array(Vec::new()));
            if let serde_json::Value::Array(texts) = texts {
                texts.push(what.as_str().into());
            }
        }
        say!("{}", serde_json::Value::Object(all));
    }
}

/// Runs `annulus doctor`. What the machine has is printed also where the environment forces an
/// instruction set that is not there.
pub(crate) fn run(flags: &DoctorFlags) -> Outcome {
    let chosen = Isa::chosen().map_err(Failure::of_flags);
    let lost = launcher::among_others()
        .filter(|_| flags.transport == TransportName::Auto && !cfg!(feature = "mpi"));
    if let Some(place) = lost {
        // of several processes that know nothing of each other, one speaks
        if place.rank == 0 {
            let mut findings = of_build(chosen.as_ref().ok().copied());
            let size = place.size.map_or_else(|| "several".to_owned(), |size| size.to_string());
            let warning = format!(
                "a launcher ({}) started {size} processes, and this build has no mpi: {WITH_MPI}",
                place.by
            );
            findings.line("warning", &warning);
            findings.print(flags.json);
        }
        return chosen.map(|_| ());
    }
    let mut crew = Crew::form("doctor", flags.transport, PATIENCE)?;
    let told =
        if crew.leads() { tell(&crew, chosen.as_ref().ok().copied(), flags.json) } else { Ok(()) };
    let chosen = crew.agree(chosen);
    crew.end(told.and(chosen.map(|_| ())))
}

fn tell(crew: &Crew, isa: Option<Isa>, json: bool) -> Outcome {
    #[cfg_attr(not(feature = "mpi"), expect(unused_mut, reason = "a job has more to say"))]
    let mut findings = of_build(isa);
    #[cfg(feature = "mpi")]
    if let Some(world) = crew.world() {
        job::of_job(world, &mut findings)?;
    }
    #[cfg(not(feature = "mpi"))]
    let _: &Crew = crew;
    findings.print(json);
    Ok(())
}

/// What one process knows by itself.
fn of_build(isa: Option<Isa>) -> Findings {
    let mut findings = Findings::default();
    let mut line = |name: &str, what: &str| findings.line(name, what);
    line("annulus", VERSION);
    line("target", &format!("{} {}", std::env::consts::ARCH, std::env::consts::OS));
    let (has_wgpu, has_cuda) = (cfg!(feature = "wgpu"), cfg!(feature = "cuda"));
    let missing: Vec<&str> = [("wgpu", has_wgpu), ("cuda", has_cuda)]
        .into_iter()
        .filter(|(_, has)| !has)
        .map(|(name, _)| name)
        .collect();
    let missing = if missing.is_empty() {
        String::new()
    } else {
        format!(" ({}: not in this build)", missing.join(", "))
    };
    line("backends", &format!("{}{missing}", backends()));
    #[cfg(feature = "wgpu")]
    of_adapters().iter().for_each(|adapter| line("wgpu", adapter));
    #[cfg(feature = "cuda")]
    of_gpus().iter().for_each(|gpu| line("cuda", gpu));
    #[cfg(feature = "nccl")]
    line("nccl", &of_nccl());
    line(
        "transports",
        match (cfg!(feature = "mpi"), cfg!(feature = "nccl")) {
            (true, true) => "threads, mpi, nccl",
            (true, false) => "threads, mpi (nccl: not in this build)",
            (false, true) => "threads, nccl (mpi: not in this build)",
            (false, false) => "threads (mpi, nccl: not in this build)",
        },
    );
    line("dtypes", "f64 f32 bf16 f16");
    line("cpu", &cpu_features());
    let available: Vec<&str> =
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    let chosen = isa.map_or("nothing: what is forced is not there", Isa::name);
    line(
        "tiles for",
        &format!(
            "{chosen} (this machine can: {}; {} forces one)",
            available.join(" "),
            Isa::VARIABLE
        ),
    );
    line("threads", &format!("{} at once on this machine", cores()));
    findings
}

/// Each NVIDIA GPU and its compiler, or what is missing.
#[cfg(feature = "cuda")]
fn of_gpus() -> Vec<String> {
    use annulus::cuda::{Cuda, device::Device};
    let said = |number| {
        format!(
            "device {number}: {}",
            Cuda::open(number).map_or_else(|missing| missing.to_string(), |cuda| cuda.to_string())
        )
    };
    Device::count()
        .map_or_else(|missing| vec![missing.to_string()], |count| (0..count).map(said).collect())
}

/// NCCL's version, or what is missing.
#[cfg(feature = "nccl")]
fn of_nccl() -> String {
    use annulus::cuda::device::nccl::NcclSymbols;
    NcclSymbols::system()
        .and_then(|symbols| symbols.number())
        .map_or_else(|missing| missing.to_string(), |number| format!("version {number}"))
}

/// Each adapter of wgpu, or that there is none.
#[cfg(feature = "wgpu")]
fn of_adapters() -> Vec<String> {
    let adapters = annulus_wgpu::Gpu::list();
    if adapters.is_empty() {
        return vec!["no adapter: no Vulkan, Metal or DX12 driver was found".to_owned()];
    }
    let forced = annulus_wgpu::Level::forced();
    let words = |adapter: annulus_wgpu::Adapter| {
        let kind = if adapter.software { ", on the processor" } else { "" };
        let (least, most) = adapter.subgroups;
        let (number, name, api, driver) =
            (adapter.number, &adapter.name, &adapter.api, &adapter.driver);
        let level = levels(&adapter, &forced);
        format!(
            "device {number}: {name} ({api}, {driver}{kind}), subgroups {least} to {most}, {level}"
        )
    };
    adapters.into_iter().map(words).collect()
}

/// The level at which an adapter computes, why, and those that it could be made to compute at.
#[cfg(feature = "wgpu")]
fn levels(
    adapter: &annulus_wgpu::Adapter,
    forced: &annulus_core::Result<Option<annulus_wgpu::Level>>,
) -> String {
    let (variable, chosen) = (annulus_wgpu::Level::VARIABLE, adapter.chosen.name());
    let at = match forced {
        Ok(None) => adapter.record.map_or_else(
            || format!("level {chosen}"),
            |record| format!("level {chosen} (shown to be faster in {record})"),
        ),
        Ok(Some(level)) if adapter.levels.contains(level) => {
            format!("level {} (forced; else {chosen})", level.name())
        }
        Ok(Some(level)) => format!("no level, for {} is forced, which it cannot run", level.name()),
        Err(wrong) => format!("no level: {wrong}"),
    };
    let all: Vec<&str> = adapter.levels.iter().map(|level| level.name()).collect();
    format!("{at}; {variable} forces one of: {}", all.join(" "))
}

/// What the CPU offers of what tiles could use.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> String {
    macro_rules! found {
        ($($name:tt),*) => { [$(($name, std::arch::is_x86_feature_detected!($name))),*] };
    }
    listed(&found!(
        "sse4.2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512bf16",
        "avx512fp16"
    ))
}

/// What the CPU offers of what tiles could use.
#[cfg(target_arch = "aarch64")]
fn cpu_features() -> String {
    macro_rules! found {
        ($($name:tt),*) => { [$(($name, std::arch::is_aarch64_feature_detected!($name))),*] };
    }
    listed(&found!("neon", "fp16", "bf16", "sve", "sve2"))
}

/// What the CPU offers of what tiles could use.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> String {
    listed(&[])
}

fn listed(features: &[(&str, bool)]) -> String {
    let found: Vec<&str> =
        features.iter().filter(|(_, found)| *found).map(|&(name, _)| name).collect();
    if found.is_empty() { "no feature that is looked for".into() } else { found.join(" ") }
}
