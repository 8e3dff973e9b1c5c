//! HIP's functions as a table of CUDA's: AMD's driver and compiler.
//!
//! | CUDA | HIP |
//! |---|---|
//! | a device's primary context | none: a device's number plus 1 stands for it |
//! | `cuCtxSetCurrent`, `cuCtxGetCurrent` | `hipSetDevice`, `hipGetDevice` |
//! | attributes of a device | other numbers |
//! | `cuMemAllocHost(p, n)` | `hipHostMalloc(p, n, 0)` |
//! | `cuFuncSetAttribute` of shared memory | not needed up to 64 KiB; more is refused |
//! | compute capability | `gcnArchName` of `hipGetDevicePropertiesR0600` |
//! | NVRTC's list of architectures | none: hipRTC is asked to compile |
//! | cubin, PTX | code object |
//!
//! # Source
//! ROCm's documentation of the HIP runtime and of hipRTC; `hip_runtime_api.h` of 5.2 to 7.1.
//! Compiled and emulated, never run on an AMD GPU.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    path::PathBuf,
    ptr,
    sync::OnceLock,
};

use annulus_core::Result;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUfunction, CUfunction_attribute,
};

use crate::{
    Api, CompilerStatus, CompilerSymbols, Status, Symbols,
    symbols::{ArchitectureName, CompilerAdapter, DriverAdapter, function, missing, open, table},
};

table! {
    /// HIP's functions that differ from CUDA's.
    pub(crate) HipSymbols => {
        device_attribute = hipDeviceGetAttribute(*mut c_int, c_int, c_int) -> Status;
        device_set = hipSetDevice(c_int) -> Status;
        device_current = hipGetDevice(*mut c_int) -> Status;
        allocate_host = hipHostMalloc(*mut *mut c_void, usize, c_uint) -> Status;
    } optional {
        version = hipRuntimeGetVersion(*mut c_int) -> Status;
        properties_of_6 = hipGetDevicePropertiesR0600(*mut c_void, c_int) -> Status;
        properties_of_5 = hipGetDeviceProperties(*mut c_void, c_int) -> Status;
    }
}

/// Functions of the loaded library: a process uses one major version of HIP, because two do not
/// share devices.
static HIP: OnceLock<HipSymbols> = OnceLock::new();
/// `hiprtcVersion` of the loaded library.
static COMPILER_VERSION: OnceLock<CompilerVersion> = OnceLock::new();

type CompilerVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> CompilerStatus;

/// Loads this machine's HIP.
///
/// # Errors
/// [`annulus_core::Error::Unsupported`] if there is none, or it lacks a function.
pub(crate) fn symbols() -> Result<Symbols> {
    let library =
        library("libamdhip64.so", &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"])
            .ok_or_else(|| missing("HIP", "no driver (libamdhip64.so was not found)"))?;
    // SAFETY: the library of this name is HIP's runtime, whose functions have the types of their
    // fields: handles and addresses are pointers or integers of the same size.
    unsafe {
        let found = HipSymbols::of(library, "HIP", Api::Hip)?;
        HIP.get_or_init(|| found);
        let own = DriverAdapter {
            device_attribute,
            context_retain,
            context_release,
            context_set,
            context_current,
            allocate_host,
            function_attribute,
        };
        let symbols = Symbols::of(library, "HIP", Api::Hip, own)?;
        let architecture_name = Some(architecture_name as ArchitectureName);
        Ok(Symbols { api: Api::Hip, architecture_name, ..symbols })
    }
}

/// Loads this machine's hipRTC, which older releases have in the driver's library.
///
/// # Errors
/// [`annulus_core::Error::Unsupported`] if there is none, or it lacks a function.
pub(crate) fn compiler_symbols() -> Result<CompilerSymbols> {
    let names = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5"];
    // SAFETY: the pointer is not called.
    let has_compiler = |library: &&'static libloading::Library| unsafe {
        function::<CompilerVersion>(library, "HIP", "hiprtcVersion").is_ok()
    };
    let older = || library("libamdhip64.so", &["libamdhip64.so.5"]).filter(has_compiler);
    let library = library("libhiprtc.so", &names)
        .or_else(older)
        .ok_or_else(|| missing("HIP", "no run-time compiler (libhiprtc.so was not found)"))?;
    // SAFETY: the library of this name is hipRTC, whose functions have NVRTC's signatures.
    unsafe {
        let version = function(library, "HIP", "hiprtcVersion")?;
        COMPILER_VERSION.get_or_init(|| version);
        let own = CompilerAdapter { version: compiler_version };
        let symbols = CompilerSymbols::of(library, "HIP", Api::Hip, own)?;
        Ok(CompilerSymbols { api: Api::Hip, ..symbols })
    }
}

/// Loads this machine's RCCL.
///
/// # Errors
/// [`annulus_core::Error::Unsupported`] if there is none, or if it needs another HIP than the one
/// in use: it would read the handles of streams as its own.
#[cfg(feature = "nccl")]
pub(crate) fn collectives() -> Result<&'static libloading::Library> {
    let library = library("librccl.so", &["librccl.so.1"])
        .ok_or_else(|| missing("RCCL", "no library (librccl.so.1 was not found)"))?;
    let drivers = loaded("libamdhip64.so");
    if drivers.len() > 1 {
        return Err(missing("RCCL", format!("it needs another HIP: {}", drivers.join(", "))));
    }
    Ok(library)
}

/// Returns the paths of the libraries in this process whose file names start with `any`.
fn loaded(any: &str) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let mut found: Vec<String> = paths
        .filter(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(any)))
        .map(str::to_owned)
        .collect();
    // a library is mapped in several pieces
    found.dedup();
    found
}

