//! Checking over MPI: a ring of N ranks is made of the first N processes, each of which judges its own rows.
//!
//! All processes go through the cases together. After each case they share their verdicts, so that whoever has no part in a ring waits for no longer
//! than a case takes, and a failure that several ranks see is one failure.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
};

use annulus::{
    Plan,
    comm::mpi::{FirstRanks, Settings},
};
use annulus_core::{Backend, Batch, Element, Error, HostTensors, Result};
use serde::{Deserialize, Serialize};

use super::{
    CheckedDType, Unit,
    case::{Opened, Ring, Verdict, error_of, tolerances},
    compare::Expected,
    index::Case,
};
use crate::{
    crew::{Crew, Endpoint},
    engine::{Engine, Wired, with_backend},
    failure::{Failure, Outcome},
};

/// One rank's verdict on its way to the first: numbers as bits, for there may be a NaN among them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Said {
    /// This process has no part in the ring, or nothing to complain of.
    Fine,
    /// These arrays are wrong: array, error, tolerance.
    Wrong(Vec<(String, u64, u64)>),
    /// `(what, by)` of what is not supported.
    Unsupported(String, String),
    /// It could not be computed; whether this only repeats what another rank said.
    Failed(String, bool),
}

/// Every unit's verdicts, a ring each, on the first process; none on the others.
pub(super) fn compute(
    folder: &Path,
    units: &[Unit],
    rings: &[Ring],
    crew: &mut Crew,
    engine: &Engine,
) -> Outcome<Vec<Vec<Verdict>>> {
    let mut parts: BTreeMap<usize, Option<FirstRanks>> = BTreeMap::new();
    for ring in rings {
        if let Entry::Vacant(entry) = parts.entry(ring.ranks) {
            entry.insert(crew.first_ranks(ring.ranks)?);
        }
    }
    let settings = crew.settings();
    let mut verdicts = Vec::new();
    for (_, case, dtype) in units {
        let mut said = Vec::new();
        for ring in rings {
            let part = parts.get(&ring.ranks).and_then(Option::as_ref);
            said.push(match (part, case, dtype) {
                (None, ..) => Said::Fine,
                (_, Err(error), _) => Said::of(&Verdict::Failed(error.clone())),
                (Some(part), Ok(case), CheckedDType::F32) => {
                    judge::<f32>(folder, case, ring, part, &settings, engine)
                }
                (Some(part), Ok(case), CheckedDType::F64) => {
                    judge::<f64>(folder, case, ring, part, &settings, engine)
                }
            });
            crew.alive()?;
        }
        let mine = serde_json::to_vec(&said).unwrap_or_default();
        let all = crew.share(&mine)?;
        if crew.leads() {
            verdicts.push(merge(&all, rings.len())?);
        }
    }
    Ok(verdicts)
}

fn judge<T: Element>(
    folder: &Path,
    case: &Case,
    ring: &Ring,
    part: &FirstRanks,
    settings: &Settings,
    engine: &Engine,
) -> Said {
    let verdict = with_backend!(engine, 1, make => try_judge::<T, _>(folder, case, ring, part, settings, make));
    Said::of(&verdict.unwrap_or_else(Verdict::Failed))
}

fn try_judge<T: Element, B: Backend<Space: HostTensors>>(
    folder: &Path,
    case: &Case,
    ring: &Ring,
    part: &FirstRanks,
    settings: &Settings,
    make: impl Fn(Endpoint) -> Result<Wired<B>>,
) -> Result<Verdict> {
    let opened = Opened::new::<T>(folder, case);
    // made even by a rank that has nothing to do on it: dropping it says goodbye to the others, who then wait no longer
    let endpoint = Endpoint::Process(Box::new(part.ring(settings.clone())?));
    let Opened { input, sinks, attention } = opened?;
    let (backend, transport) = make(endpoint)?;
    let mut plan =
        Plan::new(&attention.clone().layout(ring.layout.clone()), input.dims, backend, transport)?;
    let (q_rows, kv_rows) = (plan.q_rows().clone(), plan.kv_rows().clone());
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
    let over_queries = input.bias.is_some_and(|shape| shape[2] == 1);
    let mut wrong = Vec::new();
    for (name, &tolerance) in tolerances::<T>(case)? {
        let want = match name.as_str() {
            "out" | "dq" => Expected::rows(&input, name, 1, &q_rows)?,
            "dk" | "dv" => Expected::rows(&input, name, 1, &kv_rows)?,
            "lse" | "max" | "sum" => Expected::rows(&input, name, 2, &q_rows)?,
            "dbias" if !over_queries => Expected::rows(&input, name, 2, &q_rows)?,
            _ => Expected::whole(&input, name)?,
        };
        let error = error_of(name, &want, &forward, &backward)?;
        // a NaN is within no tolerance
        let within = error <= tolerance;
        if !within {
            wrong.push((name.clone(), error, tolerance));
        }
    }
    Ok(if wrong.is_empty() { Verdict::Passed } else { Verdict::Wrong(wrong) })
}

