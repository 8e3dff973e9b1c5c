//! Compiles and runs programs of C against the library that these tests were built with.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

/// A folder that is removed in the end, with the library under its installed names.
pub(crate) struct Workspace {
    folder: PathBuf,
}

impl Workspace {
    pub(crate) fn new(name: &str) -> Self {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let library = library();
        for link in ["libannulus.so", "libannulus.so.1"] {
            symlink(&library, folder.join(link)).unwrap();
        }
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Compiles a program, without a warning.
    pub(crate) fn compile(&self, source: &Path) -> PathBuf {
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = self.path(source.file_stem().unwrap().to_str().unwrap());
        run(Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-o"])
            .arg(&program)
            .arg(source)
            .arg("-I")
            .arg(crate_folder.join("include"))
            .arg("-I")
            .arg(crate_folder.join("tests/c"))
            .arg("-L")
            .arg(&self.folder)
            .args(["-lannulus", "-lm"]));
        program
    }

    /// A command that finds the library.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", &self.folder);
        command
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // it lies in the target folder: what stays behind harms nobody
        let removed = fs::remove_dir_all(&self.folder);
        drop(removed);
    }
}

/// The shared library, beside this test.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libannulus_capi.so");
    assert!(library.exists(), "no {}", library.display());
    library
}

/// Runs a command and returns what it wrote to stdout; panics with all it wrote if it fails.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}