/// Loads a library: one that the process has loaded already, else the first of `names` that the
/// linker finds, else `any` in ROCm's folder, because sites often set only `ROCM_PATH`.
fn library(any: &str, names: &[&str]) -> Option<&'static libloading::Library> {
    let folders = ["ROCM_PATH", "HIP_PATH"].into_iter().filter_map(std::env::var_os);
    let folders = folders.map(PathBuf::from).chain([PathBuf::from("/opt/rocm")]);
    let in_folders = folders.map(|folder| folder.join("lib").join(any).display().to_string());
    let all: Vec<String> = loaded(any)
        .into_iter()
        .take(1)
        .chain(names.iter().map(|name| (*name).to_owned()))
        .chain(in_folders)
        .collect();
    open(&all.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Calls a function of the loaded library.
fn hip(call: impl FnOnce(&HipSymbols) -> Status) -> Status {
    HIP.get().map_or(Status::NOT_INITIALIZED, call)
}

/// The handle that stands for the context of a device.
const fn context_of(device: c_int) -> CUcontext {
    ptr::without_provenance_mut(device as usize + 1)
}

/// The device whose context a handle stands for; the first one for no context.
fn device_of(context: CUcontext) -> c_int {
    c_int::try_from(context.addr().saturating_sub(1)).unwrap_or(c_int::MAX)
}

/// Translates the attributes that devices are asked for.
unsafe extern "C" fn device_attribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> Status {
    let number = match attribute {
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 63,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 19,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED => 16,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS => 65,
        _ => return Status::INVALID_VALUE,
    };
    // SAFETY: as the caller guarantees.
    hip(|hip| unsafe { (hip.device_attribute)(value, number, device) })
}

unsafe extern "C" fn architecture_name(to: *mut c_char, len: c_int, device: CUdevice) -> Status {
    // more than the structure of any release
    let mut properties = [0u64; 512];
    let at = properties.as_mut_ptr().cast::<c_void>();
    // offset of gcnArchName: the structure of ROCm 6 under its own name, that of ROCm 5 else
    let (status, offset) = hip_properties(at, device);
    if status != Status::SUCCESS {
        return status;
    }
    let bytes: &[u8] = bytemuck::cast_slice(&properties);
    let Ok(name) = CStr::from_bytes_until_nul(&bytes[offset..]) else {
        return Status::INVALID_VALUE;
    };
    let name = name.to_bytes_with_nul();
    if !name.starts_with(b"gfx") || name.len() > len.unsigned_abs() as usize {
        return Status::INVALID_VALUE;
    }
    // SAFETY: the caller passes room for `len` characters.
    unsafe { ptr::copy_nonoverlapping(name.as_ptr().cast(), to, name.len()) };
    Status::SUCCESS
}

/// Reads the properties of a device, and returns the offset of `gcnArchName`.
fn hip_properties(to: *mut c_void, device: CUdevice) -> (Status, usize) {
    let Some(hip) = HIP.get() else { return (Status::NOT_INITIALIZED, 0) };
    match (hip.properties_of_6, hip.properties_of_5) {
        // SAFETY: `to` has room for the structure of any release.
        (Some(read), _) => (unsafe { read(to, device) }, 1160),
        // SAFETY: as above.
        (None, Some(read)) => (unsafe { read(to, device) }, 396),
        (None, None) => (Status::NOT_SUPPORTED, 0),
    }
}

unsafe extern "C" fn context_retain(context: *mut CUcontext, device: CUdevice) -> Status {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *context = context_of(device) };
    Status::SUCCESS
}

unsafe extern "C" fn context_release(_: CUdevice) -> Status {
    Status::SUCCESS
}

unsafe extern "C" fn context_set(context: CUcontext) -> Status {
    // SAFETY: no pointers.
    hip(|hip| unsafe { (hip.device_set)(device_of(context)) })
}

unsafe extern "C" fn context_current(context: *mut CUcontext) -> Status {
    let mut device = 0;
    // SAFETY: a pointer to a local.
    let status = hip(|hip| unsafe { (hip.device_current)(&raw mut device) });
    if status == Status::SUCCESS {
        // SAFETY: the caller passes a valid pointer.
        unsafe { *context = context_of(device) };
    }
    status
}

unsafe extern "C" fn allocate_host(start: *mut *mut c_void, bytes: usize) -> Status {
    // SAFETY: as the caller guarantees.
    hip(|hip| unsafe { (hip.allocate_host)(start, bytes, 0) })
}

/// Shared memory of a launch: up to 64 KiB need no attribute.
unsafe extern "C" fn function_attribute(
    _: CUfunction,
    _: CUfunction_attribute,
    value: c_int,
) -> Status {
    if value <= 64 * 1024 { Status::SUCCESS } else { Status::INVALID_VALUE }
}

/// hipRTC's major version, and the version of HIP: hipRTC's own does not change with the compiler
/// that it contains (9.0 in ROCm 5.2.3).
unsafe extern "C" fn compiler_version(major: *mut c_int, hip: *mut c_int) -> CompilerStatus {
    let Some(version) = COMPILER_VERSION.get() else { return CompilerStatus::INTERNAL_ERROR };
    // SAFETY: the caller passes valid pointers.
    let status = unsafe { version(major, hip) };
    if let Some(read) = HIP.get().and_then(|driver| driver.version) {
        // SAFETY: as above; on failure the minor version stays.
        let _ = unsafe { read(hip) };
    }
    status
}
