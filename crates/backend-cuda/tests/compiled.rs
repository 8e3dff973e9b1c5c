//! Compiles variants for every architecture, without a GPU: nothing spills, and registers and
//! shared memory equal the committed table. Needs NVRTC; `scripts/cuda-test` installs it. With
//! `ANNULUS_UPDATE=1` every variant is compiled and the table is written instead.
//!
//! All variants take minutes. The table has a digest of the sources and options from which it was
//! written. The same compiler makes the same code from them, so if they have not changed, a sample
//! proves enough: for 9.0 the variants of bf16, whose machine code `scripts/cuda-model` reads, for
//! 8.0 the variant of f16 of dim 128. Otherwise all variants of 8.0, the variants of dim
//! 128, and all that only 9.0 has are compiled, and the test fails in any case, because the table
//! must be written anew. `ANNULUS_VARIANTS=all` compiles every variant.
//!
//! hipRTC of ROCm 5.2.3, the oldest, compiles the programs of AMD GPUs: scripts/hiprtc fetches it.
//! Their registers are those of a newer compiler: scripts/amdgpu.

use std::{
    num::NonZero,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use annulus_core::{DType, Result};
use annulus_cuda::{
    Family, Variant, compile,
    device::{Api, Architecture, Compiler, Device, ImageCache, ImageKind},
};

/// Element type and dim of the variants for AMD GPUs that are compiled each time.
const SAMPLE: (DType, usize) = (DType::F16, 64);

const ARCHITECTURES: [(i32, i32); 4] = [(8, 0), (8, 6), (8, 9), (9, 0)];

/// Parses the compiler's log: name, registers, bytes of shared memory, bytes spilled of every
/// kernel.
fn kernels(log: &str) -> Vec<(String, u64, u64, u64)> {
    let mut found = Vec::new();
    let before = |line: &str, word: &str| -> u64 {
        let text = line.find(word).map_or("", |end| line[..end].trim_end());
        text.rsplit(|c: char| !c.is_ascii_digit())
            .next()
            .and_then(|number| number.parse().ok())
            .unwrap_or(0)
    };
    let mut name = String::new();
    let mut spilled = 0;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            name = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if line.contains("bytes spill stores") {
            spilled = before(line, " bytes spill stores") + before(line, " bytes spill loads");
        } else if line.contains(" registers") && !name.is_empty() {
            found.push((
                std::mem::take(&mut name),
                before(line, " registers"),
                before(line, " bytes smem"),
                spilled,
            ));
        }
    }
    found.sort();
    found
}

/// Returns one variant's line of the table.
fn line(compiler: &Compiler, architecture: Architecture, variant: Variant) -> Result<String> {
    let (kind, target) = compiler.target(&architecture.into())?;
    assert_eq!(kind, ImageKind::Cubin, "{target}");
    let image = compile(compiler, variant, None, kind, &target)?;
    assert!(image.bytes.starts_with(b"\x7fELF"), "{target} {variant}");
    let found = kernels(&image.log);
    let mut names = variant.kernels(Api::Cuda);
    names.sort_unstable();
    assert_eq!(
        found.iter().map(|kernel| kernel.0.as_str()).collect::<Vec<_>>(),
        names,
        "{target} {variant}: {}",
        image.log
    );
    // ptxas warnings C7…: wgmma was serialized, or setmaxnreg was ignored
    assert!(!image.log.contains("(C7"), "{target} {variant}: {}", image.log);
    let mut line = format!("{target} {variant} |");
    for (name, registers, shared, spilled) in found {
        assert_eq!(spilled, 0, "{target} {variant}: {name} spills");
        line += &format!(
            " {name}: {registers}, {}, {spilled};",
            shared + u64::from(variant.dynamic_shared_bytes(&name))
        );
    }
    Ok(line + "\n")
}

/// Digests what the compiler is given for the variants: kernel sources, without those of the
/// emulator, and options.
fn sources(every: &[((i32, i32), Variant)]) -> std::io::Result<String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut files = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|end| end == "cu" || end == "cuh"));
    files.sort();
    assert!(files.len() > 10, "kernel sources: {files:?}");
    let mut texts =
        files.iter().map(std::fs::read_to_string).collect::<std::io::Result<Vec<_>>>()?;
    texts.extend(every.iter().flat_map(|(_, variant)| variant.options()));
    Ok(ImageCache::key(texts.iter().map(String::as_str)))
}

