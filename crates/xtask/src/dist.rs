//! The command `dist`: a source archive that builds without a network.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Result, VERSION, cargo, root, run, told};

/// Writes annulus-VERSION.tar.gz, which builds without a network
///
/// It has the files of the commit HEAD, the sources of all crates in Cargo.lock, and a
/// configuration of cargo that uses them.
#[derive(Debug, clap::Args)]
pub(crate) struct DistOptions {
    /// Folder of the archive
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
}

impl DistOptions {
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

        let mut cargo = cargo(&tree);
        cargo.args(["vendor", "--locked", "--versioned-dirs"]);
        // the Python package is a workspace of its own
        cargo.args(["--sync", "python/Cargo.toml"]);
        let (config, _) = run(cargo.arg("vendor"))?;
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
