//! The `annulus` command: exact attention over files, and what goes with it.
//!
//! Every subcommand is one file or folder of this crate. Errors are one line on standard error; the exit code is 2 if the command line
//! has no meaning, 1 if something failed, 130 after an interrupt.
#![forbid(unsafe_code)]

mod arguments;
mod attend;
mod bench;
mod check;
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
mod pairs;
mod plan;
mod random;
mod report;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand, error::ErrorKind};

use failure::{Failure, Outcome, one_line};

const EXAMPLES: &str = "Examples:
  annulus demo                                        see it work
  annulus make --out in.safetensors --q-len 4096
  annulus attend --input in.safetensors --output out.safetensors --causal --ranks 4
  annulus plan --causal --q-len 65536 --ranks 8 --svg ring.svg
  annulus check cases/
  mpirun -n 4 annulus attend --input in.safetensors --output out.safetensors --causal

Each subcommand's --help has more.";

/// Exact attention over sequences that do not fit one device: keys and values travel around a ring of ranks
#[derive(Debug, Parser)]
#[command(name = "annulus", version, after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = false)]
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
    #[command(subcommand)]
    Trace(trace::TraceCommand),
}

fn main() -> ExitCode {
    let command = match CommandLine::try_parse() {
        Ok(line) => line.command,
        Err(error) => return refuse(&error),
    };
    interrupt::remove_unfinished_on_interrupt();
    match run(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
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
    }
}

/// Refuses a subcommand that is for one process, where a launcher has started several that would all do the same.
fn alone(subcommand: &str) -> Outcome {
    launcher::among_others().map_or(Ok(()), |place| {
        let size = place.size.map_or_else(|| "several".to_owned(), |size| size.to_string());
        Err(Failure::usage(subcommand, format!("{size} processes (started through {})", place.by), "one, started without the launcher"))
    })
}

/// Help and version as they are; anything else as one line that says where help is.
fn refuse(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // nothing is left to do if standard output is closed
        return if !launcher::speaks() || error.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let text = error.to_string();
    let what = text.split("\n\nUsage:").next().and_then(|text| text.split("\n\nFor more information").next()).unwrap_or(&text);
    let what = one_line(what.strip_prefix("error: ").unwrap_or(what));
    let subcommand = std::env::args()
        .nth(1)
        .filter(|name| ["attend", "check", "plan", "bench", "make", "demo", "doctor", "trace"].contains(&name.as_str()));
    let subcommand = subcommand.map(|name| format!("{name} ")).unwrap_or_default();
    crew::refuse(Failure::Usage(format!("{what}; try `annulus {subcommand}--help`"))).report()
}