#[test]
fn variants_compile_for_every_architecture_as_recorded() {
    let cache =
        ImageCache::new(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("compiled-kernels"));
    let compiler = Compiler::new(Api::Cuda, Some(cache)).unwrap();
    let on = |&(major, minor): &(i32, i32)| {
        Variant::all_on(Architecture { major, minor }).map(move |variant| ((major, minor), variant))
    };
    let every: Vec<_> = ARCHITECTURES.iter().flat_map(on).collect();
    let heading = format!(
        "NVRTC {}.{}, sources {}: target, element type, dim | kernel: registers, bytes of shared \
         memory, bytes spilled",
        compiler.version().0,
        compiler.version().1,
        sources(&every).unwrap()
    );
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/registers.txt");
    let recorded = std::fs::read_to_string(&file).unwrap();
    let unchanged = recorded.lines().next() == Some(&heading);
    let update = std::env::var_os("ANNULUS_UPDATE").is_some();
    let all = update || std::env::var("ANNULUS_VARIANTS").is_ok_and(|which| which == "all");
    let chosen = |&(architecture, variant): &((i32, i32), Variant)| {
        let general = variant.family == Family::General;
        let sample = match (architecture, variant.dtype) {
            ((9, 0), DType::Bf16) => true,
            ((8, 0), DType::F16) => variant.dim == 128,
            _ => false,
        };
        let rest = architecture == (8, 0) || variant.dim == 128 || !general;
        all || sample || (!unchanged && rest)
    };
    let jobs: Vec<_> = every.iter().copied().filter(chosen).collect();
    let next = AtomicUsize::new(0);
    let lines = Mutex::new(vec![String::new(); jobs.len()]);
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(((major, minor), variant)) = jobs.get(index).copied() else { break };
            let line = line(&compiler, Architecture { major, minor }, variant).unwrap();
            lines.lock().unwrap()[index] = line;
        }
    };
    std::thread::scope(|scope| {
        (0..std::thread::available_parallelism().map_or(1, NonZero::get))
            .for_each(|_| drop(scope.spawn(work)));
    });
    let lines = lines.into_inner().unwrap();
    if update {
        std::fs::write(file, format!("{heading}\n{}", lines.concat())).unwrap();
        return;
    }
    assert_eq!(recorded.lines().count(), 1 + every.len());
    for got in &lines {
        let what = got.split('|').next().unwrap_or_default();
        let want =
            recorded.lines().find(|line| line.split('|').next() == Some(what)).unwrap_or_default();
        let got = got.trim_end();
        assert_eq!(got, want, "a line of kernels/registers.txt; ANNULUS_UPDATE=1 writes it anew");
    }
    assert!(
        unchanged,
        "kernels/registers.txt was written from other sources or by another compiler, not by \
         {heading:?}; ANNULUS_UPDATE=1 writes it anew"
    );
}

#[test]
fn hiprtc_compiles_the_programs_of_amd_gpus() {
    let compiler = Compiler::new(Api::Hip, None).unwrap();
    let all = std::env::var("ANNULUS_VARIANTS").is_ok_and(|which| which == "all");
    let chosen = Variant::all().filter(|variant| all || (variant.dtype, variant.dim) == SAMPLE);
    let with_matrix = |variant: Variant| {
        let matrix = Variant { family: Family::Mfma, ..variant };
        [Some(variant), variant.has_matrix().then_some(matrix)].into_iter().flatten()
    };
    for variant in chosen.flat_map(with_matrix) {
        let image = compile(&compiler, variant, None, ImageKind::CodeObject, "gfx90a").unwrap();
        let text = String::from_utf8_lossy(&image.bytes);
        let lacks = |kernel: &&&str| !text.contains(**kernel);
        let kernels = variant.kernels(Api::Hip);
        assert!(image.bytes.starts_with(b"\x7fELF"), "{variant}");
        assert_eq!(kernels.iter().find(lacks), None, "{variant}");
    }
    // the real driver, which no machine of these tests has a GPU for
    if let Err(error) = Device::count(Api::Hip) {
        assert_eq!(error.to_string(), "HIP is not supported by this machine: no GPU");
    }
}
