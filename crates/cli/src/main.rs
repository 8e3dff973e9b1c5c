//! The `annulus` command: exact ring attention over files, with planning, checking and benchmarks.
//!
//! Every subcommand is one file or folder of this crate. An error is one line on standard error,
//! except for those of clap.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | success |
//! | 1 | a file, the library or a rank failed, or a check did not pass |
//! | 2 | the command line is invalid |
//! | 128 + n | ended by signal n: 129 SIGHUP, 130 SIGINT, 143 SIGTERM |
#![forbid(unsafe_code)]

/// Types of the command line's values, and its errors.
mod arguments {
    pub(crate) mod mask;
    pub(crate) mod names;
    #[rustfmt::skip]
    pub(crate) mod option_flags;
    pub(crate) mod ring;
    pub(crate) mod values;
}
mod attend;
mod backend;
mod bench;
mod check;
mod decode;
mod demo;
mod doctor;
mod failure;
mod file;
#[cfg(feature = "cuda")]
mod gpus;
mod input;
mod interrupt;
mod job;
mod launcher;
mod make;
mod measure;
mod memory;
mod message;
mod pairs;
mod plan;
mod report;
mod trace;

use std::{io::Write, process::ExitCode};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;

use arguments::names;
use failure::{Failure, Outcome};
use report::complain;

/// Version and, if the build script found it, the commit.
const VERSION: &str = env!("ANNULUS_VERSION");

const EXAMPLES: &str = "Examples:
  annulus demo                                        # a first run
  annulus make --output in.safetensors --q-len 4096
  annulus attend --input in.safetensors --output out.safetensors --causal --ranks 4
  annulus plan --causal --q-len 65536 --ranks 8 --svg ring.svg
  annulus check cases/
  mpirun -n 4 annulus attend --input in.safetensors --output out.safetensors --causal

`annulus SUBCOMMAND --help` has more.";

/// Exact attention over sequences that do not fit one device: KV shards are sent around a ring
/// of ranks
#[derive(Debug, Parser)]
#[command(name = "annulus", version = VERSION, after_help = EXAMPLES, subcommand_required = true,
    arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Attend(attend::AttendFlags),
    Decode(decode::DecodeFlags),
    Check(check::CheckFlags),
    Plan(plan::PlanFlags),
    Bench(bench::BenchFlags),
    Measure(measure::MeasureFlags),
    Make(make::MakeFlags),
    Demo(demo::DemoFlags),
    Doctor(doctor::DoctorFlags),
    #[command(subcommand, arg_required_else_help = true)]
    Trace(trace::TraceCommand),
    Completions(CompletionsFlags),
}

const COMPLETIONS: &str = "Examples:
  annulus completions bash > ~/.local/share/bash-completion/completions/annulus
  annulus completions zsh > ~/.zfunc/_annulus
  annulus completions fish > ~/.config/fish/completions/annulus.fish";

/// Prints a script that completes subcommands and flags in a shell
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS)]
struct CompletionsFlags {
    /// Shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

impl CompletionsFlags {
    fn print(&self) {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut CommandLine::command(), "annulus", &mut script);
        say!("{}", String::from_utf8_lossy(&script).trim_end());
    }
}

fn main() -> ExitCode {
    let mut definition = with_negative_numbers(CommandLine::command());
    let parsed = definition.try_get_matches_from_mut(std::env::args_os()).and_then(|matches| {
        let line = CommandLine::from_arg_matches(&matches)?;
        Ok((line.command, names::paths(&definition, &matches)))
    });
    let (command, paths) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error),
    };
    interrupt::watch();
    match run(&command).map_err(|failure| names::of_paths(failure, &paths)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: &Command) -> Outcome {
    match command {
        Command::Attend(flags) => attend::run(flags),
        Command::Decode(flags) => decode::run(flags),
        Command::Check(flags) => check::run(flags),
        Command::Bench(flags) => bench::run(flags),
        Command::Measure(flags) => measure::run(flags),
        Command::Doctor(flags) => doctor::run(flags),
        Command::Plan(flags) => require_single("plan").and_then(|()| plan::run(flags)),
        Command::Demo(flags) => require_single("demo").and_then(|()| demo::run(flags)),
        Command::Make(flags) => require_single("make").and_then(|()| make::run(flags)),
        Command::Trace(command) => require_single("trace").and_then(|()| trace::run(command)),
        Command::Completions(flags) => require_single("completions").map(|()| flags.print()),
    }
}

/// Refuses a single-process subcommand under a launcher of several processes, each of which would
/// do the same work.
fn require_single(subcommand: &str) -> Outcome {
    launcher::one_of_several().map_or(Ok(()), |launched| {
        Err(Failure::usage(
            subcommand,
            format!("{} processes (started through {})", launched.count(), launched.launcher),
            "one, started without the launcher",
        ))
    })
}

/// Prints help, the version, or an error of the command line: once per job.
fn refuse(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && launcher::one_of_several().is_some() {
        let what = error.to_string();
        let what = what.trim_start_matches("error: ").to_owned();
        return job::refuse(Failure::Usage(what)).report();
    }
    let printed = if launcher::is_leader_output() { error.print() } else { Ok(()) };
    if let Err(unprinted) = printed
        && !error.use_stderr()
    {
        complain_of(&unprinted);
        return ExitCode::FAILURE;
    }
    u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Allows negative numbers as values of all flags, so that the flag's parser refuses them with a
/// message that names the flag.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|argument| {
            let takes_value = argument.get_action().takes_values();
            if takes_value { argument.allow_negative_numbers(true) } else { argument }
        })
        .mut_subcommands(with_negative_numbers)
}

/// Prints a line. If that fails, the command ends, after [`complain_of`], and removes its
/// unfinished files.
pub(crate) fn print_line(text: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let text = message::visible(&format!("{text}\n"));
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        complain_of(&error);
        interrupt::exit(1);
    }
}

/// Prints an error of standard output, such as a full disk. Prints nothing if the reader closed the
/// pipe, as `head` does.
pub(crate) fn complain_of(error: &std::io::Error) {
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        complain!("cannot write to standard output: {error}");
    }
}

/// As `println!`, but never panics.
macro_rules! say {
    ($($text:tt)*) => { $crate::print_line(format_args!($($text)*)) };
}
pub(crate) use say;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use annulus_plan::{CustomLayout, Layout};

    use super::*;

    #[test]
    fn help_names_the_receives_ahead_of_a_balanced_layout() {
        let rows = Arc::new(CustomLayout { q: Vec::new(), kv: Vec::new() });
        let ahead = Layout::Balanced(rows).receive_ahead();
        let want = format!("Default: 1, and {ahead} on a balanced layout");
        let command = CommandLine::command();
        for name in ["attend", "bench"] {
            let flags = command.find_subcommand(name).unwrap().get_arguments();
            let help = flags.filter(|flag| flag.get_id() == "receive_ahead");
            let help: Vec<_> = help.filter_map(|flag| flag.get_help()).collect();
            assert!(matches!(help[..], [text] if text.to_string().ends_with(&want)), "{help:?}");
        }
    }
}
