//! Memory that may not be there: lists and tensors whose size follows from the caller's lengths.
//!
//! An allocation that fails is [`Error::OutOfMemory`], with the name of what was to be kept
//! and its bytes; the standard collections would end the process. Everything that grows with the
//! sequence is made here, or checked in the same way.
//!
//! Small lists (a few numbers a rank, a message) are made as usual. So that these do not end the
//! process in place of a large one, a large allocation also tries to get `HEADROOM` bytes more,
//! gives them back at once, and fails if it did not get them.

use bytemuck::Zeroable;
use ndarray::{Array, Dimension, IntoDimension};

use crate::{Error, Result};

/// Bytes that must be left after a large allocation: more than the small lists between two large
/// ones take, little beside any problem that fills a machine.
const HEADROOM: usize = 1 << 20;
/// From so many bytes on an allocation is large: glibc maps such memory by itself.
const LARGE: usize = 1 << 17;

/// Returns an empty list with room for `len` elements.
///
/// # Errors
/// [`Error::OutOfMemory`] naming `what`.
pub fn list<T>(what: &str, len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| out_of_memory::<T>(what, len))?;
    leaves_headroom::<T>(what, len)?;
    Ok(list)
}

/// Makes room for `more` elements at the end of a list, and for more than that if it has to grow,
/// so that lists may be made of many small parts.
///
/// # Errors
/// As [`list`]; the list stays as it is.
pub fn reserve<T>(what: &str, list: &mut Vec<T>, more: usize) -> Result<()> {
    if list.capacity() - list.len() >= more {
        return Ok(());
    }
    let want = list.len().saturating_add(more);
    list.try_reserve(more).map_err(|_| out_of_memory::<T>(what, want))?;
    leaves_headroom::<T>(what, list.capacity())
}

/// Returns `len` elements that are all `value`.
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

/// Returns `len` zeros. The system gives zeroed pages when they are first touched.
///
/// # Errors
/// As [`list`].
pub fn zeroed<T: Zeroable>(what: &str, len: usize) -> Result<Vec<T>> {
    let zeros = bytemuck::allocation::try_zeroed_vec(len);
    let zeros = zeros.map_err(|()| out_of_memory::<T>(what, len))?;
    leaves_headroom::<T>(what, len)?;
    Ok(zeros)
}

/// Returns a dense tensor of zeros.
///
/// # Errors
/// As [`list`].
pub fn zeros<T: Zeroable, S: IntoDimension>(what: &str, shape: S) -> Result<Array<T, S::Dim>> {
    let shape = shape.into_dimension();
    let len = shape.slice().iter().try_fold(1usize, |len, &axis| len.checked_mul(axis));
    let whole = || out_of_memory::<T>(what, len.unwrap_or(usize::MAX));
    let zeros = zeroed(what, len.ok_or_else(whole)?)?;
    Array::from_shape_vec(shape, zeros).map_err(|_| whole())
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

/// Fails if there is no memory left beside `len` elements that have just been made.
fn leaves_headroom<T>(what: &str, len: usize) -> Result<()> {
    if len.saturating_mul(size_of::<T>()) >= LARGE {
        let mut spare = Vec::<u8>::new();
        spare.try_reserve_exact(HEADROOM).map_err(|_| out_of_memory::<T>(what, len))?;
        // or the compiler leaves out what nothing reads
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

    /// A size that no machine has, whatever it promises.
    const VAST: usize = 1 << 60;

    fn told<T: std::fmt::Debug>(made: Result<T>) -> String {
        made.unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_had_is_named_with_its_bytes() {
        let bytes = (VAST as u64 * 4).to_string();
        let want = format!("out of memory: dbias needs {bytes} bytes");
        assert_eq!(told(list::<f32>("dbias", VAST)), want);
        assert_eq!(told(filled("dbias", VAST, 1.0f32)), want);
        assert_eq!(told(collect("dbias", VAST, std::iter::repeat(1.0f32))), want);
        assert_eq!(told(zeroed::<f32>("dbias", VAST)), want);
        assert_eq!(told(zeros::<f32, _>("dbias", (4, 1 << 29, 1 << 29, 1))), want);
        assert_eq!(told(reserve("dbias", &mut Vec::<f32>::new(), VAST)), want);
        // a shape whose elements cannot be counted
        let told = told(zeros::<f32, _>("dbias", (1 << 40, 1 << 40, 1, 1)));
        assert!(told.starts_with("out of memory: dbias needs"), "{told}");
    }

    #[test]
    fn what_can_be_had_is_as_asked_for() {
        assert_eq!(filled("x", 3, 7), Ok(vec![7; 3]));
        assert_eq!(collect("x", 2, 0..9), Ok(vec![0, 1]));
        assert_eq!(zeroed("x", 2), Ok(vec![0u64; 2]));
        assert_eq!(zeros::<f32, _>("x", (2, 0, 3)).map(|zeros| zeros.dim()), Ok((2, 0, 3)));
        assert!(
            list::<u8>("x", 1 << 20)
                .is_ok_and(|list| list.is_empty() && list.capacity() >= 1 << 20)
        );
        let mut list = vec![1, 2];
        reserve("x", &mut list, 1000).unwrap();
        assert!(list == [1, 2] && list.capacity() >= 1002);
    }
}
