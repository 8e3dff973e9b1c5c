//! Conformance tests of the transport over MPI, run by as many processes as a launcher starts. One
//! word selects the test; `scripts/mpi-test` runs all of them.
//!
//! | word | requirement |
//! |---|---|
//! | `messages` | the transport's contract: any pattern arrives intact; every misuse is its typed error; all-gathers, aborts, dropped endpoints |
//! | `cases SEEDS` | random cases and key lists over the ring: the oracle's numbers, the bits of the ring of threads, the predicted bytes (golden cases: `annulus check`) |
//! | `pairs` | a covering array of all choices: as `cases`, every other time with an invented placement on two nodes; with standard sends, synchronous sends and announced messages |
//! | `cache` | a KV cache: the oracle's numbers, and constant bytes per token |
//! | `backend NAME SEEDS` | every strategy on this backend: the oracle's numbers, the bits of the ring of threads, the predicted bytes; a KV cache in f32 |
//! | `sums` | gradients that are summed over ranks by slices: the bits of a ring of threads, and the predicted bytes |
//! | `tangents` | JVP and double backward: the bits of a ring of threads, and the predicted bytes |
//! | `host` | a host program's own `MPI_Init_thread(FUNNELED)` and sub-communicators with the world's highest tag, two rings at once, one dropped after `MPI_Finalize` |
//! | `host-late` | the last rank comes late: the others wait and the host's communicator works; with a limit, an error on all ranks; a limit on an adopted communicator leaves the host's intact |
//! | `lost PASS MOMENT` | rank 1 is killed, or stopped for ever: every other rank names it by deadline + 1 s (the launcher must keep them running) |
//! | `ahead` | receives with agreed lengths start when they are posted, unless a rank announces its messages |
//! | `links` | on hosts with a link for each rank (`tests/hosts/rails`): rails send the same bytes over every link, a relay uses one link of each host |
//! | `shared` | plans over one endpoint: calls interleaved and in threads, drops in any order, refusals, lost ranks, aborts |
//! | `control` | a rank is late, aborts or leaves: all others get the same error |
//! | `away` | a rank is busy between two calls for two deadlines: nothing fails, and at an arrival deadline the call is made again |
//! | `suspended` | all ranks are stopped within a pass for longer than the deadline: the same bits |
//! | `debugged` | the last rank is stopped within a pass for longer than the deadline, and `ANNULUS_DEADLINE` is 0: the same bits |
//! | `slow` | half of the deadline is silence of one rank: its watchers warn once, nothing fails |
//! | `panic` | the last rank panics: the job ends with a status other than 0 |
//!
//! `--synchronous` makes every send an `MPI_Issend`; `--piece-bytes N` splits messages into pieces;
//! `--announce` announces every message.

mod ahead;
mod cases;
mod failures;
#[cfg(feature = "link-mpi")]
mod host;
mod messages;
mod scale;
mod shared;
mod tangents;

use std::{process::ExitCode, time::Duration};

use annulus::{
    Plan, Tensors,
    backend::{AnyBackend, BackendName},
};
use annulus_comm::{
    Deadline, all_gather,
    mpi::{Launch, Mpi, Settings},
};
use annulus_core::{Control, Host, Result};
use ndarray::Array4;

