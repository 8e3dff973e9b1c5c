//! Tables of the functions of a GPU's driver and of its run-time compiler: the system's, or any with
//! the same semantics.
//!
//! The tables are CUDA's. HIP has the same functions under other names; `hip.rs` adapts the few that
//! differ, so that all other code is written once. Handles have the types of CUDA's header: pointers
//! and integers, which HIP's are too.

use std::ffi::{c_char, c_int, c_uint, c_void};

use annulus_core::{Error, Result};
use cudarc::{
    driver::sys::{
        CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
        CUfunction_attribute, CUmodule, CUstream, CUtensorMap, CUtensorMapDataType,
        CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
    },
    nvrtc::sys::nvrtcProgram,
};
use libloading::Library;

/// Interface of a GPU's driver and compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    /// NVIDIA's: the CUDA driver, NVRTC.
    Cuda,
    /// AMD's: HIP, hipRTC.
    Hip,
}

impl Api {
    /// Name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA",
            Self::Hip => "HIP",
        }
    }

    /// Returns the name in this interface of one of CUDA's functions: `cuEventQuery` is
    /// `hipEventQuery` of HIP. Names of other libraries, and HIP's own, stay as they are.
    pub(crate) fn function(self, name: &str) -> String {
        if self == Self::Cuda {
            return name.to_owned();
        }
        let name = name.trim_end_matches("_v2");
        match (RENAMED.iter().find(|(cuda, _)| *cuda == name), name.strip_prefix("cu")) {
            (Some((_, hip)), _) => (*hip).to_owned(),
            (None, Some(rest)) => format!("hip{rest}"),
            _ => name.replace("nvrtc", "hiprtc").replace("CUBIN", "Code").replace("PTX", "Code"),
        }
    }
}

/// CUDA's functions, without `_v2`, whose names in HIP differ in more than the prefix.
const RENAMED: [(&str, &str); 10] = [
    ("cuCtxGetCurrent", "hipGetDevice"),
    ("cuCtxSetCurrent", "hipSetDevice"),
    ("cuDeviceGetCount", "hipGetDeviceCount"),
    ("cuEventCreate", "hipEventCreateWithFlags"),
    ("cuLaunchKernel", "hipModuleLaunchKernel"),
    ("cuMemAlloc", "hipMalloc"),
    ("cuMemAllocHost", "hipHostMalloc"),
    ("cuMemFree", "hipFree"),
    ("cuMemFreeHost", "hipHostFree"),
    ("cuStreamCreate", "hipStreamCreateWithFlags"),
];

/// Declares a status: a number, of which a few have names.
macro_rules! status {
    ($(#[$doc:meta])* $name:ident of $prefix:literal { $($constant:ident = $number:literal;)* }) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub c_int);

        impl $name {
            /// The call succeeded.
            pub const SUCCESS: Self = Self(0);
            $(
                #[doc = concat!("`", $prefix, stringify!($constant), "`.")]
                pub const $constant: Self = Self($number);
            )*
        }

        impl std::fmt::Debug for $name {
            /// Writes CUDA's name, or the number.
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.0 {
                    $($number => f.write_str(concat!($prefix, stringify!($constant))),)*
                    number => write!(f, "error {number}"),
                }
            }
        }
    };
}

status! {
    /// Result of a driver's function: 0, or the number of an error. HIP numbers the errors that have
    /// names here as CUDA does. Any number may come, so this is no enumeration.
    Status of "CUDA_ERROR_" {
        INVALID_VALUE = 1;
        OUT_OF_MEMORY = 2;
        NOT_INITIALIZED = 3;
        NO_DEVICE = 100;
        INVALID_DEVICE = 101;
        INVALID_IMAGE = 200;
        INVALID_CONTEXT = 201;
        NO_BINARY_FOR_GPU = 209;
        NOT_FOUND = 500;
        NOT_READY = 600;
        ILLEGAL_ADDRESS = 700;
        ASSERT = 710;
        LAUNCH_FAILED = 719;
        NOT_SUPPORTED = 801;
        SYSTEM_DRIVER_MISMATCH = 803;
        UNKNOWN = 999;
    }
}

status! {
    /// Result of a compiler's function, numbered alike by NVRTC and hipRTC.
    CompilerStatus of "NVRTC_ERROR_" {
        OUT_OF_MEMORY = 1;
        PROGRAM_CREATION_FAILURE = 2;
        INVALID_INPUT = 3;
        INVALID_PROGRAM = 4;
        INVALID_OPTION = 5;
        COMPILATION = 6;
        INTERNAL_ERROR = 11;
    }
}

