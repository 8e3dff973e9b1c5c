//! Measures the overlap of communication and computation of a ring over MPI, and its overhead
//! against one process. Runs under a launcher; rank 0 prints JSON lines.
//!
//! ```text
//! mpi-timing overlap [name=value …]    rounds of one pass: whole, without messages, without tiles,
//!                                      without both
//! mpi-timing tax [name=value …]        rounds of the ring and of rank 0 alone, in turn; rank 0 has
//!                                      as many threads as all ranks together
//! mpi-timing ticks [rounds=…]          time that a kernel's checks of the transport take while
//!                                      there are no messages
//! ```
//! Names: `q_len` (of the whole sequence), `heads`, `dim`, `rounds`, `layout` (contiguous, zigzag,
//! striped), `mask` (causal, full), `threads` (of a rank), and for `overlap` `paced_ms`. Inputs are
//! f32. `tests/hosts/run` and `benches/ring-tax.sh` run it.
//!
//! With `paced_ms` tiles compute nothing and use no core. They take the time of a device that
//! computes a rank's forward pass in so many milliseconds, so that ranks on one host do not compete
//! for cores.

mod overlap;
mod parts;
mod ring;

use std::process::ExitCode;

use annulus::{Error, Layout, Result};
use annulus_bench::Parameters;
use annulus_comm::mpi::Launch;

/// The attention to compute and the number of rounds.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) q_len: usize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) rounds: usize,
    pub(crate) threads: usize,
    pub(crate) layout: Layout,
    pub(crate) causal: bool,
    /// If given, tiles only wait: all tiles of a rank's forward pass take this many milliseconds.
    pub(crate) paced_ms: Option<usize>,
}

impl Problem {
    const NAMES: [&str; 8] =
        ["q_len", "heads", "dim", "rounds", "threads", "layout", "mask", "paced_ms"];

    fn parse(words: &[String]) -> Result<Self> {
        let given = Parameters::parse(words.iter().cloned(), &Self::NAMES)?;
        let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped];
        let layout = given.get("layout").unwrap_or("zigzag");
        let layout = layouts.into_iter().find(|of| of.name() == layout);
        let wrong = || Error::invalid("layout", "another", "contiguous, zigzag or striped");
        let paced_ms = given.get("paced_ms").map(|_| given.count("paced_ms", 1));
        Ok(Self {
            q_len: given.count("q_len", 8192)?,
            heads: given.count("heads", 8)?,
            dim: given.count("dim", 64)?,
            rounds: given.count("rounds", 5)?,
            threads: given.count("threads", 1)?,
            layout: layout.ok_or_else(wrong)?,
            causal: given.named("mask", "causal", ["causal", "full"], |of| of)? == ["causal"],
            paced_ms: paced_ms.transpose()?,
        })
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(wrong) => {
            eprintln!("mpi-timing {}: {wrong}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[String]) -> Result<()> {
    let wrong = || Error::invalid("measurement", words.join(" "), "overlap, tax or ticks");
    let (what, rest) = words.split_first().ok_or_else(wrong)?;
    let problem = Problem::parse(rest)?;
    let _launch = Launch::begin()?;
    match what.as_str() {
        "overlap" => overlap::measure(&problem),
        "tax" => ring::tax(&problem),
        "ticks" => ring::ticks(&problem),
        _ => Err(wrong()),
    }
}
