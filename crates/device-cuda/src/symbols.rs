//! Tables of the CUDA driver's and NVRTC's functions: the system's, or any with the same semantics.
//!
//! Loading of libraries at run time, and tables of their functions.

use std::ffi::{c_char, c_int, c_uint, c_void};

use annulus_core::{Error, Result};
use cudarc::{
    driver::sys::{
        CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
        CUfunction_attribute, CUmodule, CUresult, CUstream, CUtensorMap, CUtensorMapDataType,
        CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
    },
    nvrtc::sys::{nvrtcProgram, nvrtcResult},
};
use libloading::Library;

table! {
    /// Functions of the CUDA driver.
    Symbols of "CUDA" {
        init = cuInit(c_uint) -> CUresult;
        device_count = cuDeviceGetCount(*mut c_int) -> CUresult;
        device_get = cuDeviceGet(*mut CUdevice, c_int) -> CUresult;
        device_name = cuDeviceGetName(*mut c_char, c_int, CUdevice) -> CUresult;
        device_attribute = cuDeviceGetAttribute(
            *mut c_int, CUdevice_attribute, CUdevice
        ) -> CUresult;
        context_retain = cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> CUresult;
        context_release = cuDevicePrimaryCtxRelease_v2(CUdevice) -> CUresult;
        context_set = cuCtxSetCurrent(CUcontext) -> CUresult;
        context_current = cuCtxGetCurrent(*mut CUcontext) -> CUresult;
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize) -> CUresult;
        allocate = cuMemAlloc_v2(*mut CUdeviceptr, usize) -> CUresult;
        free = cuMemFree_v2(CUdeviceptr) -> CUresult;
        allocate_host = cuMemAllocHost_v2(*mut *mut c_void, usize) -> CUresult;
        free_host = cuMemFreeHost(*mut c_void) -> CUresult;
        copy_to_device = cuMemcpyHtoDAsync_v2(
            CUdeviceptr, *const c_void, usize, CUstream
        ) -> CUresult;
        copy_to_host = cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream) -> CUresult;
        copy_on_device = cuMemcpyDtoDAsync_v2(
            CUdeviceptr, CUdeviceptr, usize, CUstream
        ) -> CUresult;
        stream_create = cuStreamCreate(*mut CUstream, c_uint) -> CUresult;
        stream_destroy = cuStreamDestroy_v2(CUstream) -> CUresult;
        stream_wait = cuStreamWaitEvent(CUstream, CUevent, c_uint) -> CUresult;
        event_create = cuEventCreate(*mut CUevent, c_uint) -> CUresult;
        event_destroy = cuEventDestroy_v2(CUevent) -> CUresult;
        event_record = cuEventRecord(CUevent, CUstream) -> CUresult;
        event_query = cuEventQuery(CUevent) -> CUresult;
        module_load = cuModuleLoadData(*mut CUmodule, *const c_void) -> CUresult;
        module_unload = cuModuleUnload(CUmodule) -> CUresult;
        module_function = cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> CUresult;
        launch = cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        ) -> CUresult;
        function_attribute = cuFuncSetAttribute(
            CUfunction, CUfunction_attribute, c_int
        ) -> CUresult;
    } optional {
        event_elapsed = cuEventElapsedTime(*mut f32, CUevent, CUevent) -> CUresult;
        tensor_map = cuTensorMapEncodeTiled(
            *mut CUtensorMap, CUtensorMapDataType, c_uint, *mut c_void, *const u64, *const u64,
            *const c_uint, *const c_uint, CUtensorMapInterleave, CUtensorMapSwizzle,
            CUtensorMapL2promotion, CUtensorMapFloatOOBfill
        ) -> CUresult;
    }
}

table! {
    /// Functions of NVRTC.
    CompilerSymbols of "CUDA" {
        version = nvrtcVersion(*mut c_int, *mut c_int) -> nvrtcResult;
        architecture_count = nvrtcGetNumSupportedArchs(*mut c_int) -> nvrtcResult;
        architectures = nvrtcGetSupportedArchs(*mut c_int) -> nvrtcResult;
        create = nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char,
            *const *const c_char
        ) -> nvrtcResult;
        destroy = nvrtcDestroyProgram(*mut nvrtcProgram) -> nvrtcResult;
        compile = nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> nvrtcResult;
        log_size = nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        log = nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> nvrtcResult;
        cubin_size = nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        cubin = nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> nvrtcResult;
        ptx_size = nvrtcGetPTXSize(nvrtcProgram, *mut usize) -> nvrtcResult;
        ptx = nvrtcGetPTX(nvrtcProgram, *mut c_char) -> nvrtcResult;
    }
}

