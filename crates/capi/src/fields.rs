//! Fields of structs of C, read as values or refused by name.

use std::time::Duration;

use annulus::{Error, Result};

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
