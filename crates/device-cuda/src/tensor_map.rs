//! How a tensor lies in memory, as the copy engine of a GPU of compute capability 9.0 is told.

use annulus_core::{Error, Result};
use cudarc::driver::sys::{
    CUdeviceptr, CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use crate::{Device, device::fault};

/// A tensor of 16-bit elements `[batch, head, row, dim]` and the box of it that is copied at once: 64 dims of so many rows of one head, 128 bytes a
/// row in shared memory, their 16-byte chunks swizzled. Part of a kernel's arguments.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct TensorMap([u64; 16]);

impl TensorMap {
    /// Dims of a box.
    pub const DIMS: u32 = 64;

    /// Describes memory; it is not read.
    ///
    /// # Shapes
    /// `lengths` of dims, rows, heads, batches; `strides` in bytes from one row, head, batch to the next; a box has `rows` rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the copy engine cannot do it: an address or a stride that is not a multiple of 16, more than 256 rows.
    pub fn new(device: &Device, address: CUdeviceptr, lengths: [u64; 4], strides: [u64; 3], rows: u32) -> Result<Self> {
        if !address.is_multiple_of(16) || strides.iter().any(|stride| !stride.is_multiple_of(16) || *stride >= 1 << 40) {
            let got = format!("address {address:#x}, strides {strides:?}");
            return Err(Error::invalid("tensor map", got, "multiples of 16 bytes, strides below 2⁴⁰"));
        }
        if lengths.iter().any(|&length| length == 0 || length > 1 << 32) || !(1..=256).contains(&rows) {
            let got = format!("lengths {lengths:?}, boxes of {rows} rows");
            return Err(Error::invalid("tensor map", got, "lengths from 1 to 2³², boxes of 1 to 256 rows"));
        }
        let (sides, apart) = ([Self::DIMS, rows, 1, 1], [1; 4]);
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: `map` is a local, aligned as its type says; every list has as many numbers as four axes need.
        let made = device.plain(|symbols| unsafe {
            (symbols.tensor_map)(
                &raw mut map,
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                4,
                address as *mut _,
                lengths.as_ptr(),
                strides.as_ptr(),
                sides.as_ptr(),
                apart.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        });
        match made {
            CUresult::CUDA_SUCCESS => Ok(Self(map.opaque)),
            error => Err(fault("cuTensorMapEncodeTiled", error)),
        }
    }
}
