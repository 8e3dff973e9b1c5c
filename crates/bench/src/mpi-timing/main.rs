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

use annulus::Layout;
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
    fn parse(words: &[String]) -> Result<Self, String> {
        let mut problem = Self {
            q_len: 8192,
            heads: 8,
            dim: 64,
            rounds: 5,
            threads: 1,
            layout: Layout::Zigzag,
            causal: true,
            paced_ms: None,
        };
        for word in words {
            let (name, value) =
                word.split_once('=').ok_or_else(|| format!("{word}: want name=value"))?;
            let number = || {
                value
                    .parse::<usize>()
                    .ok()
                    .filter(|&number| number > 0)
                    .ok_or_else(|| format!("{word}: want a number above 0"))
            };
            match (name, value) {
                ("q_len", _) => problem.q_len = number()?,
                ("heads", _) => problem.heads = number()?,
                ("dim", _) => problem.dim = number()?,
                ("rounds", _) => problem.rounds = number()?,
                ("threads", _) => problem.threads = number()?,
                ("paced_ms", _) => problem.paced_ms = Some(number()?),
                ("layout", "contiguous") => problem.layout = Layout::Contiguous,
                ("layout", "zigzag") => problem.layout = Layout::Zigzag,
                ("layout", "striped") => problem.layout = Layout::Striped,
                ("mask", "causal") => problem.causal = true,
                ("mask", "full") => problem.causal = false,
                _ => return Err(format!("{word}: no such name or value")),
            }
        }
        Ok(problem)
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

fn run(words: &[String]) -> Result<(), String> {
    let (what, rest) = words.split_first().ok_or("want overlap, tax or ticks")?;
    let problem = Problem::parse(rest)?;
    let _launch = Launch::begin().map_err(|error| error.to_string())?;
    match what.as_str() {
        "overlap" => overlap::measure(&problem),
        "tax" => ring::tax(&problem),
        "ticks" => ring::ticks(&problem),
        _ => return Err("want overlap, tax or ticks".to_owned()),
    }
    .map_err(|error| error.to_string())
}
