//! The emulated CUDA driver and NVRTC as a shared library. Linked under the names `libcuda.so.1`
//! and
//! `libnvrtc.so.13` into a folder of `LD_LIBRARY_PATH`, it tests a program that was built for real
//! GPUs, and whatever calls the driver beside it. It has none of NCCL.

use std::ffi::{c_char, c_int, c_uint, c_void};

use annulus_cuda_emulator::{compiler_symbols, symbols};
use annulus_device_cuda::cudarc::{
    driver::sys::{
        CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
        CUfunction_attribute, CUmodule, CUresult, CUstream,
    },
    nvrtc::sys::{nvrtcProgram, nvrtcResult},
};

/// Exports the functions of a table under their C names.
macro_rules! export {
    ($table:expr; $($field:ident = $symbol:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            /// The function of CUDA.
            ///
            /// # Safety
            /// As CUDA requires.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($argument: $type),*) -> $result {
                // SAFETY: as the caller guarantees
                unsafe { ($table.$field)($($argument),*) }
            }
        )*
    };
}

export! {
    symbols();
    init = cuInit(a: c_uint) -> CUresult;
    device_count = cuDeviceGetCount(a: *mut c_int) -> CUresult;
    device_get = cuDeviceGet(a: *mut CUdevice, b: c_int) -> CUresult;
    device_name = cuDeviceGetName(a: *mut c_char, b: c_int, c: CUdevice) -> CUresult;
    device_attribute = cuDeviceGetAttribute(a: *mut c_int, b: CUdevice_attribute, c: CUdevice) -> CUresult;
    context_retain = cuDevicePrimaryCtxRetain(a: *mut CUcontext, b: CUdevice) -> CUresult;
    context_release = cuDevicePrimaryCtxRelease_v2(a: CUdevice) -> CUresult;
    context_set = cuCtxSetCurrent(a: CUcontext) -> CUresult;
    context_current = cuCtxGetCurrent(a: *mut CUcontext) -> CUresult;
    memory_info = cuMemGetInfo_v2(a: *mut usize, b: *mut usize) -> CUresult;
    allocate = cuMemAlloc_v2(a: *mut CUdeviceptr, b: usize) -> CUresult;
    free = cuMemFree_v2(a: CUdeviceptr) -> CUresult;
    allocate_host = cuMemAllocHost_v2(a: *mut *mut c_void, b: usize) -> CUresult;
    free_host = cuMemFreeHost(a: *mut c_void) -> CUresult;
    copy_to_device = cuMemcpyHtoDAsync_v2(a: CUdeviceptr, b: *const c_void, c: usize, d: CUstream) -> CUresult;
    copy_to_host = cuMemcpyDtoHAsync_v2(a: *mut c_void, b: CUdeviceptr, c: usize, d: CUstream) -> CUresult;
    copy_on_device = cuMemcpyDtoDAsync_v2(a: CUdeviceptr, b: CUdeviceptr, c: usize, d: CUstream) -> CUresult;
    stream_create = cuStreamCreate(a: *mut CUstream, b: c_uint) -> CUresult;
    stream_destroy = cuStreamDestroy_v2(a: CUstream) -> CUresult;
    stream_wait = cuStreamWaitEvent(a: CUstream, b: CUevent, c: c_uint) -> CUresult;
    event_create = cuEventCreate(a: *mut CUevent, b: c_uint) -> CUresult;
    event_destroy = cuEventDestroy_v2(a: CUevent) -> CUresult;
    event_record = cuEventRecord(a: CUevent, b: CUstream) -> CUresult;
    event_query = cuEventQuery(a: CUevent) -> CUresult;
    module_load = cuModuleLoadData(a: *mut CUmodule, b: *const c_void) -> CUresult;
    module_unload = cuModuleUnload(a: CUmodule) -> CUresult;
    module_function = cuModuleGetFunction(a: *mut CUfunction, b: CUmodule, c: *const c_char) -> CUresult;
    launch = cuLaunchKernel(a: CUfunction, b: c_uint, c: c_uint, d: c_uint, e: c_uint, f: c_uint, g: c_uint, h: c_uint, i: CUstream, j: *mut *mut c_void, k: *mut *mut c_void) -> CUresult;
    function_attribute = cuFuncSetAttribute(a: CUfunction, b: CUfunction_attribute, c: c_int) -> CUresult;
}

export! {
    compiler_symbols();
    version = nvrtcVersion(a: *mut c_int, b: *mut c_int) -> nvrtcResult;
    architecture_count = nvrtcGetNumSupportedArchs(a: *mut c_int) -> nvrtcResult;
    architectures = nvrtcGetSupportedArchs(a: *mut c_int) -> nvrtcResult;
    create = nvrtcCreateProgram(a: *mut nvrtcProgram, b: *const c_char, c: *const c_char, d: c_int, e: *const *const c_char, f: *const *const c_char) -> nvrtcResult;
    destroy = nvrtcDestroyProgram(a: *mut nvrtcProgram) -> nvrtcResult;
    compile = nvrtcCompileProgram(a: nvrtcProgram, b: c_int, c: *const *const c_char) -> nvrtcResult;
    log_size = nvrtcGetProgramLogSize(a: nvrtcProgram, b: *mut usize) -> nvrtcResult;
    log = nvrtcGetProgramLog(a: nvrtcProgram, b: *mut c_char) -> nvrtcResult;
    cubin_size = nvrtcGetCUBINSize(a: nvrtcProgram, b: *mut usize) -> nvrtcResult;
    cubin = nvrtcGetCUBIN(a: nvrtcProgram, b: *mut c_char) -> nvrtcResult;
    ptx_size = nvrtcGetPTXSize(a: nvrtcProgram, b: *mut usize) -> nvrtcResult;
    ptx = nvrtcGetPTX(a: nvrtcProgram, b: *mut c_char) -> nvrtcResult;
}
