//! `annulus doctor`: lists the features of this build, the devices and cores of this machine, and
//! the limits of each process.

#[cfg(feature = "mpi")]
mod mpi;
mod process;

use annulus::backend::BackendName;
#[cfg(feature = "cuda")]
use annulus::backend::cuda::device::Api;
use annulus_cpu::Isa;
use clap::Args;

use crate::{
    VERSION,
    arguments::ring::{TransportName, WITH_MPI, cores},
    failure::{Failure, Outcome},
    job::{DEFAULT_DEADLINE, Job},
    launcher, say,
};

const EXAMPLES: &str = "Examples:
  annulus doctor
  annulus doctor --json
  mpirun -n 4 annulus doctor";

/// Lists backends, devices, transports, CPU features, threads and versions; under a launcher
/// (mpirun, srun) also nodes, cores and limits of the ranks, with one line for each distinct
/// finding
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorFlags {
    /// Transport whose ranks are listed
    #[arg(long, value_enum, default_value = "auto")]
    transport: TransportName,
    /// Print the report as one JSON object: each name with a list of texts
    #[arg(long)]
    json: bool,
}

/// Report: lines of a name and a text, in order.
#[derive(Debug, Default)]
struct Findings(Vec<(String, String)>);

impl Findings {
    /// Adds a line.
    fn line(&mut self, name: &str, what: &str) {
        self.0.push((name.to_owned(), what.to_owned()));
    }

