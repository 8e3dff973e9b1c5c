//! Checks cases over MPI. The first N processes form a ring of N ranks, and each compares its own
//! rows with the expected values.
//!
//! All processes iterate over the cases together. After each case they all-gather their verdicts.
//! So a process outside a ring waits no longer than one case takes, and a failure of several ranks
//! is counted once.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
};

use annulus::comm::mpi::{FirstRanks, Settings};
use annulus_core::{Batch, Element, Error, Result};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::{
    CheckedDType, Unit,
    case::{Opened, Ring, Verdict, WrongArray, error_of, exceeding},
    index::Case,
    truth::Truth,
};
use crate::{
    backend::BackendChoice,
    failure::{Failure, Outcome},
    job::{Job, RankEndpoint},
};

/// Verdict of one rank as a message. Numbers are encoded as bits, because JSON has no NaN.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum RankVerdict {
    /// The rank's rows pass, or the process is not in the ring.
    Passed,
    /// `(array, error, tolerance)` of arrays that exceed their tolerance.
    Wrong(Vec<(String, u64, u64)>),
    /// `(what, by)` of an [`Error::Unsupported`].
    Unsupported(String, String),
    /// Text of another error; true if it only repeats that of another rank.
    Failed(String, bool),
}

/// Returns the verdicts of every unit, by ring, on rank 0; none on the others.
///
/// # Ordering
/// Collective over the processes.
/// # Errors
/// The loss of a process.
pub(super) fn compute(
    folder: &Path,
    units: &[Unit],
    rings: &[Ring],
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
    for Unit { case, dtype, .. } in units {
        let mut own = Vec::new();
        for ring in rings {
            let group = groups.get(&ring.ranks).and_then(Option::as_ref);
            own.push(match (group, case, dtype) {
                (None, ..) => RankVerdict::Passed,
                (_, Err(error), _) => RankVerdict::of(&Verdict::Failed(error.clone())),
                (Some(group), Ok(case), dtype) => {
                    let judge = match dtype {
                        CheckedDType::F64 => judge::<f64>,
                        CheckedDType::F32 => judge::<f32>,
                        CheckedDType::Bf16 => judge::<bf16>,
                        CheckedDType::F16 => judge::<f16>,
                    };
                    judge(folder, case, ring, group, &settings, backend)
                }
            });
            job.heartbeat()?;
        }
        let own = serde_json::to_vec(&own).unwrap_or_default();
        let all = job.all_gather(&own)?;
        if job.is_leader() {
            verdicts.push(merge(&all, rings.len())?);
        }
    }
    Ok(verdicts)
}

fn judge<T: Element>(
    folder: &Path,
    case: &Case,
    ring: &Ring,
    group: &FirstRanks,
    settings: &Settings,
    backend: &BackendChoice,
) -> RankVerdict {
    let verdict = try_judge::<T>(folder, case, ring, group, settings, backend);
    RankVerdict::of(&verdict.unwrap_or_else(Verdict::Failed))
}

fn try_judge<T: Element>(
    folder: &Path,
    case: &Case,
    ring: &Ring,
    group: &FirstRanks,
    settings: &Settings,
    backend: &BackendChoice,
) -> Result<Verdict> {
    let opened = Opened::new::<T>(folder, case);
    // created even if the file could not be opened: dropping it tells the other ranks to stop
    // waiting
    let endpoint = RankEndpoint::Process(Box::new(group.ring(settings.clone())?));
    let Opened { input, sinks, attention } = opened?;
    ring.check_heads(&input.dims)?;
    let truth = Truth::new::<T>(&input, case, sinks, &attention)?;
    let attention = attention.strategy(ring.strategy);
    let attention = ring.layout.apply(attention, input.dims, ring.ranks, || input.coordinates());
    let attention = attention.map_err(|error| input.named(error))?;
    let mut plan = backend.plan(1, endpoint, &attention, input.dims)?;
    let q_rows = plan.q_rows().clone();
    let kv_rows = plan.kv_rows().clone();
    let named = |error| input.named(error);
    let share = input.share::<T>(sinks, &q_rows, &kv_rows).map_err(named)?;
    let batch = input.batch(&q_rows, &kv_rows).map_err(named)?;
    let gradients = input.output_gradients::<T>(&q_rows).map_err(named)?;
    if batch != Batch::default() {
        plan.update(&batch).map_err(named)?;
    }
    let tensors = share.tensors();
    let forward = plan.forward(&tensors)?;
    let backward =
        plan.backward(&tensors, &forward, gradients.dout.view(), gradients.dlse_view())?;
    // the gradient of a bias without a query axis is equal on all ranks
    let is_reduced = input.bias.is_some_and(|shape| shape[2] == 1);
    let mut wrong = Vec::new();
    for (name, tolerance) in truth.tolerances() {
        let want = match name {
            "out" | "dq" => truth.rows(name, 1, &q_rows)?,
            "dk" | "dv" => truth.rows(name, 1, &kv_rows)?,
            "lse" | "max" | "sum" => truth.rows(name, 2, &q_rows)?,
            "dbias" if !is_reduced => truth.rows(name, 2, &q_rows)?,
            _ => truth.whole(name)?,
        };
        wrong.extend(exceeding(name, error_of(name, &want, &forward, &backward)?, tolerance));
    }
    Ok(if wrong.is_empty() { Verdict::Passed } else { Verdict::Wrong(wrong) })
}