const USAGE: &str = "want messages, cases SEEDS, pairs, cache, backend NAME SEEDS, sums, \
    tangents, host, host-late, ahead, links, shared, control, away, suspended, \
    debugged, lost PASS MOMENT, slow or panic";

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    match settings(&mut words).and_then(|settings| run(&words, &settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            eprintln!("mpi-conformance {}: {wrong}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn settings(words: &mut Vec<String>) -> Result<Settings, String> {
    let mut settings = Settings::default();
    if let Some(found) = words.iter().position(|word| word == "--synchronous") {
        words.remove(found);
        settings.synchronous = true;
    }
    if let Some(found) = words.iter().position(|word| word == "--announce") {
        words.remove(found);
        settings.announce = true;
    }
    if let Some(found) = words.iter().position(|word| word == "--piece-bytes") {
        let number = words.get(found + 1).ok_or("--piece-bytes wants a number")?;
        settings.piece_bytes =
            number.parse().map_err(|error| format!("--piece-bytes {number}: {error}"))?;
        words.drain(found..found + 2);
    }
    Ok(settings)
}

fn run(words: &[String], settings: &Settings) -> Verdict {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    // these initialise MPI themselves, as a host program does, and with an MPI that they are linked
    // with; over one that is loaded, the hosts are the programs of scripts/mpi-abi-test
    #[cfg(feature = "link-mpi")]
    match words[..] {
        ["host"] => return host::host(settings),
        ["host-late"] => return host::host_late(settings),
        _ => {}
    }
    let launch = Launch::begin().map_err(|error| error.to_string())?;
    let mut harness = Harness::new().map_err(|error| error.to_string())?;
    let verdict = match words[..] {
        ["messages"] => messages::all(&mut harness, settings),
        ["cases", seeds] => cases::random(&mut harness, settings, number(seeds)?),
        ["pairs"] => cases::pairs(&mut harness, settings),
        ["cache"] => cases::tokens(&mut harness, settings),
        ["backend", name, seeds] => on_backend(&mut harness, settings, name, seeds),
        ["sums"] => ahead::sums(&mut harness, settings),
        ["tangents"] => tangents::all(&mut harness, settings),
        ["ahead"] => ahead::all(&mut harness, settings),
        ["links"] => scale::links(&mut harness, settings),
        ["shared"] => shared::all(&mut harness, settings),
        ["control"] => scale::control(&mut harness, settings),
        ["away"] => failures::away(&mut harness, settings),
        ["suspended"] => failures::suspended(&mut harness, settings),
        ["debugged"] => failures::debugged(&mut harness, settings),
        ["slow"] => failures::slow(&mut harness, settings),
        ["lost", pass, moment] => return failures::lost(launch, harness, settings, pass, moment),
        ["panic"] => failures::panic(&mut harness, settings),
        _ => Err(USAGE.to_owned()),
    };
    // every rank exits with the first failure of any
    let verdict = harness.share(verdict);
    if let (Ok(()), 0) = (&verdict, harness.rank()) {
        let library = launch.library().map_err(|error| error.to_string())?;
        let library = library.lines().next().unwrap_or_default();
        println!(
            "ok: {} on {} ranks{} ({library})",
            words.join(" "),
            harness.ranks(),
            if settings.synchronous { ", synchronous" } else { "" }
        );
    }
    drop(harness);
    verdict
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|error| format!("{word}: {error}"))
}

/// Runs the strategies and a KV cache on the backend of this name, on the CPU with one thread a
/// rank.
fn on_backend(harness: &mut Harness, settings: &Settings, name: &str, seeds: &str) -> Verdict {
    let seeds = number(seeds)?;
    let opened = name.parse().and_then(|name: BackendName| AnyBackend::open(name, None, 0));
    let opened = opened.map_err(|error| error.to_string());
    harness.share(opened.as_ref().map(drop).map_err(Clone::clone))?;
    let backend = opened?;
    cases::strategies(harness, settings, &backend, seeds)?;
    cases::tokens_on::<f32>(harness, settings, &backend, 2e-6)
}

/// `Ok`, or the failure as text.
pub(crate) type Verdict = std::result::Result<(), String>;

/// Longest wait of a rank for the others, which may compute a slow case meanwhile.
const DEADLINE: Duration = Duration::from_secs(120);

/// One rank of a test.
pub(crate) struct Harness {
    endpoint: Deadline<Mpi, Host>,
    round: u64,
}

impl Harness {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { endpoint: Deadline::new(Mpi::world(Settings::default())?, DEADLINE)?, round: 0 })
    }

    pub(crate) fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.endpoint.ranks()
    }

    /// Returns every rank's bytes. Collective.
    pub(crate) fn gather(&mut self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, String> {
        self.round += 1;
        all_gather::<Host>(&mut self.endpoint, self.round, bytes)
            .map_err(|error| format!("the harness: {error}"))
    }

    /// Returns the first failure of any rank, the same on every rank. Collective.
    pub(crate) fn share(&mut self, verdict: Verdict) -> Verdict {
        let text = verdict.err().unwrap_or_default();
        let all = self.gather(text.as_bytes())?;
        match all.iter().enumerate().find(|(_, text)| !text.is_empty()) {
            None => Ok(()),
            Some((rank, text)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(text))),
        }
    }
}

/// Returns an error unless `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}

/// Returns q and k of a rank's rows, which differ between rows and heads.
pub(crate) fn tensors(plan: &Plan) -> [Array4<f32>; 2] {
    let rows: Vec<i64> = plan.q_rows().iter().collect();
    [2, 1].map(|heads| {
        Array4::from_shape_fn((1, rows.len(), heads, 4), |(_, row, head, dim)| {
            ((rows[row] * 7 + (head * 3 + dim) as i64) % 11) as f32 * 0.1
        })
    })
}

/// out, lse, dq, dk and dv of a rank, as bits.
pub(crate) type Bits = Vec<u32>;

/// Runs forward and backward; calls `between` after the forward pass.
pub(crate) fn passes(plan: &mut Plan, between: impl FnOnce()) -> Result<Bits> {
    let [q, kv] = tensors(plan);
    let tensors = Tensors::new(q.view(), kv.view(), kv.view());
    let forward = plan.forward(&tensors)?;
    between();
    let backward = plan.backward(&tensors, &forward, q.view(), None)?;
    let all = forward.out.iter().chain(&forward.lse);
    let all = all.chain(&backward.dq).chain(&backward.dk).chain(&backward.dv);
    Ok(all.map(|number| number.to_bits()).collect())
}

/// Runs forward and backward.
pub(crate) fn bits(plan: &mut Plan) -> Result<Bits> {
    passes(plan, || ())
}
