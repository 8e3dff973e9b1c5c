//! `annulus doctor`: what this build and this machine have.

use annulus_cpu::Isa;
use clap::Args;

use crate::{
    arguments::ring::cores,
    failure::{Failure, Outcome},
    report::say,
};

const EXAMPLES: &str = "Example:
  annulus doctor";

/// Lists backends, transports, CPU features, threads and versions
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorFlags {}

/// Runs `annulus doctor`.
pub(crate) fn run(_: &DoctorFlags) -> Outcome {
    let line = |name: &str, what: &str| say!("{name:<12} {what}");
    line("annulus", env!("CARGO_PKG_VERSION"));
    line("target", &format!("{} {}", std::env::consts::ARCH, std::env::consts::OS));
    line("backends", "cpu (wgpu, cuda: not in this build)");
    line("transports", "threads (mpi, nccl: not in this build)");
    line("dtypes", "f64 f32 bf16 f16");
    line("cpu", &cpu_features());
    let available: Vec<&str> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    line(
        "tiles for",
        &format!(
            "{} (this machine can: {}; {} forces one)",
            Isa::chosen().map_err(Failure::of_flags)?.name(),
            available.join(" "),
            Isa::VARIABLE
        ),
    );
    line("threads", &format!("{} at once on this machine", cores()));
    Ok(())
}

/// What the CPU offers of what tiles could use.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> String {
    macro_rules! found {
        ($($name:tt),*) => { [$(($name, std::arch::is_x86_feature_detected!($name))),*] };
    }
    listed(&found!("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512fp16"))
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
    let found: Vec<&str> = features.iter().filter(|(_, found)| *found).map(|&(name, _)| name).collect();
    if found.is_empty() { "no feature that is looked for".into() } else { found.join(" ") }
}
