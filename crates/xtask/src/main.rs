//! `cargo xtask install` builds libannulus and puts it, with all that a program of C, C++ or
//! Fortran needs, below a prefix. `cargo xtask dist` packs the sources with all crates that they
//! need. `cargo xtask options` writes the options of every language from `options.toml`.

mod install;
mod options;

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Parser;

/// Version of the package, which is that of the library.
const VERSION: &str = env!("CARGO_PKG_VERSION");

type Result<T, E = String> = std::result::Result<T, E>;

/// Tasks of the repository
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    Install(install::InstallOptions),
    Dist(install::DistOptions),
    /// Writes from options.toml what C, Fortran, Python, the command and docs/semantics.md have of
    /// the options of an attention
    Options,
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Install(options) => options.run(),
        Task::Dist(options) => options.run(),
        Task::Options => options::run(false),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the text of an error of a file.
fn told(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Runs a program to its end. Returns what it wrote to stdout and to stderr.
fn run(command: &mut Command) -> Result<(String, String)> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Err(format!("{name} ended with {}:\n{said}", output.status));
    }
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), said))
}

/// Returns the command of the cargo that runs this program.
fn cargo(folder: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(folder);
    cargo
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_has_no_conflicts() {
        <super::Task as clap::CommandFactory>::command().debug_assert();
    }
}
