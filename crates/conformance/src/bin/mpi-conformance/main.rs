//! The transport over MPI, examined by as many processes as a launcher starts. One word says what; `scripts/mpi-test` runs them all.
//!
//! | word | what must hold |
//! |---|---|
//! | `messages` | the transport's contract: any pattern arrives intact, every misuse is its typed error, gathers, aborts, goodbyes |
//! | `cases SEEDS` | random and golden cases over the ring: the oracle's numbers, the bits of the ring of threads, the predicted bytes |
//! | `pairs` | a covering array of all choices: as `cases`, on nodes that are made up every other time |
//! | `bytes` | what the transport counts = what the schedule predicts = a count of every visible pair, and the published shares |
//! | `mismatch` | a field that differs on one rank is the same error on all, in under a second, before any data moves |
//! | `host` | a host program's own `MPI_Init_thread(FUNNELED)` and sub-communicators, two rings at once, one dropped after `MPI_Finalize` |
//! | `host-split` | a communicator that was split off has the world's highest tag, and a ring over it works |
//! | `host-late` | the last rank comes too late: an error on all, and other communicators work on |
//! | `lost PASS MOMENT` | rank 1 is killed: every other rank names it by deadline + 1 s (the launcher must let them run on) |
//! | `slow` | the last rank is silent for half of the deadline: it is warned of, once, and nothing fails |
//! | `panic` | the last rank panics: the job ends with a status that is not 0 |
//!
//! `--synchronous` lets every send be an `MPI_Issend`; `--piece-bytes N` cuts messages into pieces.

mod bytes;
mod cases;
mod failures;
mod harness;
mod host;
mod late;
mod messages;
mod mismatch;
mod mortal;
mod split;

use std::process::ExitCode;

use annulus_comm::mpi::{Launch, Settings};

use self::harness::{Harness, Verdict};

const WORDS: &str = "want messages, cases SEEDS, pairs, bytes, mismatch, host, host-split, host-late, \
    lost PASS MOMENT, slow or panic";

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
    if let Some(place) = words.iter().position(|word| word == "--synchronous") {
        words.remove(place);
        settings.synchronous = true;
    }
    if let Some(place) = words.iter().position(|word| word == "--piece-bytes") {
        let number = words.get(place + 1).ok_or("--piece-bytes wants a number")?;
        settings.piece_bytes =
            number.parse().map_err(|error| format!("--piece-bytes {number}: {error}"))?;
        words.drain(place..place + 2);
    }
    Ok(settings)
}

fn run(words: &[String], settings: &Settings) -> Verdict {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    // host programs that initialise MPI themselves
    match words[..] {
        ["host"] => return host::host(settings),
        ["host-split"] => return split::host_split(settings),
        ["host-late"] => return late::host_late(settings),
        _ => {}
    }
    let launch = Launch::begin().map_err(|error| error.to_string())?;
    let mut harness = Harness::new().map_err(|error| error.to_string())?;
    let verdict = match words[..] {
        ["messages"] => messages::all(&mut harness, settings),
        ["cases", seeds] => cases::all(
            &mut harness,
            settings,
            seeds.parse().map_err(|error| format!("{seeds}: {error}"))?,
        ),
        ["pairs"] => cases::pairs(&mut harness, settings),
        ["bytes"] => bytes::all(&mut harness, settings),
        ["slow"] => failures::slow(&mut harness, settings),
        ["mismatch"] => mismatch::all(&mut harness, settings),
        ["lost", pass, moment] => return failures::lost(launch, harness, settings, pass, moment),
        ["panic"] => failures::panic(&mut harness, settings),
        _ => Err(WORDS.to_owned()),
    };
    // every rank ends as the worst one did
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
