//! NVRTC or hipRTC: source to image, cached on disk.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_int},
    sync::{Arc, Mutex, PoisonError},
};

use annulus_core::{Error, Result};
use cudarc::nvrtc::sys::nvrtcProgram;

use crate::{
    Api, Architecture, CompilerStatus, CompilerSymbols, Gpu, Image, ImageCache, ImageKind, hip,
    symbols::{CompilerAdapter, missing, open},
};

/// Source of a compilation: one file and its headers, by name and text.
#[derive(Debug, Clone, Copy)]
pub struct KernelProgram<'a> {
    /// File name in messages.
    pub name: &'a str,
    /// Text.
    pub source: &'a str,
    /// Names and texts of the headers.
    pub headers: &'a [(&'a str, &'a str)],
}

/// NVRTC with a disk cache; or the cache alone, with the images that NVRTC has left there.
#[derive(Debug, Clone)]
pub struct Compiler {
    /// `None`: only images in the cache.
    symbols: Option<CompilerSymbols>,
    version: (i32, i32),
    /// Supported architectures, sorted.
    architectures: Vec<i32>,
    cache: Option<ImageCache>,
}

impl Compiler {
    /// Loads the compiler of this machine for an interface.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none.
    pub fn new(api: Api, cache: Option<ImageCache>) -> Result<Self> {
        Self::with_symbols(CompilerSymbols::system(api)?, cache)
    }

    /// Uses these functions.
    ///
    /// # Errors
    /// [`Error::Device`] if a call fails.
    pub fn with_symbols(symbols: CompilerSymbols, cache: Option<ImageCache>) -> Result<Self> {
        let mut major = 0;
        let mut minor = 0;
        let mut architectures = Vec::new();
        let check = |name, result| check(symbols.api, name, result);
        // SAFETY: the table's functions have NVRTC's signatures and semantics; all pointers are to
        // locals, and the vector has as many elements as the compiler reported.
        unsafe {
            check("nvrtcVersion", (symbols.version)(&raw mut major, &raw mut minor))?;
            if let Some((number, list)) = symbols.architecture_count.zip(symbols.architectures) {
                let mut count = 0;
                check("nvrtcGetNumSupportedArchs", number(&raw mut count))?;
                architectures.resize(usize::try_from(count).unwrap_or(0), 0);
                check("nvrtcGetSupportedArchs", list(architectures.as_mut_ptr()))?;
            }
        }
        architectures.sort_unstable();
        Ok(Self { symbols: Some(symbols), version: (major, minor), architectures, cache })
    }

    /// Uses images of the cache only, as the newest NVRTC that has used it compiled them; `None` if
    /// none has.
    pub fn of_cache(cache: ImageCache) -> Option<Self> {
        let (version, architectures) = cache.newest_compiler()?;
        Some(Self { symbols: None, version, architectures, cache: Some(cache) })
    }

    /// True if there is no compiler: see [`Compiler::of_cache`].
    pub const fn is_cache_only(&self) -> bool {
        self.symbols.is_none()
    }

    /// Returns the version, major and minor.
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Interface of the compiler.
    pub fn api(&self) -> Api {
        self.symbols.map_or(Api::Cuda, |symbols| symbols.api)
    }

    /// Name and version: `NVRTC 13.0`.
    pub fn label(&self) -> String {
        let (major, minor) = self.version;
        match self.api() {
            Api::Cuda => format!("NVRTC {major}.{minor}"),
            Api::Hip => format!("hipRTC {major}, HIP {minor}"),
        }
    }

    /// Chooses the target for a GPU. NVIDIA: its architecture; or, for a GPU newer than the
    /// compiler, PTX of the newest supported architecture. AMD: the GPU's name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the compiler supports no architecture that the GPU can run.
    pub fn target(&self, gpu: &Gpu) -> Result<(ImageKind, String)> {
        let unknown = || Error::unsupported(gpu.to_string(), self.label());
        let architecture = match (self.api(), gpu) {
            (Api::Cuda, Gpu::Nvidia(architecture)) => architecture,
            (Api::Hip, Gpu::Amd(name)) => return Ok((ImageKind::CodeObject, name.clone())),
            _ => return Err(unknown()),
        };
        let number = architecture.number();
        if self.architectures.contains(&number) {
            // wgmma, TMA and setmaxnreg exist only in the architecture-specific targets (sm_90a)
            let suffix = if architecture.major >= 9 { "a" } else { "" };
            return Ok((ImageKind::Cubin, format!("sm_{number}{suffix}")));
        }
        let older =
            self.architectures.iter().rev().find(|&&supported| {
                supported < number && supported >= Architecture::OLDEST.number()
            });
        older.map(|supported| (ImageKind::Ptx, format!("compute_{supported}"))).ok_or_else(unknown)
    }

