//! Emulated NVRTC: g++ compiles a shared library, which stands for a cubin.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int},
    path::PathBuf,
    process::Command,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use annulus_device_cuda::cudarc::nvrtc::sys::nvrtcProgram;

use annulus_device_cuda::{Api, CompilerStatus, CompilerSymbols};

use super::context::lock;

/// Precedes the library's length and bytes in an image.
const MAGIC: &[u8; 8] = b"emulated";

struct EmulatedProgram {
    name: String,
    source: String,
    headers: Vec<(String, String)>,
    image: Vec<u8>,
    log: Vec<u8>,
}

/// Returns the emulated compiler, which supports compute capability 8.0.
pub const fn compiler_symbols() -> CompilerSymbols {
    CompilerSymbols {
        api: Api::Cuda,
        version,
        architecture_count: Some(architecture_count),
        architectures: Some(architectures::<80>),
        create,
        destroy,
        compile,
        log_size,
        log,
        cubin_size: image_size,
        cubin: image,
        ptx_size: image_size,
        ptx: image,
    }
}

/// Returns the emulated compiler for compute capability 9.0 only.
pub const fn hopper_compiler_symbols() -> CompilerSymbols {
    CompilerSymbols { architectures: Some(architectures::<90>), ..compiler_symbols() }
}

/// Returns the emulated compiler as hipRTC, which has no list of architectures.
pub const fn hip_compiler_symbols() -> CompilerSymbols {
    CompilerSymbols {
        api: Api::Hip,
        architecture_count: None,
        architectures: None,
        ..compiler_symbols()
    }
}

/// Extracts the library from an image, if it is one.
///
/// # Safety
/// `image` points to a complete image.
pub(super) unsafe fn unwrap_image<'a>(image: *const u8) -> Option<&'a [u8]> {
    // SAFETY: an image has at least these 16 bytes.
    let head = unsafe { std::slice::from_raw_parts(image, 16) };
    let (magic, len) = head.split_at(8);
    if magic != MAGIC {
        return None;
    }
    let len = usize::try_from(u64::from_le_bytes(len.try_into().ok()?)).ok()?;
    // SAFETY: a complete image has this many bytes more.
    Some(unsafe { std::slice::from_raw_parts(image.add(16), len) })
}

