//! Cases over a ring of processes: the oracle's numbers, and the bits of the ring of threads. Every
//! run also compares the bytes sent with the prediction.

use std::sync::Arc;

use annulus_comm::{
    Deadline,
    mpi::{Mpi, Settings},
};
use annulus_conformance::{
    Answer, Case, Crossings, Draw, HostMemory, Judge, Placed, RankSetup, RingSubject, Setting,
    Subject, subjects, suite,
};
use annulus_core::{CustomLayout, DType, Host, Layout, Placement, Result, Route, Runs, Transport};
use annulus_cpu::Cpu;
use ndarray::ArrayViewMutD;

use crate::harness::{Harness, Verdict};

/// Longest wait for a silent peer: far above the time of any case.
const DEADLINE: std::time::Duration = std::time::Duration::from_secs(60);

/// The CPU over MPI, with this process's rank only: other ranks' rows of an answer are zero. With
/// `nodes`, rank r reports that it is on node r mod `nodes`.
fn subject(settings: &Settings, nodes: Option<usize>) -> impl Subject + use<> {
    let settings = settings.clone();
    let sends = match (settings.synchronous, settings.announce) {
        (true, _) => ", synchronous sends",
        (false, true) => ", announced messages",
        (false, false) => "",
    };
    RingSubject::new(
        format!("cpu over mpi{sends}"),
        move |ranks| -> Result<Vec<RankSetup<HostMemory, Cpu>>> {
            let mpi = Mpi::world(settings.clone())?;
            let transport: Box<dyn Transport<Host>> = match nodes {
                None => Box::new(Deadline::new(mpi, DEADLINE)?),
                Some(nodes) => {
                    let placement = Placement::new((0..ranks).map(|rank| rank % nodes).collect());
                    Box::new(Deadline::new(
                        Placed::new(mpi, placement, Crossings::default()),
                        DEADLINE,
                    )?)
                }
            };
            Ok(vec![RankSetup { memory: HostMemory, backend: Cpu::new(1)?, transport }])
        },
    )
}

/// Runs every configuration of the covering array with `settings`, with synchronous sends and with
/// every message announced. One run is compared with the oracle and with the ring of threads, so
/// that both are computed once, and the others with the ring of threads.
pub(crate) fn pairs(harness: &mut Harness, settings: &Settings) -> Verdict {
    let ways = [
        settings.clone(),
        Settings { synchronous: true, ..settings.clone() },
        Settings { announce: true, ..settings.clone() },
    ];
    let unplaced = ways.each_ref().map(|way| subject(way, None));
    let on_two_nodes = ways.each_ref().map(|way| subject(way, Some(2)));
    let threads = subjects::cpu();
    for (number, configuration) in suite::pairwise().into_iter().enumerate() {
        let case = configuration.case();
        let setting = configuration.setting(harness.ranks());
        let verdict = if number % 2 == 0 {
            examine(
                harness,
                &unplaced,
                &case,
                &setting,
                &OfThreads { subject: &threads, setting: &setting },
            )
        } else {
            let (by_name, given) = on_nodes(&setting, number / 2);
            examine(
                harness,
                &on_two_nodes,
                &case,
                &by_name,
                &OfThreads { subject: &threads, setting: &given },
            )
        };
        harness.share(verdict.map_err(|wrong| format!("{configuration} on {setting}: {wrong}")))?;
    }
    Ok(())
}

/// Returns a setting of ranks on two nodes, and the same with a route that does not depend on nodes.
/// A route that is left to the mask is one over nodes by name, if these have as many ranks each.
fn on_nodes(setting: &Setting, number: usize) -> (Setting, Setting) {
    let Setting { ranks, route, .. } = *setting;
    // a fixed layout fixes the order of the ranks, so that nodes alternate
    let fits = ranks.is_multiple_of(2) && ranks > 2 && setting.layout.is_none();
    let of_nodes = |node_ranks| match number % 3 {
        0 => Route::RailsUp { node_ranks },
        1 => Route::RailsDown { node_ranks },
        _ => Route::OncePerNode { node_ranks },
    };
    let [by_name, given] = match route {
        None if fits => [0, ranks / 2].map(of_nodes),
        None => [Route::RelayUp; 2],
        Some(route) => [route; 2],
    };
    let with = |route| Setting { route: Some(route), ..setting.clone() };
    (with(by_name), with(given))
}

