//! The `annulus` command: exact attention over files, and what goes with it.
//!
//! Every subcommand is one file or folder of this crate. Errors are one line on standard error; the exit code is 2 if the command line
//! has no meaning, 1 if something failed, 128 and the number of the signal
//! after an interrupt (130 SIGINT, 143 SIGTERM, 129 SIGHUP).
#![forbid(unsafe_code)]

mod arguments;
mod attend;
mod bench;
mod check;
mod completions;
mod crew;
mod demo;
mod doctor;
mod engine;
mod failure;
mod file;
#[cfg(feature = "cuda")]
mod gpus;
mod input;
mod interrupt;
mod launcher;
mod make;
mod memory;
mod message;
mod pairs;
mod plan;
mod random;
mod report;
mod trace;

use std::{ffi::OsString, path::Path, process::ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};

use arguments::{names, refusal};
use failure::{Failure, Outcome};

/// The version and, where the build knew it, the commit.
const VERSION: &str = env!("ANNULUS_VERSION");

const EXAMPLES: &str = "Examples:
  annulus demo                                        see it work
  annulus make --output in.safetensors --q-len 4096
  annulus attend --input in.safetensors --output out.safetensors --causal --ranks 4
  annulus plan --causal --q-len 65536 --ranks 8 --svg ring.svg
  annulus check cases/
  mpirun -n 4 annulus attend --input in.safetensors --output out.safetensors --causal

Each subcommand's --help has more.";

/// Exact attention over sequences that do not fit one device: keys and values travel around a ring of ranks
#[derive(Debug, Parser)]
#[command(name = "annulus", version = VERSION, after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Attend(attend::AttendFlags),
    Check(check::CheckFlags),
    Plan(plan::PlanFlags),
    Bench(bench::BenchFlags),
    Make(make::MakeFlags),
    Demo(demo::DemoFlags),
    Doctor(doctor::DoctorFlags),
    #[command(subcommand, arg_required_else_help = true)]
    Trace(trace::TraceCommand),
    Completions(completions::CompletionsFlags),
}

fn main() -> ExitCode {
    memory::keep_address_space();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let mut tree = refusal::with_negative_numbers(CommandLine::command());
    let parsed = tree
        .try_get_matches_from_mut(&arguments)
        .and_then(|matches| CommandLine::from_arg_matches(&matches));
    let command = match parsed {
        Ok(line) => line.command,
        Err(error) => return refuse(&error, &tree, &arguments),
    };
    interrupt::watch();
    match run(&command).map_err(|failure| names::of_paths(failure, &command.paths())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

impl Command {
    /// The files that flags name, for errors that are about one of them.
    fn paths(&self) -> Vec<(&'static str, &Path)> {
        match self {
            Self::Attend(flags) => flags.paths(),
            Self::Check(flags) => flags.paths(),
            Self::Plan(flags) => flags.paths(),
            Self::Make(flags) => flags.paths(),
            Self::Demo(flags) => flags.paths(),
            Self::Trace(command) => command.paths(),
            Self::Bench(_) | Self::Doctor(_) | Self::Completions(_) => Vec::new(),
        }
    }
}

fn run(command: &Command) -> Outcome {
    match command {
        Command::Attend(flags) => attend::run(flags),
        Command::Check(flags) => check::run(flags),
        Command::Bench(flags) => bench::run(flags),
        Command::Doctor(flags) => doctor::run(flags),
        Command::Plan(flags) => alone("plan").and_then(|()| plan::run(flags)),
        Command::Demo(flags) => alone("demo").and_then(|()| demo::run(flags)),
        Command::Make(flags) => alone("make").and_then(|()| make::run(flags)),
        Command::Trace(command) => alone("trace").and_then(|()| trace::run(command)),
        Command::Completions(flags) => {
            alone("completions").and_then(|()| completions::run(flags, CommandLine::command()))
        }
    }
}

/// Refuses a subcommand that is for one process, where a launcher has started several that would all do the same.
fn alone(subcommand: &str) -> Outcome {
    launcher::among_others().map_or(Ok(()), |place| {
        let size = place.size.map_or_else(|| "several".to_owned(), |size| size.to_string());
        Err(Failure::usage(
            subcommand,
            format!("{size} processes (started through {})", place.by),
            "one, started without the launcher",
        ))
    })
}

/// Help and version as they are; anything else as one line that says where help is.
fn refuse(error: &clap::Error, tree: &clap::Command, arguments: &[OsString]) -> ExitCode {
    // nothing is left to do if nobody can read it
    let printed = || !launcher::speaks() || error.print().is_ok();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion if printed() => ExitCode::SUCCESS,
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::FAILURE,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            printed();
            ExitCode::from(2)
        }
        _ => crew::refuse(refusal::of(error, tree, arguments)).report(),
    }
}
