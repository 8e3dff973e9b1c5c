//! Parts of all commands: the repository, other programs, errors of files.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

pub(crate) type Result<T, E = String> = std::result::Result<T, E>;

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the text of an error of a file.
pub(crate) fn told(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Runs a program to its end. Returns what it wrote to stdout.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} ended with {}:\n{said}", output.status));
    }
    String::from_utf8(output.stdout).map_err(|error| format!("{name}: {error}"))
}
