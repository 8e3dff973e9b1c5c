//! Emulated modules, functions and launches.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use annulus_device_cuda::Status;
use annulus_device_cuda::cudarc::driver::sys::{
    CUfunction, CUfunction_attribute, CUmodule, CUstream,
};
use libloading::Library;

use super::{
    compiler::unwrap_image,
    context::{lock, push, with_context},
};

struct EmulatedModule {
    library: Arc<Library>,
    /// Boxed, because the address of a function is its handle.
    functions: Mutex<Vec<Arc<EmulatedFunction>>>,
}

type Entry = unsafe extern "C" fn(*const c_void);
type Emulate =
    unsafe extern "C" fn(Entry, c_uint, *const c_void, *const c_uint, c_uint, c_uint, u64) -> c_int;

/// Outcomes of a launch, as in `kernels/primitives_host.h`; others are broken rules.
const ENDED: c_int = 0;
const DEADLOCK: c_int = 2;

/// Dynamic shared memory of a launch without the attribute, as on every GPU.
const SHARED_DEFAULT: u32 = 48 * 1024;
/// Largest value of the attribute, as on compute capability 9.0.
const SHARED_MAX: u32 = 227 * 1024;

struct EmulatedFunction {
    library: Arc<Library>,
    name: String,
    entry: Entry,
    emulate: Emulate,
    argument_bytes: usize,
    threads: c_uint,
    /// Largest dynamic shared memory of a launch.
    max_shared: AtomicU32,
}

/// 128 bytes of a kernel's arguments, aligned to 128, as a structure with tensor maps requires.
#[repr(align(128))]
struct ArgumentChunk([u8; 128]);

pub(super) unsafe extern "C" fn module_load(module: *mut CUmodule, image: *const c_void) -> Status {
    with_context(|_| {
        // SAFETY: the caller passes a complete image.
        let Some(bytes) = (unsafe { unwrap_image(image.cast()) }) else {
            return Status::INVALID_IMAGE;
        };
        let Some(library) = load(bytes) else { return Status::INVALID_IMAGE };
        let loaded = EmulatedModule { library: Arc::new(library), functions: Mutex::default() };
        // SAFETY: the caller passes a valid pointer.
        unsafe { *module = Box::into_raw(Box::new(loaded)).cast() };
        Status::SUCCESS
    })
}

pub(super) unsafe extern "C" fn module_unload(module: CUmodule) -> Status {
    // SAFETY: created by `module_load`, unloaded once; queued kernels hold a reference to the
    // library.
    drop(unsafe { Box::from_raw(module.cast::<EmulatedModule>()) });
    Status::SUCCESS
}

pub(super) unsafe extern "C" fn module_function(
    function: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> Status {
    with_context(|_| {
        // SAFETY: a valid handle, and a name that ends in 0.
        let (module, name) =
            unsafe { (&*module.cast::<EmulatedModule>(), CStr::from_ptr(name).to_bytes()) };
        let size_of = [name, b"_argument_bytes"].concat();
        let threads_of = [name, b"_threads"].concat();
        // SAFETY: the library was compiled with primitives_host.h, which declares these symbols so.
        let found = unsafe {
            let entry = module.library.get::<Entry>(name);
            let bytes = module.library.get::<unsafe extern "C" fn() -> c_uint>(size_of.as_slice());
            let emulate = module.library.get::<Emulate>(b"annulus_emulate");
            let threads =
                module.library.get::<unsafe extern "C" fn() -> c_uint>(threads_of.as_slice());
            match (entry, bytes, emulate, threads) {
                (Ok(entry), Ok(bytes), Ok(emulate), Ok(threads)) => {
                    (*entry, bytes() as usize, *emulate, threads())
                }
                _ => return Status::NOT_FOUND,
            }
        };
        let (entry, argument_bytes, emulate, threads) = found;
        let max_shared = AtomicU32::new(SHARED_DEFAULT);
        let (library, name) =
            (Arc::clone(&module.library), String::from_utf8_lossy(name).into_owned());
        let made = Arc::new(EmulatedFunction {
            library,
            name,
            entry,
            emulate,
            argument_bytes,
            threads,
            max_shared,
        });
        let mut functions = lock(&module.functions);
        functions.push(made);
        // SAFETY: the caller passes a valid pointer; the function lives as long as the module.
        unsafe {
            *function = functions
                .last()
                .map_or(std::ptr::null_mut(), |made| Arc::as_ptr(made).cast_mut().cast())
        };
        Status::SUCCESS
    })
}

pub(super) unsafe extern "C" fn function_attribute(
    function: CUfunction,
    attribute: CUfunction_attribute,
    value: c_int,
) -> Status {
    with_context(|_| {
        let bytes = c_uint::try_from(value).ok().filter(|&bytes| bytes <= SHARED_MAX);
        let Some(bytes) = bytes.filter(|_| {
            attribute == CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        }) else {
            return Status::INVALID_VALUE;
        };
        // SAFETY: a valid handle.
        let function = unsafe { &*function.cast::<EmulatedFunction>() };
        function.max_shared.store(bytes, Ordering::Relaxed);
        Status::SUCCESS
    })
}

pub(super) unsafe extern "C" fn launch(
    function: CUfunction,
    x: c_uint,
    y: c_uint,
    z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    with_context(|context| {
        if [x, y, z].contains(&0) || y > 65535 || z > 65535 {
            return Status::INVALID_VALUE;
        }
        // SAFETY: a valid handle.
        let function = unsafe { &*function.cast::<EmulatedFunction>() };
        if [threads_x, threads_y, threads_z] != [function.threads, 1, 1]
            || shared_bytes > function.max_shared.load(Ordering::Relaxed)
        {
            return Status::INVALID_VALUE;
        }
        // SAFETY: the only parameter is a structure of this size.
        let arguments = unsafe {
            std::slice::from_raw_parts((*parameters).cast::<u8>(), function.argument_bytes)
        };
        let chunks: Vec<ArgumentChunk> = arguments
            .chunks(128)
            .map(|chunk| {
                let mut aligned = ArgumentChunk([0; 128]);
                aligned.0[..chunk.len()].copy_from_slice(chunk);
                aligned
            })
            .collect();
        let library = Arc::clone(&function.library);
        let EmulatedFunction { entry, emulate, threads, .. } = *function;
        *lock(&context.blocks).entry(function.name.clone()).or_default() +=
            u64::from(x) * u64::from(y) * u64::from(z);
        let seed = context.seed.load(Ordering::Relaxed);
        let mistake = context.mistake.load(Ordering::Relaxed);
        push(context, stream, move || {
            // SAFETY: the kernel gets its own argument structure; memory is freed only after queued
            // work.
            let outcome = unsafe {
                emulate(
                    entry,
                    threads,
                    chunks.as_ptr().cast(),
                    [x, y, z].as_ptr(),
                    shared_bytes,
                    mistake,
                    seed,
                )
            };
            drop(library);
            if outcome == DEADLOCK {
                context.deadlocks.fetch_add(1, Ordering::Relaxed);
            }
            outcome == ENDED
        })
    })
}

/// Loads a shared library from memory, through a temporary file that is removed at once.
fn load(bytes: &[u8]) -> Option<Library> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = format!(
        "annulus-emulated-{}-{}.so",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, bytes).ok()?;
    // SAFETY: compiled from our kernels; it has no initializers with side effects.
    let library = unsafe { Library::new(&path) }.ok();
    std::fs::remove_file(&path).unwrap_or_default();
    library
}
