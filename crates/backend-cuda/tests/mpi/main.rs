//! Emulated devices in processes of their own: blocks go over MPI from device memory, or staged through the host, or over NCCL, which finds its ranks by
//! MPI. By whichever way, each rank's rows are those of one rank alone, to the same bits. The memory of an emulated device is the host's, so any MPI
//! takes it; the emulated NCCL has sockets between processes of one machine. Run under a launcher; see `scripts/mpi-test`.
//!
//! ```text
//! mpi                       rings, forward and backward
//! mpi refused               the last rank's communicator cannot be made
//! mpi lost joining          rank 1 is killed while communicators are made: the others report
//! mpi lost forward|backward rank 1 is killed before a group of messages in the middle of a pass: the others report
//! ```

mod failures;
mod rings;

use std::process::ExitCode;

use annulus::{Error, Result, comm::mpi::Launch};

fn run(arguments: &[&str]) -> Result<String> {
    let launch = Launch::begin()?;
    match arguments {
        [] => rings::all(),
        ["refused"] => failures::refused(),
        ["lost", moment] => failures::lost(launch, moment),
        other => Err(Error::invalid("arguments", other.join(" "), "none, refused, or lost joining|forward|backward")),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(said) => {
            print!("{said}{}", if said.is_empty() { "" } else { "\n" });
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("device memory over mpi: {error}");
            ExitCode::FAILURE
        }
    }
}
