//! Sets the version of the command: that of the package and, if it is known, the commit.
//!
//! The commit is `ANNULUS_COMMIT` of the environment, or that of the repository that contains the
//! package, whose files are read without running git. A package from an archive has no commit.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Digits of an abbreviated commit: unique even in the largest repositories, such as Linux's.
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

/// Returns the commit that is checked out in the repository of the folder `package`.
fn of_repository(package: &Path) -> Option<String> {
    // the package is crates/cli; a repository that an unpacked archive is in does not count
    let dot_git = package.join("../../.git");
    // in a worktree, .git is a file with the path of the folder
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
    // changes with every commit, even if the branch is only in packed-refs
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

/// Abbreviates a commit; `None` if the text is not one.
fn short(commit: &str) -> Option<String> {
    let digits = commit.trim().get(..DIGITS)?;
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| digits.to_owned())
}
