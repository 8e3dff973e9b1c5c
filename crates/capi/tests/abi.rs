//! `include/annulus.h` is what cbindgen makes of the sources, and the binary interface is the
//! committed one: exported symbols, SONAME, layouts of structs, values of constants. After a change
//! that keeps [`annulus_capi::ANNULUS_ABI_VERSION`]'s promise:
//!
//! ```text
//! ANNULUS_UPDATE=1 cargo test -p annulus-capi --test abi
//! ```
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::{collections::BTreeSet, fmt::Write, fs, path::Path, process::Command};

use cbindgen::{Builder, Config, DocumentationStyle, EnumConfig, Language, Style};
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

/// Sources in the order of the header.
const SOURCES: [&str; 11] = [
    "status.rs",
    "tensor.rs",
    "fields.rs",
    "options.rs",
    "option_fields.rs",
    "callbacks.rs",
    "attention.rs",
    "cuda.rs",
    "endpoint.rs",
    "batch.rs",
    "plan.rs",
];

const TITLE: &str = "\
/*
 * annulus: exact attention, forward and backward, over sequences that do not fit one device.
 *
 * annulus_options -> annulus_attention -> annulus_plan -> annulus_forward, annulus_backward
 *                                      -> annulus_cache -> annulus_cache_append, _attend
 *                    annulus_endpoint, for several plans and caches over MPI
 *
 * Every function that can fail returns a status: 0, or a number whose text is that of
 * annulus_error_string and whose details are those of annulus_last_error. Statuses from 1 to 19 are
 * the caller's fault and leave the plan usable, 20 to 39 are resources, from 40 on the plan is dead.
 * \"Collective\" means that all ranks make the call in the same order; \"local\" that one rank can.
 * Structs begin with their size, so that fields can be appended; set everything else to 0, or by
 * annulus_options_init. Units: strides in elements, times in seconds, sizes in bytes.
 *
 * Define ANNULUS_WITH_MPI before including this header to declare annulus_plan_create_mpi,
 * annulus_cache_create_mpi and annulus_endpoint_create_mpi. Define ANNULUS_MPI_ABI too if the
 * library has the feature mpi-abi.
 *
 * Made by cbindgen from crates/capi/src.
 */
";

/// End of the header, for libraries that load MPI.
const OTHER_ABI: &str = "\
/* A library that loads MPI takes communicators of the standard ABI; others are converted. */
#if defined(ANNULUS_WITH_MPI) && defined(ANNULUS_MPI_ABI) && \\
    !defined(annulus_plan_create_mpi) && !(defined(MPI_ABI_VERSION) && MPI_ABI_VERSION >= 1)
/* Some MPIs convert no handle before MPI_Init; the call is refused then, whatever the handle. */
static inline int32_t annulus_mpi_handle(MPI_Comm communicator) {
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized && !finalized ? (int32_t)MPI_Comm_c2f(communicator) : 0;
}
#define annulus_plan_create_mpi(attention, communicator, plan) \\
  annulus_plan_create_mpi_f(attention, annulus_mpi_handle(communicator), plan)
#define annulus_cache_create_mpi(attention, communicator, cache) \\
  annulus_cache_create_mpi_f(attention, annulus_mpi_handle(communicator), cache)
#define annulus_endpoint_create_mpi(attention, communicator, endpoint) \\
  annulus_endpoint_create_mpi_f(attention, annulus_mpi_handle(communicator), endpoint)
#endif";

fn config() -> Config {
    Config {
        language: Language::C,
        header: Some(TITLE.to_owned()),
        include_guard: Some("ANNULUS_H".to_owned()),
        no_includes: true,
        sys_includes: vec!["stdint.h".to_owned()],
        after_includes: Some("#ifdef ANNULUS_WITH_MPI\n#include <mpi.h>\n#endif".to_owned()),
        trailer: Some(OTHER_ABI.to_owned()),
        cpp_compat: true,
        documentation_style: DocumentationStyle::Doxy,
        style: Style::Both,
        line_length: 100,
        enumeration: EnumConfig::default(),
        defines: [("feature = mpi".to_owned(), "ANNULUS_WITH_MPI".to_owned())].into(),
        export: cbindgen::ExportConfig {
            exclude: vec!["MPI_Comm".to_owned()],
            ..Default::default()
        },
        ..Config::default()
    }
}

fn generate() -> String {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut builder = Builder::new().with_config(config());
    for source in SOURCES.into_iter().chain(["passes.rs", "second_derivatives.rs", "cache.rs"]) {
        builder = builder.with_src(sources.join(source));
    }
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    plain(&String::from_utf8(header).unwrap())
}

/// Rewrites rustdoc's links and headings for a reader of C.
fn plain(header: &str) -> String {
    let mut text = String::new();
    let mut rest = header;
    while let Some((before, after)) = rest.split_once("[`") {
        let (name, after) = after.split_once("`]").unwrap();
        text.push_str(before);
        text.push_str(name);
        rest = match after.strip_prefix("(crate::") {
            Some(target) => target.split_once(')').unwrap().1,
            None => after,
        };
    }
    text.push_str(rest);
    text.replace(" * # ", " * ")
}

#[test]
fn the_committed_header_is_that_of_the_sources() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/annulus.h");
    let generated = generate();
    if std::env::var_os("ANNULUS_UPDATE").is_some() {
        fs::write(&file, &generated).unwrap();
    }
    let committed = fs::read_to_string(&file).unwrap();
    let differs = committed.lines().zip(generated.lines()).position(|(a, b)| a != b);
    assert!(
        committed == generated,
        "line {:?} differs: run ANNULUS_UPDATE=1 cargo test -p annulus-capi --test abi",
        differs.map(|line| line + 1)
    );
}

/// Names of the fields of a struct of the header, in order.
fn fields<'a>(header: &'a str, name: &str) -> Vec<&'a str> {
    let (_, body) = header.split_once(&format!("typedef struct {name} {{\n")).unwrap();
    let (body, _) = body.split_once(&format!("\n}} {name};")).unwrap();
    body.lines().filter_map(field).collect()
}

#[test]
fn the_fortran_module_has_the_constants_and_fields_of_the_header() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = fs::read_to_string(folder.join("include/annulus.h")).unwrap();
    let module = fs::read_to_string(folder.join("fortran/annulus.f90")).unwrap();
    let defines = header.lines().filter_map(|line| line.strip_prefix("#define "));
    let mut constants = 0;
    // macros with parameters are calls of functions that the module has by themselves
    let constants_of_header =
        defines.filter_map(|rest| rest.split_once(' ')).filter(|(name, _)| !name.contains('('));
    for (name, value) in constants_of_header {
        assert!(module.contains(&format!(":: {name} = {value}\n")), "{name} = {value}");
        constants += 1;
    }
    assert!(constants > 40);
    for name in [
        "annulus_options",
        "annulus_tensor",
        "annulus_batch",
        "annulus_pair",
        "annulus_step_event",
        "annulus_forward_args",
        "annulus_backward_args",
        "annulus_attend_args",
    ] {
        let (_, body) = module.split_once(&format!("type, bind(c) :: {name}\n")).unwrap();
        let (body, _) = body.split_once("end type").unwrap();
        let in_module: Vec<&str> = body
            .lines()
            .filter_map(|line| line.split_once(":: "))
            .filter_map(|(_, rest)| rest.split([' ', '(']).next())
            .collect();
        assert!(in_module.len() > 3);
        assert_eq!(in_module, fields(&header, name), "{name}");
    }
}
