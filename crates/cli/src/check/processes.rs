//! Checks cases over MPI. The first N processes form a ring of N ranks, and each compares its own
//! rows with the expected values.
//!
//! All processes iterate over the cases together. After each case they all-gather their verdicts.
//! So a process outside a ring waits no longer than one case takes, and a failure of several ranks
//! is counted once.

use std::collections::{BTreeMap, btree_map::Entry};

use annulus::comm::mpi::{FirstRanks, Settings};
use annulus_core::Result;
use annulus_test_cases::{facade, golden::Index};

use super::{
    Unit,
    case::{CheckedRing, Loaded, Verdict},
};
use crate::{
    backend::BackendChoice,
    failure::Outcome,
    job::{Job, RankEndpoint},
};

/// Returns the verdicts of every unit, by ring, on rank 0; none on the others.
///
/// # Ordering
/// Collective over the processes.
pub(super) fn compute(
    index: &Index,
    units: &[Unit],
    rings: &[CheckedRing],
    job: &mut Job,
    backend: &BackendChoice,
) -> Outcome<Vec<Vec<Verdict>>> {
    let mut groups: BTreeMap<usize, Option<FirstRanks>> = BTreeMap::new();
    for ring in rings {
        if let Entry::Vacant(entry) = groups.entry(ring.ranks) {
            entry.insert(job.first_ranks(ring.ranks)?);
        }
    }
    let settings = job.settings();
    let mut verdicts = Vec::new();
    for unit in units {
        let mut own = Vec::new();
        for ring in rings {
            let group = groups.get(&ring.ranks).and_then(Option::as_ref);
            own.push(group.map_or(Verdict::Passed, |group| {
                let verdict = judge(index, unit, ring, group, &settings, backend);
                verdict.unwrap_or_else(Verdict::from)
            }));
            job.heartbeat()?;
        }
        let all = job.all_gather_values(&own)?;
        if job.is_leader() {
            let of_ring = |ring: usize| merge(all.iter().map(|verdicts| &verdicts[ring]));
            verdicts.push((0..rings.len()).map(of_ring).collect());
        }
    }
    Ok(verdicts)
}

/// Computes the rows of this rank, and compares them with the expected ones.
fn judge(
    index: &Index,
    unit: &Unit,
    ring: &CheckedRing,
    group: &FirstRanks,
    settings: &Settings,
    backend: &BackendChoice,
) -> Result<Verdict> {
    let loaded = Loaded::read(index, unit.number, unit.dtype);
    // created even if the case could not be read: dropping it tells the other ranks to stop
    // waiting
    let endpoint = RankEndpoint::Process(Box::new(group.ring(settings.clone())?));
    let Loaded { case, expected } = loaded?;
    let mut plan = backend.plan(1, endpoint, &ring.setup(&case)?, case.spec.dims)?;
    let mut wrong = Vec::new();
    for answer in facade::compute_rank(&case, &mut plan, 1)? {
        wrong.extend(expected.wrong_rows(&answer)?);
    }
    Ok(Verdict::of(&wrong))
}

/// Returns the verdict of a ring: of the lowest rank with an error of its own, or else with an
/// error that repeats another rank's, or else with wrong arrays.
fn merge<'a>(ranks: impl Iterator<Item = &'a Verdict>) -> Verdict {
    let precedence = |verdict: &&Verdict| match verdict {
        Verdict::Failed { echo: false, .. } => 0,
        Verdict::Failed { .. } => 1,
        Verdict::Wrong(_) => 2,
        Verdict::Passed => 3,
    };
    ranks.min_by_key(precedence).cloned().unwrap_or(Verdict::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_ranks_have_one_verdict_and_errors_precede_their_repetition() {
        let wrong = |line: &str| Verdict::Wrong(vec![line.to_owned()]);
        let failed =
            |what: &str, echo| Verdict::Failed { what: what.into(), unsupported: false, echo };
        let merged = |verdicts: &[Verdict]| merge(verdicts.iter());
        assert_eq!(merged(&[Verdict::Passed, Verdict::Passed]), Verdict::Passed);
        assert_eq!(merged(&[Verdict::Passed, wrong("dk"), wrong("dv")]), wrong("dk"));
        let verdicts =
            [Verdict::Passed, wrong("dk"), failed("refused", true), failed("own", false)];
        assert_eq!(merged(&verdicts), failed("own", false));
        assert_eq!(merged(&verdicts[..3]), failed("refused", true));
    }
}