/// Runs random cases.
pub(crate) fn random(harness: &mut Harness, settings: &Settings, seeds: u64) -> Verdict {
    let subject = subject(settings, None);
    let threads = subjects::cpu();
    let ranks = harness.ranks();
    for seed in 0..seeds {
        let draw = &mut Draw::new(!seed);
        let case = Case::random(seed).in_dtype(draw.pick(&[
            DType::F32,
            DType::F64,
            DType::Bf16,
            DType::F16,
        ]));
        // ids of one side serve for both only if every rank owns the same rows of both
        let lone_ids = case.batch.q_segment_ids.is_some() != case.batch.kv_segment_ids.is_some();
        let layout = match draw.below(5) {
            0 => None,
            1 if !lone_ids => Some(random_layout(&case, ranks, draw)),
            number => Some(suite::LAYOUTS[number % 3].clone()),
        };
        let route = draw.pick(&suite::routes(ranks));
        let setting = Setting { ranks, layout, route, ..Setting::ALONE };
        let of_threads = OfThreads { subject: &threads, setting: &setting };
        let subjects = std::slice::from_ref(&subject);
        let verdict = examine(harness, subjects, &case, &setting, &of_threads);
        harness.share(
            verdict.map_err(|wrong| format!("seed {seed}: {} on {setting}: {wrong}", case.name)),
        )?;
    }
    Ok(())
}

/// A ring of threads, whose bits the answers over MPI must have.
pub(crate) struct OfThreads<'a> {
    pub(crate) subject: &'a dyn Subject,
    pub(crate) setting: &'a Setting,
}

/// Runs a case through every subject on all ranks. Rank 0 compares the first merged answer with the
/// oracle, and the bits of every answer with a ring of threads.
pub(crate) fn examine(
    harness: &mut Harness,
    subjects: &[impl Subject],
    case: &Case,
    setting: &Setting,
    of_threads: &OfThreads<'_>,
) -> Verdict {
    // all ranks run all subjects before rank 0 judges: a wrong answer keeps none of them waiting
    let mut answers = Vec::new();
    for subject in subjects {
        answers.extend(merged(harness, subject, case, setting)?);
    }
    let Some(first) = answers.first() else { return Ok(()) };
    Judge::new(case).map_err(|error| error.to_string())?.check(first)?;
    let threads = of_threads.subject.run(case, of_threads.setting, 1);
    let threads = threads.map_err(|error| format!("over threads: {error}"))?;
    let threads = threads.first().ok_or("no answer over threads")?;
    for (answer, subject) in answers.iter().zip(subjects) {
        answer
            .same_bits(threads)
            .map_err(|wrong| format!("{}, other than over threads: {wrong}", subject.name()))?;
    }
    Ok(())
}

/// Runs a case on all ranks, and returns the answer with every rank's rows on rank 0. Collective.
fn merged(
    harness: &mut Harness,
    subject: &impl Subject,
    case: &Case,
    setting: &Setting,
) -> std::result::Result<Option<Answer>, String> {
    let mine = subject.run(case, setting, 1).map_err(|error| error.to_string());
    harness.share(mine.as_ref().map(drop).map_err(Clone::clone))?;
    let mut answer = mine?.pop().ok_or("no answer")?;
    let bits: Vec<u8> = arrays_mut(&mut answer)
        .iter()
        .flatten()
        .flat_map(|number| number.to_bits().to_le_bytes())
        .collect();
    let all = harness.gather(&bits)?;
    if harness.rank() != 0 {
        return Ok(None);
    }
    // rows of other ranks are zero bits, and values common to all ranks are equal, so `|` merges
    // them
    let merged = |n: usize| {
        let bits = all.iter().filter_map(|bytes| bytes.get(8 * n..)?.first_chunk::<8>());
        bits.fold(0, |merged, bits| merged | u64::from_le_bytes(*bits))
    };
    for (n, number) in arrays_mut(&mut answer).into_iter().flatten().enumerate() {
        *number = f64::from_bits(merged(n));
    }
    Ok(Some(answer))
}

fn arrays_mut(answer: &mut Answer) -> Vec<ArrayViewMutD<'_, f64>> {
    let Answer { out, lse, max, sum, ties, dq, dk, dv, dbias, dsinks } = answer;
    let mut all: Vec<_> = [out, dq, dk, dv]
        .into_iter()
        .chain(dbias)
        .map(|array| array.view_mut().into_dyn())
        .collect();
    let statistics = [lse, max, sum].into_iter().chain(ties);
    all.extend(statistics.map(|array| array.view_mut().into_dyn()));
    all.extend(dsinks.iter_mut().map(|array| array.view_mut().into_dyn()));
    all
}

/// Assigns rows to ranks at random, so that shards are uneven or empty.
fn random_layout(case: &Case, ranks: usize, draw: &mut Draw) -> Layout {
    let mut deal = |len: usize| {
        let mut shards = vec![Vec::new(); ranks];
        for row in draw.permutation(len) {
            shards[draw.below(ranks)].push(row as i64);
        }
        shards.into_iter().map(|shard| shard.into_iter().collect::<Runs>()).collect()
    };
    let dims = &case.spec.dims;
    Layout::Custom(Arc::new(CustomLayout { q: deal(dims.q_len), kv: deal(dims.kv_len) }))
}