    /// Prints the report as lines or as JSON.
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

/// Runs `annulus doctor`. The report is printed even if the environment forces an instruction set
/// that this machine lacks, which is an error afterwards.
pub(crate) fn run(flags: &DoctorFlags) -> Outcome {
    let chosen = Isa::chosen().map_err(Failure::of_flags);
    let without_mpi = launcher::one_of_several()
        .filter(|_| flags.transport == TransportName::Auto && !cfg!(feature = "mpi"));
    if let Some(launched) = without_mpi {
        // the processes are independent of each other, so only the launcher's rank 0 prints
        if launched.rank == 0 {
            let mut findings = of_build(chosen.as_ref().ok().copied());
            let warning = format!(
                "a launcher ({}) started {} processes, and this build has no mpi: {WITH_MPI}",
                launched.launcher,
                launched.count()
            );
            findings.line("warning", &warning);
            findings.print(flags.json);
        }
        return chosen.map(|_| ());
    }
    let mut job = Job::start("doctor", flags.transport, DEFAULT_DEADLINE)?;
    let findings = process::findings(job.ranks());
    let all = job.all_gather_values(&findings)?;
    let printed = if job.is_leader() {
        print(&job, chosen.as_ref().ok().copied(), &all, flags.json)
    } else {
        Ok(())
    };
    let chosen = job.agree(chosen);
    job.end(printed.and(chosen.map(|_| ())))
}

/// Prints the report. `of_ranks` has the findings of every process.
fn print(job: &Job, isa: Option<Isa>, of_ranks: &[Vec<process::Finding>], json: bool) -> Outcome {
    let mut findings = of_build(isa);
    #[cfg(feature = "mpi")]
    if let Some(world) = job.world() {
        mpi::add_findings(world, &mut findings)?;
    }
    #[cfg(not(feature = "mpi"))]
    let _: &Job = job;
    process::distinct(of_ranks).iter().for_each(|(name, what)| findings.line(name, what));
    findings.print(json);
    Ok(())
}

/// Collects the findings about this build and this machine.
fn of_build(isa: Option<Isa>) -> Findings {
    let mut findings = Findings::default();
    let mut line = |name: &str, what: &str| findings.line(name, what);
    line("annulus", VERSION);
    line("target", &format!("{} {}", std::env::consts::ARCH, std::env::consts::OS));
    let backends = BackendName::ALL.map(|name| (name.name(), name.is_built()));
    line("backends", &with_missing(&backends));
    #[cfg(feature = "wgpu")]
    of_adapters().iter().for_each(|adapter| line("wgpu", adapter));
    #[cfg(feature = "cuda")]
    {
        of_gpus(Api::Cuda).iter().for_each(|gpu| line("cuda", gpu));
        of_gpus(Api::Hip).iter().for_each(|gpu| line("hip", gpu));
    }
    #[cfg(feature = "nccl")]
    {
        line("nccl", &of_nccl(Api::Cuda));
        line("rccl", &of_nccl(Api::Hip));
    }
    let [mpi, nccl] = [cfg!(feature = "mpi"), cfg!(feature = "nccl")];
    line("transports", &with_missing(&[("threads", true), ("mpi", mpi), ("nccl", nccl)]));
    line("dtypes", "f64 f32 bf16 f16");
    line("cpu", &cpu_features());
    match annulus_cpu::amx() {
        Some(Ok(())) => line("amx", "for bf16, f16 and f32 inputs"),
        Some(Err(refusal)) => line("amx", &format!("not used: {refusal}")),
        None => {}
    }
    let available: Vec<&str> =
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    let chosen = isa.map_or("none: the forced instruction set is not available", Isa::name);
    line(
        "tiles for",
        &format!("{chosen} (available: {}; {} forces one)", available.join(" "), Isa::VARIABLE),
    );
    if let Some(isa) = isa {
        line("numerics", &annulus_cpu::numerics_id(isa));
    }
    line("threads", &format!("{} run in parallel on this machine", cores()));
    findings
}

/// Lists what this build has, and then what it has not.
fn with_missing(all: &[(&str, bool)]) -> String {
    let named = |built: bool| {
        let names = all.iter().filter(|(_, has)| *has == built).map(|(name, _)| *name);
        names.collect::<Vec<_>>().join(", ")
    };
    match named(false) {
        none if none.is_empty() => named(true),
        missing => format!("{} ({missing}: not in this build)", named(true)),
    }
}

/// Describes each GPU of an interface and its compiler, or what is missing.
#[cfg(feature = "cuda")]
fn of_gpus(api: Api) -> Vec<String> {
    use annulus::backend::cuda::{Cuda, device::Device};
    let open = match api {
        Api::Cuda => Cuda::open,
        Api::Hip => Cuda::open_hip,
    };
    let described = |number| {
        format!(
            "device {number}: {}",
            open(number).map_or_else(|missing| missing.to_string(), |cuda| cuda.to_string())
        )
    };
    Device::count(api).map_or_else(
        |missing| vec![missing.to_string()],
        |count| (0..count).map(described).collect(),
    )
}

/// Returns the version of NCCL or RCCL, or what is missing.
#[cfg(feature = "nccl")]
fn of_nccl(api: Api) -> String {
    use annulus::backend::cuda::device::nccl::NcclSymbols;
    NcclSymbols::system(api)
        .and_then(|symbols| symbols.number())
        .map_or_else(|missing| missing.to_string(), |number| format!("version {number}"))
}

/// Describes each adapter of wgpu.
#[cfg(feature = "wgpu")]
fn of_adapters() -> Vec<String> {
    let adapters = annulus_wgpu::Gpu::list();
    if adapters.is_empty() {
        return vec![format!("no adapter: {}", annulus_wgpu::NO_ADAPTER)];
    }
    let words = |adapter: annulus_wgpu::Adapter| {
        let kind = if adapter.software { ", software" } else { "" };
        let (least, most) = adapter.subgroups;
        let annulus_wgpu::Adapter { number, name, api, driver, .. } = &adapter;
        let register_tile = annulus_wgpu::RegisterTile::forced();
        let query_tile = annulus_wgpu::QueryTileSize::forced();
        let tiles = tiles(&adapter, register_tile, query_tile);
        let level = level(&adapter, annulus_wgpu::Level::forced());
        format!(
            "device {number}: {name} ({api}, {driver}{kind}), subgroups {least} to {most}, \
             {tiles}, {level}"
        )
    };
    adapters.into_iter().map(words).collect()
}

/// Describes a choice that a variable may force.
#[cfg(feature = "wgpu")]
fn choice(what: &str, chosen: &str, forced: annulus_core::Result<Option<&str>>) -> String {
    match forced {
        Ok(None) => format!("{what} {chosen}"),
        Ok(Some(name)) => format!("{what} {name} (forced; else {chosen})"),
        Err(wrong) => format!("no {what}: {wrong}"),
    }
}

/// Describes the register tile of an adapter's kernels and the query tile of forward kernels: the
/// default only if the adapter can run level `matrix`, the one at which it may be another than 32.
#[cfg(feature = "wgpu")]
fn tiles(
    adapter: &annulus_wgpu::Adapter,
    register_tile: annulus_core::Result<Option<annulus_wgpu::RegisterTile>>,
    query_tile: annulus_core::Result<Option<annulus_wgpu::QueryTileSize>>,
) -> String {
    use annulus_wgpu::{QueryTileSize, RegisterTile};
    let forced = register_tile.map(|tile| tile.map(RegisterTile::name));
    let tiles = choice("register tile", adapter.register_tile.name(), forced);
    if query_tile == Ok(None) && adapter.query_tile.is_none() {
        return tiles;
    }
    let chosen = adapter.query_tile.unwrap_or(QueryTileSize::Of32).name();
    let forced = query_tile.map(|tile| tile.map(QueryTileSize::name));
    format!("{tiles}, {}", choice("query tile", chosen, forced))
}

/// Describes the level of an adapter's kernels, the reason for it, and the levels that can be
/// forced.
#[cfg(feature = "wgpu")]
fn level(
    adapter: &annulus_wgpu::Adapter,
    forced: annulus_core::Result<Option<annulus_wgpu::Level>>,
) -> String {
    use annulus_wgpu::Level;
    let chosen = match adapter.record.filter(|_| forced == Ok(None)) {
        Some(record) => format!("{} (measured as fastest in {record})", adapter.chosen.name()),
        None => adapter.chosen.name().to_owned(),
    };
    let at = match forced {
        Ok(Some(level)) if !adapter.levels.contains(&level) => {
            format!("no level: {} is forced, which this adapter does not support", level.name())
        }
        forced => choice("level", &chosen, forced.map(|level| level.map(Level::name))),
    };
    let all: Vec<&str> = adapter.levels.iter().map(|level| level.name()).collect();
    format!("{at}; {} forces one of: {}", Level::VARIABLE, all.join(" "))
}

/// Lists the CPU features that SIMD kernels could use.
fn cpu_features() -> String {
    macro_rules! found {
        ($detected:ident, $($name:tt)*) => { [$(($name, std::arch::$detected!($name))),*] };
    }
    #[cfg(target_arch = "x86_64")]
    let features = found!(is_x86_feature_detected, "sse4.2" "avx" "avx2" "fma" "f16c" "avx512f"
        "avx512bw" "avx512vl" "avx512bf16" "avx512fp16");
    #[cfg(target_arch = "aarch64")]
    let features = found!(is_aarch64_feature_detected, "neon" "fp16" "bf16" "sve" "sve2");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let features: [(&str, bool); 0] = [];
    let found: Vec<&str> =
        features.into_iter().filter(|(_, found)| *found).map(|(name, _)| name).collect();
    if found.is_empty() { "no SIMD feature detected".into() } else { found.join(" ") }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use annulus_core::Error;
    use annulus_wgpu::{Adapter, Level, QueryTileSize, RegisterTile};

    use super::*;

    #[test]
    fn tiles_that_are_forced_have_the_default_beside_them() {
        let [four, two] = RegisterTile::ALL;
        let adapter = |query_tile| Adapter {
            number: 0,
            name: String::new(),
            driver: String::new(),
            api: String::new(),
            software: false,
            subgroups: (32, 32),
            levels: Level::ALL.to_vec(),
            chosen: Level::Plain,
            record: None,
            register_tile: four,
            query_tile,
        };
        let [matrix, plain] = [Some(QueryTileSize::Of32), None].map(adapter);
        assert_eq!(tiles(&matrix, Ok(None), Ok(None)), "register tile 4x4, query tile 32");
        assert_eq!(tiles(&plain, Ok(None), Ok(None)), "register tile 4x4");
        let refused = "register tile 4x4, no query tile: ANNULUS_WGPU_QUERY_TILE: got 48, want \
                       one of 32, 64";
        let forced = "register tile 2x4 (forced; else 4x4), query tile 64 (forced; else 32)";
        for adapter in [matrix, plain] {
            let of64 = Ok(Some(QueryTileSize::Of64));
            assert_eq!(tiles(&adapter, Ok(Some(two)), of64), forced);
            let wrong = Err(Error::invalid(QueryTileSize::VARIABLE, "48", "one of 32, 64"));
            assert_eq!(tiles(&adapter, Ok(None), wrong), refused);
        }
    }
}
