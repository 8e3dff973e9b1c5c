//! Segment ids, positions, packed lengths and dense masks of a batch.

use annulus::{Batch, Error, Result, mask::DenseMask};
use annulus_core::memory;
use ndarray::Array2;

use crate::{
    fields::{self, Versioned},
    tensor::{ANNULUS_I32, ANNULUS_I64, Checked, annulus_tensor},
};

/// The part of a batch that decides which pairs are visible. NULL: no such condition.
///
/// Over MPI, `rows` are the rows of the calling rank in its local order; in an
/// in-process ring they are all rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_batch {
    /// sizeof(annulus_batch).
    pub struct_size: u64,
    /// `[batch, q rows, 1, 1]`, ANNULUS_I32. A pair is visible only if both ids are equal and not
    /// negative. Ids of one side serve for both if the lengths agree.
    pub q_segment_ids: *const annulus_tensor,
    /// `[batch, kv rows, 1, 1]`, ANNULUS_I32.
    pub kv_segment_ids: *const annulus_tensor,
    /// Positions i', `[batch, q rows, 1, 1]`, ANNULUS_I64. Default: row numbers.
    pub q_positions: *const annulus_tensor,
    /// Positions j', `[batch, kv rows, 1, 1]`, ANNULUS_I64. Default: row numbers.
    pub kv_positions: *const annulus_tensor,
    /// `[batch or 1, q_heads or 1, q rows, all keys]`, an integer type or ANNULUS_BOOL. A pair is
    /// visible only if its element is not 0.
    pub attention_mask: *const annulus_tensor,
    /// `[sequences + 1, 1, 1, 1]`, ANNULUS_I32 or ANNULUS_I64: first rows of packed sequences and
    /// the end of the last, ascending from 0, whole on every rank. Lengths of one side serve for
    /// both if q_len = kv_len.
    pub cum_seqlens_q: *const annulus_tensor,
    /// `[sequences + 1, 1, 1, 1]`, ANNULUS_I32 or ANNULUS_I64.
    pub cum_seqlens_k: *const annulus_tensor,
}

// SAFETY: repr(C), begins with its size, and pointers may be null
unsafe impl Versioned for annulus_batch {
    const NAME: &'static str = "batch";
    const FIRST_BYTES: usize = 64;
}

impl annulus_batch {
    /// Copies what the tensors hold.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor, [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// Every pointer is NULL, misaligned or points to a tensor whose elements are initialised and
    /// which nobody writes to meanwhile.
    pub(crate) unsafe fn copy(&self) -> Result<Batch> {
        // read from 32 bits
        let id = |id| i32::try_from(id).unwrap_or(i32::MIN);
        // SAFETY: as the caller promises, for all of them
        unsafe {
            Ok(Batch {
                q_segment_ids: rows("q_segment_ids", self.q_segment_ids, ANNULUS_I32, id)?,
                kv_segment_ids: rows("kv_segment_ids", self.kv_segment_ids, ANNULUS_I32, id)?,
                q_positions: rows("q_positions", self.q_positions, ANNULUS_I64, |at| at)?,
                kv_positions: rows("kv_positions", self.kv_positions, ANNULUS_I64, |at| at)?,
                attention_mask: mask(self.attention_mask)?,
                key_lists: None,
                cum_seqlens_q: numbers("cum_seqlens_q", self.cum_seqlens_q)?,
                cum_seqlens_k: numbers("cum_seqlens_k", self.cum_seqlens_k)?,
            })
        }
    }
}

/// Copies a batch; `None` for NULL.
///
/// # Safety
/// `batch` is NULL, misaligned or points to an initialised batch, whose tensors nobody writes to
/// meanwhile.
pub(crate) unsafe fn copied(batch: *const annulus_batch) -> Result<Option<Batch>> {
    if batch.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller promises
    unsafe { fields::read(batch).and_then(|batch| batch.copy()) }.map(Some)
}

fn too_many_axes(tensor: &Checked, want: &str) -> Error {
    Error::invalid(format!("{}.dims", tensor.name), format!("{:?}", tensor.dims), want)
}

/// Copies one number per batch row and row.
///
/// # Safety
/// As of [`annulus_batch::copy`].
unsafe fn rows<T: bytemuck::Zeroable>(
    name: &'static str,
    tensor: *const annulus_tensor,
    constant: i32,
    read: impl Fn(i64) -> T,
) -> Result<Option<Array2<T>>> {
    // SAFETY: as the caller promises
    let Some(tensor) = (unsafe { Checked::read_optional(name, tensor) })? else {
        return Ok(None);
    };
    tensor.expect(|element| element.constant == constant)?;
    let [batch, rows, 1, 1] = tensor.dims else {
        return Err(too_many_axes(&tensor, "[batch, rows, 1, 1]"));
    };
    let mut copy = memory::zeros(name, (batch, rows))?;
    for ((b, row), number) in copy.indexed_iter_mut() {
        // SAFETY: the indices are those of a shape that is the tensor's, of an integer type
        *number = read(unsafe { tensor.integer([b, row, 0, 0]) });
    }
    Ok(Some(copy))
}

/// Copies a list of numbers.
///
/// # Safety
/// As of [`annulus_batch::copy`].
unsafe fn numbers(name: &'static str, tensor: *const annulus_tensor) -> Result<Option<Vec<i64>>> {
    // SAFETY: as the caller promises
    let Some(tensor) = (unsafe { Checked::read_optional(name, tensor) })? else {
        return Ok(None);
    };
    tensor.expect(|element| [ANNULUS_I32, ANNULUS_I64].contains(&element.constant))?;
    let [count, 1, 1, 1] = tensor.dims else {
        return Err(too_many_axes(&tensor, "[sequences + 1, 1, 1, 1]"));
    };
    // SAFETY: the index is below the length, of an integer type
    let all = (0..count).map(|index| unsafe { tensor.integer([index, 0, 0, 0]) });
    memory::collect(name, count, all).map(Some)
}

/// Copies a dense mask, one bit per pair.
///
/// # Safety
/// As of [`annulus_batch::copy`].
unsafe fn mask(tensor: *const annulus_tensor) -> Result<Option<DenseMask>> {
    // SAFETY: as the caller promises
    let Some(tensor) = (unsafe { Checked::read_optional("attention_mask", tensor) })? else {
        return Ok(None);
    };
    tensor.expect(|element| element.float.is_none())?;
    // SAFETY: indices of the tensor's own shape, of an integer type
    DenseMask::try_from_fn(tensor.dims, |index| unsafe { tensor.integer(index) != 0 }).map(Some)
}
