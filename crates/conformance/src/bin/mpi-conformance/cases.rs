//! Cases over a ring of processes: the oracle's numbers, and the bits of the ring of threads. Every
//! run also compares the bytes sent with the prediction. Strategies and KV caches run on a backend
//! that is chosen by name.

use annulus::{
    Attention, Cache, CacheShape, DType, Dims, Element, LocalRing, Plan, Result, Runtime, Setup,
    Tensors,
    backend::{AnyBackend, BackendName, Cpu},
};
use annulus_comm::{
    Deadline,
    mpi::{Mpi, Settings},
};
use annulus_conformance::{
    Answer, Case, Crossings, Draw, FacadeOn, HostMemory, Judge, Placed, PlanSubject, RankSetup,
    RingSubject, Setting, Subject, subjects,
    suite::{self, kv_cache::Sequence},
};
use annulus_core::{BackwardMode, Host, Placement, Transport};
use annulus_plan::Route;
use ndarray::{ArrayViewMutD, s};

use crate::{Harness, Verdict, ensure};

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

/// Returns a setting of ranks on two nodes, and the same with a route that does not depend on
/// nodes. A route that is left to the mask is one over nodes by name, if these have as many ranks
/// each.
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

/// Runs random cases, and every kind of key list: in one pass, in two, and in the reproducible order.
pub(crate) fn random(harness: &mut Harness, settings: &Settings, seeds: u64) -> Verdict {
    let subject = subject(settings, None);
    let threads = subjects::cpu();
    let ranks = harness.ranks();
    let random = (0..seeds).map(|seed| {
        let draw = &mut Draw::new(!seed);
        let case = Case::random(seed).in_dtype(draw.pick(subject.dtypes()));
        let setting = suite::random_setting(&case, ranks, draw);
        (seed, case, setting)
    });
    let listed = (0..).zip(suite::listed_cases(2)).map(|(number, mut case)| {
        match number % 3 {
            0 => case.spec.leaf_rows = Some(64),
            1 => case.spec.backward = BackwardMode::TwoPass,
            _ => {}
        }
        let layout = suite::LAYOUTS[annulus_core::index(number % 2) * 2].clone();
        (number, case.in_dtype(DType::F32), Setting::new(ranks, layout))
    });
    for (seed, case, setting) in random.chain(listed) {
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
    Judge::new(&suite::dense_twin(case)).map_err(|error| error.to_string())?.check(first)?;
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

/// Runs random cases under the ring, every grid of heads × queries × keys that the ranks admit, and
/// every published strategy that the case admits.
pub(crate) fn strategies(
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
        let ranks = harness.ranks();
        let grids = suite::strategy_settings(&case, ranks, annulus_core::index(seed));
        for setting in suite::published_settings(&case, ranks).into_iter().chain(grids) {
            let of_threads = OfThreads { subject: &threads, setting: &setting };
            let subjects = std::slice::from_ref(&over_mpi);
            let verdict = examine(harness, subjects, &case, &setting, &of_threads);
            let context = |wrong| format!("seed {seed} on {setting}, {name}: {wrong}");
            harness.share(verdict.map_err(context))?;
        }
    }
    Ok(())
}

const DIMS: Dims =
    Dims { batch: 1, q_len: 300, kv_len: 300, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };
const SHAPE: CacheShape = CacheShape::new(1, 4, 8).kv_heads(2).value_dim(6);

/// Tokens in f64 on the CPU, and the reproducible order.
pub(crate) fn tokens(harness: &mut Harness, settings: &Settings) -> Verdict {
    let cpu = AnyBackend::open(annulus::backend::BackendName::Cpu, None, 1)
        .map_err(|error| error.to_string());
    cpu.and_then(|cpu| tokens_on::<f64>(harness, settings, &cpu, 1e-13))?;
    let same = reproducible(settings).map_err(|error| format!("reproducible: {error}"));
    let verdict = same.and_then(|same| {
        ensure(same, || "the reproducible KV cache has other bits than one attention".into())
    });
    harness.share(verdict)
}

/// Requires that tokens in `T` on a backend differ from the oracle by less than `most`, and that
/// each of them sends the same bytes.
pub(crate) fn tokens_on<T: Element>(
    harness: &mut Harness,
    settings: &Settings,
    backend: &AnyBackend,
    most: f64,
) -> Verdict {
    let verdict =
        run_cache::<T>(settings, backend).map_err(|error| format!("the KV cache: {error}"));
    let verdict = verdict.and_then(|(worst, bytes)| {
        ensure(worst < most, || format!("the KV cache differs from the oracle by {worst}"))?;
        // out, maximum and sum of four heads to each of the others
        let row_bytes = 6 * T::DTYPE.bytes() + 2 * T::DTYPE.accumulator().bytes();
        let token = (harness.ranks() as u64 - 1) * 4 * row_bytes as u64;
        ensure(bytes.len() == 10 && bytes.iter().all(|&bytes| bytes == token), || {
            format!("tokens cost {bytes:?} bytes, want {token}")
        })
    });
    harness.share(verdict)
}

/// Returns true if decoding in the reproducible order has the bits of one attention, and sends the
/// predicted bytes.
fn reproducible(settings: &Settings) -> Result<bool> {
    let dims = Dims { q_len: 1300, kv_len: 1300, ..DIMS };
    let all = Sequence::<f64>::new(dims, None);
    let attention = Attention::new().dtype(DType::F64).causal(true).reproducible(true);
    let tensors = Tensors::new(all.q.view(), all.k.view(), all.v.view());
    let whole = LocalRing::new(&attention, dims, 1)?.forward(&tensors)?;
    let transport = Mpi::world(settings.clone())?;
    let mut cache = Cache::new(&attention, &Runtime::new(), SHAPE, transport)?;
    let mut same = true;
    let mut first = 0;
    for end in [700, 1290].into_iter().chain(1291..=dims.q_len) {
        let forward = all.step(&mut cache, first..end)?;
        let predicted = cache.bytes_predicted(end - first);
        same &= forward.out == whole.out.slice(s![.., first..end, .., ..])
            && forward.lse == whole.lse.slice(s![.., .., first..end])
            && forward.reports[0].bytes_sent == predicted;
        first = end;
    }
    Ok(same)
}

/// Returns the worst difference from the oracle, and the bytes of each token.
fn run_cache<T: Element>(settings: &Settings, backend: &AnyBackend) -> Result<(f64, Vec<u64>)> {
    let all = Sequence::<T>::new(DIMS, None);
    let attention = Attention::new().dtype(T::DTYPE).causal(true).sliding_window(200, 0);
    let want = all.truth(&attention, DIMS)?;
    let transport = Mpi::world(settings.clone())?;
    let runtime = Runtime::new().backend(backend.clone());
    let mut cache = Cache::new(&attention, &runtime, SHAPE.page_rows(16), transport)?;
    let mut worst: f64 = 0.0;
    let mut bytes = Vec::new();
    let mut first = 0;
    for end in [150, 290].into_iter().chain(291..=DIMS.q_len) {
        let forward = all.step(&mut cache, first..end)?;
        let pairs = forward.out.iter().zip(want.out.slice(s![.., first..end, .., ..]));
        worst = pairs.map(|(got, want)| (got.to_f64() - want).abs()).fold(worst, f64::max);
        if end == first + 1 {
            bytes.push(forward.reports[0].bytes_sent);
        }
        first = end;
    }
    Ok((worst, bytes))
}
