//! Segment ids, positions, packed lengths, dense masks and key lists of a batch.

use std::sync::Arc;

use annulus::{
    Batch, Error, Result,
    mask::{DenseMask, KeyLists},
};
use annulus_core::memory;
use ndarray::{Array2, Ix1};

use crate::{
    fields::{self, Versioned},
    tensor::{ANNULUS_F32, ANNULUS_F64, ANNULUS_I32, ANNULUS_I64, Checked, annulus_tensor},
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
    /// `[batch or 1, groups, q rows + 1, 1]`, ANNULUS_I32 or ANNULUS_I64: list n of a group of query
    /// heads has the entries offsets[n] to offsets[n + 1] - 1; groups follow each other. A pair is
    /// visible only if it is listed.
    pub key_list_offsets: *const annulus_tensor,
    /// `[entries, 1, 1, 1]`, ANNULUS_I32 or ANNULUS_I64: global key rows, ascending in each list.
    pub key_list_indices: *const annulus_tensor,
    /// As key_list_indices: an entry is then the range of keys from its index to before its end.
    /// NULL: an entry is one key.
    pub key_list_ends: *const annulus_tensor,
    /// `[listed pairs, 1, 1, 1]`, ANNULUS_F32 or ANNULUS_F64: one number that is added to the score
    /// of each listed pair. Its gradient: annulus_plan_list_bias_gradient. NULL: 0.
    pub key_list_bias: *const annulus_tensor,
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
                key_lists: self.key_lists()?.map(Arc::new),
                cum_seqlens_q: numbers("cum_seqlens_q", self.cum_seqlens_q)?,
                cum_seqlens_k: numbers("cum_seqlens_k", self.cum_seqlens_k)?,
            })
        }
    }
}

impl annulus_batch {
    /// Copies the key lists.
    ///
    /// # Safety
    /// As [`annulus_batch::copy`].
    unsafe fn key_lists(&self) -> Result<Option<KeyLists>> {
        // SAFETY: as the caller promises, for all of them
        unsafe {
            let indices = numbers("key_list_indices", self.key_list_indices)?;
            let ends = numbers("key_list_ends", self.key_list_ends)?;
            let bias = wide("key_list_bias", self.key_list_bias)?;
            let offsets = Checked::read_optional("key_list_offsets", self.key_list_offsets)?;
            let Some(offsets) = offsets else {
                let others =
                    [indices.is_some(), ends.is_some(), bias.is_some()].into_iter().any(|is| is);
                let want = "offsets, since other arrays of key lists are given";
                return match others {
                    true => Err(Error::invalid("key_list_offsets", "NULL", want)),
                    false => Ok(None),
                };
            };
            let Some(indices) = indices else {
                return Err(Error::invalid("key_list_indices", "NULL", "those of the offsets"));
            };
            offsets.expect(|element| [ANNULUS_I32, ANNULUS_I64].contains(&element.constant))?;
            let [batches, groups, lists, 1] = offsets.dims else {
                return Err(too_many_axes(&offsets, "[batch or 1, groups, q rows + 1, 1]"));
            };
            let mut planes: Vec<i64> = memory::list("key_list_offsets", batches * groups * lists)?;
            for (b, g) in (0..batches).flat_map(|b| (0..groups).map(move |g| (b, g))) {
                planes.extend((0..lists).map(|list| offsets.integer([b, g, list, 0])));
            }
            let planes = KeyLists::joined_offsets(planes.chunks_exact(lists.max(1)))?;
            let lists =
                KeyLists::from_arrays([batches, groups], &planes, &indices, ends.as_deref())?;
            match bias {
                Some(bias) => lists.with_bias(bias).map(Some),
                None => Ok(Some(lists)),
            }
        }
    }
}

/// Copies a list of f32 or f64; `None` for NULL.
///
/// # Safety
/// As of [`annulus_batch::copy`].
pub(crate) unsafe fn wide(
    name: &'static str,
    tensor: *const annulus_tensor,
) -> Result<Option<Vec<f64>>> {
    // SAFETY: as the caller promises
    let Some(tensor) = (unsafe { Checked::read_optional(name, tensor) })? else {
        return Ok(None);
    };
    // SAFETY: as the caller promises
    let copied = match unsafe { tensor.view::<f64, Ix1>() } {
        Ok(list) => memory::collect(name, list.len(), list.iter().copied()),
        Err(_) => {
            tensor.expect(|element| [ANNULUS_F32, ANNULUS_F64].contains(&element.constant))?;
            // SAFETY: as the caller promises
            let list = unsafe { tensor.view::<f32, Ix1>()? };
            memory::collect(name, list.len(), list.iter().copied().map(f64::from))
        }
    };
    copied.map(Some)
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
        return Err(too_many_axes(&tensor, "[numbers, 1, 1, 1]"));
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
