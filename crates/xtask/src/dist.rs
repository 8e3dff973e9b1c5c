//! The command `dist`: a source archive that builds without a network.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::common::{Result, root, run, told};

/// Version of the package.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Options of the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DistOptions {
    out: PathBuf,
}

impl DistOptions {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self { out: PathBuf::from(".") };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--out" => {
                    let value = rest.next().ok_or("--out: got nothing, want a folder")?;
                    options.out = PathBuf::from(value);
                }
                other => return Err(format!("got {other}, want an option of dist")),
            }
        }
        Ok(options)
    }

    /// Writes `annulus-VERSION.tar.gz`: the files of HEAD, all crates that the two files Cargo.lock
    /// name, and a configuration by which cargo takes them.
    pub(crate) fn run(&self) -> Result<()> {
        let root = root();
        fs::create_dir_all(&self.out).map_err(|error| told(&self.out, error))?;
        let out = fs::canonicalize(&self.out).map_err(|error| told(&self.out, error))?;
        let name = format!("annulus-{VERSION}");
        let stage = out.join(format!(".{name}.{}", std::process::id()));
        let made = Self::stage(&root, &stage, &name)
            .and_then(|()| pack(&stage, &name, &out.join(format!("{name}.tar.gz"))));
        // also after an error; an old folder would be a part of nothing
        let removed = fs::remove_dir_all(&stage).map_err(|error| told(&stage, error));
        made.and(removed)?;
        println!("{}", out.join(format!("{name}.tar.gz")).display());
        Ok(())
    }

    /// Fills the folder `stage/name`.
    fn stage(root: &Path, stage: &Path, name: &str) -> Result<()> {
        let tree = stage.join(name);
        fs::create_dir_all(&tree).map_err(|error| told(&tree, error))?;
        let archive = stage.join("head.tar");
        let mut git = Command::new("git");
        run(git
            .current_dir(root)
            .args(["archive", "--format=tar", "-o"])
            .arg(&archive)
            .arg("HEAD"))?;
        run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&tree))?;

        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.current_dir(&tree).args(["vendor", "--locked", "--versioned-dirs"]);
        // the Python package is a workspace of its own
        cargo.args(["--sync", "python/Cargo.toml"]);
        let config = run(cargo.arg("vendor"))?;
        let file = tree.join(".cargo/config.toml");
        let mut text = fs::read_to_string(&file).map_err(|error| told(&file, error))?;
        text.push('\n');
        text.push_str(&config);
        fs::write(&file, text).map_err(|error| told(&file, error))
    }
}

/// Packs `stage/name` so that the same files give the same bytes.
fn pack(stage: &Path, name: &str, into: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    // the name and the time of the archive are not in it
    tar.args(["--use-compress-program", "gzip -n", "-cf"]);
    run(tar.arg(into).arg("-C").arg(stage).arg(name)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_unknown_ones_refused() {
        let parsed = |line: &str| {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            DistOptions::parse(&words)
        };
        assert_eq!(parsed(""), Ok(DistOptions { out: ".".into() }));
        assert_eq!(parsed("--out /tmp/a"), Ok(DistOptions { out: "/tmp/a".into() }));
        assert!(parsed("--out").unwrap_err().starts_with("--out: got nothing"));
        assert!(parsed("--prefix a").unwrap_err().starts_with("got --prefix"));
    }
}
