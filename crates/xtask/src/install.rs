//! The commands `install`, which builds libannulus into a prefix, and `dist`, a source archive that
//! builds without a network.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Result, VERSION, cargo, root, run, told};

/// The number in the SONAME: ANNULUS_ABI_VERSION of `crates/capi`.
const ABI_VERSION: &str = "1";

/// Builds libannulus and installs it below a prefix:
///
///   lib/libannulus.so, .so.1, .so.0.1.0   the shared library, with its SONAME
///   lib/libannulus.a                      the static library
///   include/annulus.h, annulus.hpp        for C and C++17
///   lib/pkgconfig/annulus.pc              and annulus-mpi.pc with the feature mpi or mpi-abi
///   lib/cmake/annulus/                    find_package(annulus): target annulus::annulus
///   share/annulus/annulus.f90             source of the Fortran module
///   share/annulus/annulus_mpi_shim.c      with the feature mpi-abi, for an MPI with another ABI
///   share/annulus/examples/               programs in C, C++ and Fortran
///   share/doc/annulus/                    documentation and licences
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct InstallOptions {
    /// Folder below which everything is installed
    #[arg(long, value_name = "DIR")]
    prefix: PathBuf,
    /// Features of the library, separated by commas: mpi is built with $MPICC, mpi-abi loads MPI at
    /// run time
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = ["mpi", "mpi-abi", "cuda", "nccl", "wgpu"])]
    features: Vec<String>,
    /// Profile of cargo
    #[arg(long, value_name = "NAME", default_value = "release")]
    profile: String,
    /// Passed to cargo
    #[arg(long)]
    offline: bool,
}

impl InstallOptions {
    fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|name| name == feature)
    }

    fn has_mpi(&self) -> bool {
        self.has("mpi") || self.has("mpi-abi")
    }

    /// Features as options of cargo. An MPI that is loaded is one that is not linked, as it is by
    /// default.
    fn cargo_features(&self) -> Vec<String> {
        let names = self.features.iter().map(String::as_str);
        let names = names.map(|name| if name == "mpi-abi" { "mpi" } else { name });
        let names = names.collect::<Vec<_>>().join(",");
        let defaults = self.has("mpi-abi").then(|| "--no-default-features".to_owned());
        defaults.into_iter().chain(["--features".to_owned(), names]).collect()
    }

    /// Features as `annulus_features` names them.
    fn library_features(&self) -> String {
        let mut names: Vec<&str> = self.features.iter().map(String::as_str).collect();
        if self.has("mpi-abi") {
            names.insert(0, "mpi");
        }
        names.join(" ")
    }

    /// Builds and installs.
    pub(crate) fn run(&self) -> Result<()> {
        if self.has("mpi") && self.has("mpi-abi") {
            return Err("--features: got mpi and mpi-abi, want one of them".to_owned());
        }
        let root = root();
        let capi = root.join("crates/capi");
        let built = self.build(&root)?;
        fs::create_dir_all(&self.prefix).map_err(|error| told(&self.prefix, error))?;
        // the files below name the prefix
        let prefix = fs::canonicalize(&self.prefix).map_err(|error| told(&self.prefix, error))?;

        let versioned = format!("libannulus.so.{VERSION}");
        let soname = format!("libannulus.so.{ABI_VERSION}");
        copy(&built.shared, &prefix.join("lib").join(&versioned))?;
        link(&versioned, &prefix.join("lib").join(&soname))?;
        link(&soname, &prefix.join("lib/libannulus.so"))?;
        copy(&built.fixed, &prefix.join("lib/libannulus.a"))?;

        let definitions = if self.has("mpi-abi") {
            "-DANNULUS_WITH_MPI -DANNULUS_MPI_ABI"
        } else {
            "-DANNULUS_WITH_MPI"
        };
        let fill = |template: &str| {
            template
                .replace("@PREFIX@", &prefix.display().to_string())
                .replace("@VERSION@", VERSION)
                .replace("@ABI_VERSION@", ABI_VERSION)
                .replace("@FEATURES@", &self.library_features())
                .replace("@HAS_MPI@", if self.has_mpi() { "TRUE" } else { "FALSE" })
                .replace("@MPI_DEFINITIONS@", definitions)
                .replace("@STATIC_LIBS@", &built.static_libs)
        };
        let mut filled = vec![
            ("annulus.pc.in", "lib/pkgconfig/annulus.pc"),
            ("annulus-config.cmake.in", "lib/cmake/annulus/annulus-config.cmake"),
            ("annulus-config-version.cmake.in", "lib/cmake/annulus/annulus-config-version.cmake"),
        ];
        if self.has_mpi() {
            filled.push(("annulus-mpi.pc.in", "lib/pkgconfig/annulus-mpi.pc"));
        }
        for (template, name) in filled {
            let template = capi.join("install").join(template);
            let text = fs::read_to_string(&template).map_err(|error| told(&template, error))?;
            write(&prefix.join(name), &fill(&text))?;
        }

        for (from, into) in [
            (capi.join("include/annulus.h"), "include"),
            (capi.join("include/annulus.hpp"), "include"),
            (capi.join("fortran/annulus.f90"), "share/annulus"),
            (root.join("docs/embedding.md"), "share/doc/annulus"),
            (root.join("docs/semantics.md"), "share/doc/annulus"),
            (root.join("LICENSE-MIT"), "share/doc/annulus"),
            (root.join("LICENSE-APACHE"), "share/doc/annulus"),
        ] {
            copy_into(&from, &prefix.join(into))?;
        }
        if self.has("mpi-abi") {
            copy_into(
                &root.join("crates/mpi/shim/annulus_mpi_shim.c"),
                &prefix.join("share/annulus"),
            )?;
        }
        let examples = capi.join("examples");
        let entries = fs::read_dir(&examples).map_err(|error| told(&examples, error))?;
        for entry in entries {
            let file = entry.map_err(|error| told(&examples, error))?.path();
            copy_into(&file, &prefix.join("share/annulus/examples"))?;
        }
        println!("annulus {VERSION} is installed in {}", prefix.display());
        Ok(())
    }

    /// Builds the libraries with cargo.
    fn build(&self, root: &Path) -> Result<Built> {
        let mut cargo = cargo(root);
        cargo.args(["rustc", "--package", "annulus-capi", "--lib"]);
        cargo.args(["--profile", &self.profile]).args(self.cargo_features());
        // stdout: which files cargo has built; stderr: what a program links with the static library
        cargo.args(["--message-format", "json-render-diagnostics"]);
        if self.offline {
            cargo.arg("--offline");
        }
        let (messages, said) = run(cargo.args(["--", "--print", "native-static-libs"]))?;
        let artifact = |name: &str| {
            let ends = format!("/{name}");
            let found = messages.split('"').find(|text| text.ends_with(&ends)).map(PathBuf::from);
            found.ok_or_else(|| format!("cargo has built no {name}"))
        };
        let libs = said.lines().find_map(|line| line.split_once("native-static-libs: "));
        let libs = libs.map(|(_, libs)| libs.trim().to_owned());
        Ok(Built {
            shared: artifact("libannulus_capi.so")?,
            fixed: artifact("libannulus_capi.a")?,
            static_libs: libs.ok_or("cargo did not say what the static library needs")?,
        })
    }
}

