//! Compilation and loading: once per process and key, shared by the ranks of a context; and without
//! a compiler, from the cache.

use std::{
    ffi::{c_char, c_int, c_void},
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use annulus_conformance::{Case, Draw, Masks, Setting, Subject, suite};
use annulus_core::{DType, Dims, Error, Result, Spec};
use annulus_cuda::{
    Cuda,
    device::{
        Architecture, Compiler, CompilerStatus, CompilerSymbols, Device, ImageCache, Status,
        Stream, Symbols,
        cudarc::{driver::sys::CUmodule, nvrtc::sys::nvrtcProgram},
    },
};
use annulus_cuda_emulator as emulator;
use annulus_plan::Layout;

use crate::{
    common::staged,
    support::{compiler, next_device},
};

/// A case that runs in a second, on the kernels of f32 and 32 dims.
fn case() -> Case {
    let dims = Dims::new(1, 12, 1, 8);
    Case::new("small", Spec::new(dims, DType::F64), Masks::default(), &mut Draw::new(3))
        .in_dtype(DType::F32)
}

fn check(subject: &dyn Subject, ranks: usize) -> Result<(), String> {
    suite::answer(subject, &case(), &Setting::new(ranks, Layout::Contiguous)).map(drop)
}

/// A new folder for a cache, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("annulus-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::remove_dir_all(&folder).unwrap_or_default();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap_or_default();
    }
}

static COMPILED: AtomicUsize = AtomicUsize::new(0);
static LOADED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn counted_compile(
    program: nvrtcProgram,
    count: c_int,
    options: *const *const c_char,
) -> CompilerStatus {
    COMPILED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the arguments are those of the compiler's function.
    unsafe { (emulator::compiler_symbols().compile)(program, count, options) }
}

unsafe extern "C" fn counted_load(module: *mut CUmodule, image: *const c_void) -> Status {
    LOADED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the arguments are those of the driver's function.
    unsafe { (emulator::symbols().module_load)(module, image) }
}

#[test]
fn ranks_of_a_process_share_a_compilation_and_those_of_a_context_a_module() {
    let ordinal = next_device();
    let driver = Symbols { module_load: counted_load, ..emulator::symbols() };
    let nvrtc = CompilerSymbols { compile: counted_compile, ..emulator::compiler_symbols() };
    // each rank has a device and a compiler of its own; nothing is cached on disk
    let subject = staged("ranks of one context", Duration::ZERO, move || {
        let device = Device::with_symbols(driver, ordinal)?;
        let compiler = Compiler::with_symbols(nvrtc, None)?;
        Ok(Cuda::on(Stream::new(&device)?, compiler))
    });
    check(&subject, 3).unwrap();
    assert_eq!((COMPILED.load(Ordering::Relaxed), LOADED.load(Ordering::Relaxed)), (1, 1));
    // the module was unloaded with its last rank, and the image is still in memory
    check(&subject, 2).unwrap();
    assert_eq!((COMPILED.load(Ordering::Relaxed), LOADED.load(Ordering::Relaxed)), (1, 2));
}

#[test]
fn without_a_compiler_cached_images_are_used() {
    let folder = Folder::new("cache-only");
    let cache = || ImageCache::new(folder.0.clone());
    assert!(Compiler::of_cache(cache()).is_none());
    let open = |compiler: Compiler| -> Result<Cuda> {
        let device = Device::with_symbols(emulator::symbols(), next_device())?;
        Ok(Cuda::on(Stream::new(&device)?, compiler))
    };
    // the images of f32 and 32 dims are in the test's cache, or are compiled
    let full = Compiler::with_symbols(emulator::compiler_symbols(), Some(cache())).unwrap();
    let found = full.clone();
    check(&staged("with a compiler", Duration::ZERO, move || open(found.clone())), 1).unwrap();
    let alone = Compiler::of_cache(cache()).unwrap();
    assert!(alone.is_cache_only() && !full.is_cache_only());
    let gpu = Architecture { major: 8, minor: 0 }.into();
    assert_eq!(alone.version(), full.version());
    assert_eq!(alone.target(&gpu).unwrap(), full.target(&gpu).unwrap());
    let text = open(alone.clone()).unwrap().to_string();
    assert!(text.ends_with("NVRTC 0.0 (cached images only), level matrix"), "{text}");
    let used = alone.clone();
    check(&staged("without a compiler", Duration::ZERO, move || open(used.clone())), 2).unwrap();
    // another variant is not in the cache: an error when the plan is made
    let subject = staged("without a compiler", Duration::ZERO, move || open(alone.clone()));
    let wide = case().in_dtype(DType::F64);
    let error = subject.run(&wide, &Setting::ALONE, 1).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { by, .. } if by.contains("no run-time compiler")),
        "{error}"
    );
    assert!(!compiler().unwrap().is_cache_only());
}
