//! Structs that may grow: they begin with their size, and fields are only ever appended.
//!
//! A program that was compiled with an older header passes a shorter struct: the fields that it
//! does not know are 0, which means "none" or "the default" for every appended field. A program
//! with a newer header passes a longer one: what this library does not know must be 0, else the
//! call is refused, because an argument is never ignored.

use std::{
    mem,
    ptr::{self, NonNull},
};

use annulus::{Error, Result};

/// A struct that begins with its size.
///
/// # Safety
/// The type is `repr(C)`, its first field is a `u64` with its size in bytes, and bytes that are all
/// 0 are a value of it.
pub(crate) unsafe trait Versioned: Copy {
    /// Name of the argument in errors.
    const NAME: &'static str;
    /// Bytes of the first version of the struct.
    const FIRST_BYTES: usize;
}

/// Longer than any struct that will ever be; a size beyond it was not initialised.
const MOST_BYTES: usize = 1 << 16;

/// Checks that a pointer to a value is neither NULL nor misaligned.
pub(crate) fn check_pointer<T>(name: &str, pointer: *const T) -> Result<NonNull<T>> {
    let Some(some) = NonNull::new(pointer.cast_mut()) else {
        return Err(Error::invalid(name, "NULL", "a pointer"));
    };
    if !pointer.is_aligned() {
        return Err(Error::invalid(
            name,
            format!("{pointer:p}"),
            format!("an address that is a multiple of {}", align_of::<T>()),
        ));
    }
    Ok(some)
}

/// Checks the size that a struct begins with, and returns it.
pub(crate) fn check_size<T: Versioned>(size: u64) -> Result<usize> {
    // fields are appended, never removed
    const { assert!(size_of::<T>() >= T::FIRST_BYTES) };
    usize::try_from(size)
        .ok()
        .filter(|size| (T::FIRST_BYTES..=MOST_BYTES).contains(size))
        .ok_or_else(|| {
            Error::invalid(
                format!("{}.struct_size", T::NAME),
                size,
                format!("sizeof, at least {}", T::FIRST_BYTES),
            )
        })
}

/// Reads a struct of any version.
///
/// # Errors
/// [`Error::InvalidArgument`] for NULL, a misaligned pointer or a size that no version has;
/// [`Error::Unsupported`] if a field is set that this library does not know.
///
/// # Safety
/// `pointer` is NULL, misaligned, or points to as many readable bytes as its first field says.
pub(crate) unsafe fn read<T: Versioned>(pointer: *const T) -> Result<T> {
    check_pointer(T::NAME, pointer)?;
    // SAFETY: not NULL, aligned, and the caller promises at least the first field, a u64 (trait)
    let size = check_size::<T>(unsafe { pointer.cast::<u64>().read() })?;
    // SAFETY: all-zero bytes are a value (trait)
    let mut value: T = unsafe { mem::zeroed() };
    let known = size.min(size_of::<T>());
    // SAFETY: the caller promises `size` readable bytes, `known` is no more and fits `value`, which
    // is a local and so overlaps nothing
    unsafe { ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut value).cast(), known) };
    for offset in known..size {
        // SAFETY: within the `size` bytes that the caller promises
        if unsafe { pointer.cast::<u8>().add(offset).read() } != 0 {
            return Err(Error::unsupported(
                format!("the field at byte {offset} of {}, which is not 0,", T::NAME),
                format!("annulus {}", env!("CARGO_PKG_VERSION")),
            ));
        }
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Grown {
        struct_size: u64,
        old: i64,
        new: i64,
    }

    // SAFETY: repr(C), the size first, and integers may be 0
    unsafe impl Versioned for Grown {
        const NAME: &'static str = "grown";
        const FIRST_BYTES: usize = 16;
    }

    fn read_words(words: &[u64]) -> Result<(i64, i64)> {
        // SAFETY: every test passes as many bytes as the first word says, or a size that is refused
        unsafe { read(words.as_ptr().cast::<Grown>()) }.map(|grown| (grown.old, grown.new))
    }

    #[test]
    fn older_and_newer_structs_are_read_and_unknown_fields_must_be_zero() {
        assert_eq!(read_words(&[16, 5]), Ok((5, 0)));
        assert_eq!(read_words(&[24, 5, 6]), Ok((5, 6)));
        assert_eq!(read_words(&[40, 5, 6, 0, 0]), Ok((5, 6)));
        assert!(matches!(read_words(&[40, 5, 6, 0, 1]), Err(Error::Unsupported { .. })));
        for size in [0, 8, 15, 1 << 17, u64::MAX] {
            let told = read_words(&[size, 5, 6]).unwrap_err().to_string();
            assert_eq!(told, format!("grown.struct_size: got {size}, want sizeof, at least 16"));
        }
    }

    #[test]
    fn null_and_misaligned_pointers_are_refused() {
        // SAFETY: neither is dereferenced
        let told = |pointer: *const Grown| unsafe { read(pointer) }.map(drop).unwrap_err();
        assert_eq!(told(ptr::null()).to_string(), "grown: got NULL, want a pointer");
        let words = [24u64, 0, 0, 0];
        let odd = words.as_ptr().cast::<u8>().wrapping_add(1).cast();
        assert!(told(odd).to_string().ends_with("want an address that is a multiple of 8"));
    }
}
