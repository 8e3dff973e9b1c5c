//! Tensor maps: what the driver would encode, in words that `warpgroup_twin.h` of the kernels reads.

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::{
    CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};

/// The first word of a map.
const MAGIC: u64 = 0x0070_616d_736e_6e61;
/// Bytes of an element.
const ELEMENT: u64 = 2;

/// Encodes a tensor of four axes of 16-bit elements, with a swizzle of 128 bytes; refuses what the driver refuses.
pub(super) unsafe extern "C" fn tensor_map(
    map: *mut CUtensorMap,
    element: CUtensorMapDataType,
    axes: c_uint,
    address: *mut c_void,
    lengths: *const u64,
    strides: *const u64,
    sides: *const c_uint,
    apart: *const c_uint,
    interleave: CUtensorMapInterleave,
    swizzle: CUtensorMapSwizzle,
    _: CUtensorMapL2promotion,
    beyond: CUtensorMapFloatOOBfill,
) -> CUresult {
    let known = element == CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16
        && axes == 4
        && interleave == CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE
        && swizzle == CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
        && beyond == CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    if !known {
        return CUresult::CUDA_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller gives a number for each of the four axes, and a stride for each but the first.
    let (lengths, strides, sides, apart) = unsafe {
        let of_four = |list: *const c_uint| std::slice::from_raw_parts(list, 4);
        (std::slice::from_raw_parts(lengths, 4), std::slice::from_raw_parts(strides, 3), of_four(sides), of_four(apart))
    };
    let address = address as u64;
    let allowed = address.is_multiple_of(16)
        && (map as u64).is_multiple_of(64)
        && lengths.iter().all(|&length| length > 0 && length <= 1 << 32)
        && strides.iter().all(|&stride| stride.is_multiple_of(16) && stride < 1 << 40)
        && sides.iter().all(|&side| side > 0 && side <= 256)
        && apart.iter().all(|&one| one == 1)
        // a row of the box is no longer than the swizzle
        && u64::from(sides[0]) * ELEMENT <= 128;
    if !allowed {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    let mut words = [0; 16];
    words[..2].copy_from_slice(&[MAGIC, address]);
    words[2..6].copy_from_slice(lengths);
    words[6] = ELEMENT;
    words[7..10].copy_from_slice(strides);
    for (pair, word) in sides.chunks_exact(2).zip(&mut words[10..12]) {
        *word = u64::from(pair[0]) | u64::from(pair[1]) << 32;
    }
    // SAFETY: the caller gives a valid pointer.
    unsafe { (*map).opaque = words };
    CUresult::CUDA_SUCCESS
}
