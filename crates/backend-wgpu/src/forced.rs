//! Values that a user forces by environment variables.

use annulus_core::{Error, Result};

/// Reads the one of `all` that the environment variable `variable` names; `None` if it is not set.
///
/// # Errors
/// [`Error::InvalidArgument`] if its value names none.
pub(crate) fn forced<T: Copy, const COUNT: usize>(
    variable: &'static str,
    all: [T; COUNT],
    name: impl Fn(T) -> &'static str,
) -> Result<Option<T>> {
    let Some(value) = std::env::var_os(variable) else { return Ok(None) };
    let named = all.into_iter().find(|&one| value == name(one));
    let names = all.map(name).join(", ");
    named
        .map(Some)
        .ok_or_else(|| Error::invalid(variable, value.display(), format!("one of {names}")))
}