    /// Compiles for a [target](Compiler::target), or returns the cached image. Threads that need
    /// the same image wait for one compilation, so that no rank is late because others compile too.
    ///
    /// # Errors
    /// [`Error::Device`] with the compiler's log; [`Error::Unsupported`] without a compiler and an
    /// image in the cache.
    pub fn compile(
        &self,
        program: &KernelProgram<'_>,
        options: &[String],
        kind: ImageKind,
        target: &str,
    ) -> Result<Image> {
        // no implicit fused multiply-add: forward and backward must compute the same scores bit for
        // bit
        let own: &[&str] = match kind {
            ImageKind::Cubin | ImageKind::Ptx => {
                &["--std=c++17", "--ptxas-options=-v", "--fmad=false"]
            }
            ImageKind::CodeObject => &["-std=c++17", "-O3", "-ffp-contract=off", "-DANNULUS_AMD"],
        };
        let mut all = vec![format!("--gpu-architecture={target}")];
        all.extend(own.iter().map(|&option| option.to_owned()));
        all.extend_from_slice(options);
        let version = format!("{:?} {kind:?}", self.version);
        let texts = program.headers.iter().flat_map(|(name, text)| [*name, *text]);
        let key = ImageCache::key(
            [program.name, program.source, &version]
                .into_iter()
                .chain(texts)
                .chain(all.iter().map(String::as_str)),
        );
        let in_memory = self.in_memory(&key);
        let mut in_memory = in_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = &*in_memory {
            return Ok(image.clone());
        }
        let cached = self.cache.as_ref().and_then(|cache| cache.get(&key, kind));
        let image = match cached {
            Some(image) => image,
            None => {
                let image = self.compile_uncached(program, &all, kind)?;
                if let Some(cache) = &self.cache {
                    cache.put(&key, &image);
                    if self.api() == Api::Cuda {
                        cache.put_compiler(self.version, &self.architectures);
                    }
                }
                image
            }
        };
        Ok(in_memory.insert(image).clone())
    }

    /// Returns the place of an image in the memory of this process. It is locked while the image is
    /// compiled.
    fn in_memory(&self, key: &str) -> Arc<Mutex<Option<Image>>> {
        type Images = BTreeMap<(usize, String), Arc<Mutex<Option<Image>>>>;
        static IMAGES: Mutex<Images> = Mutex::new(BTreeMap::new());
        // different compilers may report the same version
        let compiler = self.symbols.map_or(0, |symbols| symbols.compile as usize);
        let mut images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(images.entry((compiler, key.to_owned())).or_default())
    }

    fn compile_uncached(
        &self,
        program: &KernelProgram<'_>,
        options: &[String],
        kind: ImageKind,
    ) -> Result<Image> {
        let absent = || {
            missing(
                &format!("{} {}", program.name, options.join(" ")),
                "no run-time compiler (libnvrtc.so was not found), and the kernel cache has no \
                 such image",
            )
        };
        let symbols = self.symbols.as_ref().ok_or_else(absent)?;
        let text = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::invalid("program", program.name, "text without a NUL"))
        };
        let source = text(program.source)?;
        let name = text(program.name)?;
        let names =
            program.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let texts =
            program.headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>>>()?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let [names, texts, options] = [&names, &texts, &options]
            .map(|list| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>());
        let count = |list: &[*const c_char]| c_int::try_from(list.len()).unwrap_or(0);
        let mut handle: nvrtcProgram = std::ptr::null_mut();
        // SAFETY: all texts end in 0 and outlive the call; the lists have the given lengths.
        let made = unsafe {
            (symbols.create)(
                &raw mut handle,
                source.as_ptr(),
                name.as_ptr(),
                count(&texts),
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        check(symbols.api, "nvrtcCreateProgram", made)?;
        let mut owned = OwnedProgram { symbols, handle };
        // SAFETY: as above.
        let compiled =
            unsafe { (symbols.compile)(owned.handle, count(&options), options.as_ptr()) };
        let log = owned.read("nvrtcGetProgramLog", symbols.log_size, symbols.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        if compiled != CompilerStatus::SUCCESS {
            return Err(compiler_error(
                symbols.api,
                "nvrtcCompileProgram",
                compiled,
                &format!(": {}", log.trim()),
            ));
        }
        let bytes = match kind {
            ImageKind::Cubin | ImageKind::CodeObject => {
                owned.read("nvrtcGetCUBIN", symbols.cubin_size, symbols.cubin)?
            }
            ImageKind::Ptx => owned.read("nvrtcGetPTX", symbols.ptx_size, symbols.ptx)?,
        };
        Ok(Image { kind, bytes, log })
    }
}

/// A program handle, destroyed on drop.
struct OwnedProgram<'a> {
    symbols: &'a CompilerSymbols,
    handle: nvrtcProgram,
}

impl OwnedProgram<'_> {
    /// Reads an output of the program: its size first, then its bytes.
    fn read(
        &mut self,
        name: &str,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> CompilerStatus,
        read: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> CompilerStatus,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is alive and `bytes` is a local.
        check(self.symbols.api, name, unsafe { size(self.handle, &raw mut bytes) })?;
        let mut text = vec![0u8; bytes];
        // SAFETY: the vector has as many bytes as the compiler reported.
        check(self.symbols.api, name, unsafe { read(self.handle, text.as_mut_ptr().cast()) })?;
        Ok(text)
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created once by `compile_uncached`, destroyed once.
        unsafe { (self.symbols.destroy)(&raw mut self.handle) };
    }
}

fn check(api: Api, name: &str, result: CompilerStatus) -> Result<()> {
    if result == CompilerStatus::SUCCESS {
        Ok(())
    } else {
        Err(compiler_error(api, name, result, ""))
    }
}

/// Converts a failed call of NVRTC's function `name`, or of hipRTC's, to an error.
fn compiler_error(api: Api, name: &str, error: CompilerStatus, log: &str) -> Error {
    let mut text = format!("{error:?}");
    if api == Api::Hip {
        text = text.replace("NVRTC", "HIPRTC");
    }
    Error::Device { what: format!("{}: {text}{log}", api.function(name)) }
}

impl CompilerSymbols {
    /// Loads this machine's compiler of an interface.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if there is none, or it lacks a function.
    pub fn system(api: Api) -> Result<Self> {
        if api == Api::Hip {
            return hip::compiler_symbols();
        }
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let library = open(&names)
            .ok_or_else(|| missing("CUDA", "no run-time compiler (libnvrtc.so was not found)"))?;
        // SAFETY: the library of this name is NVRTC.
        unsafe {
            let own = CompilerAdapter::of(library, "CUDA", api)?;
            Self::of(library, "CUDA", api, own)
        }
    }
}
