//! Strategies over processes, on a backend that is chosen by name: the oracle's numbers, the bits
//! of a ring of threads on the same backend, and the predicted bytes.

use annulus::{AnyBackend, BackendName, LocalRing, Plan, Setup};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_conformance::{Case, FacadeOn, PlanSubject, Setting, suite};
use annulus_core::{DType, HeadGrid, Strategy};

use crate::{
    cases::{OfThreads, examine},
    harness::{Harness, Verdict},
};

/// Runs random cases under the ring, every grid of heads × queries × keys that the ranks admit, and
/// every published strategy that the case admits.
pub(crate) fn all(
    harness: &mut Harness,
    settings: &Settings,
    backend: &AnyBackend,
    seeds: u64,
) -> Verdict {
    let dtypes: &[DType] = match backend.name() {
        // each element type has kernels of its own, which a driver compiles for seconds
        BackendName::Wgpu => &[DType::F32, DType::Bf16],
        _ => &[DType::F32, DType::F64, DType::Bf16, DType::F16],
    };
    let name = backend.name();
    let on_backend =
        |setup: &Setup| setup.clone().map_runtime(|runtime| runtime.backend(backend.clone()));
    let over_mpi = PlanSubject::new(format!("{name} over mpi"), dtypes, |setup: &Setup, dims| {
        Plan::new(on_backend(setup), dims, Mpi::world(settings.clone())?)
    });
    let threads =
        FacadeOn::new(format!("{name} over threads"), dtypes, |setup: &Setup, dims, ranks| {
            LocalRing::new(on_backend(setup), dims, ranks)
        });
    for seed in 0..seeds {
        let dtype = dtypes[annulus_core::index(seed) % dtypes.len()];
        let case = Case::random_heads(seed).in_dtype(dtype);
        for setting in settings_of(&case, harness.ranks(), seed) {
            let of_threads = OfThreads { subject: &threads, setting: &setting };
            let subjects = std::slice::from_ref(&over_mpi);
            let verdict = examine(harness, subjects, &case, &setting, &of_threads);
            let context = |wrong| format!("seed {seed} on {setting}, {name}: {wrong}");
            harness.share(verdict.map_err(context))?;
        }
    }
    Ok(())
}

/// Returns a setting for each strategy that `ranks` ranks and the case admit.
fn settings_of(case: &Case, ranks: usize, seed: u64) -> Vec<Setting> {
    let published = [
        Strategy::Ring,
        Strategy::AllGather,
        Strategy::AllToAll,
        Strategy::OncePerNode { node_ranks: 1 },
        Strategy::OncePerNode { node_ranks: 2 },
        Strategy::PassQ,
    ];
    let admits = |strategy: &Strategy| HeadGrid::of(&case.spec.dims, ranks, *strategy).is_ok();
    let with = |strategy| Setting { ranks, strategy, ..Setting::ALONE };
    let mut all: Vec<Setting> = published.into_iter().filter(admits).map(with).collect();
    all.extend(suite::strategy_settings(case, ranks, annulus_core::index(seed)));
    all
}