/// CU_EVENT_DISABLE_TIMING: cheaper events.
pub(crate) const NO_TIMING: c_uint = 2;

/// Converts a failed call to an error.
pub(crate) fn driver_error(name: &str, error: CUresult) -> Error {
    Error::Device { what: format!("{name}: {error:?}") }
}

impl Symbols {
    /// Loads this machine's driver.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none, or it lacks a function.
    pub fn system() -> Result<Self> {
        let library = open(&["libcuda.so.1", "libcuda.so"])
            .ok_or_else(|| missing("CUDA", "no driver (libcuda.so.1 was not found)"))?;
        // SAFETY: the library of this name is the driver.
        unsafe { Self::of(library) }
    }
}

impl CompilerSymbols {
    /// Loads this machine's compiler.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none, or it lacks a function.
    pub fn system() -> Result<Self> {
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let library = open(&names)
            .ok_or_else(|| missing("CUDA", "no run-time compiler (libnvrtc.so was not found)"))?;
        // SAFETY: the library of this name is NVRTC.
        unsafe { Self::of(library) }
    }
}

/// Loads the first of these libraries that exists. It is never unloaded, so its functions are valid
/// for the whole process.
pub(crate) fn open(names: &[&str]) -> Option<&'static Library> {
    // SAFETY: loading runs initializers; those of CUDA's libraries may run at any time, on any
    // thread.
    let found = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    // loading a library again yields the same handle
    found.map(|library| &*Box::leak(Box::new(library)))
}

/// Error for a library, function or feature that this machine lacks.
pub(crate) fn missing(what: &str, why: impl std::fmt::Display) -> Error {
    Error::unsupported(what, format!("this machine: {why}"))
}

/// Looks up the function `symbol`.
///
/// # Errors
/// [`Error::Unsupported`] if the library lacks it.
///
/// # Safety
/// `F` is a function pointer type, and the library's symbol of this name has this type.
pub(crate) unsafe fn function<F: Copy>(
    library: &'static Library,
    what: &str,
    symbol: &str,
) -> Result<F> {
    // SAFETY: as required of the caller; the library stays loaded.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| missing(what, format!("its library has no {symbol}")))
}

/// Declares a structure of function pointers that [`function`] looks up by their C names.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident of $what:literal {
        $($field:ident = $symbol:ident($($argument:ty),*) -> $result:ty;)*
    } $(optional {
        $($extra:ident = $extra_symbol:ident($($extra_argument:ty),*) -> $extra_result:ty;)*
    })?) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            $(
                #[doc = concat!("`", stringify!($symbol), "`.")]
                pub $field: unsafe extern "C" fn($($argument),*) -> $result,
            )*
            $($(
                #[doc = concat!("`", stringify!($extra_symbol), "`, if the library has it.")]
                pub $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> $extra_result>,
            )*)?
        }

        impl $name {
            /// Looks up every function.
            ///
            /// # Errors
            /// [`annulus_core::Error::Unsupported`] naming the first missing function that is not
            /// optional.
            ///
            /// # Safety
            /// The library is the one that the table describes, so that every function has its
            /// type.
            pub(crate) unsafe fn of(
                library: &'static libloading::Library,
            ) -> annulus_core::Result<Self> {
                use $crate::symbols::function;

                // SAFETY: as required of the caller.
                unsafe {
                    Ok(Self {
                        $($field: function(library, $what, stringify!($symbol))?,)*
                        $($($extra: function(library, $what, stringify!($extra_symbol)).ok(),)*)?
                    })
                }
            }
        }
    };
}
pub(crate) use table;

#[cfg(test)]
mod tests {
    use crate::{CompilerSymbols, Symbols};

    #[test]
    fn a_function_that_a_library_lacks_is_named() {
        // a library with none of CUDA's functions
        let library = super::open(&["libnone.so.1", "libc.so.6"]).unwrap();
        // SAFETY: no symbol is found, so none gets a wrong type.
        let (driver, compiler) = unsafe {
            (Symbols::of(library).unwrap_err(), CompilerSymbols::of(library).unwrap_err())
        };
        assert_eq!(
            driver.to_string(),
            "CUDA is not supported by this machine: its library has no cuInit"
        );
        assert_eq!(
            compiler.to_string(),
            "CUDA is not supported by this machine: its library has no nvrtcVersion"
        );
        #[cfg(feature = "nccl")]
        {
            // SAFETY: as above.
            let nccl = unsafe { crate::nccl::NcclSymbols::of(library) }.unwrap_err();
            assert_eq!(
                nccl.to_string(),
                "NCCL is not supported by this machine: its library has no ncclGetVersion"
            );
        }
        assert!(super::open(&["libnone.so.1"]).is_none());
    }
}
