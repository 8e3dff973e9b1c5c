//! From source to an image, by NVRTC, remembered on disk.

use std::ffi::{CString, c_char, c_int};

use annulus_core::{Error, Result};
use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};

use crate::{Architecture, Cache, CompilerSymbols};

/// What is compiled: one file and those that it includes, by name and text.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// Its name in messages.
    pub name: &'a str,
    /// Its text.
    pub source: &'a str,
    /// Names and texts of what it includes.
    pub headers: &'a [(&'a str, &'a str)],
}

/// What a compiler makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// Machine code for one architecture.
    Cubin,
    /// Portable assembly, which the driver translates.
    Ptx,
}

/// A compiled program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// What the bytes are.
    pub kind: ImageKind,
    /// The image.
    pub bytes: Vec<u8>,
    /// What the compiler said: registers, shared memory, spills.
    pub log: String,
}

/// NVRTC and its memory.
#[derive(Debug, Clone)]
pub struct Compiler {
    symbols: CompilerSymbols,
    version: (i32, i32),
    /// Sorted.
    architectures: Vec<i32>,
    cache: Option<Cache>,
}

impl Compiler {
    /// The compiler of this machine.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none.
    pub fn new(cache: Option<Cache>) -> Result<Self> {
        Self::with_symbols(CompilerSymbols::system()?, cache)
    }

    /// A compiler behind these functions.
    ///
    /// # Errors
    /// [`Error::Device`] if it does not answer.
    pub fn with_symbols(symbols: CompilerSymbols, cache: Option<Cache>) -> Result<Self> {
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the table's functions have the signatures and meanings of NVRTC's; all pointers are to locals.
        unsafe {
            check("nvrtcVersion", (symbols.version)(&raw mut major, &raw mut minor))?;
            check("nvrtcGetNumSupportedArchs", (symbols.architecture_count)(&raw mut count))?;
        }
        let mut architectures: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for as many as it has just said.
        check("nvrtcGetSupportedArchs", unsafe { (symbols.architectures)(architectures.as_mut_ptr()) })?;
        architectures.sort_unstable();
        Ok(Self { symbols, version: (major, minor), architectures, cache })
    }

    /// Its version.
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// What to compile for `architecture`: itself; or, where the compiler is older than the GPU, PTX for the newest that it knows.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it knows none that the GPU could run.
    pub fn target(&self, architecture: Architecture) -> Result<(ImageKind, String)> {
        let number = architecture.number();
        if self.architectures.contains(&number) {
            // from 9.0 on, only the code of one architecture alone has all of its instructions
            let suffix = if architecture.major >= 9 { "a" } else { "" };
            return Ok((ImageKind::Cubin, format!("sm_{number}{suffix}")));
        }
        let older = self.architectures.iter().rev().find(|&&known| known < number && known >= Architecture::OLDEST.number());
        let (major, minor) = self.version;
        let unknown = || Error::unsupported(format!("compute capability {architecture}"), format!("NVRTC {major}.{minor}"));
        older.map(|known| (ImageKind::Ptx, format!("compute_{known}"))).ok_or_else(unknown)
    }

    /// Compiles for a [target](Compiler::target), or reads what was compiled before.
    ///
    /// # Errors
    /// [`Error::Device`] with the compiler's words.
    pub fn compile(&self, program: &Program<'_>, options: &[String], kind: ImageKind, target: &str) -> Result<Image> {
        let mut all = vec![format!("--gpu-architecture={target}"), "--std=c++17".into(), "--ptxas-options=-v".into()];
        all.extend_from_slice(options);
        let Some(cache) = &self.cache else { return self.translate(program, &all, kind) };
        let version = format!("{:?} {kind:?}", self.version);
        let texts = program.headers.iter().flat_map(|(name, text)| [*name, *text]);
        let key = Cache::key([program.name, program.source, &version].into_iter().chain(texts).chain(all.iter().map(String::as_str)));
        if let Some(image) = cache.get(&key, kind) {
            return Ok(image);
        }
        let image = self.translate(program, &all, kind)?;
        cache.put(&key, &image);
        Ok(image)
    }

    fn translate(&self, program: &Program<'_>, options: &[String], kind: ImageKind) -> Result<Image> {
        let text = |text: &str| CString::new(text).map_err(|_| Error::invalid("program", program.name, "text without a 0"));
        let (source, name) = (text(program.source)?, text(program.name)?);
        let names = program.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let texts = program.headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>>>()?;
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let [names, texts, options] = [&names, &texts, &options].map(|list| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>());
        let symbols = &self.symbols;
        let count = |list: &[*const c_char]| c_int::try_from(list.len()).unwrap_or(0);
        let mut handle: nvrtcProgram = std::ptr::null_mut();
        // SAFETY: every text ends at a 0 and lives to the end of this function; the lists are as long as said.
        let made =
            unsafe { (symbols.create)(&raw mut handle, source.as_ptr(), name.as_ptr(), count(&texts), texts.as_ptr(), names.as_ptr()) };
        check("nvrtcCreateProgram", made)?;
        let mut held = Held { symbols, handle };
        // SAFETY: as above.
        let compiled = unsafe { (symbols.compile)(held.handle, count(&options), options.as_ptr()) };
        let log = held.read("nvrtcGetProgramLog", symbols.log_size, symbols.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        if compiled != nvrtcResult::NVRTC_SUCCESS {
            return Err(Error::Device { what: format!("nvrtcCompileProgram: {compiled:?}: {}", log.trim()) });
        }
        let bytes = match kind {
            ImageKind::Cubin => held.read("nvrtcGetCUBIN", symbols.cubin_size, symbols.cubin)?,
            ImageKind::Ptx => held.read("nvrtcGetPTX", symbols.ptx_size, symbols.ptx)?,
        };
        Ok(Image { kind, bytes, log })
    }
}

/// A program, destroyed at its end.
struct Held<'a> {
    symbols: &'a CompilerSymbols,
    handle: nvrtcProgram,
}

impl Held<'_> {
    /// Reads something of which the compiler first says how long it is.
    fn read(
        &mut self,
        name: &str,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> nvrtcResult,
        read: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is alive and `bytes` is a local.
        check(name, unsafe { size(self.handle, &raw mut bytes) })?;
        let mut text = vec![0u8; bytes];
        // SAFETY: there is room for as many bytes as it has just said.
        check(name, unsafe { read(self.handle, text.as_mut_ptr().cast()) })?;
        Ok(text)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: made once, by the one who made this.
        unsafe { (self.symbols.destroy)(&raw mut self.handle) };
    }
}

fn check(name: &str, result: nvrtcResult) -> Result<()> {
    if result == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(Error::Device { what: format!("{name}: {result:?}") }) }
}
