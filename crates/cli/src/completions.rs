//! `annulus completions`: prints shell completions.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::{failure::Outcome, stdout::say};

const EXAMPLES: &str = "Examples:
  annulus completions bash > ~/.local/share/bash-completion/completions/annulus
  annulus completions zsh > ~/.zfunc/_annulus
  annulus completions fish > ~/.config/fish/completions/annulus.fish";

/// Prints a script that completes subcommands and flags in a shell
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsFlags {
    /// Shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Runs `annulus completions`.
pub(crate) fn run(flags: &CompletionsFlags, mut command: Command) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut command, "annulus", &mut script);
    say!("{}", String::from_utf8_lossy(&script).trim_end());
    Ok(())
}
