//! The binary interface is the committed one: exported symbols, SONAME, layouts of structs, values
//! of constants. After a change that keeps [`annulus_capi::ANNULUS_ABI_VERSION`]'s promise:
//!
//! ```text
//! ANNULUS_UPDATE=1 cargo test -p annulus-capi --test abi
//! ```
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::{collections::BTreeSet, fmt::Write, fs, path::Path, process::Command};

use common::{Workspace, library, run};

/// Functions that exist with the feature `mpi` only.
const OF_MPI: [&str; 3] =
    ["annulus_endpoint_create_mpi", "annulus_plan_create_mpi", "annulus_cache_create_mpi"];

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A program that prints every constant, and size and offsets of every struct, of the header.
fn program(header: &str) -> String {
    let mut code =
        String::from("#include <stdio.h>\n#include <stddef.h>\n#include \"annulus.h\"\n");
    code.push_str("int main(void) {\n");
    let mut in_struct: Option<&str> = None;
    for line in header.lines() {
        let line = line.trim_end();
        if let Some(rest) = line.strip_prefix("#define ") {
            // macros with parameters are calls, which other tests compile
            let constant = rest.split_once(' ').filter(|(name, _)| !name.contains('('));
            if let Some((name, _)) = constant {
                writeln!(code, "printf(\"{name} %lld\\n\", (long long)({name}));").unwrap();
            }
        } else if let Some(rest) =
            line.strip_prefix("typedef struct ").filter(|_| line.ends_with('{'))
        {
            let name = rest.trim_end_matches(" {");
            writeln!(
                code,
                "printf(\"{name} size %zu align %zu\\n\", sizeof({name}), _Alignof({name}));"
            )
            .unwrap();
            in_struct = Some(name);
        } else if line.starts_with('}') {
            in_struct = None;
        } else if let (Some(name), Some(field)) = (in_struct, field(line)) {
            let of = format!("offsetof({name}, {field}), sizeof((({name} *)0)->{field})");
            writeln!(code, "printf(\"{name}.{field} offset %zu size %zu\\n\", {of});").unwrap();
        }
    }
    code.push_str("return 0;\n}\n");
    code
}

/// The field that a line within a struct declares, if it begins one.
fn field(line: &str) -> Option<&str> {
    let line = line.strip_prefix("  ").filter(|line| !line.starts_with(['/', ' ']))?;
    if let Some((_, rest)) = line.split_once("(*") {
        return rest.split_once(')').map(|(name, _)| name);
    }
    let name = line.strip_suffix(';')?.rsplit([' ', '*']).next()?;
    Some(name.split('[').next().unwrap_or(name))
}

#[test]
fn layouts_and_values_are_the_committed_ones() {
    let workspace = Workspace::new("abi");
    let header = fs::read_to_string(folder().join("include/annulus.h")).unwrap();
    let source = workspace.path("layouts.c");
    fs::write(&source, program(&header)).unwrap();
    let mut layouts = run(&mut workspace.command(&workspace.compile(&source)));
    for symbol in exported().into_iter().filter(|symbol| !OF_MPI.contains(&symbol.as_str())) {
        writeln!(layouts, "{symbol}()").unwrap();
    }
    assert!(layouts.contains("annulus_forward_args.softmax_aux offset"), "{layouts}");
    let file = folder().join("tests/abi.txt");
    if std::env::var_os("ANNULUS_UPDATE").is_some() {
        fs::write(&file, &layouts).unwrap();
    }
    let committed = fs::read_to_string(&file).unwrap();
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (committed, now) = (lines(&committed), lines(&layouts));
    let gone: Vec<_> = committed.difference(&now).collect();
    let added: Vec<_> = now.difference(&committed).collect();
    assert!(gone.is_empty() && added.is_empty(), "gone: {gone:?}, added: {added:?}");
}

/// Names of what the shared library defines for others.
fn exported() -> BTreeSet<String> {
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    symbols.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect()
}

#[test]
fn nothing_but_annulus_is_exported() {
    let exported = exported();
    let header = fs::read_to_string(folder().join("include/annulus.h")).unwrap();
    assert!(exported.len() > 20);
    for symbol in &exported {
        assert!(symbol.starts_with("annulus_"), "{symbol} is exported");
        assert!(header.contains(&format!("{symbol}(")), "{symbol} is not in the header");
    }
    for symbol in OF_MPI {
        assert_eq!(exported.contains(symbol), cfg!(feature = "mpi"), "{symbol}");
    }
}

#[test]
fn the_soname_has_the_abi_version() {
    let dynamic = run(Command::new("readelf").arg("-d").arg(library()));
    let want = format!("soname: [libannulus.so.{}]", annulus_capi::ANNULUS_ABI_VERSION);
    assert!(dynamic.contains(&want), "{dynamic}");
}
