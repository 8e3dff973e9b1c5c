//! CUtensorMap: layout of a tensor in global memory, for TMA (compute capability 9.0).

use annulus_core::{Error, Result};
use cudarc::driver::sys::{
    CUdeviceptr, CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use crate::{Device, library::missing, symbols::driver_error};

/// Tensor map of 16-bit elements `[batch, head, row, dim]` with boxes of 64 dims × `rows` rows of
/// one head: rows of 128 bytes in shared memory with the 128-byte swizzle. Part of a kernel's
/// arguments.
///
/// Aligned to 128 bytes, as `CUtensorMap` in `cuda.h` of CUDA 13 (64 before).
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct TensorMap([u64; 16]);

const _: () = assert!(align_of::<TensorMap>() == 128 && size_of::<TensorMap>() == 128);

impl TensorMap {
    /// Dims per box: 128 bytes, the width of the swizzle.
    pub const DIMS: u32 = 64;

    /// Stands for the map of an operand that a kernel does not load.
    pub const UNUSED: Self = Self([0; 16]);

    /// Encodes a tensor map; the memory is not read.
    ///
    /// # Shapes
    /// `lengths` of dims, rows, heads, batches; `strides` in bytes of rows, heads, batches.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a layout that TMA does not support: an address or a stride
    /// that is not a multiple of 16 bytes, or more than 256 rows; [`Error::Unsupported`] unless
    /// [`Device::has_tensor_maps`].
    pub fn new(
        device: &Device,
        address: CUdeviceptr,
        lengths: [u64; 4],
        strides: [u64; 3],
        rows: u32,
    ) -> Result<Self> {
        if !address.is_multiple_of(16)
            || strides.iter().any(|stride| !stride.is_multiple_of(16) || *stride >= 1 << 40)
        {
            let got = format!("address {address:#x}, strides {strides:?}");
            return Err(Error::invalid(
                "tensor map",
                got,
                "multiples of 16 bytes, strides below 2⁴⁰",
            ));
        }
        if lengths.iter().any(|&length| length == 0 || length > 1 << 32)
            || !(1..=256).contains(&rows)
        {
            let got = format!("lengths {lengths:?}, boxes of {rows} rows");
            return Err(Error::invalid(
                "tensor map",
                got,
                "lengths from 1 to 2³², boxes of 1 to 256 rows",
            ));
        }
        let box_lengths = [Self::DIMS, rows, 1, 1];
        let box_strides = [1; 4];
        let mut map = Self([0; 16]);
        let absent = || missing("TMA", "the driver has no cuTensorMapEncodeTiled");
        let encode = device.tensor_map_encoder().ok_or_else(absent)?;
        // SAFETY: `map` is a local of the size and the alignment of CUtensorMap; every list has the
        // length for four axes.
        let made = device.call_unchecked(|_| unsafe {
            encode(
                (&raw mut map).cast::<CUtensorMap>(),
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                4,
                address as *mut _,
                lengths.as_ptr(),
                strides.as_ptr(),
                box_lengths.as_ptr(),
                box_strides.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        });
        match made {
            CUresult::CUDA_SUCCESS => Ok(map),
            error => Err(driver_error("cuTensorMapEncodeTiled", error)),
        }
    }
}
