//! Emulated tensor maps, in a layout that `warpgroup_host.h` of the kernels decodes.

use std::ffi::{c_uint, c_void};

use annulus_device_cuda::cudarc::driver::sys::{
    CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

/// First word of a map.
const MAGIC: u64 = 0x0070_616d_736e_6e61;
/// Bytes per element.
const ELEMENT: u64 = 2;

/// Encodes a four-axis tensor of 16-bit elements with the 128-byte swizzle; rejects what the driver
/// rejects.
pub(super) unsafe extern "C" fn tensor_map(
    map: *mut CUtensorMap,
    element: CUtensorMapDataType,
    axes: c_uint,
    address: *mut c_void,
    lengths: *const u64,
    strides: *const u64,
    box_lengths: *const c_uint,
    box_strides: *const c_uint,
    interleave: CUtensorMapInterleave,
    swizzle: CUtensorMapSwizzle,
    _: CUtensorMapL2promotion,
    beyond: CUtensorMapFloatOOBfill,
) -> CUresult {
    let supported = element == CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16
        && axes == 4
        && interleave == CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE
        && swizzle == CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
        && beyond == CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    if !supported {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    // alignas(128) in cuda.h of CUDA 13
    if !(map as usize).is_multiple_of(128) {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the caller passes a number for each of the four axes, and strides for all but the
    // first.
    let (lengths, strides, box_lengths, box_strides) = unsafe {
        let of_four = |list: *const c_uint| std::slice::from_raw_parts(list, 4);
        (
            std::slice::from_raw_parts(lengths, 4),
            std::slice::from_raw_parts(strides, 3),
            of_four(box_lengths),
            of_four(box_strides),
        )
    };
    let address = address as u64;
    let allowed = address.is_multiple_of(16)
        && (map as u64).is_multiple_of(64)
        && lengths.iter().all(|&length| length > 0 && length <= 1 << 32)
        && strides.iter().all(|&stride| stride.is_multiple_of(16) && stride < 1 << 40)
        && box_lengths.iter().all(|&side| side > 0 && side <= 256)
        && box_strides.iter().all(|&one| one == 1)
        // a row of the box fits the swizzle
        && u64::from(box_lengths[0]) * ELEMENT <= 128;
    if !allowed {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    let mut words = [0; 16];
    words[..2].copy_from_slice(&[MAGIC, address]);
    words[2..6].copy_from_slice(lengths);
    words[6] = ELEMENT;
    words[7..10].copy_from_slice(strides);
    for (pair, word) in box_lengths.chunks_exact(2).zip(&mut words[10..12]) {
        *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { (*map).opaque = words };
    CUresult::CUDA_SUCCESS
}
