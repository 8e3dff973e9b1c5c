//! Gives the command its version: that of the package and, where it can be known, the commit.
//!
//! The commit is `ANNULUS_COMMIT` from the environment, or that of the repository which the package
//! stands in. Its files are read; no program is run. A package out of an archive has no commit.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Digits of a commit that tell it from any other of a repository of this size.
const DIGITS: usize = 12;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=ANNULUS_COMMIT");
    let given = env::var("ANNULUS_COMMIT").ok();
    let commit = given
        .and_then(|commit| short(&commit))
        .or_else(|| of_repository(Path::new(&env::var_os("CARGO_MANIFEST_DIR")?)));
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = commit.map_or_else(|| version.clone(), |commit| format!("{version} ({commit})"));
    println!("cargo:rustc-env=ANNULUS_VERSION={version}");
}

/// The commit that is checked out in the repository of the folder `package`.
fn of_repository(package: &Path) -> Option<String> {
    // crates/cli of the repository, and no other repository that an archive was unpacked in
    let dot_git = package.join("../../.git");
    // of a worktree, a file that names the folder
    let git = match fs::read_to_string(&dot_git) {
        Ok(text) => package.join("../..").join(text.strip_prefix("gitdir:")?.trim()),
        Err(_) => dot_git,
    };
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        println!("cargo:rerun-if-changed={}", path.display());
        Some(text)
    };
    let head = read(git.join("HEAD"))?;
    // grows with every commit, also where the branch's own file does not exist yet
    let log = git.join("logs/HEAD");
    if log.exists() {
        println!("cargo:rerun-if-changed={}", log.display());
    }
    let Some(reference) = head.trim().strip_prefix("ref: ") else { return short(&head) };
    let common = fs::read_to_string(git.join("commondir"))
        .map_or_else(|_| git.clone(), |text| git.join(text.trim()));
    if let Some(commit) = read(common.join(reference)) {
        return short(&commit);
    }
    let packed = read(common.join("packed-refs"))?;
    packed.lines().find_map(|line| short(line.strip_suffix(reference)?.strip_suffix(' ')?))
}

/// The first digits of a commit; `None` of anything else.
fn short(commit: &str) -> Option<String> {
    let digits = commit.trim().get(..DIGITS)?;
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| digits.to_owned())
}