/// Writes the name of an AMD GPU's architecture (`gcnArchName`), with a 0 at its end, to a buffer of
/// as many bytes as the second argument says.
pub type ArchitectureName = unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> Status;

table! {
    /// Functions of a GPU's driver.
    pub Symbols
        with api: Api = Api::Cuda
        with architecture_name: Option<ArchitectureName> = None
    => {
        init = cuInit(c_uint) -> Status;
        device_count = cuDeviceGetCount(*mut c_int) -> Status;
        device_get = cuDeviceGet(*mut CUdevice, c_int) -> Status;
        device_name = cuDeviceGetName(*mut c_char, c_int, CUdevice) -> Status;
        memory_info = cuMemGetInfo_v2(*mut usize, *mut usize) -> Status;
        allocate = cuMemAlloc_v2(*mut CUdeviceptr, usize) -> Status;
        free = cuMemFree_v2(CUdeviceptr) -> Status;
        free_host = cuMemFreeHost(*mut c_void) -> Status;
        copy_to_device = cuMemcpyHtoDAsync_v2(
            CUdeviceptr, *const c_void, usize, CUstream
        ) -> Status;
        copy_to_host = cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream) -> Status;
        copy_on_device = cuMemcpyDtoDAsync_v2(
            CUdeviceptr, CUdeviceptr, usize, CUstream
        ) -> Status;
        stream_create = cuStreamCreate(*mut CUstream, c_uint) -> Status;
        stream_destroy = cuStreamDestroy_v2(CUstream) -> Status;
        stream_wait = cuStreamWaitEvent(CUstream, CUevent, c_uint) -> Status;
        event_create = cuEventCreate(*mut CUevent, c_uint) -> Status;
        event_destroy = cuEventDestroy_v2(CUevent) -> Status;
        event_record = cuEventRecord(CUevent, CUstream) -> Status;
        event_query = cuEventQuery(CUevent) -> Status;
        module_load = cuModuleLoadData(*mut CUmodule, *const c_void) -> Status;
        module_unload = cuModuleUnload(CUmodule) -> Status;
        module_function = cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> Status;
        launch = cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        ) -> Status;
    } adapted DriverAdapter {
        device_attribute = cuDeviceGetAttribute(
            *mut c_int, CUdevice_attribute, CUdevice
        ) -> Status;
        context_retain = cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> Status;
        context_release = cuDevicePrimaryCtxRelease_v2(CUdevice) -> Status;
        context_set = cuCtxSetCurrent(CUcontext) -> Status;
        context_current = cuCtxGetCurrent(*mut CUcontext) -> Status;
        allocate_host = cuMemAllocHost_v2(*mut *mut c_void, usize) -> Status;
        function_attribute = cuFuncSetAttribute(
            CUfunction, CUfunction_attribute, c_int
        ) -> Status;
    } optional {
        event_elapsed = cuEventElapsedTime(*mut f32, CUevent, CUevent) -> Status;
        tensor_map = cuTensorMapEncodeTiled(
            *mut CUtensorMap, CUtensorMapDataType, c_uint, *mut c_void, *const u64, *const u64,
            *const c_uint, *const c_uint, CUtensorMapInterleave, CUtensorMapSwizzle,
            CUtensorMapL2promotion, CUtensorMapFloatOOBfill
        ) -> Status;
    }
}

table! {
    /// Functions of a run-time compiler.
    pub CompilerSymbols
        with api: Api = Api::Cuda
    => {
        create = nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char,
            *const *const c_char
        ) -> CompilerStatus;
        destroy = nvrtcDestroyProgram(*mut nvrtcProgram) -> CompilerStatus;
        compile = nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char) -> CompilerStatus;
        log_size = nvrtcGetProgramLogSize(nvrtcProgram, *mut usize) -> CompilerStatus;
        log = nvrtcGetProgramLog(nvrtcProgram, *mut c_char) -> CompilerStatus;
        cubin_size = nvrtcGetCUBINSize(nvrtcProgram, *mut usize) -> CompilerStatus;
        cubin = nvrtcGetCUBIN(nvrtcProgram, *mut c_char) -> CompilerStatus;
        ptx_size = nvrtcGetPTXSize(nvrtcProgram, *mut usize) -> CompilerStatus;
        ptx = nvrtcGetPTX(nvrtcProgram, *mut c_char) -> CompilerStatus;
    } adapted CompilerAdapter {
        version = nvrtcVersion(*mut c_int, *mut c_int) -> CompilerStatus;
    } optional {
        architecture_count = nvrtcGetNumSupportedArchs(*mut c_int) -> CompilerStatus;
        architectures = nvrtcGetSupportedArchs(*mut c_int) -> CompilerStatus;
    }
}

