//! Emulated devices in separate processes: blocks over MPI from device memory, staged through the
//! host, or over NCCL with MPI as bootstrap. Each rank's rows must be bitwise the same over every
//! transport, and equal those of one rank alone. Emulated device memory is host memory, so any MPI
//! accepts it. Run under a launcher; see `scripts/mpi-test`.
//!
//! ```text
//! mpi                       rings, forward and backward
//! mpi decides RUNTIME       only memory of this runtime (cuda, hip) is passed to MPI
//! mpi lost joining          rank 1 is killed while communicators are created: the others report it
//! mpi lost forward|backward rank 1 is killed in the middle of a pass: the others report it
//! ```

mod rings;

use std::process::ExitCode;

use annulus::{Error, Result, comm::mpi::Launch};

fn run(arguments: &[&str]) -> Result<String> {
    let launch = Launch::begin()?;
    match arguments {
        [] => rings::all(),
        ["decides", runtime] => rings::decides(runtime),
        ["lost", moment] => rings::lost(launch, moment),
        other => Err(Error::invalid(
            "arguments",
            other.join(" "),
            "none, decides cuda|hip, or lost joining|forward|backward",
        )),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(text) => {
            print!("{text}{}", if text.is_empty() { "" } else { "\n" });
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("device memory over mpi: {error}");
            ExitCode::FAILURE
        }
    }
}