/// Libraries that cargo has built.
struct Built {
    shared: PathBuf,
    fixed: PathBuf,
    /// Options of the linker that a program needs with the static library.
    static_libs: String,
}

fn make_folder_of(file: &Path) -> Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|error| told(folder, error))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    make_folder_of(to)?;
    // a library that a program has loaded is replaced, never overwritten
    if to.symlink_metadata().is_ok() {
        fs::remove_file(to).map_err(|error| told(to, error))?;
    }
    fs::copy(from, to).map(drop).map_err(|error| told(from, error))
}

fn copy_into(from: &Path, folder: &Path) -> Result<()> {
    let name = from.file_name().ok_or_else(|| format!("{}: no file", from.display()))?;
    copy(from, &folder.join(name))
}

fn link(target: &str, at: &Path) -> Result<()> {
    if at.symlink_metadata().is_ok() {
        fs::remove_file(at).map_err(|error| told(at, error))?;
    }
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(target, at);
    // a system without symbolic links for everybody gets a copy
    #[cfg(not(unix))]
    let linked = fs::copy(at.with_file_name(target), at).map(drop);
    linked.map_err(|error| told(at, error))
}

fn write(file: &Path, text: &str) -> Result<()> {
    make_folder_of(file)?;
    fs::write(file, text).map_err(|error| told(file, error))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_of_cargo_and_of_the_library() {
        let of = |features: &[&str]| InstallOptions {
            prefix: "/opt/a".into(),
            features: features.iter().map(|&name| name.to_owned()).collect(),
            profile: "dev".to_owned(),
            offline: true,
        };
        let links = of(&["mpi"]);
        assert!(links.has_mpi());
        assert_eq!(links.cargo_features(), ["--features", "mpi"]);
        let loads = of(&["mpi-abi", "cuda"]);
        assert!(loads.has_mpi());
        assert_eq!(loads.cargo_features(), ["--no-default-features", "--features", "mpi,cuda"]);
        assert_eq!(loads.library_features(), "mpi mpi-abi cuda");
        assert!(!of(&[]).has_mpi());
        assert!(of(&["mpi", "mpi-abi"]).run().unwrap_err().contains("got mpi and mpi-abi"));
    }

    #[test]
    fn the_soname_is_that_of_the_library() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi");
        let build = fs::read_to_string(root.join("build.rs")).unwrap();
        assert!(build.contains(&format!("-soname,libannulus.so.{ABI_VERSION}")));
        let header = fs::read_to_string(root.join("include/annulus.h")).unwrap();
        assert!(header.contains(&format!("#define ANNULUS_ABI_VERSION {ABI_VERSION}\n")));
    }
}
