//! annulus errors as the exceptions of `annulus/_errors.py`.

use annulus::Error;
use pyo3::prelude::*;

/// Builds the exception of an error: its class, message, stable code and, where there is one, the
/// argument's name.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let argument = match error {
        Error::InvalidArgument { argument, .. } => Some(argument.as_str()),
        _ => None,
    };
    let made = py
        .import("annulus._errors")
        .and_then(|module| module.getattr("from_code"))
        .and_then(|make| make.call1((error.code(), error.to_string(), argument)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}

/// Builds the exception of an argument without meaning.
pub(crate) fn invalid(
    py: Python<'_>,
    argument: &str,
    got: impl ToString,
    want: impl ToString,
) -> PyErr {
    raise(py, &Error::invalid(argument, got, want))
}
