//! `cargo xtask install` builds libannulus and puts it, with all that a program of C, C++ or
//! Fortran needs, below a prefix. `cargo xtask dist` packs the sources with all crates that they
//! need. `cargo xtask options` writes the options of every language from `options.toml`.

mod common;
mod dist;
mod install;
mod options;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: cargo xtask install --prefix DIR [--features LIST] [--profile NAME] [--offline]
       cargo xtask dist [--out DIR]
       cargo xtask options

Builds libannulus and installs it below DIR:

  lib/libannulus.so, .so.1, .so.0.1.0   the shared library, with its SONAME
  lib/libannulus.a                      the static library
  include/annulus.h, annulus.hpp        for C and C++17
  lib/pkgconfig/annulus.pc              and annulus-mpi.pc with the feature mpi or mpi-abi
  lib/cmake/annulus/                    find_package(annulus): target annulus::annulus
  share/annulus/annulus.f90             source of the Fortran module
  share/annulus/annulus_mpi_shim.c      with the feature mpi-abi, for an MPI with another ABI
  share/annulus/examples/               programs in C, C++ and Fortran
  share/doc/annulus/                    documentation and licences

  --features LIST  features of the library, separated by commas: mpi (built with $MPICC) or
                   mpi-abi (MPI is loaded at run time), cuda, nccl, wgpu
  --profile NAME   profile of cargo (default: release)
  --offline        passed to cargo

dist writes annulus-VERSION.tar.gz to DIR (default: the current folder): the files of the commit
HEAD, the sources of all crates in Cargo.lock, and a configuration of cargo that uses them, so that
the archive builds without a network.

options writes from options.toml what C, Fortran, Python, the command and docs/semantics.md have of
the options of an attention.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        Some("install") => {
            install::InstallOptions::parse(&arguments[1..]).and_then(|options| options.run())
        }
        Some("dist") => dist::DistOptions::parse(&arguments[1..]).and_then(|options| options.run()),
        Some("options") => options::run(false),
        Some("help" | "--help" | "-h") => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        other => Err(format!(
            "got {}, want install, dist or options\n\n{USAGE}",
            other.unwrap_or("nothing")
        )),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
