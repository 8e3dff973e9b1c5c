//! What the caller passes: numbers, lists and structs, read as values or refused by name; and
//! numbers and lists that are written for the caller.
//!
//! Structs may grow: they begin with their size, and fields are only ever appended. A program that
//! was compiled with an older header passes a shorter struct: the fields that it does not know are
//! 0, which means "none" or "the default" for every appended field. A program with a newer header
//! passes a longer one: what this library does not know must be 0, else the call is refused,
//! because an argument is never ignored.

use std::{
    mem,
    ptr::{self, NonNull},
    slice,
    time::Duration,
};

use annulus::{Error, Result, planning::Runs};

/// No limit: a side of the sliding window that is open, or no prefix.
pub const ANNULUS_NONE: i64 = -1;

/// Reads a length.
pub(crate) fn length(name: &str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::invalid(name, value, "0 or more"))
}

/// Reads a number of rows or keys.
pub(crate) fn count(name: &str, value: i64) -> Result<u64> {
    length(name, value).map(|count| count as u64)
}

/// Reads a number from 1; 0 is none.
pub(crate) fn positive<T: TryFrom<i64>>(name: &str, value: i64) -> Result<Option<T>> {
    length(name, value)?;
    Ok(T::try_from(value).ok().filter(|_| value > 0))
}

/// Reads a number; [`ANNULUS_NONE`] is none.
pub(crate) fn optional(name: &str, value: i64) -> Result<Option<u64>> {
    match value {
        ANNULUS_NONE => Ok(None),
        value => u64::try_from(value)
            .map(Some)
            .map_err(|_| Error::invalid(name, value, "0 or more, or ANNULUS_NONE")),
    }
}

/// Reads a number; 0 is none.
pub(crate) fn number(value: f64) -> Option<f64> {
    (value != 0.0).then_some(value)
}

/// Reads a time; 0 is none.
pub(crate) fn seconds(name: &str, seconds: f64) -> Result<Option<Duration>> {
    let time = number(seconds).map(Duration::try_from_secs_f64).transpose();
    time.map_err(|_| Error::invalid(name, seconds, "at least 1, or 0"))
}

/// Reads a flag.
pub(crate) fn flag(name: &str, value: i32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid(name, other, "0 or 1")),
    }
}

/// Reads one of several constants, which count from 0.
pub(crate) fn one_of<T: Copy>(name: &str, value: i32, all: &[T]) -> Result<T> {
    let chosen = usize::try_from(value).ok().and_then(|value| all.get(value));
    chosen.copied().ok_or_else(|| {
        Error::invalid(name, value, format!("a constant from 0 to {}", all.len() - 1))
    })
}

/// Reads a list of the caller's. NULL is an empty list.
///
/// # Safety
/// `first` is NULL or points to `count` initialised elements, which nobody writes to during `'a`.
pub(crate) unsafe fn list<'a, T>(name: &str, first: *const T, count: i64) -> Result<&'a [T]> {
    let count = length(name, count)?;
    if count == 0 {
        return Ok(&[]);
    }
    let first = check_pointer(name, first)?;
    let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
    if bytes.is_none_or(|bytes| first.addr().get().checked_add(bytes).is_none()) {
        return Err(Error::invalid(name, format!("{count} elements"), "a list that fits memory"));
    }
    // SAFETY: not NULL, aligned, the length fits the address space, and the caller promises the
    // rest
    Ok(unsafe { slice::from_raw_parts(first.as_ptr(), count) })
}

/// Writes numbers to the places that `outs` name, unless one of the places is none.
///
/// # Safety
/// The places are NULL, misaligned or writable.
pub(crate) unsafe fn write_numbers<T, const N: usize>(
    outs: [(&str, *mut T); N],
    of: impl FnOnce() -> Result<[T; N]>,
) -> Result<()> {
    for (name, out) in outs {
        check_pointer(name, out.cast_const())?;
    }
    for ((_, out), number) in outs.into_iter().zip(of()?) {
        // SAFETY: not NULL, aligned, writable as the caller promises
        unsafe { out.write(number) };
    }
    Ok(())
}

/// Writes the length of a list to `count`, and the list itself unless `list` is NULL and `capacity`
/// 0. `of` returns the length and the elements, which are `more` than that.
///
/// # Errors
/// [`Error::InvalidArgument`], also if there is too little room.
///
/// # Safety
/// `list` points to `capacity` writable elements or is NULL, `count` to one number or is NULL.
pub(crate) unsafe fn write_list<T, I: Iterator<Item = T>>(
    (list_name, list): (&str, *mut T),
    capacity: i64,
    (count_name, count): (&str, *mut i64),
    more: usize,
    of: impl FnOnce() -> Result<(usize, I)>,
) -> Result<()> {
    let count = check_pointer(count_name, count.cast_const())?;
    let room = length("capacity", capacity)?;
    let (len, elements) = of()?;
    // SAFETY: not NULL, aligned, writable as the caller promises
    unsafe { count.write(len as i64) };
    if list.is_null() && room == 0 {
        return Ok(());
    }
    let list = check_pointer(list_name, list.cast_const())?;
    if room < len + more {
        return Err(Error::invalid("capacity", capacity, format!("at least {}", len + more)));
    }
    for (index, element) in elements.take(len + more).enumerate() {
        // SAFETY: not NULL, aligned, and the caller promises `capacity` writable elements, which
        // are more than `index`
        unsafe { list.add(index).write(element) };
    }
    Ok(())
}

/// Writes the row numbers of `of` to `rows` and their number to `count`.
///
/// # Safety
/// `rows` points to `capacity` writable numbers or is NULL, `count` to one or is NULL.
pub(crate) unsafe fn write_rows(
    [rows, count]: [*mut i64; 2],
    capacity: i64,
    of: impl FnOnce() -> Result<Runs>,
) -> Result<()> {
    let all = of()?;
    let numbers = || Ok((annulus_core::index(all.len()), all.iter()));
    // SAFETY: as the caller promises
    unsafe { write_list(("rows", rows), capacity, ("count", count), 0, numbers) }
}

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