impl RankVerdict {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Passed => Self::Passed,
            Verdict::Wrong(arrays) => Self::Wrong(
                arrays
                    .iter()
                    .map(|WrongArray { name, error, tolerance }| {
                        (name.clone(), error.to_bits(), tolerance.to_bits())
                    })
                    .collect(),
            ),
            // `check` refuses to compare bits over MPI
            Verdict::Different(_) => Self::Failed("bits differ".into(), false),
            Verdict::Failed(Error::Unsupported { what, by }) => {
                Self::Unsupported(what.clone(), by.clone())
            }
            Verdict::Failed(error) => {
                let echo = matches!(
                    error,
                    Error::Refused { .. } | Error::Aborted { .. } | Error::PeerLost { .. }
                );
                Self::Failed(error.to_string(), echo)
            }
        }
    }
}

/// Merges the encoded verdicts of all ranks into one verdict for each ring.
///
/// # Errors
/// [`Error::Comm`] if a rank sent another number of verdicts than `rings`.
fn merge(all: &[Vec<u8>], rings: usize) -> Outcome<Vec<Verdict>> {
    let mut ranks = Vec::new();
    for (peer, bytes) in all.iter().enumerate() {
        let verdicts: Vec<RankVerdict> = serde_json::from_slice(bytes).unwrap_or_default();
        if verdicts.len() != rings {
            return Err(Failure::from(Error::Comm {
                peer,
                step: 0,
                what: format!("{} verdicts, want {rings}", verdicts.len()),
            }));
        }
        ranks.push(verdicts);
    }
    Ok((0..rings).map(|ring| merge_ring(ranks.iter().map(|verdicts| &verdicts[ring]))).collect())
}

/// Merges the verdicts of all ranks of one ring, by rank. An error takes precedence over one that
/// only repeats it, and the error of an array is the largest of all ranks.
fn merge_ring<'a>(verdicts: impl Iterator<Item = &'a RankVerdict>) -> Verdict {
    let mut wrong: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let mut failed: Option<(bool, Error)> = None;
    for (rank, verdict) in verdicts.enumerate() {
        let (echo, error) = match verdict {
            RankVerdict::Passed => continue,
            RankVerdict::Wrong(arrays) => {
                for (name, error, tolerance) in arrays {
                    let error = f64::from_bits(*error);
                    let tolerance = f64::from_bits(*tolerance);
                    let worst = wrong.entry(name.clone()).or_insert((error, tolerance));
                    // a NaN stays: no comparison with it is true
                    if error.is_nan() || error > worst.0 {
                        worst.0 = error;
                    }
                }
                continue;
            }
            RankVerdict::Unsupported(what, by) => {
                (false, Error::unsupported(what.clone(), by.clone()))
            }
            RankVerdict::Failed(what, echo) => (*echo, Error::Aborted { rank, what: what.clone() }),
        };
        if failed.as_ref().is_none_or(|(first_echoes, _)| *first_echoes && !echo) {
            failed = Some((echo, error));
        }
    }
    match failed {
        Some((_, error)) => Verdict::Failed(error),
        None if wrong.is_empty() => Verdict::Passed,
        None => Verdict::Wrong(
            wrong
                .into_iter()
                .map(|(name, (error, tolerance))| WrongArray { name, error, tolerance })
                .collect(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(verdicts: &[RankVerdict]) -> Verdict {
        merge_ring(verdicts.iter())
    }

    #[test]
    fn wrong_arrays_of_several_ranks_are_one_failure() {
        let wrong = |error: f64| {
            RankVerdict::Wrong(vec![("dk".into(), error.to_bits(), 1e-4f64.to_bits())])
        };
        assert!(matches!(merged(&[RankVerdict::Passed, RankVerdict::Passed]), Verdict::Passed));
        let Verdict::Wrong(arrays) = merged(&[wrong(0.5), RankVerdict::Passed, wrong(0.75)]) else {
            panic!()
        };
        let want = WrongArray { name: "dk".to_owned(), error: 0.75, tolerance: 1e-4 };
        assert_eq!(arrays, [want]);
        let Verdict::Wrong(arrays) = merged(&[wrong(f64::NAN), wrong(0.75)]) else { panic!() };
        assert!(arrays[0].error.is_nan());
    }

    #[test]
    fn an_error_takes_precedence_over_its_repetition() {
        let verdicts = [
            RankVerdict::Failed("rank 1 refused the call: x".into(), true),
            RankVerdict::Unsupported("x".into(), "y".into()),
            RankVerdict::Passed,
        ];
        assert!(matches!(merged(&verdicts), Verdict::Failed(Error::Unsupported { .. })));
        let own = RankVerdict::Failed("x".into(), false);
        assert!(matches!(
            merged(&[RankVerdict::Passed, own.clone(), own]),
            Verdict::Failed(Error::Aborted { rank: 1, .. })
        ));
        let bytes = serde_json::to_vec(&verdicts).unwrap();
        assert_eq!(serde_json::from_slice::<Vec<RankVerdict>>(&bytes).unwrap(), verdicts);
    }
}
