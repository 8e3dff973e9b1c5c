//! Numbers and lists of the caller: read as values or refused by name, and written.

use std::{slice, time::Duration};

use annulus::{Error, Result, planning::Runs};

use crate::versioned::check_pointer;

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