unsafe extern "C" fn version(major: *mut c_int, minor: *mut c_int) -> CompilerStatus {
    // SAFETY: the caller passes valid pointers.
    unsafe { (*major, *minor) = (0, 0) };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn architecture_count(count: *mut c_int) -> CompilerStatus {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *count = 1 };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn architectures<const SUPPORTED: c_int>(list: *mut c_int) -> CompilerStatus {
    // SAFETY: the caller passes room for one element.
    unsafe { *list = SUPPORTED };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn create(
    program: *mut nvrtcProgram,
    source: *const c_char,
    name: *const c_char,
    count: c_int,
    texts: *const *const c_char,
    names: *const *const c_char,
) -> CompilerStatus {
    // SAFETY: the caller passes texts that end in 0, and lists of the given length.
    let made = unsafe {
        let text = |text: *const c_char| CStr::from_ptr(text).to_string_lossy().into_owned();
        let headers = (0..count.unsigned_abs() as usize)
            .map(|index| (text(*names.add(index)), text(*texts.add(index))))
            .collect();
        EmulatedProgram {
            name: text(name),
            source: text(source),
            headers,
            image: Vec::new(),
            log: Vec::new(),
        }
    };
    // SAFETY: the caller passes a valid pointer.
    unsafe { *program = Box::into_raw(Box::new(made)).cast() };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn destroy(program: *mut nvrtcProgram) -> CompilerStatus {
    // SAFETY: created by `create`, destroyed once.
    drop(unsafe { Box::from_raw((*program).cast::<EmulatedProgram>()) });
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn compile(
    program: nvrtcProgram,
    count: c_int,
    options: *const *const c_char,
) -> CompilerStatus {
    // SAFETY: created by `create` and not shared; the caller passes `count` texts that end in 0.
    let (program, options) = unsafe {
        let option = |index| CStr::from_ptr(*options.add(index)).to_string_lossy().into_owned();
        (
            &mut *program.cast::<EmulatedProgram>(),
            (0..count.unsigned_abs() as usize).map(option).collect::<Vec<_>>(),
        )
    };
    match program.compile(&options) {
        Ok(library) => {
            program.image =
                [MAGIC.as_slice(), &(library.len() as u64).to_le_bytes(), &library].concat();
            CompilerStatus::SUCCESS
        }
        Err(log) => {
            program.log = log;
            CompilerStatus::COMPILATION
        }
    }
}

impl EmulatedProgram {
    /// Compiles the library, once per process and target of AMD: its contents do not depend on an
    /// architecture of NVIDIA.
    fn compile(&self, options: &[String]) -> Result<Vec<u8>, Vec<u8>> {
        type Libraries = HashMap<Vec<String>, Arc<Mutex<Option<Vec<u8>>>>>;
        static LIBRARIES: OnceLock<Mutex<Libraries>> = OnceLock::new();
        let defines = defines(options);
        let texts = self.headers.iter().flat_map(|(name, text)| [name.clone(), text.clone()]);
        let key = [self.name.clone(), self.source.clone()].into_iter().chain(texts);
        let key = key.chain(defines.iter().cloned());
        let library = Arc::clone(
            lock(LIBRARIES.get_or_init(Mutex::default)).entry(key.collect()).or_default(),
        );
        let mut library = lock(&library);
        if let Some(library) = &*library {
            return Ok(library.clone());
        }
        Ok(library.insert(self.compile_uncached(&defines)?).clone())
    }

    /// Compiles the library; an error is g++'s output.
    fn compile_uncached(&self, defines: &[String]) -> Result<Vec<u8>, Vec<u8>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "annulus-emulator-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = TempFolder(std::env::temp_dir().join(name));
        let io_error = |error: std::io::Error| error.to_string().into_bytes();
        std::fs::create_dir_all(&folder.0).map_err(io_error)?;
        for (name, text) in
            self.headers.iter().map(|(name, text)| (name, text)).chain([(&self.name, &self.source)])
        {
            std::fs::write(folder.0.join(name), text).map_err(io_error)?;
        }
        let library = folder.0.join("library.so");
        let mut gcc = Command::new("g++");
        gcc.args([
            "-O1",
            "-std=c++17",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-ffp-contract=off",
        ]);
        if cfg!(target_arch = "x86_64") && std::arch::is_x86_feature_detected!("fma") {
            gcc.arg("-mfma");
        }
        // fibers jump between stacks, which the fortified longjmp rejects
        gcc.args(["-U_FORTIFY_SOURCE", "-DANNULUS_EMULATED"]);
        gcc.args(defines);
        gcc.args(["-x", "c++"]).arg(folder.0.join(&self.name)).arg("-o").arg(&library);
        let output = gcc.output().map_err(|error| format!("g++: {error}").into_bytes())?;
        if output.status.success() {
            std::fs::read(&library).map_err(io_error)
        } else {
            Err(output.stderr)
        }
    }
}

/// Returns the definitions of `options`, and those of the compiler for a target of AMD:
/// `ANNULUS_AMD`, `__gfx942__`.
fn defines(options: &[String]) -> Vec<String> {
    let target = options.iter().find_map(|option| option.strip_prefix("--gpu-architecture=gfx"));
    let target = target.map(|name| format!("-D__gfx{}__", name.split(':').next().unwrap_or(name)));
    options.iter().filter(|option| option.starts_with("-D")).cloned().chain(target).collect()
}

/// A folder that is removed on drop.
struct TempFolder(PathBuf);

impl Drop for TempFolder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap_or_default();
    }
}

unsafe extern "C" fn log_size(program: nvrtcProgram, bytes: *mut usize) -> CompilerStatus {
    // SAFETY: a valid handle and a valid pointer.
    unsafe { *bytes = (*program.cast::<EmulatedProgram>()).log.len() };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn log(program: nvrtcProgram, to: *mut c_char) -> CompilerStatus {
    // SAFETY: a valid handle.
    let text = unsafe { &(*program.cast::<EmulatedProgram>()).log };
    // SAFETY: the caller passes a buffer of the size that `log_size` reported.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len()) };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn image_size(program: nvrtcProgram, bytes: *mut usize) -> CompilerStatus {
    // SAFETY: a valid handle and a valid pointer.
    unsafe { *bytes = (*program.cast::<EmulatedProgram>()).image.len() };
    CompilerStatus::SUCCESS
}

unsafe extern "C" fn image(program: nvrtcProgram, to: *mut c_char) -> CompilerStatus {
    // SAFETY: a valid handle.
    let bytes = unsafe { &(*program.cast::<EmulatedProgram>()).image };
    // SAFETY: the caller passes a buffer of the size that `image_size` reported.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
    CompilerStatus::SUCCESS
}