/// CU_EVENT_DISABLE_TIMING: cheaper events.
pub(crate) const NO_TIMING: c_uint = 2;

/// Converts a failed call of CUDA's function `name`, or of HIP's, to an error.
pub(crate) fn driver_error(api: Api, name: &str, error: Status) -> Error {
    let name = api.function(name);
    let text = format!("{error:?}");
    let what = match (api, text.strip_prefix("CUDA_ERROR_")) {
        (Api::Hip, Some(text)) => format!("{name}: error {}, {text}", error.0),
        _ => format!("{name}: {text}"),
    };
    Error::Device { what }
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

/// Declares a structure of function pointers that [`function`] looks up by their C names. Functions
/// that an interface may lack or have with another meaning are `adapted`: they have a structure of
/// their own, too, of which that interface makes a value.
macro_rules! table {
    ($(#[$doc:meta])* $vis:vis $name:ident
        $(with $constant:ident: $constant_type:ty = $value:expr)* => {
        $($field:ident = $symbol:ident($($argument:ty),*) -> $result:ty;)*
    } $(adapted $adapter:ident {
        $($own:ident = $own_symbol:ident($($own_argument:ty),*) -> $own_result:ty;)*
    })? $(optional {
        $($extra:ident = $extra_symbol:ident($($extra_argument:ty),*) -> $extra_result:ty;)*
    })?) => {
        $($crate::symbols::table! {
            /// Functions that another interface adapts.
            pub(crate) $adapter => {
                $($own = $own_symbol($($own_argument),*) -> $own_result;)*
            }
        })?

        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        $vis struct $name {
            $(
                #[doc = concat!("By default `", stringify!($value), "`.")]
                $vis $constant: $constant_type,
            )*
            $(
                #[doc = concat!("`", stringify!($symbol), "`.")]
                $vis $field: unsafe extern "C" fn($($argument),*) -> $result,
            )*
            $($(
                #[doc = concat!("`", stringify!($own_symbol), "`.")]
                $vis $own: unsafe extern "C" fn($($own_argument),*) -> $own_result,
            )*)?
            $($(
                #[doc = concat!("`", stringify!($extra_symbol), "`, if the library has it.")]
                $vis $extra: Option<unsafe extern "C" fn($($extra_argument),*) -> $extra_result>,
            )*)?
        }

        impl $name {
            /// Looks up every function under its name in `api`, except those that `adapter` gives.
            ///
            /// # Errors
            /// [`annulus_core::Error::Unsupported`] by the name `what`, naming the first missing
            /// function that is not optional.
            ///
            /// # Safety
            /// The library is the one that the table describes, so that every function has its
            /// type.
            pub(crate) unsafe fn of(
                library: &'static libloading::Library,
                what: &str,
                api: $crate::Api,
                $(adapter: $adapter,)?
            ) -> annulus_core::Result<Self> {
                use $crate::symbols::function;

                // SAFETY: as required of the caller.
                unsafe {
                    Ok(Self {
                        $($constant: $value,)*
                        $($field: function(library, what, &api.function(stringify!($symbol)))?,)*
                        $($($own: adapter.$own,)*)?
                        $($($extra: {
                            function(library, what, &api.function(stringify!($extra_symbol))).ok()
                        },)*)?
                    })
                }
            }
        }
    };
}
pub(crate) use table;

#[cfg(test)]
mod tests {
    use super::{Api, CompilerAdapter, DriverAdapter};

    #[test]
    fn a_function_that_a_library_lacks_is_named() {
        // a library with none of CUDA's functions
        let library = super::open(&["libnone.so.1", "libc.so.6"]).unwrap();
        // SAFETY: no symbol is found, so none gets a wrong type.
        let (driver, compiler) = unsafe {
            (
                DriverAdapter::of(library, "CUDA", Api::Cuda).unwrap_err(),
                CompilerAdapter::of(library, "CUDA", Api::Cuda).unwrap_err(),
            )
        };
        assert_eq!(
            driver.to_string(),
            "CUDA is not supported by this machine: its library has no cuDeviceGetAttribute"
        );
        assert_eq!(
            compiler.to_string(),
            "CUDA is not supported by this machine: its library has no nvrtcVersion"
        );
        #[cfg(feature = "nccl")]
        {
            // SAFETY: as above.
            let nccl =
                unsafe { crate::nccl::NcclSymbols::of(library, "NCCL", Api::Cuda) }.unwrap_err();
            assert_eq!(
                nccl.to_string(),
                "NCCL is not supported by this machine: its library has no ncclGetVersion"
            );
        }
        assert!(super::open(&["libnone.so.1"]).is_none());
    }
}
