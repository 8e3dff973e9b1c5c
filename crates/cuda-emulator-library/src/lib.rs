//! The emulated CUDA driver and NVRTC as a shared library. Linked under the names `libcuda.so.1`
//! and
//! `libnvrtc.so.13` into a folder of `LD_LIBRARY_PATH`, it tests a program that was built for real
//! GPUs, and whatever calls the driver beside it. It has none of NCCL.

use std::ffi::{c_char, c_int, c_uint, c_void};

use annulus_cuda_emulator::{compiler_symbols, symbols};
use annulus_device_cuda::{
    CompilerStatus, Status,
    cudarc::{
        driver::sys::{
            CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
            CUfunction_attribute, CUmodule, CUstream,
        },
        nvrtc::sys::nvrtcProgram,
    },
};

/// Exports the functions of a table under their C names.
macro_rules! export {
    ($table:expr; $($field:ident$(.$unwrap:ident)? = $symbol:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            /// The function of CUDA.
            ///
            /// # Safety
            /// As CUDA requires.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($argument: $type),*) -> $result {
                // SAFETY: as the caller guarantees
                unsafe { ($table.$field$(.$unwrap())?)($($argument),*) }
            }
        )*
    };
}

export! {
    symbols();
    init = cuInit(a: c_uint) -> Status;
    device_count = cuDeviceGetCount(a: *mut c_int) -> Status;
    device_get = cuDeviceGet(a: *mut CUdevice, b: c_int) -> Status;
    device_name = cuDeviceGetName(a: *mut c_char, b: c_int, c: CUdevice) -> Status;
    device_attribute = cuDeviceGetAttribute(a: *mut c_int, b: CUdevice_attribute, c: CUdevice) -> Status;
    context_retain = cuDevicePrimaryCtxRetain(a: *mut CUcontext, b: CUdevice) -> Status;
    context_release = cuDevicePrimaryCtxRelease_v2(a: CUdevice) -> Status;
    context_set = cuCtxSetCurrent(a: CUcontext) -> Status;
    context_current = cuCtxGetCurrent(a: *mut CUcontext) -> Status;
    memory_info = cuMemGetInfo_v2(a: *mut usize, b: *mut usize) -> Status;
    allocate = cuMemAlloc_v2(a: *mut CUdeviceptr, b: usize) -> Status;
    free = cuMemFree_v2(a: CUdeviceptr) -> Status;
    allocate_host = cuMemAllocHost_v2(a: *mut *mut c_void, b: usize) -> Status;
    free_host = cuMemFreeHost(a: *mut c_void) -> Status;
    copy_to_device = cuMemcpyHtoDAsync_v2(a: CUdeviceptr, b: *const c_void, c: usize, d: CUstream) -> Status;
    copy_to_host = cuMemcpyDtoHAsync_v2(a: *mut c_void, b: CUdeviceptr, c: usize, d: CUstream) -> Status;
    copy_on_device = cuMemcpyDtoDAsync_v2(a: CUdeviceptr, b: CUdeviceptr, c: usize, d: CUstream) -> Status;
    stream_create = cuStreamCreate(a: *mut CUstream, b: c_uint) -> Status;
    stream_destroy = cuStreamDestroy_v2(a: CUstream) -> Status;
    stream_wait = cuStreamWaitEvent(a: CUstream, b: CUevent, c: c_uint) -> Status;
    event_create = cuEventCreate(a: *mut CUevent, b: c_uint) -> Status;
    event_destroy = cuEventDestroy_v2(a: CUevent) -> Status;
    event_record = cuEventRecord(a: CUevent, b: CUstream) -> Status;
    event_query = cuEventQuery(a: CUevent) -> Status;
    module_load = cuModuleLoadData(a: *mut CUmodule, b: *const c_void) -> Status;
    module_unload = cuModuleUnload(a: CUmodule) -> Status;
    module_function = cuModuleGetFunction(a: *mut CUfunction, b: CUmodule, c: *const c_char) -> Status;
    launch = cuLaunchKernel(a: CUfunction, b: c_uint, c: c_uint, d: c_uint, e: c_uint, f: c_uint, g: c_uint, h: c_uint, i: CUstream, j: *mut *mut c_void, k: *mut *mut c_void) -> Status;
    function_attribute = cuFuncSetAttribute(a: CUfunction, b: CUfunction_attribute, c: c_int) -> Status;
}

export! {
    compiler_symbols();
    version = nvrtcVersion(a: *mut c_int, b: *mut c_int) -> CompilerStatus;
    architecture_count.unwrap = nvrtcGetNumSupportedArchs(a: *mut c_int) -> CompilerStatus;
    architectures.unwrap = nvrtcGetSupportedArchs(a: *mut c_int) -> CompilerStatus;
    create = nvrtcCreateProgram(a: *mut nvrtcProgram, b: *const c_char, c: *const c_char, d: c_int, e: *const *const c_char, f: *const *const c_char) -> CompilerStatus;
    destroy = nvrtcDestroyProgram(a: *mut nvrtcProgram) -> CompilerStatus;
    compile = nvrtcCompileProgram(a: nvrtcProgram, b: c_int, c: *const *const c_char) -> CompilerStatus;
    log_size = nvrtcGetProgramLogSize(a: nvrtcProgram, b: *mut usize) -> CompilerStatus;
    log = nvrtcGetProgramLog(a: nvrtcProgram, b: *mut c_char) -> CompilerStatus;
    cubin_size = nvrtcGetCUBINSize(a: nvrtcProgram, b: *mut usize) -> CompilerStatus;
    cubin = nvrtcGetCUBIN(a: nvrtcProgram, b: *mut c_char) -> CompilerStatus;
    ptx_size = nvrtcGetPTXSize(a: nvrtcProgram, b: *mut usize) -> CompilerStatus;
    ptx = nvrtcGetPTX(a: nvrtcProgram, b: *mut c_char) -> CompilerStatus;
}