impl Said {
    fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Passed => Self::Fine,
            Verdict::Wrong(arrays) => Self::Wrong(
                arrays
                    .iter()
                    .map(|(name, error, tolerance)| {
                        (name.clone(), error.to_bits(), tolerance.to_bits())
                    })
                    .collect(),
            ),
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

/// The verdicts of all rings from what every rank says of each.
fn merge(all: &[Vec<u8>], rings: usize) -> Outcome<Vec<Verdict>> {
    let mut ranks = Vec::new();
    for (peer, bytes) in all.iter().enumerate() {
        let said: Vec<Said> = serde_json::from_slice(bytes).unwrap_or_default();
        if said.len() != rings {
            return Err(Failure::from(Error::Comm {
                peer,
                step: 0,
                what: format!("{} verdicts, want {rings}", said.len()),
            }));
        }
        ranks.push(said);
    }
    Ok((0..rings)
        .map(|ring| merge_one(ranks.iter().enumerate().map(|(rank, said)| (rank, &said[ring]))))
        .collect())
}

/// One verdict of all ranks': what a rank found itself comes before what it only repeats, and an array is as wrong as where it is worst.
fn merge_one<'a>(said: impl Iterator<Item = (usize, &'a Said)>) -> Verdict {
    let mut wrong: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    let mut failed: Option<(bool, Error)> = None;
    for (rank, said) in said {
        let (echo, error) = match said {
            Said::Fine => continue,
            Said::Wrong(arrays) => {
                for (name, error, tolerance) in arrays {
                    let (error, tolerance) = (f64::from_bits(*error), f64::from_bits(*tolerance));
                    let worst = wrong.entry(name.clone()).or_insert((error, tolerance));
                    // nothing is worse than a NaN
                    if error.is_nan() || error > worst.0 {
                        worst.0 = error;
                    }
                }
                continue;
            }
            Said::Unsupported(what, by) => (false, Error::unsupported(what.clone(), by.clone())),
            Said::Failed(what, echo) => (*echo, Error::Aborted { rank, what: what.clone() }),
        };
        if failed.as_ref().is_none_or(|(first_echoes, _)| *first_echoes && !echo) {
            failed = Some((echo, error));
        }
    }
    match failed {
        Some((_, error)) => Verdict::Failed(error),
        None if wrong.is_empty() => Verdict::Passed,
        None => Verdict::Wrong(
            wrong.into_iter().map(|(name, (error, tolerance))| (name, error, tolerance)).collect(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(said: &[Said]) -> Verdict {
        merge_one(said.iter().enumerate())
    }

    #[test]
    fn a_failure_of_several_ranks_is_one() {
        let wrong =
            |error: f64| Said::Wrong(vec![("dk".into(), error.to_bits(), 1e-4f64.to_bits())]);
        assert!(matches!(merged(&[Said::Fine, Said::Fine]), Verdict::Passed));
        let Verdict::Wrong(arrays) = merged(&[wrong(0.5), Said::Fine, wrong(0.75)]) else {
            panic!()
        };
        assert_eq!(arrays, [("dk".to_owned(), 0.75, 1e-4)]);
        let Verdict::Wrong(arrays) = merged(&[wrong(f64::NAN), wrong(0.75)]) else { panic!() };
        assert!(arrays[0].1.is_nan());
    }

    #[test]
    fn who_found_it_is_heard() {
        let said = [
            Said::Failed("rank 1 refused the call: x".into(), true),
            Said::Unsupported("x".into(), "y".into()),
            Said::Fine,
        ];
        assert!(matches!(merged(&said), Verdict::Failed(Error::Unsupported { .. })));
        let own = Said::Failed("x".into(), false);
        assert!(matches!(
            merged(&[Said::Fine, own.clone(), own]),
            Verdict::Failed(Error::Aborted { rank: 1, .. })
        ));
        let bytes = serde_json::to_vec(&said).unwrap();
        assert_eq!(serde_json::from_slice::<Vec<Said>>(&bytes).unwrap(), said);
    }
}
