//! Fallible allocation of lists and tensors whose sizes follow from the caller's lengths.
//!
//! A failed allocation is [`Error::OutOfMemory`] with the name of the list and its bytes. The
//! standard collections would abort the process. All memory that is O(sequence length) is
//! allocated here or checked in the same way.
//!
//! Small lists (a few numbers per rank or message) are allocated as usual. To keep them from
//! aborting the process, each large allocation also requires `HEADROOM` further bytes: it
//! allocates them, frees them at once, and fails if there were none.

use bytemuck::Zeroable;
use memmap2::MmapOptions;
use ndarray::{Array, Dimension, IntoDimension};

use crate::{Error, Result};

/// Bytes that must be free after a large allocation: more than the small lists between two large
/// ones take, and negligible next to a problem that fills a machine's memory.
const HEADROOM: usize = 1 << 20;
/// Least size of a large allocation in bytes: the default threshold above which glibc maps memory
/// for each allocation separately (`M_MMAP_THRESHOLD`).
const LARGE: usize = 1 << 17;

/// Returns an empty list with room for `len` elements.
///
/// # Errors
/// [`Error::OutOfMemory`] naming `what`.
pub fn list<T>(what: &str, len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| out_of_memory::<T>(what, len))?;
    check_headroom::<T>(what, len)?;
    Ok(list)
}

/// Checks that a mapping of `bytes` bytes succeeds, by making and removing one.
///
/// A thread maps its stack and its signal stack, and ends the process if the second mapping fails.
/// A list does not show whether they would succeed: the allocator may take it from memory that was
/// freed but is still mapped.
///
/// # Errors
/// [`Error::OutOfMemory`] naming `what`.
pub fn check_mapping(what: &str, bytes: usize) -> Result<()> {
    MmapOptions::new().len(bytes).map_anon().map(drop).map_err(|_| out_of_memory::<u8>(what, bytes))
}

/// Reserves room for `more` elements at the end of a list. Growth is geometric, so appending many
/// small parts takes amortised constant time per element.
///
/// # Errors
/// As [`list`]; the list is unchanged.
pub fn reserve<T>(what: &str, list: &mut Vec<T>, more: usize) -> Result<()> {
    if list.capacity() - list.len() >= more {
        return Ok(());
    }
    let want = list.len().saturating_add(more);
    list.try_reserve(more).map_err(|_| out_of_memory::<T>(what, want))?;
    check_headroom::<T>(what, list.capacity())
}

/// Returns a list of `len` copies of `value`.
///
/// # Errors
/// As [`list`].
pub fn filled<T: Clone>(what: &str, len: usize, value: T) -> Result<Vec<T>> {
    let mut list = list(what, len)?;
    list.resize(len, value);
    Ok(list)
}

/// Collects at most `len` elements.
///
/// # Errors
/// As [`list`].
pub fn collect<T>(what: &str, len: usize, elements: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let mut list = list(what, len)?;
    list.extend(elements.into_iter().take(len));
    Ok(list)
}

/// Returns `len` zeros. The system allocates zeroed pages on first access, so unused pages take no
/// memory.
///
/// # Errors
/// As [`list`].
pub fn zeroed<T: Zeroable>(what: &str, len: usize) -> Result<Vec<T>> {
    let zeros = bytemuck::allocation::try_zeroed_vec(len);
    let zeros = zeros.map_err(|()| out_of_memory::<T>(what, len))?;
    check_headroom::<T>(what, len)?;
    Ok(zeros)
}

/// Returns a dense tensor of zeros.
///
/// # Errors
/// As [`list`].
pub fn zeros<T: Zeroable, S: IntoDimension>(what: &str, shape: S) -> Result<Array<T, S::Dim>> {
    let shape = shape.into_dimension();
    let len = shape.slice().iter().try_fold(1usize, |len, &axis| len.checked_mul(axis));
    let error = || out_of_memory::<T>(what, len.unwrap_or(usize::MAX));
    let zeros = zeroed(what, len.ok_or_else(error)?)?;
    Array::from_shape_vec(shape, zeros).map_err(|_| error())
}

/// Fails unless `bytes` bytes can be allocated. They are freed again at once.
///
/// For computations that allocate many small lists whose total follows from the caller's lengths:
/// checked as one, they fail as a whole before they begin. Another thread may take the memory in
/// between.
///
/// # Errors
/// As [`list`].
pub fn check_available(what: &str, bytes: u64) -> Result<()> {
    list::<u8>(what, crate::index(bytes)).map(|mut spare| {
        // or the compiler leaves out what nothing reads
        std::hint::black_box(&mut spare);
    })
}

/// Fails if fewer than `HEADROOM` bytes are free after an allocation of `len` elements.
fn check_headroom<T>(what: &str, len: usize) -> Result<()> {
    if len.saturating_mul(size_of::<T>()) >= LARGE {
        let mut spare = Vec::<u8>::new();
        spare.try_reserve_exact(HEADROOM).map_err(|_| out_of_memory::<T>(what, len))?;
        // otherwise the compiler removes an allocation that is never read
        std::hint::black_box(&mut spare);
    }
    Ok(())
}

fn out_of_memory<T>(what: &str, len: usize) -> Error {
    Error::out_of_memory(what, (len as u64).saturating_mul(size_of::<T>() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More elements than any address space can hold, also with overcommitted memory.
    const VAST: usize = 1 << 60;

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn errors_state_the_name_and_the_bytes() {
        let bytes = (VAST as u64 * 4).to_string();
        let want = format!("out of memory: dbias needs {bytes} bytes");
        assert_eq!(message(list::<f32>("dbias", VAST)), want);
        assert_eq!(message(filled("dbias", VAST, 1.0f32)), want);
        assert_eq!(message(collect("dbias", VAST, std::iter::repeat(1.0f32))), want);
        assert_eq!(message(zeroed::<f32>("dbias", VAST)), want);
        assert_eq!(message(zeros::<f32, _>("dbias", (4, 1 << 29, 1 << 29, 1))), want);
        assert_eq!(message(check_mapping("dbias", VAST * 4)), want);
        assert_eq!(check_mapping("dbias", 1 << 20), Ok(()));
        assert_eq!(message(reserve("dbias", &mut Vec::<f32>::new(), VAST)), want);
        // a shape whose number of elements overflows
        let overflow = message(zeros::<f32, _>("dbias", (1 << 40, 1 << 40, 1, 1)));
        assert!(overflow.starts_with("out of memory: dbias needs"), "{overflow}");
    }
}
